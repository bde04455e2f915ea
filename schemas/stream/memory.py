"""The stream inside one process, for tests: the contract without files or sockets.

A MemoryHub is the "broker": it outlives the streams opened on it, and `hub.outage(name, reason)` takes it away and `hub.heal(name)`
brings it back, so that a caller's behaviour in an outage can be tested without one.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence

from schemas.stream.base import (
    OffsetOutOfRange,
    Partition,
    Reader,
    RecordTooLarge,
    Slice,
    StoredRecord,
    StreamError,
    StreamUnavailable,
    TopicSpec,
    UnknownTopic,
    record_bytes,
)
from schemas.stream.buffer import BufferedStream, Delivery, Pending, Refused
from schemas.stream.partitioning import partition_of


class _PartitionLog:
    def __init__(self) -> None:
        self.start = 0
        self.records: list[StoredRecord] = []
        self.held_bytes = 0

    @property
    def end(self) -> int:
        return self.start + len(self.records)

    def delete_before(self, offset: int) -> None:
        count = max(0, min(offset, self.end) - self.start)
        self.held_bytes -= sum(map(_size, self.records[:count]))
        del self.records[:count]
        self.start += count


class _Topic:
    def __init__(self, spec: TopicSpec) -> None:
        self.spec = spec
        self.identity = uuid.uuid4().hex
        self.logs = [_PartitionLog() for _ in range(spec.partitions)]


class _Broker:
    """State of one memory stream; `changed` guards all of it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.topics: dict[str, _Topic] = {}
        self.outage: str | None = None

    def topic(self, name: str) -> _Topic:
        """Caller holds `changed`."""
        if self.outage is not None:
            raise StreamUnavailable(self.outage)
        if name not in self.topics:
            raise UnknownTopic(name)
        return self.topics[name]


class MemoryHub:
    """Holds what memory:// addresses name."""

    def __init__(self) -> None:
        self._brokers: dict[str, _Broker] = {}

    def open(self, name: str) -> MemoryStream:
        return MemoryStream(self._broker(name), name)

    def outage(self, name: str, reason: str = "the memory stream was taken away by the test") -> None:
        broker = self._broker(name)
        with broker.changed:
            broker.outage = reason
            broker.changed.notify_all()

    def heal(self, name: str) -> None:
        broker = self._broker(name)
        with broker.changed:
            broker.outage = None
            broker.changed.notify_all()

    def delete_topic(self, name: str, topic: str) -> None:
        broker = self._broker(name)
        with broker.changed:
            del broker.topics[topic]

    def _broker(self, name: str) -> _Broker:
        return self._brokers.setdefault(name, _Broker())


class MemoryStream(BufferedStream):
    """See base.Stream."""

    def __init__(self, broker: _Broker, name: str) -> None:
        self._broker = broker
        self._name = name
        super().__init__(f"memory://{name}")

    def __repr__(self) -> str:
        return f"<MemoryStream {self._name}>"

    def ensure_topics(self, specs: Iterable[TopicSpec]) -> None:
        with self._broker.changed:
            if self._broker.outage is not None:
                raise StreamUnavailable(self._broker.outage)
            for spec in specs:
                if spec.name in self._broker.topics:
                    self._broker.topics[spec.name].spec = spec
                else:
                    self._broker.topics[spec.name] = _Topic(spec)

    def partitions(self, topic: str) -> int:
        with self._broker.changed:
            return len(self._broker.topic(topic).logs)

    def start_offsets(self, topic: str) -> dict[int, int]:
        with self._broker.changed:
            return {i: log.start for i, log in enumerate(self._broker.topic(topic).logs)}

    def end_offsets(self, topic: str) -> dict[int, int]:
        with self._broker.changed:
            return {i: log.end for i, log in enumerate(self._broker.topic(topic).logs)}

    def identity(self, topic: str) -> str | None:
        with self._broker.changed:
            return self._broker.topic(topic).identity

    def held_bytes(self, topic: str) -> int | None:
        with self._broker.changed:
            return sum(log.held_bytes for log in self._broker.topic(topic).logs)

    def delete_before(self, topic: str, offsets: Mapping[int, int]) -> None:
        with self._broker.changed:
            found = self._broker.topic(topic)
            for partition, offset in offsets.items():
                found.logs[partition].delete_before(offset)

    def apply_retention(self, now_ms: int) -> None:
        """What the writer's thread does about once a second."""
        with self._broker.changed:
            for topic in self._broker.topics.values():
                for log in topic.logs:
                    log.delete_before(_first_kept(log, topic.spec, now_ms))

    def _new_delivery(self) -> Delivery:
        return _MemoryDelivery(self)

    def _new_reader(self) -> Reader:
        return MemoryReader(self._broker)

    def _disconnect(self) -> None:
        """The hub keeps the records."""

    def _store(self, batch: Sequence[Pending]) -> Refused:
        refused: Refused = []
        with self._broker.changed:
            if self._broker.outage is not None:
                raise StreamUnavailable(self._broker.outage)
            for pending in batch:
                name, key, value, headers, timestamp_ms, size = pending
                topic = self._broker.topics.get(name)
                if topic is None:
                    refused.append((pending, UnknownTopic(name)))
                elif size > topic.spec.max_record_bytes:
                    refused.append((pending, RecordTooLarge(topic.spec.max_record_bytes, size)))
                else:
                    log = topic.logs[partition_of(key, len(topic.logs))]
                    log.records.append(StoredRecord(log.end, timestamp_ms, key, value, tuple(headers)))
                    log.held_bytes += size
            self._broker.changed.notify_all()
        return refused


