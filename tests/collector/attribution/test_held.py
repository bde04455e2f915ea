"""What each worker held at a past moment, for many requests in one walk, against a twin that keeps every state."""

from __future__ import annotations

import random

import numpy as np
import pytest

from collector.attribution.held import UNKNOWN, held_at
from collector.residency import BLIND, DEGRADED, EXACT, Residency
from schemas.kv_events import COMPLETE, WINDOWED, Kind, KvBatch, WorkerId, encode, unpack
from tests.collector.batches import batch, event, random_batches
from tests.collector.naive import NaiveWorker

A, B = WorkerId("p", "a", 0), WorkerId("p", "b", 0)
NUMBERS = {A: 0, B: 1}
TRUST = {"blind": BLIND, "degraded": DEGRADED, "exact": EXACT}


def made(ring: int = 1 << 14) -> Residency:
    state = Residency(recent_events=ring, recent_hashes=ring, slots=16, ghosts=100, seen=100, filtered=1000)
    for _ in NUMBERS:
        state.worker()
    return state


def feed(state: Residency, *batches: KvBatch) -> None:
    got = unpack([encode(b) for b in batches])
    state.apply(got, np.array([NUMBERS[b.source] for b in batches], np.int32))


def tree(rng: random.Random, blocks: int) -> list[list[int]]:
    """Chains in which a name stands for one prefix, small names near the root."""
    parent = {h: rng.randrange(max(0, h - 6), h) for h in range(1, blocks)}
    chains = []
    for h in [0, *parent]:
        chain: list[int] = []
        while h:
            chain.append(h)
            h = parent[h]
        chains.append(chain[::-1])
    return chains


def lookup(state: Residency, chains: list[list[int]], times_s: list[float]) -> tuple[list[list[int]], list[list[int]]]:
    blocks, trust = held_at(state, [0, 1], [np.array(c, np.uint64) for c in chains], times_s)
    return blocks.tolist(), trust.tolist()


@pytest.mark.parametrize("windows", [0, WINDOWED])
@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_a_twin_that_keeps_every_state(seed: int, windows: int) -> None:
    rng = random.Random(seed)
    state, twins = made(), {w: NaiveWorker() for w in NUMBERS}
    chains = tree(rng, 16)
    found = []
    lives = [random_batches(rng, w, 120, 16) for w in NUMBERS]
    todo = sorted((b for life in lives for b in life), key=lambda b: b.bridge_time_s)
    for b in todo:
        for e in b.events:
            if e["group"] == 2 and e["kind"] == Kind.STORED:
                e["flags"] |= windows
    for i, b in enumerate(todo):
        feed(state, b)
        twins[b.source].apply(b)
        if i % 30 == 29:
            asked = rng.choices(chains, k=12)
            now_s = b.bridge_time_s
            times_s = [now_s + 1 - rng.random() * rng.choice([2, 20, 100]) for _ in asked]
            blocks, trust = lookup(state, asked, times_s)
            expected = [[twins[w].held_at(c, t) for w in NUMBERS] for c, t in zip(asked, times_s, strict=True)]
            assert blocks == [[n for n, _ in row] for row in expected]
            assert trust == [[TRUST[t] for _, t in row] for row in expected]
            found += [n for row in blocks for n in row]
    assert max(found) >= 2


def test_an_undone_removal_lengthens_a_prefix_and_an_undone_store_shortens_it() -> None:
    state = made()
    feed(state, batch(A, 1, 0, 1000.0, event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, [1, 2, 3, 4])))
    feed(state, batch(A, 1, 1, 1001.0, event(Kind.REMOVED, [2])))
    feed(state, batch(A, 1, 2, 1002.0, event(Kind.STORED, [2]), event(Kind.STORED, [5])))
    feed(state, batch(A, 1, 3, 1003.0, event(Kind.CLEARED)))
    chain = [1, 2, 3, 4, 5, 6]
    blocks, _ = lookup(state, [chain] * 5, [1003.0, 1002.5, 1001.5, 1000.5, 999.0])
    assert [row[0] for row in blocks] == [0, 5, 1, 4, 0]
    assert lookup(state, [chain], [1001.0])[0] == [[1, 0]], "an event at the very moment has happened"


def test_where_the_ring_no_longer_reaches_back_is_unknown_and_silence_is_not() -> None:
    state = made(ring=16)
    feed(state, batch(B, 1, 0, 1000.0, event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, [1, 2])))
    for i in range(20):
        feed(state, batch(A, 1, i, 1001.0 + i, event(Kind.STORED, [100 + i])))
    times = [1000.5, 1010.0, 1030.0]
    blocks, _ = lookup(state, [[1, 2]] * 3, times)
    assert blocks == [[UNKNOWN, UNKNOWN], [0, 2], [0, 2]]
    again = made(ring=16)
    again.load(state.save(1010.0))
    assert lookup(again, [[1, 2]] * 3, times)[0] == blocks


def test_no_query_and_an_empty_chain_are_answered() -> None:
    state = made()
    assert lookup(state, [], []) == ([], [])
    assert lookup(state, [[]], [1000.0])[0] == [[0, 0]]
