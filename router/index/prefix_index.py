"""What each worker's cache holds, as the KV events say it, and what it will hold, as our own dispatches say it.

    KvBatch --apply--> confirmed   blocks that an engine announced, by tier and attention group
    dispatch --expect--> expected  blocks of requests on their way, until an engine announces them, they expire or are dropped

A slot is one worker and rank. `match` answers for all slots at once, and keeps the two kinds apart: a forecast from confirmed blocks can
be held against the engine's report; one from expected blocks is a hope that makes siblings follow each other.

`(epoch, seq)` is a slot's clock. Rules, in order:

    a batch of an older epoch, or wholly before the clock     ignored, counted (a late replay must not bring removed blocks back)
    a record that was applied at this very clock before       ignored, counted (a producer's retry; a batch may span several records)
    a new epoch                                               the slot is emptied; DEGRADED unless the batch says EPOCH_STARTED | COMPLETE
    first batch of a slot without its epoch's start           DEGRADED: what came before is unknown
    a jump of seq that no GAP names                           DEGRADED, counted; a snapshot under way is given up
    GAP                                                       DEGRADED
    CLEARED                                                   the slot is emptied, EXACT: nothing before it matters any more
    SNAPSHOT first .. last                                    where trust was lost: replaces the slot's blocks, EXACT if it is COMPLETE;
                                                              else it is counted, and DEGRADED if what is held is another number
    memory used up (table.py)                                 what has no room is missing, DEGRADED

A snapshot's parts follow one another (the bridge packs all of them at once); anything between them ends it. So they are stored as they
come, nothing is kept back, and no single record holds up the owner for longer than its own size.

Groups of hybrid models. A group with full attention holds a prefix when it holds all its blocks; one with a window (sliding window, mamba)
when it holds the last blocks that the window reaches, at least the last one. A slot holds the longest prefix that all its groups hold, as
vLLM's cache manager looks it up; windowed groups alone are no residency. Blocks are looked up by the chain of the slot's own block size,
the smallest of its full groups'; groups that cut otherwise need the prompt's chain in their size (`others`), and a slot with such a group
holds nothing without it. Limits: 8 groups a worker, a worker with more holds nothing; where the window's length is not told, the last block
stands for the whole window; a group counts from its first stored block on. Each limit but the last two misses hits only.

No clock, stream or thread here: one owner calls, time is an argument.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from router.index.kernels import FOLLOWED_GROUPS, FULL, NO_LANE, UNFOLLOWED, UNLEARNED, WINDOW
from router.index.table import DEFAULT_LIMIT_BYTES, DISK, EXPECTED, GPU, MAX_LANES, BlockTable, Lanes, Overlaps
from schemas.block_hash import U64
from schemas.kv_events import COMPLETE, FIRST, LAST, WINDOW_SHIFT, WINDOWED, Events, Kind, KvBatch, WorkerId
from schemas.workers import Trust

TRUST_CODES = (Trust.BLIND, Trust.DEGRADED, Trust.EXACT)
"""Trust by its code in `PrefixIndex.trust`: larger is better."""
BLIND, DEGRADED, EXACT = 0, 1, 2

MOST_EXPECTED_BLOCKS = 1 << 20
"""Of all dispatches together; beyond it those that expire first are dropped."""

_PLAIN: npt.NDArray[np.bool_] = np.zeros(256, np.bool_)
_PLAIN[[Kind.STORED, Kind.REMOVED, Kind.REPORTED, Kind.UNNAMED]] = True
_EXPIRE_LATE_S = 0.05
"""By how much blocks may be expected beyond their time: many requests' then end together."""
_SEEN = 4096
"""Records of one clock that are remembered. A snapshot of 100 M blocks has so many parts."""


@dataclass(frozen=True, slots=True)
class Group:
    """An attention group of one worker. kind: FULL or WINDOW; window: tokens, 0 not known."""

    kind: int
    block_size: int
    window: int


@dataclass(slots=True)
class Listing:
    """A snapshot that is being read. storing: it replaces what the slot holds. names: copies listed so far."""

    storing: bool
    names: int = 0


