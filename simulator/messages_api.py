"""Answers of /v1/messages as vLLM 0.32 writes them: Anthropic's message, whole and as a stream of named events."""

from __future__ import annotations

from typing import Any

import orjson

from simulator.openai_api import CALL_BEGIN, CALL_END, Said, call_arguments

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None, created_tokens: int | None) -> dict[str, int]:
    """Anthropic counts what was read from the cache and what was written to it apart from `input_tokens`. None: not told."""
    out = {"output_tokens": completion_tokens}
    for name, tokens in (("cache_read_input_tokens", cached_tokens), ("cache_creation_input_tokens", created_tokens)):
        if tokens is not None:
            out[name] = tokens
            prompt_tokens -= tokens
    return out | {"input_tokens": max(0, prompt_tokens)}


def message(id_: str, model: str, said: Said, tool: str | None, usage_: dict[str, int]) -> bytes:
    block: dict[str, Any] = {"type": "text", "text": said.text}
    if tool is not None:
        block = {"type": "tool_use", "id": said.call_id, "name": tool, "input": orjson.loads(call_arguments(said.text))}
    return orjson.dumps(
        {
            "id": id_,
            "type": "message",
            "role": "assistant",
            "content": [block],
            "model": model,
            "stop_reason": _STOP[said.finish_reason],
            "usage": usage_,
        }
    )


class MessagesStream:
    """The events of one streamed message, with the methods of `StreamWriter`."""

    def __init__(self, id_: str, model: str, prompt_tokens: int, tool: str | None, call_id: str | None) -> None:
        self._id, self._model, self._prompt_tokens = id_, model, prompt_tokens
        self._tool, self._call_id = tool, call_id
        self._stop = "end_turn"

    @staticmethod
    def _event(type_: str, **fields: Any) -> bytes:
        return b"event: " + type_.encode() + b"\ndata: " + orjson.dumps({"type": type_, **fields}) + b"\n\n"

    def opening(self) -> bytes:
        begun: dict[str, Any] = {
            "id": self._id, "type": "message", "role": "assistant", "content": [], "model": self._model, "stop_reason": None,
            "stop_sequence": None, "usage": {"input_tokens": self._prompt_tokens, "output_tokens": 0},
        }  # fmt: skip
        out = self._event("message_start", message=begun)
        if self._tool is None:
            return out + self._event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        block: dict[str, Any] = {"type": "tool_use", "id": self._call_id, "name": self._tool, "input": {}}
        return out + self._event("content_block_start", index=0, content_block=block) + self._delta(CALL_BEGIN)

    def _delta(self, text: str) -> bytes:
        delta = {"type": "text_delta", "text": text} if self._tool is None else {"type": "input_json_delta", "partial_json": text}
        return self._event("content_block_delta", index=0, delta=delta)

    def token(self, text_json: bytes) -> bytes:
        return self._delta(orjson.loads(text_json))

    def last_token(self, text_json: bytes, finish_reason: str) -> bytes:
        self._stop = _STOP[finish_reason]
        out = self.token(text_json)
        if self._tool is not None:
            out += self._delta(CALL_END)
        return out + self._event("content_block_stop", index=0)

    def closing(self, usage_: dict[str, int], metrics: object) -> bytes:
        out = self._event("message_delta", delta={"stop_reason": self._stop, "stop_sequence": None}, usage=usage_)
        return out + self._event("message_stop")
