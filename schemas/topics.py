"""The streams between Warmwatch's processes: names, keys, versions, retention.

| topic        | key                | value                                   | writers              | readers            |
|--------------|--------------------|-----------------------------------------|----------------------|--------------------|
| kv-events    | pool/worker/rank   | binary KV batch (`kv_events`)           | bridges              | collector, routers |
| worker-load  | pool/worker/rank   | JSON `WorkerLoad`                       | bridges              | collector, routers |
| decisions    | request id         | JSON `Decision`                         | routers              | collector          |
| outcomes     | request id         | JSON `Outcome`                          | routers              | collector          |
| changes      | kind               | JSON `Change`                           | people, deploy tools | collector          |

A decision and its outcome share the key, and with it the partition. kv-events are keyed by worker and rank (not by pool alone), so that a
large pool spreads over partitions while each cache's events, whose order matters, stay in one.
Every value carries its schema version; a reader ignores unknown fields and sets records of unknown versions aside with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

KV_EVENTS = "kv-events"
WORKER_LOAD = "worker-load"
DECISIONS = "decisions"
OUTCOMES = "outcomes"
CHANGES = "changes"


@dataclass(frozen=True, slots=True)
class Topic:
    """name without prefix; retention in seconds and bytes a partition (None: not bounded by size); largest record in bytes."""

    name: str
    retention_s: int
    retention_bytes: int | None
    max_record_bytes: int


DAY_S = 86_400

TOPICS: tuple[Topic, ...] = (
    Topic(KV_EVENTS, 2 * DAY_S, 8 << 30, 1 << 20),
    Topic(WORKER_LOAD, 2 * DAY_S, 1 << 30, 64 << 10),
    Topic(DECISIONS, 7 * DAY_S, 8 << 30, 4 << 20),
    Topic(OUTCOMES, 7 * DAY_S, 2 << 30, 64 << 10),
    Topic(CHANGES, 90 * DAY_S, 64 << 20, 64 << 10),
)


def worker_key(pool: str, worker: str, rank: int) -> bytes:
    """The stream key of one worker's cache; also its name in logs and in the published tables."""
    return f"{pool}/{worker}/{rank}".encode()
