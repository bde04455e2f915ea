from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from collector.bridge.decode import decode_batch
from collector.bridge.rank_state import RankState
from collector.bridge.record_builder import MAX_EVENT_HASHES, RecordBuilder
from schemas.block_hash import extra_digest, hash_chain, root_hash, salted_extras
from schemas.kv_events import WINDOW_SHIFT, WINDOWED, Kind, Tier, decode
from tests.collector.bridge.wire import KEY, SIZE, SOURCE, cleared, payload, removed, stored

ROOT = root_hash(KEY, SOURCE.pool)
Row = tuple[Kind, int, int, list[int], int]


class Rank:
    """A RankState whose rows can be read back as (kind, tier, group, hashes, parent)."""

    def __init__(self) -> None:
        self.builder = RecordBuilder(SOURCE)
        self.state = RankState(KEY, SOURCE, self.builder)
        self.seq = -1

    def apply(self, *events: Any) -> list[Row]:
        self.seq += 1
        self.state.apply(self.seq, decode_batch(payload(*events)), 1.0)
        self.flags: list[int] = []
        self.block_sizes: list[int] = []
        rows: list[Row] = []
        for record in self.builder.take(1.0):
            for e, hashes in decode(record.value):
                rows.append((Kind(int(e["kind"])), int(e["tier"]), int(e["group"]), hashes.tolist(), int(e["parent"])))
                self.flags.append(int(e["flags"]))
                self.block_sizes.append(int(e["block_size"]))
        return rows


def chain(tokens: list[int], size: int = SIZE, root: int = ROOT, extras: Any = None) -> list[int]:
    return [int(h) for h in hash_chain(KEY, root, tokens, size, extras)]


A, B = list(range(100, 112)), list(range(112, 116))
NAMES = chain(A + B)


def test_chains_continue_over_events_from_the_parent() -> None:
    rank = Rank()
    assert rank.apply(stored([1, 2, 3], A)) == [(Kind.STORED, 0, 0, NAMES[:3], ROOT)]
    assert rank.apply(stored([4], B, parent=3)) == [(Kind.STORED, 0, 0, NAMES[3:], NAMES[2])]
    assert rank.apply(removed([4, 2])) == [(Kind.REMOVED, 0, 0, [NAMES[3], NAMES[1]], 0)]
    assert rank.state.resident_blocks == 2


def test_a_salt_names_blocks_as_the_router_does() -> None:
    for event in (stored([1, 2, 3], A, extra_keys=[["tenant-4"], None, None]), stored([1, 2, 3], A, cache_salt="tenant-4")):
        (row,) = Rank().apply(event)
        assert row[3] == chain(A, extras=salted_extras(KEY, 3, "tenant-4"))


def test_other_extra_keys_and_adapters_change_the_names() -> None:
    (row,) = Rank().apply(stored([1, 2, 3], A, lora_name="sql", extra_keys=[["sql"], ["sql", ["img", 7]], ["sql"]]))
    extras = np.array([0, extra_digest(KEY, [["img", 7]]), 0], np.uint64)
    assert row[3] == chain(A, root=root_hash(KEY, SOURCE.pool, "sql"), extras=extras)
    assert row[4] == root_hash(KEY, SOURCE.pool, "sql")


def test_signed_unsigned_and_bytes_hashes_name_the_same_blocks() -> None:
    for hashes in (
        [-1, -2, -3],
        [(1 << 64) - 1, (1 << 64) - 2, (1 << 64) - 3],
        [b"\xff" * 32, b"\xff" * 31 + b"\xfe", b"\xff" * 31 + b"\xfd"],
    ):
        rank = Rank()
        assert rank.apply(stored(hashes, A))[0][3] == NAMES[:3]
        assert rank.apply(stored([9], B, parent=hashes[-1]))[0][3] == NAMES[3:]


def test_eagle_pairs_use_the_first_of_each() -> None:
    pairs = [[t, t + 1] for t in A]
    assert Rank().apply(stored([1, 2, 3], pairs))[0][3] == NAMES[:3]


def test_pages_of_one_token() -> None:
    rank = Rank()
    assert rank.apply(stored([1, 2], [7, 8], size=1))[0][3] == chain([7, 8], 1)
    assert rank.apply(stored([3], [9], parent=2, size=1))[0][3] == chain([7, 8, 9], 1)[2:]


