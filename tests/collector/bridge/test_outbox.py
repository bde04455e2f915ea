from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from collector.bridge.outbox import RECORD_OVERHEAD_BYTES, Outbox
from collector.bridge.record_builder import BuiltRecord, RecordBuilder
from schemas.kv_events import COMPLETE, ENGINE_RESTARTED, FIRST, LAST, Kind, WorkerId, decode
from schemas.stream import StreamFull
from schemas.stream.base import Headers
from tests.collector.bridge.wire import SOURCE

OTHER = WorkerId("pool", "other", 1)


class FakeWriter:
    """Takes records while `open`; else its buffer is full."""

    def __init__(self) -> None:
        self.open = True
        self.taken: list[tuple[bytes, bytes]] = []

    def append(self, topic: str, key: bytes, value: bytes, headers: Headers = (), timestamp_ms: int | None = None) -> None:
        if not self.open:
            raise StreamFull(1, 1)
        self.taken.append((key, value))

    def rows(self, source: WorkerId = SOURCE) -> list[tuple[str, int, int]]:
        """(kind, epoch, seq), and the last seq for a gap."""
        out = []
        for key, value in self.taken:
            if key == source.key:
                batch = decode(value)
                for e in batch.events:
                    kind = Kind(int(e["kind"]))
                    out.append((f"{kind.name}-{int(e['parent'])}" if kind is Kind.GAP else kind.name, batch.epoch, int(e["seq"])))
        return out


class Setup:
    def __init__(self, max_records: int = 4) -> None:
        self.writer = FakeWriter()
        self.lost: list[WorkerId] = []
        self.builders = {SOURCE: RecordBuilder(SOURCE), OTHER: RecordBuilder(OTHER)}
        size = len(self.store(0)[0].value) + RECORD_OVERHEAD_BYTES
        self.outbox = Outbox("kv-events", max_records * size, lambda: 5.0, self.lost.append)

    def store(self, seq: int, source: WorkerId = SOURCE, epoch: int = 1) -> list[BuiltRecord]:
        builder = self.builders[source]
        builder.epoch = epoch
        builder.batch(seq, None, 1.0)
        builder.row(Kind.STORED, seq, 1.0, np.array([seq], np.uint64))
        return builder.take(1.0)

    def put(self, *records: BuiltRecord) -> None:
        for record in records:
            self.outbox.put(record)

    def push(self) -> None:
        self.outbox.push(self.writer)  # type: ignore[arg-type]  # only append is used


def test_order_is_kept_and_nothing_is_lost_while_there_is_room() -> None:
    s = Setup()
    s.writer.open = False
    for seq in range(4):
        s.put(*s.store(seq))
        s.push()
    assert (s.writer.taken, s.outbox.waiting[SOURCE], s.outbox.idle) == ([], 4, False)
    s.writer.open = True
    s.push()
    assert s.writer.rows() == [("STORED", 1, i) for i in range(4)]
    assert (s.outbox.idle, s.outbox.held_bytes, s.outbox.dropped.total(), s.lost) == (True, 0, 0, [])


def test_the_oldest_are_dropped_and_a_gap_names_exactly_them_before_the_rest() -> None:
    s = Setup()
    s.writer.open = False
    for seq in range(7):
        s.put(*s.store(seq))
    s.put(*s.store(0, OTHER))
    s.push()
    assert s.outbox.dropped == {SOURCE: 4}
    s.writer.open = True
    s.push()
    assert s.writer.rows() == [("GAP-3", 1, 0), ("STORED", 1, 4), ("STORED", 1, 5), ("STORED", 1, 6)]
    assert s.writer.rows(OTHER) == [("STORED", 1, 0)]
    assert s.lost == [SOURCE]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_lost_epoch_start_is_told_again_as_incomplete_and_whose_restart_it_was(restarted: bool) -> None:
    s = Setup(2)
    s.writer.open = False
    s.put(*s.store(8, epoch=1))
    builder = s.builders[SOURCE]
    builder.start_epoch(2, True, 0, 1.0, restarted=restarted)
    s.put(*builder.take(1.0), *s.store(1, epoch=2), *s.store(2, epoch=2))
    s.writer.open = True
    s.push()
    assert s.writer.rows() == [("GAP-8", 1, 8), ("EPOCH_STARTED", 2, 0), ("GAP-0", 2, 0), ("STORED", 2, 1), ("STORED", 2, 2)]
    starts = [e for _, v in s.writer.taken for e in decode(v).events if e["kind"] == Kind.EPOCH_STARTED]
    assert [int(e["flags"]) for e in starts] == [ENGINE_RESTARTED if restarted else 0]