@dataclass(slots=True)
class Slot:
    """State of one worker and rank. epoch and seq are None until the first batch."""

    number: int
    source: WorkerId
    epoch: int | None = None
    seq: int | None = None
    newest_s: float | None = None  # bridge time of the newest batch applied, unix seconds
    block_size: int | None = None  # the smallest of its groups with full attention
    groups: list[Group] = field(default_factory=list)  # by lane
    lanes: Lanes = field(default_factory=lambda: np.full(FOLLOWED_GROUPS + 1, UNLEARNED, np.int8))  # lane by group
    followed: bool = True  # False: it has more groups than can be followed
    listing: Listing | None = None
    seen: set[int] = field(default_factory=set)  # records applied at this clock


@dataclass(slots=True)
class IndexCounts:
    """Cumulative since the start."""

    batches: int = 0
    blocks: int = 0
    stale_batches: int = 0
    repeated_batches: int = 0
    unexplained_gaps: int = 0
    gaps: int = 0
    clears: int = 0
    epochs: int = 0
    snapshots: int = 0
    mismatches: int = 0  # complete snapshots that did not tell what was thought to be exact
    expired: int = 0
    crowded_out: int = 0  # expectations dropped because there were too many


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """Blocks that a dispatched request will leave on a slot. `drop` takes it back."""

    slot: int
    hashes: U64
    expires_s: float


