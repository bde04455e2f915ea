"""Distinct blocks are counted exactly up to a budget and estimated with a known error beyond it."""

from __future__ import annotations

import numpy as np
import pytest

from collector.analytics.distinct import Distinct, mix, mixed_sample


def naive_mix(h: int) -> int:
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    h = (h ^ h >> 27) * 0x94D049BB133111EB % 2**64
    return (h ^ h >> 31) or 1


def naive(names: list[int], most: int) -> tuple[int, set[int]]:
    """Level and sample by the rule alone."""
    level, kept = 0, set()
    for name in names:
        if naive_mix(name) < 2 ** (64 - level):
            kept.add(naive_mix(name))
        while len(kept) > most:
            level += 1
            kept = {m for m in kept if m < 2 ** (64 - level)}
    return level, kept


@pytest.mark.parametrize("most", [1, 7, 50, 1000])
def test_it_is_its_naive_twin(most: int) -> None:
    rng = np.random.default_rng(most)
    names = rng.integers(0, 700, 1500, np.uint64)
    counter = Distinct(most)
    for part in np.array_split(names, 13):
        counter.add(part)
    level, kept = naive(names.tolist(), most)
    assert counter.level == level
    assert counter.save()[1:].tolist() == sorted(kept)
    assert counter.estimate() == len(kept) << level
    np.testing.assert_array_equal(mixed_sample(names, 2), [m for m in map(naive_mix, names.tolist()) if m < 2**62])
    assert int(mix(np.uint64(0))) == 1


def test_up_to_the_budget_it_is_exact_whatever_the_order() -> None:
    names = np.arange(5000, dtype=np.uint64)
    one, other = Distinct(5000), Distinct(5000)
    one.add(np.repeat(names, 3))
    other.add(np.random.default_rng(1).permutation(names))
    assert one.estimate() == other.estimate() == 5000
    assert one.error() == 0.0
    np.testing.assert_array_equal(one.save(), other.save())


def test_beyond_it_the_estimate_keeps_its_stated_error_in_bounded_memory() -> None:
    off = []
    for seed in range(12):
        counter = Distinct(1024)
        names = np.random.default_rng(seed).integers(0, 2**63, 200_000).astype(np.uint64)
        counter.add(names)
        assert counter.held_bytes() <= 23 * 2 * 1024
        assert 0 < counter.error() <= 1.42 / 32
        off.append((counter.estimate() / len(np.unique(names)) - 1) / counter.error())
    assert 0.4 < float(np.sqrt(np.mean(np.square(off)))) < 1.7


def test_a_loaded_one_goes_on_as_the_saved_one() -> None:
    rng = np.random.default_rng(2)
    first, second = Distinct(300), Distinct(300)
    first.add(rng.integers(0, 5000, 3000, np.uint64))
    second.load(first.save())
    more = rng.integers(0, 50_000, 3000, np.uint64)
    first.add(more)
    second.add(more)
    np.testing.assert_array_equal(first.save(), second.save())
    empty = Distinct()
    empty.load(Distinct().save())
    assert empty.estimate() == 0
