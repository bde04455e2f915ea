"""Halves of requests brought together: what is new, superseded, duplicate, late, and what has to be read again after a restart."""

from __future__ import annotations

from typing import Any

from collector.join import Join, Taken, predicted_tokens
from schemas.requests import Attempt, Decision
from tests.collector.traffic import decision, outcome, pack_hashes_of

DECIDED, ENDED = ("decisions", 0), ("outcomes", 0)
FAILED = Attempt(worker="w0", error="upstream", after_s=0.1)
CHAIN: dict[str, Any] = {"block_size": 16, "token_source": "exact", "prompt_tokens": 70}


def again(worker: str, time_s: float, attempts: int = 1, **more: Any) -> Decision:
    return decision("q", time_s, worker, attempts=(FAILED,) * attempts, **more)


def test_the_decision_with_more_attempts_holds_wherever_the_request_stands() -> None:
    for outcome_first in (False, True):
        join = Join()
        assert join.decision(decision("q", 10.0, chain=pack_hashes_of([1, 2]), **CHAIN), (DECIDED, 4), 10.0) is Taken.NEW
        if outcome_first:
            assert join.outcome(outcome("q", 12.0, "w1", retries=1), (ENDED, 7), 12.0) is Taken.NEW
            assert not join.open["q"].last_decision_known
        before = join.open["q"].running
        assert join.decision(again("w1", 11.0, chain=pack_hashes_of([1, 2, 3]), **CHAIN), (DECIDED, 9), 11.0) is Taken.SUPERSEDED
        if not outcome_first:
            join.outcome(outcome("q", 12.0, "w1", retries=1), (ENDED, 7), 12.0)
        r = join.open["q"]
        assert (r.worker, r.started_s, r.chain_ends) == (("p", "w1"), 11.0, (3, 1, 3))
        assert r.last_decision_known
        assert r.running is not None
        assert r.running is not before
        assert (r.running.started_s, r.running.ended_s, r.running.own) == (11.0, 12.0, None)
        assert join.waiting() == {DECIDED: [9 << 1], ENDED: [7 << 1]}


def test_a_forecast_that_the_router_says_it_has_not_is_not_made_up_from_overlap() -> None:
    assert predicted_tokens(decision("q", 10.0, **CHAIN)) == 16  # a router that does not know the field
    assert predicted_tokens(decision("q", 10.0, predicted_tokens=32, **CHAIN)) == 32
    assert predicted_tokens(decision("q", 10.0, predicted_tokens=None, **CHAIN)) is None
    assert predicted_tokens(decision("q", 10.0, predicted_tokens=None, **{**CHAIN, "token_source": "text"})) == 16  # its guess
    unknown = decision("q", 10.0).candidates[0].model_copy(update={"overlap_tokens": None})
    assert predicted_tokens(decision("q", 10.0, candidates=(unknown,), **CHAIN)) is None


def test_a_decision_without_more_attempts_is_a_duplicate_whatever_else_it_says() -> None:
    join = Join()
    join.decision(again("w1", 11.0, attempts=2), (DECIDED, 1), 11.0)
    assert join.decision(again("w2", 12.0, attempts=2), (DECIDED, 2), 12.0) is Taken.DUPLICATE
    assert join.decision(decision("q", 13.0), (DECIDED, 3), 13.0) is Taken.DUPLICATE
    assert join.open["q"].worker == ("p", "w1")
    assert join.waiting() == {DECIDED: [1 << 1]}


def test_a_superseded_prompt_of_unknown_blocks_forgets_the_blocks_of_before() -> None:
    join = Join()
    join.decision(decision("q", 10.0, chain=pack_hashes_of([1, 2]), **CHAIN), (DECIDED, 4), 10.0)
    join.decision(again("w1", 11.0), (DECIDED, 5), 11.0)
    assert (join.open["q"].running, join.open["q"].chain_ends) == (None, None)


def test_the_rank_is_the_one_that_answered_else_the_last_one_chosen() -> None:
    join = Join()

    def rank() -> int | None:
        return join.open["q"].rank

    join.decision(decision("q", 10.0), (DECIDED, 1), 10.0)
    join.open["q"].rank = 3  # as events told
    join.decision(again("w1", 11.0).model_copy(update={"rank": None}), (DECIDED, 2), 11.0)
    assert rank() is None
    join.outcome(outcome("q", 12.0, "w1").model_copy(update={"rank": 5}), (ENDED, 1), 12.0)
    join.decision(again("w2", 13.0, attempts=2), (DECIDED, 3), 13.0)
    assert rank() == 5


def test_what_open_requests_hold_is_known_and_the_oldest_have_to_go_first() -> None:
    join = Join()
    long = pack_hashes_of(range(1, 10_001))
    for i in (3, 0, 4, 2, 1):
        join.decision(decision(f"q{i}", 10.0 + i, chain=long, **CHAIN), (DECIDED, i), 10.0)
    one = join.held_bytes // 5
    assert 160_000 < one < 180_000  # the chain is held twice: here, and to find out who computes the same
    assert [r.request_id for r in join.beyond(3 * one)] == ["q0", "q1", "q2"]
    assert join.beyond(join.held_bytes) == []
    join.decision(decision("q0", 11.0, "w1", attempts=(FAILED,)), (DECIDED, 9), 11.0)
    assert join.held_bytes == 5 * one - 160_000
    for r in list(join.open.values()):
        join.close(r)
    assert join.held_bytes == 0


def test_after_closing_the_same_half_is_a_duplicate_and_the_missing_one_is_late() -> None:
    join = Join(remembered=2)
    join.decision(decision("q", 10.0), (DECIDED, 1), 10.0)
    join.close(join.open["q"])
    assert join.decision(decision("q", 10.0), (DECIDED, 2), 10.0) is Taken.DUPLICATE
    assert join.outcome(outcome("q", 10.0), (ENDED, 2), 10.0) is Taken.LATE
    for name in ("a", "b"):
        join.remember(name, False, False)
    assert join.outcome(outcome("q", 10.0), (ENDED, 3), 10.0) is Taken.NEW
