"""The block table against its naive twin, its bound, and how its time grows."""

import numpy as np
import pytest

from router.index import kernels
from router.index.kernels import FOLLOWED_GROUPS, UNFOLLOWED, UNLEARNED
from router.index.table import CPU, DISK, EXPECTED, GPU, MAX_SLOTS, BlockTable
from schemas.kv_events import EVENT, WINDOWED, Kind, Tier
from tests.router.index.naive import NaiveTable

LEVELS = (GPU, CPU, DISK, EXPECTED)


def counting_of(table, full):
    """full: the lanes that count, by slot."""
    out = np.zeros((table.lanes + 1, table.words), np.uint64)
    for slot, lanes in enumerate(full):
        for lane in (*lanes, *([table.lanes] if lanes else [])):
            out[lane, slot // 64] |= np.uint64(1 << slot % 64)
    return out


def matched(table, chain, slot=0, full=(0,)):
    found = table.match(chain, counting_of(table, [()] * slot + [full]))
    return tuple(int(a[slot]) for a in found)


def universe_of(rng, seed):
    """Names that differ in few bits, of which the low ones are equal, or that come one after another; or many: so that runs are long."""
    if seed % 3 == 0:
        return rng.permutation(np.arange(1, 400, dtype=np.uint64) << np.uint64(40))
    return rng.integers(1, 2**63, 300 if seed % 3 == 1 else 4000, dtype=np.uint64)


@pytest.mark.parametrize("seed", range(9))
def test_table_agrees_with_the_naive_twin(seed):
    rng = np.random.default_rng(seed)
    slots = int(rng.choice([3, 64, 70, 130]))
    lanes = int(rng.choice([1, 1, 3]))
    full = [tuple(n for n in range(lanes) if n == 0 or rng.random() < 0.5) if rng.random() < 0.9 else () for _ in range(slots)]
    universe = universe_of(rng, seed)
    table, twin = BlockTable(1, segment_bits=int(rng.choice([4, 6, 12]))), NaiveTable()
    known = 1
    for step in range(600):
        if (known < slots and rng.random() < 0.05) or step == 500:
            known = slots if step == 500 else int(rng.integers(known, slots + 1))
            table.fit(known, lanes if step > 250 else 1)
        slot, level = int(rng.integers(known)), int(rng.choice(LEVELS, p=(0.6, 0.2, 0.1, 0.1)))
        lane = int(rng.integers(table.lanes)) if level != EXPECTED else 0
        start = int(rng.integers(len(universe)))
        hashes = universe[start : start + int(rng.integers(0, 200))]
        action = rng.random()
        if action < 0.5:
            table.store(slot, hashes, level, lane)
            twin.store(slot, hashes, level, lane)
        elif action < 0.95:
            if rng.random() < 0.5:
                hashes = hashes[::-1].copy()
            table.remove(slot, hashes, level, lane)
            twin.remove(slot, hashes, level, lane)
        elif action < 0.999:
            table.clear(slot)
            twin.clear(slot)
        else:
            table.clear_all()
            twin.copies.clear()
        if step % 20 == 0 and step > 20:
            chain = universe[int(rng.integers(len(universe))) :][:100]
            found = table.match(chain, counting_of(table, [tuple(n for n in f if n < table.lanes) for f in full[:known]]))
            for s in range(known):
                assert tuple(int(a[s]) for a in found) == twin.match(s, chain, [n for n in full[s] if n < table.lanes])
            assert table.rows == twin.rows()
    assert table.unknown_removals == twin.unknown_removals
    assert_books_balance(table)
    assert table.refused == table.given_up == 0
    for s in range(slots):
        assert table.copies_held(s) == sum(n for (slot, _, level), held in twin.copies.items() if (slot, level != EXPECTED) == (s, True)
                                           for n in held.values())  # fmt: skip
        for lane in range(lanes):
            for level in LEVELS:
                assert table.held[lane, level, s] == sum(n > 0 for n in twin.of(s, lane, level).values())
                for h in universe[:20]:
                    assert table.copies(s, int(h), level, lane) == twin.of(s, lane, level)[int(h)]


@pytest.mark.parametrize("seed", range(6))
def test_a_table_without_memory_knows_less_than_is_held_and_never_more(seed):
    rng = np.random.default_rng(seed)
    slots = int(rng.choice([4, 130]))
    # either few rows fit, or few sets of members
    table, twin = BlockTable(slots, limit_bytes=int(rng.choice([2_000, 30_000])), segment_bits=4), NaiveTable()
    limit_bytes = table.size_bytes + 30_000
    universe = rng.integers(1, 2**63, 600, dtype=np.uint64)
    for _ in range(500):
        slot, level = int(rng.integers(slots)), int(rng.choice(LEVELS))
        hashes = rng.permutation(universe)[: int(rng.integers(0, 60))]
        if rng.random() < 0.55:
            table.store(slot, hashes, level)
            twin.store(slot, hashes, level)
        elif rng.random() < 0.97:
            table.remove(slot, hashes, level)
            twin.remove(slot, hashes, level)
        else:
            table.clear(slot)
            twin.clear(slot)
        for s in range(min(slots, 8)):
            for h in universe[:10]:
                assert table.copies(s, int(h), level) <= twin.of(s, 0, level)[int(h)]
    assert table.refused > 0
    assert table.size_bytes <= limit_bytes
    counting = counting_of(table, [(0,)] * slots)
    for start in range(0, 600, 50):
        found = table.match(universe[start : start + 20], counting)
        for s in range(slots):
            held, *_, expected = twin.match(s, universe[start : start + 20])
            assert int(found.held[s]) <= held
            assert int(found.expected[s]) <= expected
    assert_books_balance(table)
    for s in range(slots):
        table.clear(s)
        assert table.copies_held(s) == 0
    assert_books_balance(table)


def assert_books_balance(table):
    """Each entry is in one place or free, each set has the entries and members that it counts."""
    t = table._state
    num = t.num.tolist()
    segments = [np.unique(t.directory[which, : 1 << num[kernels.DEPTH + which]]) for which in range(2)]
    assert sorted(np.concatenate(segments).tolist()) == list(range(num[kernels.SEGMENTS]))
    places = t.places.reshape(len(t.segments), -1)
    used = [(places[of][places[of] != 0] & np.uint64(0xFFFFFFFF)).astype(np.int64) for of in segments]
    assert [len(entries) for entries in used] == num[kernels.ROWS : kernels.ROWS + 2]
    assert t.segments[: num[kernels.SEGMENTS], 0].tolist() == (places[: num[kernels.SEGMENTS]] != 0).sum(1).tolist()
    free, entry = [], num[kernels.FREE_ENTRY]
    while entry:
        free.append(entry)
        entry = int(t.members[entry])
    assert sorted([*free, *used[0].tolist(), *used[1].tolist()]) == list(range(1, num[kernels.ENTRIES_TOP]))
    assert np.flatnonzero(t.names[: num[kernels.ENTRIES_TOP]]).tolist() == sorted([*used[0].tolist(), *used[1].tolist()])
    top = num[kernels.SETS_TOP]
    refs, kept = np.bincount(t.members[used[0]], minlength=top), t.info[:top, kernels.SIZE] >= 0
    assert t.info[:top, kernels.REFS][kept].tolist() == refs[kept].tolist()
    assert not refs[~kept].any()
    assert np.unpackbits(t.sets[:top].view(np.uint8), axis=1).sum(1)[kept].tolist() == t.info[:top, kernels.SIZE][kept].tolist()
    assert num[kernels.DEAD] == refs[t.info[:top, kernels.SIZE] == 0].sum()


def hashes_of(*values):
    return np.array(values, np.uint64)


def event(kind, count, tier=Tier.GPU, group=0, flags=0):
    return np.array([(kind, tier, group, count, 1, 0.0, 0, 16, flags)], EVENT)


def lanes_of(**groups):
    out = np.full(FOLLOWED_GROUPS + 1, UNLEARNED, np.int8)
    for group, lane in groups.items():
        out[int(group[1:])] = lane
    return out


def test_a_second_copy_outlives_the_first_removal():
    table = BlockTable()
    table.store(3, hashes_of(7, 7))
    table.remove(3, hashes_of(7))
    assert matched(table, hashes_of(7), slot=3)[0] == 1
    table.remove(3, hashes_of(7))
    assert matched(table, hashes_of(7), slot=3)[0] == 0
    assert table.rows == 0


def test_copies_of_a_cleared_slot_do_not_come_back():
    table = BlockTable()
    for _ in range(3):
        table.store(0, hashes_of(7, 7, 7))
        table.clear(0)
    table.store(0, hashes_of(7))
    table.remove(0, hashes_of(7))
    assert (matched(table, hashes_of(7))[0], table.copies(0, 7)) == (0, 0)


def test_clearing_leaves_what_is_expected():
    table = BlockTable()
    table.store(0, hashes_of(1))
    table.store(0, hashes_of(1, 1, 2), EXPECTED)
    table.clear(0)
    assert matched(table, hashes_of(1, 2)) == (0, 0, 0, 0, 2)
    table.remove(0, hashes_of(1, 2), EXPECTED)
    assert matched(table, hashes_of(1, 2))[-1] == 1


def test_removal_of_what_is_not_held_is_counted_and_changes_nothing():
    table = BlockTable()
    table.store(0, hashes_of(7))
    table.remove(1, hashes_of(7))
    assert table.unknown_removals == 1
    assert (matched(table, hashes_of(7))[0], matched(table, hashes_of(7), slot=1)[0]) == (1, 0)


def test_a_hole_in_the_middle_ends_the_overlap():
    table = BlockTable()
    table.store(0, hashes_of(1, 2, 3, 4))
    table.remove(0, hashes_of(2))
    assert matched(table, hashes_of(1, 2, 3, 4))[0] == 1


def test_each_block_counts_in_its_best_tier():
    table = BlockTable()
    table.store(0, hashes_of(1, 2, 5), GPU)
    table.store(0, hashes_of(2, 3), CPU)
    table.store(0, hashes_of(3, 4), DISK)
    assert matched(table, hashes_of(1, 2, 3, 4, 5, 6)) == (5, 3, 1, 1, 5)


def test_events_stop_at_a_group_without_a_lane_and_go_on_from_there():
    table = BlockTable()
    events = np.concatenate([event(Kind.STORED, 1), event(Kind.REMOVED, 1, group=5), event(Kind.STORED, 2, group=1, tier=Tier.EXTERNAL)])
    hashes = hashes_of(1, 1, 1, 2)
    assert table.apply(0, lanes_of(g0=0), events, hashes) == (2, 2)
    table.fit(1, lanes=2)
    assert table.apply(0, lanes_of(g0=0, g1=1), events, hashes, 2, 2) == (3, 4)
    assert matched(table, hashes_of(1, 2)) == (1, 1, 0, 0, 1)
    assert matched(table, hashes_of(1, 2), full=(1,)) == (2, 0, 0, 2, 2)
    assert matched(table, hashes_of(1, 2), full=(0, 1)) == (1, 0, 0, 1, 1)
    assert table.apply(0, lanes_of(g0=0, g1=UNFOLLOWED), events, hashes) == (3, 4)


def test_what_is_stored_is_expected_no_longer():
    table = BlockTable()
    table.fit(1, lanes=2)
    table.store(0, hashes_of(1, 1, 2), EXPECTED)
    table.apply(0, lanes_of(g0=0, g1=1), event(Kind.STORED, 1, group=1, flags=WINDOWED), hashes_of(2))
    table.apply(0, lanes_of(g0=0, g1=1), event(Kind.STORED, 1), hashes_of(1))
    assert [table.copies(0, h, EXPECTED) for h in (1, 2)] == [0, 1]


def test_memory_is_used_again_after_a_slot_was_cleared():
    rng = np.random.default_rng(1)
    table = BlockTable()
    for round_ in range(6):
        many = rng.integers(1, 2**63, 50_000, dtype=np.uint64)
        table.store(5, many)
        table.store(5, many[:5000])
        assert table.rows == 50_000
        if round_ == 1:
            used = table.size_bytes
        table.clear(5)
        assert table.rows == 0
    assert table.size_bytes < 1.5 * used
    table.clear_all()
    assert table.size_bytes < 100_000


@pytest.mark.parametrize("limit_bytes", [300_000, 500_000, 1_000_000, 4_000_000])
def test_a_full_table_uses_the_memory_of_what_was_cleared(limit_bytes):
    rng = np.random.default_rng(1)
    table, held = BlockTable(limit_bytes=limit_bytes), []
    for slot in (0, 1, 0):
        names = rng.integers(1, 2**63, limit_bytes // 14, dtype=np.uint64)
        table.store(slot, names)
        table.store(slot, names[:500])  # copies go, too
        held.append(table.rows)
        assert table.size_bytes <= limit_bytes
        table.clear(slot)
    assert table.refused
    assert min(held) > 0.9 * held[0] > limit_bytes / 50


def test_a_block_may_have_thousands_of_copies():
    table = BlockTable()
    for level in (GPU, EXPECTED):
        table.store(MAX_SLOTS // 64, np.full(70_000, 7, np.uint64), level)
        assert table.copies(MAX_SLOTS // 64, 7, level) == 1 + 0xFFFF
        table.remove(MAX_SLOTS // 64, np.full(0xFFFF, 7, np.uint64), level)
        assert table.copies(MAX_SLOTS // 64, 7, level) == 1
    assert table.refused == 2 * (70_000 - 0x10000)


def test_copies_of_sixteen_lives_ago_are_not_taken_for_those_of_now():
    table = BlockTable(segment_bits=4)
    for life in range(40):
        table.store(3, hashes_of(7, 7))
        table.store(3, np.arange(100 * life + 10, 100 * life + 60, dtype=np.uint64))
        assert table.copies(3, 7) == 2
        table.clear(3)
        assert (table.copies(3, 7), table.rows) == (0, 0)
    assert table.size_bytes < 20_000


def test_no_block_is_named_0():
    table = BlockTable()
    table.store(0, hashes_of(1, 2, 3))
    table.store(1, hashes_of(4))
    table.store(0, hashes_of(4, 0))
    table.remove(0, hashes_of(3, 2))  # what stood there is free now
    assert matched(table, hashes_of(1, 0, 0)) == (1, 1, 0, 0, 1)


def test_more_slots_or_lanes_than_fit_are_refused():
    with pytest.raises(ValueError, match="4095 workers"):
        BlockTable().fit(5000)
    with pytest.raises(ValueError, match="8 groups"):
        BlockTable().fit(1, lanes=9)
