"""OpenAI requests as vLLM 0.32 takes them, and its answers, key by key as captured.

Bytes in, typed `Completion` out, or `ApiError` with the body that vLLM sends. Answers are written as JSON text by hand where they
are sent once a token: a stream chunk is a fixed head, the word's JSON and a fixed tail.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from router.endpoints import ENDPOINTS
from router.prompts.asked import Asked
from router.prompts.conversation import UnsupportedPrompt

SYSTEM_FINGERPRINT = "vllm-0.32.0-mock"


class ApiError(Exception):
    """An answer other than 200, with vLLM's error body (`body`), or Anthropic's (`anthropic_body`)."""

    def __init__(
        self, status: int, message: str, type_: str = "BadRequestError", param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s
        self.body = orjson.dumps({"error": {"message": message, "type": type_, "param": param, "code": status}})
        self.anthropic_body = orjson.dumps({"type": "error", "error": {"type": type_, "message": message}})


Kind = Literal["chat", "text", "responses", "messages", "embeddings"]
_READS = {k: ENDPOINTS[p].reads for k, p in {
    "chat": "/v1/chat/completions", "text": "/v1/completions", "responses": "/v1/responses", "messages": "/v1/messages",
    "embeddings": "/v1/embeddings",
}.items()}  # fmt: skip
_MOST_ANSWERS = 64
WRONG_FORM = (ValueError, TypeError, AttributeError, LookupError, RecursionError)
"""What reading a body raises where a field is of a wrong type or nested too deeply; vLLM's request models say 400 there."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A valid request for an answer. n: answers to each prompt. tool: the function that the answer has to call. body: as it came."""

    kind: Kind
    asked: Asked
    n: int
    tool: str | None
    max_tokens: int | None
    stream: bool
    include_usage: bool
    seed: int
    salt: str | None
    lora: str | None
    session_id: str | None
    full_report: bool
    body: Mapping[str, Any]


def parse_json(body: bytes) -> dict[str, Any]:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as e:
        raise ApiError(400, f"Invalid JSON: {e}") from e
    if not isinstance(parsed, dict):
        raise ApiError(400, "The body must be a JSON object")
    return parsed