class PrefixIndex:
    """See the module. For one thread at a time."""

    def __init__(self, limit_bytes: int = DEFAULT_LIMIT_BYTES, slots: int = 64, most_expected_blocks: int = MOST_EXPECTED_BLOCKS) -> None:
        """slots: how many are likely (more come as they are needed, at some cost)."""
        self._table = BlockTable(slots, limit_bytes)
        self.limit_bytes = limit_bytes
        self._slots: dict[WorkerId, Slot] = {}
        self._free: list[int] = []  # numbers of released slots
        self._numbers = 0
        self._given_up = 0  # of the table's, those that cost trust already
        self._most_expected, self._expected_blocks = most_expected_blocks, 0
        self._expiry: list[tuple[float, int]] = []
        self._open: dict[int, Expectation] = {}
        self._pushed = 0
        self.trust: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.heard_s: npt.NDArray[np.float64] = np.zeros(0)
        self._counting = np.zeros((2, self._table.words), np.uint64)  # BlockTable.match
        self._lanes = np.zeros((0, MAX_LANES, 4), np.int64)  # kernels.settle
        self._base: npt.NDArray[np.int64] = np.ones(0, np.int64)
        self._unit: npt.NDArray[np.int64] = np.ones(0, np.int64)
        self._mixed: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # slots whose groups differ in kind or block size
        self.other_sizes: tuple[int, ...] = ()
        """Block sizes, other than their slot's own, of groups that must be asked: give `match` the prompt's chains in them."""
        self.level_s = np.inf  # monotonic; all that a log held then is applied (feed.py). inf: no log is followed
        self.fresh_s = -np.inf  # the same, by the times that the newest records read bear
        self.counts = IndexCounts()
        self.on_new_life: Callable[[int], None] = lambda slot: None
        """Told a slot whose cache began anew, or that goes to another worker: what others guessed of it is void."""
        self._grow()

    def slot(self, source: WorkerId) -> Slot:
        """The slot of this worker and rank; a new one is BLIND and empty. Raises ValueError for more than table.MAX_SLOTS."""
        found = self._slots.get(source)
        if found is None:
            number = self._free[-1] if self._free else self._numbers
            self._table.fit(number + 1)
            if self._free:
                self._free.pop()
            else:
                self._numbers += 1
            found = self._slots[source] = Slot(number, source)
            self._grow()
        return found

    def _grow(self) -> None:
        """Arrays by slot are as long as the table's."""
        more = self._table.slots - len(self.trust)
        if more > 0:
            self.trust = np.concatenate([self.trust, np.zeros(more, np.uint8)])
            self.heard_s = np.concatenate([self.heard_s, np.full(more, -np.inf)])
            self._lanes = np.concatenate([self._lanes, np.zeros((more, MAX_LANES, 4), np.int64)])
            self._base, self._unit = (np.concatenate([a, np.ones(more, np.int64)]) for a in (self._base, self._unit))
        counting = np.zeros((self._table.lanes + 1, self._table.words), np.uint64)
        lanes, words = self._counting.shape
        counting[: lanes - 1, :words], counting[-1, :words] = self._counting[:-1], self._counting[-1]
        self._counting = counting

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(self._slots.values())

    @property
    def rows(self) -> int:
        """Distinct blocks known."""
        return self._table.rows

    @property
    def sets(self) -> int:
        """Distinct sets of holders needed at once, at most."""
        return self._table.sets

    @property
    def size_bytes(self) -> int:
        return self._table.size_bytes

    @property
    def unknown_removals(self) -> int:
        return self._table.unknown_removals

    @property
    def refused_blocks(self) -> int:
        """Blocks that were not taken in, or were forgotten, because the memory (`limit_bytes`) was used up."""
        return self._table.refused + self._table.given_up

    @property
    def pending_blocks(self) -> int:
        """Blocks, by slot, that are expected and not confirmed."""
        return int(self._table.held[0, EXPECTED].sum())

    @property
    def unmatched_slots(self) -> int:
        """Workers that hold nothing because of groups that are not followed (`Slot.followed`)."""
        return sum(not s.followed for s in self._slots.values())

    def held_blocks(self, slot: int) -> int:
        """Distinct blocks that the slot holds on the GPU; of several attention groups, the one with most."""
        return int(self._table.held[:, GPU, slot].max())

    def lag_s(self, now_s: float) -> float | None:
        """How far the index is behind the stream, seconds: everything older than that is applied. None: nothing was applied yet, or no
        stream is followed. While nothing comes it is the time since the stream was last asked (feed.py), a tenth of a second.
        A decision's `index_behind_s`. now_s: monotonic seconds."""
        applied_s = max(self.fresh_s, self.level_s)
        return max(0.0, now_s - applied_s) if math.isfinite(applied_s) else None

    def hear(self, source: WorkerId, now_s: float) -> None:
        """A sign of life from the worker's bridge (monotonic seconds): events would have come, had there been any."""
        self.heard_s[self.slot(source).number] = now_s

    def apply(self, batch: KvBatch, now_s: float) -> None:
        """Applies one batch, by the rules above. now_s: monotonic seconds of its receipt."""
        slot = self.slot(batch.source)
        self.heard_s[slot.number] = now_s
        if not self._is_news(slot, batch):
            return
        self.counts.batches += 1
        self.counts.blocks += len(batch.hashes)
        kinds = batch.events["kind"]
        if slot.epoch is None or batch.epoch != slot.epoch:
            if not (len(kinds) and kinds[0] == Kind.EPOCH_STARTED):
                self._start_epoch(slot, complete=False)
        elif slot.seq is not None and batch.first_seq > slot.seq + 1 and Kind.GAP not in kinds:
            self.counts.unexplained_gaps += 1
            slot.listing = None  # a part of it may be what was lost
            self._degrade(slot)
        refused = self._table.refused
        if _PLAIN[kinds].all():
            self._apply_plain(slot, batch.events, batch.hashes)
        else:
            self._apply_marks(slot, batch)
        if self._table.refused > refused:
            self._degrade(slot)
        if self._table.given_up > self._given_up:
            self._given_up = self._table.given_up
            np.minimum(self.trust, DEGRADED, out=self.trust)
        slot.epoch, slot.seq = batch.epoch, batch.last_seq
        slot.newest_s = batch.bridge_time_s

    def _is_news(self, slot: Slot, batch: KvBatch) -> bool:
        """False, and counted, for what must not be applied (again)."""
        name = hash((batch.first_seq, batch.bridge_time_s, batch.events.tobytes(), batch.hashes.tobytes()))
        if slot.epoch is not None and slot.seq is not None:
            if (batch.epoch, batch.last_seq) < (slot.epoch, slot.seq):
                self.counts.stale_batches += 1
                return False
            if (batch.epoch, batch.last_seq) > (slot.epoch, slot.seq) or len(slot.seen) >= _SEEN:
                slot.seen.clear()
            elif name in slot.seen:
                self.counts.repeated_batches += 1
                return False
        slot.seen.add(name)
        return True

    def match(self, chain: U64, now_s: float, others: Mapping[int, U64] | None = None) -> Overlaps:
        """Blocks of the chain's longest contiguous prefix by slot, shape (slots,) or longer. now_s: monotonic seconds.

        others: the same prompt's chains by other block sizes, for workers with groups that cut otherwise (`other_sizes`).
        """
        if self._expiry and self._expiry[0][0] + _EXPIRE_LATE_S <= now_s:
            self.expire(now_s)
        found = self._table.match(chain, self._counting)
        if len(self._mixed) and found.held[self._mixed].any():
            chains = [chain, *(None if others is None else others.get(size) for size in self.other_sizes)]
            return self._table.settle(self._mixed, self._lanes, self._base, self._unit, chains, found)
        return found

    def expect(self, slot: int, hashes: U64, expires_s: float) -> int:
        """The slot will hold these blocks soon. Returns a ticket for `drop`. expires_s: monotonic seconds.

        It counts for each of them until the slot's engine announces it, but for any request: the block is confirmed then."""
        ticket = self._pushed
        self._pushed += 1
        self._table.store(slot, hashes, EXPECTED)
        self._open[ticket] = Expectation(slot, hashes, expires_s)
        self._expected_blocks += len(hashes)
        heapq.heappush(self._expiry, (expires_s, ticket))
        while self._expected_blocks > self._most_expected:
            if self._drop_next():
                self.counts.crowded_out += 1
        if len(self._expiry) > 64 + 2 * len(self._open):  # most were dropped before their time
            self._expiry = [(e.expires_s, t) for t, e in self._open.items()]
            heapq.heapify(self._expiry)
        return ticket

    def drop(self, ticket: int) -> bool:
        """The request will not leave its blocks after all. False when they have expired or were dropped already: nothing happens then."""
        return self._end([ticket]) == 1

    def expire(self, now_s: float) -> None:
        """Ends what is due."""
        due = []
        while self._expiry and self._expiry[0][0] <= now_s:
            due.append(heapq.heappop(self._expiry)[1])
        self.counts.expired += self._end(due)

    def _drop_next(self) -> bool:
        return self.drop(heapq.heappop(self._expiry)[1])

    def _expect_nothing_of(self, slot: Slot) -> None:
        self._end([t for t, e in self._open.items() if e.slot == slot.number])

    def _end(self, tickets: list[int]) -> int:
        """Ends those that are still open, a slot's blocks in one call: a call costs 20 to 40 us, whatever it carries. Returns how many."""
        ended: dict[int, list[U64]] = {}
        for ticket in tickets:
            expectation = self._open.pop(ticket, None)
            if expectation is not None:
                ended.setdefault(expectation.slot, []).append(expectation.hashes)
                self._expected_blocks -= len(expectation.hashes)
        for slot, parts in ended.items():
            self._table.remove(slot, parts[0] if len(parts) == 1 else np.concatenate(parts), EXPECTED)
        return sum(map(len, ended.values()))

    def forget(self) -> None:
        """All blocks are gone and every slot is BLIND: the log was lost and is read anew."""
        self._table.clear_all()
        self._open.clear()
        self._expiry.clear()
        self._expected_blocks = 0
        for slot in self._slots.values():
            self._lose(slot)

    def distrust(self, source: WorkerId) -> None:
        """Nothing is known of this worker any more: it is emptied and BLIND until its events go on."""
        slot = self._slots.get(source)
        if slot is not None:
            self._table.clear(slot.number)
            self._lose(slot)

    def release(self, source: WorkerId) -> None:
        """The worker is gone for good: its slot is emptied, and its number goes to the next one that comes."""
        slot = self._slots.pop(source, None)
        if slot is None:
            return
        self._table.clear(slot.number)
        self._expect_nothing_of(slot)
        self._lose(slot)
        self.heard_s[slot.number] = -np.inf
        self._free.append(slot.number)
        self.on_new_life(slot.number)

    def _lose(self, slot: Slot) -> None:
        slot.epoch = slot.seq = slot.listing = None
        slot.seen.clear()
        self._forget_groups(slot)
        self.trust[slot.number] = BLIND

    def _degrade(self, slot: Slot) -> None:
        self.trust[slot.number] = min(int(self.trust[slot.number]), DEGRADED)

    def _start_epoch(self, slot: Slot, complete: bool) -> None:
        self._table.clear(slot.number)
        if slot.epoch is not None:  # else it is the life that requests were sent into already
            self._expect_nothing_of(slot)
        slot.listing = None
        self._forget_groups(slot)  # a restarted engine may cut otherwise
        self.trust[slot.number] = EXACT if complete else DEGRADED
        self.counts.epochs += 1
        self.on_new_life(slot.number)

    def _apply_plain(self, slot: Slot, events: Events, hashes: U64) -> None:
        if len(events):
            slot.listing = None
        event = at = 0
        while True:
            event, at = self._table.apply(slot.number, slot.lanes, events, hashes, event, at)
            if event == len(events):
                return
            self._learn_group(slot, events[event])

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
                self._apply_mark(slot, batch.events[k], hashes)
            k = stop

    def _apply_mark(self, slot: Slot, event: np.void, hashes: U64) -> None:
        flags = int(event["flags"])
        match int(event["kind"]):
            case Kind.EPOCH_STARTED:
                self._start_epoch(slot, complete=bool(flags & COMPLETE))
            case Kind.CLEARED:
                self._table.clear(slot.number)
                slot.listing = None
                self.trust[slot.number] = EXACT
                self.counts.clears += 1
            case Kind.GAP:
                self._degrade(slot)
                slot.listing = None
                self.counts.gaps += 1
            case Kind.SNAPSHOT:
                self._apply_snapshot(slot, event, hashes, flags)

    def _apply_snapshot(self, slot: Slot, part: np.void, hashes: U64, flags: int) -> None:
        if flags & FIRST:
            slot.listing = Listing(storing=self.trust[slot.number] != EXACT)
            if slot.listing.storing:
                self._table.clear(slot.number)
        listing = slot.listing
        if listing is None:
            return  # its beginning was not seen, or something came between
        lane = self._lane_of(slot, part) if len(hashes) else UNFOLLOWED
        if lane >= 0:
            listing.names += len(hashes)
            if listing.storing:
                self._table.store(slot.number, hashes, min(int(part["tier"]), DISK), lane)
        if not flags & LAST:
            return
        slot.listing = None
        told = listing.names == self._table.copies_held(slot.number)
        if listing.storing:
            self.trust[slot.number] = EXACT if flags & COMPLETE and told else DEGRADED  # not so: some of it had no room
            self.counts.snapshots += 1
        elif flags & COMPLETE and not told:
            self.counts.mismatches += 1
            self._degrade(slot)  # the next one replaces it

    # --- groups -----------------------------------------------------------------------------------------------------------------

    def _lane_of(self, slot: Slot, stored: np.void) -> int:
        group = min(int(stored["group"]), FOLLOWED_GROUPS)
        if slot.lanes[group] == UNLEARNED:
            self._learn_group(slot, stored)
        return int(slot.lanes[group])

    def _learn_group(self, slot: Slot, stored: np.void) -> None:
        """The first block of a group: its lane, and how it counts from now on."""
        number, flags, block_size = min(int(stored["group"]), FOLLOWED_GROUPS), int(stored["flags"]), int(stored["block_size"])
        if number == FOLLOWED_GROUPS or len(slot.groups) == MAX_LANES:
            slot.lanes[number] = UNFOLLOWED
            slot.followed = False
        else:
            self._table.fit(slot.number + 1, len(slot.groups) + 1)
            self._grow()
            slot.lanes[number] = len(slot.groups)
            windowed = bool(flags & WINDOWED)
            slot.groups.append(Group(WINDOW if windowed else FULL, block_size, flags >> WINDOW_SHIFT if windowed else 0))
            if not windowed and block_size:
                slot.block_size = min(block_size, slot.block_size or block_size)
        self._count_groups(slot)

    def _forget_groups(self, slot: Slot) -> None:
        if slot.groups or not slot.followed:
            slot.groups.clear()
            slot.lanes[:] = UNLEARNED
            slot.followed = True
        slot.block_size = None
        self._count_groups(slot)

    def _count_groups(self, slot: Slot) -> None:
        """Tells the table which of the slot's lanes count, and `settle` what else they need."""
        own = slot.block_size or 1
        sizes = [group.block_size or own for group in slot.groups]
        self.other_sizes = tuple(dict.fromkeys([*self.other_sizes, *(s for s in sizes if s != own and slot.block_size)]))
        word, bit = slot.number // 64, np.uint64(1 << slot.number % 64)
        self._counting[:, word] &= ~bit
        self._lanes[slot.number] = NO_LANE
        for lane, (group, size) in enumerate(zip(slot.groups, sizes, strict=True)):
            chain = self.other_sizes.index(size) + 1 if size != own and slot.block_size else 0
            self._lanes[slot.number, lane] = group.kind, chain, size, max(1, -(-(group.window - 1) // size))
            if group.kind == FULL and chain == 0 and slot.followed:
                self._counting[[lane, -1], word] |= bit
        self._base[slot.number], self._unit[slot.number] = own, math.lcm(*sizes)
        mixed = bool((self._lanes[slot.number, :, 1] > 0).any() or (self._lanes[slot.number, :, 0] == WINDOW).any())
        if mixed != (slot.number in self._mixed):
            rest = self._mixed[self._mixed != slot.number]
            self._mixed = np.append(rest, slot.number) if mixed else rest
