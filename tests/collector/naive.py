"""Plain twins of the compiled residency and event-order kernels: dictionaries and lists, no cleverness."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from collector.residency import SEEN
from schemas.kv_events import COMPLETE, ENGINE_RESTARTED, FIRST, LAST, Kind, KvBatch


@dataclass
class NaiveWorker:
    held: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # (tier, group, hash) -> copies
    trust: str = "blind"
    epoch: int | None = None
    seq: int | None = None
    peak: int = 0
    lost: int = 0
    restarts: int = 0
    snapshot: Counter[tuple[int, int, int]] | None = None
    seen: list[tuple[int, float, bytes, bytes]] = field(default_factory=list)  # records at the clock
    log: list[tuple[str, float, Counter[tuple[int, int, int]]]] = field(default_factory=list)

    @property
    def resident(self) -> int:
        return self.held.total()

    @property
    def distinct(self) -> int:
        return len(self.held)

    def apply(self, batch: KvBatch) -> None:
        if self.epoch is not None and (
            batch.epoch < self.epoch or (batch.epoch == self.epoch and self.seq is not None and batch.last_seq < self.seq)
        ):
            return
        record = batch.first_seq, batch.bridge_time_s, batch.events.tobytes(), batch.hashes.tobytes()
        if (batch.epoch, batch.last_seq) != (self.epoch, self.seq):
            self.seen.clear()
        if record in self.seen[-SEEN:]:
            return
        self.seen.append(record)
        kinds = [int(e["kind"]) for e in batch.events]
        marked = bool(kinds) and kinds[0] == Kind.EPOCH_STARTED
        if (self.epoch is None or batch.epoch > self.epoch) and not marked:
            self.held.clear()
            self.trust, self.peak, self.epoch, self.seq = "degraded", 0, batch.epoch, None
        if self.seq is not None and not marked and batch.first_seq > self.seq + 1 and not (kinds and kinds[0] == Kind.GAP):
            self.lost += batch.first_seq - self.seq - 1
            self.trust = "degraded"
        for event, hashes in batch:
            kind, flags = int(event["kind"]), int(event["flags"])
            keys = [(int(event["tier"]), int(event["group"]), int(h)) for h in hashes]
            if kind == Kind.STORED:
                self.held.update(keys)
            elif kind == Kind.REMOVED:
                for key in keys:
                    if self.held[key] > 1:
                        self.held[key] -= 1
                    else:
                        del self.held[key]
            elif kind == Kind.CLEARED:
                self.held.clear()
                self.trust = "exact"
            elif kind == Kind.EPOCH_STARTED:
                self.restarts += self.epoch is not None and self.epoch != batch.epoch and bool(flags & ENGINE_RESTARTED)
                self.held.clear()
                self.epoch, self.seq, self.peak, self.snapshot = batch.epoch, None, 0, None
                self.trust = "exact" if flags & COMPLETE else "degraded"
            elif kind == Kind.GAP:
                self.lost += int(event["parent"]) - int(event["seq"]) + 1
                self.trust = "degraded"
                self.seq = int(event["parent"])
            elif kind == Kind.UNNAMED:
                if int(event["tier"]) == 0 and self.trust == "exact":
                    self.trust = "degraded"
            elif kind == Kind.SNAPSHOT:
                if flags & FIRST:
                    self.snapshot = Counter()
                if self.snapshot is not None:
                    self.snapshot.update(keys)
                    if flags & LAST:
                        if flags & COMPLETE or self.trust != "exact":
                            self.held = self.snapshot
                        if flags & COMPLETE:
                            self.trust = "exact"
                        self.snapshot = None
            self.peak = max(self.peak, self.resident)
        if self.seq is None or batch.last_seq > self.seq:
            self.seq = batch.last_seq
