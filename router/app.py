"""`warmwatch route`: the router's process, from its settings to a clean end.

    those of endpoints.py                   proxy.completion      routed by prefix, recorded
    /v1/models                              union over the pools
    /healthz  /readyz  /metrics             alive; able to do its job; for Prometheus
    anything else                           proxy.pass_through    to a worker by load

On a second, loopback port: admin.py.

Start: settings, fleet, key and tokenizers are checked before the port is taken. End (ending.py): no new connections, requests on their
way may end within `drain_s`, what is left is cancelled; then records are flushed, then exit 0. SIGHUP reads the fleet anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import logging
import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from router.access.gate import Gate, Visit, visit_of
from router.access.refusal import Refused
from router.access.tls import certificate_of
from router.access.upstream_key import upstream_credentials
from router.admin import Admin
from router.ending import Ending
from router.endpoints import ENDPOINTS
from router.http.asgi import Receive, Scope, Send, header_bytes, respond, respond_json
from router.http.server import Limits, Server
from router.http.upstream import Timeouts, Upstream, client_tls
from router.index.approximate import ApproximateIndex
from router.index.feed import LOOK_S, Feed, FeedSink
from router.index.prefix_index import BLIND
from router.metrics import (
    AccessCollector,
    PolicyCollector,
    PromptsCollector,
    ReplicasCollector,
    RouterMetrics,
    StateCollector,
    WorkersCollector,
)
from router.policy.fit import new_fit
from router.pools import Pools, PoolState, TooManyWorkers, TrustRules
from router.prompts.reader import PromptReader, pool_tokens
from router.prompts.served import ServedModels
from router.prompts.tokens import LocalTokenizer
from router.proxy import Proxy, client_session
from router.records.recorder import Recorder
from router.replicas.link import link_of
from router.settings import RouterSettings
from router.warm_up import warm_up
from router.workers.membership import Membership
from router.workers.probes import Probes
from router.workers.watch import Watch
from schemas.fleet import Fleet, load_fleet
from schemas.settings import SettingsError
from schemas.stream import BadStreamUrl, Stream, open_stream
from schemas.topics import topic_specs

log = logging.getLogger(__name__)

_FLUSH_S = 5.0
_FIND_S = 2.0
"""How long the start waits for discovery; what it finds later joins then."""
_OTHER_KEY = "blocks of {} match no prompt: the bridge has another hash key than this router; set the same hash_key for both"
_MODELS_EVERY_S = 10.0
_BLOCK_SIZE_LABEL = re.compile(r'^vllm:cache_config_info\{[^}]*\bblock_size="(\d+)"', re.MULTILINE)


def run(settings: RouterSettings) -> int:
    """Runs until SIGTERM or SIGINT. Returns 0. Raises SettingsError for what can be told wrong at the start."""
    fleet = load_fleet(settings.fleet)
    tokenizers = {p.name: LocalTokenizer.from_dir(p.tokenizer) for p in fleet.pools if p.tokenizer is not None}
    try:
        stream = open_stream(settings.stream)
    except BadStreamUrl as e:
        raise SettingsError(f"setting `stream`: {e}") from e
    with (
        stream,
        listen(settings.host, settings.port, "port") as listener,
        listen("127.0.0.1", settings.admin_port, "admin_port") as admin_listener,
    ):
        settings.key()
        try:
            router = Router(settings, fleet, tokenizers, stream, fleet_file=settings.fleet)
        except TooManyWorkers as e:
            raise SettingsError(f"fleet file {settings.fleet}: {e}") from e
        log.info("loading kernels; on a new machine they are compiled first, for half a minute or so")
        warm_up()  # last, so that what is wrong in settings and files is told at once
        calm_collector()
        uvloop.run(_serve(router, listener, admin_listener))
    return 0


def calm_collector() -> None:
    """What stands now stands until the end, and a request makes no cycles: the garbage collector need not look often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@contextlib.contextmanager
