"""Bodies of /v1/chat/completions, /v1/completions and /v1/embeddings -> what they ask (rules: vLLM 0.32's request models)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.prompts.asked import Asked, Body, Chat, kept, prompts_of, refuse
from router.prompts.conversation import UnsupportedPrompt

_ENGINES_OWN = ("chat_template", "continue_final_message", "prompt_embeds", "mm_processor_kwargs", "media_io_kwargs")
_TRANSFORMERS_OWN = frozenset(
    (
        "messages", "conversation", "tools", "chat_template", "tokenize", "continue_final_message", "padding", "truncation", "max_length",
        "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    )
)  # fmt: skip
"""Template settings of a client's that mean something else to the engine's template call."""
_NOTHING: Mapping[str, Any] = {}


def chat(body: Body) -> Asked:
    refuse(body, *_ENGINES_OWN)
    refuse_given_ids(body)
    return Asked(
        Chat(
            messages_in(body), tools_in(body), template_values(body, add_generation_prompt=body.get("add_generation_prompt") is not False)
        ),
        special=body.get("add_special_tokens") is True,
        keep=kept(body),
        reads_cache=_reads_cache(body, echo_logprobs=True),
    )


def completion(body: Body) -> Asked:
    refuse(body, *_ENGINES_OWN, "suffix")
    refuse_given_ids(body)
    texts, ids = prompts_of(body.get("prompt"))
    special = body.get("add_special_tokens") is not False
    return Asked(texts=texts, ids=ids, special=special, keep=kept(body), reads_cache=_reads_cache(body, body.get("logprobs") is not None))


def embedding(body: Body) -> Asked:
    refuse(body, *_ENGINES_OWN)
    if body.get("padding") not in (None, "do_not_pad"):
        raise UnsupportedPrompt("padding")
    if "messages" in body:
        values = template_values(body, add_generation_prompt=body.get("add_generation_prompt") is True)
        return Asked(Chat(messages_in(body), None, values), special=body.get("add_special_tokens") is True, keep=kept(body))
    texts, ids = prompts_of(body.get("input"))
    return Asked(texts=texts, ids=ids, special=body.get("add_special_tokens") is not False, keep=kept(body))


def messages_in(body: Body) -> list[Mapping[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise UnsupportedPrompt("messages must be a list")
    return messages


def tools_in(body: Body) -> list[Mapping[str, Any]] | None:
    tools = body.get("tools")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise UnsupportedPrompt("tools must be a list")
    return tools


def template_values(body: Body, add_generation_prompt: bool, reasoning_effort: object = None) -> dict[str, Any]:
    """What the template gets besides messages and tools. The body's own fields win over chat_template_kwargs; null and "auto" are unset."""
    given = body.get("chat_template_kwargs") or _NOTHING
    effort = body.get("reasoning_effort") if reasoning_effort is None else reasoning_effort
    if given is _NOTHING:
        out: dict[str, Any] = {}
    elif not isinstance(given, Mapping) or _TRANSFORMERS_OWN & given.keys():
        raise UnsupportedPrompt("chat_template_kwargs that mean something else to the engine")
    else:
        out = {k: v for k, v in given.items() if v is not None and v != "auto"}
    if effort is not None and effort != "auto":
        out["reasoning_effort"] = effort
        if "enable_thinking" not in given:
            out["enable_thinking"] = effort != "none"
    if body.get("documents") is not None:
        out["documents"] = body["documents"]
    out["add_generation_prompt"] = add_generation_prompt
    return out


def _reads_cache(body: Body, echo_logprobs: bool) -> bool:
    """False where the engine wants log probabilities of the prompt: it then computes the whole prompt. `echo` asks for them in chats, and
    in completions with `logprobs`."""
    return body.get("prompt_logprobs") is None and not (body.get("echo") is True and echo_logprobs)


def refuse_given_ids(body: Body) -> None:
    """Ids that a prefill worker forwards stand in for the messages. Raises UnsupportedPrompt."""
    transfer = body.get("kv_transfer_params")
    if transfer is not None and isinstance(transfer, Mapping) and transfer.get("prompt_token_ids") is not None:
        raise UnsupportedPrompt("token ids in kv_transfer_params")
