"""OpenAI requests as vLLM 0.32 takes them, and its answers, key by key as captured.

Bytes in, typed `Completion` out, or `ApiError` with the body that vLLM sends. Answers are written as JSON text by hand where they
are sent once a token: a stream chunk is a fixed head, the word's JSON and a fixed tail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

SYSTEM_FINGERPRINT = "vllm-0.32.0-mock"


class ApiError(Exception):
    """An answer other than 200, with vLLM's error body."""

    def __init__(self, status: int, message: str, type_: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = orjson.dumps({"error": {"message": message, "type": type_, "param": param, "code": status}})


@dataclass(frozen=True, slots=True)
class Completion:
    """A valid request for an answer."""

    kind: Literal["chat", "text"]
    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    prompt: str | list[int] | None
    max_tokens: int | None
    stream: bool
    include_usage: bool
    seed: int
    salt: str | None
    session_id: str | None
    full_report: bool


def parse_json(body: bytes) -> dict[str, Any]:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as e:
        raise ApiError(400, f"Invalid JSON: {e}") from e
    if not isinstance(parsed, dict):
        raise ApiError(400, "The body must be a JSON object")
    return parsed


def parse_completion(kind: Literal["chat", "text"], body: bytes, model: str, session_header: str | None) -> Completion:
    """Raises ApiError: 404 for an unknown model, 400 for a body that is wrong."""
    q = parse_json(body)
    check_model(q, model)
    messages = tools = prompt = None
    if kind == "chat":
        messages = q.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ApiError(400, "messages must be a list with at least one message", param="messages")
        tools = q.get("tools")
    else:
        prompt = _one_prompt(q.get("prompt"))
    if q.get("n", 1) not in (1, None):
        raise ApiError(400, "the mock engine gives one answer a request: n must be 1", param="n")
    max_tokens = q.get("max_completion_tokens") if q.get("max_completion_tokens") is not None else q.get("max_tokens")
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise ApiError(400, f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    options = q.get("stream_options")
    xargs = q.get("vllm_xargs")
    xargs = xargs if isinstance(xargs, Mapping) else {}
    seed = q.get("seed")
    return Completion(
        kind=kind,
        messages=messages,
        tools=tools,
        prompt=prompt,
        max_tokens=max_tokens,
        stream=bool(q.get("stream")),
        include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        seed=seed if isinstance(seed, int) else 0,
        salt=q.get("cache_salt"),
        session_id=q.get("session_id") or session_header or xargs.get("session_id"),
        full_report=xargs.get("kv_cache_report_mode") == "full",
    )


def check_model(q: Mapping[str, Any], model: str) -> None:
    asked = q.get("model")
    if asked is not None and asked != model:
        raise ApiError(404, f"The model `{asked}` does not exist. Valid aliases: {model}.", "NotFoundError", "model")


def _one_prompt(prompt: object) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(i, int) and 0 <= i < 2**32 for i in prompt):
        return prompt
    raise ApiError(400, "the mock engine takes one prompt: a text or a list of token ids", param="prompt")


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None, created_tokens: int | None, whole: bool) -> dict[str, Any]:
    """The `usage` object. Whole answers write unset fields as null, streams leave them out. `cached_tokens` None: details are off."""
    details: dict[str, Any] | None = None
    if cached_tokens is not None:
        details = {"cached_tokens": cached_tokens, "created_cache_tokens": created_tokens, "multimodal_tokens": None}
    out: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": details,
    }
    if whole:
        return out | {"completion_tokens_details": None}
    if details is None:
        del out["prompt_tokens_details"]
    else:
        out["prompt_tokens_details"] = {k: v for k, v in details.items() if v is not None}
    return out


