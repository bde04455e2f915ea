"""The one thread that owns all ranks: it reads their sockets, applies what comes, and hands records to the outbox and on to the writer.

It never waits for the stream, the disk or an engine: sockets are polled, `Writer.append` does no IO, replays run beside the live events.
Other threads talk to it through `call`, whose functions run between two turns, and read `health`, which is replaced whole once a turn.

Rejected: zmq.asyncio (a future a message costs more than decoding it); a thread a rank (they would share one interpreter lock anyway).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable

import zmq

from collector.bridge.discovery import Endpoints
from collector.bridge.outbox import Outbox
from collector.bridge.rank_feed import RankFeed
from collector.bridge.rank_link import LinkTimes, RankLink
from schemas.block_hash import HashKey
from schemas.kv_events import WorkerId
from schemas.stream import Writer
from schemas.workers import BridgeHealth

log = logging.getLogger(__name__)

IDLE_POLL_MS = 50
BUSY_POLL_MS = 5
HEALTH_EVERY_S = 0.1


class EventThread:
    def __init__(
        self,
        key: HashKey,
        outbox: Outbox,
        writer: Writer,
        *,
        batch_s: float = 0.005,
        snapshot_interval_s: float = 60.0,
        times: LinkTimes | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._key = key
        self._outbox = outbox
        self._writer = writer
        self._batch_s = batch_s
        self._snapshot_interval_s = snapshot_interval_s
        self._times = times or LinkTimes()
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._links: dict[WorkerId, RankLink] = {}
        self._feeds: dict[WorkerId, RankFeed] = {}
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bridge-events", daemon=True)
        self.health: dict[WorkerId, BridgeHealth] = {}
        self.errors = 0
        self._more = False
        self._stop_by_s = 0.0
        self.turn_s = time.monotonic()
        self.cpu_s = 0.0

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def call(self, what: Callable[[], None]) -> None:
        """Runs on the thread, soon."""
        self._calls.put(what)

    def connect(self, source: WorkerId, endpoints: Endpoints) -> None:
        """Follow a rank at these addresses; replaces the ones of before, keeps what is known of the rank."""
        self.call(lambda: self._connect(source, endpoints))

    def snapshot_soon(self, source: WorkerId) -> None:
        """Only on the thread itself: see Outbox.on_loss."""
        if source in self._feeds:
            self._feeds[source].snapshot_soon()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after it has handed over what it can within the time. Returns whether nothing was left behind."""
        self._stop_by_s = time.monotonic() + timeout_s
        self._stop.set()
        self._thread.join(timeout_s + 2.0)
        return not self._thread.is_alive() and self._outbox.idle

    def _connect(self, source: WorkerId, endpoints: Endpoints) -> None:
        feed = self._feeds.get(source)
        if feed is None:
            feed = self._feeds[source] = RankFeed(
                self._key, source, can_replay=endpoints.replay is not None, snapshot_interval_s=self._snapshot_interval_s
            )
        else:
            feed.set_can_replay(endpoints.replay is not None, self._clock())
        old = self._links.pop(source, None)
        if old is not None:
            old.close()
        try:
            self._links[source] = RankLink(self._context, feed, endpoints.events, endpoints.replay, self._times)
        except zmq.ZMQError as e:
            log.error("%s: cannot follow KV events at %s: %s", source, endpoints.events, e)

    def _run(self) -> None:
        self._context = zmq.Context()
        try:
            while not self._stop.is_set():
                try:
                    self._turn()
                except Exception as e:  # the top of the loop: counted, and the next turn goes on
                    self._failed("a turn", e)
                    time.sleep(0.05)
            self._finish()
        finally:
            for link in self._links.values():
                link.close()
            self._context.destroy(linger=0)

    def _turn(self) -> None:
        while not self._calls.empty():
            self._calls.get_nowait()()
        self._wait()
        more = False
        for link in self._links.values():
            try:
                more |= link.read_live(self._clock)
                link.watch_connection(time.monotonic())
                more |= link.tend_replay(time.monotonic(), self._clock)
            except Exception as e:  # one rank's trouble costs only that rank
                link.feed.broke(self._clock())
                self._failed(str(link.feed.source), e)
        self._publish()
        self._more = more

    def _wait(self) -> None:
        """Until a socket has something, or something is due."""
        if self._more:
            return
        due_s = min((f.waiting_since_s + self._batch_s for f in self._feeds.values() if f.waiting_since_s is not None), default=None)
        wait_ms = IDLE_POLL_MS
        if any(link.busy for link in self._links.values()) or not self._outbox.idle:
            wait_ms = BUSY_POLL_MS
        if due_s is not None:
            wait_ms = max(0, min(wait_ms, int((due_s - self._clock()) * 1000) + 1))
        sockets = [s for link in self._links.values() for s in link.sockets]
        if not sockets:
            self._stop.wait(wait_ms / 1000)
            return
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        poller.poll(wait_ms)

    def _publish(self) -> None:
        now_s = self._clock()
        for feed in self._feeds.values():
            if feed.snapshot_due(now_s) and self._outbox.idle:
                feed.snapshot(now_s)
            since_s = feed.waiting_since_s
            if since_s is not None and (now_s - since_s >= self._batch_s or now_s < since_s):
                for record in feed.take(now_s):
                    self._outbox.put(record)
        self._outbox.push(self._writer)
        turn_s = time.monotonic()
        if turn_s - self.turn_s >= HEALTH_EVERY_S or len(self.health) != len(self._feeds):
            self.turn_s = turn_s
            self.cpu_s = time.thread_time()
            self.health = {
                source: feed.health(self._outbox.waiting[source], self._outbox.dropped[source]) for source, feed in self._feeds.items()
            }

    def _finish(self) -> None:
        """The last records, as far as the writer takes them in time."""
        now_s = self._clock()
        for feed in self._feeds.values():
            for record in feed.take(now_s):
                self._outbox.put(record)
        self._outbox.push(self._writer)
        while not self._outbox.idle and time.monotonic() < self._stop_by_s:
            time.sleep(0.01)
            self._outbox.push(self._writer)

    def _failed(self, where: str, error: Exception) -> None:
        """Names the place and the kind of error, not its text, which could quote content."""
        self.errors += 1
        frame = traceback.extract_tb(error.__traceback__)[-1]
        log.error("%s: %s at %s:%s", where, type(error).__name__, frame.filename, frame.lineno)
