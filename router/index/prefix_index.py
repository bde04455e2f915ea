"""What each worker's cache holds, as the KV events say it, and what it will hold, as our own dispatches say it.

    KvBatch --apply--> confirmed table   blocks that an engine announced
    dispatch --expect--> pending table   blocks of requests on their way, until they expire or are dropped

A slot is one worker and rank. `match` answers for all slots at once, and keeps the two kinds apart: a forecast from confirmed blocks can
be held against the engine's report; one from pending blocks is a hope that makes siblings follow each other.

`(epoch, seq)` is a slot's clock. Rules, in order:

    a batch of an older epoch, or wholly before the clock     ignored, counted (a late replay must not bring removed blocks back)
    a new epoch                                               the slot is emptied; DEGRADED unless the batch says EPOCH_STARTED | COMPLETE
    first batch of a slot without its epoch's start           DEGRADED: what came before is unknown
    a jump of seq that no GAP names                           DEGRADED, counted; a snapshot under way is given up
    GAP                                                       DEGRADED
    CLEARED                                                   the slot is emptied, EXACT: nothing before it matters any more
    SNAPSHOT first .. last                                    COMPLETE: replaces the slot's blocks, EXACT; else only where trust was lost

No clock, stream or thread here: one owner calls, time is an argument. Windowed attention groups are no residency (table.py). Limit: of
several full-attention groups the first one counts.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from router.index.table import GPU, LOWER, NO_GROUP, BlockTable, Overlaps
from schemas.block_hash import U64
from schemas.kv_events import COMPLETE, FIRST, LAST, WINDOWED, Events, Kind, KvBatch, Tier, WorkerId
from schemas.workers import Trust

TRUST_CODES = (Trust.BLIND, Trust.DEGRADED, Trust.EXACT)
"""Trust by its code in `PrefixIndex.trust`: larger is better."""
BLIND, DEGRADED, EXACT = 0, 1, 2

_PLAIN: npt.NDArray[np.bool_] = np.zeros(256, np.bool_)
_PLAIN[[Kind.STORED, Kind.REMOVED, Kind.REPORTED, Kind.UNNAMED]] = True


@dataclass(slots=True)
class Slot:
    """State of one worker and rank. epoch and seq are None until the first batch."""

    number: int
    source: WorkerId
    epoch: int | None = None
    seq: int | None = None
    newest_s: float | None = None  # bridge time of the newest batch applied, unix seconds
    block_size: int | None = None
    group: int = NO_GROUP
    snapshot: list[tuple[Events, U64]] | None = None  # parts of a snapshot that is not complete yet
    since_snapshot: list[tuple[Events, U64]] = field(default_factory=list)  # live events between its parts

    def drop_snapshot(self) -> None:
        """Gives up one that is under way, so that events are no longer kept for it."""
        self.snapshot = None
        self.since_snapshot.clear()


@dataclass(slots=True)
class IndexCounts:
    """Cumulative since the start."""

    batches: int = 0
    blocks: int = 0
    stale_batches: int = 0
    unexplained_gaps: int = 0
    gaps: int = 0
    clears: int = 0
    epochs: int = 0
    snapshots: int = 0
    expired: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """Blocks that a dispatched request will leave on a slot. `drop` takes it back."""

    slot: int
    hashes: U64
    expires_s: float


class PrefixIndex:
    """See the module. For one thread at a time."""

    def __init__(self) -> None:
        self._confirmed = BlockTable()
        self._pending = BlockTable()
        self._slots: dict[WorkerId, Slot] = {}
        self._free: list[int] = []  # numbers of released slots
        self._expiry: list[tuple[float, int, Expectation]] = []
        self._open: dict[int, Expectation] = {}
        self._pushed = 0
        self.trust: npt.NDArray[np.uint8] = np.zeros(64, np.uint8)
        self.heard_s: npt.NDArray[np.float64] = np.full(64, -np.inf)
        self.level_s = np.inf  # monotonic; all that a log held then is applied (feed.py). inf: no log is followed
        self.counts = IndexCounts()

    def slot(self, source: WorkerId) -> Slot:
        """The slot of this worker and rank; a new one is BLIND and empty."""
        found = self._slots.get(source)
        if found is None:
            found = self._slots[source] = Slot(self._free.pop() if self._free else len(self._slots), source)
            if found.number >= len(self.trust):
                self._confirmed.fit(found.number + 1)
                self._pending.fit(found.number + 1)
                more = self._confirmed.slots - len(self.trust)
                self.trust = np.concatenate([self.trust, np.zeros(more, np.uint8)])
                self.heard_s = np.concatenate([self.heard_s, np.full(more, -np.inf)])
        return found

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(self._slots.values())

    @property
    def rows(self) -> int:
        """Distinct blocks known."""
        return self._confirmed.rows

    @property
    def size_bytes(self) -> int:
        return self._confirmed.size_bytes + self._pending.size_bytes

    @property
    def unknown_removals(self) -> int:
        return self._confirmed.unknown_removals

    @property
    def pending_blocks(self) -> int:
        return self._pending.rows

    def held_blocks(self, slot: int) -> int:
        """Distinct blocks that the slot holds on the GPU."""
        return int(self._confirmed.held[slot, GPU])

    def hear(self, source: WorkerId, now_s: float) -> None:
        """A sign of life from the worker's bridge (monotonic seconds): events would have come, had there been any."""
        self.heard_s[self.slot(source).number] = now_s

    def apply(self, batch: KvBatch, now_s: float) -> None:
        """Applies one batch, by the rules above. now_s: monotonic seconds of its receipt."""
        slot = self.slot(batch.source)
        self.heard_s[slot.number] = now_s
        if slot.epoch is not None and slot.seq is not None and (batch.epoch, batch.last_seq) < (slot.epoch, slot.seq):
            self.counts.stale_batches += 1
            return
        self.counts.batches += 1
        self.counts.blocks += len(batch.hashes)
        kinds = batch.events["kind"]
        if slot.epoch is None or batch.epoch != slot.epoch:
            slot.block_size = None  # a restarted engine may cut otherwise
            if not (len(kinds) and kinds[0] == Kind.EPOCH_STARTED):
                self._start_epoch(slot, complete=False)
        elif slot.seq is not None and batch.first_seq > slot.seq + 1 and Kind.GAP not in kinds:
            self.counts.unexplained_gaps += 1
            slot.drop_snapshot()  # a part of it may be what was lost
            self.trust[slot.number] = min(int(self.trust[slot.number]), DEGRADED)
        if slot.block_size is None:
            self._learn_block_size(slot, batch.events)
        if _PLAIN[kinds].all():
            self._apply_plain(slot, batch.events, batch.hashes)
        else:
            self._apply_marks(slot, batch)
        slot.epoch, slot.seq = batch.epoch, batch.last_seq
        slot.newest_s = batch.bridge_time_s

    def match(self, chain: U64, now_s: float) -> Overlaps:
        """Blocks of the chain's longest contiguous prefix by slot, shape (slots,) or longer. now_s: monotonic seconds."""
        self.expire(now_s)
        return self._confirmed.match(chain, self._pending)

    def expect(self, slot: int, hashes: U64, expires_s: float) -> int:
        """The slot will hold these blocks soon. Returns a ticket for `drop`. expires_s: monotonic seconds."""
        ticket = self._pushed
        self._pushed += 1
        expectation = Expectation(slot, hashes, expires_s)
        self._pending.store(slot, hashes)
        self._open[ticket] = expectation
        heapq.heappush(self._expiry, (expires_s, ticket, expectation))
        return ticket

    def drop(self, ticket: int) -> None:
        """The request will not leave its blocks after all (or they have expired already: then nothing happens)."""
        expectation = self._open.pop(ticket, None)
        if expectation is not None:
            self._pending.remove(expectation.slot, expectation.hashes)

    def expire(self, now_s: float) -> None:
        while self._expiry and self._expiry[0][0] <= now_s:
            _, ticket, _ = heapq.heappop(self._expiry)
            if ticket in self._open:
                self.drop(ticket)
                self.counts.expired += 1

    def forget(self) -> None:
        """All confirmed blocks are gone and every slot is BLIND: the log was lost and is read anew."""
        self._confirmed.clear_all()
        for slot in self._slots.values():
            self._lose(slot)

    def distrust(self, source: WorkerId) -> None:
        """Nothing is known of this worker any more: it is emptied and BLIND until its events go on."""
        slot = self.slot(source)
        self._confirmed.clear(slot.number)
        self._lose(slot)

    def release(self, source: WorkerId) -> None:
        """The worker is gone for good: its slot is emptied, and its number goes to the next one that comes."""
        slot = self._slots.pop(source, None)
        if slot is None:
            return
        self._confirmed.clear(slot.number)
        for ticket in [t for t, e in self._open.items() if e.slot == slot.number]:
            self.drop(ticket)
        self._lose(slot)
        self.heard_s[slot.number] = -np.inf
        self._free.append(slot.number)

    def _lose(self, slot: Slot) -> None:
        slot.epoch = slot.seq = None
        slot.drop_snapshot()
        self.trust[slot.number] = BLIND

    def _start_epoch(self, slot: Slot, complete: bool) -> None:
        self._confirmed.clear(slot.number)
        for ticket in [t for t, e in self._open.items() if e.slot == slot.number]:
            self.drop(ticket)
        slot.drop_snapshot()
        slot.group = NO_GROUP
        self.trust[slot.number] = EXACT if complete else DEGRADED
        self.counts.epochs += 1

    def _apply_plain(self, slot: Slot, events: Events, hashes: U64) -> None:
        slot.group = self._confirmed.apply(slot.number, events, hashes, slot.group)
        if slot.snapshot is not None:
            slot.since_snapshot.append((events, hashes))

    def _apply_marks(self, slot: Slot, batch: KvBatch) -> None:
        """A batch with marks: runs of plain events between them."""
        plain = _PLAIN[batch.events["kind"]]
        ends = np.cumsum(batch.events["count"], dtype=np.int64)
        k = 0
        while k < len(batch.events):
            stop = k + 1
            if plain[k]:
                while stop < len(batch.events) and plain[stop]:
                    stop += 1
            hashes = batch.hashes[ends[k - 1] if k else 0 : ends[stop - 1]]
            if plain[k]:
                self._apply_plain(slot, batch.events[k:stop], hashes)
            else:
                self._apply_mark(slot, batch.events[k:stop], hashes)
            k = stop

    def _apply_mark(self, slot: Slot, event: Events, hashes: U64) -> None:
        flags = int(event["flags"][0])
        match int(event["kind"][0]):
            case Kind.EPOCH_STARTED:
                self._start_epoch(slot, complete=bool(flags & COMPLETE))
            case Kind.CLEARED:
                self._confirmed.clear(slot.number)
                slot.drop_snapshot()
                self.trust[slot.number] = EXACT
                self.counts.clears += 1
            case Kind.GAP:
                self.trust[slot.number] = min(int(self.trust[slot.number]), DEGRADED)
                slot.drop_snapshot()
                self.counts.gaps += 1
            case Kind.SNAPSHOT:
                self._apply_snapshot(slot, event, hashes, flags)

    def _apply_snapshot(self, slot: Slot, event: Events, hashes: U64, flags: int) -> None:
        if flags & FIRST:
            slot.drop_snapshot()
            slot.snapshot = []
        if slot.snapshot is None:
            return  # its beginning was not seen, or something broke it
        slot.snapshot.append((event, hashes))
        if not flags & LAST:
            return
        parts, slot.snapshot = slot.snapshot, None
        if flags & COMPLETE or self.trust[slot.number] != EXACT:
            self._confirmed.clear(slot.number)
            for part, blocks in parts:
                self._store_part(slot, part, blocks)
            for live, blocks in slot.since_snapshot:
                slot.group = self._confirmed.apply(slot.number, live, blocks, slot.group)
            self.trust[slot.number] = EXACT if flags & COMPLETE else DEGRADED
            self.counts.snapshots += 1
        slot.since_snapshot.clear()

    def _store_part(self, slot: Slot, part: Events, blocks: U64) -> None:
        if int(part["flags"][0]) & WINDOWED:
            return
        group = int(part["group"][0])
        if slot.group == NO_GROUP:
            slot.group = group
        if group == slot.group:
            self._confirmed.store(slot.number, blocks, GPU if part["tier"][0] == Tier.GPU else LOWER)

    def _learn_block_size(self, slot: Slot, events: Events) -> None:
        full = events[
            np.isin(events["kind"], (Kind.STORED, Kind.SNAPSHOT)) & (events["flags"] & WINDOWED == 0) & (events["block_size"] > 0)
        ]
        if len(full):
            slot.block_size = int(full["block_size"][0])
