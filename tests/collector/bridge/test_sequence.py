from __future__ import annotations

import random

import pytest

from collector.bridge.sequence import HELD_OVERHEAD_BYTES, MAX_IDLE_ROUNDS, RECENT, Apply, Epoch, Gap, Sequencer, Step
from tests.collector.bridge.wire import one_block


def told(steps: list[Step]) -> list[str]:
    out = []
    for s in steps:
        if isinstance(s, Apply):
            out.append(f"{s.seq}")
        elif isinstance(s, Gap):
            out.append(f"gap {s.first}-{s.last}")
        else:
            out.append("complete" if s.complete else f"incomplete from {s.seq}")
    return out


def live(q: Sequencer, *seqs: int, life: int = 0) -> list[str]:
    return [t for s in seqs for t in told(q.live(s, one_block(s, life)))]


def replay(q: Sequencer, seqs: list[int], life: int = 0, marker: bool = True) -> list[str]:
    q.round_began()
    out = [t for s in seqs for t in told(q.replay(s, one_block(s, life)))]
    return out + told(q.round_ended(marker))


def test_from_zero_everything_is_applied_in_order() -> None:
    q = Sequencer(can_replay=False)
    assert live(q, 0, 1, 2) == ["complete", "0", "1", "2"]


def test_a_late_start_without_replay_is_incomplete() -> None:
    assert live(Sequencer(can_replay=False), 7, 8) == ["incomplete from 7", "7", "8"]


def test_a_jump_without_replay_is_an_exact_gap() -> None:
    q = Sequencer(can_replay=False)
    assert live(q, 0, 5, 6) == ["complete", "0", "gap 1-4", "5", "6"]


def test_a_late_start_is_made_complete_by_replay_while_live_frames_wait() -> None:
    q = Sequencer(can_replay=True)
    assert live(q, 3, 4) == []
    assert (q.wanted,) == (0,)
    assert replay(q, [0, 1, 2, 3, 4]) == ["complete", "0", "1", "2", "3", "4"]
    assert (q.wanted,) == (None,)
    assert live(q, 5) == ["5"]


def test_an_idle_engine_is_learned_from_replay_alone_and_late_live_copies_are_ignored() -> None:
    q = Sequencer(can_replay=True)
    assert replay(q, [0, 1, 2]) == ["complete", "0", "1", "2"]
    assert live(q, 1, 2, 3) == ["3"]
    assert (q.duplicates, q.restarts) == (2, 0)


def test_an_engine_that_published_nothing_is_complete_and_empty() -> None:
    q = Sequencer(can_replay=True)
    assert replay(q, []) == ["complete"]
    assert live(q, 0) == ["0"]


def test_an_engine_that_does_not_answer_is_asked_again_until_it_speaks() -> None:
    q = Sequencer(can_replay=True)
    for _ in range(10):
        assert replay(q, [], marker=False) == []
    assert (q.wanted,) == (0,)
    assert live(q, 0) == ["complete", "0"]


def test_a_trimmed_replay_buffer_leaves_the_start_incomplete() -> None:
    q = Sequencer(can_replay=True)
    live(q, 12)
    assert replay(q, [10, 11, 12]) == []
    assert replay(q, [10, 11, 12]) == []
    assert replay(q, [10, 11, 12]) == ["incomplete from 10", "10", "11", "12"]


def test_a_hole_is_filled_by_replay_asked_from_one_before_it() -> None:
    q = Sequencer(can_replay=True)
    replay(q, [])
    assert live(q, 0, 1, 4, 5) == ["0", "1"]
    assert (q.wanted,) == (1,)
    assert replay(q, [1, 2, 3, 4, 5, 6]) == ["2", "3", "4", "5", "6"]
    assert live(q, 6, 7) == ["7"]
    assert (q.duplicates, q.restarts, q.replayed) == (1, 0, 3)


def test_a_lossy_replay_converges_by_asking_again() -> None:
    q = Sequencer(can_replay=True)
    live(q, 0)
    q.round_began()
    live(q, 9)
    assert replay(q, [0, 2, 3, 5]) == []
    assert replay(q, [0, 1, 5, 6]) == ["1", "2", "3"]
    assert replay(q, [3, 4, 7], marker=False) == ["4", "5", "6", "7"]
    assert replay(q, [7, 8, 9]) == ["8", "9"]


