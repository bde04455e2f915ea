"""Plain twins of the compiled residency and event-order kernels: dictionaries and lists, no cleverness."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from collector.attribution.history import CLEARED, EVICTED, NEVER, RESIDENT
from collector.residency import SEEN
from schemas.kv_events import COMPLETE, ENGINE_RESTARTED, FIRST, LAST, WINDOWED, Kind, KvBatch


@dataclass
class Told:
    """What had become of a block: the twin of one prior. gone: ticks of 10 ms."""

    fate: int
    gone: int = 0
    new: bool = False


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
    ever: set[int] = field(default_factory=set)  # of all workers: hand the same set to each
    gone: dict[int, tuple[int, int]] = field(default_factory=dict)  # hash -> (fate, tick): the newest loss since the last store
    priors: list[Told] = field(default_factory=list)  # one for each stored hash
    windowed: set[int] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)
    log: list[tuple[float, Counter[tuple[int, int, int]], str]] = field(default_factory=list)  # time, held and trust after each event

    @property
    def resident(self) -> int:
        return self.held.total()

    @property
    def distinct(self) -> int:
        return len(self.held)

    def _ends(self, time_s: float) -> None:
        for _, _, h in self.held:
            self.gone[h] = CLEARED, int(time_s * 100)

    def _stores(self, key: tuple[int, int, int], time_s: float) -> None:
        h = key[2]
        lost = self.gone.pop(h, None)
        elsewhere = any(k[2] == h for k in self.held if k != key)
        if self.held[key] > 0 or (elsewhere and (lost is None or lost[0] == CLEARED)):
            self.priors.append(Told(RESIDENT))
        elif lost is not None:
            self.priors.append(Told(lost[0], max(0, int(time_s * 100) - lost[1])))
        else:
            self.priors.append(Told(NEVER, new=h not in self.ever))
        self.ever.add(h)
        self.groups.add(key[1])
        self.held[key] += 1

    def _logs(self, time_s: float, always: bool = True) -> None:
        last = self.log[-1][1:] if self.log else (Counter(), "blind")
        if always or last != (self.held, self.trust):
            self.log.append((time_s, Counter(self.held), self.trust))

    def held_at(self, chain: list[int], time_s: float) -> tuple[int, str]:
        """(leading blocks held, trust) just after the last event at or before a time."""
        i = len(self.log) - 1
        while i >= 0 and self.log[i][0] > time_s:
            i -= 1
        held, trust = self.log[i][1:] if i >= 0 else (Counter[tuple[int, int, int]](), "blind")
        whole = self.groups - self.windowed
        for n, h in enumerate(chain):
            if not whole or not all(any(k[2] == h and k[1] == g for k in held) for g in whole):
                return n, trust
        return len(chain), trust

    def fate(self, h: int) -> tuple[int, int | None]:
        """(fate, tick since when) as of now."""
        whole = self.groups - self.windowed
        lost = self.gone.get(h)
        if whole and all(any(k[2] == h and k[1] == g for k in self.held) for g in whole):
            return RESIDENT, None
        elsewhere = any(k[2] == h for k in self.held)
        if lost is not None and not (elsewhere and lost[0] == CLEARED):
            return lost
        return (RESIDENT if elsewhere else NEVER), None

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
            self._ends(batch.bridge_time_s)
            self.held.clear()
            self._logs(batch.bridge_time_s)
            self.trust, self.peak, self.epoch, self.seq = "degraded", 0, batch.epoch, None
            self.log[-1] = (*self.log[-1][:2], self.trust)
        if self.seq is not None and not marked and batch.first_seq > self.seq + 1 and not (kinds and kinds[0] == Kind.GAP):
            self.lost += batch.first_seq - self.seq - 1
            self.trust = "degraded"
            self._logs(batch.bridge_time_s)
        for event, hashes in batch:
            kind, flags = int(event["kind"]), int(event["flags"])
            keys = [(int(event["tier"]), int(event["group"]), int(h)) for h in hashes]
            time_s = float(event["time_s"]) if event["time_s"] > 0 else batch.bridge_time_s
            if kind in (Kind.STORED, Kind.SNAPSHOT) and flags & WINDOWED:
                self.windowed.add(int(event["group"]))
            if kind == Kind.STORED:
                for key in keys:
                    self._stores(key, time_s)
            elif kind == Kind.REMOVED:
                for key in keys:
                    if self.held[key] > 1:
                        self.held[key] -= 1
                    elif key in self.held:
                        del self.held[key]
                        self.gone[key[2]] = EVICTED, int(time_s * 100)
            elif kind == Kind.CLEARED:
                self._ends(time_s)
                self.held.clear()
                self.trust = "exact"
            elif kind == Kind.EPOCH_STARTED:
                self.restarts += self.epoch is not None and self.epoch != batch.epoch and bool(flags & ENGINE_RESTARTED)
                self._ends(time_s)
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
                    self.ever.update(k[2] for k in keys)
                    self.groups.update(k[1] for k in keys)
                    if flags & LAST:
                        if (flags & COMPLETE or self.trust != "exact") and self.snapshot != self.held:
                            self._ends(time_s)
                            self.held = self.snapshot
                        if flags & COMPLETE:
                            self.trust = "exact"
                        self.snapshot = None
            self.peak = max(self.peak, self.resident)
            self._logs(time_s, kind in (Kind.STORED, Kind.REMOVED, Kind.CLEARED, Kind.EPOCH_STARTED, Kind.GAP))
        if self.seq is None or batch.last_seq > self.seq:
            self.seq = batch.last_seq
