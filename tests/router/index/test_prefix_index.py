import dataclasses

import msgspec
import numpy as np
import pytest

from collector.bridge.decode import decode_batch
from collector.bridge.rank_state import RankState
from collector.bridge.record_builder import RecordBuilder
from router.index import kernels
from router.index.prefix_index import BLIND, DEGRADED, EXACT, PrefixIndex
from router.index.table import GPU
from schemas.block_hash import HashKey, hash_chain, root_hash
from schemas.kv_events import COMPLETE, EVENT, FIRST, LAST, WINDOW_SHIFT, WINDOWED, Kind, KvBatch, Tier, WorkerId, decode
from tests.router.index.naive import NaiveIndex

A, B = WorkerId("pool", "a", 0), WorkerId("pool", "b", 0)


def hashes_of(*values):
    return np.array(values, np.uint64)


def batch(source, epoch, seq, *events, first_seq=None, time_s=5.0):
    """events: (kind, hashes[, flags])."""
    rows = [(kind, Tier.GPU, 0, len(h), seq, time_s, 0, 16, flags[0] if flags else 0) for kind, h, *flags in events]
    return KvBatch(
        source, epoch, seq if first_seq is None else first_seq, seq, time_s, time_s,
        np.array(rows, EVENT), hashes_of(*(x for _, h, *_ in events for x in h)),
    )  # fmt: skip


def started(source=A, epoch=1, flags=COMPLETE):
    return batch(source, epoch, 0, (Kind.EPOCH_STARTED, [], flags))


def index_of(*batches):
    index = PrefixIndex()
    for b in batches:
        index.apply(b, 0.0)
    return index


def held(index, source=A, chain=(1, 2, 3, 4), now_s=0.0):
    return int(index.match(hashes_of(*chain), now_s).held[index.slot(source).number])


def trust(index, source=A):
    return int(index.trust[index.slot(source).number])


def test_stored_blocks_belong_to_their_worker_alone():
    index = index_of(started(A), started(B), batch(A, 1, 1, (Kind.STORED, [1, 2])), batch(B, 1, 1, (Kind.STORED, [1])))
    assert (held(index, A), held(index, B)) == (2, 1)
    assert (trust(index, A), index.slot(A).epoch, index.slot(A).seq, index.slot(A).block_size) == (EXACT, 1, 1, 16)


def test_an_unknown_worker_is_blind_and_empty():
    index = index_of()
    assert (held(index), trust(index)) == (0, BLIND)


def test_a_late_start_is_degraded_until_a_clear():
    index = index_of(batch(A, 3, 17, (Kind.STORED, [1])))
    assert (held(index), trust(index)) == (1, DEGRADED)
    index.apply(batch(A, 3, 18, (Kind.CLEARED, []), (Kind.STORED, [1, 2])), 0.0)
    assert (held(index), trust(index)) == (2, EXACT)


def test_a_new_epoch_empties_the_worker():
    index = index_of(
        started(), batch(A, 1, 1, (Kind.STORED, [1, 2])), batch(A, 2, 0, (Kind.EPOCH_STARTED, [], COMPLETE), (Kind.STORED, [1]))
    )
    assert (held(index), trust(index)) == (1, EXACT)
    index.apply(batch(A, 3, 5, (Kind.STORED, [1, 2, 3])), 0.0)  # its start was lost
    assert (held(index), trust(index)) == (3, DEGRADED)


def test_an_incomplete_epoch_start_is_degraded():
    assert trust(index_of(started(flags=0))) == DEGRADED


def test_late_batches_do_not_bring_removed_blocks_back():
    index = index_of(started(), batch(A, 1, 1, (Kind.STORED, [1])), batch(A, 1, 2, (Kind.REMOVED, [1])))
    index.apply(batch(A, 1, 1, (Kind.STORED, [1])), 0.0)
    index.apply(batch(A, 0, 9, (Kind.STORED, [1])), 0.0)
    assert (held(index), index.counts.stale_batches) == (0, 2)


def test_a_gap_degrades_and_an_unnamed_jump_does_too():
    index = index_of(started(), batch(A, 1, 5, (Kind.GAP, []), (Kind.STORED, [1]), first_seq=1))
    assert (trust(index), index.counts.gaps, index.counts.unexplained_gaps) == (DEGRADED, 1, 0)
    index = index_of(started(), batch(A, 1, 5, (Kind.STORED, [1])))
    assert (trust(index), index.counts.gaps, index.counts.unexplained_gaps) == (DEGRADED, 0, 1)