def test_what_replay_cannot_bring_becomes_a_gap_and_the_rest_goes_on() -> None:
    q = Sequencer(can_replay=True)
    live(q, 0, 5)
    rounds = [replay(q, [3, 4, 5]) for _ in range(MAX_IDLE_ROUNDS + 1)]
    assert rounds == [[]] * MAX_IDLE_ROUNDS + [["gap 1-2", "3", "4", "5"]]
    assert live(q, 6) == ["6"]


def test_two_holes_are_given_up_one_after_the_other() -> None:
    q = Sequencer(can_replay=True)
    live(q, 0, 2, 4)
    told_all = [t for _ in range(2 * MAX_IDLE_ROUNDS) for t in replay(q, [], marker=False)]
    assert told_all == ["gap 1-1", "2", "gap 3-3", "4"]


def test_a_step_back_is_a_restart_with_a_new_complete_epoch() -> None:
    q = Sequencer(can_replay=False)
    live(q, 0, 1, 2)
    assert live(q, 0, 1, life=1) == ["complete", "0", "1"]
    assert q.restarts == 1


def test_a_restart_seen_late_is_filled_by_replay_or_becomes_a_gap() -> None:
    for can_replay in (True, False):
        q = Sequencer(can_replay=can_replay)
        live(q, 0, 1, 2, 3, 4, 5)
        steps = live(q, 2, life=1)
        if can_replay:
            steps += replay(q, [0, 1, 2], life=1)
            assert steps == ["complete", "0", "1", "2"]
        else:
            assert steps == ["complete", "gap 0-1", "2"]


def test_the_same_content_again_is_a_duplicate_not_a_restart() -> None:
    q = Sequencer(can_replay=False)
    live(q, 0, 1, 2)
    assert live(q, 1, 2, 3) == ["3"]
    assert (q.duplicates, q.restarts) == (2, 0)


def test_live_frames_that_replay_overtook_long_ago_are_late_copies_not_a_restart() -> None:
    q = Sequencer(can_replay=True)
    live(q, 0, 1)
    live(q, 3)
    end = 3 + 2 * RECENT
    replay(q, list(range(1, end)))
    assert live(q, *range(4, end)) == []
    assert live(q, end) == [str(end)]
    assert (q.restarts, q.duplicates) == (0, end - 4)
    assert live(q, 0, life=1) == ["complete", "0"]
    assert q.restarts == 1


def test_a_start_by_a_long_replay_is_no_restart_when_the_live_frames_come() -> None:
    q = Sequencer(can_replay=True)
    end = 2 * RECENT
    assert replay(q, list(range(end)))[0] == "complete"
    assert live(q, *range(5, end + 1)) == [str(end)]
    assert q.restarts == 0


def test_mangled_frames_that_wait_are_bounded_too() -> None:
    q = Sequencer(can_replay=True, max_held_bytes=10 * HELD_OVERHEAD_BYTES)
    live(q, 0)
    for seq in range(2, 100):
        q.live(seq, b"\xc1")
    assert q.held <= 10


def test_a_restart_hidden_in_a_jump_shows_in_the_overlap_of_the_replay() -> None:
    q = Sequencer(can_replay=True)
    replay(q, [])
    live(q, 0, 1, 2)
    assert live(q, 9, life=1) == []
    q.round_began()
    assert told(q.replay(2, one_block(2, 1))) == ["complete"]
    for s in range(3, 10):
        assert told(q.replay(s, one_block(s, 1))) == []
    q.round_ended(True)
    assert replay(q, list(range(10)), life=1) == [str(s) for s in range(10)]
    assert live(q, 10, life=1) == ["10"]
    assert q.restarts == 1


def test_a_connection_to_the_same_engine_is_verified_and_brings_what_was_missed() -> None:
    q = Sequencer(can_replay=True)
    live(q, 0, 1, 2)
    q.verify()
    assert (q.wanted,) == (2,)
    assert replay(q, [2, 3]) == ["3"]
    assert (q.wanted,) == (None,)
    assert live(q, 3, 4) == ["4"]
    assert (q.restarts, q.duplicates) == (0, 1)


