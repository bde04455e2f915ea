"""Why a request is not let in, in the words and the form that OpenAI's and Anthropic's clients make their own errors of.

    401 AuthenticationError        no key, an unknown one, one that has expired
    403 PermissionDeniedError      the key may not use this model
    429 RateLimitError             over a rate of the key, with Retry-After

Both clients tell the kind by the status; `type` and `code` are what their services say in the same case. `reason` is ours, for metrics: a
small closed set, never what a client sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

Reason = Literal["no_key", "unknown_key", "expired_key", "model", "requests", "tokens", "in_flight"]
REASONS: tuple[Reason, ...] = ("no_key", "unknown_key", "expired_key", "model", "requests", "tokens", "in_flight")

_STATUS: dict[Reason, int] = {
    "no_key": 401, "unknown_key": 401, "expired_key": 401, "model": 403, "requests": 429, "tokens": 429, "in_flight": 429,
}  # fmt: skip
_OPENAI: dict[Reason, tuple[str, str]] = {  # type, code
    "no_key": ("invalid_request_error", "invalid_api_key"),
    "unknown_key": ("invalid_request_error", "invalid_api_key"),
    "expired_key": ("invalid_request_error", "invalid_api_key"),
    "model": ("invalid_request_error", "model_not_found"),
    "requests": ("requests", "rate_limit_exceeded"),
    "tokens": ("tokens", "rate_limit_exceeded"),
    "in_flight": ("requests", "rate_limit_exceeded"),
}
_ANTHROPIC = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_PATH = "/v1/messages"


@dataclass(slots=True, eq=False)
class Refused(Exception):  # noqa: N818 - a value, named for what it is
    """The request is not let in. text never holds what the client gave as a key."""

    reason: Reason
    text: str
    retry_after_s: float | None = None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    @property
    def status(self) -> int:
        return _STATUS[self.reason]

    def content(self, path: str) -> dict[str, Any]:
        """The body of the answer, as the clients of this path know it."""
        if path == _ANTHROPIC_PATH or path.startswith(_ANTHROPIC_PATH + "/"):
            return {"type": "error", "error": {"type": _ANTHROPIC[self.status], "message": self.text}}
        kind, code = _OPENAI[self.reason]
        return {"error": {"message": self.text, "type": kind, "param": "model" if self.reason == "model" else None, "code": code}}

    def answer_headers(self) -> list[tuple[bytes, bytes]]:
        out = list(self.headers)
        if self.status == 401:
            out.append((b"www-authenticate", b"Bearer"))
        if self.retry_after_s is not None:
            out.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
        return out