def test_a_complete_snapshot_replaces_and_heals():
    index = index_of(batch(A, 1, 7, (Kind.STORED, [1, 9])))
    index.apply(batch(A, 1, 7, (Kind.SNAPSHOT, [1, 2], FIRST | COMPLETE)), 0.0)
    assert trust(index) == DEGRADED
    index.apply(batch(A, 1, 7, (Kind.SNAPSHOT, [3], LAST | COMPLETE)), 0.0)
    index.apply(batch(A, 1, 8, (Kind.STORED, [4])), 0.0)
    assert (held(index), held(index, chain=[9]), trust(index), index.counts.snapshots) == (4, 0, EXACT, 1)


def test_a_snapshot_of_an_exact_worker_is_only_counted_and_a_difference_is_healed_by_the_next():
    index = index_of(started(), batch(A, 1, 1, (Kind.STORED, [1, 2, 2])))
    index.apply(batch(A, 1, 1, (Kind.SNAPSHOT, [1, 2], FIRST | COMPLETE), (Kind.SNAPSHOT, [2], LAST | COMPLETE)), 0.0)
    assert (held(index), trust(index), index.counts.snapshots, index.counts.mismatches) == (2, EXACT, 0, 0)
    for seq, trusted in ((2, DEGRADED), (3, EXACT)):
        index.apply(batch(A, 1, seq, (Kind.SNAPSHOT, [1, 2, 3, 4], FIRST | LAST | COMPLETE)), 0.0)
        assert trust(index) == trusted
    assert (held(index), index.counts.snapshots, index.counts.mismatches) == (4, 1, 1)


def test_an_incomplete_snapshot_replaces_only_what_was_not_exact():
    exact = index_of(started(), batch(A, 1, 1, (Kind.STORED, [1, 2])), batch(A, 1, 1, (Kind.SNAPSHOT, [1], FIRST | LAST)))
    assert (held(exact), trust(exact)) == (2, EXACT)
    late = index_of(batch(A, 1, 1, (Kind.SNAPSHOT, [1, 2, 3], FIRST | LAST)))
    assert (held(late), trust(late)) == (3, DEGRADED)


def test_reported_blocks_change_nothing():
    index = index_of(
        started(), batch(A, 1, 1, (Kind.STORED, [1])), batch(A, 1, 2, (Kind.REPORTED, [1, 2])), batch(A, 1, 3, (Kind.REMOVED, [1]))
    )
    assert held(index) == 0


def test_expected_blocks_are_told_apart_and_expire():
    index = index_of(started(), batch(A, 1, 1, (Kind.STORED, [1])))
    slot = index.slot(A).number
    index.expect(slot, hashes_of(2, 3), expires_s=10.0)
    overlap = index.match(hashes_of(1, 2, 3, 4), 9.9)
    assert (overlap.held[slot], overlap.expected[slot]) == (1, 3)
    overlap = index.match(hashes_of(1, 2, 3, 4), 10.1)
    assert (overlap.held[slot], overlap.expected[slot], index.pending_blocks, index.counts.expired) == (1, 1, 0, 1)


def test_what_is_due_ends_together_slot_by_slot():
    index = index_of(started(), started(B))
    for source, name, expires_s in ((A, 1, 1.0), (B, 2, 1.01), (A, 3, 1.02), (A, 1, 9.0)):
        index.expect(index.slot(source).number, hashes_of(name), expires_s)
    index.expire(1.02)
    assert (index.pending_blocks, index.counts.expired) == (1, 3)
    assert index.match(hashes_of(1), 1.02).expected[index.slot(A).number] == 1


def test_two_expectations_of_one_block_are_dropped_one_by_one():
    index = index_of(started())
    slot = index.slot(A).number
    first, second = (index.expect(slot, hashes_of(1), 10.0) for _ in range(2))
    index.drop(first)
    index.drop(first)
    assert index.match(hashes_of(1), 0.0).expected[slot] == 1
    index.drop(second)
    assert index.match(hashes_of(1), 0.0).expected[slot] == 0


