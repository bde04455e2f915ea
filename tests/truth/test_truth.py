"""The collector against the simulator's full knowledge: each request's hit, each block's cause, the ladder; and all tokens add up."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.public_traces import trace
from tests.truth.cases import SCENARIOS, play
from tests.truth.fed import Comparison, Feeder, compared
from tests.truth.from_traces import CASES


def holds(c: Comparison) -> None:
    assert c.requests and c.blocks
    assert c.not_told == []
    assert c.lost_tokens == []
    assert c.hits == []
    assert c.causes[:20] == []
    assert c.ladders[:20] == []


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_collector_tells_each_blocks_cause_as_it_was(name: str) -> None:
    c = play(SCENARIOS[name])
    holds(c)
    missing = set(SCENARIOS[name].happens.split()) - {cause.label for cause in c.tokens}
    assert not missing, "the scenario brings about what it is named for"


@pytest.mark.traces
@pytest.mark.parametrize(("name", "policy"), list(zip(CASES, itertools.cycle(["round_robin", "cost"]), strict=False)))
def test_the_beginning_of_a_public_trace_is_told_as_it_was(name: str, policy: str) -> None:
    case = CASES[name]
    flows = case.flows(trace(case.file), case.part)
    holds(compared(replace(case.spec, policy=policy), flows, (), Feeder()))
