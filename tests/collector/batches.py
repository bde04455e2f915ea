"""Builds KV batches for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from schemas.kv_events import COMPLETE, ENGINE_RESTARTED, EVENT, FIRST, LAST, Kind, KvBatch, WorkerId

Event = tuple[Kind, Sequence[int], dict[str, float]]


def event(kind: Kind, hashes: Sequence[int] = (), **fields: float) -> Event:
    return kind, hashes, fields


def batch(worker: WorkerId, epoch: int, seq: int, time_s: float, *events: Event, first_seq: int | None = None) -> KvBatch:
    rows = np.zeros(len(events), EVENT)
    hashes: list[int] = []
    for row, (kind, own, fields) in zip(rows, events, strict=True):
        row["kind"], row["count"], row["seq"], row["time_s"] = kind, len(own), seq, time_s
        for name, value in fields.items():
            row[name] = value
        hashes += own
    return KvBatch(worker, epoch, seq if first_seq is None else first_seq, seq, time_s, time_s + 0.001, rows, np.array(hashes, np.uint64))


def random_batches(rng: random.Random, worker: WorkerId, n: int, blocks: int, start_s: float = 1000.0) -> list[KvBatch]:
    """A worker's life with everything in it: tiers, groups, clears, restarts, gaps, snapshots, jumps, stale records."""
    out: list[KvBatch] = []
    epoch, seq, time_s = rng.randint(1, 5), rng.choice([0, 0, 40]), start_s
    if rng.random() < 0.7:
        flags = COMPLETE if rng.random() < 0.7 else 0
        out.append(batch(worker, epoch, seq, time_s, event(Kind.EPOCH_STARTED, flags=flags)))
    for _ in range(n):
        time_s += rng.random()
        dice = rng.random()
        if dice < 0.01:
            epoch, seq = epoch + 1, 0
            flags = (COMPLETE if rng.random() < 0.7 else 0) | (ENGINE_RESTARTED if rng.random() < 0.6 else 0)
            marks = [event(Kind.EPOCH_STARTED, flags=flags)] if rng.random() < 0.8 else []
            out.append(batch(worker, epoch, seq, time_s, *marks))
            continue
        if dice < 0.02:
            out.append(batch(worker, epoch, seq + 5, time_s, event(Kind.GAP, seq=seq + 1, parent=seq + 5), first_seq=seq + 1))
            seq += 5
            continue
        if dice < 0.03 and len(out) > 2:
            out.append(out[-2])  # a record again: stale
            continue
        if dice < 0.035 and out:
            out += out[-min(len(out), rng.randint(1, 3)) :]  # a producer's retry of the last ones
            continue
        if dice < 0.04:
            seq += rng.randint(1, 3)  # lost without a mark
        if dice < 0.06:
            flags = COMPLETE if rng.random() < 0.7 else 0
            parts = [[rng.randrange(1, blocks) for _ in range(rng.randint(0, 12))] for _ in range(rng.randint(1, 3))]
            for i, part in enumerate(parts):
                mark = flags | (FIRST if i == 0 else 0) | (LAST if i == len(parts) - 1 else 0)
                out.append(batch(worker, epoch, seq, time_s, event(Kind.SNAPSHOT, part, flags=mark, tier=rng.randint(0, 1))))
            continue
        seq += 1
        events = []
        for _ in range(rng.randint(0, 4)):
            kind = rng.choices([Kind.STORED, Kind.REMOVED, Kind.REPORTED, Kind.CLEARED, Kind.UNNAMED], [50, 45, 3, 1, 1])[0]
            own = [rng.randrange(1, blocks) for _ in range(rng.randint(1, 6))] if kind in (Kind.STORED, Kind.REMOVED, Kind.REPORTED) else []
            fields = {"tier": rng.choice([0, 0, 0, 1]), "group": rng.choice([0, 0, 0, 2])}
            if kind == Kind.UNNAMED:
                fields |= {"parent": 3}
            events.append(event(kind, own, **fields))
        out.append(batch(worker, epoch, seq, time_s, *events))
    return out
