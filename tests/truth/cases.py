"""Scenarios in which the collector is held against the truth: each incident alone, and all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from simulator.agents import AgentTraffic, Namespace, Stamp
from simulator.fleet import (
    START_S,
    Capacity,
    Clear,
    FleetSpec,
    Incident,
    Join,
    Lag,
    Leave,
    LoseFrames,
    Restart,
    Usage,
    UsePolicy,
)
from simulator.virtual_worker import EngineSpec
from tests.truth.fed import Comparison, Feeder, compared

S = START_S
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Scenario:
    """Agent sessions on three workers. happens: causes that must be there, so that the comparison is no empty one."""

    incidents: Sequence[Incident] = ()
    happens: str = ""
    traffic: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)


def play(scenario: Scenario, sessions: int = 8, seed: int = 1) -> Comparison:
    base = {"start_s": S, "spread_s": 60.0, "sessions": sessions, "think_s": 4.0, "scale": 0.05, "turns": (4, 12), "seed": seed}
    capacity = round(300 * (sessions / 8) ** 0.5)
    engine = EngineSpec(**{"block_size": BLOCK, "capacity_blocks": capacity} | scenario.engine)
    spec = FleetSpec(**{"workers": 3, "engine": engine, "seed": seed} | scenario.spec)
    return compared(spec, AgentTraffic(**base | scenario.traffic).flows(), scenario.incidents, Feeder())


SCENARIOS: dict[str, Scenario] = {
    "nothing happens": Scenario(happens="first_seen evicted granularity", engine={"capacity_blocks": 200}),
    "a worker restarts": Scenario([Restart(S + 50, "w0"), Restart(S + 51, "w1")], "cleared"),
    "a cache is cleared": Scenario([Clear(S + 40, "w1"), Clear(S + 45, "w2")], "cleared"),
    "a cache shrinks": Scenario([Capacity(S + 40, "w2", 130), Capacity(S + 80, "w2", 300)], "evicted"),
    "workers join and leave": Scenario([Join(S + 40, "w3"), Join(S + 41, "w4"), Leave(S + 60, "w0")], "load_bypass"),
    "round robin and back": Scenario([UsePolicy(S + 30, "round_robin"), UsePolicy(S + 60, "cost")], "misrouted evicted_elsewhere"),
    "a timestamp of fixed width": Scenario(happens="diverged", traffic={"stamps": (Stamp(S + 30, "agent-0"),)}),
    "a timestamp of any width": Scenario(happens="diverged", traffic={"stamps": (Stamp(S + 30, "agent-0", width=0),)}),
    "another adapter": Scenario(happens="namespace", traffic={"namespaces": (Namespace(S + 30, "tenant-0", lora="x"),)}),
    "another salt": Scenario(happens="namespace", traffic={"namespaces": (Namespace(S + 30, "tenant-0", salt="x"),)}),
    "frames are lost": Scenario([LoseFrames(S + 40, "w0", 3), Restart(S + 90, "w0"), LoseFrames(S + 50, "w1", 1)], "unexplained"),
    "no usage is reported": Scenario([Usage(S + 30, False), Usage(S + 60, True)], "first_seen"),
    "nothing is reported and frames are lost": Scenario([Usage(S, False), LoseFrames(S + 40, "w0", 2), Clear(S + 70, "w0")], "unexplained"),
    "the index lags": Scenario([Lag(S + 10, 4.0)], "stale_view", engine={"capacity_blocks": 150}),
    "requests are preempted": Scenario(happens="evicted", traffic={"answer_tokens": (200, 600)}, engine={"capacity_blocks": 150}),
    "prefills in chunks": Scenario(
        happens="in_flight", traffic={"scale": 0.1, "fan_out": 0.5}, spec={"policy": "round_robin"},
        engine={"batch_tokens": 128, "capacity_blocks": 1000},
    ),
    "siblings by round robin": Scenario(happens="in_flight misrouted", traffic={"fan_out": 0.6}, spec={"policy": "round_robin"}),
    "one prefill at a time": Scenario(
        happens="in_flight", traffic={"fan_out": 0.6}, engine={"one_at_a_time": True}, spec={"speculative": False}
    ),
    "all together": Scenario(
        [
            Lag(S + 5, 1.0), Restart(S + 20, "w0"), Clear(S + 25, "w1"), Capacity(S + 30, "w2", 200), Join(S + 35, "w3"),
            UsePolicy(S + 40, "round_robin"), LoseFrames(S + 45, "w1", 2), Usage(S + 50, False), UsePolicy(S + 60, "cost"),
            Usage(S + 65, True), Restart(S + 70, "w1"), Leave(S + 75, "w0"), Capacity(S + 80, "w2", 300),
        ],
        "first_seen diverged namespace cleared evicted unexplained misrouted",
        {
            "stamps": (Stamp(S + 30, "agent-0"), Stamp(S + 40, "agent-1", width=0)), "fan_out": 0.3,
            "namespaces": (Namespace(S + 50, "tenant-1", lora="x"), Namespace(S + 60, "tenant-0", salt="y")),
        },
    ),
}  # fmt: skip
