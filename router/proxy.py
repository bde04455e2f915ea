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
from collections.abc import Mapping
from functools import partial
from typing import Any

import aiohttp
import orjson

from router.access.gate import visit_of
from router.access.refusal import Refused
from router.access.upstream_key import UpstreamCredentials
from router.booking import Booking, Replicas
from router.endpoints import ENDPOINTS, RESPONSES, brings_token, broken_off, own_error, stored_response
from router.exchange import Exchange
from router.http.asgi import (
    CLIENT,
    BodyTooLarge,
    ClientLeft,
    RawHeaders,
    Receive,
    Scope,
    Send,
    first_values,
    forwarded_request_headers,
    forwarded_response_headers,
    header,
    header_bytes,
    header_lines,
    read_body,
    respond_json,
    text_of,
    value_of,
)
from router.http.server import Call
from router.http.upstream import Answer, ConnectFailed, FirstByteTimeout, IdleTimeout, Upstream, UpstreamError
from router.http.usage import StreamTail, WholeAnswer
from router.metrics import RouterMetrics
from router.pools import Decided, Pools, PoolState
from router.prompts.prompt import Prompt
from router.prompts.reader import PromptReader
from router.prompts.text import beginning_of
from router.records.content import SNIPPET_CHARACTERS, RecentPrompts, content_fields
from router.records.fields import decision_fields, decision_json, outcome_json
from router.records.recorder import Recorder
from router.records.request_ids import MOST_CHARACTERS, RecordedIds, new_id
from router.settings import RouterSettings
from router.stored_responses import StoredResponses
from router.workers.admission import QueueFull
from router.workers.health import retry_after_s
from schemas.requests import Attempt

log = logging.getLogger(__name__)


class UpstreamTrouble(Exception):  # noqa: N818 - a value, named for what it is
    """A worker gave no answer. kind goes to the outcome; retry: another worker may be asked."""

    def __init__(self, kind: str, text: str, retry: bool) -> None:
        super().__init__(text)
        self.kind, self.retry = kind, retry


