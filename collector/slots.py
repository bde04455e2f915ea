"""The table of who holds which block: open addressing, linear probing, backward-shift deletion; one slot is 16 bytes.

    hash u64 | owner u32 = instance << 10 | tier << 8 | group | superseded 1 bit, count 31 bits (physical copies; all 0: the slot is free)

One read from memory a look-up. An entry of a life that is over stays as it was, but for `superseded`: the worker stored that block again
since, so what became of the old one is of no interest (see attribution/history.py). Counts are not touched by it.
"""

from __future__ import annotations

import numba
import numpy as np

COUNT = np.uint64(0x7FFFFFFF)
SUPERSEDED = np.uint64(0x80000000)
_LOW = np.uint64(0xFFFFFFFF)


@numba.njit(cache=True, inline="always")
def home_of(h, owner, mask):  # type: ignore[no-untyped-def]
    x = h ^ (np.uint64(owner) * np.uint64(0x9E3779B97F4A7C15))
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xD6E8FEB86659FD93)
    x ^= x >> np.uint64(29)
    return np.int64(x & mask)


# The probe stands again in each of the three that every block event goes through: with `_find` in them the whole collector came to 2.0
# instead of 2.4 M block events a second and core (bench_ingest, 64 blocks a record; one run each, so some of it may be noise).
@numba.njit(cache=True)
def count_of(table, h, owner):  # type: ignore[no-untyped-def]
    """Copies of block `h` that `owner` holds."""
    mask = np.int64(len(table) - 1)
    i = home_of(h, owner, np.uint64(mask))
    while True:
        rest = table[i, 1]
        if rest == 0:
            return np.int64(0)
        if table[i, 0] == h and rest >> np.uint64(32) == owner:
            return np.int64(rest & COUNT)
        i = (i + 1) & mask


@numba.njit(cache=True)
def add(table, h, owner, copies):  # type: ignore[no-untyped-def]
    """Adds copies; returns the count before. The table must have room."""
    mask = np.int64(len(table) - 1)
    i = home_of(h, owner, np.uint64(mask))
    while True:
        rest = table[i, 1]
        if rest == 0:
            table[i, 0] = h
            table[i, 1] = np.uint64(owner) << np.uint64(32) | np.uint64(copies)
            return np.int64(0)
        if table[i, 0] == h and rest >> np.uint64(32) == owner:
            table[i, 1] = rest + np.uint64(copies)
            return np.int64(rest & COUNT)
        i = (i + 1) & mask


@numba.njit(cache=True)
def take(table, h, owner):  # type: ignore[no-untyped-def]
    """Takes one copy away; returns the count before (0: not held, nothing changed)."""
    mask = np.int64(len(table) - 1)
    i = home_of(h, owner, np.uint64(mask))
    while True:
        rest = table[i, 1]
        if rest == 0:
            return np.int64(0)
        if table[i, 0] == h and rest >> np.uint64(32) == owner:
            break
        i = (i + 1) & mask
    before = np.int64(rest & COUNT)
    if before > 1:
        table[i, 1] = rest - np.uint64(1)
        return before
    hole = i
    j = (i + 1) & mask
    while table[j, 1] != 0:
        home = home_of(table[j, 0], table[j, 1] >> np.uint64(32), np.uint64(mask))
        if ((j - home) & mask) >= ((j - hole) & mask):
            table[hole, 0] = table[j, 0]
            table[hole, 1] = table[j, 1]
            hole = j
        j = (j + 1) & mask
    table[hole, 1] = np.uint64(0)
    return before


@numba.njit(cache=True)
def touch(table, hashes, lo, hi, owner):  # type: ignore[no-untyped-def]
    """Reads the home slots of hashes[lo:hi]: independent reads overlap in the memory system, the walks that follow find them cached."""
    mask = np.uint64(len(table) - 1)
    seen = np.uint64(0)
    for i in range(lo, hi):
        seen |= table[home_of(hashes[i], owner, mask), 1]
    return seen


@numba.njit(cache=True)
def rebuild(table, keep, fresh):  # type: ignore[no-untyped-def]
    n = 0
    for i in range(len(table)):
        rest = table[i, 1]
        if rest != 0 and keep[rest >> np.uint64(42)]:
            add(fresh, table[i, 0], rest >> np.uint64(32), np.int64(rest & _LOW))
            n += 1
    return n


@numba.njit(cache=True)
def kept(table, keep, out):  # type: ignore[no-untyped-def]
    """Counts the entries to keep; copies them to `out` as far as it has room."""
    n = 0
    for i in range(len(table)):
        rest = table[i, 1]
        if rest != 0 and keep[rest >> np.uint64(42)]:
            if n < len(out):
                out[n, 0] = table[i, 0]
                out[n, 1] = rest
            n += 1
    return n


@numba.njit(cache=True)
def _find(table, h, owner):  # type: ignore[no-untyped-def]
    """The entry's slot; -1: there is none."""
    mask = np.int64(len(table) - 1)
    i = home_of(h, owner, np.uint64(mask))
    while table[i, 1] != 0:
        if table[i, 0] == h and table[i, 1] >> np.uint64(32) == owner:
            return i
        i = (i + 1) & mask
    return np.int64(-1)


@numba.njit(cache=True)
def supersede(table, h, owner):  # type: ignore[no-untyped-def]
    """Marks an entry; True: there is one that was not marked before."""
    i = _find(table, h, owner)
    if i < 0 or table[i, 1] & SUPERSEDED != 0:
        return False
    table[i, 1] |= SUPERSEDED
    return True


@numba.njit(cache=True)
def is_open(table, h, owner):  # type: ignore[no-untyped-def]
    """There is an entry, and it is not superseded."""
    i = _find(table, h, owner)
    return i >= 0 and table[i, 1] & SUPERSEDED == 0