def test_an_engine_that_restarted_and_idles_is_found_out_by_verification() -> None:
    for published in (0, 2):
        q = Sequencer(can_replay=True)
        live(q, *range(10))
        q.verify()
        rounds = [replay(q, []) for _ in range(MAX_IDLE_ROUNDS)]
        assert rounds[-1] == ["complete"]
        assert (q.wanted,) == (0,)
        assert replay(q, list(range(published)), life=1) == [str(s) for s in range(published)]
        assert (q.wanted, q.restarts) == (None, 1)
        assert live(q, published, life=1) == [str(published)]


def test_an_engine_that_restarted_and_has_come_further_is_found_out_by_verification() -> None:
    q = Sequencer(can_replay=True)
    live(q, 0, 1, 2)
    q.verify()
    assert replay(q, [2, 3, 4], life=1)[0] == "complete"
    assert replay(q, [0, 1, 2, 3, 4], life=1) == ["0", "1", "2", "3", "4"]
    assert live(q, 5, life=1) == ["5"]
    assert (q.wanted, q.restarts) == (None, 1)


def test_a_verification_that_nobody_answers_is_given_up() -> None:
    q = Sequencer(can_replay=True)
    live(q, 0, 1)
    q.verify()
    for _ in range(20):
        assert replay(q, [], marker=False) == []
    assert (q.wanted, q.restarts) == (None, 0)


def test_a_mangled_payload_is_replaced_by_replay() -> None:
    q = Sequencer(can_replay=True)
    live(q, 0)
    assert told(q.live(1, b"\xc1")) == []
    assert live(q, 2) == []
    assert replay(q, [0, 1, 2]) == ["1", "2"]
    assert (q.mangled, q.restarts) == (1, 0)


def test_a_payload_that_replay_gives_mangled_too_is_a_gap_of_one() -> None:
    q = Sequencer(can_replay=True)
    live(q, 0)
    q.live(1, b"\xc1")
    live(q, 2)
    q.round_began()
    assert told(q.replay(1, b"\xc1")) == ["gap 1-1", "2"]


def test_a_mangled_payload_without_replay_is_a_gap_of_one() -> None:
    q = Sequencer(can_replay=False)
    live(q, 0)
    assert told(q.live(1, b"\xc1")) == ["gap 1-1"]
    assert live(q, 2) == ["2"]


def test_waiting_frames_are_bounded_in_bytes() -> None:
    q = Sequencer(can_replay=True, max_held_bytes=10 * len(one_block(100)))
    live(q, 0)
    steps = live(q, *range(2, 40))
    assert steps[0] == "gap 1-1"
    assert steps[1:] == [str(s) for s in range(2, 40)]


@pytest.mark.parametrize("seed", range(20))
def test_under_random_loss_every_batch_is_applied_once_in_order_or_reported_lost(seed: int) -> None:
    rng = random.Random(seed)
    can_replay = seed % 2 == 0
    q = Sequencer(can_replay=can_replay)
    steps: list[Step] = []
    for life in range(3):
        length = rng.randint(5, 60)
        for seq in range(length):
            if rng.random() < 0.8 or seq in (0, length - 1):
                steps += q.live(seq, one_block(seq, life) if rng.random() < 0.95 else b"\xc1")
            while q.wanted is not None and rng.random() < 0.5:
                q.round_began()
                for old in range(q.wanted, seq + 1):
                    if rng.random() < 0.6:
                        steps += q.replay(old, one_block(old, life))
                steps += q.round_ended(rng.random() < 0.5)
    while q.wanted is not None:
        q.round_began()
        steps += q.round_ended(False)
    expected = 0
    for step in steps:
        if isinstance(step, Epoch):
            expected = step.seq
        elif isinstance(step, Gap):
            assert step.first == expected <= step.last
            expected = step.last + 1
        else:
            assert step.seq == expected
            expected += 1
    assert q.held == 0
    assert sum(isinstance(s, Epoch) for s in steps) == 3
