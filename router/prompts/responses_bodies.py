"""Bodies of /v1/responses -> what they ask, as vLLM 0.32 turns them into chats.

Left to the engine: what it has stored (`previous_response_id`), a last message to be continued, tools that are no plain functions, files
and images, and item types beyond messages, reasoning and function calls. vLLM adds the tokenizer's own beginning token here on top of what
the template writes (it does not for chats).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.prompts.asked import Asked, Body, Chat, refuse
from router.prompts.conversation import OrderedCall, UnsupportedPrompt
from router.prompts.openai_bodies import template_values


def responses(body: Body) -> Asked:
    refuse(body, "previous_response_id", "previous_input_messages", "prompt", "mm_processor_kwargs", "media_io_kwargs", "conversation")
    out: list[dict[str, Any]] = []
    if instructions := body.get("instructions"):
        if not isinstance(instructions, str):
            raise UnsupportedPrompt("instructions must be a text")
        out.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        out.append({"role": "user", "content": given})
    elif isinstance(given, list) and given:
        _refuse_continued(given[-1])
        made: list[dict[str, Any]] = []  # only items merge with each other, never with the instructions
        for item in given:
            _convert(item, made)
        out += made
    else:
        raise UnsupportedPrompt("input must be a text or a list of items")
    reasoning = body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, Mapping) else None
    values = template_values({"chat_template_kwargs": body.get("chat_template_kwargs")}, True, effort)
    cut = body.get("truncation") not in (None, "disabled")
    return Asked(Chat(out, _tools(body.get("tools")), values), special=True, cuts_to_model=cut)


def _refuse_continued(last: object) -> None:
    if isinstance(last, Mapping) and last.get("status") in ("in_progress", "incomplete"):
        raise UnsupportedPrompt("a last message to be continued")


def _convert(item: object, out: list[dict[str, Any]]) -> None:
    """Appends a message, or adds to the assistant's message before it."""
    if not isinstance(item, Mapping):
        raise UnsupportedPrompt("an input item must be an object")
    kind, role = item.get("type", "message"), item.get("role")
    last = out[-1] if out and out[-1]["role"] == "assistant" else None
    if kind == "function_call" and not item.get("namespace"):
        name, arguments = item.get("name"), item.get("arguments")
        call = OrderedCall(id=item.get("call_id"), function={"name": name, "arguments": arguments}, type="function")
        if last is None:
            out.append({"role": "assistant", "tool_calls": [call]})
        else:
            last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        out.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif kind == "reasoning":
        _add(out, last, "reasoning", _thought(item))
    elif kind == "message" and role == "assistant":
        _add(out, last, "content", _said(item.get("content")))
    elif kind == "message" and role in ("user", "system", "developer"):
        out.append({"role": role, "content": item.get("content")})
    else:
        raise UnsupportedPrompt(f"input item {kind!r} has tokens that only the engine knows")


def _add(out: list[dict[str, Any]], last: dict[str, Any] | None, field: str, text: str) -> None:
    if last is not None and last.get(field) is None:
        last[field] = text
    else:
        out.append({"role": "assistant", field: text})


def _thought(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content") or not isinstance(item.get("summary"), list):
        raise UnsupportedPrompt("a reasoning item that is encrypted or without summary")
    for parts in (item.get("content"), item["summary"]):
        if parts:
            if not isinstance(parts, list) or not isinstance(parts[0], Mapping) or not isinstance(parts[0].get("text"), str):
                raise UnsupportedPrompt("a reasoning item of another form")
            return str(parts[0]["text"])
    return ""


def _said(content: object) -> str:
    """The engine takes the first part's text."""
    if isinstance(content, str):
        return content
    first = content[0] if isinstance(content, list) and content else None
    if not isinstance(first, Mapping) or first.get("type") != "output_text" or not isinstance(first.get("text"), str):
        raise UnsupportedPrompt("a message of the assistant that is no text")
    return str(first["text"])


def _tools(tools: object) -> list[Mapping[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, Mapping) and t.get("type") == "function" for t in tools):
        raise UnsupportedPrompt("tools that are no functions")
    return [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in tools]
