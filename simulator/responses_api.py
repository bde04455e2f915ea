"""Answers of /v1/responses as vLLM 0.32 writes them: whole, and as a stream of named events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from simulator.openai_api import CALL_BEGIN, CALL_END, Said, call_arguments


def response(
    id_: str, created: int, model: str, body: Mapping[str, Any], said: Said | None, tool: str | None, usage: object
) -> dict[str, Any]:
    """The response object. said None: it is in progress."""
    status = "in_progress" if said is None else "incomplete" if said.finish_reason == "length" else "completed"
    return {
        "id": id_,
        "created_at": created,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "model": model,
        "object": "response",
        "output": [] if said is None else [_item(id_, said, tool)],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "temperature": body.get("temperature") or 1.0,
        "tool_choice": body.get("tool_choice") or ("auto" if body.get("tools") else "none"),
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p") or 1.0,
        "background": False,
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": None,
        "previous_response_id": body.get("previous_response_id"),
        "prompt": None,
        "reasoning": body.get("reasoning"),
        "service_tier": "auto",
        "status": status,
        "text": body.get("text"),
        "top_logprobs": None,
        "truncation": body.get("truncation") or "disabled",
        "usage": usage,
        "user": body.get("user"),
    }


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None, created_tokens: int | None) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": cached_tokens or 0,
            "cache_write_tokens": created_tokens or 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _item_id(id_: str, tool: str | None) -> str:
    return ("msg_" if tool is None else "fc_") + id_.removeprefix("resp_")


def _item(id_: str, said: Said, tool: str | None) -> dict[str, Any]:
    if tool is None:
        part: dict[str, Any] = {"annotations": [], "text": said.text, "type": "output_text", "logprobs": None}
        return {"id": _item_id(id_, tool), "content": [part], "role": "assistant", "status": "completed", "type": "message", "phase": None}
    return {
        "arguments": call_arguments(said.text),
        "call_id": said.call_id,
        "name": tool,
        "type": "function_call",
        "id": _item_id(id_, tool),
        "namespace": None,
        "status": "completed",
    }


class ResponsesStream:
    """The events of one streamed response, with the methods of `StreamWriter`."""

    def __init__(self, id_: str, created: int, model: str, body: Mapping[str, Any], tool: str | None, call_id: str | None) -> None:
        self._id, self._created, self._model, self._body = id_, created, model, body
        self._tool, self._call_id = tool, call_id
        self._sequence = 0
        self._text = ""
        self._finish_reason = "stop"
        self._at = {"item_id": _item_id(id_, tool), "output_index": 0} | ({"content_index": 0} if tool is None else {})

    def _event(self, type_: str, **fields: Any) -> bytes:
        data = orjson.dumps({**fields, "sequence_number": self._sequence, "type": type_})
        self._sequence += 1
        return b"event: " + type_.encode() + b"\ndata: " + data + b"\n\n"

    def _response(self, said: Said | None, usage_: object) -> dict[str, Any]:
        return response(self._id, self._created, self._model, self._body, said, self._tool, usage_)

    def _added(self) -> dict[str, Any]:
        made = _item(self._id, Said("", "stop", self._call_id), self._tool) | {"status": "in_progress"}
        empty: dict[str, Any] = {"content": []} if self._tool is None else {"arguments": ""}
        return made | empty

    def opening(self) -> bytes:
        out = self._event("response.created", response=self._response(None, None))
        out += self._event("response.in_progress", response=self._response(None, None))
        out += self._event("response.output_item.added", item=self._added(), output_index=0)
        if self._tool is not None:
            return out + self._delta(CALL_BEGIN)
        part: dict[str, Any] = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        return out + self._event("response.content_part.added", part=part, **self._at)

    def _delta(self, text: str) -> bytes:
        self._text += text
        if self._tool is not None:
            return self._event("response.function_call_arguments.delta", delta=text, **self._at)
        return self._event("response.output_text.delta", delta=text, logprobs=[], **self._at)

    def token(self, text_json: bytes) -> bytes:
        return self._delta(orjson.loads(text_json))

    def last_token(self, text_json: bytes, finish_reason: str) -> bytes:
        self._finish_reason = finish_reason
        out = self.token(text_json)
        if self._tool is not None:
            out += self._delta(CALL_END)
            out += self._event("response.function_call_arguments.done", arguments=self._text, name=self._tool, **self._at)
        else:
            out += self._event("response.output_text.done", text=self._text, logprobs=[], **self._at)
            part: dict[str, Any] = {"annotations": [], "text": self._text, "type": "output_text", "logprobs": None}
            out += self._event("response.content_part.done", part=part, **self._at)
        return out + self._event("response.output_item.done", item=_item(self._id, self._said(), self._tool), output_index=0)

    def _said(self) -> Said:
        words = self._text if self._tool is None else self._text.removeprefix(CALL_BEGIN).removesuffix(CALL_END)
        return Said(words, self._finish_reason, self._call_id)

    def closing(self, usage_: dict[str, Any], metrics: object) -> bytes:
        """The whole response once more; as vLLM, `response.completed` even where it is cut short."""
        return self._event("response.completed", response=self._response(self._said(), usage_))