def test_a_restart_drops_what_was_expected_of_the_worker():
    index = index_of(started(A), started(B))
    for source in (A, B):
        index.expect(index.slot(source).number, hashes_of(1), 10.0)
    index.apply(started(A, epoch=2), 0.0)
    expected = index.match(hashes_of(1), 0.0).expected
    assert (expected[index.slot(A).number], expected[index.slot(B).number]) == (0, 1)


@pytest.mark.parametrize("flags", [None, COMPLETE])
def test_the_first_life_that_is_heard_of_keeps_what_was_expected_of_the_worker(flags):
    index = PrefixIndex()
    slot = index.slot(A).number
    index.expect(slot, hashes_of(1, 2), 10.0)
    index.apply(batch(A, 1, 7, (Kind.STORED, [1])) if flags is None else started(A, flags=flags), 0.0)
    assert index.match(hashes_of(1, 2), 0.0).expected[slot] == 2
    index.apply(started(A, epoch=2), 0.0)
    assert index.match(hashes_of(1, 2), 0.0).expected[slot] == 0


def test_forgetting_leaves_every_worker_blind_until_the_log_is_read_anew():
    index = index_of(started(), batch(A, 1, 1, (Kind.STORED, [1])))
    index.forget()
    assert (held(index), trust(index)) == (0, BLIND)
    index.apply(started(), 0.0)
    index.apply(batch(A, 1, 1, (Kind.STORED, [1])), 0.0)
    assert (held(index), trust(index)) == (1, EXACT)


@pytest.mark.parametrize(
    "broken_by", [batch(A, 1, 9, (Kind.STORED, [7])), batch(A, 2, 0, (Kind.EPOCH_STARTED, [], COMPLETE)), batch(A, 1, 8, (Kind.GAP, []))]
)
def test_the_end_of_a_snapshot_that_something_broke_heals_nothing(broken_by):
    index = index_of(batch(A, 1, 7, (Kind.SNAPSHOT, [1, 2], FIRST | COMPLETE)), broken_by)
    for seq in range(10, 20):
        index.apply(batch(A, broken_by.epoch, seq, (Kind.STORED, [seq])), 0.0)
    before = trust(index)
    index.apply(batch(A, broken_by.epoch, 20, (Kind.SNAPSHOT, [3], LAST | COMPLETE)), 0.0)
    assert (held(index, chain=[3]), index.counts.snapshots, trust(index)) == (0, 0, before)


def test_a_distrusted_worker_is_empty_and_blind_and_the_others_stay():
    index = index_of(started(A), started(B), batch(A, 1, 1, (Kind.STORED, [1])), batch(B, 1, 1, (Kind.STORED, [1])))
    index.distrust(A)
    assert (held(index, A), trust(index, A), held(index, B), trust(index, B)) == (0, BLIND, 1, EXACT)
    index.apply(batch(A, 1, 2, (Kind.STORED, [1])), 0.0)
    assert (held(index, A), trust(index, A)) == (1, DEGRADED)


@pytest.mark.parametrize("workers", [65, 512])
def test_many_workers_fit(workers):
    index = PrefixIndex()
    sources = [WorkerId("pool", f"w{i}", 0) for i in range(workers)]
    for i, source in enumerate(sources):
        index.apply(started(source), 0.0)
        index.apply(batch(source, 1, 1, (Kind.STORED, list(range(1, i + 2)))), 0.0)
    overlap = index.match(hashes_of(*range(1, workers + 1)), 0.0)
    assert [int(overlap.held[index.slot(s).number]) for s in sources] == list(range(1, workers + 1))


def test_a_record_that_comes_twice_is_applied_once_and_parts_of_one_batch_all_are():
    first, second = batch(A, 1, 1, (Kind.STORED, [1, 2])), batch(A, 1, 1, (Kind.STORED, [3]), (Kind.REMOVED, [2]))
    index = index_of(started(), started(), first, second, first, second, second)
    assert (held(index), index.counts.repeated_batches, index.counts.stale_batches) == (1, 4, 0)
    index.apply(batch(A, 1, 2, (Kind.REMOVED, [1])), 0.0)
    index.apply(first, 0.0)
    assert (held(index), index.counts.stale_batches, index.unknown_removals) == (0, 1, 0)


