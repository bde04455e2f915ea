"""Prometheus metrics of the collector. Set after each commit and publish; reading the page costs the loop nothing."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from collector.fold import Fold
from collector.health import Check, Health
from collector.standing import Standing
from collector.store.state import Commit
from schemas.topics import CHANGES, DECISIONS, KV_EVENTS, OUTCOMES, WORKER_LOAD
from schemas.workers import Trust

MAX_WORKERS = 1000  # label values of residency; beyond it the rest is left out and counted
TRUST = {Trust.BLIND: 0, Trust.DEGRADED: 1, Trust.EXACT: 2}
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Metrics:
    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        p = "warmwatch_collector_"
        self._records = Counter(p + "records", "Records read.", ["topic"], registry=r)
        self._blocks = Counter(p + "block_events", "Block hashes in KV events read.", registry=r)
        self._dead = Counter(p + "dead_letters", "Records that could not be used.", registry=r)
        self._join = Counter(p + "join", "Requests told, untold, missing a half, late or double records.", ["what"], registry=r)
        self._lost = Counter(p + "stream_lost_records", "Records that the stream lost before they were read.", registry=r)
        self._lag = Gauge(p + "lag_records", "Records not read yet.", ["topic", "partition"], registry=r)
        self._open = Gauge(p + "open_requests", "Requests in flight or not told yet.", registry=r)
        self._paused = Gauge(p + "paused", "1: reading is paused because writing fails or the disk is nearly full.", registry=r)
        self._connected = Gauge(p + "stream_connected", "1: the stream is read.", registry=r)
        self._published_at = Gauge(p + "published_timestamp_seconds", "When the last file was published.", registry=r)
        self._publish = Histogram(p + "publish_seconds", "Time to write a published file.", buckets=SECONDS, registry=r)
        self._commit = Histogram(p + "commit_seconds", "Time of a commit.", buckets=SECONDS, registry=r)
        self._segments = Counter(p + "segments", "Segment files written.", ["table"], registry=r)
        self._memory = Gauge(p + "index_bytes", "Memory of the residency table and ring.", registry=r)
        self._resident = Gauge(p + "resident_blocks", "Blocks held, from events.", ["pool", "worker", "rank"], registry=r)
        self._trusted = Gauge(p + "trust", "2 exact, 1 degraded, 0 blind.", ["pool", "worker", "rank"], registry=r)
        self._unlabelled = Gauge(p + "workers_without_metrics", f"Workers beyond the first {MAX_WORKERS}.", registry=r)
        self._checks = Gauge(p + "health_checks", "Rows of data_health by status.", ["status"], registry=r)
        self._seen: Counts[str] = Counts()
        self._commit_s = -1.0

    def begin(self, counters: Counts[str]) -> None:
        """What was counted before this process does not count here: a counter that began anywhere else would look like a burst."""
        self._seen = counters.copy()

    def committed(self, change: Commit) -> None:
        for s in change.added:
            self._segments.labels(s.table).inc()

    def published(self, fold: Fold, health: Health, found: list[Check], standings: Sequence[Standing]) -> None:
        new = fold.counters - self._seen
        self._seen = fold.counters.copy()
        for topic in (KV_EVENTS, WORKER_LOAD, DECISIONS, OUTCOMES, CHANGES):
            self._records.labels(topic).inc(new[f"records/{topic}"])
        self._blocks.inc(new["blocks"])
        self._dead.inc(new["dead_letters"])
        self._lost.inc(new["stream_lost_records"])
        for what in (
            "told",
            "untold",
            "outcome_missing",
            "decision_missing",
            "closed_early",
            "late/decision",
            "late/outcome",
            "duplicate/decision",
            "superseded/decision",
            "duplicate/outcome",
        ):
            self._join.labels(what.replace("/", "_")).inc(new[what])
        for (topic, partition), lag in health.lag.items():
            self._lag.labels(topic, str(partition)).set(lag)
        self._open.set(len(fold.join.open))
        self._paused.set(health.state == "paused")
        self._connected.set(not health.stream_trouble)
        self._published_at.set(health.published_at_s)
        self._publish.observe(health.publish_s)
        if health.commit_s != self._commit_s:
            self._commit_s = health.commit_s
            self._commit.observe(health.commit_s)
        self._memory.set(fold.residency.held_bytes())
        for number, who in enumerate(fold.workers[:MAX_WORKERS]):
            w = fold.residency.workers[number]
            labels = who.pool, who.worker, str(who.rank)
            self._resident.labels(*labels).set(int(w["resident"]))
            self._trusted.labels(*labels).set(TRUST[standings[number].trust])
        self._unlabelled.set(max(0, len(fold.workers) - MAX_WORKERS))
        by_status = Counts(c.status for c in found)
        for status in ("ok", "warn", "bad", "unknown"):
            self._checks.labels(status).set(by_status[status])
