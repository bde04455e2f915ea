"""Between the builders and the stream: a bounded queue that keeps order and never loses silently.

    BuiltRecord -> [ queue, bounded in bytes ] -> writer.append -> stream
                      | full: the oldest goes; its (epoch, seq) range is noted
                      +--> a GAP record for exactly that range, before the worker's next record, and a snapshot once the queue is empty

The writer's own buffer is kept small, so that what waits while the stream is away waits here, where the oldest can still be dropped.
A snapshot that loses a part is dropped whole, since a reader could take the rest for all of it; the next one comes when its time has
come, not at once, since one that is larger than the queue would never fit.

One thread owns an Outbox; only `on_failure` may be called from the writer's thread.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from collector.bridge.record_builder import BuiltRecord
from schemas.kv_events import ENGINE_RESTARTED, EVENT, BadBatch, Kind, KvBatch, WorkerId, decode, encode
from schemas.stream import RecordTooLarge, StreamError, StreamFull, UnknownTopic, Writer

log = logging.getLogger(__name__)

RECORD_OVERHEAD_BYTES = 300  # Python's own cost of a waiting record


@dataclass(slots=True)
class _Loss:
    """Engine batches that the stream will never see."""

    epoch: int
    first: int
    last: int
    starts_epoch: bool
    restarted: bool


class Outbox:
    def __init__(self, topic: str, max_bytes: int, clock: Callable[[], float], on_loss: Callable[[WorkerId], None]) -> None:
        """on_loss is called once a worker's gap mark is on its way and nothing waits any more: readers need a snapshot."""
        self._topic = topic
        self._max_bytes = max_bytes
        self._clock = clock
        self._on_loss = on_loss
        self._queue: deque[BuiltRecord] = deque()
        self._held_bytes = 0
        self._losses: dict[WorkerId, list[_Loss]] = {}
        self._needs_snapshot: set[WorkerId] = set()
        self._failures: deque[bytes] = deque()
        self._sent_up_to: dict[WorkerId, tuple[int, int]] = {}  # (epoch, seq)
        self.waiting: Counter[WorkerId] = Counter()
        self.dropped: Counter[WorkerId] = Counter()
        self.sent = 0

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @property
    def idle(self) -> bool:
        """Nothing waits to be handed to the writer."""
        return not (self._queue or self._losses or self._failures or self._needs_snapshot)

    def put(self, record: BuiltRecord) -> None:
        """Takes a record; drops the oldest when there is no room."""
        self._queue.append(record)
        self._held_bytes += len(record.value) + RECORD_OVERHEAD_BYTES
        self.waiting[record.source] += 1
        while self._held_bytes > self._max_bytes and self._queue:
            self._drop(self._pop())

    def on_failure(self, topic: str, key: bytes, value: bytes, error: StreamError) -> None:
        """The writer gave a record up. Runs on the writer's thread."""
        if topic == self._topic:
            self._failures.append(value)

    def push(self, writer: Writer) -> None:
        """Hands over what the writer takes. Never waits."""
        while self._failures:
            self._failed(self._failures.popleft())
        while self._queue:
            record = self._queue[0]
            try:
                if record.source in self._losses:
                    self._send_gaps(writer, record.source)
                writer.append(self._topic, record.source.key, record.value)
            except (StreamFull, UnknownTopic):
                return
            except RecordTooLarge as e:
                log.error("a record of %s is too large for the stream and is dropped: %s", record.source, e)
                self._drop(self._pop())
                continue
            self.sent += 1
            self._sent_up_to[record.source] = (record.epoch, record.last_seq)
            self._pop()
        try:
            for source in list(self._losses):
                self._send_gaps(writer, source)
        except (StreamFull, UnknownTopic):
            return
        needy, self._needs_snapshot = self._needs_snapshot, set()
        for source in needy:
            self._on_loss(source)

    def _pop(self) -> BuiltRecord:
        record = self._queue.popleft()
        self._held_bytes -= len(record.value) + RECORD_OVERHEAD_BYTES
        self.waiting[record.source] -= 1
        return record

    def _drop(self, record: BuiltRecord) -> None:
        self.dropped[record.source] += 1
        if record.snapshot is None:
            self._needs_snapshot.add(record.source)
            self._note(record.source, _Loss(record.epoch, record.first_seq, record.last_seq, record.starts_epoch, record.restarted))
            return
        rest = [r for r in self._queue if r.source == record.source and r.snapshot == record.snapshot]
        if rest:
            self.dropped[record.source] += len(rest)
            self.waiting[record.source] -= len(rest)
            self._held_bytes -= sum(len(r.value) + RECORD_OVERHEAD_BYTES for r in rest)
            self._queue = deque(r for r in self._queue if r.source != record.source or r.snapshot != record.snapshot)

    def _failed(self, value: bytes) -> None:
        try:
            batch = decode(value)
        except BadBatch:
            return
        self.dropped[batch.source] += 1
        self._needs_snapshot.add(batch.source)
        kinds = batch.events["kind"]
        if not (kinds == Kind.SNAPSHOT).all():
            starts = batch.events[kinds == Kind.EPOCH_STARTED]
            restarted = bool((starts["flags"] & ENGINE_RESTARTED).any())
            self._note(batch.source, _Loss(batch.epoch, batch.first_seq, batch.last_seq, bool(len(starts)), restarted))

    def _note(self, source: WorkerId, loss: _Loss) -> None:
        losses = self._losses.setdefault(source, [])
        if not losses:
            log.warning("records of %s were dropped, the stream takes nothing; a gap mark will follow", source)
        if losses and losses[-1].epoch == loss.epoch and losses[-1].first <= loss.first <= losses[-1].last + 1:
            losses[-1].last = max(losses[-1].last, loss.last)
            losses[-1].starts_epoch |= loss.starts_epoch
            losses[-1].restarted |= loss.restarted
        else:
            losses.append(loss)

    def _send_gaps(self, writer: Writer, source: WorkerId) -> None:
        losses = self._losses[source]
        while losses:
            loss, now_s = losses[0], self._clock()
            rows = [(Kind.GAP, 0, 0, 0, loss.first, now_s, loss.last, 0, 0)]
            if loss.starts_epoch:  # its earlier content is unknown to readers, whatever the lost mark said
                rows.insert(0, (Kind.EPOCH_STARTED, 0, 0, 0, loss.first, now_s, 0, 0, ENGINE_RESTARTED if loss.restarted else 0))
            epoch, seq = self._sent_up_to.get(source, (loss.epoch, loss.last))
            # a mark that comes after later batches (the writer gave an earlier one up) must not look like an old copy
            last = max(loss.last, seq) if epoch == loss.epoch else loss.last
            batch = KvBatch(source, loss.epoch, loss.first, last, None, now_s, np.array(rows, EVENT), np.empty(0, np.uint64))
            writer.append(self._topic, source.key, encode(batch))
            self.sent += 1
            losses.pop(0)
        del self._losses[source]
