"""The event-order hit: hand-made cases for each rule, and a fuzz against replaying everything from the start."""

from __future__ import annotations

import random

import numpy as np
import pytest

from collector.attribution.moments import Hit, Running, assign, tell
from collector.residency import Residency
from schemas.kv_events import COMPLETE, WINDOWED, Kind, KvBatch, WorkerId, encode, unpack
from tests.collector.batches import batch, event
from tests.collector.naive import NaiveWorker

A, B = WorkerId("p", "w", 0), WorkerId("p", "w", 1)
AT = 1000.0


def state_of(*batches: KvBatch, **sizes: int) -> Residency:
    state = Residency(
        **({"recent_events": 1024, "recent_hashes": 4096, "slots": 64, "ghosts": 1000, "seen": 1000, "filtered": 1000} | sizes)
    )
    numbers: dict[WorkerId, int] = {}
    for b in batches:
        if b.source not in numbers:
            numbers[b.source] = state.worker()
    got = unpack([encode(b) for b in batches])
    state.apply(got, np.array([numbers[b.source] for b in batches], np.int32))
    return state


def begun(worker: WorkerId = A) -> KvBatch:
    return batch(worker, 1, 0, AT, event(Kind.EPOCH_STARTED, flags=COMPLETE))


def asks(chain: list[int], started_s: float, ended_s: float | None, most: int | None = None, **more: float) -> Running:
    return Running("q", np.array(chain, np.uint64), len(chain) if most is None else most, started_s, ended_s=ended_s, **more)


def told(state: Residency, *running: Running, ranks: tuple[int, ...] = (0,)) -> list[Hit]:
    assign(state, ranks, running)
    return [tell(state, ranks, r) for r in running if r.ended_s is not None]


def test_the_state_just_before_the_own_store_counts_not_what_came_after() -> None:
    state = state_of(
        begun(),
        batch(A, 1, 1, AT + 1, event(Kind.STORED, [1, 2], parent=9)),
        batch(A, 1, 2, AT + 3, event(Kind.STORED, [3, 4], parent=2)),
        batch(A, 1, 3, AT + 4, event(Kind.REMOVED, [2])),
    )
    assert told(state, asks([1, 2, 3, 4], AT + 2, AT + 5)) == [Hit(2, 0, "")]


def test_an_eviction_before_the_own_store_counts_even_when_it_came_after_the_dispatch() -> None:
    state = state_of(
        begun(),
        batch(A, 1, 1, AT + 1, event(Kind.STORED, [1, 2], parent=9)),
        batch(A, 1, 2, AT + 3, event(Kind.REMOVED, [2]), event(Kind.STORED, [2, 3, 4], parent=1)),
    )
    assert told(state, asks([1, 2, 3, 4], AT + 2, AT + 5)) == [Hit(1, 0, "")]


def test_a_prefill_in_chunks_counts_from_its_first_store() -> None:
    state = state_of(
        begun(),
        batch(A, 1, 1, AT + 1, event(Kind.STORED, [1], parent=9)),
        batch(A, 1, 2, AT + 3, event(Kind.STORED, [2, 3], parent=1)),
        batch(A, 1, 3, AT + 4, event(Kind.STORED, [4, 5], parent=3)),
    )
    assert told(state, asks([1, 2, 3, 4, 5], AT + 2, AT + 5)) == [Hit(1, 0, "")]


def test_a_chunk_that_is_somebody_elses_whole_prompt_is_not_taken() -> None:
    state = state_of(
        begun(),
        batch(A, 1, 1, AT + 3, event(Kind.STORED, [1, 2], parent=9)),
        batch(A, 1, 2, AT + 4, event(Kind.STORED, [3, 4], parent=2)),
    )
    long, short = asks([1, 2, 3, 4], AT + 2, AT + 5), asks([1, 2], AT + 2.5, AT + 5)
    assert told(state, long, short) == [Hit(2, 0, ""), Hit(0, 0, "")]


def test_chunks_that_fit_two_prompts_are_the_earlier_ones_even_if_the_later_one_is_told_first() -> None:
    state = state_of(
        begun(),
        batch(A, 1, 1, AT + 3, event(Kind.STORED, [1, 2], parent=9)),
        batch(A, 1, 2, AT + 3.5, event(Kind.STORED, [3, 4], parent=2)),
        batch(A, 1, 3, AT + 4, event(Kind.STORED, [5], parent=4), event(Kind.STORED, [6], parent=4)),
    )
    early, late = asks([1, 2, 3, 4, 5], AT + 2, None), asks([1, 2, 3, 4, 6], AT + 2.5, AT + 5)
    assert told(state, early, late) == [Hit(4, 0, "")]
    early.ended_s = AT + 6
    assert told(state, early) == [Hit(0, 0, "")]