def parse_completion(kind: Kind, body: bytes, model: str, adapters: Sequence[str], session_header: str | None) -> Completion:
    """Raises ApiError: 404 for an unknown model, 400 for a body that is wrong."""
    q = parse_json(body)
    check_model(q, model, adapters)
    limits = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    max_tokens = next((q[name] for name in limits if q.get(name) is not None), None)
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise ApiError(400, f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    if kind == "messages" and max_tokens is None:
        raise ApiError(400, "max_tokens: Field required", param="max_tokens")
    n = 1 if q.get("n") is None else q["n"]
    if not isinstance(n, int) or not 1 <= n <= _MOST_ANSWERS:
        raise ApiError(400, f"n must be from 1 to {_MOST_ANSWERS}", param="n")
    options = q.get("stream_options")
    xargs = q.get("vllm_xargs")
    xargs = xargs if isinstance(xargs, Mapping) else {}
    seed = q.get("seed")
    return Completion(
        kind=kind,
        asked=_asked(kind, q),
        n=n,
        tool=_called(q),
        max_tokens=1 if kind == "embeddings" else max_tokens,
        stream=bool(q.get("stream")) and kind != "embeddings",
        include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        seed=seed if isinstance(seed, int) else 0,
        salt=q.get("cache_salt"),
        lora=q["model"] if q.get("model") in adapters else None,
        session_id=q.get("session_id") or session_header or xargs.get("session_id"),
        full_report=xargs.get("kv_cache_report_mode") == "full",
        body=q,
    )


def _asked(kind: Kind, q: Mapping[str, Any]) -> Asked:
    """What is to be computed, read as the router reads it (that is vLLM's way; what it leaves to the engine the mock engine refuses)."""
    if kind in ("chat", "messages") and (not isinstance(q.get("messages"), list) or not q["messages"]):
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    try:
        asked = _READS[kind](q)
    except UnsupportedPrompt as e:
        raise ApiError(400, f"the mock engine does not take this: {e}", param=None if kind in ("chat", "messages") else "prompt") from e
    except WRONG_FORM as e:
        raise ApiError(400, f"the body is not of this endpoint's form: {e}") from e
    if len(asked.texts) + len(asked.ids) > _MOST_ANSWERS:
        raise ApiError(400, f"the mock engine takes at most {_MOST_ANSWERS} prompts", param="prompt")
    return asked


def _called(q: Mapping[str, Any]) -> str | None:
    """The function that tool_choice demands: a named one, or for `required` (`any`) the first."""
    choice, tools = q.get("tool_choice"), q.get("tools")
    if not isinstance(tools, list) or not tools:
        return None
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        if name is not None:
            return str(name)
        choice = choice.get("type")
    function = tools[0].get("function", tools[0]) if isinstance(tools[0], Mapping) else None
    if choice in ("required", "any") and isinstance(function, Mapping):
        return str(function.get("name"))
    return None


def check_model(q: Mapping[str, Any], model: str, adapters: Sequence[str] = ()) -> None:
    asked = q.get("model")
    if asked is not None and asked != model and asked not in adapters:
        raise ApiError(404, f"The model `{asked}` does not exist. Valid aliases: {model}.", "NotFoundError", "model")


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


def call_arguments(text: str) -> str:
    """The arguments of a tool call whose words are the answer's."""
    return CALL_BEGIN + text + CALL_END


CALL_BEGIN, CALL_END = '{"text": "', '"}'


@dataclass(frozen=True, slots=True)
class Said:
    """One answer: its words, why it ended, and the id of the tool call where it is one (`Completion.tool` names the function)."""

    text: str
    finish_reason: str
    call_id: str | None = None


def whole_answer(
    kind: Literal["chat", "text"],
    id_: str,
    created: int,
    model: str,
    answers: Sequence[Said],
    tool: str | None,
    usage_: dict[str, Any],
    metrics: dict[str, float] | None,
) -> bytes:
    """The body of an answer that is not streamed."""
    filled = metrics | {"speculative_decoding": None} if metrics is not None else None
    if kind == "chat":
        return orjson.dumps(
            {
                "id": id_,
                "object": "chat.completion",
                "created": created,
                "model": model,
                "choices": [_chat_choice(i, said, tool) for i, said in enumerate(answers)],
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
    tail = {"prompt_logprobs": None, "prompt_token_ids": None, "routed_experts": None}
    return orjson.dumps(
        {
            "id": id_,
            "object": "text_completion",
            "created": created,
            "model": model,
            "choices": [{"index": i, "text": said.text, **_end(said.finish_reason), **tail} for i, said in enumerate(answers)],
            "service_tier": None,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "usage": usage_,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": filled,
        }
    )


def _end(finish_reason: str) -> dict[str, Any]:
    return {"logprobs": None, "finish_reason": finish_reason, "stop_reason": None, "token_ids": None}


def _chat_choice(index: int, said: Said, tool: str | None) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": said.text if tool is None else None,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    if tool is not None:
        call = {"id": said.call_id, "type": "function", "function": {"name": tool, "arguments": call_arguments(said.text)}}
        message["tool_calls"] = [call]
    return {"index": index, "message": message, **_end(said.finish_reason), "routed_experts": None}


class StreamWriter:
    """The lines of one streamed answer: opening, a chunk a token, the last one; then usage and `[DONE]`. call_id: it is a tool call."""

    def __init__(
        self, kind: Literal["chat", "text"], id_: str, created: int, model: str, include_usage: bool, index: int = 0,
        tool: str | None = None, call_id: str | None = None,
    ) -> None:  # fmt: skip
        object_ = "chat.completion.chunk" if kind == "chat" else "text_completion"
        self._chat = kind == "chat"
        self._include_usage = include_usage
        self._tool, self._call_id = tool, call_id
        head = orjson.dumps({"id": id_, "object": object_, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b","
        self._choice = self._head + b'"choices":[{"index":%d,' % index
        if tool is not None:
            content, end = b'"delta":{"tool_calls":[{"index":0,"function":{"arguments":', b"}}]},"
        else:
            content, end = (b'"delta":{"content":', b"},") if self._chat else (b'"text":', b",")
        self._before, self._end = self._choice + content, end
        self._after = end + b'"logprobs":null,"finish_reason":null'
        if not self._chat:
            self._after += b',"stop_reason":null'
        self._after += b',"token_ids":null}]}\n\n'

    def opening(self) -> bytes:
        """The role, sent together with the first token; text completions have none. Of a tool call also its name and id."""
        if not self._chat:
            return b""
        role = (
            self._choice
            + b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
            + b'"prompt_token_ids":null,"prompt_text":null}\n\n'
        )
        if self._tool is None:
            return role
        call = {"id": self._call_id, "type": "function", "index": 0, "function": {"name": self._tool, "arguments": ""}}
        named = self._choice + b'"delta":{"tool_calls":[' + orjson.dumps(call) + b']},"logprobs":null,"finish_reason":null}]}\n\n'
        return role + named + self.token(orjson.dumps(CALL_BEGIN))

    def token(self, text_json: bytes) -> bytes:
        return self._before + text_json + self._after

    def last_token(self, text_json: bytes, finish_reason: str) -> bytes:
        line = b""
        if self._tool is not None:
            line, text_json = self.token(text_json), orjson.dumps(CALL_END)
        line += self._before + text_json + self._end
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


def embeddings(
    id_: str, created: int, model: str, vectors: Sequence[Sequence[float]], as_base64: bool, usage_: dict[str, Any]
) -> bytes:  # fmt: skip
    """The body of an answer of /v1/embeddings."""
    given = [base64.b64encode(array("f", v).tobytes()).decode() if as_base64 else list(v) for v in vectors]
    data = [{"index": i, "object": "embedding", "embedding": v} for i, v in enumerate(given)]
    return orjson.dumps({"id": id_, "object": "list", "created": created, "model": model, "data": data, "usage": usage_})


def models(model: str, adapters: Sequence[str], created: int, max_model_len: int) -> bytes:
    """`GET /v1/models`. An adapter is known by its parent."""
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
    cards = [card, *({**card, "id": name, "root": f"/adapters/{name}", "parent": model, "max_model_len": None} for name in adapters)]
    return orjson.dumps({"object": "list", "data": cards})