def test_a_block_stored_twice_is_gone_only_after_two_removals() -> None:
    rank = Rank()
    rank.apply(stored([1, 2, 3], A), stored([4], B, parent=3))
    assert rank.apply(stored([4], B, parent=3)) == [(Kind.STORED, 0, 0, NAMES[3:], NAMES[2])]
    assert rank.state.resident_blocks == 5
    assert rank.apply(removed([4])) == [(Kind.REMOVED, 0, 0, NAMES[3:], 0)]
    assert rank.apply(removed([4])) == [(Kind.REMOVED, 0, 0, NAMES[3:], 0)]
    assert rank.apply(removed([4])) == []
    assert rank.state.counters.unknown_removals == 1
    assert rank.state.resident_blocks == 3


def test_a_report_of_what_is_there_is_no_store() -> None:
    rank = Rank()
    rank.apply(stored([1, 2, 3], A))
    assert rank.apply(stored([1, 2], A[:8])) == [(Kind.REPORTED, 0, 0, NAMES[:2], ROOT)]
    assert rank.state.resident_blocks == 3
    rank.apply(removed([2]))
    assert rank.apply(stored([1, 2], A[:8]))[0][0] is Kind.STORED
    assert rank.state.resident_blocks == 4
    assert rank.state.counters.reported_blocks == 2


def test_a_clear_empties_all_places_and_removals_after_it_find_nothing() -> None:
    rank = Rank()
    rank.apply(stored([1, 2, 3], A), stored([1], A[:4], medium="CPU"))
    assert rank.apply(cleared(), stored([1], A[:4])) == [(Kind.CLEARED, 0, 0, [], 0), (Kind.STORED, 0, 0, NAMES[:1], ROOT)]
    assert rank.state.resident_blocks == 1
    assert rank.apply(removed([1], medium="CPU")) == []
    assert rank.state.counters.unknown_removals == 1


def test_an_unknown_parent_is_counted_and_not_guessed_and_neither_are_its_children() -> None:
    rank = Rank()
    assert rank.apply(stored([4], B, parent=3)) == [(Kind.UNNAMED, 0, 0, [], 1)]
    assert rank.apply(stored([5, 6], A[:8], parent=4)) == [(Kind.UNNAMED, 0, 0, [], 2)]
    assert rank.state.counters.unnamed_blocks == 3
    assert rank.state.resident_blocks == 3
    assert rank.apply(removed([5])) == []
    assert (rank.state.counters.unknown_removals, rank.state.resident_blocks) == (0, 2)


def test_a_block_that_gets_its_name_late_is_stored_then_in_every_place() -> None:
    rank = Rank()
    rank.apply(stored([2], A[4:8], parent=1), stored([2], None, size=0, medium="CPU"))
    rows = rank.apply(stored([1, 2], A[:8]))
    assert (Kind.STORED, 0, 0, [NAMES[1]], NAMES[0]) in rows
    assert rows[-1] == (Kind.STORED, 0, 0, NAMES[:2], ROOT)
    assert Counter(rank.state.resident()[0][4].tolist()) == {NAMES[0]: 1, NAMES[1]: 2}


def test_offload_placeholders_are_named_through_the_map_and_counted_by_reference() -> None:
    rank = Rank()
    rank.apply(stored([1, 2, 3], A))
    placeholder = stored([2], [], size=0, medium="CPU")
    assert rank.apply(placeholder) == [(Kind.STORED, Tier.CPU, 0, NAMES[1:2], 0)]
    assert rank.apply(placeholder)[0][0] is Kind.STORED
    assert rank.apply(stored([77], [], size=0, medium="CPU")) == [(Kind.UNNAMED, Tier.CPU, 0, [], 1)]
    assert rank.apply(removed([2])) == [(Kind.REMOVED, 0, 0, NAMES[1:2], 0)]
    assert rank.apply(removed([2, 2], medium="CPU")) == [(Kind.REMOVED, Tier.CPU, 0, [NAMES[1]] * 2, 0)]
    assert rank.apply(removed([77], medium="CPU")) == []
    assert (rank.state.counters.unknown_removals, rank.state.resident_blocks) == (0, 2)


def test_groups_are_counted_apart_and_those_without_full_attention_are_flagged() -> None:
    rank = Rank()
    rank.apply(stored([1], A[:4], group_idx=0, kv_cache_spec_kind="full_attention"))
    assert rank.flags == [0]
    rank.apply(stored([1], A[:4], group_idx=1, kv_cache_spec_kind="sliding_window"))
    assert rank.flags == [WINDOWED]
    assert rank.apply(removed([1], group_idx=1)) == [(Kind.REMOVED, 0, 1, NAMES[:1], 0)]
    assert rank.apply(removed([1], group_idx=1)) == []
    assert [(place[:2], place[3]) for place in rank.state.resident()] == [((0, 0), 0)]


