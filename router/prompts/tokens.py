"""A model's own tokenizer and chat template: texts and chats -> the token ids that the engine will see.

A folder holds `tokenizer.json`, and `chat_template.jinja` or a `chat_template` in `tokenizer_config.json`: what every model on the
hub has, and what engines serve from. Its `config.json`, where it is there too, tells the models whose chats the engine writes in a way of
its own (`chat_refusal`).

Invariant: either the ids are exactly the engine's, or `UnsupportedPrompt` is raised. A guess would be worse than none: a wrong chain
names blocks that nobody holds, and each forecast made from it would be wrong without a word.

Rejected: transformers' AutoTokenizer (imports seconds of code, and runs code from the model's folder).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from router.prompts.asked import Chat
from router.prompts.conversation import Message, UnsupportedPrompt, conversation, tool_for_template
from router.prompts.segments import DEFAULT_BYTES, SegmentCache, encoded
from router.prompts.templates import ChatTemplate, Prepared, environment
from schemas.block_hash import U32
from schemas.settings import SettingsError

__all__ = ["LocalTokenizer", "UnsupportedPrompt"]

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OWN_WRITERS = frozenset(("gpt_oss", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k3", "kimi_audio", "inkling"))
"""Model types whose chats vLLM 0.32 writes by code instead of the chat template."""
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>")
_PROBES = ("a", "", " b", "x y\n")


class LocalTokenizer:
    """One model's tokenizer and chat template. Safe to use from several threads at once, and others go on meanwhile (`encoded`)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, str],
        special: Mapping[str, str],
        cache_bytes: int = DEFAULT_BYTES,
        chat_refusal: str | None = None,
        lower_case: bool = False,
        adds: Mapping[str, Any] | None = None,
    ) -> None:
        """chat_refusal: why chats cannot be told here. lower_case: an embedding model's engine lowers texts first. adds: of
        tokenizer_config.json, whether the engine's tokenizer adds beginning and end tokens (`add_bos_token`, `add_eos_token`)."""
        self._tokenizer = tokenizer
        self._segments = SegmentCache.of(tokenizer, cache_bytes)
        self._around = _added_around(tokenizer)
        told = [(adds or {}).get(f"add_{name}_token") for name in ("bos", "eos")]
        done = [None, None] if self._around is None else [len(ids) > 0 for ids in self._around]
        self.added_are_sure = all(t == d or not isinstance(t, bool) or d is None for t, d in zip(told, done, strict=True))
        """Whether the folder's files tell the same of beginning and end tokens: some models' tokenizers heed one file, some the other."""
        env = environment()
        self._special = dict(special)
        self._templates = {name: ChatTemplate.of(source, env) for name, source in templates.items()}
        self.chat_refusal = chat_refusal
        self.lower_case = lower_case

    @classmethod
    def from_dir(cls, path: Path | str, cache_bytes: int = DEFAULT_BYTES) -> LocalTokenizer:
        """Reads tokenizer.json and the chat template of `path`. Raises SettingsError that says what is missing or broken and what to do."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise SettingsError(
                f"tokenizer {folder}: there is no {file}; copy tokenizer.json, tokenizer_config.json and chat_template.jinja from the "
                "model's folder there, name another folder with `tokenizer` in the fleet file's pool, or leave it out: then the "
                "engine's /tokenize is asked"
            )
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as e:  # tokenizers raises bare Exception
            raise SettingsError(f"tokenizer {file} cannot be read: {e}") from e
        tokenizer.no_padding()
        tokenizer.no_truncation()
        config = _json_object(folder / "tokenizer_config.json")
        lower_case = _json_object(folder / "sentence_bert_config.json").get("do_lower_case") is True
        refusal = _chat_refusal(folder, tokenizer)
        try:
            return cls(tokenizer, _templates(folder, config), _special_tokens(folder, config), cache_bytes, refusal, lower_case, config)
        except jinja2.TemplateSyntaxError as e:
            raise SettingsError(f"tokenizer {folder}: the chat template is broken at line {e.lineno}: {e.message}") from e

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> U32:
        """Token ids of a chat request, u32, shape (n,). `messages` and `tools` as in the OpenAI body. Raises UnsupportedPrompt."""
        return self.ids(self.render(messages, tools, add_generation_prompt, **template_kwargs), add_special_tokens=False)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt's text as the chat template writes it. Raises UnsupportedPrompt."""
        return self.rendered(Chat(messages, tools, template_kwargs | {"add_generation_prompt": add_generation_prompt}))

    def rendered(self, chat: Chat) -> str:
        """The same for a Chat."""
        template = self.template(chat)
        return template.render(self.conversation(template, chat.messages), self.template_values(chat))

    def template(self, chat: Chat) -> ChatTemplate:
        """The template that writes this chat. Raises UnsupportedPrompt."""
        if self.chat_refusal is not None:
            raise UnsupportedPrompt(self.chat_refusal)
        found = self._templates.get("tool_use") if chat.tools else None
        found = found or self._templates.get("default")
        if found is None:
            raise UnsupportedPrompt("the tokenizer's folder has no chat template")
        return found

    @staticmethod
    def conversation(template: ChatTemplate, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages as that template gets them. Raises UnsupportedPrompt."""
        return conversation(messages, template.wrap_parts, template.knows_developer, template.knows_reasoning)

    def template_values(self, chat: Chat) -> dict[str, Any]:
        """What the template gets besides messages. Raises UnsupportedPrompt."""
        return {**self._special, **chat.values, "tools": [Prepared(tool_for_template(t)) for t in chat.tools] if chat.tools else None}

    def text(self, prompt: str, add_special_tokens: bool = True) -> U32:
        """Token ids of a plain prompt, u32, shape (n,), with the tokenizer's own beginning-of-text token if it has one."""
        return self.ids(prompt, add_special_tokens)

    def ids(self, text: str, add_special_tokens: bool) -> U32:
        """Token ids of a prompt's final text, u32, shape (n,)."""
        return self._ids(text, add_special_tokens)

    def _ids(self, text: str, special: bool) -> U32:
        if self._segments is None or (special and self._around is None):
            return encoded(self._tokenizer, text, special)
        return self.with_added(self._segments.ids(text), special)

    def ids_if_quick(self, text: str, add_special_tokens: bool, new_characters: int) -> U32 | None:
        """The same if at most so many characters have to be tokenized anew; else None."""
        if len(text) <= new_characters:
            return self._ids(text, add_special_tokens)
        if self._segments is None or (add_special_tokens and self._around is None):
            return None
        found = self._segments.ids_if_seen(text, new_characters)
        return None if found is None else self.with_added(found, add_special_tokens)

    def with_added(self, ids: U32, add_special_tokens: bool) -> U32:
        """With the tokenizer's own beginning and end tokens, where they are asked for and fixed."""
        if not add_special_tokens or self._around is None or not any(map(len, self._around)):
            return ids
        return np.concatenate([self._around[0], ids, self._around[1]])

    @property
    def added_are_fixed(self) -> bool:
        """Whether its beginning and end tokens are the same for each text."""
        return self._around is not None

    @property
    def added_before(self) -> int:
        """How many tokens of its own it puts in front of a text, where they are fixed."""
        return 0 if self._around is None else len(self._around[0])

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of these ids, special tokens included."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))

    @property
    def vocabulary_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def segments(self) -> SegmentCache | None:
        """Token ids kept from earlier prompts; None: this tokenizer's pieces do not stand alone."""
        return self._segments


def _added_around(tokenizer: Tokenizer) -> tuple[U32, U32] | None:
    """The tokens that it adds before and after each text; None: it does more than that."""
    if not tokenizer.num_special_tokens_to_add(is_pair=False):
        return np.empty(0, np.uint32), np.empty(0, np.uint32)
    found: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for probe in _PROBES:
        plain, whole = encoded(tokenizer, probe, special=False).tolist(), encoded(tokenizer, probe, special=True).tolist()
        fits = {
            (tuple(whole[:i]), tuple(whole[i + len(plain) :]))
            for i in range(len(whole) - len(plain) + 1)
            if whole[i:][: len(plain)] == plain
        }
        found = fits if probe == _PROBES[0] else found & fits
    if len(found) != 1:
        return None
    before, after = found.pop()
    return np.array(before, np.uint32), np.array(after, np.uint32)


def _chat_refusal(folder: Path, tokenizer: Tokenizer) -> str | None:
    kind = _json_object(folder / "config.json").get("model_type")
    if kind in _OWN_WRITERS:
        return f"the engine writes chats of {kind} by code of its own, not by the chat template"
    if all(tokenizer.token_to_id(t) is not None for t in _HARMONY):
        return "the engine writes chats in the Harmony form by code of its own, not by the chat template"
    if (folder / "tekken.json").is_file():
        return "the engine writes chats by Mistral's own tokenizer"
    return None


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text()}
    found = config.get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list):  # several named templates
        return {str(t["name"]): str(t["template"]) for t in found}
    return {}


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    out = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name, _json_object(folder / "special_tokens_map.json").get(name))
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            out[name] = value
    return out


def _json_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except ValueError as e:
        raise SettingsError(f"tokenizer file {file} is no JSON: {e}") from e
    if not isinstance(content, dict):
        raise SettingsError(f"tokenizer file {file} must hold a JSON object")
    return content