def test_of_two_with_the_same_blocks_the_first_started_takes_the_first_store() -> None:
    state = state_of(
        begun(),
        batch(A, 1, 1, AT + 3, event(Kind.STORED, [1, 2], parent=9)),
        batch(A, 1, 2, AT + 4, event(Kind.STORED, [2], parent=1)),
    )
    late, early = asks([1, 2], AT + 2, AT + 6), asks([1, 2], AT + 1, AT + 5)
    assert told(state, late, early) == [Hit(2, 0, ""), Hit(0, 0, "")]


def test_one_still_in_flight_keeps_its_older_claim() -> None:
    state = state_of(
        begun(),
        batch(A, 1, 1, AT + 3, event(Kind.STORED, [1, 2], parent=9)),
        batch(A, 1, 2, AT + 4, event(Kind.STORED, [2], parent=1)),
    )
    assert told(state, asks([1, 2], AT + 1, None), asks([1, 2], AT + 2, AT + 6)) == [Hit(2, 0, "")]


def test_a_whole_hit_is_told_by_the_first_decode_store_and_leaves_the_last_token() -> None:
    state = state_of(
        begun(),
        batch(A, 1, 1, AT + 1, event(Kind.STORED, [1, 2, 3], parent=9)),
        batch(A, 1, 2, AT + 3, event(Kind.STORED, [50], parent=3)),
        batch(A, 1, 3, AT + 4, event(Kind.REMOVED, [1])),
    )
    assert told(state, asks([1, 2, 3], AT + 2, AT + 5, most=2)) == [Hit(2, 0, "")]


def test_without_any_own_event_the_first_byte_marks_the_moment_else_the_end() -> None:
    lives = (
        begun(),
        batch(A, 1, 1, AT + 1, event(Kind.STORED, [1, 2], parent=9)),
        batch(A, 1, 2, AT + 4, event(Kind.REMOVED, [2])),
        batch(A, 1, 3, AT + 6, event(Kind.REMOVED, [1])),
    )
    assert told(state_of(*lives), asks([1, 2], AT + 2, AT + 5, first_byte_s=AT + 3)) == [Hit(2, 0, "")]
    assert told(state_of(*lives), asks([1, 2], AT + 2, AT + 5)) == [Hit(1, 0, "")]


def test_the_rank_is_the_one_that_stored_and_unknown_when_none_did() -> None:
    state = state_of(
        begun(A),
        begun(B),
        batch(B, 1, 1, AT + 1, event(Kind.STORED, [1], parent=9)),
        batch(B, 1, 2, AT + 3, event(Kind.STORED, [2], parent=1)),
    )
    assert told(state, asks([1, 2], AT + 2, AT + 5), ranks=(0, 1)) == [Hit(1, 1, "")]
    assert told(state, asks([7, 8], AT + 2, AT + 5), ranks=(0, 1))[0].blocks is None


@pytest.mark.parametrize("kind", [Kind.CLEARED, Kind.EPOCH_STARTED, Kind.SNAPSHOT])
def test_the_state_before_a_clear_a_restart_or_a_replacement_is_still_known(kind: Kind) -> None:
    mark = {
        Kind.CLEARED: batch(A, 1, 3, AT + 4, event(Kind.CLEARED)),
        Kind.EPOCH_STARTED: batch(A, 2, 0, AT + 4, event(Kind.EPOCH_STARTED, flags=COMPLETE)),
        Kind.SNAPSHOT: batch(A, 1, 2, AT + 4, event(Kind.SNAPSHOT, [77], flags=7)),
    }[kind]
    state = state_of(
        begun(),
        batch(A, 1, 1, AT + 1, event(Kind.STORED, [1, 2], parent=9)),
        batch(A, 1, 2, AT + 3, event(Kind.STORED, [3], parent=2)),
        mark,
    )
    assert told(state, asks([1, 2, 3], AT + 2, AT + 5)) == [Hit(2, 0, "")]


