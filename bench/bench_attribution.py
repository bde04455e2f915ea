"""What it costs to know why tokens were computed again: requests and block events a second of the collector's core, and its memory.

    python -m bench.bench_attribution [--requests 3000] [--block-events 20000000] [--profile FILE]

Requests: agent sessions with prompts of about 32k tokens (2,048 blocks of 16) over 64 workers, 500 a second of the trace's time. Four
system prompts of 6k tokens; a session begins with 25k tokens of its own and adds 640 a turn; each tenth turn goes to another worker;
workers evict whole sessions, oldest first. Their KV events, decisions (8 candidates, content described beyond the best overlap) and
outcomes go through everything that the collector does in memory: fold, residency, history, attribution, all analyses, rows and journal,
in turns of 50 ms and commits of 1 s of the trace's time. CPU time counts, from records to rows.
Block events: records of 64 blocks from 64 workers, until 5 million blocks are resident, then as many removals as stores.

What is left out: Kafka, Parquet and DuckDB (`make bench-ingest` has them). Progress goes to stderr; the last line of stdout is one JSON
object, also kept under bench/results/.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import pstats
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.machine import describe_machine, write_result
from collector.core import Core
from collector.settings import CollectorSettings
from schemas.causes import Cause
from schemas.kv_events import COMPLETE, EVENT, Kind, KvBatch, WorkerId, encode
from schemas.requests import Candidate, Decision, Outcome, pack_hashes, pack_lengths
from schemas.stream import Record, StoredRecord
from schemas.topics import DECISIONS, KV_EVENTS, OUTCOMES, WORKER_LOAD
from schemas.workers import BridgeHealth, Trust, WorkerLoad

U64 = npt.NDArray[np.uint64]

WORKERS = tuple(WorkerId("bench", f"gpu-{i}", 0) for i in range(64))
BLOCK = 16
SYSTEM, FIRST, TURN, TURNS = 384, 1560, 40, 6  # blocks
REQUESTS_PER_S = 500
TURN_S, COMMIT_S = 0.05, 1.0
SESSIONS, SESSIONS_A_WORKER = 2500, 40
CHUNK_TOKENS = 23
RESIDENT = 5_000_000
START_S = 1_790_000_000.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=3000, help="timed, after as many to fill caches (default 3000)")
    parser.add_argument("--block-events", type=int, default=20_000_000, help="of 64 blocks a record (default 20 million); 0: none")
    parser.add_argument("--profile", type=Path, help="write a profile of the requests' part here")
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "attribution", "machine": describe_machine()}
    result["requests"] = _apart(_requests, args.requests, args.profile)
    if args.block_events:
        result["block_events"] = _apart(_block_events, args.block_events)
    result["target"] = {"block_events_per_core_s": 1_000_000, "peak_rss_mb": 1536}
    if args.profile is None:
        write_result("attribution", result)
    print(json.dumps(result))


def _apart(part: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """In a process of its own, so that its memory is its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(part, *args).result()


def _core() -> Core:
    return Core.of(CollectorSettings(stream="memory://bench"))


# requests


@dataclass
class Session:
    chain: U64
    home: int
    turn: int = 0


@dataclass
class Worker:
    sessions: OrderedDict[int, tuple[U64, int]] = field(default_factory=OrderedDict)  # of a session: its chain, blocks held
    systems: set[int] = field(default_factory=set)
    seq: int = 0
    last_s: float = 0.0


