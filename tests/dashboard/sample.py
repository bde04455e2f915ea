"""A published file made by hand: an hour of a small fleet with a story, from one seed. Rollups are summed from its own requests.

The story: four workers in one pool and one, with two ranks, in another; `gpu-3` restarts 35 minutes before the end and warms up again;
from minute 20 to 10 before the end somebody tries round robin; `gpu-4` had a gap in its events. `write` makes the file in any of the forms
that the dashboard must bear: whole, empty, events only, load only.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb

from schemas.tables.published import MAJOR, MINOR, TABLES, latency_bucket, macros_sql
from schemas.tables.read import FILE_NAME

END = datetime(2026, 11, 29, 14, 0, 0)
NASTY_ROUTE = "<script>alert(1)</script> 🦊 [x](javascript:alert(1)) **" + "very-long-" * 25
_BLOCK = 16
_WORKERS: tuple[tuple[str, str, int | None], ...] = (
    ("qwen3-32b", "gpu-1:8000", None),
    ("qwen3-32b", "gpu-2:8000", None),
    ("qwen3-32b", "gpu-3:8000", None),
    ("qwen3-32b", "gpu-4:8000", None),
    ("llama-70b", "gpu-5:8000", 0),
    ("llama-70b", "gpu-5:8000", 1),
)
_MODELS = {"qwen3-32b": "Qwen/Qwen3-32B", "llama-70b": "meta-llama/Llama-3.3-70B-Instruct"}

Row = dict[str, Any]


@dataclass
class Sample:
    """Rows by table, as they are in the file."""

    tables: dict[str, list[Row]] = field(default_factory=lambda: {t.name: [] for t in TABLES})

    def __getitem__(self, name: str) -> list[Row]:
        return self.tables[name]


def build(seed: int = 1, minutes: int = 60, end: datetime = END, workers: Sequence[tuple[str, str, int | None]] = _WORKERS) -> Sample:
    rng = random.Random(seed)
    out = Sample()
    restart = end - timedelta(minutes=35)
    out.tables["requests"] = list(_requests(rng, minutes, end, restart, workers))
    _roll_up(out, end, minutes, restart, workers, rng)
    out.tables["workers"] = _last_seen(end, restart, out, workers)
    out.tables["changes"] = [
        _change(end - timedelta(minutes=52), "deploy", "rolled out prompt v7", "dana", None, None),
        _change(restart, "restart", "new epoch 2: sequence stepped back", "collector", "qwen3-32b", "gpu-3:8000"),
        _change(end - timedelta(minutes=28), "gap", "lost engine batches 8812 to 8830", "collector", "qwen3-32b", "gpu-4:8000"),
        _change(end - timedelta(minutes=20), "policy", "round_robin instead of cost, to compare", "sam", None, None),
        _change(end - timedelta(minutes=10), "policy", "cost again", "sam", None, None),
        _change(end - timedelta(minutes=4), "note", NASTY_ROUTE[:60], "<b>eve</b> 🦊", None, None),
    ]
    out.tables["data_health"] = _health(end)
    out.tables["dead_letters"] = _dead_letters(end)
    out.tables["published"] = [_published(end)]
    return out


def events_only(end: datetime = END) -> Sample:
    """KV events but no router and no metrics: residency and eviction are known, requests are not."""
    out = build(end=end)
    for name in ("requests", "candidates", "latency_10s"):
        out.tables[name] = []
    for row in out["worker_10s"]:
        for c in _OF_REQUESTS + _OF_LOAD:
            row[c] = 0 if c in _COUNTED else None
    for row in out["workers"]:
        row |= {"up": None, "last_load_at": None, "capacity_blocks": None, "running": None, "waiting": None, "kv_usage": None}
    out["published"][0] |= {"has_decisions": False, "has_outcomes": False, "has_load": False}
    return out


def load_only(end: datetime = END) -> Sample:
    """Worker load alone: the engine's own counters, no events, no router."""
    out = build(end=end)
    for name in ("requests", "candidates", "latency_10s", "changes"):
        out.tables[name] = []
    for row in out["worker_10s"]:
        for c in (*_OF_REQUESTS, "stored_blocks", "removed_blocks", "clears", "lost_batches", "resident_blocks"):
            row[c] = None if c in ("resident_blocks", "hit_share_sum") else 0
    for row in out["workers"]:
        row |= {"trust": "blind", "trust_reason": "no KV event seen", "epoch": None, "seq": None, "epoch_started_at": None}
        row |= {"last_event_at": None, "resident_blocks": None, "peak_resident_blocks": None, "distinct_blocks": None}
    out["published"][0] |= {"has_decisions": False, "has_outcomes": False, "has_events": False}
    return out


