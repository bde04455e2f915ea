"""The writer that all backends share, and the stream that owns such writers: a bounded buffer and one thread that delivers it in order.

    append -> [ queue: bounded by bytes ] -> thread: take a batch -> Delivery.deliver(batch)
                                               ^ StreamUnavailable: keep the batch, wait, again   | refused: counted, on_failure

append decides under the lock and does no IO, so a caller on an event loop may call it directly. Batches are delivered one after the
other, which keeps order without sequence numbers of our own; they grow by themselves while one is under way.

Rejected: expiry of old records (memory is bounded by bytes already, and a late record is worth more than a lost one); retrying a part
of a batch here (a backend that can take a part of it, like Kafka, retries by itself and knows what was taken).
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from schemas.stream.base import (
    DEFAULT_BUFFER_BYTES,
    DEFAULT_LINGER_S,
    Headers,
    OnFailure,
    Reader,
    StreamError,
    StreamFull,
    StreamUnavailable,
    Writer,
    record_bytes,
)

log = logging.getLogger(__name__)

Pending = tuple[str, bytes, bytes, Headers, int, int]
"""(topic, key, value, headers, timestamp_ms, size_bytes)"""
Refused = list[tuple[Pending, StreamError]]

BATCH_RECORDS = 4096
BATCH_BYTES = 4 * 1024 * 1024
HELD_OVERHEAD_BYTES = 256  # Python's own cost of a buffered record, so that small records cannot outgrow the bound
RETRY_MIN_S = 0.05
RETRY_MAX_S = 2.0
IDLE_S = 1.0
JOIN_S = 5.0


class Delivery(Protocol):
    """What differs between backends. All but check run on the writer's thread."""

    def check(self, topic: str, size_bytes: int) -> None:
        """Raise what can be told without IO: RecordTooLarge, UnknownTopic."""

    def deliver(self, batch: Sequence[Pending], report: Callable[[StreamError | None], None], give_up: threading.Event) -> Refused:
        """Store the batch in order and return what was refused for good. StreamUnavailable means that nothing was stored.

        A backend that waits inside says why through report(), and returns soon after give_up is set.
        """

    def tend(self) -> None:
        """Housekeeping between batches, at least every IDLE_S; may raise StreamUnavailable."""

    def close(self) -> None: ...