def client_session(credentials: UpstreamCredentials) -> aiohttp.ClientSession:
    """For what the router itself asks the workers: health, models, /tokenize. Requests go by http/upstream.py."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, keepalive_timeout=4),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=dict(credentials.added),
        trust_env=False,
    )


class Proxy:
    def __init__(
        self,
        settings: RouterSettings,
        pools: Pools,
        prompts: PromptReader,
        upstream: Upstream,
        recorder: Recorder,
        metrics: RouterMetrics,
        credentials: UpstreamCredentials = UpstreamCredentials(),  # noqa: B008 - a frozen value
        replicas: Replicas | None = None,
    ) -> None:
        self._settings, self._pools, self._prompts = settings, pools, prompts
        self._upstream, self._recorder, self._metrics = upstream, recorder, metrics
        self._ids = RecordedIds()
        self._told = frozenset(settings.response_headers)
        self._stored = StoredResponses()
        self._retry_statuses = settings.worker_rules().retry_statuses
        self._withheld, self._added_lines = credentials.withheld, header_lines(credentials.added)
        self._replicas = replicas
        self._recent = RecentPrompts()

    async def completion(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A POST to one of endpoints.py."""
        endpoint = ENDPOINTS[scope["path"]]
        request_id, ids = self._identify(scope)
        client: Call = scope[CLIENT]
        try:
            body = client.whole_body()
            if body is None:
                body = await read_body(receive, self._settings.max_body_bytes)
            elif len(body) > self._settings.max_body_bytes:
                raise BodyTooLarge
            content = orjson.loads(body)
            if not isinstance(content, dict):
                raise ValueError("not an object")
        except ClientLeft:
            return None
        except BodyTooLarge:
            self._metrics.rejected(413, "body")
            text = f"the body is over {self._settings.max_body_bytes} bytes (setting max_body_bytes)"
            return await respond_json(send, 413, own_error(scope["path"], 413, text), ids)
        except ValueError as e:
            self._metrics.rejected(400, "body")
            return await respond_json(send, 400, own_error(scope["path"], 400, f"the body must be a JSON object: {e}"), ids)
        model, visit = content.get("model"), visit_of(scope)
        found = self._pools.for_model(model if isinstance(model, str) else None)
        if found is None:
            self._metrics.rejected(404, "model_name")
            valid = sorted(p.model for p in self._pools if visit.may_use(p.model))
            text = f"The model `{model}` does not exist. Valid models: {', '.join(valid)}."
            return await respond_json(send, 404, own_error(scope["path"], 404, text, "model"), ids)
        pool, lora = found
        visit.use(_name(model) or pool.model)
        told = first_values(scope)
        route = _told(told, b"x-warmwatch-route") or "default"
        exchange = Exchange(
            request_id=request_id,
            id_headers=ids,
            path=scope["path"],
            target_path=_target_path(scope),
            method=scope["method"],
            header_lines=forwarded_request_headers(scope, self._withheld),
            body=self._body_to_send(body, content) if endpoint.usage_option else body,
            client=client,
            model=_name(model) or pool.model,
            stream=_flag(content.get("stream")) if endpoint.generates else False,
            route=route,
            tenant=visit.tenant or _told(told, b"x-warmwatch-tenant") or "default",
            template=_told(told, b"x-warmwatch-template") or self._settings.templates.get(route),
            session_id=_name(content.get("session_id")) or _told(told, b"x-session-id"),
            snippet=beginning_of(content, SNIPPET_CHARACTERS) if self._settings.record_snippets else None,
        )
        try:
            prompt = exchange.prompt = await self._prompts.read(pool, content, len(body), lora, endpoint.reads)
            self._metrics.prompt_read(pool.name, prompt)
            visit.spend(prompt.guessed_tokens if prompt.tokens is None else prompt.tokens)
            exchange.id_headers += visit.headers()
            if endpoint.keeps:
                exchange.continues = _name(content.get("previous_response_id"))
            await self._serve(exchange, pool, prompt, send)
        except asyncio.CancelledError:
            if client.left:
                exchange.error, exchange.status = "disconnect", None
            else:
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
        ids = [(b"x-request-id", header_bytes(scope["headers"], b"x-request-id") or request_id.encode())]
        try:
            body = await read_body(receive, self._settings.max_body_bytes)
        except ClientLeft:
            return
        except BodyTooLarge:
            self._metrics.rejected(413, "body")
            await respond_json(send, 413, own_error(scope["path"], 413, "the body is too large"), ids)
            return
        stored = stored_response(scope["path"])
        made_by = self._stored.worker_of(stored)
        content = _object_in(body)
        model = _name(content.get("model")) if content is not None else None
        found = self._pools.for_model(model)
        pool = self._pools.by_name[made_by[0]] if made_by else found[0] if found else next(iter(self._pools))
        visit_of(scope).use(None if content is None else model or pool.model)
        client: Call = scope[CLIENT]
        exchange = Exchange(
            request_id=request_id,
            id_headers=ids,
            path=scope["path"],
            target_path=_target_path(scope),
            method=scope["method"],
            header_lines=forwarded_request_headers(scope, self._withheld),
            body=body,
            client=client,
            model=pool.model,
            stream=None,
            continues=stored,
        )
        try:
            await self._serve(exchange, pool, Prompt.unknown(len(body)), send, recorded=False)
        except asyncio.CancelledError:
            if client.left:
                exchange.status = None
            raise
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
            await respond_json(send, 500, own_error(exchange.path, 500, "the router met an error of its own"), exchange.id_headers)

    async def _serve(self, exchange: Exchange, pool: PoolState, prompt: Prompt, send: Send, recorded: bool = True) -> None:
        """Waits for a place at the pool's workers, and is told 429 when there is none."""
        try:
            exchange.waited_s = await pool.admission.enter()
        except QueueFull as full:
            exchange.waited_s, exchange.error, exchange.status = full.waited_s, "queue full", 429
            content = own_error(exchange.path, 429, f"the pool {pool.name} is full: {full}")
            await respond_json(send, 429, content, [*exchange.id_headers, (b"retry-after", b"%d" % full.retry_after_s)])
            return
        try:
            self._keep_with_its_maker(exchange, pool)  # workers may have come while it waited
            await self._dispatch(exchange, pool, prompt, send, recorded)
        finally:
            pool.admission.leave()

    async def _dispatch(self, exchange: Exchange, pool: PoolState, prompt: Prompt, send: Send, recorded: bool) -> None:
        """Sends it to one worker after the other until someone answers, and relays the answer. A further one is asked only before the
        first byte of an answer, and within the pool's budget of retries."""
        trouble: UpstreamTrouble | None = None
        pool.retries.earn()
        while True:
            decided = self._pools.decide(pool, prompt, exchange.tried, time.monotonic(), exchange.session_id)
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
                    self._metrics.broke_off(pool.name, decided.target.worker, e.kind)
                    log.warning("request %r: worker %s did not end its answer: %s", exchange.request_id, decided.target.worker, e)
                    return
                self._metrics.attempt_failed(pool.name, decided.target.worker)
                after_s = time.monotonic() - (exchange.dispatched_s or exchange.started_s)
                target, error = decided.target, f"{e.kind}: {e}"[:1000]
                exchange.attempts.append(Attempt(worker=target.worker, rank=target.rank, error=error, after_s=max(0.0, after_s)))
                exchange.tried |= {t.number for t in pool.targets if t.url == decided.target.url}
                if e.kind != "status" and not (e.retry and self._may_go_on(exchange, pool)):
                    break
        if trouble is None:
            exchange.error = "no worker"
            status, text = 503, f"the pool {pool.name} has no worker that could be asked"
        elif trouble.kind == "timeout":
            status, text = 504, str(trouble)
        else:
            status, text = 503, f"no worker of the pool {pool.name} answers ({len(exchange.attempts)} tried); the last: {trouble}"
        exchange.status = status
        await respond_json(send, status, own_error(exchange.path, status, text), exchange.id_headers)

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
            behind_s = self._pools.index.lag_s(now_s)
            exchange.describe = partial(decision_fields, exchange, decided, prompt, self._settings.router_name, behind_s)
            self._metrics.decided(decided)
            exchange.predicted_tokens = decided.cached_tokens if prompt.forecasts else None
        booking = Booking(self._pools, self._replicas, decided, prompt, exchange.stream is True, self._settings.expect_ttl_s, now_s)
        exchange.worker, exchange.rank, exchange.dispatched_s = target.worker, target.rank, now_s
        keeps_blocks = False
        try:
            answer = await self._open(exchange, decided)
            try:
                keeps_blocks = answer.status == 200
                await self._relay(exchange, decided, prompt, answer, booking, recorded)
                if recorded and keeps_blocks and prompt.prompts == 1:
                    self._pools.learn(decided, exchange.usage, exchange.ttft_s)
            except BaseException:
                keeps_blocks = False
                answer.close()
                raise
        finally:
            booking.end(keeps_blocks, time.monotonic())

    async def _open(self, exchange: Exchange, decided: Decided) -> Answer:
        """Sends the request and waits for the head of the answer."""
        target, health = decided.target, decided.pool.health
        own = header_lines(target.headers) + self._added_lines
        lines = b"".join((exchange.header_lines, b"x-request-id: ", exchange.id_headers[0][1], b"\r\n", own))
        try:
            answer = await self._upstream.request(
                target.url, exchange.method.encode(), exchange.target_path, lines, exchange.body,
                on_wire=lambda: self._record_decision(exchange), on_connect=exchange.settle_decision,
            )  # fmt: skip
        except ConnectFailed as e:
            health.refused(target.number)
            raise UpstreamTrouble("connect", str(e), retry=True) from e
        except FirstByteTimeout as e:
            health.broke(target.number)
            raise UpstreamTrouble("timeout", str(e), retry=False) from e
        except UpstreamError as e:
            health.broke(target.number)
            raise UpstreamTrouble("upstream", str(e), retry=True) from e
        if answer.status >= 400:
            health.failed(target.number, answer.status, retry_after_s(value_of(answer.headers, b"retry-after")))
            if self._goes_on(exchange, decided, answer.status):
                answer.close()
                raise UpstreamTrouble("status", f"the worker said {answer.status}", retry=True)
        exchange.error = None
        return answer

    async def _relay(self, exchange: Exchange, decided: Decided, prompt: Prompt, answer: Answer, booking: Booking, recorded: bool) -> None:
        """Chunk by chunk to the client. What is recorded is read for its usage too. Raises UpstreamTrouble when the answer breaks off.

        The head goes on with the first byte of the body: engines send the head of a stream before they compute, and a worker that dies
        until then leaves the request to another."""
        client, health, target = exchange.client, decided.pool.health, decided.target
        streams = (value_of(answer.headers, b"content-type") or "").startswith("text/event-stream")
        seen = None if not recorded else StreamTail() if streams else WholeAnswer()
        awaits_token = streams

        def begin() -> None:
            exchange.status, exchange.answering = answer.status, True
            client.start(answer.status, self._headers(exchange, decided, prompt, answer))
            client.source = answer

        def take(chunk: bytes) -> None:
            nonlocal awaits_token
            if not exchange.answering:
                begin()
            if awaits_token and brings_token(exchange.path, chunk):
                awaits_token = False
                now_s = time.monotonic()
                exchange.ttft_s = now_s - (exchange.dispatched_s or now_s)
                booking.first_token(now_s)
                self._metrics.first_token(decided.pool.name, target.worker, exchange.ttft_s)
            if not exchange.response_bytes and answer.status < 400:  # else `failed` has heard of it
                health.answered(target.number)
            go_on(chunk)
            if not awaits_token:
                answer.hand_to(go_on)

        def go_on(chunk: bytes) -> None:
            exchange.response_bytes += len(chunk)
            if seen is not None:
                seen.add(chunk)
            client.write(chunk)

        def end() -> None:
            if not exchange.answering:
                begin()
                if answer.status < 400:
                    health.answered(target.number)
            client.end()

        try:
            await answer.relay(take, end)
        except UpstreamError as e:
            kind = "timeout" if isinstance(e, FirstByteTimeout | IdleTimeout) else "upstream"
            if not exchange.answering:
                health.broke(target.number)
                raise UpstreamTrouble(kind, str(e), retry=kind != "timeout") from e
            if streams:  # say it in the stream; otherwise the connection ends short of its length
                how = "fell silent within its answer" if kind == "timeout" else "broke its answer off"
                client.write(broken_off(exchange.path, f"the worker {how}"))
                client.end()
            else:
                client.abort()
            raise UpstreamTrouble(kind, str(e), retry=False) from e
        if seen is not None and answer.status == 200:
            exchange.usage = seen.usage()
            if exchange.path == RESPONSES:
                self._stored.made(seen.head, decided.pool.name, target.worker)

    def _headers(self, exchange: Exchange, decided: Decided, prompt: Prompt, answer: Answer) -> RawHeaders:
        headers = forwarded_response_headers(answer.headers)
        headers += exchange.id_headers
        if "worker" in self._told:
            headers.append((b"x-warmwatch-worker", decided.target.worker.encode()))
        if prompt.forecasts and "predicted-cached-tokens" in self._told:
            headers.append((b"x-warmwatch-predicted-cached-tokens", b"%d" % decided.cached_tokens))
        if "token-source" in self._told:
            headers.append((b"x-warmwatch-token-source", prompt.source.encode()))
        return headers

    def _keep_with_its_maker(self, exchange: Exchange, pool: PoolState) -> None:
        """What belongs to a stored response goes to the worker that made it, while that is there: no other knows it."""
        made_by = self._stored.worker_of(exchange.continues)
        if made_by is not None and made_by[0] == pool.name:
            others = {t.number for t in pool.targets if t.worker != made_by[1] or not pool.present[t.number]}
            if len(others) < len(pool.targets):
                exchange.tried |= others

    def _identify(self, scope: Scope) -> tuple[str, RawHeaders]:
        """The id of the records, and the headers that tell the client's own (or the new one, where it gave none) and the recorded one."""
        given = header_bytes(scope["headers"], b"x-request-id")
        recorded = self._ids.take(None if given is None else text_of(given))
        headers = [(b"x-request-id", given or recorded.encode())]
        if "request-id" in self._told:
            headers.append((b"x-warmwatch-request-id", recorded.encode()))
        return recorded, headers

    def _body_to_send(self, body: bytes, content: dict[str, Any]) -> bytes:
        """The client's bytes, or with `include_usage` a stream's body that asks for its usage."""
        options = content.get("stream_options")
        if (
            not self._settings.include_usage
            or content.get("stream") is not True
            or (isinstance(options, dict) and "include_usage" in options)
        ):
            return body
        if options is None and "stream_options" not in content:  # spliced in before the last brace: there is at least `stream`
            return body.rstrip()[:-1] + b',"stream_options":{"include_usage":true}}'
        options = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        try:
            return orjson.dumps({**content, "stream_options": options})
        except orjson.JSONEncodeError:  # nested more deeply than can be written
            return body

    def _record_decision(self, exchange: Exchange) -> None:
        exchange.settle_decision()
        decision, exchange.decision = exchange.decision, None
        if decision is not None:
            if exchange.content is None:
                exchange.content = self._content_of(exchange, decision)
            self._recorder.decision(exchange.request_id, decision_json(decision | exchange.content, exchange.attempts))

    def _content_of(self, exchange: Exchange, decision: dict[str, Any]) -> dict[str, Any]:
        """Read the tokens once more: when the request is on its way, it waits for nothing here."""
        if exchange.prompt is None or not self._settings.record_content:
            return {}
        pool: str = decision["pool"]
        kind = pool, exchange.template or exchange.route
        key, overlap_tokens = self._pools.by_name[pool].key, decision["best_overlap_tokens"]
        return content_fields(key, exchange.prompt, overlap_tokens, kind, exchange.session_id, self._recent)

    def _record_outcome(self, exchange: Exchange, pool: PoolState) -> None:
        self._record_decision(exchange)  # if its bytes never went out: nobody could be reached, or the client left first
        self._metrics.ended(pool.name, exchange.worker, exchange.status)
        self._metrics.reported(pool.name, exchange.usage.prompt_tokens, exchange.usage.cached_tokens, exchange.predicted_tokens)
        self._recorder.outcome(exchange.request_id, outcome_json(exchange, pool.name, self._settings.router_name, time.monotonic()))


def _target_path(scope: Scope) -> bytes:
    path: bytes = scope["raw_path"]
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def _name(value: object) -> str | None:
    return value[:MOST_CHARACTERS] if isinstance(value, str) and value else None


def _told(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return _name(text_of(value)) if value else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _object_in(body: bytes) -> dict[str, Any] | None:
    """A body's JSON object, empty where there is no body. None: it is something else, or what only a laxer reader takes for JSON."""
    try:
        content = orjson.loads(body) if body else {}
    except orjson.JSONDecodeError:
        return None
    return content if isinstance(content, dict) else None
