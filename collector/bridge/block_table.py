"""One rank's blocks of one block size: engine hash -> canonical name and reference counts, as open addressing over NumPy arrays.

    slot:      0      1      2    ...                 capacity is a power of two, at most 60 % of it used
    keys     [ . | e81f | 03aa | ...                  engine hash (u64); 0 = empty (the hash 0 itself is stored as ZERO_KEY)
    names    [ . | 77c1 |    0 | ...                  canonical name (u64); 0 = resident but never named
    totals   [ . |    2 |    0 | ...                  copies in all places together (i32)
    stamps   [ . |    0 |   41 | ...                  when totals fell to 0 (u32, counts removals events)
    places   {(GPU, group 0): [ . | 1 | 0 | ...       copies in that place (i32), one array a (tier, group)

A block whose last copy goes keeps its name for a while, since a child may still be announced with it as the parent (sliding windows,
offload tiers). When the departed are more than twice the resident ones (and twice MIN_DEPARTED), a rebuild keeps the newer half.

Memory: 28 bytes a slot for one place (4 more for each further one) at 20 to 60 % load: 47 to 140 bytes a known block; with the departed at
their most that is 420 bytes a resident block, in steady state about half.

Rejected: Python dicts (about 250 bytes a block and 0.2 us a block where these kernels need 0.02); tombstones (the departed do that job).
Every kernel has its twin in tests/collector/bridge/test_block_table.py, a naive dict.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from schemas.block_hash import U64

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Place = tuple[int, int]
"""(tier, group)"""

ZERO_KEY = np.uint64(0x9E3779B97F4A7C15)
MIN_CAPACITY = 1 << 10
MIN_DEPARTED = 1 << 12
MAX_LOAD = 0.6
MAX_PLACES = 64  # each costs 4 bytes a slot; engines use one to a dozen

# What `store` found
PLAIN, REPORTED, ODD = 0, 1, 2


class BlockTable:
    """See the module. Callers own the meaning of names; this only counts."""

    def __init__(self, block_size: int, capacity: int = MIN_CAPACITY) -> None:
        self.block_size = block_size
        self.places: dict[Place, I32] = {}
        self.resident = 0  # copies, all places together
        self._clock = 1
        self._allocate(capacity)

    def __repr__(self) -> str:
        return f"BlockTable({self.block_size} tokens a block, {self.resident} copies, {self._used} known)"

    def _allocate(self, capacity: int) -> None:
        self.keys: U64 = np.zeros(capacity, np.uint64)
        self.names: U64 = np.zeros(capacity, np.uint64)
        self.totals: I32 = np.zeros(capacity, np.int32)
        self._stamps = np.zeros(capacity, np.uint32)
        self._used = 0
        self._departed = 0

    @property
    def known(self) -> int:
        """Blocks with an entry, departed ones included."""
        return self._used

    @property
    def held_bytes(self) -> int:
        return len(self.keys) * (24 + 4 * len(self.places))

    def counts(self, place: Place) -> I32:
        """Raises ValueError for more than MAX_PLACES places."""
        counts = self.places.get(place)
        if counts is None:
            if len(self.places) >= MAX_PLACES:
                raise ValueError("too many tiers and groups")
            counts = self.places[place] = np.zeros(len(self.keys), np.int32)
        return counts

    def clear(self) -> None:
        """Everything goes, names too: after a clear no chain of before is continued."""
        self.places = {}
        self.resident = 0
        self._allocate(MIN_CAPACITY)

    def make_room(self, blocks: int) -> None:
        """Afterwards `blocks` insertions fit. Slots found before are void."""
        if self._departed > 2 * max(MIN_DEPARTED, self._used - self._departed) or self._used + blocks > MAX_LOAD * len(self.keys):
            self._rebuild(blocks)

    def find(self, hashes: U64) -> I64:
        """Slot of each hash, -1 where it is unknown."""
        slots = np.empty(len(hashes), np.int64)
        _find(self.keys, hashes, slots)
        return slots

    def insert(self, hashes: U64) -> I64:
        """Slot of each hash; those unknown get one (nameless, no copies). Call make_room before."""
        slots = np.empty(len(hashes), np.int64)
        inserted = _insert(self.keys, hashes, slots)
        self._used += inserted
        self._departed += inserted
        return slots

    def store(self, hashes: U64, names: U64, place: Place, from_root: bool) -> int:
        """Adds one copy of each, unless all are there already and from_root (REPORTED), or some are at odds with their earlier name or had
        copies without a name (ODD): then nothing is counted and the caller goes through them one by one."""
        self.make_room(len(hashes))
        verdict, inserted, returned = _store(
            self.keys, self.names, self.totals, self.counts(place), self._stamps, np.uint32(self._clock), hashes, names, from_root
        )
        self._used += inserted
        self._departed += inserted - returned
        if verdict == PLAIN:
            self.resident += len(hashes)
        return int(verdict)

    def rename(self, slot: int, name: np.uint64) -> None:
        """The name of a slot, known or corrected."""
        self.names[slot] = name
        self._stamps[slot] = self._clock

    def add(self, slot: int, place: Place) -> None:
        """One more copy in a slot."""
        if self.totals[slot] == 0:
            self._departed -= 1
        self.totals[slot] += 1
        self.counts(place)[slot] += 1
        self.resident += 1

    def remove(self, hashes: U64, place: Place) -> tuple[U64, int, U64]:
        """Takes one copy of each away. Returns the names of those that were resident and named, the number of those that were resident
        without a name, and the hashes that were not resident here."""
        counts = self.places.get(place)
        if counts is None:
            return hashes[:0], 0, hashes
        names, unknown = np.empty(len(hashes), np.uint64), np.empty(len(hashes), np.uint64)
        self._clock = self._clock + 1 & 0xFFFFFFFF
        n_named, n_unnamed, n_unknown, n_departed = _remove(
            self.keys, self.names, self.totals, counts, self._stamps, np.uint32(self._clock), hashes, names, unknown
        )
        self.resident -= n_named + n_unnamed
        self._departed += n_departed
        return names[:n_named], n_unnamed, unknown[:n_unknown]

    def resident_names(self, place: Place) -> U64:
        """Names held in one place, each as often as it has copies; blocks without a name are left out."""
        counts = self.places.get(place)
        if counts is None:
            return np.empty(0, np.uint64)
        held = np.flatnonzero((counts > 0) & (self.names != 0))
        return np.repeat(self.names[held], counts[held])

    def _rebuild(self, room: int) -> None:
        resident = np.flatnonzero(self.totals > 0)
        departed = np.flatnonzero((self.totals == 0) & (self.keys != 0) & (self.names != 0))
        keep = max(MIN_DEPARTED, len(resident))
        if len(departed) > keep:
            age = (np.uint32(self._clock) - self._stamps[departed]).astype(np.uint32)
            departed = departed[np.argpartition(age, keep)[:keep]]
        kept = np.concatenate((resident, departed))
        capacity = MIN_CAPACITY
        while (len(kept) + room) > MAX_LOAD / 1.5 * capacity:
            capacity *= 2
        keys, names, totals, stamps, places = self.keys[kept], self.names[kept], self.totals[kept], self._stamps[kept], self.places
        self._allocate(capacity)
        slots = np.empty(len(kept), np.int64)
        _insert(self.keys, keys, slots)
        self.names[slots], self.totals[slots], self._stamps[slots] = names, totals, stamps
        self.places = {}
        for place, counts in places.items():
            moved = np.zeros(capacity, np.int32)
            moved[slots] = counts[kept]
            self.places[place] = moved
        self._used = len(kept)
        self._departed = len(departed)


@numba.njit(cache=True, inline="always")
def _slot(keys, key):  # type: ignore[no-untyped-def]
    """Where `key` is, or the empty slot where it would go."""
    mask = np.uint64(len(keys) - 1)
    at = (key * np.uint64(0xFF51AFD7ED558CCD) >> np.uint64(20)) & mask
    while keys[at] != key and keys[at] != 0:
        at = (at + np.uint64(1)) & mask
    return np.int64(at)


@numba.njit(cache=True, inline="always")
def _key(engine_hash):  # type: ignore[no-untyped-def]
    return engine_hash if engine_hash != 0 else np.uint64(0x9E3779B97F4A7C15)


_HASHES = "Array(u8, 1, 'C', readonly=True)"


@numba.njit(f"void(u8[::1], {_HASHES}, i8[::1])", cache=True)
def _find(keys, hashes, slots):  # type: ignore[no-untyped-def]
    for i in range(len(hashes)):
        at = _slot(keys, _key(hashes[i]))
        slots[i] = at if keys[at] != 0 else -1


@numba.njit(f"i8(u8[::1], {_HASHES}, i8[::1])", cache=True)
def _insert(keys, hashes, slots):  # type: ignore[no-untyped-def]
    inserted = 0
    for i in range(len(hashes)):
        key = _key(hashes[i])
        at = _slot(keys, key)
        if keys[at] == 0:
            keys[at] = key
            inserted += 1
        slots[i] = at
    return inserted


@numba.njit(f"Tuple((i8, i8, i8))(u8[::1], u8[::1], i4[::1], i4[::1], u4[::1], u4, {_HASHES}, u8[::1], b1)", cache=True)
def _store(keys, names, totals, counts, stamps, clock, hashes, new_names, from_root):  # type: ignore[no-untyped-def]
    n = len(hashes)
    all_present = n > 0
    odd = False
    for i in range(n):
        at = _slot(keys, _key(hashes[i]))
        if keys[at] == 0:
            all_present = False
        else:
            all_present = all_present and counts[at] > 0
            odd = odd or (totals[at] > 0 and names[at] != new_names[i])
    if odd:
        return 2, 0, 0
    if from_root and all_present:
        return 1, 0, 0
    inserted = 0
    returned = 0
    for i in range(n):
        key = _key(hashes[i])
        at = _slot(keys, key)
        if keys[at] == 0:
            keys[at] = key
            inserted += 1
        if totals[at] == 0:
            returned += 1
            names[at] = new_names[i]
        totals[at] += 1
        counts[at] += 1
    return 0, inserted, returned


@numba.njit(
    f"Tuple((i8, i8, i8, i8))(u8[::1], u8[::1], i4[::1], i4[::1], u4[::1], u4, {_HASHES}, u8[::1], u8[::1])",
    cache=True,
)
def _remove(keys, names, totals, counts, stamps, clock, hashes, out_names, out_unknown):  # type: ignore[no-untyped-def]
    n_named = 0
    n_unnamed = 0
    n_unknown = 0
    n_departed = 0
    for i in range(len(hashes)):
        at = _slot(keys, _key(hashes[i]))
        if keys[at] == 0 or counts[at] == 0:
            out_unknown[n_unknown] = hashes[i]
            n_unknown += 1
            continue
        counts[at] -= 1
        totals[at] -= 1
        if totals[at] == 0:
            stamps[at] = clock
            n_departed += 1
        if names[at] != 0:
            out_names[n_named] = names[at]
            n_named += 1
        else:
            n_unnamed += 1
    return n_named, n_unnamed, n_unknown, n_departed
