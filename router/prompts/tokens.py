"""From a request's prompt to the token ids that the engine will see, computed here with the model's own tokenizer and chat template.

A folder holds `tokenizer.json`, and `chat_template.jinja` or a `chat_template` in `tokenizer_config.json`: what every model on the
hub has, and what engines serve from. The steps before the template are vLLM's (content parts, tool call arguments, tool defaults), the
template environment is transformers' (sandboxed, immutable, trimmed blocks, `tojson` without HTML escapes).

Invariant: either the ids are exactly the engine's, or `UnsupportedPrompt` is raised. A guess would be worse than none: a wrong chain
names blocks that nobody holds, and each forecast made from it would be wrong without a word. So prompts with images, audio or a
template of the client's own are refused here.

Rejected: transformers' AutoTokenizer (imports seconds of code, and runs code from the model's folder).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy.typing as npt
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from router.prompts.segments import SegmentCache, encoded
from schemas.block_hash import U32
from schemas.settings import SettingsError

Message = Mapping[str, Any]

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TEXT_PARTS = ("text", "input_text", "output_text")


class UnsupportedPrompt(ValueError):  # noqa: N818 - a value, named for what it is
    """This prompt's token ids cannot be told exactly here; the message says why. Not the client's fault: the engine may well take it."""


class LocalTokenizer:
    """One model's tokenizer and chat template. Safe to use from several threads at once, and others go on meanwhile (`encoded`)."""

    def __init__(self, tokenizer: Tokenizer, templates: Mapping[str, str], special: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._segments = SegmentCache.of(tokenizer)
        self._adds_tokens = tokenizer.num_special_tokens_to_add(is_pair=False) > 0
        self._special = dict(special)
        env = _environment()
        self._templates = {name: env.from_string(source) for name, source in templates.items()}
        self._wraps_parts = {name: _iterates_content(env, source) for name, source in templates.items()}

    @classmethod
    def from_dir(cls, path: Path | str) -> LocalTokenizer:
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
        try:
            return cls(tokenizer, _templates(folder, config), _special_tokens(folder, config))
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
        text = self.render(messages, tools, add_generation_prompt, **template_kwargs)
        return self._ids(text, special=False)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt's text as the chat template writes it. Raises UnsupportedPrompt."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise UnsupportedPrompt("the tokenizer's folder has no chat template")
        wrap = self._wraps_parts[name]
        try:
            return self._templates[name].render(
                **self._special
                | template_kwargs
                | {
                    "messages": [_conversation_message(m, wrap) for m in messages],
                    "tools": [_tool(t) for t in tools] if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except UnsupportedPrompt:
            raise
        except Exception as e:  # templates are foreign code and may raise anything
            raise UnsupportedPrompt(f"the chat template does not take this conversation: {type(e).__name__}: {e}") from e

    def text(self, prompt: str, add_special_tokens: bool = True) -> U32:
        """Token ids of a plain prompt, u32, shape (n,), with the tokenizer's own beginning-of-text token if it has one."""
        return self._ids(prompt, special=add_special_tokens)

    def ids(self, text: str, add_special_tokens: bool) -> U32:
        """Token ids of a prompt's final text, u32, shape (n,)."""
        return self._ids(text, add_special_tokens)

    def ids_if_quick(self, text: str, add_special_tokens: bool, new_characters: int) -> U32 | None:
        """The same if at most so many characters have to be tokenized anew; else None."""
        if len(text) <= new_characters:
            return self._ids(text, add_special_tokens)
        if self._segments is None or (add_special_tokens and self._adds_tokens):
            return None
        return self._segments.ids_if_seen(text, new_characters)

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

    def _ids(self, text: str, special: bool) -> U32:
        if self._segments is not None and not (special and self._adds_tokens):
            return self._segments.ids(text)
        return encoded(self._tokenizer, text, special)


def _conversation_message(message: Message, wrap_parts: bool) -> dict[str, Any]:
    """What vLLM hands to the template: text parts joined by line ends, or all content as parts when the template loops over them."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UnsupportedPrompt("a message must be an object with a role")
    texts = _texts(message.get("content"))
    out: dict[str, Any] = {
        "role": message["role"],
        "content": [{"type": "text", "text": t} for t in texts] if wrap_parts else "\n".join(texts),
    }
    if message["role"] == "assistant":
        if message.get("tool_calls") is not None:
            out["tool_calls"] = [_tool_call(c) for c in message["tool_calls"]]
        reasoning = message.get("reasoning", message.get("reasoning_content"))
        if reasoning is not None:
            out["reasoning"] = out["reasoning_content"] = reasoning
    elif message["role"] == "tool" and "tool_call_id" in message:
        out["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        out["name"] = message["name"]
    return out


def _texts(content: object) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise UnsupportedPrompt("a message's content must be text or a list of parts")
    out = []
    for part in content:
        if isinstance(part, str):
            out.append(part)
        elif (
            isinstance(part, Mapping)
            and isinstance(part.get("text"), str)
            and part.get("type", "text") in ("text", "input_text", "output_text")
        ):
            out.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UnsupportedPrompt(f"content part {kind!r} has tokens that only the engine knows")
    return out


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments travel as JSON text; the template gets them parsed."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments")
    if not isinstance(arguments, (dict, list)):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, TypeError) as e:
            raise UnsupportedPrompt("a tool call's arguments are no JSON") from e
    return {**call, "function": {**function, "arguments": arguments}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool in the order and with the nulls that the engine's request model gives it."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    filled = {"name": function.get("name"), "description": None, "parameters": None} | dict(function)
    return {"type": tool.get("type", "function"), "function": filled} | {k: v for k, v in tool.items() if k not in ("type", "function")}


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


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it only shows its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 asks for

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)  # local time, as the engine's template sees it


def _iterates_content(env: jinja2.Environment, source: str) -> bool:
    """Whether the template loops over a message's content: then vLLM gives it parts, else text (its content format `auto`)."""

    def is_content(node: jinja2.nodes.Node) -> bool:
        if isinstance(node, jinja2.nodes.Getitem):
            return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
        return isinstance(node, jinja2.nodes.Getattr) and node.attr == "content"

    tree = env.parse(source)
    names = {a.target.name for a in tree.find_all(jinja2.nodes.Assign) if isinstance(a.target, jinja2.nodes.Name) and is_content(a.node)}
    return any(
        is_content(loop.iter) or (isinstance(loop.iter, jinja2.nodes.Name) and loop.iter.name in names)
        for loop in tree.find_all(jinja2.nodes.For)
    )
