"""Plain twin of the lives of blocks: every life in a list, uses placed by time, no sampling."""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.kv_events import Kind, KvBatch


@dataclass
class Life:
    stored_s: float
    used_s: list[float] = field(default_factory=list)
    copies: int = 1
    removed_s: float | None = None
    late: bool = False


@dataclass
class NaiveLives:
    lives: dict[tuple[int, int], list[Life]] = field(default_factory=dict)  # (worker, block) -> oldest first
    clock: dict[int, tuple[int, int]] = field(default_factory=dict)
    closed_s: float = 0.0
    late: int = 0

    def watch(self, worker: int, batch: KvBatch) -> None:
        epoch, seq = self.clock.get(worker, (-1, 0))
        if epoch >= 0 and (batch.epoch < epoch or (batch.epoch == epoch and batch.last_seq < seq)):
            return
        if batch.epoch > epoch or batch.first_seq > seq + 1:
            self.forget(worker)
        seq = batch.last_seq
        for event, hashes in batch:
            at_s = float(event["time_s"]) or batch.bridge_time_s
            kind = Kind(int(event["kind"]))
            if kind in (Kind.CLEARED, Kind.EPOCH_STARTED, Kind.GAP):
                self.forget(worker)
                if kind is Kind.GAP:
                    seq = max(seq, int(event["parent"]))
            if event["tier"] != 0 or kind not in (Kind.STORED, Kind.REMOVED):
                continue
            for block in hashes.tolist():
                there = self.lives.setdefault((worker, block), [])
                held = bool(there) and there[-1].copies > 0
                if kind is Kind.STORED and held:
                    there[-1].copies += 1
                elif kind is Kind.STORED:
                    there.append(Life(at_s))
                elif held:
                    there[-1].copies -= 1
                    if there[-1].copies == 0:
                        there[-1].removed_s = at_s
                        there[-1].late = at_s < self.closed_s
                        self.late += there[-1].late
        self.clock[worker] = batch.epoch, seq

    def forget(self, worker: int) -> None:
        for (w, _), lives in self.lives.items():
            if w == worker and lives[-1:] and lives[-1].copies > 0:
                lives[-1].copies = 0

    def touch(self, worker: int, blocks: list[int], from_s: float, to_s: float) -> None:
        for block in blocks:
            for life in reversed(self.lives.get((worker, block), [])):
                if life.stored_s <= to_s:
                    if life.copies > 0 or (life.removed_s is not None and from_s <= life.removed_s):
                        life.used_s.append(to_s)
                    break

    def removed(self, from_s: float, to_s: float) -> list[tuple[int, float, float]]:
        """(worker, lifetime, idle), sorted."""
        return sorted(
            (worker, life.removed_s - life.stored_s, life.removed_s - min(life.removed_s, max([life.stored_s, *life.used_s])))
            for (worker, _), lives in self.lives.items()
            for life in lives
            if life.removed_s is not None and not life.late and from_s <= life.removed_s < to_s
        )
