"""Counts by worker and 10 s, log-bucket latency histograms, tokens by cause: what most questions need, in a size independent of traffic.

A bucket is *live* while it may still change and is written anew each second; after `bucket_close_s` it is closed into a segment. What
comes later still opens a further row of the same bucket, so readers add rows up (and the gauges of a late row are NULL).
Means of gauges are kept as sum and number of readings; counters of the engine as growth between readings (a step back is a restart: the new
reading counts from zero).

Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pyarrow as pa

from collector import losses
from collector.join import Request
from collector.losses import Losses
from collector.store.columns import from_rows
from collector.store.publish import SCHEMAS
from schemas.tables.published import BUCKET_S, LATENCY_10S, WORKER_10S, latency_bucket
from schemas.workers import WorkerLoad

Who = tuple[str | None, str | None, int | None]
"""(pool, worker, rank)"""
LatencyKey = tuple[str | None, str | None, int | None, str | None, str | None, str, int]
"""(pool, worker, rank, route, policy, measure, log bucket)"""

_COUNTERS = (
    "requests", "failed", "prompt_tokens", "completion_tokens", "reported_requests", "reported_prompt_tokens", "cached_tokens",
    "hit_share_sum", "event_requests", "event_prompt_tokens", "event_hit_tokens", "event_mismatches", "predicted_requests",
    "predicted_exact", "stored_blocks", "removed_blocks", "clears", "lost_batches",
)  # fmt: skip
_GAUGES = ("running", "waiting", "kv_usage")
_GROWTH = ("engine_query_tokens", "engine_hit_tokens", "preemptions")

LIVE_WORKER_COLUMNS = (
    ", ".join(f'"{c.name}" {c.type}' for c in WORKER_10S.columns) + ", running_n UBIGINT, waiting_n UBIGINT, kv_usage_n UBIGINT"
)
LIVE_LATENCY_COLUMNS = ", ".join(f'"{c.name}" {c.type}' for c in LATENCY_10S.columns)
LIVE_WORKER_SCHEMA = pa.schema([*SCHEMAS["worker_10s"], *(pa.field(f"{g}_n", pa.uint64()) for g in _GAUGES)])


LIVE_COLUMNS = {"worker_10s": LIVE_WORKER_COLUMNS, "latency_10s": LIVE_LATENCY_COLUMNS, **losses.LIVE_COLUMNS}
"""Tables of 10 s buckets, with the columns that the state database keeps of their live rows."""


@dataclass(slots=True, eq=False)
class Bucket:
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0))
    resident_blocks: int | None = None
    sums: dict[str, float] = field(default_factory=dict)
    readings: dict[str, int] = field(default_factory=dict)
    growth: dict[str, float] = field(default_factory=dict)


def bucket_of(time_s: float) -> int:
    return int(time_s // BUCKET_S) * BUCKET_S


class Rollups:
    def __init__(self) -> None:
        self.workers: dict[int, dict[Who, Bucket]] = {}
        """By bucket: its start in whole seconds."""
        self.latencies: dict[int, dict[LatencyKey, int]] = {}
        self.losses = Losses()
        self.dirty: set[int] = set()
        """Buckets (start in seconds) that changed since the last `clean`."""

    def at(self, time_s: float, pool: str | None, worker: str | None, rank: int | None) -> Bucket:
        start = bucket_of(time_s)
        self.dirty.add(start)
        rows = self.workers.setdefault(start, {})
        who = pool, worker, rank
        bucket = rows.get(who)
        if bucket is None:
            bucket = rows[who] = Bucket()
        return bucket

    def count_request(self, r: Request) -> None:
        """What decision and outcome say. Requests without an outcome count nowhere: they have not ended."""
        o, d = r.outcome, r.decision
        if o is None:
            return
        pool, worker = r.worker
        c = self.at(o.time_s, pool, worker, r.rank).counts
        prompt = r.prompt_tokens
        c["requests"] += 1
        c["failed"] += o.error is not None or o.status is None or o.status >= 400
        c["prompt_tokens"] += prompt or 0
        c["completion_tokens"] += o.completion_tokens or 0
        if o.cached_tokens is not None and prompt:
            c["reported_requests"] += 1
            c["reported_prompt_tokens"] += prompt
            c["cached_tokens"] += o.cached_tokens
            c["hit_share_sum"] += o.cached_tokens / prompt
            if d is not None and d.token_source in ("exact", "engine") and r.predicted_tokens is not None:  # else it is a guess
                c["predicted_requests"] += 1
                c["predicted_exact"] += r.predicted_tokens == o.cached_tokens
        latencies = self.latencies.setdefault(bucket_of(o.time_s), {})
        route, policy = o.route if d is None else d.route, None if d is None else d.policy
        for measure, value in (("ttft", o.ttft_s), ("e2e", o.e2e_s), ("engine_queue", o.engine_queue_s), ("engine_ttft", o.engine_ttft_s)):
            if value is not None:
                key = pool, worker, r.rank, route, policy, measure, min(latency_bucket(value), 65535)
                latencies[key] = latencies.get(key, 0) + 1

    def count_told(self, r: Request) -> None:
        """What the events say of a request, once."""
        if r.outcome is None or r.event_hit_tokens is None:
            return
        pool, worker = r.worker
        c = self.at(r.outcome.time_s, pool, worker, r.rank).counts
        c["event_requests"] += 1
        c["event_prompt_tokens"] += r.prompt_tokens or 0
        c["event_hit_tokens"] += r.event_hit_tokens
        c["event_mismatches"] += r.outcome.cached_tokens is not None and r.outcome.cached_tokens != r.event_hit_tokens

    def count_loss(self, r: Request) -> None:
        """What attribution says of a request, once."""
        o, d, loss = r.outcome, r.decision, r.loss
        if o is None or loss is None:
            return
        pool, worker = r.worker
        self.at(o.time_s, pool, worker, r.rank)  # its bucket is a changed one
        who = d or o
        kind = pool, worker, r.rank, who.model, who.route, who.tenant
        self.losses.count(bucket_of(o.time_s), kind, loss.causes.run_causes, loss.causes.run_tokens, loss.run_seconds)
        if loss.ladder is not None:
            self.losses.count_ladder(bucket_of(o.time_s), kind, None if d is None else d.policy, loss.ladder)

    def count_load(self, now: WorkerLoad, before: WorkerLoad | None) -> None:
        b = self.at(now.time_s, now.pool, now.worker, now.rank)
        for name in _GAUGES:
            value = getattr(now, name)
            if value is not None:
                b.sums[name] = b.sums.get(name, 0.0) + value
                b.readings[name] = b.readings.get(name, 0) + 1
        if before is None:
            return
        for name, counter in zip(_GROWTH, ("prefix_queries_tokens", "prefix_hits_tokens", "preemptions"), strict=True):
            new, old = getattr(now, counter), getattr(before, counter)
            if new is not None and old is not None:
                b.growth[name] = b.growth.get(name, 0.0) + (new - old if new >= old else new)

    def closing(self, before_s: float) -> list[int]:
        """Buckets that ended before before_s (unix seconds), oldest first."""
        return sorted(s for s in self.workers if s + BUCKET_S <= before_s)

    def drop(self, buckets: Iterable[int]) -> None:
        for start in buckets:
            self.workers.pop(start, None)
            self.latencies.pop(start, None)
            self.losses.drop(start)
            self.dirty.discard(start)

    def worker_rows(self, bucket: int) -> pa.Table:
        """Rows of one bucket: the published columns, then the numbers of gauge readings (`LIVE_WORKER_SCHEMA`)."""
        rows = []
        for who, b in self.workers.get(bucket, {}).items():
            means = [None if name not in b.sums else b.sums[name] / b.readings[name] for name in _GAUGES]
            rows.append(
                (
                    bucket * 1_000_000, *who, *b.counts.values(), b.resident_blocks, *means,
                    *(b.growth.get(name) for name in _GROWTH), *(b.readings.get(name, 0) for name in _GAUGES),
                )
            )  # fmt: skip
        return from_rows(LIVE_WORKER_SCHEMA, rows)

    def latency_rows(self, bucket: int) -> pa.Table:
        return from_rows(SCHEMAS["latency_10s"], [(bucket * 1_000_000, *k, n) for k, n in self.latencies.get(bucket, {}).items()])

    def rows(self, bucket: int) -> dict[str, pa.Table]:
        """Rows of one bucket by table, with the columns of `LIVE_COLUMNS`."""
        return {"worker_10s": self.worker_rows(bucket), "latency_10s": self.latency_rows(bucket), **self.losses.rows(bucket)}

    def restore(self, live: Mapping[str, pa.Table]) -> None:
        """Takes over the live rows, by table, that the state database holds."""
        for row in live["worker_10s"].to_pylist():
            b = Bucket()
            b.counts = {name: row[name] for name in _COUNTERS}
            b.resident_blocks = row["resident_blocks"]
            b.readings = {name: row[f"{name}_n"] for name in _GAUGES if row[f"{name}_n"]}
            b.sums = {name: row[name] * n for name, n in b.readings.items()}
            b.growth = {name: row[name] for name in _GROWTH if row[name] is not None}
            self.workers.setdefault(_seconds(row["bucket"]), {})[row["pool"], row["worker"], row["rank"]] = b
        for row in live["latency_10s"].to_pylist():
            key = row["pool"], row["worker"], row["rank"], row["route"], row["policy"], row["measure"], row["log_bucket"]
            self.latencies.setdefault(_seconds(row["bucket"]), {})[key] = row["n"]
        for name in losses.LIVE_COLUMNS:
            for row in live[name].to_pylist():
                self.losses.restore(_seconds(row["bucket"]), name, row)


def _seconds(naive_utc: datetime) -> int:
    return int(naive_utc.replace(tzinfo=UTC).timestamp())
