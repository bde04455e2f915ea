"""The collector over a real local stream: nothing lost, nothing twice, whatever happens to the process, the disk or the stream."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collector.ingest
from collector.follow import pack_waiting, unpack_waiting
from collector.ingest import Collector
from collector.store.state import StateError
from schemas.changes import Change
from schemas.kv_events import COMPLETE, ENGINE_RESTARTED, Kind, encode
from schemas.requests import Attempt, ShadowPick
from schemas.settings import SettingsError
from schemas.stream import Stream, StreamUnavailable, open_stream
from schemas.stream.memory import MemoryHub
from schemas.tables.published import MAJOR, MINOR
from schemas.tables.read import FILE_NAME
from schemas.topics import CHANGES, DECISIONS, KV_EVENTS, OUTCOMES, topic_specs
from tests.collector.batches import batch, event
from tests.collector.driven import ask, drain, settings
from tests.collector.traffic import WHAT_IS_THERE, WORKERS, Traffic, decision, load, outcome, pack_hashes_of, put, what_must_be_there

W0 = WORKERS[0]


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    with open_stream(f"local:{tmp_path / 'stream.sqlite'}?durability=process") as opened:
        opened.ensure_topics(topic_specs("", 2))
        yield opened


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


class Died(BaseException):
    """The process was killed here."""


def started(data_dir: Path, stream: Stream, **more: Any) -> Collector:
    at_step = {k: more.pop(k) for k in ("at_step",) if k in more}
    made = Collector(settings(data_dir, **more), stream, **at_step)
    try:
        made.start()
    except BaseException:
        made.close()
        raise
    return made


def collected(data_dir: Path, stream: Stream, **more: Any) -> None:
    """A whole life of a collector: start, read all there is, stop."""
    one = started(data_dir, stream, **more)
    try:
        drain(one, stream)
    except BaseException:
        one.close()
        raise
    one.stop()


@pytest.mark.parametrize("seed", range(4))
def test_death_between_any_two_steps_loses_nothing_and_doubles_nothing(stream: Stream, data_dir: Path, seed: int) -> None:
    rng = random.Random(seed)
    writer = stream.writer()
    traffic = Traffic(writer, rng=random.Random(seed + 100))
    deaths = 0
    for _ in range(12):
        for _ in range(rng.randint(5, 40)):
            traffic.step()
        writer.flush(10)
        left = rng.randint(1, 25)

        def die(step: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Died(step)

        victim = None
        try:
            victim = Collector(
                settings(data_dir, poll_records=rng.choice([7, 50, 1000]), checkpoint_blocks=rng.choice([1, 60])), stream, at_step=die
            )
            victim.start()
            for _ in range(rng.randint(1, 12)):
                victim.turn()
        except Died:
            deaths += 1
        finally:
            if victim is not None:
                victim.close()
        if (data_dir / FILE_NAME).exists():
            ask(data_dir, WHAT_IS_THERE)
    writer.close(10)
    collected(data_dir, stream, checkpoint_blocks=60)
    assert deaths >= 4
    assert ask(data_dir, WHAT_IS_THERE) == [what_must_be_there(traffic.sent)]
    held = {(w, r): (b, d) for w, r, b, d in ask(data_dir, "SELECT worker, rank, resident_blocks, distinct_blocks FROM workers")}
    assert held == {(w.worker, 0): (c.total(), len(+c)) for w, c in traffic.held.items()}
    assert ask(data_dir, "SELECT DISTINCT trust FROM workers") == [("exact",)]


def test_requests_in_flight_are_seen_at_once_and_survive_a_crash(stream: Stream, data_dir: Path) -> None:
    writer = stream.writer()
    now = time.time()
    put(writer, "", decision("flying", now))
    writer.flush(10)
    first = started(data_dir, stream)
    drain(first, stream, told=False)
    first.close()
    assert ask(data_dir, "SELECT request_id, ended_at, status, outcome_missing FROM requests") == [("flying", None, None, False)]
    second = started(data_dir, stream)
    drain(second, stream, told=False)
    assert ask(data_dir, "SELECT count(*) FROM requests") == [(1,)]
    put(writer, "", outcome("flying", now + 0.5))
    writer.close(10)
    drain(second, stream)
    second.stop()
    assert ask(data_dir, "SELECT request_id, status, cached_tokens FROM requests") == [("flying", 200, 32)]
    assert ask(data_dir, "SELECT count(*) FROM candidates") == [(1,)]


def test_missing_halves_are_closed_and_flagged_and_late_ones_set_aside(stream: Stream, data_dir: Path) -> None:
    writer = stream.writer()
    now = time.time()
    put(writer, "", decision("no outcome", now - 100))
    put(writer, "", outcome("no decision", now - 100))
    put(writer, "", decision("twice", now - 1))
    put(writer, "", decision("twice", now - 1))
    put(writer, "", outcome("twice", now))
    put(writer, "", outcome("twice", now))
    writer.flush(10)
    one = started(data_dir, stream, outcome_wait_s=5.0, decision_wait_s=5.0)
    drain(one, stream)
    deadline = time.monotonic() + 20
    while one.fold.join.open and time.monotonic() < deadline:
        one.turn()
    put(writer, "", outcome("no outcome", now))
    put(writer, "", decision("no decision", now))
    writer.close(10)
    drain(one, stream)
    one.stop()
    assert ask(data_dir, "SELECT request_id, outcome_missing, decision_missing FROM requests ORDER BY 1") == [
        ("no decision", False, True),
        ("no outcome", True, False),
        ("twice", False, False),
    ]
    assert ask(data_dir, "SELECT reason FROM dead_letters ORDER BY 1") == [
        ("late: request no decision was closed without this decision",),
        ("late: request no outcome was closed without this outcome",),
    ]
    health = dict(ask(data_dir, "SELECT name, value FROM data_health WHERE area = 'join'"))
    assert (health["duplicate_decision"], health["duplicate_outcome"], health["outcome_missing"], health["decision_missing"]) == (
        1,
        1,
        1,
        1,
    )


@pytest.mark.parametrize("crash_after", [(), (1,), (2,), (1, 2), (1, 2, 3)])
@pytest.mark.parametrize("outcome_at", [1, 2])
def test_the_last_decision_of_a_request_that_was_sent_again_holds_over_any_restart(
    stream: Stream, data_dir: Path, crash_after: tuple[int, ...], outcome_at: int
) -> None:
    """Three records, the outcome second or last; the collector is killed after some of them were committed."""
    now = time.time()
    failed = Attempt(worker="w0", error="upstream: reset", after_s=0.2)
    shadow = ShadowPick(policy="random", worker="w1", predicted_tokens=0, margin_s=0.5)
    guess = ShadowPick(policy="text", worker="w1")
    decisions = [decision("q", now - 3, "w0"), decision("q", now - 2, "w1", attempts=(failed,))]
    decisions = [d.model_copy(update={"shadows": (shadow, guess), "predicted_tokens": 16}) for d in decisions]
    records: list[Any] = [*decisions[:outcome_at], outcome("q", now - 1, "w1", retries=1), *decisions[outcome_at:]]
    writer = stream.writer()
    one = started(data_dir, stream)
    for i, record in enumerate(records, start=1):
        put(writer, "", record)
        writer.flush(10)
        drain(one, stream, told=False)
        if i in crash_after:
            one.close()
            one = started(data_dir, stream)
    writer.close(10)
    drain(one, stream)
    one.stop()
    at = f"make_timestamp({round((now - 2) * 1e6)})"
    assert ask(data_dir, f"SELECT worker, started_at = {at}, retries, outcome_missing FROM requests") == [("w1", True, 1, False)]
    assert ask(data_dir, "SELECT worker, chosen FROM candidates ORDER BY started_at") == [("w0", True), ("w1", True)]
    picks = ask(data_dir, "SELECT same, predicted_tokens, chosen_predicted_tokens FROM shadows ORDER BY started_at, policy")
    assert picks == [(False, 0, 16), (False, None, None), (True, 0, 16), (True, None, None)]
    assert ask(data_dir, f"SELECT worker, error, started_at = {at}, position FROM attempts") == [("w0", "upstream: reset", True, 0)]
    assert ask(data_dir, "SELECT worker, requests FROM worker_10s WHERE requests > 0") == [("w1", 1)]
    health = dict(ask(data_dir, "SELECT name, value FROM data_health WHERE area = 'join'"))
    assert (health["superseded_decision"], health["duplicate_decision"]) == (1, 0)


def test_each_further_decision_adds_only_the_attempts_that_are_new(stream: Stream, data_dir: Path) -> None:
    now = time.time()
    failed = [Attempt(worker=f"w{i}", rank=i, error="upstream", after_s=0.2) for i in range(3)]
    writer = stream.writer()
    for i in (0, 1, 3):  # the one after the second was lost
        put(writer, "", decision("q", now - 5 + i, f"w{i}", attempts=tuple(failed[:i])))
    put(writer, "", outcome("q", now - 1, "w3", retries=3))
    writer.close(10)
    collected(data_dir, stream)
    rows = ask(data_dir, "SELECT position, worker, rank, started_at = max(started_at) OVER () FROM attempts ORDER BY position")
    assert rows == [(0, "w0", 0, False), (1, "w1", 1, True), (2, "w2", 2, True)]


def test_a_request_that_no_worker_could_be_chosen_for_is_whole_without_a_decision(stream: Stream, data_dir: Path) -> None:
    now = time.time()
    refused = outcome("q", now - 100).model_copy(
        update={"worker": None, "status": 429, "error": "queue full", "router": "r", "pool": "p", "model": "m", "route": "x", "tenant": "t"}
    )
    writer = stream.writer()
    put(writer, "", refused)
    writer.close(10)
    one = started(data_dir, stream, decision_wait_s=1.0)
    drain(one, stream)
    deadline = time.monotonic() + 20
    while one.fold.join.open and time.monotonic() < deadline:
        one.turn()
    drain(one, stream)
    one.stop()
    columns = "router, pool, worker, model, route, tenant, status, policy, decision_missing, outcome_missing"
    assert ask(data_dir, f"SELECT {columns} FROM requests") == [("r", "p", None, "m", "x", "t", 429, None, False, False)]
    health = dict(ask(data_dir, "SELECT name, value FROM data_health WHERE area = 'join'"))
    assert health["decision_missing"] == 0


def test_names_of_pieces_of_text_are_not_taken_for_names_of_blocks(stream: Stream, data_dir: Path) -> None:
    """A router that routes by text may write its chain: no hit is told from events by it, and its guess is not held against a report."""
    now = time.time()
    known = {"chain": pack_hashes_of([1, 2]), "block_size": 16, "prompt_tokens": 40}
    events = [event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, [1, 2], block_size=16)]
    writer = stream.writer()
    writer.append(KV_EVENTS, W0.key, encode(batch(W0, 1, 0, now - 5, *events)))
    for source in ("text", "exact"):
        put(writer, "", decision(source, now - 3, token_source=source, **known))
        put(writer, "", outcome(source, now - 2))
    put(writer, "", load(W0, now))
    writer.close(10)
    collected(data_dir, stream)
    rows = ask(data_dir, "SELECT request_id, event_hit_tokens, chain_blocks, chain_tail, cached_tokens FROM requests ORDER BY 1")
    assert rows == [("exact", 32, 2, 2, 32), ("text", None, None, None, 32)]
    assert ask(data_dir, "SELECT sum(requests), sum(event_requests), sum(predicted_requests) FROM worker_10s") == [(2, 1, 1)]


def test_a_last_decision_that_never_comes_holds_a_row_back_only_as_long_as_any_missing_half(stream: Stream, data_dir: Path) -> None:
    now = time.time()
    writer = stream.writer()
    put(writer, "", decision("q", now - 1))
    put(writer, "", outcome("q", now, "w1", retries=2))
    writer.close(10)
    one = started(data_dir, stream, decision_wait_s=0.5)
    drain(one, stream)
    one.stop()
    assert ask(data_dir, "SELECT worker, decision_missing, retries FROM requests") == [("w1", False, 2)]


def test_open_requests_are_bounded_in_memory_and_those_closed_for_it_are_said(stream: Stream, data_dir: Path) -> None:
    writer = stream.writer()
    now = time.time()
    for i in range(40):
        chain = pack_hashes_of(range(1, 10_001))
        put(writer, "", decision(f"q{i:02}", now + i / 1000, chain=chain, block_size=16, token_source="exact"))
    writer.flush(10)
    one = started(data_dir, stream, open_bytes=1 << 20)
    drain(one, stream, told=False)
    one.turn()
    one._commit_and_publish()
    assert one.fold.join.held_bytes <= 1 << 20
    assert 3 < len(one.fold.join.open) < 14
    one.close()
    put(writer, "", outcome("q39", now + 1))
    writer.close(10)
    one = started(data_dir, stream, open_bytes=1 << 20)
    drain(one, stream)
    one.stop()
    assert ask(data_dir, "SELECT count(*), count(DISTINCT request_id) FROM requests") == [(40, 40)]
    missing = dict(ask(data_dir, "SELECT request_id, outcome_missing FROM requests"))
    assert (missing["q00"], missing["q39"]) == (True, False)
    ((early, status),) = ask(data_dir, "SELECT value, status FROM data_health WHERE name = 'closed_early'")
    assert 25 < early < 36
    assert status == "warn"


def test_poison_costs_itself_only_and_says_why(stream: Stream, data_dir: Path) -> None:
    writer = stream.writer()
    good = encode(batch(W0, 1, 0, 1_790_000_000.0, event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, [1, 2])))
    for topic, key, value in (
        (KV_EVENTS, b"k", b"short"),
        (KV_EVENTS, b"k", b"\0" * 80),
        (KV_EVENTS, b"k", good[:-8]),
        (KV_EVENTS, b"k", good[:4] + b"\x09\x00" + good[6:]),
        (KV_EVENTS, W0.key, good),
        (DECISIONS, b"\xff", b"[]"),
        (DECISIONS, b"v", decision("v", 1.0).model_dump_json().replace('"version":1', '"version":7').encode()),
        (OUTCOMES, b"o", b'{"version":1}'),
        (CHANGES, b"c", b"\xff\xfe"),
    ):
        writer.append(topic, key, value)
    writer.close(10)
    collected(data_dir, stream)
    found = ask(data_dir, "SELECT topic, key, reason, size_bytes, value FROM dead_letters ORDER BY topic, stream_partition, stream_offset")
    assert len(found) == 8
    reasons = " | ".join(r[2] for r in found)
    for part in (
        "is no multiple of 8",
        "does not start with WWKV",
        "do not hold",
        "version 9 is unknown",
        "version: Input should be 1",
        "request_id: Field required",
    ):
        assert part in reasons
    assert all(len(r[4]) == r[3] for r in found)
    assert ask(data_dir, "SELECT resident_blocks, trust FROM workers") == [(2, "exact")]


@pytest.mark.parametrize("bridge_time_s", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_batch_without_a_time_is_set_aside(stream: Stream, data_dir: Path, bridge_time_s: float) -> None:
    writer = stream.writer()
    at = 1_790_000_000.0
    first = batch(W0, 1, 0, at, event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, [1]))
    writer.append(KV_EVENTS, W0.key, encode(first))
    writer.append(KV_EVENTS, W0.key, encode(replace(first, bridge_time_s=bridge_time_s)))
    writer.close(10)
    collected(data_dir, stream)
    ((reason,),) = ask(data_dir, "SELECT reason FROM dead_letters")
    assert "is no time between 1970 and 2100" in reason
    assert ask(data_dir, "SELECT sum(stored_blocks), min(epoch(bucket)) FROM worker_10s") == [(1, at)]


@pytest.mark.parametrize("event_time_s", [float("nan"), float("inf"), -1e300, 1e300, 1e-5, 1_790_009_999.0])
def test_a_broken_clock_of_an_engine_is_not_believed_and_touches_nobody_else(stream: Stream, data_dir: Path, event_time_s: float) -> None:
    writer = stream.writer()
    at = 1_790_000_000.0
    for who, time_s in ((W0, event_time_s), (WORKERS[1], at)):
        marks = event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, [1, 2], time_s=time_s), event(Kind.GAP, seq=9, parent=3)
        writer.append(KV_EVENTS, who.key, encode(batch(who, 1, 0, at, *marks)))
    writer.close(10)
    collected(data_dir, stream)
    assert ask(data_dir, "SELECT worker, epoch(bucket), stored_blocks, lost_batches FROM worker_10s ORDER BY worker") == [
        ("w0", at, 2, 0),
        ("w1", at, 2, 0),
    ]
    assert ask(data_dir, "SELECT count(DISTINCT epoch(happened_at)::BIGINT // 10) FROM kv_events") == [(1,)]


def test_a_record_that_the_kernel_takes_but_its_name_belies_is_set_aside(stream: Stream, data_dir: Path) -> None:
    writer = stream.writer()
    good = encode(batch(W0, 1, 0, 1_790_000_000.0, event(Kind.STORED, [1])))
    writer.append(KV_EVENTS, b"k", good[:8] + b"\1" * 8 + good[16:])
    writer.close(10)
    collected(data_dir, stream)
    assert ask(data_dir, "SELECT reason FROM dead_letters") == [("no KV batch: worker id does not belong to p/w0/0",)]
    assert ask(data_dir, "SELECT count(*) FROM kv_events") == [(0,)]


def test_a_full_disk_pauses_reading_and_loses_nothing(stream: Stream, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = stream.writer()
    traffic = Traffic(writer)
    one = started(data_dir, stream)
    for _ in range(60):
        traffic.step()
    writer.flush(10)
    whole = collector.ingest.write_segment
    full = True

    def no_room(*args: Any, **kwargs: Any) -> Any:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(*args, **kwargs)

    monkeypatch.setattr(collector.ingest, "write_segment", no_room)
    deadline = time.monotonic() + 10
    while one.health.state != "paused" and time.monotonic() < deadline:
        one.turn()
    assert one.ready == (False, one.health.reason)
    assert "the disk is full" in one.health.reason
    assert ask(data_dir, "SELECT state FROM published") == [("paused",)]
    assert ask(data_dir, "SELECT status FROM data_health WHERE name = 'state'") == [("bad",)]
    for _ in range(30):
        traffic.step()
    writer.close(10)
    one.turn()
    full = False
    drain(one, stream)
    assert one.health.state == "running"
    one.stop()
    assert ask(data_dir, WHAT_IS_THERE) == [what_must_be_there(traffic.sent)]


def test_a_disk_nearly_full_pauses_before_it_is(stream: Stream, data_dir: Path) -> None:
    one = started(data_dir, stream, min_free_bytes=1 << 60)
    one.turn()
    one.turn()
    assert "min_free_bytes" in one.health.reason
    assert ask(data_dir, "SELECT state FROM published") == [("paused",)]
    one.close()


def test_a_transaction_that_was_committed_though_it_said_it_failed_is_not_repeated(
    stream: Stream, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = stream.writer()
    traffic = Traffic(writer)
    for _ in range(80):
        traffic.step()
    writer.close(10)
    one = started(data_dir, stream)
    whole = one._state.commit
    failures = 0

    def doubtful(change: Any) -> None:
        nonlocal failures
        whole(change)
        if failures < 3:
            failures += 1
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(one._state, "commit", doubtful)
    drain(one, stream)
    one.stop()
    assert failures == 3
    collected(data_dir, stream)
    assert ask(data_dir, WHAT_IS_THERE) == [what_must_be_there(traffic.sent)]


def test_a_doubtful_transaction_is_looked_up_even_when_the_database_could_not_be_opened_at_first(
    stream: Stream, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = stream.writer()
    traffic = Traffic(writer)
    for _ in range(40):
        traffic.step()
    writer.close(10)
    one = started(data_dir, stream)
    commit, reopen = one._state.commit, one._state.reopen
    doubts, refusals = 1, 2

    def doubtful(change: Any) -> None:
        nonlocal doubts
        commit(change)
        if doubts and change.added:
            doubts -= 1
            raise OSError(errno.EIO, "Input/output error")

    def refused() -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            one._state.close()
            raise StateError("not yet")
        reopen()

    monkeypatch.setattr(one._state, "commit", doubtful)
    monkeypatch.setattr(one._state, "reopen", refused)
    deadline = time.monotonic() + 20
    while (refusals or one.health.state == "paused") and time.monotonic() < deadline:
        one.turn()
    drain(one, stream)
    one.stop()
    assert (doubts, refusals) == (0, 0)
    collected(data_dir, stream)  # what the transactions say, not what this process remembers
    assert ask(data_dir, WHAT_IS_THERE) == [what_must_be_there(traffic.sent)]


def test_files_that_the_published_file_names_stay_as_long_as_no_newer_one_can_be_published(
    stream: Stream, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = stream.writer()
    one = started(data_dir, stream, keep_s=100.0, reader_grace_s=0.0)
    now = time.time()
    put(writer, "", Change(time_s=now - 50, text="old"))
    writer.flush(10)
    drain(one, stream)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(one._publisher, "publish", full)
    monkeypatch.setattr(one, "_clock", lambda: time.time() + 80)
    for _ in range(3):
        one._commit_and_publish()
    assert [s.table for s in one.manifest] == []
    assert "No space left" in one.health.publish_trouble
    assert ask(data_dir, "SELECT text FROM changes") == [("old",)]
    monkeypatch.undo()
    monkeypatch.setattr(one, "_clock", lambda: time.time() + 81)
    one._changed = True
    for _ in range(2):
        one._commit_and_publish()
    one.close()
    writer.close(10)
    assert ask(data_dir, "SELECT text FROM changes") == []
    assert list((data_dir / "segments" / "changes").iterdir()) == []


def test_a_disk_full_at_the_start_names_the_setting(stream: Stream, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(collector.ingest.Publisher, "publish", full)
    with pytest.raises(SettingsError, match=r"setting `data_dir`: nothing can be written in .*No space left.*is the disk full"):
        started(data_dir, stream)


def test_a_partition_that_is_added_is_read_and_not_a_crash(stream: Stream, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = stream.writer()
    traffic = Traffic(writer)
    for _ in range(20):
        traffic.step()
    writer.close(10)
    whole_ends, whole_starts = stream.end_offsets, stream.start_offsets
    hidden = True

    def some(offsets: dict[int, int]) -> dict[int, int]:
        return {p: o for p, o in offsets.items() if not (hidden and p)}

    monkeypatch.setattr(stream, "end_offsets", lambda topic: some(whole_ends(topic)))
    monkeypatch.setattr(stream, "start_offsets", lambda topic: some(whole_starts(topic)))
    one = started(data_dir, stream)
    drain(one, stream, told=False)
    assert {p for _, p in one.follow.positions} == {0}
    hidden = False
    deadline = time.monotonic() + 10
    while {p for _, p in one.follow.positions} == {0} and time.monotonic() < deadline:
        one.turn()
    drain(one, stream)
    one.stop()
    assert ask(data_dir, WHAT_IS_THERE) == [what_must_be_there(traffic.sent)]


def test_while_state_is_rebuilt_nothing_else_is_read_that_could_not_be_committed(stream: Stream, data_dir: Path) -> None:
    writer = stream.writer()
    traffic = Traffic(writer)
    for _ in range(80):
        traffic.step()
    writer.flush(10)
    collected(data_dir, stream)
    for file in (data_dir / "checkpoints").iterdir():
        file.unlink()
    for _ in range(80):
        traffic.step()
    writer.close(10)
    one = started(data_dir, stream, poll_records=5)
    rebuilding = 0
    while not one.follow.positions or one.fold.again:
        one.turn()
        rebuilding += 1
        held = sum(map(len, one.fold._rows.values())) + sum(t.num_rows for t in one.fold._tables)
        assert held <= 30
    assert rebuilding > 8
    drain(one, stream)
    one.stop()
    assert ask(data_dir, WHAT_IS_THERE) == [what_must_be_there(traffic.sent)]


def test_stopping_leaves_a_checkpoint_of_all_that_was_read(stream: Stream, data_dir: Path) -> None:
    for blocks in (1, 10**9):
        writer = stream.writer()
        for seq in range(5):
            events = [event(Kind.EPOCH_STARTED, flags=COMPLETE)] if seq == 0 else [event(Kind.STORED, [seq])]
            writer.append(KV_EVENTS, W0.key, encode(batch(W0, blocks, seq, 1_790_000_000.0 + seq, *events)))
        writer.close(10)
        collected(data_dir, stream, checkpoint_blocks=blocks)
        again = started(data_dir, stream)
        ends = {f"{KV_EVENTS}/{p}": end for p, end in stream.end_offsets(KV_EVENTS).items()}
        assert again._checkpoint["offsets"] == ends
        again.close()


def test_the_ids_of_the_newest_closed_requests_are_known_after_a_restart(
    stream: Stream, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector.ingest, "REMEMBERED", 3)
    writer = stream.writer()
    now = time.time()
    for i in range(5):
        put(writer, "", decision(f"q{i}", now - 9))
        put(writer, "", outcome(f"q{i}", now - 8))
        writer.flush(10)
        collected(data_dir, stream)
    writer.close(10)
    one = started(data_dir, stream)
    assert list(one.fold.join._closed) == ["q2", "q3", "q4"]
    one.close()


def test_while_the_stream_is_away_it_says_so_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    hub = MemoryHub()
    stream = open_stream("memory://x", memory=hub)
    stream.ensure_topics(topic_specs("", 2))
    data_dir = tmp_path / "data"
    one = started(data_dir, stream)
    writer = stream.writer()
    traffic = Traffic(writer)
    for _ in range(20):
        traffic.step()
    writer.flush(10)
    drain(one, stream)
    assert one.follow.reader is not None
    poll = one.follow.reader.poll

    def away(*_: Any) -> Any:
        raise StreamUnavailable("the broker is away: start it")

    one.follow.reader.poll = away  # type: ignore[method-assign]
    for _ in range(3):
        one.turn()
    one._commit_and_publish()
    assert one.ready[0] is False
    assert "the broker is away" in one.ready[1]
    assert ask(data_dir, "SELECT status FROM data_health WHERE name = 'connected'") == [("bad",)]
    one.follow.reader.poll = poll  # type: ignore[method-assign]
    for _ in range(20):
        traffic.step()
    writer.close(10)
    drain(one, stream)
    assert one.ready[0] is True
    one.stop()
    assert ask(data_dir, WHAT_IS_THERE) == [what_must_be_there(traffic.sent)]
    stream.close()


def test_records_that_retention_deleted_unread_are_an_event_and_trust_falls(stream: Stream, data_dir: Path) -> None:
    writer = stream.writer()
    for seq in range(4):
        events = [event(Kind.EPOCH_STARTED, flags=COMPLETE)] if seq == 0 else [event(Kind.STORED, [seq])]
        writer.append(KV_EVENTS, W0.key, encode(batch(W0, 1, seq, 1_790_000_000.0 + seq, *events)))
    writer.flush(10)
    collected(data_dir, stream)
    part = next(p for p, end in stream.end_offsets(KV_EVENTS).items() if end)
    for seq in range(4, 10):
        writer.append(KV_EVENTS, W0.key, encode(batch(W0, 1, seq, 1_790_000_000.0 + seq, event(Kind.STORED, [seq]))))
    writer.close(10)
    stream.delete_before(KV_EVENTS, {part: 7})
    collected(data_dir, stream)
    (text,) = ask(data_dir, "SELECT text FROM changes WHERE kind = 'gap' AND text LIKE 'stream:%'")[0]
    assert f"retention deleted 3 records of kv-events/{part} (offsets 4 to 6)" in text
    assert ask(data_dir, "SELECT value, status FROM data_health WHERE name = 'lost_records'") == [(3, "bad")]
    assert ask(data_dir, "SELECT trust FROM workers") == [("degraded",)]
    assert ask(data_dir, "SELECT count(*) FROM kv_events") == [(7,)]


@pytest.mark.parametrize("while_running", [True, False])
def test_a_topic_made_anew_is_read_from_its_start_and_said(tmp_path: Path, data_dir: Path, while_running: bool) -> None:
    path = tmp_path / "s.sqlite"
    url = f"local:{path}?durability=process"

    def fill(first: int, n: int) -> None:
        with open_stream(url) as stream:
            stream.ensure_topics(topic_specs("", 1))
            writer = stream.writer()
            for i in range(n):
                put(writer, "", Change(time_s=1_790_000_000.0 + i, text=f"change {first + i}"))
            writer.close(10)

    fill(0, 5)
    with open_stream(url) as stream:
        one = started(data_dir, stream)
        drain(one, stream)
        if not while_running:
            one.stop()
        for file in (path, path.with_name("s.sqlite-wal"), path.with_name("s.sqlite-shm")):
            file.unlink(missing_ok=True)
        fill(100, 8)
        if not while_running:
            one = started(data_dir, stream)
        deadline = time.monotonic() + 20
        while not one.fold.counters["stream_gaps"] and time.monotonic() < deadline:
            one.turn()
        drain(one, stream)
        one.stop()
    texts = {t for (t,) in ask(data_dir, "SELECT text FROM changes WHERE author IS NULL")}
    assert texts == {f"change {i}" for i in (*range(5), *range(100, 108))}
    assert ask(data_dir, "SELECT count(*) FROM changes WHERE author = 'collector' AND text LIKE '%made anew%'")[0][0] >= 1


def test_restarts_gaps_and_clears_become_changes(stream: Stream, data_dir: Path) -> None:
    writer = stream.writer()
    at = 1_790_000_000.0
    for b in (
        batch(W0, 1, 0, at, event(Kind.EPOCH_STARTED, flags=COMPLETE)),
        batch(W0, 1, 4, at + 1, event(Kind.GAP, seq=1, parent=4), first_seq=1),
        batch(W0, 1, 5, at + 2, event(Kind.CLEARED)),
        batch(W0, 1, 9, at + 3, event(Kind.STORED, [1])),
        batch(W0, 2, 0, at + 4, event(Kind.EPOCH_STARTED, flags=COMPLETE | ENGINE_RESTARTED)),
        batch(W0, 3, 7, at + 5, event(Kind.EPOCH_STARTED, flags=COMPLETE)),
        batch(W0, 4, 9, at + 6, event(Kind.EPOCH_STARTED)),
    ):
        writer.append(KV_EVENTS, W0.key, encode(b))
    writer.close(10)
    collected(data_dir, stream)
    assert ask(data_dir, "SELECT restarts, epoch FROM workers") == [(1, 4)]
    assert ask(data_dir, "SELECT kind, text, worker FROM changes ORDER BY kind, text") == [
        ("clear", "rank 0: the engine's cache was cleared", "w0"),
        ("gap", "rank 0: 3 engine batches are missing without a gap mark", "w0"),
        ("gap", "rank 0: 4 engine batches are lost", "w0"),
        ("note", "rank 0: its bridge began anew in the middle; which blocks the cache held before is lost (epoch 4)", "w0"),
        ("restart", "rank 0: the engine restarted, its cache starts anew (epoch 2)", "w0"),
    ]
    assert ask(data_dir, "SELECT sum(lost_batches), sum(clears) FROM worker_10s") == [(7, 5)]


def test_buckets_close_into_segments_and_small_segments_become_larger_ones(stream: Stream, data_dir: Path) -> None:
    writer = stream.writer()
    traffic = Traffic(writer)
    one = started(data_dir, stream, poll_records=40, publish_interval_s=0.001, reader_grace_s=0.0, bucket_close_s=10.0)
    for _ in range(18):
        for _ in range(12):
            traffic.step()
        writer.flush(10)
        drain(one, stream)
    writer.close(10)
    deadline = time.monotonic() + 20
    while (any(s.level == 0 for s in one.manifest if s.table == "kv_events") and len(one.manifest) > 60) and time.monotonic() < deadline:
        one.turn()
    assert any(s.level > 0 for s in one.manifest)
    assert any(s.table == "worker_10s" for s in one.manifest)
    assert one._state.live("live_worker_10s").num_rows < ask(data_dir, "SELECT count(*) FROM worker_10s")[0][0]
    one.stop()
    named = {s.name for s in one.manifest} | one._retired.keys()
    there = {f"{p.parent.name}/{p.name}" for p in (data_dir / "segments").glob("*/*")}
    assert there <= named
    assert ask(data_dir, WHAT_IS_THERE) == [what_must_be_there(traffic.sent)]


def test_old_rows_go_by_age_and_by_size(stream: Stream, data_dir: Path) -> None:
    writer = stream.writer()
    now = time.time()
    for age_s in (1000.0, 10.0):
        put(writer, "", Change(time_s=now - age_s, text=f"{age_s:.0f} s ago"))
        writer.flush(10)
        one = started(data_dir, stream, keep_s=5000.0)
        drain(one, stream)
        one.stop()
    writer.close(10)
    assert ask(data_dir, "SELECT count(*) FROM changes") == [(2,)]
    one = started(data_dir, stream, keep_s=100.0, reader_grace_s=0.0)
    drain(one, stream)
    time_up = time.monotonic() + 10
    while len(list((data_dir / "segments" / "changes").iterdir())) > 1 and time.monotonic() < time_up:
        one.turn()
    one.stop()
    assert ask(data_dir, "SELECT text FROM changes") == [("10 s ago",)]
    assert len(list((data_dir / "segments" / "changes").iterdir())) == 1


def test_load_readings_become_means_growth_and_the_state_of_workers(stream: Stream, data_dir: Path) -> None:
    writer = stream.writer()
    at = 1_790_000_000.0
    for i, (running, hits) in enumerate([(1.0, 100.0), (3.0, 150.0), (5.0, 40.0)]):
        put(writer, "", load(W0, at + i, running=running, prefix_hits_tokens=hits, capacity_blocks=99, block_size=16, model="m"))
        writer.flush(10)
        collected(data_dir, stream)
    writer.close(10)
    assert ask(data_dir, "SELECT running, engine_hit_tokens, waiting FROM worker_10s") == [(3.0, 90.0, None)]
    assert ask(data_dir, "SELECT engine, model, up, trust, capacity_blocks, running, resident_blocks FROM workers") == [
        ("vllm", "m", True, "blind", 99, 5.0, None)
    ]


def test_a_second_collector_in_the_folder_is_refused_with_the_first_ones_process(stream: Stream, data_dir: Path) -> None:
    import os

    one = started(data_dir, stream)
    with pytest.raises(SettingsError, match=rf"`data_dir`: another collector \(process {os.getpid()}\)"):
        started(data_dir, stream)
    one.stop()
    started(data_dir, stream).stop()


def test_the_published_file_keeps_its_contract_and_is_fresh_when_idle(stream: Stream, data_dir: Path) -> None:
    one = started(data_dir, stream)
    assert ask(data_dir, "SELECT state, watermark, has_events, version FROM published") == [("running", None, False, f"{MAJOR}.{MINOR}")]
    writer = stream.writer()
    put(writer, "", decision("a", time.time()))
    writer.close(10)
    drain(one, stream, told=False)
    deadline = time.monotonic() + 10
    seen = set()
    while len(seen) < 3 and time.monotonic() < deadline:
        one.turn()
        row = ask(data_dir, "SELECT published_at, watermark FROM published")[0]
        if row[1] is not None:
            seen.add(row)
    assert len({r[0] for r in seen}) == len({r[1] for r in seen}) == 3
    one.stop()
    assert ask(data_dir, "SELECT state FROM published") == [("stopped",)]


def test_a_damaged_checkpoint_is_rebuilt_from_the_stream(stream: Stream, data_dir: Path) -> None:
    writer = stream.writer()
    traffic = Traffic(writer)
    for _ in range(50):
        traffic.step()
    writer.close(10)
    collected(data_dir, stream)
    (file,) = (data_dir / "checkpoints").glob("*.npz")
    file.write_bytes(file.read_bytes()[:100])
    collected(data_dir, stream)
    assert ask(data_dir, WHAT_IS_THERE) == [what_must_be_there(traffic.sent)]
    assert dict(ask(data_dir, "SELECT worker, resident_blocks FROM workers")) == {w.worker: c.total() for w, c in traffic.held.items()}


def test_a_hit_is_told_by_block_even_when_the_cache_was_cleared_since(stream: Stream, data_dir: Path) -> None:
    writer = stream.writer()
    at = 1_790_000_000.0
    chain = [11, 12, 13, 14]
    for b in (
        batch(W0, 1, 0, at, event(Kind.EPOCH_STARTED, flags=COMPLETE)),
        batch(W0, 1, 1, at + 1, event(Kind.STORED, chain[:2], parent=5)),
        batch(W0, 1, 2, at + 3, event(Kind.STORED, chain[2:], parent=12)),
        batch(W0, 1, 3, at + 4, event(Kind.REMOVED, [11])),
        batch(W0, 1, 4, at + 5, event(Kind.CLEARED)),
        batch(W0, 1, 5, at + 6, event(Kind.STORED, [99])),
    ):
        writer.append(KV_EVENTS, W0.key, encode(b))
    put(writer, "", decision("q", at + 2, chain=pack_hashes_of(chain), block_size=16, token_source="exact", prompt_tokens=70))
    put(writer, "", outcome("q", at + 3.5, prompt_tokens=70, cached_tokens=32))
    writer.close(10)
    collected(data_dir, stream)
    assert ask(data_dir, "SELECT event_hit_tokens, cached_tokens FROM requests") == [(32, 32)]
    assert ask(data_dir, "SELECT chain_blocks, chain_head, chain_tail FROM requests") == [(4, 11, 14)]
    assert ask(data_dir, "SELECT sum(event_requests), sum(event_mismatches) FROM worker_10s") == [(1, 0)]


def test_open_offsets_survive_packing() -> None:
    assert unpack_waiting(pack_waiting([5 << 1, (1 << 40) << 1 | 1])) == {5: False, 1 << 40: True}
    assert unpack_waiting(pack_waiting(np.array([], np.int64))) == {}
