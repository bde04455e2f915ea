"""Recorded engine frames -> records of the stream, through the very code of the live path; for tests and offline looks at a capture."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from collector.bridge.rank_feed import RankFeed
from schemas.block_hash import HashKey
from schemas.kv_events import WorkerId

BATCH_S = 0.02


class RecordedFrame(NamedTuple):
    """One ZMQ message: unix time of receipt, and its frames (topic, sequence, payload)."""

    received_s: float
    frames: Sequence[bytes]


def read_frames(path: Path) -> list[RecordedFrame]:
    """Reads a capture: JSON lines `{"t": unix seconds, "frames": [base64, ...]}`, gzipped or not."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [RecordedFrame(line["t"], [base64.b64decode(frame) for frame in line["frames"]]) for line in map(json.loads, lines)]


def replay_frames(frames: Iterable[RecordedFrame], source: WorkerId, key: HashKey, batch_s: float = BATCH_S) -> list[bytes]:
    """Encoded KV records (`schemas.kv_events.decode`) that the bridge writes for these frames, in order.

    Frames received within batch_s share a record, as live; 0 gives every frame its own. Deterministic: the epoch is the first frame's time.
    """
    feed = RankFeed(key, source, can_replay=False, snapshot_interval_s=float("inf"))
    out: list[bytes] = []
    now_s = 0.0
    for received_s, message in frames:
        since_s = feed.waiting_since_s
        if since_s is not None and received_s - since_s >= batch_s:
            out += [record.value for record in feed.take(since_s + batch_s)]
        now_s = received_s
        feed.on_live(message, now_s)
    return out + [record.value for record in feed.take(now_s)]
