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

from schemas.stream.base import TopicSpec

KV_EVENTS = "kv-events"
WORKER_LOAD = "worker-load"
DECISIONS = "decisions"
OUTCOMES = "outcomes"
CHANGES = "changes"

_DAY_S = 86_400


def topic_specs(prefix: str = "", partitions: int = 4) -> tuple[TopicSpec, ...]:
    """All topics with the deployment's prefix, for `Stream.ensure_topics`. `changes` is small and keeps one partition.

    Byte limits count per partition: with four partitions all topics together stay below 15 GB. Kafka topics that exist keep what their
    operator chose.
    """
    return (
        TopicSpec(prefix + KV_EVENTS, partitions, 2 * _DAY_S, 2 << 30, 1 << 20),
        TopicSpec(prefix + WORKER_LOAD, partitions, 2 * _DAY_S, 256 << 20, 64 << 10),
        TopicSpec(prefix + DECISIONS, partitions, 7 * _DAY_S, 1 << 30, 4 << 20),
        TopicSpec(prefix + OUTCOMES, partitions, 7 * _DAY_S, 256 << 20, 64 << 10),
        TopicSpec(prefix + CHANGES, 1, 90 * _DAY_S, 64 << 20, 64 << 10),
    )


def worker_key(pool: str, worker: str, rank: int) -> bytes:
    """The stream key of one worker's cache; also its name in logs and in the published tables."""
    return f"{pool}/{worker}/{rank}".encode()
