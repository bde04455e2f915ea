"""Small pieces of HTTP over raw ASGI: bodies within a bound, JSON answers, OpenAI errors, headers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import orjson

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]

CLIENT = "warmwatch.client"
"""Key of the scope under which the server puts the request's Call (server.py): the direct way to the client."""

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"expect",
        b"proxy-authorization",
    )
)
_END_TO_END = frozenset((b"content-length", b"content-type", b"content-encoding", b"authorization"))
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", b"x-request-id"}
_NOT_RETURNED = _HOP_BY_HOP | {b"x-request-id"}
_LOWERED: dict[bytes, bytes] = {}
"""Names of headers, as workers write them, in lower case."""
_MOST_LOWERED = 256
_NONE_NAMED: frozenset[bytes] = frozenset()
_NO_NAMES = frozenset((b"keep-alive", b"Keep-Alive", b"close"))
_ERROR_TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError", 405: "MethodNotAllowed",
    408: "RequestTimeout", 413: "RequestTooLarge", 417: "ExpectationFailed", 429: "RateLimitError", 431: "RequestHeaderFieldsTooLarge",
    500: "InternalServerError", 503: "ServiceUnavailable", 505: "HTTPVersionNotSupported",
}  # fmt: skip


class BodyTooLarge(Exception):  # noqa: N818 - a value, named for what it is
    """The request's body is over the bound."""


class ClientLeft(Exception):  # noqa: N818 - a value, named for what it is
    """The client closed its connection before its request was whole."""


async def read_body(receive: Receive, limit_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLarge, ClientLeft."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            raise BodyTooLarge
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def respond(send: Send, status: int, body: bytes, content_type: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def respond_json(send: Send, status: int, content: object, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    await respond(send, status, orjson.dumps(content), b"application/json", headers)


def error_object(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI clients and vLLM's answers have it."""
    return {"error": {"message": message, "type": _ERROR_TYPES.get(status, "UpstreamError"), "param": param, "code": status}}


def text_of(value: bytes) -> str:
    """A header's value as text: UTF-8, which it goes out as again; what is no UTF-8 is read as Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def header(scope: Scope, name: bytes) -> str | None:
    """A request header's value; names in ASGI are lower case."""
    value = header_bytes(scope["headers"], name)
    return None if value is None else text_of(value)


def header_bytes(headers: RawHeaders, name: bytes) -> bytes | None:
    """A request header's value as it came. None: there is none, or it is empty."""
    for key, value in headers:
        if key == name:
            return value or None
    return None


def first_values(scope: Scope) -> dict[bytes, bytes]:
    """Request headers by name, the first where one came several times."""
    return dict(reversed(scope["headers"]))


def value_of(headers: RawHeaders, name: bytes) -> str | None:
    """A header's value where names come as they were written; name: in lower case."""
    for key, value in headers:
        if len(key) == len(name) and key.lower() == name:
            return text_of(value)
    return None


def forwarded_request_headers(scope: Scope, withheld: frozenset[bytes] = frozenset()) -> bytes:
    """What goes on to the worker, as lines: all but hop-by-hop headers, our own, and those withheld (lower case)."""
    headers = scope["headers"]
    named = _named_by_connection(headers)
    lines: list[bytes] = []
    for key, value in headers:
        if key not in _NOT_FORWARDED and key not in withheld and key not in named and not key.startswith(b"x-warmwatch-"):
            lines += (key, b": ", value, b"\r\n")
    return b"".join(lines)


def header_lines(headers: Iterable[tuple[str, str]]) -> bytes:
    """Headers of our own, as lines."""
    return b"".join(f"{name}: {value}\r\n".encode() for name, value in headers)


def forwarded_response_headers(raw: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
    """What goes back to the client: all but hop-by-hop headers and the request id, which we set."""
    out: RawHeaders = []
    named: frozenset[bytes] = _NONE_NAMED
    for name, value in raw:
        key = _LOWERED.get(name)
        if key is None:
            key = name.lower()
            if len(_LOWERED) < _MOST_LOWERED:
                _LOWERED[name] = key
        if key == b"connection":
            named |= _named_by_connection([(key, value)])
        elif key not in _NOT_RETURNED:
            out.append((key, value))
    return [pair for pair in out if pair[0] not in named] if named else out


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Headers that the sender means for this hop only, lower case (RFC 9110, 7.6.1). What tells its length, form or sender never is."""
    values = [value for key, value in headers if key == b"connection" and value not in _NO_NAMES]
    if not values:
        return _NONE_NAMED
    return frozenset(name.strip().lower() for value in values for name in value.split(b",")) - _END_TO_END
