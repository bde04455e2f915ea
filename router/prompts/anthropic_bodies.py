"""Bodies of /v1/messages -> what they ask, as vLLM 0.32 turns them into chats.

Left to the engine, since versions of it differ or only it knows: system messages among the messages, images and documents, tool
references and changes, tools of Anthropic's own, `thinking: disabled` where the template looks at it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.prompts.asked import Asked, Body, Chat, refuse
from router.prompts.conversation import BILLING_HEADER, UnsupportedPrompt
from router.prompts.openai_bodies import messages_in, refuse_given_ids, template_values


def messages(body: Body) -> Asked:
    refuse(body, "context_management", "mcp_servers", "container")
    refuse_given_ids(body)
    out: list[dict[str, Any]] = []
    system = _system(body.get("system"))
    if system:
        out.append({"role": "system", "content": system})
    for message in messages_in(body):
        _convert(message, out)
    thinking, config = body.get("thinking"), body.get("output_config")
    if isinstance(thinking, Mapping) and thinking.get("type") == "disabled":
        raise UnsupportedPrompt("thinking disabled: the engine asks its template what that means")
    effort = config.get("effort") if isinstance(config, Mapping) else None
    values = template_values({"chat_template_kwargs": body.get("chat_template_kwargs")}, True, effort)
    return Asked(Chat(out, _tools(body.get("tools")), values), special=False)


def _system(system: object) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    if not isinstance(system, list):
        raise UnsupportedPrompt("system must be a text or a list of blocks")
    return "".join(t for block in system if (t := _text(block)) and not t.startswith(BILLING_HEADER))


def _convert(message: object, out: list[dict[str, Any]]) -> None:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or role not in ("user", "assistant"):
        raise UnsupportedPrompt(f"a message of role {role!r} among the messages")
    content = message.get("content")
    if isinstance(content, str):
        out.append({"role": role, "content": content})
        return
    if not isinstance(content, list):
        raise UnsupportedPrompt("a message's content must be text or a list of blocks")
    made: dict[str, Any] = {"role": role}
    parts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            if text := _text(block):
                parts.append(text)
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "redacted_thinking":
            pass  # opaque, and left out by the engine too
        elif kind == "tool_use" and role == "assistant":
            calls.append(_tool_use(block))
        elif kind == "tool_result" and role == "user":
            out.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": _result(block.get("content"))})
        else:
            raise UnsupportedPrompt(f"content block {kind!r} has tokens that only the engine knows")
    if thoughts:
        made["reasoning"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    if parts:
        made["content"] = parts[0] if len(parts) == 1 else [{"type": "text", "text": t} for t in parts]
    if role == "assistant" or parts:
        out.append(made)


def _text(block: object) -> str:
    if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise UnsupportedPrompt("a block that is no text")
    return str(block["text"])


def _tool_use(block: Mapping[str, Any]) -> dict[str, Any]:
    if not block.get("id") or not isinstance(block.get("input") or {}, Mapping):
        raise UnsupportedPrompt("a tool_use without id or input")
    function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
    return {"id": block["id"], "type": "function", "function": function}


def _result(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise UnsupportedPrompt("a tool_result's content must be text or a list of blocks")
    return "\n".join(_text(block) for block in content)


def _tools(tools: object) -> Sequence[Mapping[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise UnsupportedPrompt("tools must be a list with at least one")
    return [_tool(t) for t in tools]


def _tool(tool: object) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") != "custom" or not isinstance(tool.get("input_schema"), Mapping):
        raise UnsupportedPrompt("a tool of Anthropic's own")
    schema = tool["input_schema"]
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": function}
