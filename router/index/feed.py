"""kv-events and worker-load -> index: a thread reads and decodes, the event loop applies.

    thread: poll -> decode -> [ News ] --call_soon_threadsafe--> loop: apply in slices of about a millisecond -> thread goes on

The index has one owner, the loop, so a decision needs no lock. The thread waits until its news are applied before it polls again, so a
backlog at the start fills the stream's log and not our memory. Reading begins at the start of the log: then every worker whose epoch
began within its retention is exact. What the log no longer holds shows as DEGRADED.

Of worker-load only the newest records matter, so its last `_LOADS_BACK` a partition are read.

An index that is behind the log knows what was, not what is: every look at the log's ends notes them with the time, and when the index has
applied as much it is level with that time (`PrefixIndex.level_s`). Trust is bounded by it (pools.py), so that neither a backlog at the
start nor a feed that falls behind passes for knowledge. Between two looks each poll tells how far behind it is by the times of its
records (`fresh_s`, for `PrefixIndex.lag_s`): a finer measure, and only as good as the clocks of those who write.

Never silent: a log that lost what we stand at (retention, topic made anew, more partitions) makes every worker blind and is read anew
from its start, counted in `restarts`; a stream that is away is `trouble`, and the workers' trust falls with the silence of their bridges
(pools.py). Bad records are counted; the log names the first and then every thousandth.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from router.pools import Pools
from schemas.kv_events import BadBatch, KvBatch, WorkerId, decode
from schemas.stream import OffsetOutOfRange, Partition, Reader, Slice, Stream, StreamError, TopicSpec, UnknownTopic
from schemas.topics import KV_EVENTS, WORKER_LOAD
from schemas.workers import WorkerLoad

log = logging.getLogger(__name__)

_POLL_S = 0.1
_POLL_RECORDS = 512
_RETRY_S = 0.5
LOOK_S = 5.0
"""How often topics are looked at for a new identity, more partitions, and their ends."""
_SLICE_S = 0.001
_LOADS_BACK = 256
_CLOSE_S = 5.0
_SAY_EVERY = 1000


@dataclass(slots=True)
class News:
    """What one poll brought, decoded."""

    batches: deque[KvBatch] = field(default_factory=deque)
    loads: deque[WorkerLoad] = field(default_factory=deque)
    forget: bool = False
    level_s: float | None = None  # with these the index is level with the log of that time, monotonic seconds
    fresh_s: float | None = None  # with these all that the stream held then is applied, as the records' times tell, monotonic seconds


class FeedSink:
    """The loop's side: applies news to the index and the pools. `done` is called when all of one poll is applied."""

    def __init__(self, pools: Pools, clock: Callable[[], float] = time.monotonic) -> None:
        self._pools, self._clock = pools, clock
        pools.index.level_s = -math.inf
        self.caught_up = False
        self.strangers = 0
        """Batches and loads of pools that are not ours, or of more unknown workers than are followed (Pools.knows)."""
        self.stumbles = 0
        """Batches and loads that could not be applied: an error of ours. The worker is blind until its events go on."""

    def now_s(self) -> float:
        return self._clock()

    def take(self, news: News, loop: asyncio.AbstractEventLoop, done: Callable[[], None]) -> None:
        """Applies as much as fits in a slice, and calls itself again for the rest."""
        if news.forget:
            news.forget = False
            self._pools.index.forget()
            self._pools.index.level_s = self._pools.index.fresh_s = -math.inf
        until_s = self._clock() + _SLICE_S
        while news.batches or news.loads:
            if news.batches:
                self._apply_whatever_happens(news.batches.popleft())
            else:
                self._apply_load_whatever_happens(news.loads.popleft())
            if self._clock() > until_s and (news.batches or news.loads):
                loop.call_soon(self.take, news, loop, done)
                return
        if news.fresh_s is not None:
            self._pools.index.fresh_s = news.fresh_s
        if news.level_s is not None:
            self._pools.index.level_s = news.level_s
            self.caught_up = True
        done()

    def _apply_whatever_happens(self, batch: KvBatch) -> None:
        """The top of the loop's side: the reading thread waits for `done`, so one bad batch must not end all news."""
        try:
            self.apply(batch)
        except Exception:
            self.stumbles += 1
            log.exception("a KV batch of %s could not be applied: nothing that it holds is believed until its events go on", batch.source)
            self._pools.index.distrust(batch.source)

    def _apply_load_whatever_happens(self, load: WorkerLoad) -> None:
        try:
            self._apply_load(load)
        except Exception:
            self.stumbles += 1
            log.exception("a load of %s/%s/%d could not be applied", load.pool, load.worker, load.rank)

    def apply(self, batch: KvBatch) -> None:
        pool = self._pools.by_name.get(batch.source.pool)
        if pool is None or not self._known(batch.source):
            self.strangers += 1
            return
        self._pools.index.apply(batch, self._clock())
        block_size = self._pools.index.slot(batch.source).block_size
        if block_size is not None and batch.source in pool.sources:  # what a stranger cuts is no word about the pool
            pool.learn_block_size(block_size)

    def _apply_load(self, load: WorkerLoad) -> None:
        source = WorkerId(load.pool, load.worker, load.rank)
        pool = self._pools.by_name.get(load.pool)
        if pool is None or not self._known(source):
            self.strangers += 1
            return
        self._pools.index.hear(source, self._clock())
        self._pools.hear_key(source, load.bridge.key_id)
        self._pools.hear_load(pool, load, time.time(), self._clock())
        if load.block_size is not None and pool.block_size is None and source in pool.sources:
            pool.learn_block_size(load.block_size)

    def _known(self, source: WorkerId) -> bool:
        return self._pools.knows(source)


