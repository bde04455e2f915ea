"""Last uses and first stores in bounded memory."""

from __future__ import annotations

import random

import numpy as np
import pytest

from collector.attribution.times import News, Times, Uses
from collector.residency import Residency
from schemas.kv_events import COMPLETE, Kind, WorkerId, encode, unpack
from tests.collector.analytics.told import told
from tests.collector.batches import batch, event


def test_agrees_with_a_dict_within_its_budget_and_comes_back_as_it_was() -> None:
    rng = random.Random(1)
    times, twin = Times(1 << 12), dict[int, float]()
    for n in range(60):
        keys = [rng.randrange(1, 1000) for _ in range(rng.randint(0, 90))]
        when = [float(rng.randrange(1000)) for _ in keys]
        times.put(np.array(keys, np.uint64), np.array(when, np.float64))
        for k, t in zip(keys, when, strict=True):
            twin[k] = max(t, twin.get(k, 0.0))
        if n % 20 == 10:
            saved, times = times.save(), Times(1 << 12)
            times.load(saved)
        asked = np.arange(1000, dtype=np.uint64)
        assert np.array_equal(times.get(asked), [twin.get(int(k), np.nan) for k in asked], equal_nan=True)
    assert times.forgotten_s == -np.inf


def test_beyond_its_budget_the_oldest_are_forgotten_and_it_says_up_to_when() -> None:
    times = Times(1 << 6)
    for n in range(100):
        times.put(np.arange(10 * n, 10 * n + 10, dtype=np.uint64) + np.uint64(1), np.full(10, float(n)))
    found = times.get(np.arange(1, 1001, dtype=np.uint64))
    known = np.flatnonzero(~np.isnan(found))
    assert 30 <= len(known) <= 2 * 64
    assert known.tolist() == list(range(int(known[0]), 1000))
    assert 0 < times.forgotten_s <= float(found[known[0]])
    assert times.held_bytes() == 2 * 64 * 16


def test_a_size_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="slots=100"):
        Times(100)


def test_a_use_is_of_one_worker_and_what_was_touched_at_once_counts_once() -> None:
    uses = Uses(1 << 10)
    one = told(chain=[1, 2], worker="w0", ended_s=50.0)
    two = told(chain=[2, 3], worker="w0", ended_s=60.0)
    uses.touch(one)
    uses.take([one, two])
    asked = np.array([1, 2, 3, 4], np.uint64)
    assert np.array_equal(uses.last_s(one.pool, "w0", one.rank, asked), [50.0, 60.0, 60.0, np.nan], equal_nan=True)
    assert np.isnan(uses.last_s(one.pool, "w1", one.rank, asked)).all()


def test_what_had_been_stored_before_a_moment_is_known_until_it_is_forgotten() -> None:
    who = WorkerId("p", "w", 0)
    state, news = Residency(1 << 8, 1 << 10, 64), News(1 << 8)
    state.worker()

    def put(seq: int, time_s: float, hashes: list[int]) -> None:
        kind = event(Kind.STORED, hashes) if seq else event(Kind.EPOCH_STARTED, flags=COMPLETE)
        state.apply(unpack([encode(batch(who, 1, seq, time_s, kind))]), np.zeros(1, np.int32))

    chain = np.array([1, 2, 3, 4, 5], np.uint64)
    put(0, 9.0, [])
    put(1, 10.0, [1, 2])
    put(2, 11.0, [3])
    news.follow(state)
    put(3, 12.0, [4])
    put(4, 13.0, [1, 2])
    news.follow(state)
    assert [news.seen_before(state, chain, t) for t in (9.5, 10.0, 10.5, 11.5, 12.0, 99.0)] == [0, 2, 2, 3, 4, 4]
    for n in range(60):
        put(5 + n, 20.0 + n, list(range(100 + 10 * n, 110 + 10 * n)))
        news.follow(state)
    assert news.seen_before(state, chain, 15.0) == -1
    assert news.seen_before(state, chain, 99.0) == 4


def test_of_stores_that_are_applied_out_of_the_order_of_time_the_earliest_counts() -> None:
    first, second = WorkerId("p", "a", 0), WorkerId("p", "b", 0)
    state, news = Residency(1 << 8, 1 << 10, 64), News(1 << 8)
    numbers = {first: state.worker(), second: state.worker()}

    def put(who: WorkerId, seq: int, time_s: float, hashes: list[int]) -> None:
        kind = event(Kind.STORED, hashes) if seq else event(Kind.EPOCH_STARTED, flags=COMPLETE)
        state.apply(unpack([encode(batch(who, 1, seq, time_s, kind))]), np.array([numbers[who]], np.int32))

    for who in numbers:
        put(who, 0, 1.0, [])
    put(first, 1, 20.0, [1, 2, 3])  # its partition is read first
    news.follow(state)
    put(second, 1, 10.0, [1, 2])
    put(second, 2, 30.0, [3])
    news.follow(state)
    chain = np.array([1, 2, 3], np.uint64)
    assert [news.seen_before(state, chain, t) for t in (9.0, 10.0, 19.0, 20.0, 40.0)] == [0, 2, 2, 3, 3]


def test_after_lost_batches_a_block_tells_of_those_before_it() -> None:
    who = WorkerId("p", "w", 0)
    state, news = Residency(1 << 8, 1 << 10, 64), News(1 << 8)
    state.worker()
    for seq, kind in enumerate([event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, [1, 2]), None, event(Kind.STORED, [7])]):
        if kind is None:
            kind = event(Kind.GAP, seq=seq, parent=seq)
        state.apply(unpack([encode(batch(who, 1, seq, 10.0 + seq, kind))]), np.zeros(1, np.int32))
        news.follow(state)
    chain = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.uint64)
    assert [news.seen_before(state, chain, t) for t in (10.5, 12.5, 13.5)] == [0, 2, 7]
