"""A running bridge: the event thread, one watch a worker, the status server, and the stream they write to.

start: stream opened (topics as soon as it answers) -> event thread -> watches -> status server
stop:  watches cancelled -> event thread hands over its last records -> writer flushed and closed -> sockets closed
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Self

import aiohttp

from collector.bridge.event_thread import EventThread
from collector.bridge.outbox import Outbox
from collector.bridge.rank_link import LinkTimes
from collector.bridge.settings import BridgeSettings
from collector.bridge.status_server import BridgeMetrics, serve, status_app
from collector.bridge.worker_watch import WorkerWatch
from schemas.fleet import Fleet, Worker
from schemas.settings import SettingsError
from schemas.stream import Stream, StreamError
from schemas.topics import KV_EVENTS, WORKER_LOAD, topic_specs
from schemas.workers import Trust, WorkerLoad

log = logging.getLogger(__name__)

TOPICS_RETRY_S = 1.0
STALLED_S = 10.0  # a turn of the event thread takes milliseconds


class Bridge:
    """`async with Bridge(...)`: follows the workers until the block ends. metrics_port: where the status server listens."""

    def __init__(self, settings: BridgeSettings, fleet: Fleet, stream: Stream) -> None:
        self._settings = settings
        self._stream = stream
        self._workers = _chosen(settings, fleet)
        self._load_topic = settings.topic_prefix + WORKER_LOAD
        self._tasks: list[asyncio.Task[None]] = []
        self._topics_ready = False
        self._stream_trouble: str | None = "topics not looked at yet"
        self.load_records = 0
        self.dropped_loads = 0
        self.metrics_port = 0
        self.watches: list[WorkerWatch] = []
        key = settings.key()
        self.outbox = Outbox(
            settings.topic_prefix + KV_EVENTS, settings.buffer_bytes, time.time, lambda source: self.events.snapshot_soon(source)
        )
        self._writer = stream.writer(
            on_failure=self.outbox.on_failure, max_buffer_bytes=min(settings.writer_buffer_bytes, settings.buffer_bytes)
        )
        self.events = EventThread(
            key,
            self.outbox,
            self._writer,
            batch_s=settings.batch_ms / 1000,
            snapshot_interval_s=settings.snapshot_interval_s,
            times=LinkTimes(settings.replay_silence_s, settings.receive_high_water),
        )

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(trust_env=False)
        self._runner = None
        try:
            app = status_app(BridgeMetrics(lambda: self.events.health, self._process_metrics), self._alive, self.readiness)
            self._runner, self.metrics_port = await serve(app, self._settings.metrics_host, self._settings.metrics_port)
        except BaseException:
            await self._session.close()
            await asyncio.to_thread(self._writer.close, 0)
            raise
        log.info("metrics, /healthz and /readyz on http://%s:%d", self._settings.metrics_host, self.metrics_port)
        self.events.start()
        self._tasks.append(asyncio.create_task(self._ensure_topics()))
        for worker in self._workers:
            watch = WorkerWatch(
                worker,
                self._session,
                connect=self.events.connect,
                health=lambda source: self.events.health.get(source),
                publish=self._publish_load,
                load_interval_s=self._settings.load_interval_s,
                discovery_interval_s=self._settings.discovery_interval_s,
                http_timeout_s=self._settings.http_timeout_s,
            )
            self.watches.append(watch)
            self._tasks.append(asyncio.create_task(watch.run(), name=f"watch {watch.name}"))
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        for done in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(done, Exception):
                log.error("a task of the bridge had failed: %s", type(done).__name__)
        timeout_s = self._settings.stop_timeout_s
        by_s = time.monotonic() + timeout_s
        whole = await asyncio.to_thread(self.events.stop, timeout_s)
        await asyncio.to_thread(self._writer.close, max(0.0, by_s - time.monotonic()))
        if not whole or self._writer.failed:
            log.warning("the stream did not take everything in %g s: what is missing is lost to it", timeout_s)
        await self._session.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Able to do its job: events are read and the stream takes them. Workers without events are named, and why."""
        trouble = self._stream_trouble if not self._topics_ready else (str(self._writer.trouble) if self._writer.trouble else None)
        health = self.events.health
        workers = {
            str(source): {
                "metrics_page": watch.up,
                "events": "followed" if source in health else f"load only: {watch.load_only_because}",
                "trust": health[source].trust if source in health else Trust.BLIND,
            }
            for watch in self.watches
            for source in watch.sources
        }
        load_only = sorted({watch.name for watch in self.watches if watch.load_only_because is not None})
        return trouble is None and self._alive(), {"stream": trouble or "ok", "load_only": load_only, "workers": workers}

    def _alive(self) -> bool:
        return self.events.alive and time.monotonic() - self.events.turn_s < STALLED_S

    async def _ensure_topics(self) -> None:
        specs = topic_specs(self._settings.topic_prefix)
        while True:
            try:
                await asyncio.to_thread(self._stream.ensure_topics, specs)
            except StreamError as e:
                if str(e) != self._stream_trouble:
                    log.warning("the stream is away, records wait: %s", e)
                self._stream_trouble = str(e)
                await asyncio.sleep(TOPICS_RETRY_S)
            else:
                self._topics_ready, self._stream_trouble = True, None
                return

    def _publish_load(self, load: WorkerLoad) -> None:
        source_key = f"{load.pool}/{load.worker}/{load.rank}".encode()
        try:
            self._writer.append(self._load_topic, source_key, load.model_dump_json().encode())
            self.load_records += 1
        except StreamError:  # stale in a second: counted, not kept
            self.dropped_loads += 1

    def _process_metrics(self) -> dict[str, float]:
        return {
            "load_records_total": self.load_records,
            "dropped_loads_total": self.dropped_loads,
            "errors_total": self.events.errors + sum(w.errors for w in self.watches),
            "bad_metrics_pages_total": sum(w.bad_pages for w in self.watches),
            "event_thread_cpu_seconds_total": self.events.cpu_s,
            "outbox_bytes": self.outbox.held_bytes,
            "stream_pending_records": self._writer.pending(),
        }


def _chosen(settings: BridgeSettings, fleet: Fleet) -> tuple[Worker, ...]:
    if not settings.workers:
        if not fleet.workers:
            raise SettingsError(f"setting `fleet`: {settings.fleet} names no workers; add a [[workers]] table for each engine")
        return fleet.workers
    known = {w.name for w in fleet.workers}
    for name in settings.workers:
        if name not in known:
            raise SettingsError(f"setting `workers`: {name!r} is not in the fleet file {settings.fleet}; it has {', '.join(sorted(known))}")
    return tuple(w for w in fleet.workers if w.name in settings.workers)
