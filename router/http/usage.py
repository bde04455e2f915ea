"""What an engine's answer says about tokens and times, read without parsing each chunk of a stream.

A stream names its usage in one of its last data lines: before `data: [DONE]` (with `stream_options.include_usage`), in `message_delta` of
/v1/messages, or deep in `response.completed` of /v1/responses, whose line may be longer than what is kept. So only the last bytes are kept,
and looked at when the stream has ended. A whole answer is parsed once, after it was sent; of a long one (embeddings) only the usage.

Three forms tell the same: OpenAI's `prompt_tokens` and /v1/responses' `input_tokens` count the whole prompt; Anthropic's `input_tokens`
leave out what was read from the cache and what was written to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson

from router.frozen import value

_DECODER = json.JSONDecoder()
TAIL_BYTES = 8 << 10
_KEPT_BYTES = 32 << 10
"""Of a stream at most, before it is cut to its tail: cutting at each chunk would cost more than the chunk."""
WHOLE_BYTES = 4 << 20
"""Larger answers that do not stream go unread: their usage stays unknown."""
PARSED_BYTES = 64 << 10
"""In longer answers only the usage is looked for."""
HEAD_BYTES = 1 << 10
_USAGE = re.compile(rb'(?<!\\)"usage"\s*:\s*(\{)')  # within a string the quotes are escaped


@value(eq=True)
class Usage:
    """None: not reported."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    created_tokens: int | None = None
    completion_tokens: int | None = None
    engine_queue_s: float | None = None
    engine_ttft_s: float | None = None


_NOTHING = Usage()


class StreamTail:
    """The last bytes of a stream, TAIL_BYTES at least, and its last chunk whole. head: its first bytes."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self.head = b""

    def add(self, chunk: bytes) -> None:
        if len(self.head) < HEAD_BYTES:
            self.head += chunk[: HEAD_BYTES - len(self.head)]
        self._parts.append(chunk)
        self._size += len(chunk)
        if self._size > _KEPT_BYTES:
            tail = b"".join(self._parts)[-max(TAIL_BYTES, len(chunk)) :]
            self._parts, self._size = [tail], len(tail)

    def usage(self) -> Usage:
        tail = b"".join(self._parts)
        at = len(tail)
        while (at := tail.rfind(b'"usage"', 0, at)) >= 0:
            start = tail.rfind(b"\n", 0, at) + 1
            if tail.startswith(b"data:", start):
                found = usage_of(tail[start + 5 : None if (stop := tail.find(b"\n", at)) < 0 else stop])
                if found != _NOTHING:
                    return found
        return usage_within(tail)


class WholeAnswer:
    """An answer that does not stream, up to a bound."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size <= WHOLE_BYTES:
            self._parts.append(chunk)

    @property
    def head(self) -> bytes:
        return b"".join(self._parts[:4])[:HEAD_BYTES]

    def usage(self) -> Usage:
        if self._size > WHOLE_BYTES:
            return Usage()
        text = b"".join(self._parts)
        return usage_of(text) if self._size <= PARSED_BYTES else usage_within(text)


def usage_of(text: bytes) -> Usage:
    """Reads `usage` and vLLM's `metrics` of one JSON answer; whatever is missing or odd is unknown."""
    try:
        content = orjson.loads(text)
    except orjson.JSONDecodeError:
        return Usage()
    if not isinstance(content, dict):
        return Usage()
    answer = _object(content.get("response")) or content  # an event of /v1/responses
    return _usage(_object(answer.get("usage")), _object(answer.get("metrics")))


def usage_within(text: bytes) -> Usage:
    """The last `usage` object in text that is cut or too long to parse."""
    for match in reversed(list(_USAGE.finditer(text))):
        try:
            found, _ = _DECODER.raw_decode(text[match.start(1) :].decode(errors="replace"))
        except ValueError:
            continue
        return _usage(_object(found), {})
    return Usage()


def _usage(usage: Mapping[str, Any], metrics: Mapping[str, Any]) -> Usage:
    times = (_seconds(metrics.get("queue_time_ms")), _seconds(metrics.get("time_to_first_token_ms")))
    prompt = _count(usage.get("input_tokens"))
    if prompt is None:
        details = _object(usage.get("prompt_tokens_details"))
        prompt, completion = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
        return Usage(prompt, _count(details.get("cached_tokens")), _count(details.get("created_cache_tokens")), completion, *times)
    if "input_tokens_details" in usage:
        details = _object(usage["input_tokens_details"])
        cached, created = _count(details.get("cached_tokens")), _count(details.get("cache_write_tokens"))
    else:
        cached, created = _count(usage.get("cache_read_input_tokens")), _count(usage.get("cache_creation_input_tokens"))
        prompt += (cached or 0) + (created or 0)
    return Usage(prompt, cached, created, _count(usage.get("output_tokens")), *times)


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _seconds(milliseconds: object) -> float | None:
    return milliseconds / 1000 if isinstance(milliseconds, (int, float)) and milliseconds >= 0 else None