class Feed:
    """start() once with the loop that owns the sink, close() at the end."""

    def __init__(self, stream: Stream, specs: Sequence[TopicSpec], prefix: str, sink: FeedSink, look_s: float = LOOK_S) -> None:
        self._stream, self._specs, self._sink, self._look_s = stream, specs, sink, look_s
        self._kv, self._load = prefix + KV_EVENTS, prefix + WORKER_LOAD
        self._stop = threading.Event()
        self._applied = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._identity: dict[str, str | None] = {}
        self._ends: dict[Partition, int] = {}  # of the log when it was looked at last
        self._ends_s: float | None = None  # when that was; None: the index is level with it
        self.trouble: str | None = "the stream has not been reached yet"
        self.records = 0
        self.bad_records = 0
        self.restarts = 0

    @property
    def caught_up(self) -> bool:
        """The index has applied all that the log held when the feed started."""
        return self._sink.caught_up

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Call from a thread other than the loop's, or after the loop has ended."""
        self._stop.set()
        self._applied.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        """The loop's top: whatever happens, reading starts again, from the start of the log, and says so."""
        first = True
        while not self._stop.is_set():
            reader: Reader | None = None
            try:
                self._stream.ensure_topics(self._specs)
                reader = self._stream.reader()
                self._assign_from_start(reader)
                if not first:
                    self.restarts += 1
                    self._hand_over(News(forget=True))
                first = False
                self._follow(reader)
            except StreamError as e:
                self._say(e)
            except Exception as e:  # counted in `restarts`, shown by `trouble`
                log.exception("the feed stumbled and starts anew")
                self.trouble = f"{type(e).__name__}: {e}"
            finally:
                if reader is not None:
                    reader.close()
            self._stop.wait(_RETRY_S)

    def _say(self, error: StreamError) -> None:
        if self.trouble != str(error):
            log.warning("the index does not follow the stream: %s", error)
        self.trouble = str(error)

    def _assign_from_start(self, reader: Reader) -> None:
        offsets: dict[Partition, int] = {}
        self._ends, self._ends_s = {}, self._sink.now_s()
        for topic in (self._kv, self._load):
            self._identity[topic] = self._stream.identity(topic)
            ends = self._stream.end_offsets(topic)
            back = _LOADS_BACK if topic == self._load else None
            offsets |= {
                (topic, p): start if back is None else max(start, ends[p] - back) for p, start in self._stream.start_offsets(topic).items()
            }
            self._ends |= {(topic, p): end for p, end in ends.items()}
        reader.assign(offsets)

    def _follow(self, reader: Reader) -> None:
        """Polls until stopped. Returns when the log must be read anew; raises StreamError only for what needs a new reader."""
        looked_s = time.monotonic()
        while not self._stop.is_set():
            try:
                slices = reader.poll(_POLL_S, _POLL_RECORDS)
                fresh_s = self._sink.now_s() - _age_s(slices, time.time())
                if time.monotonic() - looked_s > self._look_s:
                    looked_s = time.monotonic()
                    if self._log_changed():
                        return
            except (OffsetOutOfRange, UnknownTopic) as e:
                self._say(e)
                return
            except StreamError as e:  # away: positions stay, so nothing is lost by trying again
                self._say(e)
                self._stop.wait(_RETRY_S)
                continue
            if self.trouble is not None:
                log.info("the index follows the stream")
                self.trouble = None
            news = self._decode(slices)
            if self._ends_s is not None and all(reader.position(p) >= end for p, end in self._ends.items()):
                news.level_s, self._ends_s = self._ends_s, None
            news.fresh_s = fresh_s
            self._hand_over(news)

    def _log_changed(self) -> bool:
        """Looks at the log: its ends, to measure the index by; True when it is another log."""
        asked_s, found = self._sink.now_s(), dict[Partition, int]()
        for topic in (self._kv, self._load):
            known = {p for t, p in self._ends if t == topic}
            ends = self._stream.end_offsets(topic)
            if self._stream.identity(topic) != self._identity[topic] or set(ends) != known:
                log.warning("the topic %s was made anew or has other partitions: the index is built anew", topic)
                return True
            found |= {(topic, p): end for p, end in ends.items()}
        if self._ends_s is None:  # else the index has not come to the ends of the last look yet: these stand until it has
            self._ends, self._ends_s = found, asked_s
        return False

    def _decode(self, slices: Sequence[Slice]) -> News:
        news = News()
        for part in slices:
            for record in part.records:
                self.records += 1
                try:
                    if part.topic == self._kv:
                        news.batches.append(decode(bytes(record.value or b"")))
                    else:
                        news.loads.append(WorkerLoad.model_validate_json(record.value or b""))
                except (BadBatch, ValidationError) as e:
                    if self.bad_records % _SAY_EVERY == 0:
                        log.warning("a record of %s at %d was set aside (%d before): %s", part.topic, record.offset, self.bad_records, e)
                    self.bad_records += 1
        return news

    def _hand_over(self, news: News) -> None:
        assert self._loop is not None
        self._applied.clear()
        if self._stop.is_set():
            return
        try:
            self._loop.call_soon_threadsafe(self._sink.take, news, self._loop, self._applied.set)
        except RuntimeError:  # the loop has closed
            self._stop.set()
            return
        self._applied.wait()


def _age_s(slices: Sequence[Slice], wall_s: float) -> float:
    """How old the newest record of the partition that is farthest behind is; what follows it is younger. 0 when nothing came."""
    newest_s = min((part.records[-1].timestamp / 1000 for part in slices), default=wall_s)
    return max(0.0, wall_s - newest_s)
