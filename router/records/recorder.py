"""Decisions and outcomes -> stream, without ever holding up a request.

    request path --decision(), outcome()--> stream writer (bounded buffer, own thread) --> stream
                          \\--> [ bounded queue ] --/    until the topics are known to exist; a thread sees to that

Both bounds drop the newest record and count it: what is dropped is never silent, and memory never grows while the stream is away.

Rejected: building records in a thread of their own (it fought the event loop for the interpreter: milliseconds at the 99th percentile, to
save 30 us).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from schemas.stream import Stream, StreamError, TopicSpec, UnknownTopic, Writer
from schemas.topics import CHANGES, DECISIONS, OUTCOMES

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_LINGER_S = 0.2
"""How long records wait for others to share their transaction: most of a commit is its own, some 1.5 ms of CPU. At 50 ms that was 88 us
of a request at 400 requests a second."""
_AT_ONCE = 64
"""Records handed over under the lock at a time: the event loop may be waiting for it."""


class Recorder:
    """start() once, records from any thread, close() at the end. dropped: records lost, for whatever reason."""

    def __init__(self, stream: Stream, specs: Sequence[TopicSpec], prefix: str, capacity: int) -> None:
        self._stream, self._specs, self._prefix, self._capacity = stream, specs, prefix, capacity
        self._queue: deque[tuple[str, bytes, bytes]] = deque()
        self._changed = threading.Condition()
        self._open = False
        self._closing = False
        self._deadline_s = 0.0
        self._writer: Writer | None = None
        self._refused = 0
        self.recorded = 0
        self._thread = threading.Thread(target=self._keep_open, name="recorder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def decision(self, request_id: str, record: bytes) -> None:
        """record: JSON of schemas.requests.Decision."""
        self._put(self._prefix + DECISIONS, request_id.encode(), record)

    def outcome(self, request_id: str, record: bytes) -> None:
        """record: JSON of schemas.requests.Outcome."""
        self._put(self._prefix + OUTCOMES, request_id.encode(), record)

    def change(self, kind: str, record: bytes) -> None:
        """record: JSON of schemas.changes.Change."""
        self._put(self._prefix + CHANGES, kind.encode(), record)

    @property
    def dropped(self) -> int:
        return self._refused + (self._writer.failed if self._writer else 0)

    @property
    def waiting(self) -> int:
        """Records that the stream does not have yet."""
        return len(self._queue) + (self._writer.pending() if self._writer else 0)

    @property
    def trouble(self) -> str | None:
        """Why records are not delivered right now."""
        if not self._open:
            return "the stream has not been reached yet" if self._queue else None
        return str(self._writer.trouble) if self._writer and self._writer.trouble else None

    def close(self, timeout_s: float) -> None:
        """Delivers what waits, for at most timeout_s; the rest is dropped and counted."""
        with self._changed:
            self._closing = True
            self._deadline_s = time.monotonic() + timeout_s
            self._changed.notify()
        self._thread.join(timeout_s + 1.0)
        with self._changed:
            self._refused += len(self._queue)
            self._queue.clear()
        if self._writer is not None:
            self._writer.close(max(0.0, self._deadline_s - time.monotonic()))
        if self.dropped:
            log.warning("%d decisions and outcomes were dropped since the start", self.dropped)

    def _put(self, topic: str, key: bytes, value: bytes) -> None:
        with self._changed:
            if self._closing:
                self._refused += 1
            elif self._open and not self._queue:  # what waited goes first: an outcome must not overtake its decision
                self._append(topic, key, value)
            elif len(self._queue) < self._capacity:
                self._queue.append((topic, key, value))
            else:
                self._refused += 1

    def _append(self, topic: str, key: bytes, value: bytes) -> None:
        """Caller holds `_changed`."""
        assert self._writer is not None
        try:
            self._writer.append(topic, key, value)
            self.recorded += 1
        except UnknownTopic:  # deleted under us: the thread makes it again
            self._queue.appendleft((topic, key, value))
            self._open = False
            self._changed.notify()
        except StreamError as e:
            if self._refused % 1000 == 0:
                log.warning("a record was dropped (%d before): %s", self._refused, e)
            self._refused += 1

    def _keep_open(self) -> None:
        """Makes the topics, hands over what waited, and sleeps until a topic is missing again."""
        said = False
        while True:
            try:
                self._stream.ensure_topics(self._specs)
                if self._writer is None:
                    self._writer = self._stream.writer(linger_s=_LINGER_S)
            except Exception as e:  # the top of this thread's loop: whatever it is, records wait in their bound and are counted beyond it
                if not said:
                    log.warning("decisions and outcomes wait for the stream: %s", e, exc_info=not isinstance(e, StreamError))
                    said = True
                with self._changed:
                    if self._closing and time.monotonic() + _RETRY_S > self._deadline_s:
                        return
                    self._changed.wait(_RETRY_S)
                continue
            with self._changed:
                self._open = True
            while self._hand_over():
                pass
            with self._changed:
                while self._open and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return

    def _hand_over(self) -> bool:
        """Appends some of what waits; whether there is more."""
        with self._changed:
            for _ in range(min(_AT_ONCE, len(self._queue))):
                if not self._open:
                    break
                self._append(*self._queue.popleft())
            return self._open and bool(self._queue)
