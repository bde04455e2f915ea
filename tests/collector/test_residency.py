"""The compiled residency against its naive twin, and the things that only the compiled one has: ring, instances, saving."""

from __future__ import annotations

import random

import numpy as np
import pytest

import collector.residency
from collector.residency import LOST_BATCHES, REMOVED_BLOCKS, RESIDENT, STORED_BLOCKS, Residency
from schemas.kv_events import COMPLETE, FIRST, LAST, Kind, KvBatch, WorkerId, encode, unpack
from schemas.workers import Trust
from tests.collector.batches import batch, event, random_batches
from tests.collector.naive import NaiveWorker

A, B = WorkerId("p", "a", 0), WorkerId("p", "b", 0)


def feed(state: Residency, batches: list[KvBatch], numbers: dict[WorkerId, int]):
    got = unpack([encode(b) for b in batches])
    assert got.ok.all()
    return state.apply(got, np.array([numbers[b.source] for b in batches], np.int32))


def same(state: Residency, number: int, twin: NaiveWorker) -> None:
    w = state.workers[number]
    assert (int(w["resident"]), int(w["distinct"]), int(w["peak"])) == (twin.resident, twin.distinct, twin.peak)
    assert state.trust(number)[0].value == twin.trust
    assert int(w["lost_batches"]) == twin.lost
    assert int(w["restarts"]) == twin.restarts
    for (tier, group, block), copies in twin.held.items():
        assert state.copies(number, block, tier, group) == copies


@pytest.mark.parametrize("seed", range(12))
def test_agrees_with_the_naive_twin(seed: int) -> None:
    rng = random.Random(seed)
    state = Residency(recent_events=256, recent_hashes=512, slots=16)
    numbers = {A: state.worker(), B: state.worker()}
    twins = {A: NaiveWorker(), B: NaiveWorker()}
    lives = {w: random_batches(rng, w, 300, 40) for w in numbers}
    while any(lives.values()):
        slice_ = []
        for _ in range(rng.randint(1, 30)):
            worker = rng.choice([w for w in lives if lives[w]] or [A])
            if lives[worker]:
                slice_.append(lives[worker].pop(0))
        feed(state, slice_, numbers)
        for b in slice_:
            twins[b.source].apply(b)
        for worker, number in numbers.items():
            same(state, number, twins[worker])


def test_a_record_that_comes_again_at_the_clock_is_applied_once_also_after_a_restart() -> None:
    state = Residency(256, 512, 16)
    numbers = {A: state.worker()}
    start = batch(A, 1, 0, 1000.0, event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, [1, 2]))
    halves = [batch(A, 1, 1, 1001.0, event(Kind.STORED, own)) for own in ([3, 4], [5])]  # of one engine batch
    feed(state, [start, start, *halves, *halves], numbers)
    again = Residency(256, 512, 16)
    again.load(state.save())
    feed(again, [halves[1]], numbers)
    for s, repeated in ((state, 3), (again, 4)):
        assert (int(s.workers[0]["resident"]), int(s.workers[0]["stale_records"])) == (5, repeated)
    feed(again, [batch(A, 1, 1, 1001.0, event(Kind.STORED, [5, 6])), batch(A, 1, 2, 1001.0, event(Kind.STORED, [5]))], numbers)
    assert int(again.workers[0]["resident"]) == 8


def test_saving_and_loading_goes_on_as_if_nothing_had_happened() -> None:
    rng = random.Random(5)
    life = random_batches(rng, A, 400, 60)
    state, twin = Residency(256, 512, 16), NaiveWorker()
    numbers = {A: state.worker()}
    for i, b in enumerate(life):
        if i % 37 == 0:
            other = Residency(256, 512, 16)
            other.load(state.save())
            state = other
        feed(state, [b], numbers)
        twin.apply(b)
        same(state, numbers[A], twin)


