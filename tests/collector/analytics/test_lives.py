"""How long blocks lived and lay idle is told from a sample of removals, however late their uses are told."""

from __future__ import annotations

import random

import numpy as np
import pytest

from collector.analytics.distinct import mixed_sample
from collector.analytics.lives import Lives
from schemas.kv_events import COMPLETE, Kind, KvBatch, WorkerId, encode, unpack
from tests.collector.analytics.naive_lives import NaiveLives
from tests.collector.analytics.test_distinct import naive_mix
from tests.collector.batches import batch, event, random_batches

W = WorkerId("p", "w", 0)


def watch(lives: Lives, *batches: KvBatch, number: int = 0) -> None:
    lives.watch(unpack([encode(b) for b in batches]), np.full(len(batches), number, np.int32))


def found(lives: Lives, from_s: float = 0.0, to_s: float = 1e12) -> list[tuple[int, float, float]]:
    r = lives.removed(from_s, to_s)
    return sorted(zip(r.number.tolist(), r.lifetime_s.tolist(), r.idle_s.tolist(), strict=True))


def mixed(*blocks: int) -> np.ndarray:
    return mixed_sample(np.array(blocks, np.uint64), 0)


def life(seq: int = 1) -> Lives:
    """A worker that stored blocks 1 to 3 at 1000 s."""
    lives = Lives()
    watch(lives, batch(W, 1, 0, 999.0, event(Kind.EPOCH_STARTED, flags=COMPLETE)), batch(W, 1, seq, 1000.0, event(Kind.STORED, [1, 2, 3])))
    return lives


def test_a_removed_block_lived_since_its_store_and_lay_idle_since_its_last_use() -> None:
    lives = life()
    lives.touch(mixed(1, 2), [0], 1015.0, 1020.0)
    lives.touch(mixed(1), [0], 1005.0, 1010.0)
    watch(lives, batch(W, 1, 2, 1050.0, event(Kind.REMOVED, [1, 3])))
    assert found(lives) == [(0, 50.0, 30.0), (0, 50.0, 50.0)]
    assert found(lives, 1050.0, 1051.0) == found(lives)
    assert found(lives, 1051.0) == []


def test_a_use_told_after_the_removal_or_after_the_next_store_counts_in_the_life_it_fell_into() -> None:
    lives = life()
    watch(lives, batch(W, 1, 2, 1050.0, event(Kind.REMOVED, [1])), batch(W, 1, 3, 1060.0, event(Kind.STORED, [1])))
    watch(lives, batch(W, 1, 4, 1070.0, event(Kind.REMOVED, [1])))
    lives.touch(mixed(1), [0], 1030.0, 1040.0)
    lives.touch(mixed(1), [0], 1055.0, 1056.0)  # nobody held it then
    assert found(lives) == [(0, 10.0, 10.0), (0, 50.0, 10.0)]


def test_a_request_that_computed_a_block_used_it_to_its_end_and_no_longer_than_it_was_there() -> None:
    lives = life()
    lives.touch(mixed(1), [0], 999.5, 1015.0)
    watch(lives, batch(W, 1, 2, 1050.0, event(Kind.REMOVED, [1, 2])))
    lives.touch(mixed(2), [0], 1040.0, 1050.2)  # the router's clock is a little later
    assert found(lives) == [(0, 50.0, 0.0), (0, 50.0, 35.0)]


def test_a_block_lives_until_its_last_copy_is_gone() -> None:
    lives = life()
    watch(lives, batch(W, 1, 2, 1010.0, event(Kind.STORED, [1])), batch(W, 1, 3, 1020.0, event(Kind.REMOVED, [1])))
    assert found(lives) == []
    watch(lives, batch(W, 1, 4, 1030.0, event(Kind.REMOVED, [1])))
    assert found(lives) == [(0, 30.0, 30.0)]


@pytest.mark.parametrize("mark", [Kind.CLEARED, Kind.GAP, Kind.EPOCH_STARTED])
def test_what_was_cleared_or_lost_sight_of_is_no_eviction(mark: Kind) -> None:
    lives = life()
    watch(lives, batch(W, 1, 2, 1010.0, event(mark, parent=2)), batch(W, 1, 3, 1020.0, event(Kind.REMOVED, [1])))
    assert found(lives) == []
    watch(lives, batch(W, 1, 4, 1030.0, event(Kind.STORED, [1])), batch(W, 1, 5, 1035.0, event(Kind.REMOVED, [1])))
    assert found(lives) == [(0, 5.0, 5.0)]


def test_lost_records_and_jumps_end_lives_and_other_tiers_have_none() -> None:
    for lose in (True, False):
        lives = life()
        if lose:
            lives.lose(0)
        watch(lives, batch(W, 1, 2 if lose else 9, 1010.0, event(Kind.REMOVED, [1])))
        assert found(lives) == []
    lives = life()
    watch(lives, batch(W, 1, 2, 1010.0, event(Kind.REMOVED, [1], tier=1)), batch(W, 1, 1, 1011.0, event(Kind.REMOVED, [2])))
    assert found(lives) == []