def test_a_window_that_was_told_once_stays_with_its_group() -> None:
    rank, window = Rank(), WINDOWED | 100 << WINDOW_SHIFT
    sliding = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    rank.apply(stored([1], A[:4], kv_cache_spec_sliding_window=100, **sliding), stored([2], A[4:8], parent=1, **sliding))
    assert rank.flags == [window, window]
    assert [(place[:2], place[3]) for place in rank.state.resident()] == [((0, 1), window)]
    rank.state.forget()
    rank.apply(stored([1], A[:4], **sliding))
    assert rank.flags == [WINDOWED]


def test_blocks_that_are_named_late_have_the_flags_of_their_own_group() -> None:
    rank = Rank()
    rank.apply(stored([1], None, group_idx=0), stored([1], None, group_idx=2, kv_cache_spec_kind="mamba"))
    rows = rank.apply(stored([1], A[:4], group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=9))
    assert [(row[2], flags >> WINDOW_SHIFT, flags & WINDOWED) for row, flags in zip(rows, rank.flags, strict=True)] == [
        (0, 0, 0), (2, 1, WINDOWED), (1, 9, WINDOWED),
    ]  # fmt: skip


def test_sparse_groups_are_named_by_what_other_groups_of_the_batch_say_whatever_the_order() -> None:
    rank = Rank()
    rows = rank.apply(
        stored([1, 3], A, group_idx=1, kv_cache_spec_kind="sliding_window"),
        stored([1, 2, 3], A, group_idx=0, kv_cache_spec_kind="full_attention"),
    )
    assert [(r[0], r[2], r[3]) for r in rows] == [
        (Kind.STORED, 1, NAMES[:1]), (Kind.STORED, 1, NAMES[2:3]), (Kind.STORED, 0, NAMES[:3]),
    ]  # fmt: skip
    assert rank.flags == [WINDOWED, WINDOWED, 0]


def test_a_sparse_event_that_nothing_explains_is_unnamed() -> None:
    rank = Rank()
    assert rank.apply(stored([1, 3], A)) == [(Kind.UNNAMED, 0, 0, [], 2)]
    assert rank.state.resident_blocks == 2


def test_groups_of_different_block_sizes_may_share_an_engine_hash() -> None:
    rank = Rank()
    rank.apply(stored([1, 2], A[:8], group_idx=0), stored([2], A[:8], size=8, group_idx=1))
    assert rank.state.counters.conflicts == 0
    assert rank.apply(removed([2], group_idx=1)) == [(Kind.REMOVED, 0, 1, chain(A[:8], 8), 0)]
    assert rank.apply(removed([2], group_idx=0)) == [(Kind.REMOVED, 0, 0, NAMES[1:2], 0)]


def test_unchained_engine_hashes_keep_the_first_name_and_count_the_conflict() -> None:
    rank = Rank()
    rank.apply(stored([1], A[:4]))
    rows = rank.apply(stored([2, 1, 3], A[4:8] + A[:4] + A[8:]))
    names = chain(A[4:8] + A[:4] + A[8:])
    assert rows == [
        (Kind.STORED, 0, 0, names[:1], ROOT), (Kind.STORED, 0, 0, names[2:], names[1]), (Kind.UNNAMED, 0, 0, [], 1),
    ]  # fmt: skip
    assert rank.state.counters.conflicts == 1
    assert rank.apply(stored([4], B, parent=1)) == [(Kind.UNNAMED, 0, 0, [], 1)]
    assert rank.apply(stored([5], B, parent=3))[0][3] == chain(A[4:8] + A[:4] + A[8:] + B)[3:]
    assert rank.apply(removed([1])) == [(Kind.REMOVED, 0, 0, NAMES[:1], 0)]


def test_the_mooncake_masters_blocks_are_counted_without_names() -> None:
    event = {
        "event_type": "stored", "type": "BlockStored", "block_hashes": [12345], "seq_hashes": [12345], "token_ids": None,
        "block_size": None, "medium": "cpu", "parent_block_hash": None, "group_id": None, "lora_name": None,
    }  # fmt: skip
    rank = Rank()
    assert rank.apply(event) == [(Kind.UNNAMED, Tier.CPU, 0, [], 1)]
    assert rank.apply({"event_type": "removed", "seq_hashes": [12345], "medium": "cpu"}) == []
    assert (rank.state.resident_blocks, rank.state.counters.unknown_removals) == (0, 0)


def test_removals_in_a_row_become_one_row_and_stores_between_them_keep_their_place() -> None:
    rank = Rank()
    rank.apply(stored([1, 2, 3], A))
    rows = rank.apply(removed([3]), removed([2]), stored([4], B), removed([1]), removed([4], medium="CPU"))
    assert rows == [
        (Kind.REMOVED, 0, 0, [NAMES[2], NAMES[1]], 0),
        (Kind.STORED, 0, 0, chain(B), ROOT),
        (Kind.REMOVED, 0, 0, NAMES[:1], 0),
    ]
    assert rank.state.counters.unknown_removals == 1


