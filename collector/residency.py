"""Who holds which block: the exact content of every worker's cache, told from its KV events, and how to look a little back in time.

    table   (block, owner = instance, tier, group) -> physical copies: slots.py
    ring    the last events of the whole fleet; each points at the previous one of its worker, so that one worker's events can be
            walked backwards without a log per worker. Removals that found nothing are not in it: undoing the ring undoes the table.
            Beside each stored hash stands its prior: what had become of the block before (attribution/history.py).

        events  ... e7(w1) e8(w2) e9(w1) e10(w2) | head       prev: e10 -> e8, e9 -> e7
        hashes  ... [e7][e8......][e9][e10...]   | head       event k owns hashes[start, start + count)

An *instance* is one life of one worker's cache. A clear, a restart or a replacing snapshot gives the worker a fresh instance and leaves the
old one's entries where they are, frozen: clearing costs nothing, and the state before it can still be read while the ring reaches back.
Entries of forgotten instances are dropped when the table is rebuilt, which happens when it would get more than 70 % full.

Invariants: counts are never negative (a removal of a block that is not held is counted in `unknown_removals` and changes nothing);
`resident` is the sum of the counts of the worker's current instance and `distinct` the number of its slots; a peak belongs to an epoch.

A record that was applied at the very clock of its worker before (a retry) is counted in `stale_records` and changes nothing, as in the
router's index: `seen` holds names of the last 64 records at the clock, since one engine batch may span several.

Trust: BLIND nothing known; EXACT every event since the cache was known (empty at a complete start, a clear, or a complete snapshot);
DEGRADED a gap, a start that was not seen, or blocks without names. Sequences that jump without a mark are gaps, too.

Rejected: a dict of dicts (60 times the memory), a bitmap of workers per block (cheap to ask "who", dear to clear), tombstones (probe chains
grow under the steady store-evict traffic of a cache), a log per worker (memory is bounded only by the number of workers).

Pure: no clock, no I/O. `Residency.apply` is one compiled call a slice; tests/collector/naive.py is the twin that the tests fuzz it against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from collector.attribution.history import (
    CLEARED,
    EVICTED,
    MAX_WORKERS,
    PRIOR_UNKNOWN,
    TICKS_PER_S,
    Memory,
    end_life,
    evers_now,
    fates_now,
    load_memory,
    make_memory,
    note_all_seen,
    note_removals,
    note_seen,
    note_stores,
    save_memory,
    ticks_of,
)
from collector.attribution.history import MAX_GROUPS as MAX_GROUPS
from collector.slots import add, kept, rebuild, take, touch
from collector.slots import count_of as count_of
from schemas.kv_events import COMPLETE, ENGINE_RESTARTED, FIRST, LAST, WINDOWED, Kind, Unpacked
from schemas.workers import Trust

I64 = npt.NDArray[np.int64]

_STORED, _REMOVED, _CLEARED, _EPOCH = int(Kind.STORED), int(Kind.REMOVED), int(Kind.CLEARED), int(Kind.EPOCH_STARTED)
_GAP, _SNAPSHOT, _UNNAMED = int(Kind.GAP), int(Kind.SNAPSHOT), int(Kind.UNNAMED)
_REPLACED = 100  # ring only: a snapshot took the place of the instance

BLIND, DEGRADED, EXACT = 0, 1, 2
_TRUST = (Trust.BLIND, Trust.DEGRADED, Trust.EXACT)

REASONS = (
    "",
    "no event was received yet",
    "events before the first one received are unknown",
    "the bridge did not see the start of this cache",
    "engine batches are lost for good",
    "engine sequence jumped without a gap mark",
    "blocks without token ids could not be named",
    "the stream lost records before the collector read them",
)
_NONE, _UNSEEN, _LATE_START, _INCOMPLETE, _LOST, _JUMP, _NAMELESS, _STREAM_LOSS = range(8)

INSTANCES = 1 << 22
MAX_LOST = 1 << 32  # batches that one mark or jump can tell of: no sum of them leaves 64 bits
MAX_BUCKETS = 4096  # 10 s each, of one slice
MAX_CELLS = 1 << 20  # workers times buckets of one slice
LOAD = 0.7
CHUNK = 256  # blocks of an event whose places in memory are read at once, before the first is looked up
SEEN = 64  # records at one clock that are told from their repetition

WORKER = np.dtype(
    [
        ("epoch", "<u8"), ("seq", "<u8"), ("started", "?"), ("has_seq", "?"), ("trust", "u1"), ("reason", "u1"),
        ("instance", "<u4"), ("snapshot", "<u4"), ("resident", "<i8"), ("peak", "<i8"), ("distinct", "<i8"),
        ("snap_resident", "<i8"), ("snap_distinct", "<i8"), ("snap_matched", "<i8"),
        ("last", "<i8"), ("last_time_s", "<f8"), ("last_bridge_s", "<f8"), ("epoch_at_s", "<f8"), ("block_size", "<u4"),
        ("restarts", "<i8"), ("clears", "<i8"), ("lost_batches", "<i8"), ("stale_records", "<i8"), ("unknown_removals", "<i8"),
        ("unnamed", "<i8"), ("snapshots", "<i8"), ("mismatches", "<i8"), ("owners", "<u8"), ("windowed", "<u8"),
    ],
    align=True,
)  # fmt: skip

EVENT = np.dtype(
    [
        ("kind", "u1"), ("tier", "u1"), ("group", "u1"), ("trust_before", "u1"), ("count", "<u4"), ("seq", "<u8"), ("time_s", "<f8"),
        ("parent", "<u8"), ("start", "<i8"), ("prev", "<i8"), ("instance", "<u4"), ("taken", "u1"),
    ],
    align=True,
)  # fmt: skip

# Columns of `Tally.counts`.
STORED_BLOCKS, REMOVED_BLOCKS, CLEARS, LOST_BATCHES, RESIDENT, EVENTS = range(6)


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """What one slice did, by worker and 10 s bucket. counts: i64, shape (workers, buckets, 6); bucket b starts at (first + b) * 10 s."""

    first_bucket: int
    counts: I64


@numba.njit(cache=True, inline="always")
def _push(ring, heads, w, kind, tier, group, trust, seq, time_s, parent, instance):  # type: ignore[no-untyped-def]
    at = heads[0] & (len(ring) - 1)
    e = ring[at]
    if heads[0] >= len(ring):
        heads[2] = max(heads[2], np.int64(e["time_s"] * 1e6))
    e["kind"] = kind
    e["tier"] = tier
    e["group"] = group
    e["trust_before"] = trust
    e["count"] = 0
    e["seq"] = seq
    e["time_s"] = time_s
    e["parent"] = parent
    e["start"] = heads[1]
    e["prev"] = w["last"]
    e["instance"] = instance
    e["taken"] = 0
    w["last"] = heads[0]
    heads[0] += 1
    return at


@numba.njit(cache=True)
def _fresh(workers, wi, table, memory, ring, heads, ids, used, retired, kind, seq, time_s):  # type: ignore[no-untyped-def]
    """Gives the worker an empty instance; the ring remembers the old one."""
    w = workers[wi]
    _push(ring, heads, w, kind, 0, 0, w["trust"], seq, time_s, np.uint64(w["epoch"]), w["instance"])  # parent: the epoch that it ends
    old, blocks = w["instance"], w["distinct"]
    retired[old] = heads[0] - 1
    w["instance"] = ids[used]
    retired[ids[used]] = -1
    w["resident"] = 0
    w["distinct"] = 0
    end_life(memory, table, workers, np.int64(wi), old, blocks, time_s)
    return used + 1


@numba.njit(cache=True)
def _degrade(w, ring, heads, reason, seq, time_s):  # type: ignore[no-untyped-def]
    _push(ring, heads, w, _GAP, 0, 0, w["trust"], seq, time_s, np.uint64(0), w["instance"])
    if w["trust"] != BLIND:
        w["trust"] = DEGRADED
        w["reason"] = reason


@numba.njit(cache=True)
def _name(first_seq, bridge_s, events, e_from, e_to, hashes, h_from):  # type: ignore[no-untyped-def]
    """64 bits that tell a record from others of its worker and clock."""
    factor = np.uint64(0x9E3779B97F4A7C15)
    x = (np.uint64(first_seq) ^ np.uint64(np.int64(bridge_s * 1e6))) * factor
    h = h_from
    for k in range(e_from, e_to):
        e = events[k]
        count = np.int64(e["count"])
        x = (x ^ np.uint64(e["kind"]) ^ np.uint64(e["tier"]) << np.uint64(8) ^ np.uint64(e["flags"]) << np.uint64(16)) * factor
        x = (x ^ x >> np.uint64(32) ^ np.uint64(e["group"]) ^ np.uint64(count) << np.uint64(32)) * factor
        x = (x ^ x >> np.uint64(32) ^ e["seq"]) * factor
        x = (x ^ x >> np.uint64(32) ^ e["parent"]) * factor
        for i in range(h, h + count):
            x = (x ^ x >> np.uint64(32) ^ hashes[i]) * factor
        h += count
    return x ^ x >> np.uint64(32)


@numba.njit(cache=True)
def _is_new(seen, at_clock, name):  # type: ignore[no-untyped-def]
    """Notes a record of a worker; False: it was noted at this clock before. seen: how many, then the names of the last ones."""
    n = np.int64(seen[0]) if at_clock else np.int64(0)
    for k in range(n if n < SEEN else SEEN):
        if seen[1 + k] == name:
            return False
    seen[1 + n % SEEN] = name
    seen[0] = n + 1
    return True


@numba.njit(cache=True)
def _apply(  # type: ignore[no-untyped-def]
    lo, hi, record_worker, epochs, first_seqs, last_seqs, bridge_times, event_end, hash_end, ok, events, event_hashes,
    workers, seen_records, table, used_slots, ring, ring_hashes, ring_prior, heads, ids, used, retired, memory, first_bucket, tally,
):  # fmt: skip
    """Applies records lo..hi. Returns (ids used, slots used, noise). used_slots counts entries of forgotten instances, too."""
    h_mask = len(ring_hashes) - 1
    chunk = min(CHUNK, len(ring_hashes))
    seen = np.uint64(0)
    for r in range(lo, hi):
        if not ok[r]:
            continue
        wi = record_worker[r]
        w = workers[wi]
        e_from = event_end[r - 1] if r > 0 else 0
        h_at = hash_end[r - 1] if r > 0 else 0
        epoch = epochs[r]
        bridge_s = bridge_times[r]
        if w["started"] and (epoch < w["epoch"] or (epoch == w["epoch"] and w["has_seq"] and last_seqs[r] < w["seq"])):
            w["stale_records"] += 1
            continue
        at_clock = w["started"] and epoch == w["epoch"] and w["has_seq"] and last_seqs[r] == w["seq"]
        if not _is_new(seen_records[wi], at_clock, _name(first_seqs[r], bridge_s, events, e_from, event_end[r], event_hashes, h_at)):
            w["stale_records"] += 1
            continue
        marked = e_from < event_end[r] and events[e_from]["kind"] == _EPOCH
        if (not w["started"] or epoch > w["epoch"]) and not marked:
            # A life of this cache whose start was not seen.
            used = _fresh(workers, wi, table, memory, ring, heads, ids, used, retired, np.uint8(_EPOCH), first_seqs[r], bridge_s)
            w["trust"] = DEGRADED
            w["reason"] = _LATE_START
            w["epoch_at_s"] = bridge_s
            w["peak"] = 0
            w["started"] = True
            w["epoch"] = epoch
            w["has_seq"] = False
        w["last_bridge_s"] = bridge_s
        jump = np.int64(0)
        gap_first = e_from < event_end[r] and events[e_from]["kind"] == _GAP
        if w["has_seq"] and not marked and not gap_first and first_seqs[r] > w["seq"] + np.uint64(1):
            jump = np.int64(min(first_seqs[r] - w["seq"] - np.uint64(1), np.uint64(MAX_LOST)))
            w["lost_batches"] += jump
            _degrade(w, ring, heads, np.int64(_JUMP), first_seqs[r], bridge_s)
        for k in range(e_from, event_end[r]):
            e = events[k]
            kind = e["kind"]
            count = np.int64(e["count"])
            seq = e["seq"]
            time_s = e["time_s"]
            if not (time_s > 0.0):
                time_s = bridge_s
            b = np.int64(np.floor(time_s / 10.0)) - first_bucket
            if b < 0:
                b = 0
            elif b >= tally.shape[1]:
                b = tally.shape[1] - 1
            t = tally[wi, b]
            t[EVENTS] += 1
            t[LOST_BATCHES] += jump
            jump = np.int64(0)
            if time_s > w["last_time_s"]:
                w["last_time_s"] = time_s
            group = e["group"]
            if group >= MAX_GROUPS:
                group = np.uint16(MAX_GROUPS - 1)
            tier = e["tier"] & 3
            low = np.uint64(tier) << np.uint64(8) | np.uint64(group)
            who = np.uint64(wi)
            if kind == _STORED:
                owner = np.uint64(w["instance"]) << np.uint64(10) | low
                bit = np.uint64(1) << np.uint64(tier * MAX_GROUPS + group)
                w["owners"] |= bit
                if e["flags"] & WINDOWED:
                    w["windowed"] |= np.uint64(1) << np.uint64(group)
                if e["block_size"] != 0:
                    w["block_size"] = e["block_size"]
                at = _push(ring, heads, w, kind, tier, group, w["trust"], seq, time_s, e["parent"], w["instance"])
                for low_at in range(h_at, h_at + count, chunk):
                    high_at, start = min(low_at + chunk, h_at + count), heads[1]
                    seen |= touch(table, event_hashes, low_at, high_at, owner)
                    for i in range(low_at, high_at):
                        h = event_hashes[i]
                        before = add(table, h, owner, 1)
                        if before == 0:
                            w["distinct"] += 1
                            used_slots += 1
                        ring_hashes[heads[1] & h_mask] = h
                        ring_prior[heads[1] & h_mask] = min(before, 1)
                        heads[1] += 1
                    seen |= note_stores(
                        memory, table, retired, who, w["instance"], w["owners"], event_hashes, low_at, high_at, ring_prior, start,
                        ticks_of(time_s),
                    )  # fmt: skip
                ring[at]["count"] = count
                w["resident"] += count
                if w["resident"] > w["peak"]:
                    w["peak"] = w["resident"]
                t[STORED_BLOCKS] += count
            elif kind == _REMOVED:
                owner = np.uint64(w["instance"]) << np.uint64(10) | low
                at = _push(ring, heads, w, kind, tier, group, w["trust"], seq, time_s, e["parent"], w["instance"])
                h_from = heads[1]
                for low_at in range(h_at, h_at + count, chunk):
                    high_at, start = min(low_at + chunk, h_at + count), heads[1]
                    seen |= touch(table, event_hashes, low_at, high_at, owner)
                    for i in range(low_at, high_at):
                        h = event_hashes[i]
                        before = take(table, h, owner)
                        if before == 0:
                            w["unknown_removals"] += 1
                            continue
                        if before == 1:
                            w["distinct"] -= 1
                            used_slots -= 1
                        ring_hashes[heads[1] & h_mask] = h
                        ring_prior[heads[1] & h_mask] = before == 1
                        heads[1] += 1
                    seen |= note_removals(
                        memory, table, who, w["owners"], ring_hashes, ring_prior, start, heads[1] - start, ticks_of(time_s)
                    )
                n = heads[1] - h_from
                ring[at]["count"] = n
                w["resident"] -= n
                t[REMOVED_BLOCKS] += count
            elif kind == _CLEARED:
                used = _fresh(workers, wi, table, memory, ring, heads, ids, used, retired, kind, seq, time_s)
                w["trust"] = EXACT
                w["reason"] = _NONE
                w["clears"] += 1
                t[CLEARS] += 1
            elif kind == _EPOCH:
                again = w["started"] and epoch == w["epoch"]
                used = _fresh(workers, wi, table, memory, ring, heads, ids, used, retired, kind, seq, time_s)
                if w["started"] and not again and e["flags"] & ENGINE_RESTARTED:
                    w["restarts"] += 1
                if w["snapshot"] != 0:
                    retired[w["snapshot"]] = -2
                    w["snapshot"] = 0
                w["started"] = True
                w["epoch"] = epoch
                w["has_seq"] = False
                w["epoch_at_s"] = time_s
                w["peak"] = 0
                w["trust"] = EXACT if e["flags"] & COMPLETE else DEGRADED
                w["reason"] = _NONE if e["flags"] & COMPLETE else _INCOMPLETE
                t[CLEARS] += 1
            elif kind == _GAP:
                lost = min(e["parent"] - seq, np.uint64(MAX_LOST)) + np.uint64(1) if e["parent"] >= seq else np.uint64(0)
                lost = np.int64(lost)
                w["lost_batches"] += lost
                t[LOST_BATCHES] += lost
                _degrade(w, ring, heads, np.int64(_LOST), seq, time_s)
                w["seq"] = e["parent"]
                w["has_seq"] = True
            elif kind == _UNNAMED:
                w["unnamed"] += np.int64(e["parent"])
                if tier == 0 and w["trust"] == EXACT:
                    _degrade(w, ring, heads, np.int64(_NAMELESS), seq, time_s)
            elif kind == _SNAPSHOT:
                if e["flags"] & FIRST:
                    if w["snapshot"] != 0:
                        retired[w["snapshot"]] = -2  # its end never came
                    w["snapshot"] = ids[used]
                    retired[ids[used]] = -1
                    used += 1
                    w["snap_resident"] = 0
                    w["snap_distinct"] = 0
                    w["snap_matched"] = 0
                if w["snapshot"] != 0:
                    mine = np.uint64(w["instance"]) << np.uint64(10) | low
                    theirs = np.uint64(w["snapshot"]) << np.uint64(10) | low
                    if count:
                        w["owners"] |= np.uint64(1) << np.uint64(tier * MAX_GROUPS + group)
                        if e["flags"] & WINDOWED:
                            w["windowed"] |= np.uint64(1) << np.uint64(group)
                    for i in range(h_at, h_at + count):
                        h = event_hashes[i]
                        before = add(table, h, theirs, 1)
                        if before == 0:
                            w["snap_distinct"] += 1
                            used_slots += 1
                            note_seen(memory, table, retired, h)
                        if count_of(table, h, mine) > before:
                            w["snap_matched"] += 1
                    w["snap_resident"] += count
                    if e["flags"] & LAST:
                        complete = (e["flags"] & COMPLETE) != 0
                        off = w["resident"] + w["snap_resident"] - 2 * w["snap_matched"]
                        w["snapshots"] += 1
                        if w["trust"] == EXACT:
                            w["mismatches"] += off
                        if (complete or w["trust"] != EXACT) and off != 0:
                            old, blocks = w["instance"], w["distinct"]
                            _push(ring, heads, w, _REPLACED, 0, 0, w["trust"], seq, time_s, np.uint64(0), old)
                            retired[old] = heads[0] - 1
                            w["instance"] = w["snapshot"]
                            w["resident"] = w["snap_resident"]
                            w["distinct"] = w["snap_distinct"]
                            end_life(memory, table, workers, np.int64(wi), old, blocks, time_s)
                            if w["resident"] > w["peak"]:
                                w["peak"] = w["resident"]
                        else:
                            if complete and w["trust"] != EXACT:
                                # Healed without a difference: the ring still has to know when.
                                _push(ring, heads, w, _SNAPSHOT, 0, 0, w["trust"], seq, time_s, np.uint64(0), w["instance"])
                            retired[w["snapshot"]] = -2  # never read again
                        if complete:
                            w["trust"] = EXACT
                            w["reason"] = _NONE
                        w["snapshot"] = 0
            t[RESIDENT] = w["resident"]
            h_at += count
        if not w["has_seq"] or last_seqs[r] > w["seq"]:
            w["seq"] = last_seqs[r]
            w["has_seq"] = True
    return used, used_slots, seen


class Residency:
    """The state of all workers. Workers are small numbers handed out by `worker`.

    recent_events, recent_hashes: how far back the fleet's events can be walked; both powers of two, 56 and 12 bytes each.
    ghosts, seen: blocks whose past is known exactly, 27 and 13 bytes each; filtered: keys of each generation of the two filters for what
    is older, 3 bytes each in a filter (see attribution/history.py).
    """

    def __init__(
        self,
        recent_events: int = 1 << 20,
        recent_hashes: int = 1 << 24,
        slots: int = 1 << 16,
        *,
        ghosts: int = 2_500_000,
        seen: int = 2_500_000,
        filtered: int = 20_000_000,
    ) -> None:
        for name, value in (("recent_events", recent_events), ("recent_hashes", recent_hashes), ("slots", slots)):
            if value < 2 or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")
        self.workers: npt.NDArray[np.void] = np.zeros(16, WORKER)
        self.seen = np.zeros((16, 1 + SEEN), np.uint64)
        self.count = 0
        self.table = np.zeros((slots, 2), np.uint64)
        self.used_slots = 0
        self.ring: npt.NDArray[np.void] = np.zeros(recent_events, EVENT)
        self.ring_hashes = np.zeros(recent_hashes, np.uint64)
        self.ring_prior = np.zeros(recent_hashes, np.uint32)
        # Next event, next hash: both count up for ever. Newest time of an event that the ring has forgotten (unix microseconds).
        self.heads = np.zeros(3, np.int64)
        # instance -> ring event that retired it; -1: current; -2: free, or nobody will read it again. Instance 0 is nobody's.
        # Zeros, since pages that are never touched cost nothing: what lies above `_next_instance` is not read.
        self.retired = np.zeros(INSTANCES, np.int64)
        self._next_instance = 1
        self._free: list[int] = []
        self.memory: Memory = make_memory(ghosts, seen, filtered, len(self.workers), INSTANCES)

    def worker(self) -> int:
        """Registers a worker of which nothing is known."""
        if self.count == MAX_WORKERS:
            raise OverflowError(f"more than {MAX_WORKERS} workers")
        if self.count == len(self.workers):
            lives, lives_n = self.memory.lives, self.memory.lives_n
            self.memory = self.memory._replace(
                lives=np.concatenate([lives, np.zeros_like(lives)]), lives_n=np.concatenate([lives_n, np.zeros_like(lives_n)])
            )
            self.workers = np.concatenate([self.workers, np.zeros(len(self.workers), WORKER)])
            self.seen = np.concatenate([self.seen, np.zeros_like(self.seen)])
        w = self.workers[self.count]
        w["last"] = -1
        w["reason"] = _UNSEEN
        w["instance"] = self._instances(1)[0]
        self._next_or_pop(1)
        self.retired[w["instance"]] = -1
        self.count += 1
        return self.count - 1

    def apply(self, batch: Unpacked, record_worker: npt.NDArray[np.int32], max_hashes: int = 1 << 20) -> Tally:
        """Applies records in order. record_worker: the number of each record's worker, i32, shape (n,)."""
        n = len(batch.ok)
        times = batch.events["time_s"]
        known = times[times > 0] if len(times) else times
        low = min(float(known.min()) if len(known) else np.inf, float(batch.bridge_time_s.min(initial=np.inf, where=batch.ok)))
        high = max(float(known.max()) if len(known) else -np.inf, float(batch.bridge_time_s.max(initial=-np.inf, where=batch.ok)))
        if not np.isfinite(low) or not np.isfinite(high):
            low = high = 0.0
        first = int(low // 10)
        most = min(MAX_BUCKETS, max(64, MAX_CELLS // max(1, self.count)))
        first = max(first, int(high // 10) - most + 1)  # older ones count there
        buckets = int(high // 10) - first + 1
        tally = Tally(first, np.zeros((self.count, buckets, 6), np.int64))
        kinds = batch.events["kind"]
        marks_before = np.concatenate([[0], np.cumsum((kinds == _CLEARED) | (kinds == _EPOCH) | (kinds == _SNAPSHOT))])
        lo = 0
        while lo < n:
            base = int(batch.hash_end[lo - 1]) if lo else 0
            hi = max(lo + 1, int(np.searchsorted(batch.hash_end, base + max_hashes, side="right")))
            adds = int(batch.hash_end[hi - 1]) - base
            self._make_room(adds)
            marks = hi - lo + int(marks_before[batch.event_end[hi - 1]] - marks_before[batch.event_end[lo - 1] if lo else 0])
            if self._next_instance + marks > INSTANCES:
                self._rebuild(adds)
            ids = self._instances(marks)
            used, self.used_slots, _ = _apply(
                lo, hi, record_worker, batch.epoch, batch.first_seq, batch.last_seq, batch.bridge_time_s, batch.event_end,
                batch.hash_end, batch.ok, batch.events, batch.hashes, self.workers, self.seen, self.table, self.used_slots,
                self.ring, self.ring_hashes, self.ring_prior, self.heads, ids, 0, self.retired, self.memory, first, tally.counts,
            )  # fmt: skip
            self._next_or_pop(used)
            lo = hi
        return tally

    def lose(self, worker: int, time_s: float) -> None:
        """The stream lost records of this worker before they were read: trust falls until a clear, a complete snapshot or start."""
        _degrade(self.workers[worker], self.ring, self.heads, _STREAM_LOSS, np.uint64(0), time_s)
        w = self.workers[worker]
        w["has_seq"] = False
        if w["snapshot"]:  # what comes next may be the rest of another one
            self.retired[w["snapshot"]] = -2
            w["snapshot"] = 0

    def copies(self, worker: int, block: int, tier: int = 0, group: int = 0) -> int:
        owner = np.uint64(int(self.workers[worker]["instance"]) << 10 | tier << 8 | group)
        return int(count_of(self.table, np.uint64(block), owner))

    def fate(self, worker: int, block: int) -> tuple[int, float | None]:
        """(fate, unix seconds since when it is gone) of a block on a worker, as of now; None: not gone, or long ago and not known."""
        fates, since = self._fates(worker, np.array([block], np.uint64))
        return int(fates[0]), int(since[0]) / TICKS_PER_S if since[0] >= 0 else None

    def fates(self, worker: int, blocks: npt.NDArray[np.uint64], now_s: float) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
        """(fate u8, gone_s f32) of blocks on a worker as of now; gone_s inf: long, not known; NaN: not lost."""
        fates, since = self._fates(worker, blocks)
        gone = np.where(since >= 0, np.maximum(now_s - since / TICKS_PER_S, 0.0), np.inf)
        gone[(fates != EVICTED) & (fates != CLEARED)] = np.nan
        return fates, gone.astype(np.float32)

    def _fates(self, worker: int, blocks: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint8], I64]:
        fates, since = np.empty(len(blocks), np.uint8), np.empty(len(blocks), np.int64)
        fates_now(self.memory, self.table, self.workers, worker, blocks, fates, since)
        return fates, since

    def ever(self, block: int) -> bool:
        """Some worker stored it at some time, as far as memory goes."""
        return bool(self.evers(np.array([block], np.uint64))[0])

    def evers(self, blocks: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """`ever` of each block."""
        out = np.empty(len(blocks), np.bool_)
        evers_now(self.memory, np.require(blocks, np.uint64, ["C", "W"]), out)
        return out

    def trust(self, worker: int) -> tuple[Trust, str]:
        """The worker's trust and, when it is not exact, why."""
        w = self.workers[worker]
        return _TRUST[int(w["trust"])], REASONS[int(w["reason"])]

    def held_bytes(self) -> int:
        """Memory of the table, the ring and what is known of the past."""
        return sum(a.nbytes for a in (self.table, self.ring, self.ring_hashes, self.ring_prior, self.workers, *self.memory))

    def save(self, ring_from_s: float = -np.inf) -> dict[str, npt.NDArray[Any]]:
        """Copies of all that `load` needs. The ring is cut to the events at or after ring_from_s (unix seconds)."""
        e_head, h_head, forgotten_us = (int(x) for x in self.heads)
        e_low, h_low = (int(x) for x in self.reach())
        held = _ring_slice(self.ring, e_low, e_head)
        wanted = np.flatnonzero((held["time_s"] >= ring_from_s) & (held["start"] >= h_low))
        cut = int(wanted[0]) if len(wanted) else len(held)
        h_low = int(held["start"][cut]) if cut < len(held) else h_head
        forgotten_us = max(forgotten_us, int(held["time_s"][:cut].max(initial=0.0) * 1e6))
        entries = np.empty((self.used_slots, 2), np.uint64)
        n = int(kept(self.table, self._keep(), entries))
        return {
            "workers": self.workers[: self.count].copy(),
            "seen": self.seen[: self.count].copy(),
            "entries": entries[:n],
            "ring": held[cut:],
            "ring_hashes": _ring_slice(self.ring_hashes, h_low, h_head),
            "ring_prior": _ring_slice(self.ring_prior, h_low, h_head),
            "heads": np.array([e_head, h_head, self._next_instance], np.int64),
            "forgotten_us": np.array([forgotten_us], np.int64),
            "retired": self.retired[: self._next_instance].copy(),
            **save_memory(self.memory, self.count),
        }

    def load(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        """Takes over a saved state. The ring may have another size now: what does not fit is forgotten, oldest first.

        A checkpoint of an earlier version knows nothing of the past: priors of its ring are UNKNOWN, what its workers hold counts as seen,
        and what they had lost before counts as never there.
        """
        self.count = len(saved["workers"])
        self.workers = np.zeros(max(16, 1 << (self.count - 1).bit_length()), WORKER)
        self.workers[: self.count] = saved["workers"]
        self.seen = np.zeros((len(self.workers), 1 + SEEN), np.uint64)
        self.seen[: self.count] = saved.get("seen", 0)  # a checkpoint of an earlier version has none
        slots = len(self.table)
        while len(saved["entries"]) > slots * LOAD:
            slots *= 2
        self.table = np.zeros((slots, 2), np.uint64)
        self.used_slots = int(rebuild(saved["entries"], np.ones(INSTANCES, np.bool_), self.table))
        e_head, h_head, self._next_instance = (int(x) for x in saved["heads"])
        self.retired[: self._next_instance] = saved["retired"]
        events, blocks = saved["ring"][-len(self.ring) :], saved["ring_hashes"][-len(self.ring_hashes) :]
        self.ring[np.arange(e_head - len(events), e_head) & (len(self.ring) - 1)] = events
        self.ring_hashes[np.arange(h_head - len(blocks), h_head) & (len(self.ring_hashes) - 1)] = blocks
        prior = saved.get("ring_prior", np.full(len(blocks), PRIOR_UNKNOWN, np.uint32))[-len(self.ring_prior) :]
        self.ring_prior[np.arange(h_head - len(blocks), h_head) & (len(self.ring_prior) - 1)] = prior
        newest_us = int(saved["workers"]["last_time_s"].max(initial=0.0) * 1e6)  # a checkpoint of an earlier version does not say more
        forgotten_us = int(saved["forgotten_us"][0]) if "forgotten_us" in saved else newest_us
        dropped = saved["ring"][: len(saved["ring"]) - len(events)]
        self.heads[:] = e_head, h_head, max(forgotten_us, int(dropped["time_s"].max(initial=0.0) * 1e6))
        self.ring_floor = e_head - len(events), h_head - len(blocks)
        if "history_meta" in saved:
            self.memory = load_memory(self.memory, saved, len(self.workers))
        else:
            lives = np.zeros((len(self.workers), *self.memory.lives.shape[1:]), self.memory.lives.dtype)
            self.memory = self.memory._replace(lives=lives, lives_n=np.zeros(len(self.workers), np.int64))
            held = saved["entries"][self.retired[saved["entries"][:, 1] >> np.uint64(42)] == -1, 0]
            note_all_seen(self.memory, self.table, self.retired, np.concatenate([held, blocks]))

    ring_floor: tuple[int, int] = (0, 0)
    """(event, hash) below which the ring holds nothing, after `load`."""

    @property
    def forgotten_s(self) -> float:
        """The ring still has all events that happened after this (unix seconds), though perhaps not their hashes: see `reach`."""
        return int(self.heads[2] + 1) / 1e6

    def reach(self) -> I64:
        """(event, hash): the oldest that can still be read."""
        return np.array(
            [
                max(self.ring_floor[0], int(self.heads[0]) - len(self.ring)),
                max(self.ring_floor[1], int(self.heads[1]) - len(self.ring_hashes)),
            ],
            np.int64,
        )

    def _keep(self) -> npt.NDArray[np.bool_]:
        """Instances whose entries may still be read: current ones, those whose end the ring reaches, and remembered lives."""
        keep = np.zeros(INSTANCES, np.bool_)
        retired = self.retired[: self._next_instance]
        keep[: self._next_instance] = (retired == -1) | (retired >= self.reach()[0]) | (self.memory.life_of[: self._next_instance] != 0)
        return keep

    def _make_room(self, adds: int) -> None:
        if self.used_slots + adds > len(self.table) * LOAD:
            self._rebuild(adds)

    def _rebuild(self, adds: int) -> None:
        """Drops what nobody will read any more, and grows if that is not enough."""
        slots = len(self.table)
        keep = self._keep()
        needed = int(kept(self.table, keep, self.table[:0])) + adds
        while needed > slots * LOAD:
            slots *= 2
        fresh = np.zeros((slots, 2), np.uint64)
        self.used_slots = int(rebuild(self.table, keep, fresh))
        self.table = fresh
        gone = np.flatnonzero(~keep[1 : self._next_instance]) + 1
        self.retired[gone] = -2
        self._free = gone.tolist()

    def _instances(self, n: int) -> npt.NDArray[np.uint32]:
        """The next n instance numbers that may be used; `_next_or_pop` says how many were."""
        reuse = self._free[-n:][::-1]
        more = range(self._next_instance, self._next_instance + n - len(reuse))
        if more.stop > INSTANCES:
            raise OverflowError(f"more than {INSTANCES} cache lives at once")
        return np.array([*reuse, *more], np.uint32)

    def _next_or_pop(self, used: int) -> None:
        reused = min(used, len(self._free))
        if reused:
            del self._free[-reused:]
        self._next_instance += used - reused


def _ring_slice(ring: npt.NDArray[Any], low: int, high: int) -> npt.NDArray[Any]:
    """A copy of ring entries low..high, whose numbers count up for ever."""
    a, b = low & (len(ring) - 1), high & (len(ring) - 1)
    if low == high:
        return ring[:0].copy()
    return ring[a:b].copy() if a < b else np.concatenate([ring[a:], ring[:b]])
