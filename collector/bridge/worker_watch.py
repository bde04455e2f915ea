"""One worker's HTTP side: reads its metrics page once a second into worker-load, and asks where its KV events are."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import aiohttp

from collector.bridge.discovery import Endpoints, ask, from_fleet
from collector.bridge.load import MAX_PAGE_BYTES, LoadReading, read_page
from schemas.fleet import Worker
from schemas.kv_events import WorkerId
from schemas.workers import BridgeHealth, Trust, WorkerLoad

log = logging.getLogger(__name__)

NO_HEALTH = BridgeHealth(trust=Trust.BLIND, epoch=0)


class WorkerWatch:
    """up, load_only_because: what /readyz shows."""

    def __init__(
        self,
        worker: Worker,
        session: aiohttp.ClientSession,
        *,
        connect: Callable[[WorkerId, Endpoints], None],
        health: Callable[[WorkerId], BridgeHealth | None],
        publish: Callable[[WorkerLoad], None],
        load_interval_s: float,
        discovery_interval_s: float,
        http_timeout_s: float,
    ) -> None:
        self.worker = worker
        self.up: bool | None = None
        self.load_only_because: str | None = "not asked yet"
        self.bad_pages = 0
        self.errors = 0
        self._session = session
        self._connect = connect
        self._health = health
        self._publish = publish
        self._load_interval_s = load_interval_s
        self._discovery_interval_s = discovery_interval_s
        self._http_timeout_s = http_timeout_s
        self._endpoints: dict[int, Endpoints] = {}
        self._without_events: set[int] = set()
        self._last: dict[int, LoadReading] = {}

    @property
    def name(self) -> str:
        return f"{self.worker.pool}/{self.worker.name}"

    @property
    def sources(self) -> list[WorkerId]:
        return [WorkerId(self.worker.pool, self.worker.name, rank) for rank in range(self.worker.ranks)]

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._repeat(self._read_and_publish_load, self._load_interval_s))
            given = from_fleet(self.worker)
            if given:
                self._follow(given)
            else:
                tasks.create_task(self._repeat(self._ask_for_endpoints, self._discovery_interval_s))

    async def _repeat(self, turn: Callable[[], Awaitable[None]], interval_s: float) -> None:
        while True:
            began_s = time.monotonic()
            try:
                await turn()
            except Exception as e:  # the top of the loop: counted, and the next turn goes on
                self.errors += 1
                log.error("%s: %s in %s", self.name, type(e).__name__, turn.__name__)
            await asyncio.sleep(max(0.0, interval_s - (time.monotonic() - began_s)))

    async def _ask_for_endpoints(self) -> None:
        try:
            self._follow(await ask(self._session, self.worker, self._http_timeout_s))
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as e:
            if not self._endpoints:
                self._load_only(f"{e}" if isinstance(e, ValueError) and str(e) else f"no answer ({type(e).__name__})")

    async def _read_and_publish_load(self) -> None:
        readings = await self._read_load()
        now_s = time.time()
        for source in self.sources:
            self._publish(self._load(source, None if readings is None else readings.get(source.rank), readings is not None, now_s))

    def _follow(self, found: dict[int, Endpoints]) -> None:
        for source in self.sources:
            endpoints = found.get(source.rank)
            if endpoints is None:
                if source.rank not in self._without_events:
                    self._without_events.add(source.rank)
                    log.warning("%s: the engine names no KV events for this rank; only its load is read", source)
            elif self._endpoints.get(source.rank) != endpoints:
                log.info("%s: KV events from %s, replay from %s", source, endpoints.events, endpoints.replay or "nowhere")
                self._endpoints[source.rank] = endpoints
                self._connect(source, endpoints)
        self.load_only_because = None

    def _load_only(self, why: str) -> None:
        if why != self.load_only_because:
            self.load_only_because = why
            log.warning(
                "%s: load only, its KV events are not followed: %s. The fleet file names no `events` address for it; "
                "set one, or switch KV events on in the engine (--kv-events-config)", self.name, why,
            )  # fmt: skip

    async def _read_load(self) -> dict[int, LoadReading] | None:
        """None: the page did not answer."""
        try:
            timeout = aiohttp.ClientTimeout(self._http_timeout_s)
            async with self._session.get(self.worker.url + "/metrics", timeout=timeout) as response:
                if response.status != 200:
                    raise ValueError(f"GET /metrics answers {response.status}")
                page = await response.content.read(MAX_PAGE_BYTES)
                while len(page) < MAX_PAGE_BYTES and (more := await response.content.read(MAX_PAGE_BYTES - len(page))):
                    page += more
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as e:
            if self.up is not False:
                log.warning("%s: no metrics page at %s (%s)", self.name, self.worker.url, str(e) or type(e).__name__)
            self.up = False
            return None
        if self.up is False:
            log.info("%s: its metrics page answers again", self.name)
        self.up = True
        try:
            return read_page(page.decode("utf-8", "replace"), self.worker.ranks)
        except (ValueError, KeyError, IndexError) as e:
            self.bad_pages += 1
            if self.bad_pages == 1:
                log.warning("%s: its metrics page cannot be read (%s)", self.name, type(e).__name__)
            return {}

    def _load(self, source: WorkerId, reading: LoadReading | None, up: bool, now_s: float) -> WorkerLoad:
        if reading is not None:
            self._last[source.rank] = reading
        # what does not change while an engine is away: its kind, model, size
        last = self._last.get(source.rank)
        now = reading or LoadReading(engine=last.engine if last else self.worker.engine)
        return WorkerLoad(
            pool=source.pool,
            worker=source.worker,
            rank=source.rank,
            time_s=now_s,
            engine=now.engine,
            model=now.model or (last.model if last else None),
            up=up,
            running=now.running,
            waiting=now.waiting,
            kv_usage=now.kv_usage,
            capacity_blocks=now.capacity_blocks,
            block_size=now.block_size,
            prefix_queries_tokens=now.prefix_queries_tokens,
            prefix_hits_tokens=now.prefix_hits_tokens,
            prompt_tokens=now.prompt_tokens,
            generation_tokens=now.generation_tokens,
            preemptions=now.preemptions,
            bridge=self._health(source) or NO_HEALTH,
        )