def request_metrics(queue_s: float, ttft_s: float, decode_s: float, tokens: int) -> dict[str, float]:
    """The `metrics` object of `--enable-per-request-metrics` (milliseconds)."""
    generation_s = max(decode_s, 1e-9)
    return {
        "time_to_first_token_ms": ttft_s * 1e3,
        "generation_time_ms": decode_s * 1e3,
        "queue_time_ms": queue_s * 1e3,
        "mean_itl_ms": decode_s / (tokens - 1) * 1e3 if tokens > 1 else 0.0,
        "tokens_per_second": tokens / (ttft_s + generation_s),
    }


def whole_answer(
    kind: Literal["chat", "text"],
    id_: str,
    created: int,
    model: str,
    text: str,
    finish_reason: str,
    usage_: dict[str, Any],
    metrics: dict[str, float] | None,
) -> bytes:
    """The body of an answer that is not streamed."""
    filled = metrics | {"speculative_decoding": None} if metrics is not None else None
    tail = {"logprobs": None, "finish_reason": finish_reason, "stop_reason": None, "token_ids": None}
    if kind == "chat":
        message = {
            "role": "assistant",
            "content": text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        return orjson.dumps(
            {
                "id": id_,
                "object": "chat.completion",
                "created": created,
                "model": model,
                "choices": [{"index": 0, "message": message, **tail, "routed_experts": None}],
                "service_tier": None,
                "system_fingerprint": SYSTEM_FINGERPRINT,
                "usage": usage_,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "prompt_text": None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": filled,
            }
        )
    choice = {"index": 0, "text": text, **tail, "prompt_logprobs": None, "prompt_token_ids": None, "routed_experts": None}
    return orjson.dumps(
        {
            "id": id_,
            "object": "text_completion",
            "created": created,
            "model": model,
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "usage": usage_,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": filled,
        }
    )


class StreamWriter:
    """The lines of one streamed answer: opening, a chunk a token, the last one, usage, `[DONE]`."""

    def __init__(self, kind: Literal["chat", "text"], id_: str, created: int, model: str, include_usage: bool) -> None:
        object_ = "chat.completion.chunk" if kind == "chat" else "text_completion"
        self._chat = kind == "chat"
        self._include_usage = include_usage
        head = orjson.dumps({"id": id_, "object": object_, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b","
        content = b'"delta":{"content":' if self._chat else b'"text":'
        self._before = self._head + b'"choices":[{"index":0,' + content
        self._after = (b"}," if self._chat else b",") + b'"logprobs":null,"finish_reason":null'
        if not self._chat:
            self._after += b',"stop_reason":null'
        self._after += b',"token_ids":null}]}\n\n'

    def opening(self) -> bytes:
        """The role, sent together with the first token; text completions have none."""
        if not self._chat:
            return b""
        return (
            self._head
            + b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
            + b'"prompt_token_ids":null,"prompt_text":null}\n\n'
        )

    def token(self, text_json: bytes) -> bytes:
        return self._before + text_json + self._after

    def last_token(self, text_json: bytes, finish_reason: str) -> bytes:
        line = self._before + text_json + (b"}," if self._chat else b",")
        line += b'"logprobs":null,"finish_reason":"' + finish_reason.encode() + b'","stop_reason":null,"token_ids":null}]'
        if not self._include_usage:
            line += b',"system_fingerprint":"' + SYSTEM_FINGERPRINT.encode() + b'"'
        return line + b"}\n\n"

    def closing(self, usage_: dict[str, Any], metrics: dict[str, float] | None) -> bytes:
        """Usage where it was asked for, and the end."""
        if not self._include_usage:
            return b"data: [DONE]\n\n"
        tail: dict[str, Any] = {"choices": [], "usage": usage_, "system_fingerprint": SYSTEM_FINGERPRINT}
        if metrics is not None:
            tail["metrics"] = metrics
        return self._head + orjson.dumps(tail)[1:] + b"\n\ndata: [DONE]\n\n"


def models(model: str, created: int, max_model_len: int) -> bytes:
    """`GET /v1/models`."""
    card = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [],
    }
    return orjson.dumps({"object": "list", "data": [card]})
