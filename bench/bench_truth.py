"""The collector's word on every block of every request against the simulator's full knowledge: how many were compared, which differ.

    python -m bench.bench_truth [--traces FOLDER] [--only NAME ...] [--seeds 5]

Scenarios: each incident alone and all together (tests/truth/cases.py), with several seeds. Traces: whole, by the cost policy and by round
robin; of the Claude Code sessions every 71st, since the truth is told in plain Python. What differs is counted by kind (truth told as ...).
After lost frames some must: what nobody heard of cannot be told. Progress goes to stderr; the last line of stdout is one JSON object, also
kept under bench/results/, where --only replaces what it names.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.machine import RESULTS, describe_machine, write_result
from tests.truth.cases import SCENARIOS, play
from tests.truth.fed import Comparison, Feeder, compared
from tests.truth.from_traces import CASES

DEFAULT = Path(__file__).parents[2] / "shared" / "data"
POLICIES = ("cost", "round_robin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path(os.environ.get("WARMWATCH_TRACES", DEFAULT)))
    parser.add_argument("--only", nargs="*", help="names of scenarios and traces, or parts of them")
    parser.add_argument("--seeds", type=int, default=5, help="of each scenario")
    asked = parser.parse_args()
    kept = RESULTS / "truth.json"
    out: dict[str, Any] = {"scenarios": {}, "traces": {}} if asked.only is None or not kept.exists() else json.loads(kept.read_text())
    for name, scenario in SCENARIOS.items():
        if wanted(name, asked.only):
            runs = [partial(play, scenario, seed=seed) for seed in range(1, asked.seeds + 1)]
            out["scenarios"][name] = added([timed(name, run) for run in runs])
            keep(out)
    for name, case in CASES.items():
        path = asked.traces / case.file
        if not wanted(name, asked.only):
            continue
        if not path.exists():
            say(f"{name}: skipped, no {path}")
            continue
        for policy in POLICIES:
            label = f"{name}, {policy}"
            run = partial(
                compared, replace(case.spec, policy=policy), case.flows(path, case.whole), (), Feeder(1 << 18, 1 << 18, 1 << 22, 5_000_000)
            )
            out["traces"][label] = added([timed(label, run)])
            keep(out)
    print(json.dumps(out))


def keep(out: dict[str, Any]) -> None:
    """After each part: a run that is stopped has not been for nothing."""
    out["machine"] = describe_machine()
    out["all"] = {
        key: sum(part[key] for kind in ("scenarios", "traces") for part in out[kind].values())
        for key in ("requests", "blocks", "not_told", "hits_that_differ", "blocks_that_deviate", "not_conserved")
    }
    write_result("truth", out)


def wanted(name: str, only: list[str] | None) -> bool:
    return only is None or any(part in name for part in only)


def timed(name: str, run: Callable[[], Comparison]) -> dict[str, Any]:
    start_s = time.perf_counter()
    found = run().summary() | {"seconds": round(time.perf_counter() - start_s, 1)}
    say(f"{name}: {found['blocks']} blocks, {found['blocks_that_deviate']} deviate {found['deviations'] or ''} ({found['seconds']} s)")
    return found


def added(parts: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, first in parts[0].items():
        if isinstance(first, dict):
            out[key] = dict(sum((Counter(p[key]) for p in parts), Counter()))
        else:
            out[key] = round(sum(p[key] for p in parts), 1)
    return out


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