class Traffic:
    """Records of the trace, in the order of their times."""

    def __init__(self, requests: int) -> None:
        self._rng = np.random.default_rng(1)
        self._systems = [self._new(SYSTEM) for _ in range(4)]
        self._workers = [Worker() for _ in WORKERS]
        self._sessions = [self._session(i % (TURNS + 1)) for i in range(SESSIONS)]
        self.records: list[tuple[float, str, bytes]] = []
        for second in range(requests // REQUESTS_PER_S + 9):
            self._loads(START_S + second)
        for i in range(requests):
            pause_s = 3.0 if 2 * i >= requests else 0.0  # between the part that fills caches and the part that is timed
            self._request(i, START_S + i / REQUESTS_PER_S + pause_s)
        self.records.sort(key=lambda r: r[0])

    def _new(self, n: int) -> U64:
        return self._rng.integers(1, 1 << 63, n).astype(np.uint64)

    def _session(self, turn: int = 0) -> Session:
        system = int(self._rng.integers(4))
        return Session(
            np.concatenate([self._systems[system], self._new(FIRST + TURN * TURNS)]), int(self._rng.integers(len(WORKERS))), turn
        )

    def _loads(self, time_s: float) -> None:
        for who in WORKERS:
            health = BridgeHealth(trust=Trust.EXACT, epoch=1)
            load = WorkerLoad(pool=who.pool, worker=who.worker, rank=who.rank, time_s=time_s, engine="vllm", up=True, bridge=health)
            self.records.append((time_s, WORKER_LOAD, load.model_dump_json(exclude_unset=True).encode()))

    def _held(self, worker: int, key: int, session: Session) -> int:
        w = self._workers[worker]
        system = int(session.chain[0])
        own = w.sessions.get(key)
        return own[1] if own is not None else SYSTEM if system in w.systems else 0

    def _request(self, i: int, at_s: float) -> None:
        place = i % SESSIONS  # so a turn has ended before the next begins
        session = self._sessions[place]
        key = int(session.chain[SYSTEM])
        chain = session.chain[: SYSTEM + FIRST + TURN * session.turn]
        to = session.home if self._rng.random() > 0.1 else int(self._rng.integers(len(WORKERS)))
        others = [to, session.home, *self._rng.choice(len(WORKERS), 7, replace=False).tolist()]
        held = {w: self._held(w, key, session) for w in dict.fromkeys(others)}
        best = max(held.values())
        candidates = tuple(
            Candidate(
                worker=WORKERS[w].worker, rank=0, overlap_tokens=n * BLOCK, overlap_gpu_tokens=n * BLOCK, queue_s=0.1 * (w % 5),
                prefill_s=(len(chain) - n) * 1e-3, cost_s=0.05 * (w % 5) + (len(chain) - n) * 1e-3, epoch=1, seq=self._workers[w].seq,
                trust=Trust.EXACT, in_flight=3, allowed=True,
            )
            for w, n in held.items()
        )  # fmt: skip
        prompt = len(chain) * BLOCK + 7
        left = prompt - best * BLOCK
        lengths = np.full(-(-left // CHUNK_TOKENS), CHUNK_TOKENS, np.uint16)
        lengths[-1] = left - CHUNK_TOKENS * (len(lengths) - 1)
        decision = Decision(
            request_id=f"request-{i}", time_s=at_s, router="r", pool="bench", model="m", path="/v1/chat/completions", policy="cost",
            policy_version="1", token_source="exact", prompt_tokens=prompt, block_size=BLOCK, chain=pack_hashes(chain), namespace=7,
            content_from=best, content=pack_hashes(chain[best:]), chunks=pack_hashes(self._new(len(lengths))),
            chunk_tokens=pack_lengths(lengths), worker=WORKERS[to].worker, rank=0, candidates=candidates, workers_considered=len(WORKERS),
            session_id=str(key), route=f"route-{i % 3}", tenant=f"tenant-{i % 5}",
        )  # fmt: skip
        self.records.append((at_s, DECISIONS, decision.model_dump_json(exclude_unset=True).encode()))
        n = held[to]
        self._prefill(to, key, chain, n, at_s + 0.2)
        outcome = Outcome(
            request_id=f"request-{i}", time_s=at_s + 1.5, worker=WORKERS[to].worker, rank=0, status=200, ttft_s=0.4, e2e_s=1.5,
            prompt_tokens=prompt, cached_tokens=min(n, (prompt - 1) // BLOCK) * BLOCK, completion_tokens=100, engine_prefill_s=0.2,
        )  # fmt: skip
        self.records.append((at_s + 1.5, OUTCOMES, outcome.model_dump_json(exclude_unset=True).encode()))
        session.turn += 1
        if session.turn > TURNS:
            self._sessions[place] = self._session()

    def _prefill(self, to: int, key: int, chain: U64, held: int, at_s: float) -> None:
        w = self._workers[to]
        removed: list[U64] = []
        while len(w.sessions) >= SESSIONS_A_WORKER and key not in w.sessions:
            _, (old, n) = w.sessions.popitem(last=False)
            removed.append(old[SYSTEM:n])
        events: list[tuple[Kind, U64, int]] = [(Kind.REMOVED, blocks[::-1], 0) for blocks in removed]
        for start in range(held, len(chain), 512):  # a chunked prefill
            events += [(Kind.STORED, chain[start : start + 512], int(chain[start - 1]) if start else 0)]
        for kind, blocks, parent in events:
            at_s = w.last_s = max(at_s, w.last_s + 1e-4)
            rows = np.zeros(1 + (w.seq == 0), EVENT)
            rows[-1]["kind"], rows[-1]["count"], rows[-1]["parent"], rows[-1]["block_size"] = kind, len(blocks), parent, BLOCK
            if w.seq == 0:
                rows[0]["kind"], rows[0]["flags"] = Kind.EPOCH_STARTED, COMPLETE
            rows["seq"], rows["time_s"] = w.seq, at_s
            batch = KvBatch(WORKERS[to], 1, w.seq, w.seq, at_s, at_s + 0.01, rows, np.ascontiguousarray(blocks))
            self.records.append((at_s, KV_EVENTS, encode(batch)))
            w.seq += 1
            at_s += 0.01
        w.systems.add(int(chain[0]))
        w.sessions[key] = chain, len(chain)
        w.sessions.move_to_end(key)


def _requests(requests: int, profile: Path | None) -> dict[str, Any]:
    _say(f"making {2 * requests} requests ...")
    traffic = Traffic(2 * requests)
    core = _core()
    offsets = dict.fromkeys((KV_EVENTS, DECISIONS, OUTCOMES, WORKER_LOAD), 0)
    told = lost = 0
    causes: dict[str, int] = {}
    cpu, wall = time.process_time(), time.perf_counter()
    half_s = START_S + requests / REQUESTS_PER_S + 3.0  # those of the first half are told by then
    counted, at, next_commit_s, now_s = False, 0, START_S + COMMIT_S, START_S
    profiler = cProfile.Profile()
    _say("running ...")
    while at < len(traffic.records) or now_s < traffic.records[-1][0]:
        if not counted and now_s > half_s:
            cpu, wall, counted, told = time.process_time(), time.perf_counter(), True, 0
            if profile is not None:
                profiler.enable()
        now_s += TURN_S
        slices: dict[str, list[Record]] = {}
        while at < len(traffic.records) and traffic.records[at][0] <= now_s:
            time_s, topic, value = traffic.records[at]
            slices.setdefault(topic, []).append(StoredRecord(offsets[topic], int(time_s * 1000), b"", value, ()))
            offsets[topic] += 1
            at += 1
        for topic, records in slices.items():
            core.fold.take((topic, 0), topic, records, now_s)
        core.fold.settle(now_s, now_s, now_s)
        if now_s >= next_commit_s:
            next_commit_s += COMMIT_S
            outputs = core.fold.outputs()
            rows = outputs.get("requests")
            told += rows.num_rows if rows is not None else 0
            if rows is not None and counted:
                for one in core.fold.told:
                    for cause, tokens in zip(one.run_causes.tolist(), one.run_tokens.tolist(), strict=True):
                        label = Cause(cause).label
                        causes[label] = causes.get(label, 0) + tokens
                lost += sum(x.hit_tokens is None for x in core.fold.told)
            core.fold.open_rows()
            core.analyses.take(core.fold.take_told())
            core.analyses.close(now_s - 30.0)
            core.analyses.outputs()
            core.analyses.journal(1)
            core.contents.journal(1)
            core.analyses.live()
            core.fold.written()
            core.analyses.written()
            core.contents.written()
    profiler.disable()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    if profile is not None:
        with profile.open("w") as file:
            stats = pstats.Stats(profiler, stream=file)
            stats.sort_stats("tottime").print_stats(45)
            stats.sort_stats("cumulative").print_stats(60)
    out = {
        "requests": told, "prompt_tokens": (SYSTEM + FIRST + TURN * TURNS // 2) * BLOCK, "workers": len(WORKERS), "cpu_s": round(cpu, 2),
        "wall_s": round(wall, 2), "requests_per_core_s": round(told / cpu, 1), "us_a_request": round(cpu / told * 1e6),
        "untold": lost, "tokens_by_cause": causes, "peak_rss_mb": _peak_rss_mb(),
        "of_these_the_traces_records_mb": round(sum(len(value) for _, _, value in traffic.records) / 1e6),
    }  # fmt: skip
    _say(f"  {out['requests_per_core_s']} requests/s on one core, {out['us_a_request']} us each, {out['peak_rss_mb']} MB")
    return out


# block events


def _block_events(block_events: int) -> dict[str, Any]:
    core = _core()
    _say(f"{block_events:,} block events ...")
    cpu = steady = 0.0
    done = steady_done = offset = 0
    for slice_ in _slices(block_events):
        now_s = START_S + offset * 1e-4
        records: list[Record] = [StoredRecord(offset + i, int(now_s * 1000), b"", value, ()) for i, (value, _) in enumerate(slice_)]
        blocks = sum(n for _, n in slice_)
        offset += len(records)
        began = time.process_time()
        core.fold.take((KV_EVENTS, 0), KV_EVENTS, records, now_s)
        core.fold.settle(now_s, now_s, now_s)
        if core.fold.pending_bytes > 64 << 20:
            core.fold.outputs()
            core.fold.written()
        took = time.process_time() - began
        cpu, done = cpu + took, done + blocks
        if done > 1.5 * RESIDENT:
            steady, steady_done = steady + took, steady_done + blocks
    resident = int(core.fold.residency.workers["resident"].sum())
    out = {
        "blocks_per_record": 64, "block_events": done, "resident_blocks": resident, "cpu_s": round(cpu, 2),
        "block_events_per_core_s": round(done / cpu), "steady_block_events_per_core_s": round(steady_done / steady) if steady else None,
        "residency_mb": round(core.fold.residency.held_bytes() / 1e6), "peak_rss_mb": _peak_rss_mb(),
    }  # fmt: skip
    _say(f"  {out['block_events_per_core_s']:,} block events/s on one core, {out['peak_rss_mb']} MB")
    return out


def _slices(block_events: int) -> Iterator[list[tuple[bytes, int]]]:
    rng = np.random.default_rng(2)
    held: list[list[U64]] = [[] for _ in WORKERS]
    seqs = [0] * len(WORKERS)
    resident = 0
    out: list[tuple[bytes, int]] = []
    for i in range(block_events // 64):
        w = i % len(WORKERS)
        full = resident >= RESIDENT
        stored = rng.integers(1, 1 << 63, 32 if full else 64).astype(np.uint64)
        events, hashes = [(Kind.STORED, len(stored))], [stored]
        if full:
            removed = held[w].pop(0)
            if len(removed) > 32:
                held[w].insert(0, removed[32:])
                removed = removed[:32]
            events.insert(0, (Kind.REMOVED, len(removed)))
            hashes.insert(0, removed)
            resident -= len(removed)
        held[w].append(stored)
        resident += len(stored)
        if seqs[w] == 0:
            events.insert(0, (Kind.EPOCH_STARTED, 0))
        rows = np.zeros(len(events), EVENT)
        time_s = START_S + i * 1e-4
        for row, (kind, count) in zip(rows, events, strict=True):
            row["kind"], row["count"], row["seq"], row["time_s"], row["block_size"] = kind, count, seqs[w], time_s, BLOCK
            row["flags"] = COMPLETE if kind == Kind.EPOCH_STARTED else 0
        batch = KvBatch(WORKERS[w], 1, seqs[w], seqs[w], time_s, time_s, rows, np.concatenate(hashes))
        seqs[w] += 1
        out.append((encode(batch), len(batch.hashes)))
        if len(out) == 4000:
            yield out
            out = []
    if out:
        yield out


def _peak_rss_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise KeyError("VmHWM")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
