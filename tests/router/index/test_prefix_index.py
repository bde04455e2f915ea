import numpy as np
import pytest

from router.index.prefix_index import BLIND, DEGRADED, EXACT, PrefixIndex
from schemas.kv_events import COMPLETE, EVENT, FIRST, LAST, Kind, KvBatch, Tier, WorkerId

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


def test_a_complete_snapshot_replaces_and_heals_with_the_events_between_its_parts():
    index = index_of(batch(A, 1, 7, (Kind.STORED, [1, 9])))
    index.apply(batch(A, 1, 7, (Kind.SNAPSHOT, [1, 2], FIRST | COMPLETE)), 0.0)
    index.apply(batch(A, 1, 8, (Kind.STORED, [4])), 0.0)
    assert trust(index) == DEGRADED
    index.apply(batch(A, 1, 8, (Kind.SNAPSHOT, [3], LAST | COMPLETE)), 0.0)
    assert (held(index), held(index, chain=[9]), trust(index)) == (4, 0, EXACT)


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
    overlap = index.match(hashes_of(1, 2, 3, 4), 10.0)
    assert (overlap.held[slot], overlap.expected[slot], index.pending_blocks, index.counts.expired) == (1, 1, 0, 1)


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
def test_a_snapshot_whose_end_was_lost_keeps_no_events(broken_by):
    index = index_of(batch(A, 1, 7, (Kind.SNAPSHOT, [1, 2], FIRST | COMPLETE)), broken_by)
    for seq in range(10, 20):
        index.apply(batch(A, broken_by.epoch, seq, (Kind.STORED, [seq])), 0.0)
    assert index.slot(A).since_snapshot == []
    index.apply(batch(A, broken_by.epoch, 20, (Kind.SNAPSHOT, [3], LAST | COMPLETE)), 0.0)
    assert (held(index), index.counts.snapshots) == (0, 0)


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
