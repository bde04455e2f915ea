"""Decisions and outcomes -> stream, without ever holding up a request.

    request path --put--> [ bounded queue ] --thread: model -> JSON--> stream writer (bounded buffer, own thread) --> stream

Both bounds drop the newest record and count it: what is dropped is never silent, and memory never grows while the stream is away. The
thread first makes sure that the topics exist, and waits for the stream as long as it takes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from pydantic import BaseModel

from schemas.requests import Decision, Outcome
from schemas.stream import Stream, StreamError, TopicSpec, UnknownTopic, Writer
from schemas.topics import DECISIONS, OUTCOMES

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_BATCH = 256


class Recorder:
    """start() once, put() from any thread, close() at the end. dropped: records lost, for whatever reason."""

    def __init__(self, stream: Stream, specs: Sequence[TopicSpec], prefix: str, capacity: int) -> None:
        self._stream, self._specs, self._prefix, self._capacity = stream, specs, prefix, capacity
        self._queue: deque[tuple[str, BaseModel]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._deadline_s = 0.0
        self._writer: Writer | None = None
        self._refused = 0
        self.recorded = 0
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def decision(self, record: Decision) -> None:
        self._put(DECISIONS, record)

    def outcome(self, record: Outcome) -> None:
        self._put(OUTCOMES, record)

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
        if self._writer is None:
            return "the stream has not been reached yet" if self._queue else None
        return str(self._writer.trouble) if self._writer.trouble else None

    def close(self, timeout_s: float) -> None:
        """Delivers what waits, for at most timeout_s; the rest is dropped and counted."""
        with self._wake:
            self._closing = True
            self._deadline_s = time.monotonic() + timeout_s
            self._wake.notify()
        self._thread.join(timeout_s + 1.0)
        with self._wake:
            self._refused += len(self._queue)
            self._queue.clear()
        if self._writer is not None:
            self._writer.close(max(0.0, self._deadline_s - time.monotonic()))
        if self.dropped:
            log.warning("%d decisions and outcomes were dropped since the start", self.dropped)

    def _put(self, topic: str, record: BaseModel) -> None:
        with self._wake:
            if len(self._queue) >= self._capacity or self._closing:
                self._refused += 1
                return
            self._queue.append((topic, record))
            if len(self._queue) == 1:
                self._wake.notify()

    def _run(self) -> None:
        if not self._open():
            return
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait()
                batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
                if not batch and self._closing:
                    return
            for topic, record in batch:
                self._write(topic, record)

    def _open(self) -> bool:
        """Makes the topics and the writer; False when closed before the stream could be reached."""
        said = False
        while True:
            try:
                self._stream.ensure_topics(self._specs)
                self._writer = self._stream.writer()
                return True
            except StreamError as e:
                if not said:
                    log.warning("decisions and outcomes wait for the stream: %s", e)
                    said = True
            with self._wake:
                if self._closing and time.monotonic() + _RETRY_S > self._deadline_s:
                    return False
                self._wake.wait(_RETRY_S)
                if self._closing:
                    return False

    def _write(self, topic: str, record: BaseModel) -> None:
        assert self._writer is not None
        try:
            key = str(record.request_id).encode()  # type: ignore[attr-defined]  # both kinds have one
            value = record.model_dump_json().encode()
            try:
                self._writer.append(self._prefix + topic, key, value)
            except UnknownTopic:  # deleted under us
                self._stream.ensure_topics(self._specs)
                self._writer.append(self._prefix + topic, key, value)
            self.recorded += 1
        except StreamError as e:
            self._refused += 1
            log.warning("a record was dropped: %s", e)
        except Exception:  # the top of this thread's loop: one bad record must not end it
            self._refused += 1
            log.exception("a record could not be written")