def empty(end: datetime = END) -> Sample:
    """A collector that just started: tables, one row about the file, nothing received."""
    out = Sample()
    row = _published(end) | {"watermark": None, "has_events": False, "has_decisions": False, "has_outcomes": False, "has_load": False}
    out.tables["published"] = [row]
    return out


def write(sample: Sample, data_dir: Path, version: str | None = None) -> Path:
    """Writes the file beside and puts it in place, as the collector does."""
    data_dir.mkdir(parents=True, exist_ok=True)
    path, draft = data_dir / FILE_NAME, data_dir / f".{FILE_NAME}.draft"
    draft.unlink(missing_ok=True)
    with duckdb.connect() as db:
        db.execute(f"ATTACH '{draft}' AS out (STORAGE_VERSION 'v1.0.0')")
        db.execute("USE out")
        for table in TABLES:
            db.execute(table.ddl())
            rows = sample[table.name]
            if version is not None and table.name == "published":
                rows = [r | {"version": version} for r in rows]
            _insert(db, table.name, [c.name for c in table.columns], rows)
        db.execute(macros_sql())
        db.execute("USE memory")
        db.execute("DETACH out")
    draft.replace(path)
    return path


def _insert(db: duckdb.DuckDBPyConnection, table: str, columns: list[str], rows: list[Row]) -> None:
    if not rows:
        return
    import pyarrow as pa

    values = pa.table({c: [r.get(c) for r in rows] for c in columns})
    db.register("incoming", values)
    db.execute(f'INSERT INTO "{table}" SELECT * FROM incoming')
    db.unregister("incoming")