def test_the_bridge_splits_a_batch_into_records_that_are_all_applied_once():
    builder = RecordBuilder(A, target_bytes=400)
    builder.start_epoch(1, True, 0, 1.0)
    builder.batch(1, 1.0, 1.0)
    for h in range(1, 200, 20):
        builder.row(Kind.STORED, 1, 1.0, np.arange(h, h + 20, dtype=np.uint64), block_size=16)
    records = [decode(r.value) for r in builder.take(1.0)]
    assert len(records) > 4
    index = index_of(*records[:3], *records[1:3], *records[2:], *records[2:])
    assert (held(index, chain=range(1, 202)), trust(index)) == (200, EXACT)
    assert index.slot(A).seq == 1
    assert index._table.copies_held(index.slot(A).number) == 200


def test_tiers_are_told_apart():
    index = index_of(started(), tiered(A, 1, [(Tier.GPU, [1, 2]), (Tier.CPU, [2, 3]), (Tier.DISK, [4]), (Tier.EXTERNAL, [5])]))
    found = index.match(hashes_of(1, 2, 3, 4, 5, 6), 0.0)
    assert [int(a[0]) for a in found] == [5, 2, 1, 2, 5]


def tiered(source, seq, stored):
    rows = [(Kind.STORED, tier, 0, len(h), seq, 5.0, 0, 16, 0) for tier, h in stored]
    return KvBatch(source, 1, seq, seq, 5.0, 5.0, np.array(rows, EVENT), hashes_of(*(x for _, h in stored for x in h)))


def test_an_announced_block_is_expected_no_longer_even_if_it_goes_again():
    index = index_of(started())
    slot = index.slot(A).number
    for _ in range(2):
        index.expect(slot, hashes_of(1, 2, 3), 10.0)
    index.apply(batch(A, 1, 1, (Kind.STORED, [1, 2])), 0.0)
    assert index.pending_blocks == 1
    index.apply(batch(A, 1, 2, (Kind.REMOVED, [2])), 0.0)
    found = index.match(hashes_of(1, 2, 3), 0.0)
    assert (found.held[slot], found.expected[slot]) == (1, 1)
    index.expire(10.0)
    assert (index.pending_blocks, index.unknown_removals) == (0, 0)


def test_expectations_are_bounded_and_those_that_end_first_make_room():
    index = PrefixIndex(most_expected_blocks=100)
    slot = index.slot(A).number
    tickets = [index.expect(slot, np.arange(i * 30 + 1, i * 30 + 31, dtype=np.uint64), 50.0 - i) for i in range(4)]
    assert (index.pending_blocks, index.counts.crowded_out) == (90, 1)
    assert [index.drop(t) for t in tickets] == [True, True, True, False]
    for i in range(1000):
        index.drop(index.expect(slot, hashes_of(i + 1), 100.0))
    assert len(index._expiry) < 100


def test_a_released_slot_is_empty_and_goes_to_the_next_worker():
    index = index_of(started(A), started(B), batch(A, 1, 1, (Kind.STORED, [1, 2])), batch(B, 1, 1, (Kind.STORED, [1])))
    number = index.slot(A).number
    ticket = index.expect(number, hashes_of(3), 10.0)
    index.release(A)
    index.release(A)
    c = WorkerId("pool", "c", 0)
    assert (index.slot(c).number, trust(index, c), index.heard_s[number]) == (number, BLIND, -np.inf)
    index.apply(started(c), 0.0)
    index.apply(batch(c, 1, 1, (Kind.STORED, [1])), 0.0)
    assert not index.drop(ticket)
    assert (held(index, c), held(index, B), trust(index, c)) == (1, 1, EXACT)
    assert index.slot(A).number == 2


def test_without_memory_a_worker_is_degraded_and_what_is_known_stays_true():
    index = PrefixIndex(limit_bytes=200_000)
    index.apply(started(), 0.0)
    names = np.random.default_rng(1).integers(1, 2**63, 40_000, dtype=np.uint64)
    for seq in range(1, 41):
        index.apply(batch(A, 1, seq, (Kind.STORED, names[(seq - 1) * 1000 : seq * 1000].tolist())), 0.0)
    assert trust(index) == DEGRADED
    assert index.refused_blocks == 40_000 - index.rows > 0
    assert index.size_bytes <= index.limit_bytes
    assert 1000 < held(index, chain=names) <= index.rows
    index.apply(batch(A, 1, 50, (Kind.CLEARED, []), (Kind.STORED, names[:1000].tolist())), 0.0)
    assert (held(index, chain=names), trust(index)) == (1000, EXACT)