def test_the_gap_comes_even_when_the_worker_says_no_more() -> None:
    s = Setup(1)
    s.writer.open = False
    s.put(*s.store(0), *s.store(0, OTHER))
    s.writer.open = True
    s.push()
    assert s.writer.rows() == [("GAP-0", 1, 0)]
    assert s.lost == [SOURCE]


def test_a_snapshot_that_loses_a_part_is_dropped_whole_and_is_no_gap() -> None:
    s = Setup()
    builder = s.builders[SOURCE] = RecordBuilder(SOURCE, target_bytes=1000)
    builder.epoch = 1
    builder.snapshot([(0, 0, 16, 0, np.arange(100, dtype=np.uint64))] * 3, 9, True, 1.0)
    parts = builder.take(1.0)
    flags = [int(e["flags"]) for p in parts for e in decode(p.value).events]
    assert len(parts) > 1
    assert flags == [FIRST | COMPLETE, COMPLETE, LAST | COMPLETE]
    s.outbox = Outbox("kv-events", sum(len(p.value) + RECORD_OVERHEAD_BYTES for p in parts), lambda: 5.0, s.lost.append)
    s.writer.open = False
    s.put(*parts, *s.store(10))
    s.writer.open = True
    s.push()
    assert s.writer.rows() == [("STORED", 1, 10)]
    assert s.lost == []  # the next one comes at its time
    assert s.outbox.dropped[SOURCE] == len(parts)
    assert (s.outbox.waiting[SOURCE], s.outbox.held_bytes) == (0, 0)


def test_records_that_the_writer_gave_up_become_a_gap_too() -> None:
    s = Setup()
    record, *_ = s.store(5)
    s.outbox.on_failure("kv-events", SOURCE.key, record.value, StreamFull(1, 1))
    s.outbox.on_failure("worker-load", SOURCE.key, b"{}", StreamFull(1, 1))
    s.outbox.on_failure("kv-events", SOURCE.key, b"no batch", StreamFull(1, 1))
    s.put(*s.store(9))
    s.push()
    assert s.writer.rows() == [("GAP-5", 1, 5), ("STORED", 1, 9)]
    assert s.lost == [SOURCE]


def test_a_late_gap_mark_does_not_look_like_an_old_record() -> None:
    s = Setup()
    (given_up,) = s.store(5)
    s.put(*s.store(6), *s.store(7))
    s.push()
    s.outbox.on_failure("kv-events", SOURCE.key, given_up.value, StreamFull(1, 1))
    s.push()
    mark = decode(s.writer.taken[-1][1])
    assert s.writer.rows()[-1] == ("GAP-5", 1, 5)
    assert (mark.first_seq, mark.last_seq) == (5, 7)


@pytest.mark.parametrize("limit", [1, 3, 10])
def test_every_batch_is_delivered_or_inside_a_gap(limit: int) -> None:
    s = Setup(limit)
    opens: Callable[[int], bool] = lambda i: i % 17 < 5  # noqa: E731
    for seq in range(200):
        s.writer.open = opens(seq)
        s.put(*s.store(seq))
        s.push()
    s.writer.open = True
    s.push()
    told: list[int] = []
    for kind, _, seq in s.writer.rows():
        told += range(seq, int(kind[4:]) + 1) if kind.startswith("GAP-") else [seq]
    assert told == list(range(200))
