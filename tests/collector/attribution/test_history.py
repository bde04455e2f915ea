"""What became of each block: the compiled memories against their naive twin, within their budgets and beyond."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from collector.attribution.history import (
    CLEARED,
    EVICTED,
    FILTER_BITS,
    LONG,
    NEVER,
    PRIOR_UNKNOWN,
    RESIDENT,
    UNKNOWN,
    decode_prior,
    prior_fate,
    prior_gone_s,
    prior_is_new,
)
from collector.residency import Residency
from schemas.kv_events import COMPLETE, FIRST, LAST, WINDOWED, Kind, KvBatch, WorkerId, encode, unpack
from tests.collector.batches import batch, event, random_batches
from tests.collector.naive import NaiveWorker, Told

A, B = WorkerId("p", "a", 0), WorkerId("p", "b", 0)
NUMBERS = {A: 0, B: 1}
AMPLE = {"ghosts": 2000, "seen": 2000, "filtered": 2000}


def made(ring: int = 1 << 14, **budgets: int) -> Residency:
    state = Residency(recent_events=ring, recent_hashes=ring, slots=16, **(AMPLE | budgets))
    for _ in NUMBERS:
        state.worker()
    return state


def feed(state: Residency, batches: Sequence[KvBatch]) -> None:
    got = unpack([encode(b) for b in batches])
    state.apply(got, np.array([NUMBERS[b.source] for b in batches], np.int32))


def again(state: Residency, ring: int = 1 << 14, **budgets: int) -> Residency:
    other = Residency(recent_events=ring, recent_hashes=ring, slots=16, **(AMPLE | budgets))
    other.load(state.save())
    return other


def mixed_lives(rng: random.Random, n: int, blocks: int) -> list[KvBatch]:
    lives = [random_batches(rng, w, n, blocks) for w in NUMBERS]
    out = []
    while any(lives):
        life = rng.choice([x for x in lives if x])
        out.append(life.pop(0))
    return out


def priors(state: Residency, number: int) -> npt.NDArray[np.uint32]:
    """Of all stored hashes of a worker that the ring still has, in order."""
    found = []
    low = state.reach()
    at = int(state.workers[number]["last"])
    while at >= low[0]:
        e = state.ring[at & (len(state.ring) - 1)]
        if e["start"] < low[1]:
            break
        if e["kind"] == Kind.STORED:
            found.append(state.ring_prior[np.arange(e["start"], e["start"] + e["count"]) & (len(state.ring_prior) - 1)])
        at = int(e["prev"])
    return np.concatenate(found[::-1]) if found else np.empty(0, np.uint32)


def told(prior: npt.NDArray[np.uint32]) -> list[Told]:
    return [Told(int(prior_fate(p)), int(p) & LONG, bool(prior_is_new(p))) for p in prior]


def answers(state: Residency, blocks: int) -> list[Any]:
    every = np.arange(1, blocks, dtype=np.uint64)
    out: list[Any] = [state.evers(every).tolist()]
    for number in NUMBERS.values():
        fates, gone = state.fates(number, every, 3000.0)
        out += [fates.tolist(), np.nan_to_num(gone, nan=-1.0).tolist(), priors(state, number).tolist()]
    return out


@pytest.mark.parametrize("seed", range(8))
def test_agrees_with_the_naive_twin_within_its_budgets(seed: int) -> None:
    rng = random.Random(seed)
    state, ever = made(), set[int]()
    twins = {w: NaiveWorker(ever=ever) for w in NUMBERS}
    todo = mixed_lives(rng, 250, 40)
    while todo:
        n = rng.randint(1, 60)
        part, todo = todo[:n], todo[n:]
        feed(state, part)
        for b in part:
            twins[b.source].apply(b)
        every = np.arange(1, 42, dtype=np.uint64)
        assert state.evers(every).tolist() == [int(h) in ever for h in every]
        for worker, number in NUMBERS.items():
            expected = [twins[worker].fate(int(h)) for h in every]
            assert [state.fate(number, int(h)) for h in every] == [(f, None if t is None else t / 100) for f, t in expected]
            assert state.fates(number, every, 1e9)[0].tolist() == [f for f, _ in expected]
        if rng.random() < 0.2:
            state = again(state)
    assert {p.fate for t in twins.values() for p in t.priors} == {NEVER, EVICTED, CLEARED, RESIDENT}
    for worker, number in NUMBERS.items():
        assert told(priors(state, number)) == twins[worker].priors
    assert int(state.memory.meta[14]) > 8, "lives were settled, too"


@pytest.mark.parametrize("seed", range(6))
def test_slices_rebuilds_and_saving_change_no_answer_even_beyond_the_budgets(seed: int) -> None:
    rng = random.Random(seed)
    tiny = {"ghosts": 40, "seen": 30, "filtered": 60}
    todo = mixed_lives(rng, 250, 150)
    at_once, in_parts, small = made(**tiny), made(**tiny), made(**tiny)
    feed(at_once, todo)
    for i in range(0, len(todo), 23):
        feed(in_parts, todo[i : i + 23])
        if i % 3 == 0:
            in_parts = again(in_parts, **tiny)
        if i % 5 == 0:
            small._rebuild(0)
        for b in todo[i : i + 23]:
            feed(small, [b])
    assert answers(at_once, 151) == answers(in_parts, 151) == answers(small, 151)


@pytest.mark.parametrize("seed", range(4))
def test_beyond_the_budgets_filters_answer_and_err_on_one_side_only(seed: int) -> None:
    rng = random.Random(seed)
    small = {"ghosts": 60, "seen": 50, "filtered": 20_000}
    state, ever = made(**small), set[int]()
    twins = {w: NaiveWorker(ever=ever) for w in NUMBERS}
    for b in mixed_lives(rng, 400, 600):
        feed(state, [b])
        twins[b.source].apply(b)
    wrong = lost = 0
    for worker, number in NUMBERS.items():
        for got, true in zip(told(priors(state, number)), twins[worker].priors, strict=True):
            if true.fate in (EVICTED, CLEARED):
                assert not got.new
                assert got.fate == true.fate or (got.fate == EVICTED and got.gone == LONG)
                assert got.gone in (true.gone, LONG)
                lost += got.gone == LONG
            elif true.fate == RESIDENT:
                assert got.fate == RESIDENT
            else:
                wrong += got != true
    assert lost > 20
    assert wrong <= 5


def test_a_filter_errs_for_less_than_half_a_percent_when_a_generation_is_full() -> None:
    n = 40_000
    state = Residency(1 << 10, 1 << 17, 1 << 10, ghosts=2, seen=2, filtered=n)
    state.worker()
    hashes = np.random.default_rng(1).integers(1, 1 << 63, 2 * n).astype(np.uint64)
    own, others = hashes[:n], hashes[n:]
    named = own.tolist()
    feed(state, [batch(A, 1, 0, 1000.0, event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, named), event(Kind.REMOVED, named))])
    assert state.evers(own).all()
    assert state.evers(others).mean() < 0.005
    fates, gone = state.fates(0, own, 1001.0)
    assert (fates == EVICTED).all()
    assert np.isinf(gone).mean() > 0.99
    both = state.evers(others)  # asked only of blocks that count as seen
    assert (state.fates(0, others, 1001.0)[0][both] != NEVER).mean() < 0.1
    lines = len(state.memory.gone_filter)
    assert lines * 512 >= FILTER_BITS * n


def test_what_a_worker_holds_stays_seen_however_much_comes_and_goes() -> None:
    state = made(ghosts=20, seen=20, filtered=40)
    feed(state, [batch(A, 1, 0, 1000.0, event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, [7]))])
    for i in range(400):
        own = range(1000 + 10 * i, 1010 + 10 * i)
        feed(state, [batch(B, 1, i, 1000.0, event(Kind.STORED, own), event(Kind.REMOVED, own))])
    assert state.ever(7)
    assert not state.evers(np.arange(1000, 2000, dtype=np.uint64)).all()
    feed(state, [batch(B, 1, 400, 1000.0, event(Kind.STORED, [7]))])
    assert told(priors(state, 1))[-1] == Told(NEVER)


def test_a_fleet_that_restarts_remembers_that_its_blocks_were_cleared_beyond_the_budget_too() -> None:
    state = made(ghosts=100, seen=100, filtered=4000)
    for w in NUMBERS:
        own = range(1 + 1000 * NUMBERS[w], 501 + 1000 * NUMBERS[w])
        feed(state, [batch(w, 1, 0, 1000.0, event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, own))])
        feed(state, [batch(w, 2, 0, 1001.0, event(Kind.EPOCH_STARTED, flags=COMPLETE))])
    for number in NUMBERS.values():
        fates, _ = state.fates(number, np.arange(1 + 1000 * number, 501 + 1000 * number, dtype=np.uint64), 1002.0)
        assert (fates == CLEARED).all()


def test_a_block_that_left_one_tier_and_is_kept_on_another_is_no_loss_once_it_was_stored_there() -> None:
    state = made()
    gpu, cpu = {"tier": 0}, {"tier": 1}
    feed(state, [batch(A, 1, 0, 1000.0, event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, [1, 2], **gpu))])
    feed(state, [batch(A, 1, 1, 1001.0, event(Kind.REMOVED, [1, 2], **gpu), event(Kind.STORED, [1], **cpu))])
    assert state.fate(0, 1) == (RESIDENT, None)
    assert state.fate(0, 2) == (EVICTED, 1001.0)
    feed(state, [batch(A, 1, 2, 1003.5, event(Kind.STORED, [1, 2], **gpu))])
    assert told(priors(state, 0))[-2:] == [Told(RESIDENT), Told(EVICTED, 250)]


def test_a_windowed_group_alone_does_not_hold_a_block() -> None:
    state = made()
    start = event(Kind.EPOCH_STARTED, flags=COMPLETE)
    feed(state, [batch(A, 1, 0, 1000.0, start, event(Kind.STORED, [1]), event(Kind.STORED, [1], group=1, flags=WINDOWED))])
    feed(state, [batch(A, 1, 1, 1001.0, event(Kind.REMOVED, [1]))])
    assert state.fate(0, 1) == (EVICTED, 1001.0)


def test_a_snapshot_that_replaces_clears_what_it_does_not_name() -> None:
    state = made()
    feed(state, [batch(A, 1, 0, 1000.0, event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, [1, 2]))])
    feed(state, [batch(A, 1, 0, 1002.0, event(Kind.SNAPSHOT, [2, 3], flags=COMPLETE | FIRST | LAST))])
    assert [state.fate(0, h) for h in (1, 2, 3, 4)] == [(CLEARED, 1002.0), (RESIDENT, None), (RESIDENT, None), (NEVER, None)]
    assert state.evers(np.array([1, 2, 3, 4], np.uint64)).tolist() == [True, True, True, False]


def test_a_checkpoint_of_an_earlier_version_loads_and_its_past_is_unknown() -> None:
    state = made()
    feed(state, [batch(A, 1, 0, 1000.0, event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, [1, 2]), event(Kind.REMOVED, [1]))])
    old = {k: v for k, v in state.save().items() if not k.startswith("history") and k != "ring_prior"}
    new = made()
    new.load(old)
    fate, gone_s, anywhere = decode_prior(priors(new, 0))
    assert fate.tolist() == [UNKNOWN, UNKNOWN]
    assert np.isnan(gone_s).all()
    assert not anywhere.any()
    assert [new.fate(0, 1), new.fate(0, 2)] == [(NEVER, None), (RESIDENT, None)]
    assert new.ever(2)
    feed(new, [batch(B, 1, 0, 1001.0, event(Kind.STORED, [2, 9]))])
    assert told(priors(new, 1)) == [Told(NEVER), Told(NEVER, new=True)]


def test_other_budgets_take_over_a_saved_past() -> None:
    rng = random.Random(3)
    state = made()
    feed(state, mixed_lives(rng, 150, 100))
    before = answers(state, 101)
    smaller = again(state, ghosts=10, seen=10, filtered=50)
    assert answers(smaller, 101) == before
    feed(smaller, mixed_lives(rng, 150, 100))
    assert int(smaller.memory.meta[1:3].sum()) <= 10


def test_decoding_by_one_and_by_many_agree() -> None:
    own = np.array([0, 1 << 31, EVICTED << 29 | 150, CLEARED << 29 | LONG, RESIDENT << 29, PRIOR_UNKNOWN], np.uint32)
    fate, gone_s, new = decode_prior(own)
    assert fate.tolist() == [NEVER, NEVER, EVICTED, CLEARED, RESIDENT, UNKNOWN] == [int(prior_fate(p)) for p in own]
    assert new.tolist() == [False, True, False, False, False, False] == [bool(prior_is_new(p)) for p in own]
    assert np.array_equal(gone_s, [prior_gone_s(p) for p in own], equal_nan=True)
    assert gone_s[2] == 1.5
    assert np.isinf(gone_s[3])


def test_budgets_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="ghosts=100 must be at least 2 and at most the filters' 50"):
        Residency(ghosts=100, seen=10, filtered=50)
