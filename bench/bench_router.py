"""Our router beside sglang-router and vllm-router: requests a second, CPU time a request, time to first byte, in one run.

    python -m bench.bench_router [--quick] [--repeats 3] [--seconds 2]

One core has the router, the other the mock workers and the load generator (bench/load). Every repeat starts every router anew, in an
order drawn by lot, sends each prompt once, then measures every cell; a figure is the median of the repeats. "direct" is the same without
a router.

    prompts   agent sessions (agent_prompts.py), 1, 8 and 64 KB a request, the same for all
              new: the last message of every request is new, the rest was seen before    same: all was seen before
    answers   17 SSE chunks. burst: in two writes, the first chunk and the rest, so that the workers are not the limit
              paced: each chunk by itself, 2 ms apart, as an engine decodes
    clients   1 or 32 connections, the next request when the answer has ended

The peers route by prefix (`cache_aware`, their default) and, as their cheapest, by turn (`round_robin`). Ours runs with its default policy,
the model's tokenizer, an index fed from the stream, and writes its decisions and outcomes there. It also has the KV events and load records
of 8 workers to apply meanwhile; the peers have nothing of that kind to do. "by text" is ours without the tokenizer (`--tokens text`): it
knows prefixes by pieces of text that were sent before, which is what the peers do.

A table goes to stderr; the last line of stdout is one JSON object, also kept as bench/results/router.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.agent_prompts import AGENTS, PROMPTS, SESSIONS, TURNS, write_prompts
from bench.bridge_stand_in import BLOCKS_PER_RECORD, RECORDS_PER_S, BridgeStandIn
from bench.machine import describe_machine, write_result
from bench.servers import (
    PEERS,
    ROOT,
    ROUTER_CORE,
    WORKER_CORE,
    WORKERS,
    Load,
    Peer,
    Process,
    Warmwatch,
    Workers,
    ask,
    load_program,
    on_core,
    peers_python,
    process_stats,
    say,
)

SIZES_KB = (1, 8, 64)
OURS, OURS_BY_TEXT, DIRECT = "warmwatch", "warmwatch by text", "direct"
PEER_POLICIES = ("sglang-router cache_aware", "vllm-router cache_aware", "sglang-router round_robin", "vllm-router round_robin")
BY_TEXT = ("--tokens", "text")
BURST_WRITES, PACED_US = 2, 2000
WARM_S = 0.3


@dataclass(frozen=True)
class Cell:
    """One measurement of a router."""

    size_kb: int
    prompts: str  # new, same
    answers: str  # burst, paced
    connections: int

    @property
    def name(self) -> str:
        return f"{self.size_kb} KB, {self.prompts}, {self.answers}, c={self.connections}"


def cells(quick: bool, sizes: Sequence[int] = SIZES_KB) -> list[Cell]:
    kinds = [("new", "burst", 1), ("new", "burst", 32), ("new", "paced", 32)]
    kinds += [] if quick else [("same", "burst", 1), ("same", "burst", 32)]
    return [Cell(size, *kind) for size in sizes for kind in kinds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--quick", action="store_true", help="one repeat, a second a cell, prefix-aware policies and new prompts only; keeps no result"
    )
    parser.add_argument("--repeats", type=int, help="default 3")
    parser.add_argument("--seconds", type=float, help="of measuring a cell (default 2)")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="ROUTER",
        help=f"some of: {OURS}, {OURS_BY_TEXT}, {DIRECT}, {', '.join(PEER_POLICIES)}; keeps no result",
    )
    parser.add_argument("--kb", nargs="+", type=int, default=list(SIZES_KB), help="prompt sizes; other than 1 8 64 keeps no result")
    parser.add_argument("--tree", type=Path, default=ROOT, help="run our router from another checkout; keeps no result")
    parser.add_argument("--flags", default="", help="more flags for `warmwatch route`; keeps no result")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="our router under py-spy with 32 connections; writes what its functions take"
    )
    args = parser.parse_args()
    quick = args.quick
    repeats, seconds = args.repeats or (1 if quick else 3), args.seconds or (1.0 if quick else 2.0)
    names = args.only or [DIRECT, OURS, OURS_BY_TEXT, *(PEER_POLICIES[:2] if quick else PEER_POLICIES)]
    try:
        with on_core(WORKER_CORE), on_core(ROUTER_CORE):
            pass
    except OSError as e:
        raise SystemExit("bench-router needs two cores: one for the router, one for the workers and the load") from e
    for name in names:
        if name not in (OURS, OURS_BY_TEXT, DIRECT, *PEER_POLICIES):
            raise SystemExit(f"--only {name!r}: there is no such router")
    machine = describe_machine()
    with Bench(args.tree.resolve(), args.flags.split(), args.kb) as bench:
        if args.profile:
            bench.profile(args.profile, max(3.0, seconds))
            return
        runs: dict[str, list[Run]] = {name: [] for name in names}
        for repeat in range(repeats):
            for name in random.Random(repeat).sample(names, len(names)):
                say(f"repeat {repeat + 1} of {repeats}: {name}")
                runs[name].append(bench.run(name, cells(quick, args.kb), seconds))
    result = {"benchmark": "router", "machine": machine, **summary(runs, repeats, seconds)}
    say(table(result))
    if not (quick or args.only or args.flags) and tuple(args.kb) == SIZES_KB and args.tree == ROOT:
        write_result("router", result)
    print(json.dumps(result))


@dataclass(frozen=True)
class Run:
    """One router, started once."""

    version: str
    command: str
    cells: dict[str, dict[str, float]]
    peak_rss_mb: float
    others_cores: float  # of the machine, taken by processes that are not ours
    checks: dict[str, Any]


class Bench:
    """Workers, prompts and load generator; `run` starts a router among them."""

    def __init__(self, tree: Path, flags: Sequence[str], sizes: Sequence[int]) -> None:
        self._tree, self._flags, self._sizes = tree, flags, sizes
        self._stack = ExitStack()

    def __enter__(self) -> Bench:
        program = load_program()
        self._python = peers_python()
        self._load = Load(program)
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-router-")))
        self._prompts = {kb: self._folder / f"{kb}kb.jsonl" for kb in self._sizes}
        for kb, path in self._prompts.items():
            write_prompts(path, kb * 1024)
        self._workers = Workers(program, self._folder)
        self._stack.callback(self._workers.stop)
        self._first_body = self._prompts[self._sizes[0]].read_text().partition("\n")[0].encode()
        self._fresh = 1
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, name: str, todo: Sequence[Cell], seconds: float) -> Run:
        self._workers.answer_in(BURST_WRITES, 0)
        if name == DIRECT:
            found = self._measure(",".join(self._workers.addresses), None, todo, seconds)
            return Run("", "", found, 0.0, 0.0, {})
        folder = self._folder / f"run-{self._fresh}"
        folder.mkdir()
        with self._router(name, folder) as (router, bridges):
            sent = self._warm_up(router, bridges)
            others = OtherWork(router.server)
            found = self._measure(router.address, router.server, todo, seconds)
            others_cores = others.cores()
            checks: dict[str, Any] = {}
            if bridges is not None and isinstance(router, Warmwatch):
                sent += int(sum(cell["sent"] for cell in found.values()))
                checks = self._check(router, bridges, sent, by_text=name == OURS_BY_TEXT)
            version = self._version(name)
            return Run(version, router.command.replace(str(folder), "DIR"), found, router.server.peak_rss_mb(), others_cores, checks)

    def profile(self, path: Path, seconds: float) -> None:
        """Our router under py-spy with 32 connections and new prompts: what its functions cost a request, by size."""
        spy = PEERS / "venv" / "bin" / "py-spy"
        if not spy.exists():
            raise SystemExit(f"py-spy is not there: {self._python} -m pip install py-spy")
        folder = self._folder / "profile"
        folder.mkdir()
        raw = folder / "stacks.txt"
        parts = []
        with self._router(OURS, folder) as (router, bridges):
            self._warm_up(router, bridges)
            for kb, prompts in self._prompts.items():
                plain = self._measure(router.address, router.server, [Cell(kb, "new", "burst", 32)], seconds)
                flags = ["record", "--pid", str(router.server.process.pid), "--duration", str(round(seconds)), "--rate", "200", "--threads"]
                with on_core(WORKER_CORE):
                    watching = subprocess.Popen(
                        [str(spy), *flags, "--format", "raw", "--output", str(raw)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                    )
                fresh = str(self._next_fresh())
                self._load.run(router.address, prompts, "-conns", "32", "-seconds", str(seconds + 1.5), "-fresh", fresh)
                watching.wait(60)
                (values,) = plain.values()
                parts.append(f"#### {kb} KB, new, c=32: {line_of(values)}\n" + costs(raw.read_text(), values["cpu_us_per_request"]))
        path.write_text("\n".join(parts))
        say(f"written: {path}")

    @contextmanager
    def _router(self, name: str, folder: Path) -> Iterator[tuple[Peer | Warmwatch, BridgeStandIn | None]]:
        with ExitStack() as stack:
            if name not in (OURS, OURS_BY_TEXT):
                peer, policy = name.split()
                router = Peer(peer, policy, self._python, self._workers.addresses, self._first_body, folder)
                stack.callback(router.stop)
                yield router, None
                return
            ours = Warmwatch(self._workers.addresses, folder, self._tree, [*self._flags, *(BY_TEXT if name == OURS_BY_TEXT else ())])
            stack.callback(ours.stop)
            bridges = BridgeStandIn(ours.stream, ours.key_file)
            stack.callback(bridges.stop)
            bridges.start()
            yield ours, bridges

    def _warm_up(self, router: Peer | Warmwatch, bridges: BridgeStandIn | None) -> int:
        """Every prompt once, so that all routers have seen them; and ours is told what the workers hold since. Returns requests sent."""
        sent = 0
        for path in self._prompts.values():
            told = self._load.run(router.address, path, "-conns", "4", "-count", str(PROMPTS))
            if told["errors"]:
                raise SystemExit(f"{told['errors']} errors in the warm-up: {told['first_error']}")
            sent += told["sent"]
        if bridges is not None:
            bridges.announce_prompts(sent)
            time.sleep(0.5)
        return sent

    def _measure(self, to: str, server: Process | None, todo: Sequence[Cell], seconds: float) -> dict[str, dict[str, float]]:
        found = {}
        for cell in random.Random(self._fresh).sample(todo, len(todo)):
            self._workers.answer_in(*((BURST_WRITES, 0) if cell.answers == "burst" else (1, PACED_US)))
            flags = ["-conns", str(cell.connections), "-seconds", str(seconds), "-warm-seconds", str(WARM_S)]
            flags += ["-fresh", str(self._next_fresh())] if cell.prompts == "new" else []
            cpu_s, began_s = server.cpu_s() if server else 0.0, time.monotonic()
            told = self._load.run(to, self._prompts[cell.size_kb], *flags)
            cpu_s, wall_s = (server.cpu_s() if server else 0.0) - cpu_s, time.monotonic() - began_s
            if told["errors"]:
                say(f"  {told['errors']} errors of {told['sent']} requests; the first: {told['first_error']}")
            if told["errors"] > told["sent"] // 2:
                raise SystemExit(f"{cell.name}: more errors than answers")
            found[cell.name] = {
                "requests_per_s": told["requests_per_s"],
                "ttfb_p50_us": told["ttfb_us"]["p50"],
                "ttfb_p99_us": told["ttfb_us"]["p99"],
                "cpu_us_per_request": cpu_s / told["sent"] * 1e6,
                "core_share": cpu_s / wall_s,
                "errors": told["errors"],
                "sent": told["sent"],
            }
            say(f"  {cell.name:28} {line_of(found[cell.name])}")
        return {cell.name: found[cell.name] for cell in todo}

    def _next_fresh(self) -> int:
        self._fresh += 1
        return self._fresh

    def _check(self, router: Warmwatch, bridges: BridgeStandIn, sent: int, by_text: bool) -> dict[str, Any]:
        """That our router did the whole of its work: exact tokens, the prefix known, every request recorded. Raises SystemExit."""
        body = self._prompts[self._sizes[-1]].read_text().partition("\n")[0].encode()
        self._workers.answer_in(BURST_WRITES, 0)
        headers = ask(router.address, "POST", "/v1/chat/completions", body)[1]
        metrics = router.metrics()
        deadline = time.monotonic() + 10
        while (written := bridges.written())["outcomes"] < sent and time.monotonic() < deadline:
            time.sleep(0.1)
        dropped = sum(value for key, value in metrics.items() if "dropped" in key)
        checks = {
            "requests": sent,
            "decisions_written": written["decisions"],
            "outcomes_written": written["outcomes"],
            "records_dropped": dropped,
            "internal_errors": metrics.get("warmwatch_router_internal_errors_total", 0.0),
            "predicted_cached_tokens_of_the_largest_prompt": int(headers.get("x-warmwatch-predicted-cached-tokens", -1)),
        }
        no_forecast = checks["predicted_cached_tokens_of_the_largest_prompt"] <= 0
        if checks["internal_errors"] or no_forecast != by_text or written["decisions"] == 0:
            raise SystemExit(f"our router did not do all of its work: {checks}\n{router.server.output()[-3000:]}")
        say(f"  {checks}")
        return checks

    def _version(self, name: str) -> str:
        if name in (OURS, OURS_BY_TEXT):
            return str(describe_machine()["commit"])
        code = f"from importlib.metadata import version; print(version({name.split()[0]!r}))"
        return subprocess.run([str(self._python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


class OtherWork:
    """How much of the machine processes took that are not part of the benchmark: they make absolute figures worse."""

    def __init__(self, router: Process) -> None:
        self._began_s, self._busy = time.monotonic(), _busy_s()
        self._ours = _session_tree_s()

    def cores(self) -> float:
        wall = time.monotonic() - self._began_s
        return max(0.0, (_busy_s() - self._busy - (_session_tree_s() - self._ours)) / wall)


def _busy_s() -> float:
    fields = [int(x) for x in Path("/proc/stat").read_text().partition("\n")[0].split()[1:8]]
    return (sum(fields) - fields[3] - fields[4]) / 100


def _session_tree_s() -> float:
    """CPU seconds of this process and all its descendants, ended ones included."""
    children: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for pid, fields in process_stats():
        children.setdefault(int(fields[1]), []).append(pid)
        used[pid] = sum(map(int, fields[11:15]))
    todo, total = [int(Path("/proc/self").resolve().name)], 0
    while todo:
        pid = todo.pop()
        total += used.get(pid, 0)
        todo += children.get(pid, [])
    return total / 100


def summary(runs: dict[str, list[Run]], repeats: int, seconds: float) -> dict[str, Any]:
    """Medians over the repeats, and how ours stands to the peers."""
    routers: dict[str, Any] = {}
    for name, of in runs.items():
        found: dict[str, dict[str, float]] = {}
        for cell in of[0].cells:
            one = {key: statistics.median(run.cells[cell][key] for run in of) for key in of[0].cells[cell]}
            one["errors"] = sum(run.cells[cell]["errors"] for run in of)
            found[cell] = {key: round(value, 2 if key == "core_share" else 1) for key, value in one.items() if key != "sent"}
            if name == DIRECT:
                found[cell] = {key: value for key, value in found[cell].items() if key not in ("cpu_us_per_request", "core_share")}
        routers[name] = {"version": of[0].version, "command": of[0].command, "peak_rss_mb": max(r.peak_rss_mb for r in of), "cells": found}
        if any(r.checks for r in of):
            routers[name]["checks"] = [r.checks for r in of]
    direct = routers.get(DIRECT, {}).get("cells", {})
    for name, router in routers.items():
        for cell, values in router["cells"].items():
            if name != DIRECT and cell in direct and "burst, c=32" not in cell:
                values["added_ttfb_p50_us"] = round(values["ttfb_p50_us"] - direct[cell]["ttfb_p50_us"], 1)
                values["added_ttfb_p99_us"] = round(values["ttfb_p99_us"] - direct[cell]["ttfb_p99_us"], 1)
    return {
        "setup": {
            "repeats": repeats,
            "seconds_a_cell": seconds,
            "workers": WORKERS,
            "distinct_prompts_a_size": PROMPTS,
            "agents": AGENTS,
            "sessions": SESSIONS,
            "turns": TURNS,
            "burst": f"17 chunks in {BURST_WRITES} writes",
            "paced": f"17 chunks in 17 writes, {PACED_US / 1000:g} ms apart",
            "client": "TCP_NODELAY, and TCP_QUICKACK after every read of an unfinished answer, so that a router without TCP_NODELAY "
            "does not wait for the client's delayed acknowledgement",
            "kv_events": f"only ours: {RECORDS_PER_S * WORKERS} records a second with {2 * BLOCKS_PER_RECORD} block events each",
        },
        "cores_taken_by_other_processes": round(
            statistics.mean([r.others_cores for of in runs.values() for r in of if r.command] or [0]), 2
        ),
        "routers": routers,
        "ratios_to_prefix_aware_peers": ratios(routers, [name for name in PEER_POLICIES if "cache_aware" in name]),
        "ratios_to_all_peers": ratios(routers, PEER_POLICIES),
        "ratios_by_text_to_prefix_aware_peers": ratios(routers, [name for name in PEER_POLICIES if "cache_aware" in name], OURS_BY_TEXT),
    }


def ratios(routers: dict[str, Any], of: Sequence[str], name: str = OURS) -> dict[str, Any]:
    """Ours (name) against the best of these in each cell: above 1 is better for ours."""
    peers = {peer: r["cells"] for peer, r in routers.items() if peer in of}
    if name not in routers or not peers:
        return {}
    found = {}
    for cell, ours in routers[name]["cells"].items():
        fastest = max(c[cell]["requests_per_s"] for c in peers.values())
        soonest = min(c[cell]["ttfb_p50_us"] for c in peers.values())
        cheapest = min(c[cell]["cpu_us_per_request"] for c in peers.values())
        found[cell] = {
            "requests_per_s": round(ours["requests_per_s"] / fastest, 2),
            "ttfb_p50": round(soonest / ours["ttfb_p50_us"], 2),
            "cpu": round(cheapest / ours["cpu_us_per_request"], 2),
        }
    return found


def line_of(values: dict[str, float]) -> str:
    text = f"{values['requests_per_s']:8,.0f} req/s  TTFB p50 {values['ttfb_p50_us']:7,.0f} p99 {values['ttfb_p99_us']:7,.0f} us"
    if values.get("cpu_us_per_request"):
        text += f"  CPU {values['cpu_us_per_request']:6,.0f} us  core {values['core_share']:4.0%}"
    if values["errors"]:
        text += f"  {values['errors']:.0f} ERRORS"
    return text


def table(result: dict[str, Any]) -> str:
    lines = []
    for cell in next(iter(result["routers"].values()))["cells"]:
        lines += ["", f"{cell:30} {'req/s':>8} {'TTFB p50':>9} {'p99':>8} {'added p50':>10} {'p99':>8} {'CPU us':>7}"]
        for name, router in result["routers"].items():
            v = router["cells"][cell]
            added = [f"{v[key]:,.0f}" if key in v else "" for key in ("added_ttfb_p50_us", "added_ttfb_p99_us")]
            cpu = f"{v['cpu_us_per_request']:,.0f}" if "cpu_us_per_request" in v else ""
            lines.append(
                f"  {name:28} {v['requests_per_s']:8,.0f} {v['ttfb_p50_us']:9,.0f} {v['ttfb_p99_us']:8,.0f}"
                f" {added[0]:>10} {added[1]:>8} {cpu:>7}" + (f"  {v['errors']:.0f} ERRORS" if v["errors"] else "")
            )
        for text, key in (
            ("ours to best peer, prefix-aware", "ratios_to_prefix_aware_peers"),
            ("ours to best peer, any", "ratios_to_all_peers"),
            ("by text to best, prefix-aware", "ratios_by_text_to_prefix_aware_peers"),
        ):
            if cell in result[key]:
                r = result[key][cell]
                rate, ttfb, cpu = (f"{r[k]:.2f}x" for k in ("requests_per_s", "ttfb_p50", "cpu"))
                lines.append(f"  {text:31} {rate:>6} {ttfb:>9} {'':8} {'':10} {'':8} {cpu:>7}")
    return "\n".join(lines)


def costs(stacks: str, us_a_request: float) -> str:
    """py-spy's raw stacks as two lists, functions with their callees and lines by themselves, in microseconds of a request: shares of the
    samples of all threads, idle ones left out, of the CPU time of a request measured without py-spy."""
    samples = []
    for line in stacks.splitlines():
        frames, count = line.rsplit(" ", 1)
        stack = frames.split(";")
        if not any(idle in stack[-1] for idle in _IDLE):
            samples.append((stack, int(count)))
    us = us_a_request / max(1, sum(n for _, n in samples))
    inclusive: dict[str, float] = {}
    own: dict[str, float] = {}
    for stack, n in samples:
        for frame in {f.rpartition(":")[0] or f for f in stack}:
            inclusive[frame] = inclusive.get(frame, 0.0) + n * us
        own[stack[-1]] = own.get(stack[-1], 0.0) + n * us
    lines = []
    for title, of in (("with callees, us a request", inclusive), ("lines by themselves, us a request", own)):
        lines += [f"-- {title}", *(f"{cost:8.1f}  {frame}" for frame, cost in sorted(of.items(), key=lambda x: -x[1])[:70])]
    return "\n".join(lines) + "\n"


_IDLE = ("wait (threading.py", "poll (schemas/stream/local.py", "_worker (concurrent/futures/thread.py")


if __name__ == "__main__":
    sys.exit(main())
