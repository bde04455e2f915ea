"""The public traces as traffic of a fleet in virtual time, whole or in part, for the comparison with the collector."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from simulator.asks import Flow, claude_code_flows, mooncake_flows, ragpulse_flows, text_flows
from simulator.fleet import START_S, FleetSpec
from simulator.traces import claude_code, lmcache_agents, mooncake, ragpulse
from simulator.virtual_worker import EngineSpec

S = START_S


@dataclass(frozen=True, slots=True)
class TraceCase:
    """file: below the traces' folder. flows(path, n): its first n requests (Claude Code: n sessions, evenly over the file); None: all.
    part: so many for a run that takes seconds. whole: for a run in full; None: all. The caches are small enough to evict."""

    file: str
    spec: FleetSpec
    flows: Callable[[Path, int | None], Iterator[Flow]]
    part: int
    whole: int | None = None


def spec(block: int, capacity: int, workers: int = 4, **more: object) -> FleetSpec:
    engine = {"block_size": block, "capacity_blocks": capacity} | more
    return FleetSpec(workers=workers, engine=EngineSpec(**engine))  # type: ignore[arg-type]


def _mooncake(path: Path, n: int | None) -> Iterator[Flow]:
    return mooncake_flows(mooncake(path)[:n], S)


def _claude(path: Path, n: int | None) -> Iterator[Flow]:
    """Sessions spread over the file, started at random within half an hour."""
    sessions = claude_code(path)
    step = 1 if n is None else len(sessions) // n
    chosen = sessions[::step][:n]
    rng = random.Random(1)
    return claude_code_flows(chosen, sorted(S + rng.random() * 1800 for _ in chosen))


def _rag(path: Path, n: int | None) -> Iterator[Flow]:
    return ragpulse_flows(sorted(ragpulse(path)[:n], key=lambda r: r.arrival_s), S, "sim", faster=60.0)


def _texts(folder: str) -> Callable[[Path, int | None], Iterator[Flow]]:
    return lambda path, n: text_flows(lmcache_agents(path, (folder,))[folder][:n], S, "sim")


LMCACHE = "lmcache-agent-trace/lmcache_agent_trace.tar.xz"
CASES = {
    "mooncake conversation": TraceCase(
        "mooncake-fast25/conversation_trace.jsonl.gz", spec(512, 1500, 8, one_at_a_time=True), _mooncake, 300
    ),
    "mooncake synthetic": TraceCase("mooncake-fast25/synthetic_trace.jsonl.gz", spec(512, 1500, 8), _mooncake, 150),
    "claude code": TraceCase("kv-cache-tester-claude-code/claude_code_710.runs.jsonl.gz", spec(64, 12_000), _claude, 1, 10),
    "ragpulse": TraceCase("ragpulse", spec(64, 1000), _rag, 70),
    "lmcache miniswe": TraceCase(LMCACHE, spec(32, 2000), _texts("miniswe"), 30),
    "lmcache magagent": TraceCase(LMCACHE, spec(32, 2000), _texts("magagent"), 30),
    "lmcache taubench": TraceCase(LMCACHE, spec(32, 300), _texts("taubench"), 60),
}
