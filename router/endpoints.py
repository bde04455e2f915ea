"""Which paths are requests to be routed by prefix, and what is special about each.

    path                        its body's prompt                     answers
    POST /v1/chat/completions   messages, tools, template settings    generated
    POST /v1/completions        text(s) or token ids                  generated
    POST /v1/responses          input items, instructions, tools      generated; the worker keeps it (stored_responses.py)
    POST /v1/messages           Anthropic's messages, system, tools   generated
    POST /v1/embeddings         text(s), token ids or messages        not generated: no decoding is booked

Each of these is recorded as a request. All other paths pass through by load and are not recorded: /tokenize, /detokenize, count_tokens,
scores, audio. What belongs to one stored response (/v1/responses/ID and below) goes to the worker that made it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from router.http.asgi import error_object
from router.prompts import anthropic_bodies, openai_bodies, responses_bodies
from router.prompts.asked import Asked, Body


@dataclass(frozen=True, slots=True)
class Endpoint:
    """reads: body -> what is asked, raises UnsupportedPrompt. generates: tokens are decoded after the prompt.
    keeps: the worker that answers keeps the response, by its id. usage_option: streams tell usage only when `stream_options` asks."""

    path: str
    reads: Callable[[Body], Asked]
    generates: bool = True
    keeps: bool = False
    usage_option: bool = False


ENDPOINTS: dict[str, Endpoint] = {
    e.path: e
    for e in (
        Endpoint("/v1/chat/completions", openai_bodies.chat, usage_option=True),
        Endpoint("/v1/completions", openai_bodies.completion, usage_option=True),
        Endpoint("/v1/responses", responses_bodies.responses, keeps=True),
        Endpoint("/v1/messages", anthropic_bodies.messages),
        Endpoint("/v1/embeddings", openai_bodies.embedding, generates=False),
    )
}

RESPONSES = "/v1/responses"
_STORED = "/v1/responses/"
_COMPUTED = re.compile(rb'"type": ?"response\.(?!created|queued|in_progress)')
_ANTHROPIC = "/v1/messages"
_ANTHROPIC_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


def stored_response(path: str) -> str | None:
    """The id of the stored response that a path is about."""
    return path[len(_STORED) :].partition("/")[0] or None if path.startswith(_STORED) else None


def brings_token(path: str, piece: bytes) -> bool:
    """Whether a piece of a stream tells of something computed. A comment does not, nor do the events by which vLLM announces a response
    before its prompt is read."""
    if path == RESPONSES:
        return _COMPUTED.search(piece) is not None
    return piece.startswith(b"data:") or b"\ndata:" in piece


def own_error(path: str, status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """An error of the router's own, in the form that the path's clients read."""
    if path.startswith(_ANTHROPIC):
        return {"type": "error", "error": {"type": _ANTHROPIC_ERRORS.get(status, "api_error"), "message": message}}
    return error_object(status, message, param)


def broken_off(path: str, message: str) -> bytes:
    """The event that ends a stream whose worker broke off, so that no client takes it for whole (clients of named events skip others)."""
    if path.startswith(_ANTHROPIC):
        return b"event: error\ndata: " + orjson.dumps(own_error(path, 502, message)) + b"\n\n"
    if path == RESPONSES:
        told = {"code": "server_error", "message": message, "param": None}
        event = {"type": "error", **told, "sequence_number": 0, "error": told}  # `error` makes the openai package raise it
        return b"event: error\ndata: " + orjson.dumps(event) + b"\n\n"
    return b"data: " + orjson.dumps(error_object(502, message)) + b"\n\n"
