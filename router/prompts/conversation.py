"""A chat request's messages and tools as the engine hands them to its chat template.

The rules are vLLM 0.32's (its renderers for Hugging Face templates): text parts are joined by line ends, or stay parts where the template
loops over them; a tool's answer is always text; tool call arguments are parsed, and are `{}` when they are no JSON object; reasoning goes
under two names; `developer` becomes `system` where the template does not know it; a tool has its fields in one order, unknown ones left
out. SGLang's differ (`plain_chat` says where they do not).

Invariant: what cannot be told exactly raises UnsupportedPrompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
BILLING_HEADER = "x-anthropic-billing-header"
"""Claude Code's line with a number of the request's own; vLLM takes it out of system messages, for it would spoil each prefix."""


class OrderedCall(dict[str, Any]):
    """A tool call made here from an item of /v1/responses: no request model of the engine's orders its fields anew."""


class UnsupportedPrompt(ValueError):  # noqa: N818 - a value, named for what it is
    """This prompt's token ids cannot be told exactly here; the message says why. Not the client's fault: the engine may well take it."""


def conversation(
    messages: Sequence[Message], wrap_parts: bool, knows_developer: bool = True, knows_reasoning: bool = False
) -> list[dict[str, Any]]:
    """What the template gets as `messages`. wrap_parts: it loops over a message's content. knows_developer, knows_reasoning: it speaks of
    these. Raises UnsupportedPrompt."""
    out = [_message(m, wrap_parts, knows_reasoning) for m in messages]
    if not knows_developer and any(m["role"] == "developer" for m in out):
        return _developer_as_system(out)
    return out


def tool_for_template(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the order and with the nulls that the engine's request model gives it."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise UnsupportedPrompt("a tool that is no function")
    deferred = tool.get("defer_loading")
    out = {"name": function.get("name"), "description": function.get("description"), "parameters": function.get("parameters")}
    if function.get("strict") is not None:
        out["strict"] = function["strict"]
    if (inner := function.get("defer_loading", deferred)) is not None:
        out["defer_loading"] = inner
    made: dict[str, Any] = {"type": "function", "function": out}
    if deferred is not None:
        made["defer_loading"] = deferred
    return made


def plain_chat(messages: object, tools: object, kwargs: Mapping[str, Any]) -> None:
    """Raises UnsupportedPrompt unless all engines read this chat alike: plain texts, no tools, ending with the user."""
    if tools:
        raise UnsupportedPrompt("SGLang hands tools to templates in a form of its own")
    if set(kwargs) - {"add_generation_prompt"}:
        raise UnsupportedPrompt("SGLang's own template settings")
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, Mapping) or message.get("role") not in ("system", "user", "assistant"):
            raise UnsupportedPrompt("a role that SGLang may read in its own way")
        if not isinstance(message.get("content"), str) or message.get("tool_calls") or message.get("reasoning_content"):
            raise UnsupportedPrompt("a message that SGLang may read in its own way")
    if isinstance(messages, list) and messages and messages[-1].get("role") == "assistant":
        raise UnsupportedPrompt("SGLang may continue a last message of the assistant")


def _message(message: Message, wrap_parts: bool, knows_reasoning: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UnsupportedPrompt("a message must be an object with a role")
    role = message["role"]
    content = message.get("content")
    if isinstance(content, str) and not (role == "system" and content.startswith(BILLING_HEADER)):
        out: dict[str, Any] = {"role": role, "content": [{"type": "text", "text": content}] if wrap_parts and role != "tool" else content}
    else:
        texts = _texts(content)
        if role == "system":
            texts = [rest for t in texts if (rest := t.partition("\n")[2] if t.startswith(BILLING_HEADER) else t) or t == ""]
        if wrap_parts and role != "tool":
            out = {"role": role, "content": [{"type": "text", "text": t} for t in texts]}
        else:
            out = {"role": role, "content": "\n".join(texts if wrap_parts else filter(None, texts))}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            out["tool_calls"] = [_tool_call(c) for c in calls]
        reasoning = message.get("reasoning")
        reasoning = message.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            if knows_reasoning and content is None and "content" in message:
                raise UnsupportedPrompt("reasoning beside a null content: the engine's request model may leave it out")
            out["reasoning"] = out["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        out["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            out[name] = message[name]
    if role == "developer":
        out["tools"] = message.get("tools")
    return out


def _developer_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that do not know the role: one system message, in front."""
    renamed = [{k: v for k, v in m.items() if k != "tools"} | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    system = [i for i, m in enumerate(renamed) if m["role"] == "system"]
    if system == [0]:
        return renamed
    texts = [
        m["content"] if isinstance(m["content"], str) else "\n".join(p["text"] for p in m["content"]) for m in (renamed[i] for i in system)
    ]
    return [{"role": "system", "content": "\n\n".join(t for t in texts if t)}, *(m for m in renamed if m["role"] != "system")]


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
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind not in TEXT_PARTS or part.get("uuid") is not None:
            raise UnsupportedPrompt(f"content part {kind!r} has tokens that only the engine knows")
        text = part.get("text" if kind.endswith("text") else kind)  # thinking and refusal are named like their kind
        if isinstance(text, str):
            out.append(text)
        elif text is not None or kind not in ("text", "refusal"):
            raise UnsupportedPrompt(f"content part {kind!r} without text")
    return out


def _tool_call(call: object) -> dict[str, Any]:
    """Arguments travel as JSON text; the template gets them parsed. The order is that of vLLM's request model, for templates that write a
    whole call as JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise UnsupportedPrompt("a tool call that is no function call")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    parsed = arguments if isinstance(arguments, dict) else {}
    if call.get("id") is None:
        raise UnsupportedPrompt("a tool call without an id")
    if isinstance(call, OrderedCall):
        return {"id": call["id"], "function": {**function, "arguments": parsed}, "type": "function"}
    return {"id": call["id"], "function": {"arguments": parsed, "name": function.get("name")}, "type": "function"}