def listen(host: str, port: int, setting: str) -> Iterator[socket.socket]:
    """A listening socket. Raises SettingsError that says what to do when the port is taken or the address is not ours."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as e:
        flag = "--" + setting.replace("_", "-")
        if e.errno == errno.EACCES:
            raise SettingsError(f"setting `{setting}`: {port} needs rights that this user lacks; choose one above 1023 with {flag}") from e
        if e.errno == errno.EADDRINUSE:
            raise SettingsError(
                f"setting `{setting}`: {host}:{port} is in use; stop what listens there, or choose another with {flag}"
            ) from e
        raise SettingsError(f"setting `host`: cannot listen on {host}:{port}: {e.strerror or e}") from e
    with listener:
        yield listener


async def _serve(router: Router, listener: socket.socket, admin_listener: socket.socket) -> None:
    await router.start()
    server = router.server()
    admin = Server(router.admin())
    with router.ending.signals(router.watch.read_anew):  # until all has stopped: no signal cuts off what is written last
        await _serve_until_it_ends(router, server, admin, listener, admin_listener)


async def _serve_until_it_ends(
    router: Router, server: Server, admin: Server, listener: socket.socket, admin_listener: socket.socket
) -> None:
    try:
        at, admin_at = _url(listener, "http" if router.certificate is None else "https"), _url(admin_listener)
        if router.gate.is_open and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            log.warning("whoever reaches %s may send requests: give keys (setting `api_keys_file`), or listen on loopback", at)
        log.info("routing on %s, admin on %s (%s)", at, admin_at, router.summary())
        await admin.start(admin_listener)
        await server.start(listener)
        print(f"READY router={at} admin={admin_at}", flush=True)
        await router.ending.wait()
        log.info("no new connections are taken; %d requests may end within %g s", len(server.tasks), router.settings.drain_s)
        draining = asyncio.create_task(server.drain(router.settings.drain_s))
        hurry = asyncio.create_task(router.ending.hurry.wait())
        await asyncio.wait((draining, hurry), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if router.ending.hurry.is_set():
            server.cut_off()
        cut = await draining
        log.info("all requests have ended, %d of them cut off" if cut else "all requests have ended", *([cut] if cut else []))
    finally:
        await admin.drain(0)
        await router.stop()
        await asyncio.to_thread(router.close)


def _url(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


class Router:
    """All parts, built once. start() and stop() on the loop, close() after them."""

    def __init__(
        self,
        settings: RouterSettings,
        fleet: Fleet,
        tokenizers: dict[str, LocalTokenizer],
        stream: Stream,
        clock: Callable[[], float] = time.monotonic,
        fleet_file: Path | None = None,
    ) -> None:
        """fleet_file: where the fleet was read from, to be read again when it changes; None: it stays as it is."""
        self.settings = settings
        self.pools = Pools(
            fleet,
            tokenizers,
            settings.policy,
            settings.coefficients(),
            settings.key(),
            TrustRules(settings.stale_after_s, settings.blind_after_s),
            random.Random(settings.seed),
            settings.choose_rank,
            settings.worker_rules(),
            settings.policy_rules(),
            settings.coefficient_book(),
            settings.index_max_bytes,
            ApproximateIndex(settings.approximate_max_bytes, settings.approximate_decay_s),
        )
        self._pool_tokens = pool_tokens(fleet, settings.tokens, tokenizers)
        specs = topic_specs(settings.topic_prefix)
        self.gate = Gate(settings.api_keys_file, settings.open_metrics)
        self.certificate = certificate_of(settings.tls_cert_file, settings.tls_key_file)
        self._credentials = upstream_credentials(
            settings.upstream_api_key,
            settings.upstream_api_key_file,
            settings.forward_credentials,
            has_keys_file=settings.api_keys_file is not None,
        )
        timeouts = Timeouts(settings.connect_timeout_s, settings.first_byte_timeout_s, settings.idle_timeout_s)
        self._upstream = Upstream(timeouts, client_tls(settings.upstream_ca_file, settings.upstream_verify))
        self.metrics = RouterMetrics()
        self.recorder = Recorder(stream, specs, settings.topic_prefix, settings.record_buffer)
        self.membership = Membership(fleet, self.pools, self.recorder, settings.router_name, settings.worker_drain_s)
        self.watch = Watch(fleet, fleet_file, self.membership, settings.watch_fleet_s, clock)
        self.ending = Ending(settings.drain_delay_s)
        sink = FeedSink(self.pools, clock)
        self.feed = Feed(stream, specs, settings.topic_prefix, sink, min(LOOK_S, settings.stale_after_s / 3))
        self.metrics.registry.register(StateCollector(self.pools, self.feed, sink, self.recorder, clock))
        self.metrics.registry.register(WorkersCollector(self.pools, self.membership, self.watch, clock))
        self.metrics.registry.register(PolicyCollector(self.pools, clock))
        self.metrics.registry.register(AccessCollector(self.gate))
        self.replicas = link_of(settings, self.pools, clock)
        if self.replicas is not None:
            self.metrics.registry.register(ReplicasCollector(self.replicas))
        self._started_s, self._clock = clock(), clock
        self._tasks: list[asyncio.Task[None]] = []

    def summary(self) -> str:
        modes = {p.name: self._pool_tokens[p.name].mode(p.tokenizer is not None) for p in self.pools}
        parts = (f"{p.name}: {int(p.present.sum())} targets, tokens {modes[p.name]}" for p in self.pools)
        return f"policy {self.settings.policy}; " + "; ".join(parts)

    def admin(self) -> Admin:
        return Admin(self.pools, self.recorder, self.settings.router_name, self.membership, self._clock, self.metrics.page)

    def server(self) -> Server:
        """The router's own, not started yet."""
        s = self.settings
        limits = Limits(s.max_head_bytes, s.max_headers, request_s=s.client_timeout_s, stall_s=s.client_timeout_s)
        tls = None if self.certificate is None else self.certificate.context
        return Server(self, limits, tls, on_refusal=lambda status: self.metrics.rejected(status, "http"))

    async def start(self) -> None:
        self._started_s = self._clock()
        self._session = client_session(self._credentials)
        self._upstream.start()
        self._prompts = PromptReader(
            self._session, self.settings.tokenize_timeout_s, self.settings.max_prompt_chars, self.settings.max_waiting_prompts,
            self._pool_tokens, self.settings.known_chats_mb << 20,
        )  # fmt: skip
        self.metrics.registry.register(PromptsCollector(self._prompts, self.pools))
        self._proxy = Proxy(
            self.settings, self.pools, self._prompts, self._upstream, self.recorder, self.metrics, self._credentials, self.replicas
        )
        self.recorder.start()
        with contextlib.suppress(TimeoutError):  # before the feed, so that the first events find their workers
            async with asyncio.timeout(_FIND_S):
                await self.watch.look(at_once=True, file=False)
        self.feed.start(asyncio.get_running_loop())
        jobs = (self._look_after, self._learn_block_size, self._learn_models)
        self._tasks = [asyncio.create_task(job(pool)) for pool in self.pools for job in jobs]
        self._tasks.append(asyncio.create_task(self.watch.run()))
        self._tasks.append(asyncio.create_task(self.gate.follow()))
        self._tasks.append(asyncio.create_task(self._fit()))
        if self.replicas is not None:
            await self.replicas.start()
        if self.certificate is not None:
            self._tasks.append(asyncio.create_task(self.certificate.follow()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.replicas is not None:
            await self.replicas.stop()
        await asyncio.to_thread(self.feed.close)
        self._prompts.close()
        self._upstream.close()
        await self._session.close()

    def close(self) -> None:
        """Flushes the records. Blocks for at most some seconds."""
        self.recorder.close(_FLUSH_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            visit = self.gate.enter(scope)
            try:
                await self._answer(scope, receive, send)
            finally:
                visit.leave()
        except Refused as refused:  # always before the head of an answer
            self.metrics.rejected(refused.status, refused.reason)
            headers = refused.answer_headers()
            given = header_bytes(scope["headers"], b"x-request-id")
            if given is not None and all(name != b"x-request-id" for name, _ in headers):
                headers.append((b"x-request-id", given))
            await respond_json(send, refused.status, refused.content(scope["path"]), headers)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path in ENDPOINTS and method == "POST":
            await self._proxy.completion(scope, receive, send)
        elif path == "/v1/models" and method == "GET":
            await respond_json(send, 200, await self._models(visit_of(scope)))
        elif path == "/healthz":
            await respond(send, 200, b"ok\n", b"text/plain")
        elif path == "/readyz":
            status, content = self.readiness()
            await respond_json(send, status, content if self.gate.knows(scope) else {"ready": status == 200})
        elif path == "/metrics":
            await respond(send, 200, self.metrics.page(), b"text/plain; version=0.0.4; charset=utf-8")
        else:
            await self._proxy.pass_through(scope, receive, send)

    def readiness(self) -> tuple[int, dict[str, Any]]:
        """200 when a pool has a worker that answers, the index has caught up (or `warm_up_s` has passed) and the router is not about to
        end.

        Neither a pool of which no worker answers nor a stream that is away makes the router unready: what can be served is served, the
        latter by what is known and then by load. Both are said here.
        """
        now_s = self._clock()
        warming = not self.feed.caught_up and now_s - self._started_s < self.settings.warm_up_s
        pools = {
            p.name: {
                "targets": int(p.present.sum()),
                "up": int((p.present & p.health.up_at(now_s)).sum()),
                "blind": int((p.present & (self.pools.trust(p, now_s) == BLIND)).sum()),
                "draining": int(p.draining.sum()),
                "waiting": p.admission.waiting,
                "block_size": p.block_size,
                "tokens": self._pool_tokens[p.name].mode(p.tokenizer is not None),
            }
            for p in self.pools
        }
        dark = [name for name, p in pools.items() if p["targets"] and not p["up"]]
        empty = not any(p["targets"] for p in pools.values())
        serving = any(p["up"] for p in pools.values())
        strange = [f"{p.name}/{t.worker}" for p in self.pools for t in p.here() if self.pools.has_other_key(p, t.number)]
        ready = serving and not warming and not self.ending.leaving
        index = "away" if self.feed.trouble else "following" if self.feed.caught_up else "catching up"
        content = {
            "ready": ready,
            "index": index,
            "why": [
                *(["the router is about to end"] if self.ending.leaving else []),
                *(["no pool has a worker"] if empty else []),
                *([f"no worker of {', '.join(dark)} answers"] if dark else []),
                *(["the index is catching up with the stream"] if warming else []),
                *([f"the index does not follow the stream: {self.feed.trouble}"] if self.feed.trouble else []),
                *([_OTHER_KEY.format(", ".join(dict.fromkeys(strange)))] if strange else []),
                *(f"{source}: {text}" for source, text in self.watch.trouble.items()),
                *([f"records wait: {self.recorder.trouble}"] if self.recorder.trouble else []),
                *([self.replicas.trouble] if self.replicas is not None and self.replicas.trouble else []),
                *([f"API keys: {self.gate.trouble}"] if self.gate.trouble else []),
                *([f"TLS: {self.certificate.trouble}"] if self.certificate is not None and self.certificate.trouble else []),
            ],
            "pools": pools,
            **({} if self.replicas is None else {"replicas": sorted(self.replicas.heard.names)}),
        }
        return (200 if ready else 503), content

    async def _models(self, visit: Visit) -> dict[str, Any]:
        """What a worker of each pool says it serves, or for a pool whose workers are silent the fleet file's name; what the key may use."""
        found: dict[str, Any] = {}
        for pool, listed in zip(self.pools, await asyncio.gather(*(self._models_of(p) for p in self.pools)), strict=True):
            for model in listed or [{"id": pool.model, "object": "model", "owned_by": "warmwatch"}]:
                if visit.may_use(str(model.get("id"))):
                    found.setdefault(str(model.get("id")), model)
        return {"object": "list", "data": list(found.values())}

    async def _fit(self) -> None:
        """Looks now and then whether outcomes give better prefill coefficients; computed beside the loop."""
        book = self.pools.book
        while True:
            await asyncio.sleep(self.settings.fit_every_s)
            try:
                for entry in book.refits():
                    book.settle(entry, await asyncio.to_thread(new_fit, entry.window.rows(), book.reference(entry)))
            except Exception:  # the top of this task's loop
                self.metrics.crashes.inc()
                log.exception("fitting the prefill coefficients failed")

    async def _learn_models(self, pool: PoolState) -> None:
        """Adapters come and go while engines run, so their workers are asked again and again."""
        while True:
            try:
                pool.served = ServedModels.of(await self._models_of(pool)) or pool.served
            except Exception:  # the top of this task's loop
                self.metrics.crashes.inc()
                log.exception("asking the pool %s for its models failed", pool.name)
            await asyncio.sleep(_MODELS_EVERY_S if pool.served is not None else self.settings.probe_every_s)

    async def _models_of(self, pool: PoolState) -> list[dict[str, Any]]:
        target = next((t for t in pool.here() if pool.health.up[t.number]), None)
        if target is None:
            return []
        try:
            async with self._session.get(f"{target.url}/v1/models", timeout=aiohttp.ClientTimeout(total=2.0)) as response:
                content = await response.json(content_type=None)
                return [m for m in content["data"] if isinstance(m, dict)]
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError):
            return []

    async def _look_after(self, pool: PoolState) -> None:
        """Health checks; draining workers that are empty; requests that wait for a place which a worker has come with."""
        rules = self.settings.worker_rules().probes
        probes = Probes(pool.health, self._session, rules, self._clock)
        try:
            while True:
                try:
                    probes.look()
                    self.membership.tend(pool.name, self._clock())
                    self.pools.forget_strangers(self._clock())
                    self._upstream.forget_others({t.url for p in self.pools for t in p.targets})
                    pool.admission.look()
                except Exception:  # the top of this task's loop
                    self.metrics.crashes.inc()
                    log.exception("looking after the pool %s failed", pool.name)
                await asyncio.sleep(min(1.0, rules.down_every_s))
        finally:
            await probes.close()

    async def _learn_block_size(self, pool: PoolState) -> None:
        """Asks the workers' metrics pages until somebody has told it: an engine, or a bridge's events."""
        while pool.block_size is None:
            try:
                await self._ask_block_size(pool)
            except Exception:  # the top of this task's loop
                self.metrics.crashes.inc()
                log.exception("asking the workers of the pool %s for their block size failed", pool.name)
            await asyncio.sleep(self.settings.probe_every_s)

    async def _ask_block_size(self, pool: PoolState) -> None:
        for target in pool.here():
            try:
                async with self._session.get(f"{target.url}/metrics", timeout=aiohttp.ClientTimeout(total=2.0)) as response:
                    match = _BLOCK_SIZE_LABEL.search(await response.text(errors="replace"))
            except (TimeoutError, aiohttp.ClientError, OSError):
                continue
            if match and int(match[1]) > 0:
                pool.learn_block_size(int(match[1]))
                return
