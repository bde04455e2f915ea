"""The bridge over real ZeroMQ sockets: a fake engine that speaks bytes on one side, the in-memory stream on the other."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from collector.bridge.discovery import Endpoints
from collector.bridge.event_thread import EventThread
from collector.bridge.outbox import Outbox
from collector.bridge.rank_link import LinkTimes
from schemas.kv_events import COMPLETE, FIRST, LAST, Kind, KvBatch, WorkerId, decode
from schemas.stream.memory import MemoryHub
from schemas.topics import topic_specs
from schemas.workers import BridgeHealth, Trust
from tests.collector.bridge.wire import KEY, SOURCE, FakeEngine, message, one_block, payload, removed, stored


def until(what: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


class Running:
    """An event thread writing to a memory stream."""

    def __init__(self, hub: MemoryHub, *, snapshot_interval_s: float = 3600.0, buffer_bytes: int = 1 << 20, batch_s: float = 0.005) -> None:
        self.hub = hub
        self.stream = hub.open("s")
        self.stream.ensure_topics(topic_specs())
        self.outbox = Outbox("kv-events", buffer_bytes, time.time, lambda source: self.thread.snapshot_soon(source))
        self.writer = self.stream.writer(on_failure=self.outbox.on_failure, max_buffer_bytes=min(buffer_bytes, 1 << 19))
        self.thread = EventThread(
            KEY, self.outbox, self.writer, batch_s=batch_s, snapshot_interval_s=snapshot_interval_s, times=LinkTimes(replay_silence_s=0.15)
        )
        self.thread.start()

    def follow(self, engine: FakeEngine, replay: bool = True, source: WorkerId = SOURCE) -> None:
        self.thread.connect(source, Endpoints(engine.events, engine.replay if replay else None))

    @property
    def health(self) -> BridgeHealth:
        return self.thread.health.get(SOURCE) or BridgeHealth(trust=Trust.BLIND, epoch=0)

    def until_seq(self, seq: int) -> None:
        until(lambda: self.health.seq == seq)

    def records(self) -> list[bytes]:
        self.writer.flush(5)
        with_reader = self.stream.reader()
        try:
            with_reader.assign({("kv-events", p): o for p, o in self.stream.start_offsets("kv-events").items()})
            out: list[bytes] = []
            while slices := with_reader.poll(0.0, 10_000):
                out += [r.value for s in slices for r in s.records if r.value is not None]
            return out
        finally:
            with_reader.close()

    def batches(self, source: WorkerId = SOURCE) -> list[KvBatch]:
        return [b for b in map(decode, self.records()) if b.source == source]

    def told(self) -> list[str]:
        out = []
        for batch in self.batches():
            for e, _ in batch:
                kind, flags = Kind(int(e["kind"])), int(e["flags"])
                if kind is Kind.EPOCH_STARTED:
                    out.append("complete" if flags & COMPLETE else "incomplete")
                elif kind is Kind.GAP:
                    out.append(f"gap {int(e['seq'])}-{int(e['parent'])}")
                elif kind is Kind.SNAPSHOT:
                    out.append(f"snapshot of {int(e['count'])}{' complete' if flags & COMPLETE else ''}")
                else:
                    out.append(f"{int(e['seq'])}")
        return out

    def until_told(self, expected: list[str], last: int | None = None) -> None:
        """Records follow the health by a few milliseconds. last: only so many of the newest are compared."""

        def newest() -> list[str]:
            return self.told() if last is None else self.told()[-last:]

        deadline = time.monotonic() + 10
        while (told := newest()) != expected and time.monotonic() < deadline:
            time.sleep(0.01)
        assert told == expected

    def stop(self) -> None:
        self.thread.stop(2.0)
        self.writer.close(2.0)
        self.stream.close()


@contextmanager
def running(**more: float) -> Iterator[Running]:
    run = Running(MemoryHub(), **more)  # type: ignore[arg-type]
    try:
        yield run
    finally:
        run.stop()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.close()


def meet(run: Running, fake: FakeEngine, first: int = 0) -> int:
    """Publishes batches until one arrives, since a PUB drops what it sends before the SUB has joined. Returns the next sequence."""
    seq = first
    deadline = time.monotonic() + 10
    while run.health.seq is None:
        assert time.monotonic() < deadline
        fake.publish(seq, one_block(seq))
        seq += 1
        time.sleep(0.02)
    run.until_seq(seq - 1)
    return seq


def test_what_came_before_the_bridge_is_replayed_and_live_events_follow(engine: FakeEngine) -> None:
    for seq in range(5):
        engine.publish(seq, one_block(seq))
    with running() as run:
        run.follow(engine)
        run.until_seq(4)
        next_seq = meet(run, engine, 5)
        engine.publish(next_seq, one_block(next_seq))
        run.until_seq(next_seq)
        run.until_told(["complete", *(str(s) for s in range(next_seq + 1))])
        assert run.health.trust is Trust.EXACT
        assert run.health.replayed_batches >= 5


@pytest.mark.parametrize("topic_frame", [True, False])
def test_a_hole_in_the_live_stream_is_filled_by_replay_of_both_layouts(topic_frame: bool) -> None:
    fake = FakeEngine(topic_frame=topic_frame)
    try:
        with running() as run:
            run.follow(fake)
            at = meet(run, fake)
            for seq in range(at, at + 10):
                fake.publish(seq, one_block(seq), live=seq in (at, at + 9))
            run.until_seq(at + 9)
            until(lambda: run.health.resident_blocks == at + 10)
            run.until_told(["complete", *(str(s) for s in range(at + 10))])
            assert (run.health.lost_batches, run.health.trust) == (0, Trust.EXACT)
    finally:
        fake.close()


def test_a_lossy_replay_without_end_markers_converges() -> None:
    fake = FakeEngine(lose=lambda r, s: (s * 7 + r * 5) % 3 == 0, marker=False)
    try:
        for seq in range(60):
            fake.publish(seq, one_block(seq))
        with running() as run:
            run.follow(fake)
            until(lambda: run.health.resident_blocks == 60)
            run.until_told(["complete", *(str(s) for s in range(60))])
            assert fake.rounds > 1
    finally:
        fake.close()


def test_what_replay_does_not_hold_any_more_becomes_an_exact_gap_and_trust_falls(engine: FakeEngine) -> None:
    with running() as run:
        run.follow(engine)
        at = meet(run, engine)
        engine.publish(at + 3, one_block(at + 3))
        until(lambda: run.health.lost_batches == 3)
        until(lambda: f"gap {at}-{at + 2}" in run.told())
        run.until_told([f"gap {at}-{at + 2}", str(at + 3)], last=2)
        assert run.health.trust is Trust.DEGRADED


def test_live_frames_wait_while_a_replay_nobody_answers_times_out_and_nothing_is_blocked() -> None:
    fake = FakeEngine(replay=False)
    try:
        with running() as run:
            run.follow(fake)
            deadline = time.monotonic() + 10
            seq = 3
            while run.health.trust is Trust.BLIND:
                fake.publish(seq, one_block(seq))
                seq += 1
                time.sleep(0.02)
                assert time.monotonic() < deadline
            until(lambda: len(run.told()) > 1)
            assert run.told()[0] == "incomplete"
            assert run.health.trust is Trust.DEGRADED
    finally:
        fake.close()


def test_an_engine_that_dies_and_comes_back_on_its_port_is_a_new_complete_epoch() -> None:
    first = FakeEngine()
    with running() as run:
        run.follow(first)
        meet(run, first)
        ports, epoch = first.ports, run.health.epoch
        first.close()
        second = FakeEngine(ports=ports)
        try:
            for seq in range(3):
                second.publish(seq, one_block(seq, 1))
            seq = 3
            deadline = time.monotonic() + 15
            while run.health.restarts == 0:
                second.publish(seq, one_block(seq, 1))
                seq += 1
                time.sleep(0.05)
                assert time.monotonic() < deadline
            until(lambda: run.health.resident_blocks == seq)
            run.until_told(["complete", *(str(s) for s in range(seq))], last=seq + 1)
            assert run.told().count("complete") == 2
            assert run.health.epoch > epoch
            assert run.health.trust is Trust.EXACT
        finally:
            second.close()


def test_an_engine_that_comes_back_and_idles_is_known_to_be_another_one() -> None:
    first = FakeEngine()
    with running() as run:
        run.follow(first)
        at = meet(run, first)
        ports = first.ports
        first.close()
        second = FakeEngine(ports=ports)
        try:
            for seq in range(2):
                second.publish(seq, one_block(seq, 1), live=False)
            until(lambda: run.health.restarts == 1 and run.health.resident_blocks == 2)
            run.until_told(["complete", *(str(s) for s in range(at)), "complete", "0", "1"])
            assert run.health.trust is Trust.EXACT
        finally:
            second.close()


def test_an_engine_that_comes_back_on_other_ports_is_followed_there() -> None:
    first, second = FakeEngine(), FakeEngine()
    try:
        with running() as run:
            run.follow(first)
            at = meet(run, first)
            second.publish(0, one_block(0, 1), live=False)
            run.follow(second)
            run.until_told(["complete", *(str(s) for s in range(at)), "complete", "0"])
            second.until_followed()
            first.publish(at, one_block(at))
            second.publish(1, one_block(1, 1))
            run.until_told(["complete", "0", "1"], last=3)
            assert run.thread.errors == 0
    finally:
        first.close()
        second.close()


def test_mangled_frames_cost_only_themselves_and_are_counted(engine: FakeEngine) -> None:
    with running() as run:
        run.follow(engine)
        at = meet(run, engine)
        engine.publish_raw([b"kv", b"short", b"x"])
        engine.publish_raw([b"kv"])
        engine.publish_raw(message(at, b"\xc1 not msgpack"))
        engine.publish(at, one_block(at), live=False)
        engine.publish(at + 1, one_block(at + 1))
        run.until_seq(at + 1)
        until(lambda: run.health.resident_blocks == at + 2)
        assert run.health.mangled_frames == 3
        run.until_told(["complete", *(str(s) for s in range(at + 2))])
        assert run.health.trust is Trust.EXACT


def test_snapshots_hold_every_copy_and_let_a_late_reader_be_exact(engine: FakeEngine) -> None:
    with running(snapshot_interval_s=0.2) as run:
        run.follow(engine, replay=False)
        bodies = [payload(stored([1], [1, 2, 3, 4])), payload(stored([2], [5, 6, 7, 8], parent=1)),
                  payload(stored([2], [5, 6, 7, 8], parent=1)), payload(removed([1]))]  # fmt: skip
        engine.until_followed()
        for seq, body in enumerate(bodies):
            engine.publish(seq, body)
        run.until_seq(3)
        until(lambda: sum("snapshot of 2" in t for t in run.told()) >= 2)
        last = [(e, h) for b in run.batches() for e, h in b if e["kind"] == Kind.SNAPSHOT][-1]
        assert int(last[0]["flags"]) == FIRST | LAST | COMPLETE
        assert int(last[0]["seq"]) == 3
        assert len(set(last[1].tolist())) == 1


def test_while_the_stream_is_away_records_wait_and_then_all_arrive(engine: FakeEngine) -> None:
    with running() as run:
        run.follow(engine)
        at = meet(run, engine)
        run.hub.outage("s", "away")
        for seq in range(at, at + 50):
            engine.publish(seq, one_block(seq))
        run.until_seq(at + 49)
        run.hub.heal("s")
        until(lambda: run.told()[-1:] == [str(at + 49)])
        run.until_told(["complete", *(str(s) for s in range(at + 50))])


def test_when_the_stream_is_away_too_long_a_gap_mark_and_a_snapshot_follow(engine: FakeEngine) -> None:
    with running(buffer_bytes=1 << 19) as run:
        run.follow(engine)
        at = meet(run, engine)
        run.hub.outage("s", "away")
        end = at
        deadline = time.monotonic() + 20
        while run.health.dropped_records == 0:
            for _ in range(10):
                first = end * 1000 + 1_000_000
                many = list(range(first, first + 900))
                engine.publish(end, payload(stored(many, many, size=1), removed(many)))
                end += 1
            run.until_seq(end - 1)
            assert time.monotonic() < deadline
        run.hub.heal("s")
        until(lambda: f"snapshot of {at} complete" in run.told())
        told = run.told()
        gap = next(t for t in told if t.startswith("gap"))
        first, last = map(int, gap[4:].split("-"))
        assert at <= first <= last < end
        seen = sorted({int(t) for t in told if t.isdigit()})
        assert sorted([*seen, *range(first, last + 1)]) == list(range(end))
        assert run.health.trust is Trust.EXACT


def test_no_token_leaves_in_a_record() -> None:
    fake = FakeEngine()
    tokens = [71_234, 81_235, 91_236, 101_237]
    try:
        fake.publish(0, payload(stored([1], tokens), stored([2], [[t, 0] for t in tokens], parent=1), stored([3], "secret")))
        with running(snapshot_interval_s=0.05) as run:
            run.follow(fake)
            until(lambda: any("snapshot" in t for t in run.told()))
            blob = b"".join(run.records())
            for t in tokens:
                for width in (3, 4, 8):
                    assert t.to_bytes(width, "little") not in blob
                    assert t.to_bytes(width, "big") not in blob
            assert b"secret" not in blob
            assert Counter(run.told())["0"] == 2
            until(lambda: run.health.skipped_events == 1)
    finally:
        fake.close()