def test_a_snapshot_of_which_something_had_no_room_does_not_heal():
    index = PrefixIndex(limit_bytes=200_000)
    names = np.random.default_rng(1).integers(1, 2**63, 40_000, dtype=np.uint64).tolist()
    index.apply(batch(A, 1, 7, (Kind.SNAPSHOT, names, FIRST | COMPLETE)), 0.0)
    refused = index.refused_blocks
    index.apply(batch(A, 1, 7, (Kind.SNAPSHOT, [], LAST | COMPLETE)), 0.0)
    assert (index.refused_blocks, trust(index)) == (refused, DEGRADED)


def test_blocks_that_are_given_up_while_no_batch_is_applied_cost_trust_with_the_next():
    index = index_of(started(A), started(B))
    ticket = index.expect(index.slot(A).number, hashes_of(1, 2), 10.0)
    index.apply(batch(B, 1, 1, (Kind.STORED, [1])), 0.0)
    index._table._state.num[kernels.LIMIT_BYTES] = 0  # no room for a set that has B alone
    index.drop(ticket)
    assert (held(index, B), index.refused_blocks) == (0, 2)  # what was expected of A, too
    index.apply(batch(A, 1, 1, (Kind.STORED, [])), 0.0)
    assert (trust(index, A), trust(index, B)) == (DEGRADED, DEGRADED)


def test_who_is_unknown_cannot_be_distrusted():
    index = index_of()
    index.distrust(A)
    assert index.slots == ()


def test_the_lag_is_the_age_of_what_is_not_applied_yet():
    index = PrefixIndex()
    assert index.lag_s(100.0) is None  # no stream is followed
    index.level_s = -np.inf
    assert index.lag_s(100.0) is None
    index.level_s = 90.0
    assert index.lag_s(100.0) == 10.0
    index.fresh_s = 99.5
    assert index.lag_s(100.0) == 0.5


# --- hybrid models --------------------------------------------------------------------------------------------------------------


def grouped(source, seq, *stored, kind=Kind.STORED, size=16, epoch=1):
    """stored: (group, hashes[, flags[, block size]])"""
    rows = [(kind, Tier.GPU, g, len(h), seq, 5.0, 0, more[1] if len(more) > 1 else size, more[0] if more else 0) for g, h, *more in stored]
    return KvBatch(source, epoch, seq, seq, 5.0, 5.0, np.array(rows, EVENT), hashes_of(*(x for _, h, *_ in stored for x in h)))


def window(tokens):
    return WINDOWED | tokens << WINDOW_SHIFT


def test_a_prefix_is_what_all_groups_with_full_attention_hold():
    index = index_of(started(), grouped(A, 1, (0, [1, 2, 3]), (3, [1, 2])))
    assert held(index) == 2
    index.apply(grouped(A, 2, (0, [2]), kind=Kind.REMOVED), 0.0)
    assert held(index) == 1


def test_windowed_groups_alone_are_no_residency():
    index = index_of(started(), grouped(A, 1, (0, [1, 2], WINDOWED), (1, [1, 2], WINDOWED)))
    assert (held(index), trust(index)) == (0, EXACT)


def test_a_prefix_ends_where_the_window_is_held():
    chain = list(range(1, 11))
    index = index_of(started(), grouped(A, 1, (0, chain), (1, [5, 6, 7, 9], window(33))))  # a window reaches 2 blocks back
    assert held(index, chain=chain) == 7
    index.apply(grouped(A, 2, (1, [6]), kind=Kind.REMOVED), 0.0)
    assert held(index, chain=chain) == 0  # 5 and 7 and 9 stand alone
    index.apply(grouped(A, 3, (1, [1, 2])), 0.0)
    assert held(index, chain=chain) == 2


