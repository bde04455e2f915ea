"""Who held more, and whether it would have been cheaper."""

from __future__ import annotations

from typing import Any

import pytest

from collector.attribution.rivals import Rival, rivals_of
from schemas.requests import Candidate, Decision
from schemas.workers import Trust
from tests.collector.traffic import decision


def decided(*candidates: dict[str, Any], considered: int | None = None) -> Decision:
    listed = tuple(Candidate(worker=f"w{i}", rank=0, trust=Trust.EXACT, **c) for i, c in enumerate(candidates))
    return decision("q", 1.0, "w0", candidates=listed, workers_considered=considered)


def one(d: Decision, worker: str = "w1") -> Rival:
    (found,) = rivals_of(d, [(worker, 0, 4)])
    return found


@pytest.mark.parametrize(("theirs", "cheaper", "gain_s"), [(0.2, True, 0.3), (0.9, False, -0.4)])
def test_costs_of_the_policy_decide(theirs: float, cheaper: bool, gain_s: float) -> None:
    found = one(decided({"cost_s": 0.5}, {"cost_s": theirs}))
    assert found.cheaper == cheaper
    assert found.gain_s == pytest.approx(gain_s)


def test_without_costs_the_terms_that_they_are_made_of_decide() -> None:
    mine = {"queue_s": 1.0, "prefill_s": 0.1, "load_s": 0.0, "decode_s": 0.2}
    found = one(decided(mine, {"queue_s": 0.0, "prefill_s": 0.5, "load_s": 0.05, "decode_s": 0.0}))
    assert found.cheaper
    assert found.gain_s == pytest.approx(0.25)


def test_who_could_not_be_chosen_was_no_cheaper_choice() -> None:
    assert one(decided({"cost_s": 0.5}, {"cost_s": 0.1, "allowed": False})) == Rival("w1", 0, 4, False, None)


def test_a_holder_that_nothing_is_told_of_would_have_computed_less() -> None:
    assert one(decided({"cost_s": 0.5}), "w9") == Rival("w9", 0, 4, True, None)


def test_a_holder_that_is_not_among_the_best_is_dearer_than_all_of_them() -> None:
    assert not one(decided({"cost_s": 0.5}, {"cost_s": 0.6}, considered=9), "w9").cheaper
    assert one(decided({"cost_s": 0.5}, {"cost_s": 0.4}, considered=9), "w9").cheaper
    assert one(decided({"cost_s": 0.5}, {"cost_s": 0.6}, considered=2), "w9").cheaper, "the router did not know it"


def test_of_two_the_one_with_more_blocks_and_more_gain_makes_the_other_superfluous() -> None:
    d = decided({"cost_s": 0.5}, {"cost_s": 0.1}, {"cost_s": 0.2}, {"cost_s": 0.7})
    found = rivals_of(d, [("w1", 0, 4), ("w2", 0, 4), ("w3", 0, 9)])
    assert [(r.worker, r.blocks, r.cheaper) for r in found] == [("w3", 9, False), ("w1", 4, True)]


def test_who_holds_nothing_is_no_rival() -> None:
    assert rivals_of(decided({"cost_s": 0.5}, {"cost_s": 0.1}), [("w1", 0, 0)]) == ()
