"""Stores that requests wait for: found event by event as by one walk over all of them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from collector.attribution.stores import DECODE, FINAL, Stores
from collector.residency import Residency
from schemas.kv_events import COMPLETE, Kind, KvBatch, WorkerId, encode, unpack
from tests.collector.batches import batch, event

A = WorkerId("p", "a", 0)


def made(ring: int) -> Residency:
    state = Residency(recent_events=ring, recent_hashes=4 * ring, slots=64, ghosts=50, seen=50, filtered=100)
    state.worker()
    return state


def feed(state: Residency, b: KvBatch) -> None:
    state.apply(unpack([encode(b)]), np.zeros(1, np.int32))


@pytest.mark.parametrize("ring", [1 << 6, 1 << 12])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_found_step_by_step_is_what_one_walk_finds(seed: int, ring: int) -> None:
    rng = random.Random(seed)
    state, stores = made(ring), Stores()
    feed(state, batch(A, 1, 0, 1000.0, event(Kind.EPOCH_STARTED, flags=COMPLETE)))
    now_s, open_, found = 1000.0, dict[int, float](), 0
    for seq in range(1, 400):
        now_s += rng.random()
        hashes = [rng.randrange(1, 30) for _ in range(rng.randint(1, 4))]
        feed(state, batch(A, 1, seq, now_s, event(Kind.STORED, hashes, parent=rng.randrange(1, 30))))
        if rng.random() < 0.3:
            open_[rng.randrange(1, 30)] = now_s - rng.random() * 20  # some are told of late
        if open_ and rng.random() < 0.2:
            del open_[rng.choice(list(open_))]
        if rng.random() < 0.4:
            got, want = stores.find(state, 0, open_), Stores().find(state, 0, open_)
            times = state.ring["time_s"]
            for tail, since_s in open_.items():
                mine, whole = ([x for x in some[tail] if times[x[0] & (ring - 1)] >= since_s] for some in (got, want))
                assert mine == whole
                found += len(whole)
            assert got.keys() == open_.keys()
    assert found > 100


def test_a_store_that_ends_with_the_tail_and_one_that_follows_it_are_told_apart() -> None:
    state = made(64)
    feed(state, batch(A, 1, 0, 1000.0, event(Kind.STORED, [1, 2, 3]), event(Kind.STORED, [4], parent=3), event(Kind.STORED, [5], parent=4)))
    assert [role for _, role in Stores().find(state, 0, {3: 999.0})[3]] == [FINAL, DECODE]