def test_a_window_comes_from_the_engines_event_through_the_bridge():
    index, builder = PrefixIndex(), RecordBuilder(A)
    rank = RankState(HashKey(1, 2), A, builder)
    tokens, size = list(range(40)), 4
    blocks = {"type": "BlockStored", "block_hashes": list(range(1, 11)), "parent_block_hash": None, "token_ids": tokens, "block_size": size}
    sliding = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9}  # reaches 2 blocks back
    gone = {"type": "BlockRemoved", "block_hashes": [1, 2, 3, 6, 8, 9, 10], "group_idx": 1}
    builder.start_epoch(1, True, 0, 1.0)
    rank.apply(1, decode_batch(msgspec.msgpack.encode([1.0, [blocks | {"group_idx": 0}, blocks | sliding, gone]])), 1.0)
    chain = hash_chain(HashKey(1, 2), root_hash(HashKey(1, 2), "pool"), tokens, size)
    for record in builder.take(1.0):
        index.apply(decode(record.value), 0.0)
    assert (held(index, chain=chain), trust(index)) == (5, EXACT)  # 7 stands alone

    late = PrefixIndex()
    builder.snapshot(rank.resident(), 1, True, 2.0)
    for record in builder.take(2.0):
        late.apply(decode(record.value), 0.0)
    assert (held(late, chain=chain), trust(late)) == (5, EXACT)


def test_where_the_window_is_not_told_its_last_block_stands_for_it():
    index = index_of(started(), grouped(A, 1, (0, [1, 2, 3, 4]), (1, [3], WINDOWED)))
    assert held(index) == 3


def test_groups_with_other_block_sizes_need_the_prompts_chain_in_their_size():
    index = index_of(started(A), started(B), grouped(A, 1, (0, [1, 2, 3, 4]), (1, [31, 32], 0, 32)), grouped(B, 1, (0, [1, 2])))
    slot, plain = index.slot(A).number, index.slot(B).number
    chain = hashes_of(1, 2, 3, 4)
    assert index.other_sizes == (32,)
    for others, of_a in ((None, 0), ({32: hashes_of(31, 32)}, 4), ({32: hashes_of(31, 99)}, 2), ({32: hashes_of(99)}, 0)):
        found = index.match(chain, 0.0, others)
        assert (int(found.held[slot]), int(found.held[plain])) == (of_a, 2)
    assert index.slot(A).block_size == 16


def test_a_worker_with_more_groups_than_can_be_followed_holds_nothing():
    index = index_of(started(A), started(B), grouped(A, 1, *((g, [1, 2]) for g in range(8))), grouped(B, 1, (40, [1, 2])))
    assert (held(index), held(index, B), index.unmatched_slots) == (2, 0, 1)
    index.apply(grouped(A, 2, (8, [1, 2])), 0.0)
    assert (held(index), index.unmatched_slots) == (0, 2)
    index.apply(batch(A, 2, 0, (Kind.EPOCH_STARTED, [], COMPLETE), (Kind.STORED, [1])), 0.0)
    assert (held(index), index.unmatched_slots) == (1, 1)


PROFILES = (
    {0: (0, 16)},
    {0: (0, 16), 1: (0, 16)},
    {2: (0, 16), 0: (window(40), 16), 5: (window(100), 16)},
    {0: (WINDOWED, 16), 1: (0, 16)},
    {0: (0, 16), 1: (0, 32), 2: (window(65), 32)},
    {0: (0, 16), 1: (window(1), 64)},
    {0: (window(20), 16)},
)
"""group -> (flags, block size)"""


