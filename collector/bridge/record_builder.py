"""Collects events of one rank and packs them into records of the stream, bounded in bytes.

A record holds one epoch. Long events are split: the next part of a STORED goes on from the last name of the part before.
The builder knows no clock: who owns it decides when to `take`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from schemas.block_hash import U64
from schemas.kv_events import COMPLETE, ENGINE_RESTARTED, EVENT, FIRST, LAST, Kind, KvBatch, WorkerId, encode

TARGET_BYTES = 256 << 10
MAX_EVENT_HASHES = 16 << 10  # 128 KiB, so that a record stays well under the topic's limit
_NO_HASHES: U64 = np.empty(0, np.uint64)
Row = tuple[int, int, int, int, int, float, int, int, int]


@dataclass(frozen=True, slots=True)
class BuiltRecord:
    """One record for the stream. first_seq to last_seq: engine batches it stands for; None when it only repeats (snapshots).

    snapshot: number of the snapshot that it is part of; starts_epoch: it holds an EPOCH_STARTED, restarted: with ENGINE_RESTARTED.
    """

    source: WorkerId
    epoch: int
    first_seq: int
    last_seq: int
    value: bytes
    snapshot: int | None = None
    starts_epoch: bool = False
    restarted: bool = False


class RecordBuilder:
    def __init__(self, source: WorkerId, target_bytes: int = TARGET_BYTES) -> None:
        self.source = source
        self.epoch = 0
        self._target_bytes = target_bytes
        self._ready: list[BuiltRecord] = []
        self._snapshots = 0
        self._reset()

    def _reset(self) -> None:
        self._rows: list[Row] = []
        self._hashes: list[U64] = []
        self._bytes = 0
        self._starts_epoch = self._restarted = False
        self._first_seq: int | None = None
        self._last_seq = 0
        self._engine_time_s: float | None = None

    @property
    def waiting(self) -> bool:
        """Something waits to be taken."""
        return self._first_seq is not None or bool(self._ready)

    def batch(self, seq: int, engine_time_s: float | None, bridge_time_s: float) -> None:
        """The rows that follow belong to engine batch `seq`."""
        if self._bytes >= self._target_bytes:
            self.close(bridge_time_s)
        if self._first_seq is None:
            self._first_seq = seq
        self._last_seq = max(self._last_seq, seq) if self._first_seq != seq else seq
        if engine_time_s is not None:
            self._engine_time_s = engine_time_s

    def start_epoch(self, epoch: int, complete: bool, seq: int, time_s: float, *, restarted: bool = False) -> None:
        """restarted: the engine itself began anew."""
        self.close(time_s)
        self.epoch = epoch
        self.batch(seq, None, time_s)
        self._starts_epoch, self._restarted = True, restarted
        self.row(Kind.EPOCH_STARTED, seq, time_s, flags=(COMPLETE if complete else 0) | (ENGINE_RESTARTED if restarted else 0))

    def gap(self, first: int, last: int, time_s: float) -> None:
        """Batches first to last (both included) are lost."""
        self.batch(first, None, time_s)
        self._last_seq = max(self._last_seq, last)
        self.row(Kind.GAP, first, time_s, parent=last)

    def row(
        self,
        kind: Kind,
        seq: int,
        time_s: float,
        hashes: U64 = _NO_HASHES,
        tier: int = 0,
        group: int = 0,
        parent: int = 0,
        block_size: int = 0,
        flags: int = 0,
    ) -> None:
        while len(hashes) > MAX_EVENT_HASHES:
            part, hashes = hashes[:MAX_EVENT_HASHES], hashes[MAX_EVENT_HASHES:]
            self._append(kind, seq, time_s, part, tier, group, parent, block_size, flags)
            if kind in (Kind.STORED, Kind.REPORTED):
                parent = int(part[-1])
        self._append(kind, seq, time_s, hashes, tier, group, parent, block_size, flags)

    def _append(
        self, kind: Kind, seq: int, time_s: float, hashes: U64, tier: int, group: int, parent: int, block_size: int, flags: int
    ) -> None:
        if self._bytes + 8 * len(hashes) > self._target_bytes and self._rows:
            first, engine_time_s = seq, self._engine_time_s
            self.close(time_s)
            self.batch(first, engine_time_s, time_s)
        self._rows.append((kind, tier, group, len(hashes), seq, time_s, parent, block_size, flags))
        if len(hashes):
            self._hashes.append(hashes)
        self._bytes += EVENT.itemsize + 8 * len(hashes)

    def snapshot(self, lists: list[tuple[int, int, int, int, U64]], seq: int, complete: bool, time_s: float) -> None:
        """The whole resident set at `seq`: (tier, group, block_size, flags, names) for each place."""
        self.close(time_s)
        self._snapshots += 1
        rows: list[tuple[int, int, int, int, U64]] = []
        for tier, group, block_size, flags, names in lists:
            rows += [(tier, group, block_size, flags, names[i : i + MAX_EVENT_HASHES]) for i in range(0, len(names), MAX_EVENT_HASHES)]
        rows = rows or [(0, 0, 0, 0, _NO_HASHES)]
        for i, (tier, group, block_size, flags, names) in enumerate(rows):
            flags |= (FIRST if i == 0 else 0) | (LAST if i == len(rows) - 1 else 0) | (COMPLETE if complete else 0)
            if self._rows and self._bytes + 8 * len(names) > self._target_bytes:
                self._close(time_s, self._snapshots)
            if self._first_seq is None:
                self._first_seq = self._last_seq = seq
            self._rows.append((Kind.SNAPSHOT, tier, group, len(names), seq, time_s, 0, block_size, flags))
            self._hashes.append(names)
            self._bytes += EVENT.itemsize + 8 * len(names)
        self._close(time_s, self._snapshots)

    def close(self, bridge_time_s: float) -> None:
        """Ends the record that is being filled."""
        if self._first_seq is not None:
            self._close(bridge_time_s, None)

    def _close(self, bridge_time_s: float, snapshot: int | None) -> None:
        first = self._first_seq or 0
        value = encode(
            KvBatch(
                self.source, self.epoch, first, self._last_seq,
                self._engine_time_s if self._engine_time_s is None or math.isfinite(self._engine_time_s) else None, bridge_time_s,
                np.array(self._rows, EVENT), np.concatenate(self._hashes) if self._hashes else _NO_HASHES,
            )
        )  # fmt: skip
        self._ready.append(
            BuiltRecord(self.source, self.epoch, first, self._last_seq, value, snapshot, self._starts_epoch, self._restarted)
        )
        self._reset()

    def take(self, bridge_time_s: float) -> list[BuiltRecord]:
        """All records so far, the one being filled included."""
        self.close(bridge_time_s)
        ready, self._ready = self._ready, []
        return ready
