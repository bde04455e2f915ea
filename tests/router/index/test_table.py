"""The block table against a naive twin: a dictionary of counters."""

from collections import Counter

import numpy as np
import pytest

from router.index.table import GPU, LOWER, NO_GROUP, BlockTable
from schemas.kv_events import EVENT, WINDOWED, Kind, Tier


class NaiveTable:
    def __init__(self, slots):
        self.slots = slots
        self.copies = {(s, c): Counter() for s in range(slots) for c in (GPU, LOWER)}
        self.unknown_removals = 0

    def store(self, slot, hashes, level=GPU):
        self.copies[slot, level].update(int(h) for h in hashes)

    def remove(self, slot, hashes, level=GPU):
        for h in map(int, hashes):
            if self.copies[slot, level][h] > 0:
                self.copies[slot, level][h] -= 1
            else:
                self.unknown_removals += 1

    def clear(self, slot):
        self.copies[slot, GPU].clear()
        self.copies[slot, LOWER].clear()

    def rows(self):
        return len({h for c in self.copies.values() for h, n in c.items() if n > 0})

    def match(self, chain, pending=None):
        def prefix(slot, *sources):
            for i, h in enumerate(map(int, chain)):
                if not any(s[h] > 0 for s in sources):
                    return i
            return len(chain)

        out = []
        for s in range(self.slots):
            both = self.copies[s, GPU], self.copies[s, LOWER]
            more = both if pending is None else (*both, pending.copies[s, GPU])
            out.append((prefix(s, *both), prefix(s, both[0]), prefix(s, *more)))
        return out


@pytest.mark.parametrize("seed", range(12))
def test_table_agrees_with_the_naive_twin(seed):
    rng = np.random.default_rng(seed)
    slots = int(rng.choice([3, 64, 70, 130]))
    # few low bits differ, so that runs are long and wrap around: backward shifts are exercised
    universe = (
        rng.integers(1, 2**63, 300, dtype=np.uint64) & ~np.uint64(0x3F0) if seed % 2 else rng.integers(1, 2**63, 4000, dtype=np.uint64)
    )
    tables = BlockTable(slots if seed % 3 else 1), BlockTable(slots)
    tables[0].fit(slots)
    twins = NaiveTable(slots), NaiveTable(slots)
    for step in range(400):
        which = 1 if rng.random() < 0.2 else 0
        table, twin = tables[which], twins[which]
        slot, level = int(rng.integers(slots)), int(rng.random() < 0.3) if which == 0 else GPU
        start = int(rng.integers(len(universe)))
        hashes = universe[start : start + int(rng.integers(0, 200))]
        action = rng.random()
        if action < 0.5:
            table.store(slot, hashes, level)
            twin.store(slot, hashes, level)
        elif action < 0.97:
            table.remove(slot, hashes, level)
            twin.remove(slot, hashes, level)
        elif action < 0.998:
            table.clear(slot)
            twin.clear(slot)
        else:
            table.clear_all()
            for s in range(slots):
                twin.clear(s)
        if step % 20 == 0:
            chain = universe[int(rng.integers(len(universe))) :][:100]
            for t, n, pending, naive_pending in ((tables[0], twins[0], None, None), (tables[0], twins[0], tables[1], twins[1])):
                got = t.match(chain, pending)
                assert list(zip(*(a[:slots].tolist() for a in got), strict=True)) == n.match(chain, naive_pending)
                assert not any(a[slots:].any() for a in got)
    for table, twin in zip(tables, twins, strict=True):
        assert table.rows == twin.rows()
        assert table.unknown_removals == twin.unknown_removals
        for s in range(slots):
            for level in (GPU, LOWER):
                assert table.held[s, level] == sum(n > 0 for n in twin.copies[s, level].values())
                for h in universe[:40]:
                    assert table.copies(s, int(h), level) == twin.copies[s, level][int(h)]


def hashes_of(*values):
    return np.array(values, np.uint64)


def event(kind, count, tier=Tier.GPU, group=0, flags=0):
    return np.array([(kind, tier, group, count, 1, 0.0, 0, 16, flags)], EVENT)


def test_a_second_copy_outlives_the_first_removal():
    table = BlockTable()
    table.store(3, hashes_of(7, 7))
    table.remove(3, hashes_of(7))
    assert table.match(hashes_of(7)).held[3] == 1
    table.remove(3, hashes_of(7))
    assert table.match(hashes_of(7)).held[3] == 0
    assert table.rows == 0


def test_removal_of_what_is_not_held_is_counted_and_changes_nothing():
    table = BlockTable()
    table.store(0, hashes_of(7))
    table.remove(1, hashes_of(7))
    assert table.unknown_removals == 1
    assert table.match(hashes_of(7)).held[:2].tolist() == [1, 0]


def test_a_hole_in_the_middle_ends_the_overlap():
    table = BlockTable()
    table.store(0, hashes_of(1, 2, 3, 4))
    table.remove(0, hashes_of(2))
    assert table.match(hashes_of(1, 2, 3, 4)).held[0] == 1


def test_lower_tiers_are_told_from_the_gpu():
    table = BlockTable()
    table.store(0, hashes_of(1, 2), GPU)
    table.store(0, hashes_of(3), LOWER)
    overlap = table.match(hashes_of(1, 2, 3, 4))
    assert (overlap.held[0], overlap.gpu[0], overlap.expected[0]) == (3, 2, 3)


def test_windowed_groups_are_no_residency():
    table = BlockTable()
    group = table.apply(0, event(Kind.STORED, 1, group=1, flags=WINDOWED), hashes_of(9), NO_GROUP)
    assert group == NO_GROUP
    group = table.apply(0, event(Kind.STORED, 1, group=2), hashes_of(9), group)
    assert group == 2
    table.apply(0, event(Kind.REMOVED, 1, group=1), hashes_of(9), group)
    assert table.match(hashes_of(9)).held[0] == 1
    assert table.unknown_removals == 0


def test_table_grows_and_shrinks_with_what_it_holds():
    table = BlockTable()
    small = table.size_bytes
    many = np.random.default_rng(1).integers(1, 2**63, 200_000, dtype=np.uint64)
    table.store(5, many)
    assert table.rows == len(set(many.tolist()))
    table.clear(5)
    assert table.rows == 0
    assert table.size_bytes <= small
