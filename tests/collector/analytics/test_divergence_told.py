"""From prompts to the table: a fleet in virtual time, whose router's records the collector reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from collector.analytics.attributed import Attributed
from collector.analytics.divergence import ContentIndex, Divergence
from collector.fold import Fold
from collector.residency import Residency
from schemas.stream.base import StoredRecord
from schemas.tables.losses import DIVERGENCE
from simulator.asks import Flow, ask_of_tokens, one
from simulator.fleet import START_S, Fleet, FleetSpec
from simulator.virtual_worker import EngineSpec

RNG = np.random.default_rng(1)
BLOCK = 16


def text(n: int) -> Any:
    return RNG.integers(0, 100_000, n).astype(np.uint32)


def asked(at_s: float, tokens: Any, route: str, session: str) -> Flow:
    return one(START_S + at_s, ask_of_tokens(tokens, text(5), BLOCK, "sim", route=route, template=None, session_id=session))


def told(flows: list[Flow]) -> list[Attributed]:
    """Plays them on two workers; every second the collector takes what there is."""
    fold = Fold(Residency(1 << 16, 1 << 20, 1 << 12), contents=ContentIndex())
    out: list[Attributed] = []
    waiting: list[tuple[str, StoredRecord]] = []
    turn_s = START_S

    def turn(now_s: float) -> None:
        for topic, record in waiting:
            fold.take((topic, 0), topic, [record], now_s)
        waiting.clear()
        fold.settle(now_s, now_s, now_s)
        out.extend(fold.take_told())

    def sink(topic: str, key: bytes, value: bytes, time_s: float) -> None:
        nonlocal turn_s
        if time_s > turn_s + 1.0:
            turn(time_s - 0.01)
            turn_s = time_s
        waiting.append((topic, StoredRecord(len(waiting), int(time_s * 1000), key, value, ())))

    fleet = Fleet(FleetSpec(workers=2, engine=EngineSpec(block_size=BLOCK, capacity_blocks=5000)), sink)
    fleet.run(flows)
    turn(fleet.now_s + 10_000.0)
    return out


def test_a_time_at_token_37_of_one_routes_template_is_found_there_and_its_cost_with_it() -> None:
    head, system, plain = text(37), text(600), text(640)
    flows = []
    for i in range(30):
        clock = np.array([200_000 + i], np.uint32)
        flows.append(asked(2.0 * i, np.concatenate([head, clock, system, text(40)]), "dated", f"d{i}"))
        flows.append(asked(2.0 * i + 1.0, np.concatenate([plain, text(40)]), "plain", f"p{i}"))
    analysis = Divergence()
    analysis.take(told(flows))
    names = [c.name for c in DIVERGENCE.columns]
    rows = [dict(zip(names, row, strict=True)) for row in analysis.live()["divergence"]]
    (plain_row,) = [r for r in rows if r["route"] == "plain"]
    assert (plain_row["requests"], plain_row["all_requests"], plain_row["diverged_tokens"]) == (0, 30, 0)
    (dated,) = [r for r in rows if r["route"] == "dated"]
    assert (dated["depth_from"], dated["depth_to"], dated["requests"], dated["all_requests"]) == (37, 38, 29, 30)
    assert 0.93 * 600 <= dated["diverged_tokens"] / 29 <= 600 + BLOCK
    assert dated["all_prompt_tokens"] == 30 * (37 + 1 + 600 + 40)