class Prompts:
    """Prompts that share their beginnings, as chains by block size."""

    def __init__(self, rng):
        self.chains = []
        for _ in range(5):
            chains = {size: [int(h) for h in rng.integers(1, 2**63, 384 // size)] for size in (16, 32, 64)}
            if self.chains:
                shared = 64 * int(rng.integers(5))
                chains = {size: self.chains[0][size][: shared // size] + chain[shared // size :] for size, chain in chains.items()}
            self.chains.append(chains)

    def some(self, rng, size):
        chain = self.chains[int(rng.integers(5))][size]
        if rng.random() < 0.6:
            return chain[: int(rng.integers(len(chain) + 1))]
        start = int(rng.integers(len(chain)))
        return chain[start : start + int(rng.integers(8))]


@pytest.mark.parametrize("seed", range(14))
def test_index_agrees_with_the_naive_twin(seed):
    """Never more than is held: the twin declares what an engine can take from its cache, whatever the groups."""
    rng = np.random.default_rng(seed)
    prompts = Prompts(rng)
    sources = {WorkerId("pool", f"w{i}", 0): PROFILES[int(rng.integers(len(PROFILES))) if seed % 2 else i] for i in range(7)}
    index, twin = PrefixIndex(), NaiveIndex()
    epochs, seqs, sent = dict.fromkeys(sources, 1), dict.fromkeys(sources, 0), dict.fromkeys(sources, ())
    tickets = []

    def event(kind, profile, group=None, flags=0):
        group = int(rng.choice(list(profile))) if group is None else group
        of_group, size = profile[group]
        names = prompts.some(rng, size) if kind not in (Kind.CLEARED, Kind.GAP, Kind.EPOCH_STARTED) else []
        if kind == Kind.REMOVED:
            names = names[::-1]
        more = of_group if kind in (Kind.STORED, Kind.SNAPSHOT) else 0
        tier = int(rng.choice(4, p=(0.7, 0.15, 0.1, 0.05)))
        return (kind, tier, group, len(names), 0, 1.0, 0, size, flags | more), names

    def events(profile):
        choice = rng.random()
        if choice < 0.6:
            return [event(Kind.STORED, profile, g) for g in profile]
        if choice < 0.85:
            kinds = (Kind.STORED, Kind.REMOVED, Kind.REMOVED, Kind.REPORTED, Kind.UNNAMED)
            return [event(Kind(int(rng.choice(kinds))), profile) for _ in range(4)]
        if choice < 0.95:
            complete = COMPLETE if rng.random() < 0.6 else 0
            parts = [event(Kind.SNAPSHOT, profile, flags=complete) for _ in range(int(rng.integers(1, 4)))]
            for at, flag in ((0, FIRST), (-1, LAST)):
                if rng.random() < 0.9:
                    row, names = parts[at]
                    parts[at] = ((*row[:-1], row[-1] | flag), names)
            return parts
        return [event(Kind.CLEARED if choice < 0.97 else Kind.GAP, profile), event(Kind.STORED, profile)]

    for step in range(300):
        source = list(sources)[int(rng.integers(7))]
        seqs[source] += int(rng.choice(3, p=(0.15, 0.8, 0.05)))
        now = events(sources[source])
        if rng.random() < 0.02 or step < 5:
            epochs[source] += 1
            seqs[source] = 0
            now.insert(0, event(Kind.EPOCH_STARTED, sources[source], flags=COMPLETE if rng.random() < 0.8 else 0))
        news = KvBatch(source, epochs[source], seqs[source], seqs[source], 1.0, float(step), np.array([row for row, _ in now], EVENT),
                       hashes_of(*(h for _, names in now for h in names)))  # fmt: skip
        again = [sent[source][int(rng.integers(len(sent[source])))]] if sent[source] and rng.random() < 0.15 else []
        sent[source] = (*sent[source][-3:], news)
        for record in (*again, news, *again):
            index.apply(dataclasses.replace(record), 0.0)
            twin.apply(record)
        if rng.random() < 0.2:
            names = prompts.some(rng, 16)
            ticket = index.expect(index.slot(source).number, hashes_of(*names), float(step + 20))
            twin.expect(ticket, source, names, float(step + 20))
            tickets.append(ticket)
        if tickets and rng.random() < 0.1:
            ticket = tickets.pop(int(rng.integers(len(tickets))))
            index.drop(ticket)
            twin.drop(ticket)
        twin.expire(float(step))
        index.expire(float(step))
        chains = dict(prompts.chains[int(rng.integers(5))])
        if rng.random() < 0.1:
            del chains[32]
        found = index.match(hashes_of(*chains[16]), float(step), {size: hashes_of(*c) for size, c in chains.items() if size != 16})
        for known in {source, list(twin.workers)[int(rng.integers(len(twin.workers)))]}:
            slot, worker = index.slot(known), twin.worker(known)
            assert tuple(int(a[slot.number]) for a in found) == worker.overlap(chains)
            assert (int(index.trust[slot.number]), (slot.epoch, slot.seq)) == (worker.trust, worker.clock)
    assert index.pending_blocks == sum(n > 0 for w in twin.workers.values() for n in w.hopes.values())
    assert index.held_blocks(0) == int(index._table.held[:, GPU, 0].max())
    assert index.counts.repeated_batches and index.counts.stale_batches and index.counts.mismatches
