from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from collector.bridge import block_table
from collector.bridge.block_table import MAX_PLACES, ODD, PLAIN, REPORTED, BlockTable, Place


def u64(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


class NaiveTable:
    """What BlockTable does, as dicts; departed blocks are kept for ever."""

    def __init__(self) -> None:
        self.names: dict[int, int] = {}
        self.counts: Counter[tuple[Place, int]] = Counter()

    def total(self, h: int) -> int:
        return sum(n for (_, x), n in self.counts.items() if x == h)

    def store(self, hashes: list[int], names: list[int], place: Place, from_root: bool) -> int:
        if any(self.total(h) and self.names[h] != n for h, n in zip(hashes, names, strict=True)):
            return ODD
        if from_root and hashes and all(self.counts[place, h] for h in hashes):
            return REPORTED
        for h, n in zip(hashes, names, strict=True):
            self.names[h] = n
            self.counts[place, h] += 1
        return PLAIN

    def remove(self, hashes: list[int], place: Place) -> tuple[list[int], list[int]]:
        found, unknown = [], []
        for h in hashes:
            if self.counts[place, h]:
                self.counts[place, h] -= 1
                found.append(self.names[h])
            else:
                unknown.append(h)
        return found, unknown


@pytest.mark.parametrize("seed", range(6))
def test_kernels_agree_with_the_naive_twin(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_table, "MIN_DEPARTED", 16)
    rng = random.Random(seed)
    table, naive = BlockTable(16), NaiveTable()
    hashes = [0, (1 << 64) - 1, *(rng.getrandbits(64) for _ in range(300))]
    name_of = {h: rng.getrandbits(64) | 1 for h in hashes}
    places: list[Place] = [(0, 0), (1, 0), (0, 3)]
    peak = 0
    for _ in range(1500):
        place = rng.choice(places)
        some = rng.sample(hashes, rng.randint(1, 12))
        if rng.random() < 0.5:
            names = [name_of[h] for h in some]
            if rng.random() < 0.03:
                names[0] ^= 0xFF00
            root = rng.random() < 0.5
            assert table.store(u64(*some), u64(*names), place, root) == naive.store(some, names, place, root)
        else:
            named, unnamed, unknown = table.remove(u64(*some), place)
            assert (named.tolist(), unknown.tolist()) == naive.remove(some, place)
            assert unnamed == 0
        assert table.resident == naive.counts.total()
        peak = max(peak, table.resident)
    for place in places:
        want = Counter({naive.names[h]: n for (p, h), n in naive.counts.items() if p == place and n})
        assert Counter(table.resident_names(place).tolist()) == want
    assert peak > 100


def test_a_departed_block_keeps_its_name_until_many_have_departed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_table, "MIN_DEPARTED", 8)
    table = BlockTable(16)
    table.store(u64(1, 2), u64(11, 12), (0, 0), True)
    table.remove(u64(1), (0, 0))
    assert table.names[table.find(u64(1))[0]] == 11
    for h in range(100, 200):
        table.store(u64(h), u64(h + 1000), (0, 0), False)
        table.remove(u64(h), (0, 0))
    assert table.find(u64(1)).tolist() == [-1]
    assert table.names[table.find(u64(2))[0]] == 12
    assert table.names[table.find(u64(199))[0]] == 1199
    assert table.known <= 3 * 8 + 8


def test_memory_stays_bounded_while_content_churns() -> None:
    table = BlockTable(16)
    rng = np.random.default_rng(1)
    window: list[np.ndarray[tuple[int], np.dtype[np.uint64]]] = []
    for _ in range(3000):
        fresh = rng.integers(1, 1 << 63, 64, dtype=np.uint64)
        table.store(fresh, fresh + np.uint64(1), (0, 0), True)
        window.append(fresh)
        if len(window) > 160:
            named, _, unknown = table.remove(window.pop(0), (0, 0))
            assert (len(named), len(unknown)) == (64, 0)
    assert table.resident == 160 * 64
    assert table.held_bytes / table.resident < 420


def test_places_are_bounded() -> None:
    table = BlockTable(4)
    for group in range(MAX_PLACES):
        table.store(u64(1), u64(7), (0, group), False)
    with pytest.raises(ValueError, match="too many tiers and groups"):
        table.store(u64(1), u64(7), (1, 0), False)
    assert table.resident == MAX_PLACES


def test_clear_forgets_counts_and_names() -> None:
    table = BlockTable(16)
    table.store(u64(1), u64(11), (0, 0), True)
    table.clear()
    assert (table.resident, table.known) == (0, 0)
    assert table.find(u64(1)).tolist() == [-1]
    assert table.remove(u64(1), (0, 0))[2].tolist() == [1]
