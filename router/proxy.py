"""One completion request from its body to its outcome: read, tokenize, decide, dispatch, relay, record.

    body -> Prompt -> [ decide -> book -> connect ] -> relay chunk by chunk -> Outcome
                          ^ next best, while no byte came back and attempts are left

Invariants. Bytes pass unchanged, chunk by chunk, in both directions (but for `include_usage`). What was booked (flight, expected blocks) is
released on every way out: an answer, an error, a client that leaves, a shutdown. One outcome a request; its decision is recorded when its
bytes have gone to a worker, and again, with the attempts, if it then had to go to another: the last decision of a request holds.
A retry happens only before the first byte of an answer; any status is an answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
from yarl import URL

from router.access.gate import visit_of
from router.access.refusal import Refused
from router.access.upstream_key import UpstreamCredentials
from router.booking import Booking, Replicas
from router.exchange import Exchange
from router.http.asgi import (
    BodyTooLarge,
    ClientLeft,
    Departure,
    RawHeaders,
    Receive,
    Scope,
    Send,
    error_object,
    forwarded_request_headers,
    forwarded_response_headers,
    header,
    read_body,
    respond_json,
    text_of,
)
from router.http.usage import StreamTail, WholeAnswer
from router.metrics import RouterMetrics
from router.pools import Decided, Pools, PoolState
from router.prompts.prompt import Prompt
from router.prompts.reader import PromptReader
from router.records.fields import decision_fields, decision_json, outcome_json
from router.records.recorder import Recorder
from router.records.request_ids import MOST_CHARACTERS, RecordedIds, new_id
from router.settings import RouterSettings
from router.workers.admission import QueueFull
from router.workers.health import retry_after_s
from schemas.requests import Attempt

log = logging.getLogger(__name__)

_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""Headers that aiohttp would add by itself: only the client's own go on."""


class UpstreamTrouble(Exception):  # noqa: N818 - a value, named for what it is
    """A worker gave no answer. kind goes to the outcome; retry: another worker may be asked."""

    def __init__(self, kind: str, text: str, retry: bool) -> None:
        super().__init__(text)
        self.kind, self.retry = kind, retry


def client_session(settings: RouterSettings, credentials: UpstreamCredentials) -> aiohttp.ClientSession:
    """The one session to all workers: no pool limit, no cookies, bodies as they come, Nagle off (aiohttp's default)."""
    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(_headers_sent)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, keepalive_timeout=30),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=dict(credentials.added),
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.read_timeout_s),
        trace_configs=[trace],
        trust_env=False,
    )