def _requests(
    rng: random.Random, minutes: int, end: datetime, restart: datetime, workers: Sequence[tuple[str, str, int | None]]
) -> Iterable[Row]:
    sessions = [f"s-{rng.randrange(16**6):06x}" for _ in range(60)]
    pools = sorted({w[0] for w in workers})
    at, begin, number = 0.0, end - timedelta(minutes=minutes), 0
    while at < minutes * 60 - 5:
        at += rng.expovariate(1.6)
        started = begin + timedelta(seconds=at)
        pool = pools[-1] if rng.random() < 0.8 else pools[0]
        here = [w for w in workers if w[0] == pool]
        trial = end - timedelta(minutes=20) <= started < end - timedelta(minutes=10)
        policy = "round_robin" if trial else "cost"
        worker = here[number % len(here)] if trial else rng.choices(here, [1.0 + 0.15 * i for i in range(len(here))])[0]
        number += 1
        prompt = int(min(60_000, rng.lognormvariate(8.7, 0.8)))
        best = prompt // _BLOCK * _BLOCK if rng.random() < 0.08 else int(prompt * rng.betavariate(9, 1.4)) // _BLOCK * _BLOCK
        warm = 1.0
        if worker[1] == "gpu-3:8000" and started >= restart:
            warm = 1 - math.exp(-(started - restart).total_seconds() / 500)
        held = (0.35 if trial else 0.93) * warm
        cached = min(best, int(best * held * rng.betavariate(14, 1)) // _BLOCK * _BLOCK, prompt - 1)
        failed = rng.random() < 0.006
        reported = not failed and rng.random() > 0.01
        queue = rng.expovariate(1 / (0.03 if not trial else 0.11))
        ttft = 0.025 + queue + (prompt - cached) * 4.2e-5 * rng.uniform(0.9, 1.15)
        e2e = ttft + rng.lognormvariate(1.0, 0.7)
        ended = started + timedelta(seconds=e2e)
        if ended >= end:
            ended = None  # type: ignore[assignment]
        done = ended is not None
        predicted = cached if rng.random() < 0.93 else max(0, cached + rng.choice((-3, -1, 1, 2, 8)) * _BLOCK)
        unknown = number % 40 == 0  # a prompt that the router could not read: nothing was predicted
        guessed = number % 40 == 20  # a prompt that went by its text
        event_hit = cached if rng.random() < 0.998 else max(0, cached - _BLOCK)
        yield {
            "request_id": f"req-{number:06d}",
            "session_id": rng.choice(sessions),
            "started_at": started,
            "ended_at": ended,
            "router": "router-a",
            "pool": pool,
            "worker": worker[1],
            "rank": worker[2],
            "model": _MODELS.get(pool, pool),
            "path": "/v1/chat/completions",
            "route": rng.choices(("agent-coder", "agent-search", "summarise", NASTY_ROUTE), (6, 3, 2, 0.2))[0],
            "tenant": rng.choice(("acme", "globex")),
            "stream": True,
            "policy": policy,
            "policy_version": "1",
            "token_source": "none" if unknown else "text" if guessed else "exact",
            "prompt_tokens": prompt,
            "cached_tokens": cached if done and reported else None,
            "event_hit_tokens": event_hit if done and not failed and worker[1] != "gpu-4:8000" else None,
            "predicted_tokens": None if unknown or guessed else predicted,
            "best_overlap_tokens": None if unknown else best,
            "best_overlap_worker": None if unknown else worker[1],
            "completion_tokens": rng.randrange(20, 900) if done and reported else None,
            "block_size": _BLOCK,
            "chain_blocks": None if unknown else prompt // _BLOCK,
            "ttft_s": ttft if done and not failed else None,
            "e2e_s": e2e if done else None,
            "trust": "degraded" if worker[1] == "gpu-4:8000" else "exact",
            "workers_considered": len(here),
            "status": None if not done else rng.choice((502, 504)) if failed else 200,
            "error": rng.choice(("timeout", "connect")) if done and failed else None,
            "retries": 0,
            "decide_us": rng.uniform(30, 90),
            "decision_missing": False,
            "outcome_missing": False,
        }


_COUNTED = (
    "requests", "failed", "prompt_tokens", "completion_tokens", "reported_requests", "reported_prompt_tokens", "cached_tokens",
    "event_requests", "event_prompt_tokens", "event_hit_tokens", "event_mismatches", "predicted_requests", "predicted_exact",
)  # fmt: skip
_OF_REQUESTS = (*_COUNTED, "hit_share_sum")
_OF_LOAD = ("running", "waiting", "kv_usage", "engine_query_tokens", "engine_hit_tokens", "preemptions")


def _roll_up(
    out: Sample, end: datetime, minutes: int, restart: datetime, workers: Sequence[tuple[str, str, int | None]], rng: random.Random
) -> None:
    cells: dict[tuple[datetime, str, str, int | None], Row] = {}
    latency: dict[tuple[Any, ...], int] = defaultdict(int)
    for i in range(minutes * 6):
        bucket = end - timedelta(seconds=10 * (minutes * 6 - i))
        for j, (pool, worker, rank) in enumerate(workers):
            since_restart = (bucket - restart).total_seconds()
            filling = i / 40 if worker != "gpu-3:8000" or since_restart < 0 else since_restart / 900
            resident = int(11_000 * (1 - math.exp(-filling)) * (1 + 0.04 * j)) + rng.randrange(40)
            load = max(0.0, 3 + 1.5 * math.sin(i / 30 + j) + rng.gauss(0, 0.4))
            cells[bucket, pool, worker, rank] = {
                "bucket": bucket, "pool": pool, "worker": worker, "rank": rank, **dict.fromkeys(_COUNTED, 0), "hit_share_sum": 0.0,
                "stored_blocks": rng.randrange(60, 200), "removed_blocks": rng.randrange(40, 190) if filling > 1 else 0,
                "clears": 0, "lost_batches": 0, "resident_blocks": resident, "running": load, "waiting": max(0.0, load - 3.6),
                "kv_usage": min(1.0, 0.2 + load / 12), "engine_query_tokens": 0.0, "engine_hit_tokens": 0.0, "preemptions": 0.0,
            }  # fmt: skip
    for r in out["requests"]:
        if r["ended_at"] is None:
            continue
        at = r["ended_at"]
        bucket = at.replace(second=at.second // 10 * 10, microsecond=0)
        cell = cells[bucket, r["pool"], r["worker"], r["rank"]]
        prompt, cached, seen = r["prompt_tokens"], r["cached_tokens"], r["event_hit_tokens"]
        cell["requests"] += 1
        cell["failed"] += r["error"] is not None or r["status"] >= 400
        cell["prompt_tokens"] += prompt
        cell["completion_tokens"] += r["completion_tokens"] or 0
        if cached is not None:
            cell["reported_requests"] += 1
            cell["reported_prompt_tokens"] += prompt
            cell["cached_tokens"] += cached
            cell["hit_share_sum"] += cached / prompt
            cell["engine_query_tokens"] += prompt
            cell["engine_hit_tokens"] += cached
            cell["predicted_requests"] += r["predicted_tokens"] is not None
            cell["predicted_exact"] += r["predicted_tokens"] == cached
        if seen is not None:
            cell["event_requests"] += 1
            cell["event_prompt_tokens"] += prompt
            cell["event_hit_tokens"] += seen
            cell["event_mismatches"] += cached is not None and seen != cached
        for measure in ("ttft", "e2e"):
            if r[f"{measure}_s"] is not None:
                key = (bucket, r["pool"], r["worker"], r["rank"], r["route"], r["policy"], measure, latency_bucket(r[f"{measure}_s"]))
                latency[key] += 1
    out.tables["worker_10s"] = list(cells.values())
    columns = ("bucket", "pool", "worker", "rank", "route", "policy", "measure", "log_bucket")
    out.tables["latency_10s"] = [dict(zip(columns, key, strict=True)) | {"n": n} for key, n in latency.items()]


def _last_seen(end: datetime, restart: datetime, out: Sample, workers: Sequence[tuple[str, str, int | None]]) -> list[Row]:
    last = {(r["pool"], r["worker"], r["rank"]): r for r in out["worker_10s"]}
    rows = []
    for pool, worker, rank in workers:
        cell = last[pool, worker, rank]
        degraded, restarted = worker == "gpu-4:8000", worker == "gpu-3:8000"
        rows.append(
            {
                "pool": pool, "worker": worker, "rank": rank, "engine": "vllm", "model": _MODELS.get(pool, pool), "up": True,
                "trust": "degraded" if degraded else "exact",
                "trust_reason": "lost engine batches 8812 to 8830; replay did not have them" if degraded else None,
                "epoch": 2 if restarted else 1, "seq": 12_345, "epoch_started_at": restart if restarted else end - timedelta(hours=30),
                "last_event_at": end - timedelta(seconds=1), "last_load_at": end - timedelta(seconds=0.6),
                "resident_blocks": cell["resident_blocks"], "peak_resident_blocks": cell["resident_blocks"] + 50,
                "distinct_blocks": int(cell["resident_blocks"] * 0.97), "capacity_blocks": 13_500, "block_size": _BLOCK,
                "running": cell["running"], "waiting": cell["waiting"], "kv_usage": cell["kv_usage"], "restarts": int(restarted),
            }
        )  # fmt: skip
    return rows


def _change(at: datetime, kind: str, text: str, author: str, pool: str | None, worker: str | None) -> Row:
    return {"happened_at": at, "kind": kind, "text": text, "author": author, "pool": pool, "worker": worker}


def _health(end: datetime) -> list[Row]:
    checks = (
        ("stream", "kv-events/0", "lag_records", 3.0, "records", "ok", "The collector is 3 records behind the end of the topic."),
        ("stream", "decisions/0", "lag_records", 0.0, "records", "ok", "Nothing waits."),
        ("stream", "outcomes/0", "lag_records", None, "records", "unknown", "The end of the topic could not be asked."),
        ("bridge", "qwen3-32b/gpu-4:8000", "lost_batches", 19.0, "batches", "warn", "19 engine batches are lost; trust is degraded."),
        ("bridge", "qwen3-32b/gpu-3:8000", "restarts", 1.0, "", "warn", "A new epoch began; the cache starts empty."),
        ("collector", "", "dead_letters", 5.0, "records", "warn", "5 records could not be used; see dead_letters for the reasons."),
        ("collector", "", "disk_free_bytes", 8.1e11, "bytes", "ok", "Enough space for segments."),
        ("join", "", "outcome_missing", 0.0, "requests", "ok", "Each decision got its outcome in time."),
        ("join", "", "late_records", 2.0, "records", "bad", "Records came too late; raise `lateness_s` <b>or</b> find the slow bridge."),
    )  # fmt: skip
    keys = ("area", "subject", "name", "value", "unit", "status", "detail")
    return [dict(zip(keys, c, strict=True)) | {"measured_at": end} for c in checks]


def _dead_letters(end: datetime) -> list[Row]:
    reasons = ["unknown schema version 9"] * 3 + ["no JSON: expected value at byte 0", "<img src=x onerror=alert(1)> 🦊 no worker"]
    return [
        {
            "set_aside_at": end - timedelta(minutes=3 * i), "topic": "outcomes" if i % 2 else "decisions",
            "stream_partition": 0, "stream_offset": 100 + i,
            "key": f"req-{i}", "reason": reason, "size_bytes": 40 + i, "value": b"\x00\xff",
        }
        for i, reason in enumerate(reasons)
    ]  # fmt: skip


def _published(end: datetime) -> Row:
    return {
        "published_at": end, "watermark": end - timedelta(seconds=0.7), "version": f"{MAJOR}.{MINOR}", "collector": "0.1.0",
        "has_events": True, "has_decisions": True, "has_outcomes": True, "has_load": True, "state": "running",
    }  # fmt: skip
