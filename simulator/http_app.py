"""The mock engine's HTTP side, raw ASGI: vLLM's paths, and `/_sim/...` for failures on demand.

| path | |
|---|---|
| POST /v1/chat/completions, /v1/completions | answers, streamed or whole |
| GET /v1/models, /health, /metrics, /kv_event_sources | as vLLM |
| POST /tokenize, /reset_prefix_cache | as vLLM (the reset needs VLLM_SERVER_DEV_MODE there) |
| POST /_sim/restart `{"num_gpu_blocks"?, "down_s"?}` | a new process: empty cache, sequence 0, running requests break |
| POST /_sim/drop_events `{"batches", "rank"?}` | the next batches are not sent live (replay has them) |
| POST /_sim/capacity `{"blocks", "rank"?}` | the cache shrinks or grows without a restart |
| POST /_sim/slow `{"factor"}` | steps take that many times longer |
| GET /_sim/state | ground truth |
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import orjson

from simulator.engine import EngineRank, MockEngine, Ticket
from simulator.openai_api import (
    ApiError,
    Completion,
    StreamWriter,
    check_model,
    models,
    parse_completion,
    parse_json,
    request_metrics,
    usage,
    whole_answer,
)
from simulator.scheduler import SimRequest

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

JSON = (b"content-type", b"application/json")
MAX_BODY_BYTES = 32 * 1024 * 1024


class ClientGone(Exception):  # noqa: N818 - not an error
    """The client left before its request was read."""


class HttpApp:
    def __init__(self, engine: MockEngine) -> None:
        self.engine = engine
        self._routes: dict[tuple[str, str], Callable[[Scope, bytes], Awaitable[tuple[bytes, bytes]] | tuple[bytes, bytes]]] = {
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/kv_event_sources"): self._kv_event_sources,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/reset_prefix_cache"): self._reset,
            ("POST", "/_sim/restart"): self._sim_restart,
            ("POST", "/_sim/drop_events"): self._sim_drop_events,
            ("POST", "/_sim/capacity"): self._sim_capacity,
            ("POST", "/_sim/slow"): self._sim_slow,
            ("GET", "/_sim/state"): self._sim_state,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        request_id = _header(scope, b"x-request-id") or uuid.uuid4().hex
        headers = [JSON, (b"x-request-id", request_id.encode("latin-1"))]
        try:
            body = await _body(receive) if scope["method"] == "POST" else b""
            if self.engine.is_down and not path.startswith("/_sim/"):
                raise ApiError(503, "the mock engine is down on request (/_sim/restart)", "ServiceUnavailableError")
            if scope["method"] == "POST" and path == "/v1/chat/completions":
                await self._generate("chat", scope, body, headers, receive, send)
            elif scope["method"] == "POST" and path == "/v1/completions":
                await self._generate("text", scope, body, headers, receive, send)
            else:
                handler = self._routes.get((scope["method"], path))
                if handler is None:
                    await _answer(send, 404, b'{"detail":"Not Found"}', headers)
                    return
                result = handler(scope, body)
                content, content_type = await result if isinstance(result, Awaitable) else result
                await _answer(send, 200, content, [(b"content-type", content_type), headers[1]])
        except ApiError as e:
            await _answer(send, e.status, e.body, headers)
        except ClientGone:
            return

    # -- answers ------------------------------------------------------------------------------------------------------

    async def _generate(
        self,
        kind: Literal["chat", "text"],
        scope: Scope,
        body: bytes,
        headers: list[tuple[bytes, bytes]],
        receive: Receive,
        send: Send,
    ) -> None:
        engine = self.engine
        asked = parse_completion(kind, body, engine.settings.model, _header(scope, b"x-session-id"))
        rank = engine.pick_rank(_header(scope, b"x-data-parallel-rank"))
        ids = await engine.prompt_ids(asked)
        given = _header(scope, b"x-request-id")
        id_ = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{given or uuid.uuid4().hex[:16]}"
        ticket = engine.submit(rank, id_, ids, asked)
        gone = asyncio.ensure_future(receive())  # next comes nothing but the client's leaving, or our own end
        gone.add_done_callback(lambda _: rank.abort(ticket))
        try:
            if asked.stream:
                await self._stream(ticket, asked, id_, headers, send)
            else:
                await self._whole(ticket, asked, id_, headers, send)
        finally:
            gone.cancel()
            rank.abort(ticket)

    async def _whole(self, ticket: Ticket, asked: Completion, id_: str, headers: list[tuple[bytes, bytes]], send: Send) -> None:
        engine, request = self.engine, ticket.request
        await ticket.progress(0)
        if ticket.engine_died:
            raise ApiError(500, "EngineCore encountered an issue. See stack trace for the root cause.", "InternalServerError")
        if request.aborted:
            raise ClientGone
        content = whole_answer(
            asked.kind,
            id_,
            int(time.time()),
            engine.settings.model,
            engine.answers.text(request.answer),
            request.finish_reason,
            self._usage(request, asked, whole=True),
            self._request_metrics(request),
        )
        await _answer(send, 200, content, headers)

    async def _stream(self, ticket: Ticket, asked: Completion, id_: str, headers: list[tuple[bytes, bytes]], send: Send) -> None:
        engine, request, json_of = self.engine, ticket.request, self.engine.answers.json_of
        writer = StreamWriter(asked.kind, id_, int(time.time()), engine.settings.model, asked.include_usage)
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), headers[1]],
            }
        )
        sent, last = 0, len(request.answer) - 1
        while sent <= last:
            await ticket.progress(sent)
            if request.aborted:
                return  # with the body unfinished the server closes the connection, as a dying engine's would be
            chunks = [writer.opening()] if sent == 0 else []
            for n in range(sent, request.produced):
                word = json_of[request.answer[n]]
                chunks.append(writer.last_token(word, request.finish_reason) if n == last else writer.token(word))
            sent = request.produced
            if sent > last:
                chunks.append(writer.closing(self._usage(request, asked, whole=False), self._request_metrics(request)))
            await send({"type": "http.response.body", "body": b"".join(chunks), "more_body": sent <= last})

    def _usage(self, request: SimRequest, asked: Completion, whole: bool) -> dict[str, Any]:
        cached = request.hit_tokens if self.engine.settings.prompt_tokens_details else None
        created = request.created_tokens if asked.kind == "chat" else None
        return usage(request.table.prompt_tokens, request.produced, cached, created, whole)

    def _request_metrics(self, request: SimRequest) -> dict[str, float] | None:
        first, last, scheduled = request.first_token_s, request.last_token_s, request.scheduled_s
        if not self.engine.settings.per_request_metrics or first is None or last is None or scheduled is None:
            return None
        return request_metrics(scheduled - request.arrived_s, first - request.arrived_s, last - first, request.produced)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _models(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        return models(self.engine.settings.model, self.engine.created, self.engine.max_model_len), JSON[1]

    def _health(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        return b"", JSON[1]

    def _metrics(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        return self.engine.metrics_page(), b"text/plain; version=0.0.4; charset=utf-8"

    def _kv_event_sources(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        return self.engine.kv_event_sources(), JSON[1]

    async def _tokenize(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        q = parse_json(body)
        check_model(q, self.engine.settings.model)
        if isinstance(q.get("messages"), list):
            ids = await self.engine.chat_ids(q["messages"], q.get("tools"), q.get("add_generation_prompt", True) is not False)
        elif isinstance(q.get("prompt"), str):
            ids = await self.engine.text_ids(q["prompt"], q.get("add_special_tokens", True) is not False)
        else:
            raise ApiError(400, "either `messages` or `prompt` is needed")
        strings = [self.engine.tokenizer.decode([i]) for i in ids] if q.get("return_token_strs") else None
        content = {"count": len(ids), "max_model_len": self.engine.max_model_len, "tokens": ids.tolist(), "token_strs": strings}
        return orjson.dumps(content), JSON[1]

    def _reset(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        return orjson.dumps({"success": self.engine.reset_prefix_cache()}), JSON[1]

    def _sim_restart(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        q = _options(body)
        blocks = q.get("num_gpu_blocks")
        if blocks is not None and (not isinstance(blocks, int) or blocks < 2):
            raise ApiError(400, "num_gpu_blocks must be at least 2")
        self.engine.restart(blocks, _number(q, "down_s", 0.0))
        return self._sim_state(scope, body)

    def _sim_drop_events(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        q = _options(body)
        for rank in self._ranks(q):
            rank.publisher.drop_live = int(_number(q, "batches", 1))
        return self._sim_state(scope, body)

    def _sim_capacity(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        q = _options(body)
        for rank in self._ranks(q):
            try:
                rank.cache.limit_capacity(int(_number(q, "blocks", rank.cache.num_gpu_blocks - 1)))
            except ValueError as e:
                raise ApiError(400, str(e)) from e
        return self._sim_state(scope, body)

    def _sim_slow(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        q = _options(body)
        for rank in self._ranks(q):
            rank.slow_factor = _number(q, "factor", 1.0)
        return self._sim_state(scope, body)

    def _sim_state(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        return self.engine.state(), JSON[1]

    def _ranks(self, q: dict[str, Any]) -> list[EngineRank]:
        return self.engine.ranks if q.get("rank") is None else [self.engine.pick_rank(str(q["rank"]))]


def _options(body: bytes) -> dict[str, Any]:
    return parse_json(body) if body else {}


def _number(q: dict[str, Any], key: str, default: float) -> float:
    value = q.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise ApiError(400, f"{key} must be a number from 0")
    return value


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


async def _body(receive: Receive) -> bytes:
    message = await receive()
    if message["type"] != "http.request":
        raise ClientGone
    body: bytes = message.get("body", b"")
    if not message.get("more_body"):
        return body
    parts, size = [body], len(body)
    while message.get("more_body"):
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise ApiError(413, "The body is too large.")
    return b"".join(parts)


async def _answer(send: Send, status: int, content: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (b"content-length", str(len(content)).encode())],
        }
    )
    await send({"type": "http.response.body", "body": content})