class _MemoryDelivery:
    def __init__(self, stream: MemoryStream) -> None:
        self._stream = stream

    def check(self, topic: str, size_bytes: int) -> None:
        found = self._stream._broker.topics.get(topic)
        if found is not None and size_bytes > found.spec.max_record_bytes:
            raise RecordTooLarge(found.spec.max_record_bytes, size_bytes)

    def deliver(self, batch: Sequence[Pending], report: Callable[[StreamError | None], None], give_up: threading.Event) -> Refused:
        return self._stream._store(batch)

    def tend(self) -> None:
        self._stream.apply_retention(time.time_ns() // 1_000_000)

    def close(self) -> None:
        pass


class MemoryReader:
    """See base.Reader."""

    def __init__(self, broker: _Broker) -> None:
        self._broker = broker
        self._positions: dict[Partition, int] = {}
        self._paused: set[Partition] = set()

    def assign(self, offsets: Mapping[Partition, int]) -> None:
        with self._broker.changed:
            for part, offset in offsets.items():
                self._check(part, offset)
        self._positions = dict(offsets)
        self._paused = set()

    def poll(self, timeout_s: float, max_records: int) -> list[Slice]:
        deadline = time.monotonic() + timeout_s
        with self._broker.changed:
            while True:
                slices = self._read(max_records)
                left_s = deadline - time.monotonic()
                if slices or left_s <= 0:
                    break
                self._broker.changed.wait(left_s)
        for topic, partition, records in slices:
            # The partition goes to the end of the line, so that a busy one cannot starve the others.
            del self._positions[topic, partition]
            self._positions[topic, partition] = records[-1].offset + 1
        return slices

    def pause(self, parts: Iterable[Partition]) -> None:
        self._paused.update(map(self._assigned, parts))

    def resume(self, parts: Iterable[Partition]) -> None:
        self._paused.difference_update(map(self._assigned, parts))

    def seek(self, part: Partition, offset: int) -> None:
        self._positions[self._assigned(part)] = offset

    def position(self, part: Partition) -> int:
        return self._positions[self._assigned(part)]

    def close(self) -> None:
        self._positions = {}

    def _assigned(self, part: Partition) -> Partition:
        if part not in self._positions:
            raise ValueError(f"{part[0]}[{part[1]}] is not assigned to this reader")
        return part

    def _check(self, part: Partition, offset: int) -> _PartitionLog:
        logs = self._broker.topic(part[0]).logs
        if not 0 <= part[1] < len(logs):
            raise UnknownTopic(f"{part[0]}[{part[1]}]")
        log = logs[part[1]]
        if not log.start <= offset <= log.end:
            raise OffsetOutOfRange(*part, offset, log.start, log.end)
        return log

    def _read(self, max_records: int) -> list[Slice]:
        slices: list[Slice] = []
        for part, position in self._positions.items():
            if part in self._paused:
                continue
            log = self._check(part, position)
            records = log.records[position - log.start :][:max_records] if max_records > 0 else []
            if records:
                slices.append(Slice(*part, records))
                max_records -= len(records)
        return slices


def _size(record: StoredRecord) -> int:
    return record_bytes(record.key or b"", record.value or b"", record.headers)


def _first_kept(log: _PartitionLog, spec: TopicSpec, now_ms: int) -> int:
    """Offset of the oldest record that retention keeps."""
    offset, held = log.start, log.held_bytes
    for record in log.records:
        too_old = spec.retention_s is not None and record.timestamp < now_ms - spec.retention_s * 1000
        too_much = spec.retention_bytes is not None and held > spec.retention_bytes
        if not (too_old or too_much):
            break
        held -= _size(record)
        offset += 1
    return offset
