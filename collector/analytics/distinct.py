"""How many different blocks there are: exact up to a budget, beyond it from a sample that is told by the blocks' own names.

    a name --mix--> 64 bits; kept while its first `level` bits are 0: one in 2^level, and the same ones everywhere

When more than `most` names are kept, `level` rises by one and half of them go. The estimate is kept * 2^level; its standard error is
sqrt((1 - 2^-level) / kept), at most 1.4 / sqrt(most) of it: 0.6 % at 65,536. Up to `most` it is exact. The result depends on the set
alone, not on the order or on repetitions, and a sample is merged or saved as what it is: a list of names.

Rejected: HyperLogLog (smaller, but never exact, and blocks of a sample are needed elsewhere, too), sampling positions (shared prefixes
would count as often as they are asked for).
"""

from __future__ import annotations

import math

import numba
import numpy as np

from schemas.block_hash import U64

_LOAD = 0.7


@numba.njit(cache=True, inline="always")
def mix(h):  # type: ignore[no-untyped-def]
    """Spreads a name over 64 bits (the finalizer of splitmix64); never 0."""
    x = h ^ (h >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x if x != 0 else np.uint64(1)


@numba.njit(cache=True)
def mixed_sample(names, level):  # type: ignore[no-untyped-def]
    """`mix` of those names that are in the sample of a level, in order."""
    out = np.empty(len(names), np.uint64)
    n = 0
    limit = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(level)
    for i in range(len(names)):
        m = mix(names[i])
        if m <= limit:
            out[n] = m
            n += 1
    return out[:n].copy()


@numba.njit(cache=True)
def _put(slots, m):  # type: ignore[no-untyped-def]
    """Returns whether it is new."""
    mask = len(slots) - 1
    i = np.int64(m & np.uint64(mask))
    while slots[i] != 0:
        if slots[i] == m:
            return False
        i = (i + 1) & mask
    slots[i] = m
    return True


@numba.njit(cache=True)
def _count(slots, kept, level, most, mixed, start):  # type: ignore[no-untyped-def]
    """Takes mixed names from `start` on. Returns (where it stopped for want of room, kept)."""
    limit = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(level)
    for i in range(start, len(mixed)):
        if mixed[i] <= limit and _put(slots, mixed[i]):
            kept += 1
            if kept >= most:
                return i + 1, kept
    return len(mixed), kept


@numba.njit(cache=True)
def _refill(slots, level, fresh):  # type: ignore[no-untyped-def]
    limit = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(level)
    n = 0
    for i in range(len(slots)):
        if slots[i] != 0 and slots[i] <= limit:
            _put(fresh, slots[i])
            n += 1
    return n


class Distinct:
    """most: names that are kept at most; 11 to 23 bytes each."""

    def __init__(self, most: int = 1 << 16) -> None:
        self._most = most
        self._slots = np.zeros(64, np.uint64)
        self._kept = 0
        self.level = 0

    def add(self, names: U64) -> None:
        self.add_mixed(mixed_sample(names, self.level))

    def add_mixed(self, mixed: U64) -> None:
        """Names that are mixed already, of a sample of this level at most."""
        at = 0
        while at < len(mixed):
            room = min(self._most + 1, int(len(self._slots) * _LOAD))
            at, self._kept = _count(self._slots, self._kept, self.level, room, mixed, at)
            if self._kept > self._most:
                self.level += 1
                self._rebuild(len(self._slots))
            elif self._kept >= int(len(self._slots) * _LOAD):
                self._rebuild(len(self._slots) * 2)

    def estimate(self) -> int:
        return self._kept << self.level

    def error(self) -> float:
        """Relative standard error; 0: exact."""
        return math.sqrt((1 - 0.5**self.level) / self._kept) if self.level and self._kept else 0.0

    def save(self) -> U64:
        """The level, then the names that are kept, mixed and sorted."""
        return np.concatenate([np.array([self.level], np.uint64), np.sort(self._slots[self._slots != 0])])

    def load(self, saved: U64) -> None:
        self.level, self._kept = int(saved[0]), len(saved) - 1
        self._slots = np.zeros(64, np.uint64)
        while self._kept >= int(len(self._slots) * _LOAD):
            self._slots = np.zeros(len(self._slots) * 2, np.uint64)
        _refill(saved[1:], 0, self._slots)

    def held_bytes(self) -> int:
        return self._slots.nbytes

    def _rebuild(self, slots: int) -> None:
        fresh = np.zeros(slots, np.uint64)
        self._kept = int(_refill(self._slots, self.level, fresh))
        self._slots = fresh