class BufferedWriter:
    """See base.Writer."""

    def __init__(
        self,
        delivery: Delivery,
        *,
        name: str,
        on_failure: OnFailure | None,
        max_buffer_bytes: int,
        linger_s: float,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._delivery = delivery
        self._name = name
        self._on_failure = on_failure
        self._max_buffer_bytes = max_buffer_bytes
        self._linger_s = linger_s
        self._clock_ms = clock_ms
        self._lock = threading.Lock()
        self._done = threading.Condition(self._lock)
        self._arrived = threading.Event()
        self._hurry = threading.Event()
        self._give_up = threading.Event()
        self._queue: deque[Pending] = deque()
        self._queued_bytes = 0
        self._held_bytes = 0
        self._taken = 0
        self._delivered = 0
        self._failed = 0
        self._closed = False
        self._trouble: StreamError | None = None
        self._tended_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"stream-writer-{name}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<BufferedWriter {self._name} pending={self.pending()} delivered={self._delivered} failed={self._failed}>"

    def append(self, topic: str, key: bytes, value: bytes, headers: Headers = (), timestamp_ms: int | None = None) -> None:
        size = record_bytes(key, value, headers) if headers else len(key) + len(value)
        self._delivery.check(topic, size)
        held = size + HELD_OVERHEAD_BYTES
        if timestamp_ms is None:
            timestamp_ms = self._clock_ms()
        with self._lock:
            if self._closed:
                raise StreamUnavailable(f"the writer to {self._name} is closed")
            if self._held_bytes + held > self._max_buffer_bytes:
                raise StreamFull(self._held_bytes, self._max_buffer_bytes)
            was_empty = not self._queue
            self._queue.append((topic, key, value, headers, timestamp_ms, size))
            self._held_bytes += held
            self._queued_bytes += held
            self._taken += 1
            enough = self._queued_bytes >= BATCH_BYTES or len(self._queue) >= BATCH_RECORDS
        if was_empty:
            self._arrived.set()
        if enough:
            self._hurry.set()

    def flush(self, timeout_s: float) -> None:
        with self._done:
            target = self._taken
            self._hurry.set()
            if not self._done.wait_for(lambda: self._delivered + self._failed >= target, timeout_s):
                waiting = target - self._delivered - self._failed
                why = f": {self._trouble}" if self._trouble else ""
                raise StreamUnavailable(
                    f"{waiting} records for {self._name} are not delivered after {timeout_s:g} s{why}"
                ) from self._trouble

    def pending(self) -> int:
        return self._taken - self._delivered - self._failed

    @property
    def delivered(self) -> int:
        return self._delivered

    @property
    def failed(self) -> int:
        return self._failed

    @property
    def trouble(self) -> StreamError | None:
        return self._trouble

    def close(self, timeout_s: float) -> None:
        with self._lock:
            already, self._closed = self._closed, True
        if already and not self._thread.is_alive():
            return
        try:
            self.flush(timeout_s)
        except StreamUnavailable as error:
            log.warning("closing: %s", error)
        self._give_up.set()
        self._hurry.set()
        self._arrived.set()
        self._thread.join(JOIN_S)

    # --- the writer's thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not (self._give_up.is_set() and not self._queue):
            batch = self._next_batch()
            if batch and self._give_up.is_set():
                # close's time is over: another try of each batch could take minutes while the stream is away.
                given_up = self._trouble or StreamUnavailable(f"{self._name}: given up at close")
                self._settle(batch, [(record, given_up) for record in batch])
            elif batch:
                self._settle(*self._deliver(batch))
            self._tend()
        self._delivery.close()

    def _tend(self) -> None:
        now = time.monotonic()
        if now - self._tended_at < IDLE_S or self._give_up.is_set():
            return
        self._tended_at = now
        try:
            self._delivery.tend()
        except StreamError as error:
            log.warning("%s: housekeeping: %s", self._name, error)

    def _next_batch(self) -> list[Pending]:
        """Wait for records and linger a little for more; [] after IDLE_S without any."""
        if not self._queue:
            self._arrived.wait(IDLE_S)
        self._arrived.clear()
        if not self._queue:
            return []
        self._hurry.wait(self._linger_s)
        batch: list[Pending] = []
        taken_bytes = 0
        with self._lock:
            while self._queue and len(batch) < BATCH_RECORDS and taken_bytes < BATCH_BYTES:
                record = self._queue.popleft()
                batch.append(record)
                taken_bytes += record[5] + HELD_OVERHEAD_BYTES
            self._queued_bytes -= taken_bytes
            if not self._queue:
                self._hurry.clear()
        return batch

    def _deliver(self, batch: list[Pending]) -> tuple[list[Pending], Refused]:
        """The batch, or its first part, and what of it was refused."""
        wait_s = RETRY_MIN_S
        while True:
            try:
                refused = self._delivery.deliver(batch, self._report, self._give_up)
            except StreamUnavailable as error:
                self._report(error)
                if self._give_up.wait(wait_s):
                    return batch, [(record, error) for record in batch]
                wait_s = min(wait_s * 2, RETRY_MAX_S)
                self._tend()  # retention may be what makes room
                batch = self._halve(batch)
            except Exception as error:  # the loop's top: a batch that breaks the backend must not stop the ones behind it
                log.exception("%s: a batch of %d records cannot be delivered", self._name, len(batch))
                failure = StreamError(f"not delivered: {error!r}")
                return batch, [(record, failure) for record in batch]
            else:
                self._report(None)
                return batch, refused

    def _halve(self, batch: list[Pending]) -> list[Pending]:
        """Put the later half back: a log that is nearly full takes little where it would never take much."""
        keep = (len(batch) + 1) // 2
        back = batch[keep:]
        with self._lock:
            self._queue.extendleft(reversed(back))
            self._queued_bytes += sum(record[5] for record in back) + len(back) * HELD_OVERHEAD_BYTES
        return batch[:keep]

    def _report(self, trouble: StreamError | None) -> None:
        if trouble is not None and self._trouble is None:
            log.warning("%s: %s (records wait in the buffer)", self._name, trouble)
        elif trouble is None and self._trouble is not None:
            log.info("%s: delivering again", self._name)
        self._trouble = trouble

    def _settle(self, batch: list[Pending], refused: Refused) -> None:
        if self._on_failure is not None:
            for record, error in refused:
                try:
                    self._on_failure(record[0], record[1], record[2], error)
                except Exception:  # the caller's callback must not end the thread
                    log.exception("%s: on_failure raised", self._name)
        held = sum(record[5] for record in batch) + len(batch) * HELD_OVERHEAD_BYTES
        with self._done:
            self._held_bytes -= held
            self._delivered += len(batch) - len(refused)
            self._failed += len(refused)
            self._done.notify_all()


class BufferedStream(ABC):
    """What all backends share as streams: they own their writers and readers, and close these with themselves."""

    def __init__(self, title: str) -> None:
        self._title = title  # in errors
        self._writers: list[BufferedWriter] = []
        self._readers: list[Reader] = []

    @abstractmethod
    def _new_delivery(self) -> Delivery: ...

    @abstractmethod
    def _new_reader(self) -> Reader: ...

    @abstractmethod
    def _disconnect(self) -> None:
        """Close what is the stream's own, after its writers and readers."""

    def writer(
        self,
        *,
        on_failure: OnFailure | None = None,
        max_buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        linger_s: float = DEFAULT_LINGER_S,
    ) -> Writer:
        writer = BufferedWriter(
            self._new_delivery(), name=self._title, on_failure=on_failure, max_buffer_bytes=max_buffer_bytes, linger_s=linger_s
        )
        self._writers.append(writer)
        return writer

    def reader(self) -> Reader:
        reader = self._new_reader()
        self._readers.append(reader)
        return reader

    def close(self) -> None:
        for writer in self._writers:
            writer.close(0)
        for reader in self._readers:
            reader.close()
        self._disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