async def _headers_sent(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
    """The connection stands and the request is on it."""
    on_sent = context.trace_request_ctx
    if on_sent is not None:
        on_sent()


class Proxy:
    def __init__(
        self,
        settings: RouterSettings,
        pools: Pools,
        prompts: PromptReader,
        session: aiohttp.ClientSession,
        recorder: Recorder,
        metrics: RouterMetrics,
        credentials: UpstreamCredentials = UpstreamCredentials(),  # noqa: B008 - a frozen value
        replicas: Replicas | None = None,
    ) -> None:
        self._settings, self._pools, self._prompts = settings, pools, prompts
        self._session, self._recorder, self._metrics = session, recorder, metrics
        self._ids = RecordedIds()
        self._retry_statuses = settings.worker_rules().retry_statuses
        self._credentials = credentials
        self._replicas = replicas

    async def completion(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/chat/completions and /v1/completions."""
        request_id, ids = self._identify(scope)
        try:
            body = await read_body(receive, self._settings.max_body_bytes)
            content = orjson.loads(body)
            if not isinstance(content, dict):
                raise ValueError("not an object")
        except ClientLeft:
            return None
        except BodyTooLarge:
            text = f"the body is over {self._settings.max_body_bytes} bytes (setting max_body_bytes)"
            return await respond_json(send, 413, error_object(413, text), ids)
        except ValueError as e:
            return await respond_json(send, 400, error_object(400, f"the body must be a JSON object: {e}"), ids)
        model = content.get("model")
        found = self._pools.for_model(model if isinstance(model, str) else None)
        if found is None:
            text = f"The model `{model}` does not exist. Valid models: {', '.join(sorted(p.model for p in self._pools))}."
            return await respond_json(send, 404, error_object(404, text, "model"), ids)
        pool, lora = found
        visit = visit_of(scope)
        visit.use(_name(model) or pool.model)
        exchange = Exchange(
            request_id=request_id,
            id_headers=ids,
            path=scope["path"],
            target_path=_target_path(scope),
            method=scope["method"],
            headers=forwarded_request_headers(scope, self._credentials.withheld),
            body=self._body_to_send(body, content),
            model=_name(model) or pool.model,
            stream=_flag(content.get("stream")),
            route=_name(header(scope, b"x-warmwatch-route")) or "default",
            tenant=visit.tenant or _name(header(scope, b"x-warmwatch-tenant")) or "default",
            session_id=_name(content.get("session_id")) or _name(header(scope, b"x-session-id")),
        )
        try:
            async with Departure(receive) as departure:
                prompt = await self._prompts.read(pool, content, len(body), lora)
                self._metrics.prompt_read(pool.name, prompt)
                visit.spend(prompt.guessed_tokens if prompt.tokens is None else prompt.tokens)
                exchange.id_headers += visit.headers()
                await self._serve(exchange, pool, prompt, send)
            if departure.left:
                exchange.error, exchange.status = "disconnect", None
        except asyncio.CancelledError:
            exchange.error = "shutdown"
            raise
        except Refused as refused:
            exchange.status, exchange.error = refused.status, "rate limit"
            refused.headers += ids
            raise
        except Exception:
            await self._own_error(exchange, send)
        finally:
            self._record_outcome(exchange, pool)

    async def pass_through(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Any other path: to a worker of the first pool (or of the model that the body names), by load alone. Not recorded."""
        request_id = header(scope, b"x-request-id") or new_id()
        ids = [(b"x-request-id", request_id.encode())]
        try:
            body = await read_body(receive, self._settings.max_body_bytes)
        except ClientLeft:
            return
        except BodyTooLarge:
            await respond_json(send, 413, error_object(413, "the body is too large"), ids)
            return
        found = self._pools.for_model(_model_in(body))
        pool = found[0] if found else next(iter(self._pools))
        visit_of(scope).use(_model_in(body) or pool.model)
        headers = forwarded_request_headers(scope, self._credentials.withheld)
        exchange = Exchange(request_id, ids, scope["path"], _target_path(scope), scope["method"], headers, body, pool.model, None)
        try:
            async with Departure(receive) as departure:
                await self._serve(exchange, pool, Prompt.unknown(len(body)), send, recorded=False)
            if departure.left:
                exchange.status = None
        except Exception:
            await self._own_error(exchange, send)
        finally:
            self._metrics.ended(pool.name, exchange.worker, exchange.status)

    async def _own_error(self, exchange: Exchange, send: Send) -> None:
        """The top of a request: what the router itself did wrong is counted, logged and told. Call it while the exception is handled."""
        log.exception("request %s met an error of the router's own", exchange.request_id)
        self._metrics.crashes.inc()
        exchange.error = "internal"
        if not exchange.answering:
            exchange.status = 500
            await respond_json(send, 500, error_object(500, "the router met an error of its own"), exchange.id_headers)

    async def _serve(self, exchange: Exchange, pool: PoolState, prompt: Prompt, send: Send, recorded: bool = True) -> None:
        """Waits for a place at the pool's workers, and is told 429 when there is none."""
        try:
            exchange.waited_s = await pool.admission.enter()
        except QueueFull as full:
            exchange.waited_s, exchange.error, exchange.status = full.waited_s, "queue full", 429
            content = error_object(429, f"the pool {pool.name} is full: {full}")
            await respond_json(send, 429, content, [*exchange.id_headers, (b"retry-after", b"%d" % full.retry_after_s)])
            return
        try:
            await self._dispatch(exchange, pool, prompt, send, recorded)
        finally:
            pool.admission.leave()

    async def _dispatch(self, exchange: Exchange, pool: PoolState, prompt: Prompt, send: Send, recorded: bool) -> None:
        """Sends it to one worker after the other until someone answers, and relays the answer. A further one is asked only before the
        first byte of an answer, and within the pool's budget of retries."""
        trouble: UpstreamTrouble | None = None
        pool.retries.earn()
        while True:
            decided = self._pools.decide(pool, prompt, exchange.tried, time.monotonic())
            if decided is None:
                break
            pool.health.sent(decided.target.number)
            try:
                await self._try(exchange, decided, prompt, send, recorded)
                return
            except UpstreamTrouble as e:
                trouble = e
                exchange.error = e.kind
                if exchange.answering:
                    return
                self._metrics.attempt_failed(pool.name, decided.target.worker)
                after_s = time.monotonic() - (exchange.dispatched_s or exchange.started_s)
                exchange.attempts.append(Attempt(worker=decided.target.worker, error=f"{e.kind}: {e}"[:1000], after_s=max(0.0, after_s)))
                exchange.tried |= {t.number for t in pool.targets if t.url == decided.target.url}
                if e.kind != "status" and not (e.retry and self._may_go_on(exchange, pool)):
                    break
        if trouble is None:
            exchange.error = "no worker"
            status, text = 503, f"the pool {pool.name} has no worker that could be asked"
        elif trouble.kind == "timeout":
            status, text = 504, f"the worker was silent for {self._settings.read_timeout_s:g} s"
        else:
            status, text = 503, f"no worker of the pool {pool.name} answers ({len(exchange.attempts)} tried); the last: {trouble}"
        exchange.status = status
        await respond_json(send, status, error_object(status, text), exchange.id_headers)

    def _may_go_on(self, exchange: Exchange, pool: PoolState) -> bool:
        """Whether a request that got no answer goes to a further worker; then its retry is paid for."""
        return len(exchange.attempts) < self._settings.attempts and pool.retries.take()

    def _goes_on(self, exchange: Exchange, decided: Decided, status: int) -> bool:
        """Whether an answer with this status is left for another worker: one of `retry_statuses`, and another worker that is up."""
        return (
            status in self._retry_statuses
            and len(exchange.attempts) + 1 < self._settings.attempts
            and decided.pool.has_others(decided.target, exchange.tried)
            and decided.pool.retries.take()
        )

    async def _try(self, exchange: Exchange, decided: Decided, prompt: Prompt, send: Send, recorded: bool) -> None:
        """One dispatch to one worker. Raises UpstreamTrouble when there is no answer, or when it breaks off."""
        target = decided.target
        now_s = time.monotonic()
        if recorded:
            exchange.decision = decision_fields(exchange, decided, prompt, self._settings.router_name)
            self._metrics.decided(decided)
            exchange.predicted_tokens = None if prompt.chain is None else decided.predicted_cached_tokens()
        booking = Booking(self._pools, self._replicas, decided, prompt, exchange.stream is True, self._settings.expect_ttl_s, now_s)
        exchange.worker, exchange.rank, exchange.dispatched_s = target.worker, target.rank, now_s
        keeps_blocks = False
        try:
            response = await self._open(exchange, decided)
            try:
                keeps_blocks = response.status == 200
                await self._relay(exchange, decided, prompt, response, booking, send, recorded)
            except BaseException:
                keeps_blocks = False
                response.close()
                raise
            finally:
                response.release()
        finally:
            booking.end(keeps_blocks, time.monotonic())

    async def _open(self, exchange: Exchange, decided: Decided) -> aiohttp.ClientResponse:
        """Sends the request and waits for the head of the answer."""
        target, health = decided.target, decided.pool.health
        headers = [*exchange.headers, ("X-Request-Id", text_of(exchange.id_headers[0][1])), *target.headers, *self._credentials.added]
        try:
            response = await self._session.request(
                exchange.method,
                URL(target.url + exchange.target_path, encoded=True),
                data=exchange.body or None,
                headers=headers,
                skip_auto_headers=_AUTO_HEADERS,
                allow_redirects=False,
                trace_request_ctx=lambda: self._record_decision(exchange),
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as e:
            health.refused(target.number)
            raise UpstreamTrouble("connect", str(e) or type(e).__name__, retry=True) from e
        except TimeoutError as e:
            health.broke(target.number)
            raise UpstreamTrouble("timeout", str(e) or type(e).__name__, retry=False) from e
        except (aiohttp.ClientError, OSError) as e:
            health.broke(target.number)
            raise UpstreamTrouble("upstream", f"{type(e).__name__}: {e}", retry=True) from e
        if response.status >= 400:
            health.failed(target.number, response.status, retry_after_s(response.headers.get("retry-after")))
            if self._goes_on(exchange, decided, response.status):
                response.close()
                raise UpstreamTrouble("status", f"the worker said {response.status}", retry=True)
        exchange.error = None
        return response

    async def _relay(
        self,
        exchange: Exchange,
        decided: Decided,
        prompt: Prompt,
        response: aiohttp.ClientResponse,
        booking: Booking,
        send: Send,
        recorded: bool,
    ) -> None:
        """Chunk by chunk to the client. What is recorded is read for its usage too. Raises UpstreamTrouble when the answer breaks off."""
        exchange.status = response.status
        exchange.answering = True
        streams = response.headers.get("content-type", "").startswith("text/event-stream")
        await send(
            {"type": "http.response.start", "status": response.status, "headers": self._headers(exchange, decided, prompt, response)}
        )
        seen = None if not recorded else StreamTail() if streams else WholeAnswer()
        health, target = decided.pool.health, decided.target.number
        try:
            async for chunk in response.content.iter_any():
                if exchange.ttft_s is None and streams and not chunk.startswith(b":"):  # a comment is no content
                    now_s = time.monotonic()
                    exchange.ttft_s = now_s - (exchange.dispatched_s or now_s)
                    booking.first_token(now_s)
                    self._metrics.first_token(decided.pool.name, decided.target.worker, exchange.ttft_s)
                if not exchange.response_bytes and response.status < 400:  # else `failed` has heard of it
                    health.answered(target)
                exchange.response_bytes += len(chunk)
                if seen is not None:
                    seen.add(chunk)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except (TimeoutError, aiohttp.ClientError, OSError) as e:
            kind = "timeout" if isinstance(e, asyncio.TimeoutError) else "upstream"
            if not exchange.response_bytes:  # engines send the head of a stream before they compute
                health.broke(target)
            if streams:  # say it in the stream; otherwise the connection ends short of its length
                event = b"data: " + orjson.dumps(error_object(502, f"the worker's answer broke off: {type(e).__name__}")) + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": False})
            raise UpstreamTrouble(kind, f"{type(e).__name__}: {e}", retry=False) from e
        if not exchange.response_bytes and response.status < 400:
            health.answered(target)
        if seen is not None and response.status == 200:
            exchange.usage = seen.usage()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _headers(self, exchange: Exchange, decided: Decided, prompt: Prompt, response: aiohttp.ClientResponse) -> RawHeaders:
        headers = forwarded_response_headers(response.raw_headers)
        headers += exchange.id_headers
        headers.append((b"x-warmwatch-worker", decided.target.worker.encode()))
        if prompt.chain is not None:
            headers.append((b"x-warmwatch-predicted-cached-tokens", b"%d" % decided.predicted_cached_tokens()))
        return headers

    def _identify(self, scope: Scope) -> tuple[str, RawHeaders]:
        """The id of the records, and the headers that tell the client's own (or the new one, where it gave none) and the recorded one."""
        given = header(scope, b"x-request-id")
        recorded = self._ids.take(given)
        return recorded, [(b"x-request-id", (given or recorded).encode()), (b"x-warmwatch-request-id", recorded.encode())]

    def _body_to_send(self, body: bytes, content: dict[str, Any]) -> bytes:
        """The client's bytes, or with `include_usage` a stream's body that asks for its usage."""
        options = content.get("stream_options")
        if (
            not self._settings.include_usage
            or content.get("stream") is not True
            or (isinstance(options, dict) and "include_usage" in options)
        ):
            return body
        return orjson.dumps({**content, "stream_options": {**(options if isinstance(options, dict) else {}), "include_usage": True}})

    def _record_decision(self, exchange: Exchange) -> None:
        decision, exchange.decision = exchange.decision, None
        if decision is not None:
            self._recorder.decision(exchange.request_id, decision_json(decision, exchange.attempts))

    def _record_outcome(self, exchange: Exchange, pool: PoolState) -> None:
        self._record_decision(exchange)  # if its bytes never went out: nobody could be reached, or the client left first
        self._metrics.ended(pool.name, exchange.worker, exchange.status)
        self._metrics.reported(pool.name, exchange.usage.prompt_tokens, exchange.usage.cached_tokens, exchange.predicted_tokens)
        self._recorder.outcome(exchange.request_id, outcome_json(exchange, time.monotonic()))


def _target_path(scope: Scope) -> str:
    query = scope["query_string"]
    return str((scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1"))


def _name(value: object) -> str | None:
    return value[:MOST_CHARACTERS] if isinstance(value, str) and value else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _model_in(body: bytes) -> str | None:
    try:
        content = orjson.loads(body) if body else None
    except orjson.JSONDecodeError:
        return None
    return _name(content.get("model")) if isinstance(content, dict) else None