def test_a_clear_frees_only_the_named_worker_and_costs_no_scan() -> None:
    state = Residency(256, 512, 16)
    numbers = {A: state.worker(), B: state.worker()}
    feed(state, [batch(w, 1, 0, 1000.0, event(Kind.EPOCH_STARTED, flags=COMPLETE)) for w in (A, B)], numbers)
    feed(state, [batch(w, 1, 1, 1001.0, event(Kind.STORED, [1, 2, 2])) for w in (A, B)], numbers)
    feed(state, [batch(A, 1, 2, 1002.0, event(Kind.CLEARED))], numbers)
    assert [int(x) for x in state.workers["resident"][:2]] == [0, 3]
    assert state.copies(numbers[A], 2) == 0
    assert state.copies(numbers[B], 2) == 2
    assert int(state.workers[numbers[B]]["distinct"]) == 2


def test_a_removal_that_finds_nothing_is_counted_and_changes_nothing() -> None:
    state = Residency(256, 512, 16)
    numbers = {A: state.worker()}
    feed(state, [batch(A, 1, 0, 1000.0, event(Kind.STORED, [1]), event(Kind.REMOVED, [1, 1, 9]))], numbers)
    w = state.workers[0]
    assert (int(w["resident"]), int(w["distinct"]), int(w["unknown_removals"])) == (0, 0, 2)


def test_the_table_forgets_cleared_content_instead_of_growing() -> None:
    state = Residency(recent_events=16, recent_hashes=1024, slots=1024)
    numbers = {A: state.worker()}
    for seq in range(200):
        feed(state, [batch(A, 1, 2 * seq, 1000.0 + seq, event(Kind.STORED, range(1 + 100 * seq, 101 + 100 * seq)))], numbers)
        feed(state, [batch(A, 1, 2 * seq + 1, 1000.5 + seq, event(Kind.CLEARED))], numbers)
    assert len(state.table) <= 4096
    assert int(state.workers[0]["clears"]) == 200
    assert state._next_instance < 100


def test_trust_says_why_it_is_not_exact_and_what_heals_it() -> None:
    state = Residency(256, 512, 16)
    numbers = {A: state.worker()}
    assert state.trust(0) == (Trust.BLIND, "no event was received yet")
    feed(state, [batch(A, 1, 7, 1000.0, event(Kind.STORED, [1]))], numbers)
    assert state.trust(0) == (Trust.DEGRADED, "events before the first one received are unknown")
    feed(state, [batch(A, 1, 7, 1001.0, event(Kind.SNAPSHOT, [1, 1, 2], flags=COMPLETE | FIRST | LAST))], numbers)
    assert state.trust(0) == (Trust.EXACT, "")
    assert int(state.workers[0]["resident"]) == 3
    feed(state, [batch(A, 1, 9, 1002.0, event(Kind.STORED, [5]))], numbers)
    assert state.trust(0) == (Trust.DEGRADED, "engine sequence jumped without a gap mark")
    feed(state, [batch(A, 1, 10, 1003.0, event(Kind.CLEARED))], numbers)
    assert state.trust(0) == (Trust.EXACT, "")
    state.lose(0, 1004.0)
    assert state.trust(0) == (Trust.DEGRADED, "the stream lost records before the collector read them")


def test_a_snapshot_verifies_an_exact_state_and_replaces_it_when_it_differs() -> None:
    state = Residency(256, 512, 16)
    numbers = {A: state.worker()}
    feed(state, [batch(A, 1, 0, 1000.0, event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, [1, 2, 2]))], numbers)
    feed(state, [batch(A, 1, 0, 1001.0, event(Kind.SNAPSHOT, [2, 1, 2], flags=COMPLETE | FIRST | LAST))], numbers)
    assert int(state.workers[0]["mismatches"]) == 0
    feed(state, [batch(A, 1, 0, 1002.0, event(Kind.SNAPSHOT, [2, 3], flags=COMPLETE | FIRST | LAST))], numbers)
    w = state.workers[0]
    assert (int(w["mismatches"]), int(w["resident"]), int(w["snapshots"])) == (3, 2, 2)
    assert state.copies(0, 3) == 1


