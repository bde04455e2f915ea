"""The mock engine's HTTP side, raw ASGI: vLLM's paths, and `/_sim/...` for failures on demand.

| path | |
|---|---|
| POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages | answers, streamed or whole; tool calls if `tool_choice` asks |
| POST /v1/embeddings | vectors told by the prompt |
| GET /v1/responses/ID, POST /v1/responses/ID/cancel | a response made before; also `previous_response_id` |
| GET /v1/models, /health, /metrics, /kv_event_sources | as vLLM |
| POST /tokenize, /detokenize, /v1/messages/count_tokens, /reset_prefix_cache | as vLLM (the reset needs VLLM_SERVER_DEV_MODE there) |
| POST /_sim/fail `{"status", "requests"?, "retry_after_s"?}` | the next requests for answers get that status |
| POST /_sim/restart `{"num_gpu_blocks"?, "down_s"?}` | a new process: empty cache, sequence 0, running requests break |
| POST /_sim/drop_events `{"batches", "rank"?, "for_good"?}` | the next batches are not sent live (replay has them, unless for good) |
| POST /_sim/capacity `{"blocks", "rank"?}` | the cache shrinks or grows without a restart |
| POST /_sim/slow `{"factor"}` | steps take that many times longer |
| GET /_sim/state | ground truth |
"""

from __future__ import annotations

import asyncio
import time
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from router.endpoints import stored_response
from router.prompts import openai_bodies
from simulator import messages_api, responses_api
from simulator.engine import EngineRank, MockEngine, Ticket
from simulator.messages_api import MessagesStream, message
from simulator.openai_api import (
    WRONG_FORM,
    ApiError,
    Completion,
    Kind,
    Said,
    StreamWriter,
    check_model,
    embeddings,
    models,
    parse_completion,
    parse_json,
    request_metrics,
    usage,
    whole_answer,
)
from simulator.responses_api import ResponsesStream, response
from simulator.scheduler import SimRequest

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

JSON = (b"content-type", b"application/json")
MAX_BODY_BYTES = 32 * 1024 * 1024
STORED_RESPONSES = 1_000
GENERATING: dict[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
}
_ID_PREFIXES: dict[Kind, str] = {"chat": "chatcmpl-", "text": "cmpl-", "responses": "resp_", "messages": "chatcmpl-", "embeddings": "embd-"}
_ERROR_NAMES = {
    400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError", 500: "InternalServerError",
    503: "ServiceUnavailableError",
}  # fmt: skip


class ClientGone(Exception):  # noqa: N818 - not an error
    """The client left before its request was read."""