def test_no_number_when_the_events_were_incomplete_or_the_ring_is_too_short() -> None:
    gap = state_of(
        begun(),
        batch(A, 1, 1, AT + 1, event(Kind.STORED, [1], parent=9)),
        batch(A, 1, 3, AT + 2, event(Kind.GAP, seq=2, parent=3)),
        batch(A, 1, 4, AT + 3, event(Kind.STORED, [2], parent=1)),
    )
    (hit,) = told(gap, asks([1, 2], AT + 2.5, AT + 5))
    assert (hit.blocks, hit.why) == (None, "the worker's events were not complete then")
    many = [batch(A, 1, 2 + i, AT + 4, event(Kind.STORED, [100 + i], parent=9)) for i in range(40)]
    short = state_of(begun(), batch(A, 1, 1, AT + 3, event(Kind.STORED, [1, 2], parent=9)), *many, recent_events=16)
    (hit,) = told(short, asks([1, 2], AT + 2, AT + 5))
    assert hit.blocks is None
    assert "ring" in hit.why


def test_a_store_of_a_windowed_group_does_not_hold_the_prefix() -> None:
    state = state_of(
        begun(),
        batch(A, 1, 1, AT + 1, event(Kind.STORED, [1, 2], parent=9), event(Kind.STORED, [1, 2, 3], parent=9, group=1, flags=WINDOWED)),
        batch(A, 1, 2, AT + 3, event(Kind.STORED, [3, 4], parent=2)),
    )
    assert told(state, asks([1, 2, 3, 4], AT + 2, AT + 5)) == [Hit(2, 0, "")]


def test_the_clocks_of_router_and_engine_may_differ_by_the_tolerance() -> None:
    state = state_of(begun(), batch(A, 1, 1, AT + 1.99, event(Kind.STORED, [1, 2], parent=9)))
    request = asks([1, 2], AT + 2, AT + 5)
    assign(state, (0,), [request], tolerance_s=0.0)
    assert request.own is None
    assign(state, (0,), [request], tolerance_s=0.05)
    assert request.own is not None


def test_the_end_of_an_answer_just_before_the_next_turn_is_no_chunk_of_it() -> None:
    state = state_of(
        begun(),
        batch(A, 1, 1, AT + 1, event(Kind.STORED, [1, 2], parent=9)),
        batch(A, 1, 2, AT + 1.99, event(Kind.STORED, [3], parent=2)),
        batch(A, 1, 3, AT + 3, event(Kind.STORED, [4], parent=3)),
    )
    request = asks([1, 2, 3, 4], AT + 2, AT + 5)
    assign(state, (0,), [request], tolerance_s=0.05)
    assert tell(state, (0,), request) == Hit(3, 0, "")


def test_telling_before_the_end_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="has not ended"):
        tell(state_of(begun()), (0,), asks([1], AT, None))


@pytest.mark.parametrize("seed", range(25))
def test_undoing_the_ring_gives_the_same_as_replaying_from_the_start(seed: int) -> None:
    """Random lives; each own store is known, so the twin can stop just before it."""
    rng = random.Random(seed)
    lives, cases = [begun()], []
    time_s, seq, epoch = AT, 0, 1
    for n in range(60):
        time_s += 1.0
        seq += 1
        dice = rng.random()
        if dice < 0.05:
            lives.append(batch(A, epoch, seq, time_s, event(Kind.CLEARED)))
        elif dice < 0.08:
            epoch, seq = epoch + 1, 0
            lives.append(batch(A, epoch, 0, time_s, event(Kind.EPOCH_STARTED, flags=COMPLETE)))
        elif dice < 0.5:
            own = [rng.randrange(1, 12) for _ in range(rng.randint(1, 4))]
            kind = rng.choice([Kind.STORED, Kind.REMOVED])
            lives.append(batch(A, epoch, seq, time_s, event(kind, own, parent=999, tier=rng.choice([0, 0, 1]))))
        else:
            prefix = [rng.randrange(1, 12) for _ in range(rng.randint(0, 4))]
            mine = [1000 + n]  # nobody else's tail
            cases.append((len(lives), asks([*dict.fromkeys(prefix), *mine], time_s - 0.5, time_s + 0.4)))
            parent = [999, *dict.fromkeys(prefix)][-1]
            lives.append(batch(A, epoch, seq, time_s, event(Kind.STORED, mine, parent=parent)))
    state = state_of(*lives)
    hits = told(state, *(r for _, r in cases))
    for (before, request), hit in zip(cases, hits, strict=True):
        twin = NaiveWorker()
        for b in lives[:before]:
            twin.apply(b)
        want = 0
        chain = request.chain.tolist()
        while want < len(chain) and any((tier, 0, chain[want]) in twin.held for tier in range(4)):
            want += 1
        assert hit == Hit(want, 0, "")
