"""Drives a real collector over a real stream, in this process, until it has read and told all there is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb

from collector.ingest import Collector
from collector.settings import CollectorSettings
from schemas.stream import Stream
from schemas.tables.read import FILE_NAME, open_published

SMALL = {"recent_events": 1 << 14, "recent_hashes": 1 << 16, "publish_interval_s": 0.05, "min_free_bytes": 0,
    "lateness_s": 0.02, "ghost_blocks": 1 << 14, "seen_blocks": 1 << 14, "filter_blocks": 1 << 17, "content_entries": 1 << 14,
    "reuse_blocks": 1 << 14,
         "keep_s": 1e12, "kv_events_keep_s": 1e12, "stale_after_s": 1e12, "blind_after_s": 1e12}  # fmt: skip


def settings(data_dir: Path, stream: str = "memory://test", **more: Any) -> CollectorSettings:
    return CollectorSettings(**{"data_dir": data_dir, "stream": stream, "metrics_port": 0, **SMALL, **more})


def caught_up(collector: Collector, stream: Stream) -> bool:
    """All that the stream holds was read and committed."""
    if not collector.follow.positions or collector.fold.again or collector.health.stream_trouble:
        return False
    prefix = collector.settings.topic_prefix
    topics = {t for t, _ in collector.follow.positions if t.startswith(prefix)}
    ends = {(t, p): end for t in topics for p, end in stream.end_offsets(t).items()}
    stored = collector._state.positions()
    return all(part in stored and stored[part].next_offset >= end for part, end in ends.items())


def drain(collector: Collector, stream: Stream, *, told: bool = True, timeout_s: float = 60.0) -> None:
    """Turns until everything is read, committed and, if `told`, no joined request is open."""
    deadline = time.monotonic() + timeout_s
    while not caught_up(collector, stream) or (told and any(True for _ in collector.fold.join.joined())):
        assert time.monotonic() < deadline, f"not done: {collector.health}, open {len(collector.fold.join.open)}"
        collector.turn()
    collector._commit_and_publish()
    collector._publish("running")


@contextmanager
def published(data_dir: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    connection = open_published(data_dir / FILE_NAME)
    try:
        yield connection
    finally:
        connection.close()


def ask(data_dir: Path, sql: str) -> list[tuple[Any, ...]]:
    with published(data_dir) as connection:
        return connection.execute(sql).fetchall()