def test_removals_of_closed_windows_are_dropped_and_counted() -> None:
    lives = life()
    watch(lives, batch(W, 1, 2, 1010.0, event(Kind.REMOVED, [1])))
    lives.close(1200.0)
    assert found(lives) == []
    watch(lives, batch(W, 1, 3, 1199.0, event(Kind.REMOVED, [2])), batch(W, 1, 4, 1210.0, event(Kind.REMOVED, [3])))
    assert found(lives) == [(0, 210.0, 210.0)]
    assert lives.late == 1
    lives.close(900.0)
    watch(lives, batch(W, 1, 5, 1100.0, event(Kind.STORED, [2])), batch(W, 1, 6, 1150.0, event(Kind.REMOVED, [2])))
    assert lives.late == 2, "a window does not open again"


@pytest.mark.parametrize(("seed", "slots", "rows"), [(1, 1 << 12, 1 << 12), (2, 64, 1 << 12), (3, 1 << 12, 20), (4, 32, 8)])
def test_it_is_its_naive_twin_and_reading_uses_afterwards_changes_nothing(seed: int, slots: int, rows: int) -> None:
    rng = random.Random(seed)
    both, kv_first, twin = Lives(slots, rows), Lives(slots, rows), NaiveLives()
    streams = [random_batches(rng, WorkerId("p", f"w{i}", 0), 250, 40) for i in range(3)]
    order = sorted((b.bridge_time_s + (80 if i == 2 else 0), i, k) for i, s in enumerate(streams) for k, b in enumerate(s))
    uses: list[tuple[int, list[int], float, float]] = []
    told = uses[:]
    for at_s, i, k in order:
        watch(both, streams[i][k], number=i)
        watch(kv_first, streams[i][k], number=i)
        twin.watch(i, streams[i][k])
        user = rng.randrange(3)
        to_s = at_s - rng.random() - (80 if user == 2 else 0)  # a use is told when events of its time were read
        uses.append((user, [rng.randrange(40) for _ in range(4)], to_s, to_s))
        while uses and rng.random() < 0.5:  # told late, and not in the order in which they happened
            use = uses.pop(rng.randrange(len(uses)))
            told.append(use)
            both.touch(mixed(*use[1]), [use[0]], *use[2:])
            twin.touch(*use)
        if rng.random() < 0.02 and at_s < 1110:
            before_s = at_s - 60
            for x in (both, kv_first):
                x.close(before_s)
            twin.closed_s = max(twin.closed_s, before_s)
        if rng.random() < 0.05:
            again = Lives(slots, rows)
            again.load(both.save())
            for a, b in zip(again.save().values(), both.save().values(), strict=True):
                np.testing.assert_array_equal(a, b)
            both = again
    for use in told:
        kv_first.touch(mixed(*use[1]), [use[0]], *use[2:])
    limit = 2 ** (64 - both.level)
    sample = NaiveLives({key: x for key, x in twin.lives.items() if naive_mix(key[1]) < limit})
    expected = sample.removed(twin.closed_s, 1e12)
    np.testing.assert_allclose(np.array(found(both)), np.array(expected), atol=1e-9)
    assert (both.level > 0) == (slots < 100 or rows < 100)
    if both.level == 0:
        assert len(expected) > 50
        assert both.late == twin.late > 0, "one worker's events come late"
        assert found(kv_first) == found(both)


def test_memory_does_not_grow_and_the_sample_stays_useful() -> None:
    lives = Lives(1 << 10, 1 << 9)
    before = lives.held_bytes()
    for step in range(400):
        at = 1000.0 + step
        blocks = list(range(step * 50, step * 50 + 50))
        old = [b - 2000 for b in blocks if b >= 2000]
        watch(lives, batch(W, 1, step, at, event(Kind.STORED, blocks), event(Kind.REMOVED, old)))
        if step % 100 == 99:
            lives.close(at - 100)
    assert lives.held_bytes() == before
    r = lives.removed(0, 1e12)
    assert 100 < len(r.number) <= 512
    assert set(r.lifetime_s.tolist()) == {40.0}


def test_a_state_that_is_larger_than_its_budget_is_sampled_down_when_loaded() -> None:
    rng = random.Random(5)
    large, small = Lives(), Lives(64, 30)
    for b in random_batches(rng, W, 200, 60):
        watch(large, b)
    saved = large.save()
    small.load(saved)
    assert small.level > 0
    kept = {int(x["block"]) for x in saved["rows"] if int(x["block"]) < 2 ** (64 - small.level)}
    assert {int(x["block"]) for x in small.save()["rows"]} == kept
    for lives in (large, small):
        watch(lives, batch(W, 99, 1, 5000.0, event(Kind.STORED, range(60))), batch(W, 99, 2, 5001.0, event(Kind.REMOVED, range(60))))
        lives.touch(mixed(*range(60)), [0], 5000.4, 5000.5)
    newest = sorted(x for x in found(large, 5000.0))
    assert set(found(small, 5000.0)) <= set(newest)


@pytest.mark.parametrize(("slots", "rows"), [(100, 10), (4, 10), (64, 2)])
def test_budgets_that_cannot_be_are_refused(slots: int, rows: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        Lives(slots, rows)
