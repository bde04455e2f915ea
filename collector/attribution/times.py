"""When something of a block happened last, for very many blocks in bounded memory: its last use on a worker, its first store anywhere.

Two tables of open addressing, a young and an old one. What is written goes to the young one; when that is full it becomes the old one, and
what was the old one is forgotten. So at least the newest half of the budget is remembered, and forgetting needs no order among entries.

    slot: key u64 | 1 + microseconds since 1970, u64; 0: free

Two different blocks are taken for one with probability entries / 2**64 a look-up. Pure, and a function of the calls alone.

Rejected: evicting the oldest entry each time (a list through the table doubles it, and its writes are as random as the table's).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from collector.analytics.attributed import Attributed, Rows
from collector.attribution.history import NEW_ANYWHERE
from collector.residency import _STORED, Residency
from schemas.block_hash import U64
from schemas.kv_events import WorkerId

F64 = npt.NDArray[np.float64]

LOAD = 0.6
LEAST_SLOTS = 1 << 10
USES = 1 << 22
NEWS = 1 << 20


@numba.njit(cache=True)
def _find(table, key):  # type: ignore[no-untyped-def]
    """The slot of the key, or the free one where it belongs."""
    mask = np.uint64(len(table) - 1)
    x = key * np.uint64(0x9E3779B97F4A7C15)
    i = np.int64((x ^ x >> np.uint64(32)) & mask)
    while table[i, 1] != 0 and table[i, 0] != key:
        i = (i + 1) & np.int64(mask)
    return i


@numba.njit(cache=True)
def _put(table, keys, times):  # type: ignore[no-untyped-def]
    """Writes as many as there is room for; later times win. Returns (entries added, keys written)."""
    room = np.int64(len(table) * LOAD)
    added = 0
    for k in range(len(keys)):
        i = _find(table, keys[k])
        if table[i, 1] == 0:
            if added == room:
                return added, k
            table[i, 0] = keys[k]
            added += 1
        if times[k] > table[i, 1]:
            table[i, 1] = times[k]
    return added, len(keys)


@numba.njit(cache=True)
def _get(young, old, keys, out):  # type: ignore[no-untyped-def]
    for k in range(len(keys)):
        i = _find(young, keys[k])
        when = young[i, 1]
        if when == 0:
            when = old[_find(old, keys[k]), 1]
        out[k] = np.nan if when == 0 else np.float64(when - np.uint64(1)) / 1e6
    return out


@numba.njit(cache=True)
def _entries(table):  # type: ignore[no-untyped-def]
    n = 0
    for i in range(len(table)):
        n += table[i, 1] != 0
    out = np.empty((n, 2), np.uint64)
    n = 0
    for i in range(len(table)):
        if table[i, 1] != 0:
            out[n, 0], out[n, 1] = table[i, 0], table[i, 1]
            n += 1
    return out


class Times:
    """slots: of each of the two tables at most, a power of two; 16 bytes each."""

    def __init__(self, slots: int) -> None:
        if slots < 2 or slots & (slots - 1):
            raise ValueError(f"slots={slots} must be a power of two")
        self._most = slots
        self._young: U64 = np.zeros((min(slots, LEAST_SLOTS), 2), np.uint64)
        self._old: U64 = np.zeros((2, 2), np.uint64)
        self._count = 0
        self._newest = [0, 0]
        """Newest time in the young and the old table, as in a slot."""
        self.forgotten_s = -np.inf
        """Newest time (unix seconds) of an entry that was forgotten."""

    def put(self, keys: U64, times_s: F64) -> None:
        """Of a key that is known already the later time stays."""
        when = np.clip(times_s * 1e6, 0, 2.0**62).astype(np.uint64) + np.uint64(1)
        at = 0
        while at < len(keys):
            room = int(len(self._young) * LOAD) - self._count
            if room < len(keys) - at and len(self._young) < self._most:
                self._grow(len(keys) - at)
                continue
            if room <= 0:
                self._forget()
                continue
            part = slice(at, at + room)
            added, written = _put(self._young, keys[part], when[part])
            self._newest[0] = max(self._newest[0], int(when[at : at + int(written)].max()))
            self._count += int(added)
            at += int(written)

    def get(self, keys: U64) -> F64:
        """Unix seconds, NaN where the key is not known; shape of keys."""
        out: F64 = _get(self._young, self._old, keys, np.empty(len(keys)))
        return out

    def _grow(self, more: int) -> None:
        slots = len(self._young)
        while slots < self._most and int(slots * LOAD) < self._count + more:
            slots *= 2
        entries, self._young = _entries(self._young), np.zeros((slots, 2), np.uint64)
        _put(self._young, entries[:, 0].copy(), entries[:, 1].copy())

    def _forget(self) -> None:
        if self._newest[1]:
            self.forgotten_s = max(self.forgotten_s, (self._newest[1] - 1) / 1e6)
        free = self._old
        if len(free) == len(self._young):
            free[:] = 0  # pages that are there already
        else:
            free = np.zeros_like(self._young)
        self._old, self._young, self._count, self._newest = self._young, free, 0, [0, self._newest[0]]

    def held_bytes(self) -> int:
        return self._young.nbytes + self._old.nbytes

    def save(self) -> dict[str, npt.NDArray[Any]]:
        return {
            "young": _entries(self._young),
            "old": _entries(self._old),
            "sizes": np.array([len(self._young), len(self._old)], np.int64),
            "forgotten_s": np.array([self.forgotten_s]),
        }

    def lower(self, state: Residency, first: int, head: int, low_hash: int, newest_s: float) -> None:
        """Stores in ring events [first, head) that happened before what is known of their block. newest_s: no time known is later."""
        _lower(self._young, self._old, state.ring, state.ring_hashes, first, head, low_hash, newest_s)

    def load(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        tables = []
        for name, slots in zip(("young", "old"), saved["sizes"].tolist(), strict=True):
            entries = saved[name]
            while int(slots * LOAD) < len(entries):
                slots *= 2
            table: U64 = np.zeros((slots, 2), np.uint64)
            _put(table, entries[:, 0].copy(), entries[:, 1].copy())
            tables.append(table)
        self._young, self._old = tables
        self._newest = [int(t[:, 1].max()) for t in tables]
        self._count = len(saved["young"])
        self.forgotten_s = float(saved["forgotten_s"][0])


class Uses:
    """When each block was used last on each worker: at the end of the last request that had it in its prompt and is told.

    An analysis without tables: it is saved and fed again with the others. What the fold has touched already, since it asks at once, comes
    back with `take` and counts once.
    """

    tables: tuple[str, ...] = ()

    def __init__(self, slots: int = USES) -> None:
        self._times = Times(slots)
        self._ahead = 0

    def touch(self, request: Attributed) -> None:
        """A request that `take` will bring, too."""
        self._touch(request)
        self._ahead += 1

    def last_s(self, pool: str, worker: str, rank: int | None, chain: U64) -> F64:
        """Unix seconds, NaN: not known."""
        return self._times.get(_on(pool, worker, rank, chain))

    def _touch(self, r: Attributed) -> None:
        self._times.put(_on(r.pool, r.worker, r.rank, r.chain), np.full(len(r.chain), r.ended_s))

    def take(self, requests: Sequence[Attributed]) -> None:
        for r in requests[self._ahead :]:
            self._touch(r)
        self._ahead = max(0, self._ahead - len(requests))

    def live(self) -> Mapping[str, Rows]:
        return {}

    def close(self, before_s: float) -> Mapping[str, Rows]:
        return {}

    def save(self) -> Mapping[str, npt.NDArray[Any]]:
        return self._times.save()

    def load(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        self._times.load(saved)

    def held_bytes(self) -> int:
        return self._times.held_bytes()


def _on(pool: str, worker: str, rank: int | None, chain: U64) -> U64:
    number = np.uint64(WorkerId(pool, worker, rank or 0).number | 1)
    return chain ^ number


class News:
    """When blocks were first stored anywhere: of the last ones, so that "had it been stored before t" can be asked a little later.

    Reads each event of the ring once. Events of workers whose records lie in different partitions may be applied out of the order of time,
    most of all while a backlog is read: the earliest of a block's stores counts, whichever was applied first.
    """

    def __init__(self, slots: int = NEWS) -> None:
        self._times = Times(slots)
        self._next = 0
        self._newest_s = -np.inf
        self._missed_s = -np.inf

    def follow(self, state: Residency) -> None:
        """Takes in what happened since the last call."""
        low, low_hash = (int(x) for x in state.reach())
        head = int(state.heads[0])
        if self._next < low:
            self._next = low
            if head > low:
                self._missed_s = float(state.ring["time_s"][low & (len(state.ring) - 1)])
        if self._next == head:
            return
        n = _news(state.ring, state.ring_hashes, state.ring_prior, self._next, head, low_hash, EMPTY_KEYS, EMPTY_TIMES)
        keys, times = np.empty(n, np.uint64), np.empty(n)
        _news(state.ring, state.ring_hashes, state.ring_prior, self._next, head, low_hash, keys, times)
        self._times.put(keys, times)
        self._newest_s = max(self._newest_s, float(times.max(initial=-np.inf)))
        self._times.lower(state, self._next, head, low_hash, self._newest_s)
        self._next = head

    def known_since(self, state: Residency, since_s: float) -> None:
        """The ring was loaded, and holds all that happened at or after since_s (unix seconds)."""
        self._next, self._missed_s = int(state.reach()[0]), since_s

    def seen_before(self, state: Residency, chain: U64, time_s: float) -> int:
        """Blocks of the chain's prefix that any worker had stored at or before time_s (unix seconds); -1: not known any more.

        A block's name covers those before it, so where one was stored, those were; which makes this a bisection. Only where batches were
        lost it is not enough: a block of which nothing was heard may stand before others that were.
        """
        if time_s < max(self._missed_s, self._times.forgotten_s):
            return -1
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            first_s = self._times.get(chain[middle : middle + 1])[0]
            if first_s <= time_s or (np.isnan(first_s) and state.ever(int(chain[middle]))):
                low = middle + 1
            else:
                high = middle
        if state.workers["lost_batches"].any():
            first = self._times.get(chain[low:])
            stored = np.flatnonzero((first <= time_s) | (np.isnan(first) & state.evers(chain[low:])))
            low += 0 if not len(stored) else int(stored[-1]) + 1
        return low

    def held_bytes(self) -> int:
        return self._times.held_bytes()


@numba.njit(cache=True)
def _lower(young, old, ring, ring_hashes, first, head, low_hash, newest_s):  # type: ignore[no-untyped-def]
    for at in range(first, head):
        e = ring[at & (len(ring) - 1)]
        if e["kind"] != _STORED or e["start"] < low_hash or e["time_s"] >= newest_s:
            continue
        when = np.uint64(max(e["time_s"] * 1e6, 0.0)) + np.uint64(1)
        for k in range(np.int64(e["count"])):
            key = ring_hashes[(e["start"] + k) & (len(ring_hashes) - 1)]
            i = _find(young, key)
            if young[i, 1] != 0:
                young[i, 1] = min(young[i, 1], when)
            i = _find(old, key)
            if old[i, 1] != 0:
                old[i, 1] = min(old[i, 1], when)


EMPTY_KEYS, EMPTY_TIMES = np.empty(0, np.uint64), np.empty(0)


@numba.njit(cache=True)
def _news(ring, ring_hashes, ring_prior, first, head, low_hash, keys, times):  # type: ignore[no-untyped-def]
    """Counts the first stores in ring events [first, head), and writes those that there is room for."""
    n = 0
    for at in range(first, head):
        e = ring[at & (len(ring) - 1)]
        if e["kind"] != _STORED or e["start"] < low_hash:
            continue
        for k in range(np.int64(e["count"])):
            i = (e["start"] + k) & (len(ring_hashes) - 1)
            if np.int64(ring_prior[i]) & NEW_ANYWHERE:
                if n < len(keys):
                    keys[n] = ring_hashes[i]
                    times[n] = e["time_s"]
                n += 1
    return n