def test_extra_keys_that_are_no_json_cost_only_their_event() -> None:
    rank = Rank()
    assert rank.apply(stored([1], A[:4], extra_keys=[[{"a": 1}]]), stored([2], B)) == [(Kind.STORED, 0, 0, chain(B), ROOT)]
    assert rank.state.counters.skipped_events == 1


def test_a_very_long_event_is_split_and_stays_one_chain() -> None:
    tokens = list(range(MAX_EVENT_HASHES + 10))
    rank = Rank()
    rows = rank.apply(stored([t + 1 for t in tokens], tokens, size=1))
    names = chain(tokens, 1)
    assert [len(r[3]) for r in rows] == [MAX_EVENT_HASHES, 10]
    assert rows[0][3] + rows[1][3] == names
    assert rows[1][4] == names[MAX_EVENT_HASHES - 1]


class NaiveRank:
    """The same bookkeeping told by dicts keyed with the content itself."""

    def __init__(self) -> None:
        self.content: dict[int, tuple[int, ...]] = {}
        self.counts: Counter[tuple[str, int, int]] = Counter()
        self.unknown = self.reported = 0

    def store(self, hashes: list[int], tokens: list[int], parent: int | None, medium: str, group: int) -> list[tuple[int, ...]] | None:
        prefix = () if parent is None else self.content[parent]
        for i, h in enumerate(hashes):
            self.content[h] = prefix + tuple(tokens[: (i + 1) * SIZE])
        if parent is None and all(self.counts[medium, group, h] for h in hashes):
            self.reported += len(hashes)
            return None
        for h in hashes:
            self.counts[medium, group, h] += 1
        return [self.content[h] for h in hashes]

    def remove(self, h: int, medium: str, group: int) -> tuple[int, ...] | None:
        if not self.counts[medium, group, h]:
            self.unknown += 1
            return None
        self.counts[medium, group, h] -= 1
        return self.content[h]


@pytest.mark.parametrize("seed", range(5))
def test_random_histories_agree_with_a_naive_twin(seed: int) -> None:
    rng = random.Random(seed)
    rank, naive = Rank(), NaiveRank()
    engine_hash: dict[tuple[int, ...], int] = {}
    tiers = {"GPU": 0, "CPU": 1}

    def hash_of(content: tuple[int, ...]) -> int:
        return engine_hash.setdefault(content, rng.getrandbits(64))

    def name(content: tuple[int, ...]) -> int:
        return chain(list(content))[-1]

    for _ in range(400):
        medium, group = rng.choice(["GPU", "GPU", "CPU"]), rng.choice([0, 0, 1])
        action = rng.random()
        if action < 0.55:
            prefix: tuple[int, ...] = ()
            if naive.content and rng.random() < 0.7:
                prefix = rng.choice([c for c in naive.content.values() if len(c) < 10 * SIZE] or [()])
            tokens = [rng.randrange(2) for _ in range(SIZE * rng.randint(1, 4))]
            contents = [prefix + tuple(tokens[: (i + 1) * SIZE]) for i in range(len(tokens) // SIZE)]
            hashes = [hash_of(c) for c in contents]
            parent = hash_of(prefix) if prefix else None
            rows = rank.apply(stored(hashes, tokens, parent=parent, medium=medium, group_idx=group))
            want = naive.store(hashes, tokens, parent, medium, group)
            assert [r[0] for r in rows] == [Kind.REPORTED if want is None else Kind.STORED]
            assert rows[0][3] == [name(c) for c in (want or contents)]
            assert rows[0][1:3] == (tiers[medium], group)
        elif action < 0.99 and engine_hash:
            some = rng.choices(list(engine_hash.values()), k=rng.randint(1, 4))
            rows = rank.apply(removed(some, medium=medium, group_idx=group))
            gone = [c for h in some if (c := naive.remove(h, medium, group)) is not None]
            assert [x for r in rows for x in r[3]] == [name(c) for c in gone]
        elif action >= 0.99:
            rank.apply(cleared())
            naive.counts.clear()
            naive.content.clear()
        assert rank.state.resident_blocks == naive.counts.total()
    assert rank.state.counters.unknown_removals == naive.unknown > 0
    assert rank.state.counters.reported_blocks == naive.reported > 0
    assert rank.state.counters.unnamed_blocks == rank.state.counters.skipped_events == 0
    want_resident = Counter({(tiers[m], g, name(naive.content[h])): n for (m, g, h), n in naive.counts.items() if n})
    got = Counter((tier, group, n) for tier, group, _, _, names in rank.state.resident() for n in names.tolist())
    assert got == want_resident
