"""What an engine's answer says about tokens and times, read without parsing each chunk of a stream.

A stream names its usage in the last data line before `data: [DONE]` (with `stream_options.include_usage`); so only the last bytes are
kept, and looked at when the stream has ended. A whole answer is parsed once, after it was sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

TAIL_BYTES = 8 << 10
WHOLE_BYTES = 4 << 20
"""Larger answers that do not stream go unread: their usage stays unknown."""


@dataclass(frozen=True, slots=True)
class Usage:
    """None: not reported."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    created_tokens: int | None = None
    completion_tokens: int | None = None
    engine_queue_s: float | None = None
    engine_ttft_s: float | None = None


class StreamTail:
    """The last bytes of a stream."""

    def __init__(self) -> None:
        self._parts: deque[bytes] = deque()
        self._size = 0

    def add(self, chunk: bytes) -> None:
        self._parts.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._parts[0]) >= TAIL_BYTES:
            self._size -= len(self._parts.popleft())

    def usage(self) -> Usage:
        for line in reversed(b"".join(self._parts).split(b"\n")):
            if line.startswith(b"data:") and b'"usage"' in line:
                found = usage_of(line[5:])
                if found != Usage():
                    return found
        return Usage()


class WholeAnswer:
    """An answer that does not stream, up to a bound."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size <= WHOLE_BYTES:
            self._parts.append(chunk)

    def usage(self) -> Usage:
        return usage_of(b"".join(self._parts)) if self._size <= WHOLE_BYTES else Usage()


def usage_of(text: bytes) -> Usage:
    """Reads `usage` and vLLM's `metrics` of one JSON answer; whatever is missing or odd is unknown."""
    try:
        content = orjson.loads(text)
    except orjson.JSONDecodeError:
        return Usage()
    if not isinstance(content, dict):
        return Usage()
    usage, metrics = _object(content.get("usage")), _object(content.get("metrics"))
    details = _object(usage.get("prompt_tokens_details"))
    return Usage(
        _count(usage.get("prompt_tokens")),
        _count(details.get("cached_tokens")),
        _count(details.get("created_cache_tokens")),
        _count(usage.get("completion_tokens")),
        _seconds(metrics.get("queue_time_ms")),
        _seconds(metrics.get("time_to_first_token_ms")),
    )


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _seconds(milliseconds: object) -> float | None:
    return milliseconds / 1000 if isinstance(milliseconds, (int, float)) and milliseconds >= 0 else None