def test_the_tally_counts_by_worker_and_ten_seconds() -> None:
    state = Residency(256, 512, 16)
    numbers = {A: state.worker(), B: state.worker()}
    tally = feed(
        state,
        [
            batch(A, 1, 0, 1009.0, event(Kind.STORED, [1, 2])),
            batch(B, 1, 0, 1011.0, event(Kind.STORED, [1, 2, 3])),
            batch(A, 1, 3, 1012.0, event(Kind.REMOVED, [1])),
        ],
        numbers,
    )
    assert tally.first_bucket == 100
    assert tally.counts[0, :, STORED_BLOCKS].tolist() == [2, 0]
    assert tally.counts[0, :, REMOVED_BLOCKS].tolist() == [0, 1]
    assert tally.counts[0, :, LOST_BATCHES].tolist() == [0, 2]
    assert tally.counts[0, :, RESIDENT].tolist() == [2, 1]
    assert tally.counts[1, :, STORED_BLOCKS].tolist() == [0, 3]


def test_marks_that_make_no_sense_never_make_a_count_negative() -> None:
    state = Residency(256, 512, 16)
    numbers = {A: state.worker()}
    huge = (1 << 64) - 1
    tally = feed(
        state,
        [
            batch(A, 1, 5, 1000.0, event(Kind.GAP, seq=9, parent=3)),
            batch(A, 1, 6, 1000.0, event(Kind.GAP, seq=0, parent=huge)),
            batch(A, 1, huge, 1000.0, event(Kind.GAP, seq=1 << 63, parent=huge)),
        ],
        numbers,
    )
    assert (tally.counts >= 0).all()
    assert 0 < int(state.workers[0]["lost_batches"]) < 1 << 40
    assert state.trust(0)[0] is Trust.DEGRADED


def test_one_record_of_another_age_does_not_shift_the_times_of_the_rest_nor_take_memory() -> None:
    state = Residency(256, 512, 16)
    numbers = {A: state.worker(), B: state.worker()}
    at = 1_790_000_000.0
    tally = feed(state, [batch(B, 1, 0, 5.0, event(Kind.STORED, [1])), batch(A, 1, 0, at, event(Kind.STORED, [1, 2]))], numbers)
    assert tally.counts.shape[1] <= 4096
    (column,) = np.flatnonzero(tally.counts[numbers[A], :, STORED_BLOCKS])
    assert (tally.first_bucket + column) * 10 == at
    assert tally.counts[numbers[B], :, STORED_BLOCKS].sum() == 1


def test_lives_of_a_cache_never_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector.residency, "INSTANCES", 64)
    state = Residency(recent_events=16, recent_hashes=64, slots=1 << 10)
    numbers = {A: state.worker()}
    for seq in range(300):
        feed(state, [batch(A, 1, seq, 1000.0 + seq, event(Kind.CLEARED), event(Kind.STORED, [seq + 1]))], numbers)
    assert (int(state.workers[0]["clears"]), state.copies(0, 300), state.copies(0, 299)) == (300, 1, 0)


def test_the_rest_of_a_snapshot_whose_middle_was_lost_is_not_taken_for_all_of_it() -> None:
    state = Residency(256, 512, 16)
    numbers = {A: state.worker()}
    feed(state, [batch(A, 1, 0, 1000.0, event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, [1, 2, 3]))], numbers)
    feed(state, [batch(A, 1, 0, 1001.0, event(Kind.SNAPSHOT, [1], flags=COMPLETE | FIRST))], numbers)
    state.lose(0, 1002.0)
    feed(state, [batch(A, 1, 0, 1003.0, event(Kind.SNAPSHOT, [3], flags=COMPLETE | LAST))], numbers)
    assert (state.trust(0)[0], int(state.workers[0]["resident"])) == (Trust.DEGRADED, 3)


def test_sizes_must_be_powers_of_two() -> None:
    with pytest.raises(ValueError, match="recent_events=1000 must be a power of two"):
        Residency(recent_events=1000)
