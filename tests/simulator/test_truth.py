"""The judge on fleets so small that anyone can say why a block was computed again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schemas.causes import Cause
from simulator.asks import Ask, ask_of_ids, ask_of_tokens, one
from simulator.fleet import START_S, Clear, Fleet, FleetSpec, Incident, Lag, LoseFrames, Restart, Usage, UsePolicy
from simulator.truth import History, Ladder, Truth
from simulator.virtual_worker import EngineSpec

S = START_S
BLOCK = 16


def ask(number: int, blocks: int, more_tokens: int = 4) -> Ask:
    return ask_of_ids(np.arange(blocks) + 1000 * number, blocks * BLOCK + more_tokens, 1, BLOCK, number)


def words(*parts: tuple[int, int], **more: Any) -> Ask:
    """A prompt of parts (content, tokens)."""
    tokens = np.concatenate([np.random.default_rng(content).integers(0, 9999, n).astype(np.uint32) for content, n in parts])
    return ask_of_tokens(tokens, np.zeros(1, np.uint32), BLOCK, "sim", **more)


def judged(asks: list[tuple[float, Ask]], *incidents: Incident, capacity: int = 100, **spec: Any) -> list[Truth]:
    history = History(BLOCK)
    engine = EngineSpec(capacity_blocks=capacity)
    fleet = Fleet(FleetSpec(**{"workers": 1, "policy": "round_robin", "engine": engine} | spec), lambda *_: None, history)
    fleet.run([one(S + at_s, a) for at_s, a in asks], incidents)
    return [history.truth(request_id) for request_id in history.asked]


def causes(truth: Truth) -> str:
    """Runs, such as "hit 3, first_seen 2"."""
    runs: list[list[Any]] = []
    for cause in truth.blocks:
        if runs and runs[-1][0] == cause:
            runs[-1][1] += 1
        else:
            runs.append([cause, 1])
    return ", ".join(f"{cause.label} {n}" for cause, n in runs)


def test_new_then_hit_then_evicted() -> None:
    first, again, _, late = judged([(0, ask(1, 5)), (5, ask(1, 5)), (10, ask(2, 19)), (15, ask(1, 5))], capacity=20)
    assert (causes(first), first.hit_tokens, first.tail, first.tail_tokens) == ("first_seen 5", 0, Cause.GRANULARITY, 4)
    assert (causes(again), again.ladder) == ("hit 5", Ladder(80, 80, 80, 80))
    assert causes(late) == "evicted 5"
    assert late.ladder == Ladder(80, 0, 0, 0)


@pytest.mark.parametrize("incident", [Restart(S + 5, "w0"), Clear(S + 5, "w0")])
def test_cleared(incident: Incident) -> None:
    assert causes(judged([(0, ask(1, 5)), (10, ask(1, 5))], incident)[1]) == "cleared 5"


def test_the_last_block_of_whole_blocks_and_prompts_shorter_than_one() -> None:
    _, again, short = judged([(0, ask(1, 5, 0)), (5, ask(1, 5, 0)), (9, ask(2, 0, 7))])
    assert causes(again) == "hit 4, granularity 1"
    assert (short.blocks, short.tail, short.tail_tokens, short.hit_tokens) == ((), Cause.TOO_SHORT, 7, 0)


def test_another_worker_holds_it_or_is_computing_it() -> None:
    _, held = judged([(0, ask(1, 5)), (5, ask(1, 5))], workers=2)
    assert causes(held) == "misrouted 5"
    _, _, busy = judged([(0, ask(1, 5)), (5, ask(2, 900)), (5.001, ask(1, 5))], UsePolicy(S + 4, "cost"), workers=2, capacity=1000)
    assert causes(busy) in ("load_bypass 5", "hit 5")
    _, sibling = judged([(0, ask(1, 500)), (0.01, ask(1, 500))], workers=2, capacity=1000)
    assert causes(sibling) == "in_flight 500"


def test_only_others_ever_held_it() -> None:
    *_, late = judged([(0, ask(1, 5)), (2, ask(2, 5)), (4, ask(3, 19)), (6, ask(1, 5))], workers=2, capacity=20)
    assert causes(late) == "evicted_elsewhere 5"


def test_a_stale_view_is_told_by_the_clock_of_the_index() -> None:
    stale = judged([(0, ask(1, 5)), (5, ask(2, 19)), (7, ask(1, 5))], Lag(S - 1, 4.0), capacity=20)[-1]
    assert causes(stale) == "stale_view 5"


def test_the_same_content_after_another_beginning_or_in_another_namespace() -> None:
    _, moved, _ = judged([(0, words((1, 160), (2, 8))), (5, words((3, 16), (1, 160), (2, 8))), (9, words((4, 64)))])
    assert causes(moved) == "first_seen 1, diverged 10"
    _, shifted = judged([(0, words((1, 320))), (5, words((3, 5), (1, 320)))])
    assert set(shifted.blocks[3:]) == {Cause.DIVERGED}
    _, other = judged([(0, words((1, 160))), (5, words((1, 160), lora="x"))])
    assert causes(other) == "namespace 10"


def test_what_shares_less_than_a_block_with_an_earlier_prompt_is_too_short() -> None:
    _, second = judged([(0, words((1, 12), (2, 52))), (5, words((1, 12), (3, 52)))])
    assert causes(second) == "too_short 1, first_seen 3"


def test_lost_frames_and_missing_reports_are_unexplained() -> None:
    asks = [(0.0, ask(1, 5)), (5.0, ask(2, 5)), (10.0, ask(1, 5)), (15.0, ask(3, 5))]
    known = judged(asks, LoseFrames(S + 4, "w0", 1))
    assert [causes(t) for t in known] == ["first_seen 5", "unexplained 5", "hit 5", "unexplained 5"]
    assert known[3].ladder == Ladder(None, None, None, 0)
    unknown = judged(asks, LoseFrames(S + 4, "w0", 1), Usage(S - 1, False))
    assert [t.hit_tokens for t in unknown] == [0, None, None, None]
    assert unknown[3].tokens(BLOCK) == {Cause.UNEXPLAINED: 84}
    failed = judged([(0, ask(1, 50))], Restart(S + 0.01, "w0"))[0]
    assert (failed.hit_tokens, causes(failed)) == (None, "unexplained 50")


def test_a_request_that_has_not_ended_cannot_be_judged() -> None:
    history = History(BLOCK)
    fleet = Fleet(FleetSpec(workers=1), lambda *_: None, history)
    fleet.run([one(S, ask(1, 50))], until_s=S + 0.001)
    with pytest.raises(ValueError, match="v0 has not ended"):
        history.truth("v0")
