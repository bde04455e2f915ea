"""Reuse curves: block references a second, what `take` costs a request, how wrong curves are beyond the memory budget, and checkpoints.

    python -m bench.bench_reuse

Needs the public traces (WARMWATCH_TRACES, by default ../shared/data). Progress goes to stderr; the last line of stdout is one JSON object,
also kept under bench/results/. Errors are of hit_blocks / prompt_blocks against the exact curve at the capacities beyond what is exact
with that budget: of the whole trace (windows of 300 s added up), and the share of windows and points that are within their error column.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import describe_machine, write_result
from collector.analytics.attributed import WINDOW_S, Attributed
from collector.analytics.reuse import GRID, ReuseCurves
from collector.analytics.reuse_histogram import ENDLESS, ReuseHistogram
from collector.analytics.stack_distance import StackDistances
from schemas.block_hash import U64
from simulator.traces import AgentSession, claude_code, mooncake

TRACES = Path(os.environ.get("WARMWATCH_TRACES", Path(__file__).parents[2] / "shared" / "data"))
NO_LIFETIMES = np.zeros(0, np.int64)
CAPACITIES = np.concatenate((GRID, [ENDLESS]))
BLOCKS = 2048  # of a request for the cost of `take`: 32k tokens in blocks of 16
TARGET_US = 400.0


@dataclass(frozen=True, slots=True)
class Trace:
    """requests: each call goes over (time, chain) anew."""

    name: str
    requests: Callable[[], Iterator[tuple[float, U64]]]
    budgets: tuple[int, ...]
    samples: int


def main() -> None:
    if not TRACES.exists():
        sys.exit(f"no public traces in {TRACES}: set WARMWATCH_TRACES")
    result: dict[str, Any] = {"benchmark": "reuse", "machine": describe_machine()}
    sessions = claude_code(TRACES / "kv-cache-tester-claude-code" / "claude_code_710.runs.jsonl.gz")
    result["references"] = _references(sessions)
    _say(result["references"])
    result["take"] = _take()
    _say(result["take"])
    result["beyond_the_budget"] = {}
    for t in (*(_mooncake(name) for name in ("conversation", "synthetic")), _fleet(sessions)):
        result["beyond_the_budget"][t.name] = _beyond(t)
    write_result("reuse", result)
    print(json.dumps(result))


def _references(sessions: list[AgentSession]) -> dict[str, Any]:
    """All references of the Claude Code trace in file order, and its ideal hits and their quantiles."""
    _warm()
    expected = json.loads((TRACES / "expected.json").read_text())["claude_code_710"]
    distances, counts = StackDistances(1 << 22), ReuseHistogram(NO_LIFETIMES)
    spent, cpu, references, slowest = 0.0, 0.0, 0, 0.0
    shares = []
    hit = asked = 0
    for session in sessions:
        own_hit = own = 0
        for turn in session.in_file_order():
            chain = turn.block_ids(session.base).astype(np.uint64)
            began, began_cpu = time.perf_counter(), time.process_time()
            own_hit += distances.use(chain, turn.at_s, session.block_size, counts) * session.block_size
            took = time.perf_counter() - began
            cpu += time.process_time() - began_cpu
            spent, slowest = spent + took, max(slowest, took)
            references += len(chain)
            own += turn.input_tokens
        shares.append(own_hit / own)
        hit, asked = hit + own_hit, asked + own
    quantiles = dict(zip(("min", "p25", "median", "p75", "max"), np.quantile(shares, [0, 0.25, 0.5, 0.75, 1]).tolist(), strict=True))
    quantiles = {name: round(q, 4) for name, q in (quantiles | {"mean": float(np.mean(shares))}).items()}
    ideal = round(hit / asked, 6)
    return {
        "references": references, "seconds": round(spent, 2), "cpu_seconds": round(cpu, 2), "slowest_request_ms": round(1000 * slowest, 1),
        "distinct": distances.blocks, "bytes_per_block": round(distances.held_bytes() / distances.blocks, 1),
        "ideal_token_hit": ideal, "per_conversation_hit": quantiles,
        "equal_to_reference": ideal == expected["ideal_token_hit_session_local"] and quantiles == expected["per_conversation_hit"],
    }  # fmt: skip


def _take() -> dict[str, Any]:
    """Microseconds of `take` for a request of 2,048 blocks, pool and worker together: 1,024 agents on 64 workers, budgets full, each
    turn 64 new blocks behind 1,984 known ones, and 1 turn in 16 a new agent in the place of an old one."""
    rng = np.random.default_rng(1)
    capacities: dict[tuple[str, str | None], dict[str, int]] = {("p", f"w{i}"): {"GPU": 30_000} for i in range(64)}
    capacities["p", None] = {"GPU": 64 * 30_000}
    curves = ReuseCurves(lambda: capacities)
    fresh = 1
    chains: list[U64] = []
    system = np.arange(1 << 50, (1 << 50) + 256, dtype=np.uint64)
    took = []
    requests = 12_000
    for i in range(requests):
        agent = int(rng.integers(1024))
        if agent >= len(chains) or rng.random() < 1 / 16:
            chain = np.concatenate((system, np.arange(fresh, fresh + BLOCKS - len(system), dtype=np.uint64)))
            fresh += BLOCKS
            if agent >= len(chains):
                agent = len(chains)
                chains.append(chain)
        else:
            keep = BLOCKS - 64
            chain = np.concatenate((chains[agent][:keep], np.arange(fresh, fresh + 64, dtype=np.uint64)))
            fresh += 64
        chains[agent] = chain
        one = [_request(chain, 1_790_000_000 + i * 0.1, f"w{agent % 64}")]
        began = time.process_time()
        curves.take(one)
        took.append(1e6 * (time.process_time() - began))
        if i % 3000 == 2999:
            curves.close(1_790_000_000 + i * 0.1 - 60)
    last = np.array(took[requests // 2 :])
    began = time.process_time()
    rows = curves.live()["reuse_curves"]
    read_ms = 1000 * (time.process_time() - began)
    began = time.process_time()
    curves.live()
    again_ms = 1000 * (time.process_time() - began)
    began = time.process_time()
    saved = curves.save()
    save_ms = 1000 * (time.process_time() - began)
    began = time.process_time()
    ReuseCurves(dict).load(saved)
    load_ms = 1000 * (time.process_time() - began)
    return {
        "blocks": BLOCKS, "workers": 64, "target_us": TARGET_US, "mean_us": round(float(last.mean()), 1),
        "p50_us": round(float(np.median(last)), 1), "p99_us": round(float(np.quantile(last, 0.99)), 1),
        "max_us": round(float(last.max()), 1), "slowest_ever_ms": round(max(took[1:]) / 1000, 1),
        "held_mb": round(curves.held_bytes() / 1e6, 1), "rows": len(rows), "read_all_ms": round(read_ms, 1),
        "read_unchanged_ms": round(again_ms, 1), "save_ms": round(save_ms, 1), "load_ms": round(load_ms, 1),
        "saved_mb": round(sum(a.nbytes for a in saved.values()) / 1e6, 1),
    }  # fmt: skip


def _beyond(t: Trace) -> dict[str, Any]:
    exact, blocks = _windows(t, 1 << 23)
    truth = {start: histogram.curve(CAPACITIES).blocks for start, histogram in exact.items()}
    out: dict[str, Any] = {}
    for budget in t.budgets:
        means, largest, columns, within = [], [], [], []
        for sample in range(t.samples):
            curves = {start: histogram.curve(CAPACITIES) for start, histogram in _windows(t, budget, sample)[0].items()}
            off = np.array([c.blocks - truth[start] for start, c in curves.items()])
            column = np.array([c.error_blocks for c in curves.values()])
            beyond = np.array([c.sampled for c in curves.values()])
            whole = np.abs(off.sum(axis=0))[beyond.any(axis=0)] / blocks
            means.append(whole.mean())
            largest.append(whole.max())
            columns.append(column.sum(axis=0)[beyond.any(axis=0)].mean() / blocks)
            within.append(np.mean((np.abs(off) <= column)[beyond]))
        out[str(budget)] = {
            "exact_to_blocks": budget // 2, "samples": t.samples, "mean_abs_error": _round(np.mean(means)),
            "worst_sample_mean_abs_error": _round(max(means)), "max_abs_error": _round(max(largest)),
            "mean_error_column": _round(np.mean(columns)), "windows_within_error_column": _round(np.mean(within)),
        }  # fmt: skip
        _say({t.name: {budget: out[str(budget)]}})
    return {"references": blocks, "windows": len(exact), "budgets": out}


def _windows(t: Trace, budget: int, sample: int = 0) -> tuple[dict[int, ReuseHistogram], int]:
    """Histograms of windows of 300 s, and the number of references. Each sample gives the blocks other names."""
    windows, blocks = dict[int, ReuseHistogram](), 0
    distances = StackDistances(budget)
    salt = np.uint64(sample << 44)
    for at_s, chain in t.requests():
        distances.use(chain ^ salt, at_s, 1, windows.setdefault(int(at_s // WINDOW_S), ReuseHistogram(NO_LIFETIMES)))
        blocks += len(chain)
    return windows, blocks


def _mooncake(name: str) -> Trace:
    requests = [(r.arrival_s, r.block_ids.astype(np.uint64)) for r in mooncake(TRACES / "mooncake-fast25" / f"{name}_trace.jsonl.gz")]
    budgets = (1000, 5000, 20_000, 80_000) if name == "conversation" else (1000, 5000, 20_000)
    return Trace(f"mooncake_{name}", lambda: iter(requests), budgets, samples=8)


def _fleet(sessions: list[AgentSession]) -> Trace:
    """Sessions of the Claude Code trace begun at random within a day."""
    rng = np.random.default_rng(1)
    turns = []
    for session in sessions:
        begun_s = rng.uniform(0, 86_400)
        turns += [(begun_s + turn.at_s, session.base, turn) for turn in session.in_file_order()]
    turns.sort(key=lambda t: t[0])
    return Trace(
        "claude_code_fleet",
        lambda: ((at_s, turn.block_ids(base).astype(np.uint64)) for at_s, base, turn in turns),
        (20_000, 200_000, 1_000_000),
        samples=1,
    )


def _request(chain: U64, at_s: float, worker: str) -> Attributed:
    none8, none32 = np.zeros(0, np.uint8), np.zeros(0, np.float32)
    return Attributed(
        request_id="r", started_s=at_s, prefill_s=at_s, ended_s=at_s, pool="p", worker=worker, rank=0, model="m", route="r", tenant="t",
        template=None, session_id=None, policy=None, block_size=16, prompt_tokens=16 * len(chain) + 5, completion_tokens=None,
        hit_tokens=0, chain=chain, causes=none8, gone_s=none32, idle_s=none32, run_causes=none8, run_tokens=np.zeros(0, np.uint32),
        run_seconds=np.zeros(0), diverged_at=None, ttft_s=None, engine_queue_s=None, engine_ttft_s=None,
    )  # fmt: skip


def _warm() -> None:
    distances, counts = StackDistances(16), ReuseHistogram(NO_LIFETIMES)
    for i in range(4):
        distances.use(np.arange(i * 600, i * 600 + 600, dtype=np.uint64), 0.0, 1, counts)
    StackDistances.loaded(*distances.save())


def _round(value: float) -> float:
    return round(float(value), 5)


def _say(what: object) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