class HttpApp:
    def __init__(self, engine: MockEngine) -> None:
        self.engine = engine
        self._failing = 0
        self._failure: tuple[int, float | None] = 500, None
        self._stored: OrderedDict[str, tuple[list[dict[str, Any]], bytes]] = OrderedDict()
        self._routes: dict[tuple[str, str], Callable[[Scope, bytes], Awaitable[tuple[bytes, bytes]] | tuple[bytes, bytes]]] = {
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/kv_event_sources"): self._kv_event_sources,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/v1/messages/count_tokens"): self._count_tokens,
            ("POST", "/_sim/fail"): self._sim_fail,
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
        kind = GENERATING.get(path) if scope["method"] == "POST" else None
        try:
            body = await _body(receive) if scope["method"] == "POST" else b""
            if not path.startswith("/_sim/"):
                self._fail_on_request(kind)
            if kind is not None:
                await self._generate(kind, scope, body, headers, receive, send)
            else:
                handler = self._routes.get((scope["method"], path)) or self._stored_route(scope)
                if handler is None:
                    await _answer(send, 404, b'{"detail":"Not Found"}', headers)
                    return
                result = handler(scope, body)
                content, content_type = await result if isinstance(result, Awaitable) else result
                await _answer(send, 200, content, [(b"content-type", content_type), headers[1]])
        except ApiError as e:
            if e.retry_after_s is not None:
                headers.append((b"retry-after", f"{e.retry_after_s:g}".encode()))
            await _answer(send, e.status, e.anthropic_body if path.startswith("/v1/messages") else e.body, headers)
        except ClientGone:
            return

    def _fail_on_request(self, kind: Kind | None) -> None:
        """What /_sim/restart and /_sim/fail asked for."""
        if self.engine.is_down:
            raise ApiError(503, "the mock engine is down on request (/_sim/restart)", "ServiceUnavailableError")
        if kind is not None and self._failing:
            self._failing -= 1
            status, retry_after_s = self._failure
            raise ApiError(status, "the mock engine fails on request (/_sim/fail)", _ERROR_NAMES.get(status, "Error"), None, retry_after_s)

    # -- answers ------------------------------------------------------------------------------------------------------

    async def _generate(
        self,
        kind: Kind,
        scope: Scope,
        body: bytes,
        headers: list[tuple[bytes, bytes]],
        receive: Receive,
        send: Send,
    ) -> None:
        engine = self.engine
        adapters = engine.settings.lora
        asked = parse_completion(kind, self._continued(kind, body), engine.settings.model, adapters, _header(scope, b"x-session-id"))
        rank = engine.pick_rank(_header(scope, b"x-data-parallel-rank"))
        prompts = await engine.prompt_ids(asked.asked)
        given = _header(scope, b"x-request-id")
        id_ = f"{_ID_PREFIXES[kind]}{given if given and kind != 'responses' else uuid.uuid4().hex[:16]}"
        tickets: list[Ticket] = []
        gone = asyncio.ensure_future(receive())  # next comes nothing but the client's leaving, or our own end
        gone.add_done_callback(lambda _: _abort(rank, tickets))
        try:
            for ids in prompts:
                for n in range(asked.n):
                    name = id_ if len(prompts) * asked.n == 1 else f"{id_}-{len(tickets)}"
                    tickets.append(engine.submit(rank, name, ids[:], asked, asked.seed + n))
            if asked.stream:
                await self._stream(tickets, asked, id_, headers, send)
            else:
                await self._whole(tickets, asked, id_, headers, send)
        finally:
            gone.cancel()
            _abort(rank, tickets)

    def _continued(self, kind: Kind, body: bytes) -> bytes:
        """A body of /v1/responses with the stored response that it continues written out."""
        q = parse_json(body)
        previous = q.get("previous_response_id") if kind == "responses" else None
        if previous is None:
            return body
        before, made = self._stored_of(previous)
        new = q.get("input")
        if not isinstance(new, (str, list)):
            raise ApiError(400, "input must be a text or a list of items", param="input")
        items = [{"role": "user", "content": new}] if isinstance(new, str) else new
        said = [i for i in orjson.loads(made)["output"] if i["type"] == "message"]
        return orjson.dumps({**q, "previous_response_id": None, "input": [*before, *said, *items]})

    async def _whole(self, tickets: list[Ticket], asked: Completion, id_: str, headers: list[tuple[bytes, bytes]], send: Send) -> None:
        engine = self.engine
        for ticket in tickets:
            await ticket.progress(0)
            if ticket.engine_died:
                raise ApiError(500, "EngineCore encountered an issue. See stack trace for the root cause.", "InternalServerError")
            if ticket.request.aborted:
                raise ClientGone
        created, model, kind = int(time.time()), asked.lora or engine.settings.model, asked.kind
        answers = [self._said(t, asked, i, id_) for i, t in enumerate(tickets)]
        if kind == "embeddings":
            vectors = [engine.answers.vector(t.request.table.tokens[: t.request.table.prompt_tokens]) for t in tickets]
            as_base64 = asked.body.get("encoding_format") == "base64"
            content = embeddings(id_, created, model, vectors, as_base64, self._usage(tickets, asked, whole=True))
        elif kind == "responses":
            content = orjson.dumps(
                response(id_, created, model, asked.body, answers[0], asked.tool, self._usage(tickets, asked, whole=True))
            )
            self._store(asked, id_, content)
        elif kind == "messages":
            content = message(id_, model, answers[0], asked.tool, self._usage(tickets, asked, whole=True))
        else:
            usage_, metrics = self._usage(tickets, asked, whole=True), self._request_metrics(tickets[0].request)
            content = whole_answer(kind, id_, created, model, answers, asked.tool, usage_, metrics)
        await _answer(send, 200, content, headers)

    async def _stream(self, tickets: list[Ticket], asked: Completion, id_: str, headers: list[tuple[bytes, bytes]], send: Send) -> None:
        """One answer after the other; the clients tell them apart by their index."""
        engine, json_of = self.engine, self.engine.answers.json_of
        created, model, kind = int(time.time()), asked.lora or engine.settings.model, asked.kind
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), headers[1]],
            }
        )
        for i, ticket in enumerate(tickets):
            request, call_id = ticket.request, self._call_id(asked, i, id_)
            writer: StreamWriter | ResponsesStream | MessagesStream
            if kind == "responses":
                writer = ResponsesStream(id_, created, model, asked.body, asked.tool, call_id)
            elif kind == "messages":
                writer = MessagesStream(id_, model, request.table.prompt_tokens, asked.tool, call_id)
            else:
                assert kind != "embeddings"
                writer = StreamWriter(kind, id_, created, model, asked.include_usage, i, asked.tool, call_id)
            sent, last = 0, len(request.answer) - 1
            while sent <= last:
                await ticket.progress(sent)
                if request.aborted:
                    return  # with the body unfinished the server closes the connection, as a dying engine's would be
                chunks = [writer.opening()] if sent == 0 else []
                for n in range(sent, request.produced):
                    word = json_of[request.answer[n]]
                    chunks.append(writer.last_token(word, self._finish(request, asked)) if n == last else writer.token(word))
                sent = request.produced
                more = sent <= last or i < len(tickets) - 1
                if not more:
                    chunks.append(writer.closing(self._usage(tickets, asked, whole=False), self._request_metrics(request)))
                await send({"type": "http.response.body", "body": b"".join(chunks), "more_body": more})
        if kind == "responses":
            usage_ = self._usage(tickets, asked, whole=True)
            said = self._said(tickets[0], asked, 0, id_)
            self._store(asked, id_, orjson.dumps(response(id_, created, model, asked.body, said, asked.tool, usage_)))

    def _said(self, ticket: Ticket, asked: Completion, index: int, id_: str) -> Said:
        request = ticket.request
        return Said(self.engine.answers.text(request.answer), self._finish(request, asked), self._call_id(asked, index, id_))

    @staticmethod
    def _call_id(asked: Completion, index: int, id_: str) -> str | None:
        return None if asked.tool is None else f"chatcmpl-tool-{zlib.crc32(f'{id_} {index}'.encode()):08x}"

    @staticmethod
    def _finish(request: SimRequest, asked: Completion) -> str:
        """The mock model's calls are always whole."""
        return request.finish_reason if asked.tool is None else "tool_calls"

    def _usage(self, tickets: list[Ticket], asked: Completion, whole: bool) -> dict[str, Any]:
        """Of several answers to a prompt the prompt counts once."""
        first = [t.request for t in tickets[:: asked.n]]
        prompt_tokens = sum(r.table.prompt_tokens for r in first)
        produced = 0 if asked.kind == "embeddings" else sum(t.request.produced for t in tickets)
        cached = sum(r.hit_tokens or 0 for r in first) if self.engine.settings.prompt_tokens_details else None
        created = sum(r.created_tokens for r in first) if asked.kind not in ("text", "embeddings") else None
        if asked.kind == "responses":
            return responses_api.usage(prompt_tokens, produced, cached, created)
        if asked.kind == "messages":
            return messages_api.usage(prompt_tokens, produced, cached, created if cached is not None else None)
        return usage(prompt_tokens, produced, cached, created, whole)

    def _request_metrics(self, request: SimRequest) -> dict[str, float] | None:
        first, last, scheduled = request.first_token_s, request.last_token_s, request.scheduled_s
        if not self.engine.settings.per_request_metrics or first is None or last is None or scheduled is None:
            return None
        return request_metrics(scheduled - request.arrived_s, first - request.arrived_s, last - first, request.produced)

    # -- stored responses ---------------------------------------------------------------------------------------------

    def _store(self, asked: Completion, id_: str, content: bytes) -> None:
        if asked.body.get("store") is not False:
            given = asked.body.get("input")
            self._stored[id_] = ([{"role": "user", "content": given}] if isinstance(given, str) else list(given or ())), content
            if len(self._stored) > STORED_RESPONSES:
                self._stored.popitem(last=False)

    def _stored_of(self, id_: object) -> tuple[list[dict[str, Any]], bytes]:
        found = self._stored.get(id_) if isinstance(id_, str) else None
        if found is None:
            raise ApiError(404, f"Response with id '{id_}' not found.", "invalid_request_error", "response_id")
        return found

    def _stored_route(self, scope: Scope) -> Callable[[Scope, bytes], tuple[bytes, bytes]] | None:
        id_ = stored_response(scope["path"])
        if id_ is None or (scope["method"] == "GET") != scope["path"].endswith(id_):
            return None
        return lambda _scope, _body: (self._stored_of(id_)[1], JSON[1])

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _models(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        settings = self.engine.settings
        return models(settings.model, settings.lora, self.engine.created, self.engine.max_model_len), JSON[1]

    def _health(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        return b"", JSON[1]

    def _metrics(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        return self.engine.metrics_page(), b"text/plain; version=0.0.4; charset=utf-8"

    def _kv_event_sources(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        return self.engine.kv_event_sources(), JSON[1]

    async def _tokenize(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        q = parse_json(body)
        check_model(q, self.engine.settings.model, self.engine.settings.lora)
        if not isinstance(q.get("messages"), list) and not isinstance(q.get("prompt"), str):
            raise ApiError(400, "either `messages` or `prompt` is needed")
        try:
            asked = openai_bodies.chat(q) if "messages" in q else openai_bodies.completion(q)
        except WRONG_FORM as e:
            raise ApiError(400, str(e)) from e
        (ids,) = await self.engine.prompt_ids(asked)
        strings = [self.engine.tokenizer.decode([i]) for i in ids] if q.get("return_token_strs") else None
        content = {"count": len(ids), "max_model_len": self.engine.max_model_len, "tokens": ids.tolist(), "token_strs": strings}
        return orjson.dumps(content), JSON[1]

    def _detokenize(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        q = parse_json(body)
        tokens = q.get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(t, int) and 0 <= t < 1 << 32 for t in tokens):
            raise ApiError(400, "tokens must be a list of token ids", param="tokens")
        return orjson.dumps({"prompt": self.engine.tokenizer.decode(tokens)}), JSON[1]

    async def _count_tokens(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        q = {**parse_json(body), "max_tokens": 1}
        asked = parse_completion("messages", orjson.dumps(q), self.engine.settings.model, self.engine.settings.lora, None)
        (ids,) = await self.engine.prompt_ids(asked.asked)
        return orjson.dumps({"input_tokens": len(ids), "context_management": {"original_input_tokens": len(ids)}}), JSON[1]

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
        for_good = q.get("for_good", False)
        if not isinstance(for_good, bool):
            raise ApiError(400, "for_good must be true or false")
        for rank in self._ranks(q):
            if for_good:
                rank.publisher.lose = int(_number(q, "batches", 1))
            else:
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

    def _sim_fail(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        q = _options(body)
        status, retry_after_s = int(_number(q, "status", 500)), q.get("retry_after_s")
        if not 400 <= status < 600:
            raise ApiError(400, "status must be from 400 to 599")
        self._failing = int(_number(q, "requests", 1))
        self._failure = status, None if retry_after_s is None else _number(q, "retry_after_s", 0.0)
        return self._sim_state(scope, body)

    def _sim_state(self, scope: Scope, body: bytes) -> tuple[bytes, bytes]:
        return self.engine.state(), JSON[1]

    def _ranks(self, q: dict[str, Any]) -> list[EngineRank]:
        return self.engine.ranks if q.get("rank") is None else [self.engine.pick_rank(str(q["rank"]))]


def _abort(rank: EngineRank, tickets: list[Ticket]) -> None:
    for ticket in tickets:
        rank.abort(ticket)


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
