"""How deep in an LRU cache a block lies: exact stack distances of prefix chains, online, in bounded memory.

The *distance* of a block is the number of distinct blocks used since its last use, itself included: an LRU cache of C blocks holds it
if and only if its distance is at most C (Mattson 1970). Engines free a request's blocks tail first, so an ancestor counts as used after its
descendants, distances grow along a chain, and the prefix hit at capacity C is the longest run of blocks with distance <= C.

    time     1 2 3 4 5 6 7 8 9 ...      each use takes the next position; a set bit is the last use of some block
    bits     . 1 . 1 1 . . 1 1
    lines    512 positions each, counted in a Fenwick tree: set bits before a position = tree walk + 8 popcounts
    table    open addressing, linear probing; one slot is 16 bytes: block u64 | position u32 | time of last use u32

    distance = set bits at or after the block's position

Blocks that were used together lie side by side, so that along a chain most distances are the one before plus 1, and only the seams walk
the tree. When positions run out or the table grows, all blocks get new positions, in order.

Beyond the budget: the half of it that was used last stays complete, so distances up to there remain exact. Of older blocks (the *tail*,
positions before `horizon`) only those whose hash falls into one of w = 2**shift parts are kept, and fill the other half; each stands for w
blocks of distance (spatial sampling, as SHARDS, FAST'15). Sampling goes wrong where one hot block is not sampled; hot blocks are never in
the tail. How many blocks of a chain were hit in the tail is told from the last sampled one that was: at place j (from 1) it means
j + w - 1 blocks, which is unbiased (by induction over the true number h: E[h] = (h + w - 1)/w + (1 - 1/w) E[h - 1] = h) with a variance
of at most w(w - 1) however long the hit is; counting w for each sampled block has h(w - 1). Distances in the tail are rounded up to 11
binary digits, well within their error, so that a chain makes some events and not one a block.

Invariants: every table entry has one bit, every bit one entry; tail entries pass the sampling of today's shift, which never falls; a block
that passes it and is not in the table was never seen. State depends on the sequence of calls alone.

Memory: 16 bytes a slot + 1.06 bytes of bits and tree, at most 70 % of slots taken: 24 to 49 bytes a block, 17 at most a power of two above.

Rejected: one Fenwick leaf a position (8 times the memory, a cache miss a block instead of one a seam); a balanced tree (10 times slower);
AET alone (a model of independent references: .0056 mean error on a trace whose prompts are bursts of one group); plain SHARDS.

Pure: no clock, no I/O. The twin in tests/collector/analytics/test_reuse.py is an LRU list at every capacity.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from collector.analytics.distinct import mix
from collector.analytics.reuse_histogram import TAIL_DIGITS, ReuseHistogram
from schemas.block_hash import U64

I64 = npt.NDArray[np.int64]

TICKS_PER_S = 64
"""Times of last use count in these; they wrap after 776 days, and ages up to half of that are told right."""
LOAD = 0.7
SLACK = 1.45  # times the budget, when blocks are forgotten: as much as 70 % of 4 M slots allow at 2 M blocks
POSITIONS_PER_SLOT = 8
MIN_SLOTS = 1024
MAX_SHIFT = 24
_LINE = 512

_NEXT, _LIVE, _HORIZON, _BELOW, _SHIFT = range(5)


@numba.njit(cache=True, inline="always")
def _ones(x):  # type: ignore[no-untyped-def]
    x = x - (x >> np.uint64(1) & np.uint64(0x5555555555555555))
    x = (x & np.uint64(0x3333333333333333)) + (x >> np.uint64(2) & np.uint64(0x3333333333333333))
    x = x + (x >> np.uint64(4)) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64(x * np.uint64(0x0101010101010101) >> np.uint64(56))


@numba.njit(cache=True, inline="always")
def _depth(h):  # type: ignore[no-untyped-def]
    """Leading zeros of a block's mixed hash, at most 63: it is sampled at every shift up to that."""
    x = mix(h)
    n = 0
    while n < 63 and x >> np.uint64(63 - n) == np.uint64(0):
        n += 1
    return n


@numba.njit(cache=True)
def _rank(bits, tree, position):  # type: ignore[no-untyped-def]
    """Set bits before a position."""
    line = position >> 9
    n = np.int64(0)
    i = line
    while i > 0:
        n += tree[i]
        i &= i - 1
    word = position >> 6
    for k in range(line << 3, word):
        n += _ones(bits[k])
    return n + _ones(bits[word] & ((np.uint64(1) << np.uint64(position & 63)) - np.uint64(1)))


@numba.njit(cache=True, inline="always")
def _count(tree, line, by):  # type: ignore[no-untyped-def]
    i = line + 1
    while i < len(tree):
        tree[i] += by
        i += i & -i


@numba.njit(cache=True)
def _measure(  # type: ignore[no-untyped-def]
    table, bits, tree, meta, chain, tick, limit, block_size, slots, at, mass, ttl_ticks, ttl, repeats,
):  # fmt: skip
    """Finds the chain's slots and counts the distances and ages of its first `limit` blocks, all before any of them is used.

    slots: receives where each block is or belongs. at, mass: receive events of `ReuseHistogram`. Returns (events, blocks that an endless
    cache had).
    """
    mask = np.int64(len(table) - 1)
    for k in range(len(chain)):
        h = chain[k]
        j = np.int64(mix(h) & np.uint64(mask))
        while table[j, 1] != np.uint64(0) and table[j, 0] != h:
            j = (j + 1) & mask
        slots[k] = j
    live, horizon, below, shift = meta[_LIVE], meta[_HORIZON], meta[_BELOW], meta[_SHIFT]
    start: Any = np.int64(0)
    end = np.int64(0)  # of the distances of the run at hand
    before, distance, top = np.int64(-1), np.int64(0), np.int64(0)
    oldest: Any = np.int64(0)
    bin_, in_bin, used = 0, 0, 0
    i: Any = np.int64(0)
    while i < limit:
        rest = table[slots[i], 1]
        position = np.int64(rest >> np.uint64(32))
        if position < horizon:  # free slots included
            break
        if position == before - 1:
            distance += 1
        else:
            distance = live - _rank(bits, tree, position)
        before = position
        top = max(top, distance)
        if top != end:
            if end > start:
                used = _event(at, mass, used, start, end, np.int64(1), np.int64(0), block_size)
            start = top
        end = top + 1
        age: Any = (np.int64(tick) - np.int64(rest & np.uint64(0xFFFFFFFF))) & np.int64(0xFFFFFFFF)
        if age > oldest and age < 1 << 31:
            oldest = age
            if bin_ < len(ttl_ticks) and oldest > ttl_ticks[bin_]:
                _age(ttl, bin_, in_bin, np.int64(0), block_size)
                in_bin = 0
                while bin_ < len(ttl_ticks) and oldest > ttl_ticks[bin_]:
                    bin_ += 1
        in_bin += 1
        i += 1
    _age(ttl, bin_, in_bin, np.int64(0), block_size)
    if end > start:
        used = _event(at, mass, used, start, end, np.int64(1), np.int64(0), block_size)
    if shift == 0:
        return used, i
    counted = i
    blocks, var = (np.int64(1) << shift) - 1, ((np.int64(1) << shift) - 1) << shift
    unit, found, found_var = np.int64(1), np.int64(0), np.int64(0)  # of the distance `start`, rounded up to a multiple of unit
    start = np.int64(0)
    for k in range(i, limit):
        if mix(chain[k]) >> np.uint64(64 - shift) != np.uint64(0):
            continue
        rest = table[slots[k], 1]
        if rest == np.uint64(0):
            break
        position = np.int64(rest >> np.uint64(32))
        if position < horizon:
            distance = live - below + ((below - _rank(bits, tree, position)) << shift)
        else:
            distance = live - _rank(bits, tree, position)
        top = max(top, distance)
        age = (np.int64(tick) - np.int64(rest & np.uint64(0xFFFFFFFF))) & np.int64(0xFFFFFFFF)
        if age < 1 << 31:
            oldest = max(oldest, age)
        while bin_ < len(ttl_ticks) and oldest > ttl_ticks[bin_]:
            bin_ += 1
        if var > 0:
            repeats[mix(chain[k]) & np.uint64(len(repeats) - 1)] += 1
        blocks += k + 1 - i
        i = k + 1
        _age(ttl, bin_, blocks, var, block_size)
        counted += blocks
        if top > start:
            if found > 0:
                used = _event(at, mass, used, start, start + 1, found, found_var, block_size)
            while top >> TAIL_DIGITS >= unit:
                unit <<= 1
            start = (top + unit - 1) // unit * unit
            found, found_var = np.int64(0), np.int64(0)
        found += blocks
        found_var += var
        blocks, var = np.int64(0), np.int64(0)
    if found > 0:
        used = _event(at, mass, used, start, start + 1, found, found_var, block_size)
    return used, counted


@numba.njit(cache=True, inline="always")
def _event(at, mass, used, start, end, blocks, var, block_size):  # type: ignore[no-untyped-def]
    """Counts `blocks` at each distance start .. end - 1."""
    at[used] = start
    at[used + 1] = end
    mass[used, 0], mass[used, 1], mass[used, 2] = blocks, blocks * block_size, var
    mass[used + 1, 0], mass[used + 1, 1], mass[used + 1, 2] = -blocks, -blocks * block_size, -var
    return used + 2


@numba.njit(cache=True, inline="always")
def _age(ttl, bin_, blocks, var, block_size):  # type: ignore[no-untyped-def]
    ttl[bin_, 0] += blocks
    ttl[bin_, 1] += blocks * block_size
    ttl[bin_, 2] += var


@numba.njit(cache=True)
def _use(table, bits, tree, meta, chain, tick, slots):  # type: ignore[no-untyped-def]
    """Uses the chain's blocks tail first; slots as `_measure` left them. Table and positions must have room."""
    mask = np.int64(len(table) - 1)
    horizon = meta[_HORIZON]
    position = meta[_NEXT]
    gone_line, gone = np.int64(0), np.int64(0)
    line, come = np.int64(0), np.int64(0)
    for i in range(len(chain) - 1, -1, -1):
        h = chain[i]
        j = slots[i]
        while table[j, 1] != np.uint64(0) and table[j, 0] != h:
            j = (j + 1) & mask
        rest = table[j, 1]
        last = np.int64(tick)
        if rest == np.uint64(0):
            table[j, 0] = h
            meta[_LIVE] += 1
        else:
            old = np.int64(rest >> np.uint64(32))
            bits[old >> 6] &= ~(np.uint64(1) << np.uint64(old & 63))
            if old >> 9 != gone_line:
                if gone:
                    _count(tree, gone_line, -gone)
                gone_line, gone = old >> 9, np.int64(0)
            gone += 1
            if old < horizon:
                meta[_BELOW] -= 1
            was = np.int64(rest & np.uint64(0xFFFFFFFF))
            if (last - was) & np.int64(0xFFFFFFFF) >= 1 << 31:
                last = was
        table[j, 1] = np.uint64(position) << np.uint64(32) | np.uint64(last)
        bits[position >> 6] |= np.uint64(1) << np.uint64(position & 63)
        if position >> 9 != line:
            if come:
                _count(tree, line, come)
            line, come = position >> 9, np.int64(0)
        come += 1
        position += 1
    if gone:
        _count(tree, gone_line, -gone)
    if come:
        _count(tree, line, come)
    meta[_NEXT] = position


@numba.njit(cache=True)
def _ranks(bits):  # type: ignore[no-untyped-def]
    """Set bits before each line of 512."""
    out = np.empty(len(bits) >> 3, np.int64)
    n = np.int64(0)
    for line in range(len(out)):
        out[line] = n
        for k in range(line << 3, (line << 3) + 8):
            n += _ones(bits[k])
    return out


@numba.njit(cache=True, inline="always")
def _rank_in(bits, ranks, position):  # type: ignore[no-untyped-def]
    n = ranks[position >> 9]
    word = position >> 6
    for k in range(position >> 9 << 3, word):
        n += _ones(bits[k])
    return n + _ones(bits[word] & ((np.uint64(1) << np.uint64(position & 63)) - np.uint64(1)))


@numba.njit(cache=True)
def _position_of(bits, ranks, rank):  # type: ignore[no-untyped-def]
    """Position of the set bit with so many before it."""
    line = np.searchsorted(ranks, rank, side="right") - 1
    word = line << 3
    left = rank - ranks[line]
    while _ones(bits[word]) <= left:
        left -= _ones(bits[word])
        word += 1
    x = bits[word]
    for _ in range(left):
        x &= x - np.uint64(1)
    return np.int64(word << 6) + _ones((x & (~x + np.uint64(1))) - np.uint64(1))


@numba.njit(cache=True)
def _thin(table, bits, meta, budget):  # type: ignore[no-untyped-def]
    """Moves the horizon so that half the budget is after it, and forgets blocks before it until the rest fits.

    Of more blocks than the budget, so that shift is at least 1 afterwards. The tree is not kept.
    """
    live, shift = meta[_LIVE], meta[_SHIFT]
    horizon = meta[_HORIZON]
    cut = live - (budget + 1) // 2
    if cut > meta[_BELOW]:
        horizon = _position_of(bits, _ranks(bits), cut)
    by_depth = np.zeros(64, np.int64)
    for j in range(len(table)):
        rest = table[j, 1]
        if rest != np.uint64(0) and np.int64(rest >> np.uint64(32)) < horizon:
            by_depth[_depth(table[j, 0])] += 1
    tail = kept = np.int64(0)
    for depth in range(len(by_depth)):
        tail += by_depth[depth]
        kept += by_depth[depth] if depth >= shift else 0
    while kept > budget // 2 and shift < MAX_SHIFT:
        kept -= by_depth[shift]
        shift += 1
    mask = len(table) - 1
    j = 0
    while j < len(table):
        rest = table[j, 1]
        position = np.int64(rest >> np.uint64(32))
        if rest == np.uint64(0) or position >= horizon or mix(table[j, 0]) >> np.uint64(64 - shift) == np.uint64(0):
            j += 1
            continue
        bits[position >> 6] &= ~(np.uint64(1) << np.uint64(position & 63))
        # Backward-shift deletion; what moves here is looked at next, and what moves over the end of the table was looked at before.
        hole = j
        k = (j + 1) & mask
        while table[k, 1] != np.uint64(0):
            home = np.int64(mix(table[k, 0]) & np.uint64(mask))
            if ((k - home) & mask) >= ((k - hole) & mask):
                table[hole, 0] = table[k, 0]
                table[hole, 1] = table[k, 1]
                hole = k
            k = (k + 1) & mask
        table[hole, 1] = np.uint64(0)
    meta[_SHIFT] = shift
    meta[_HORIZON] = horizon
    meta[_BELOW] = kept
    meta[_LIVE] = live - tail + kept


@numba.njit(cache=True)
def _put(table, h, rest):  # type: ignore[no-untyped-def]
    mask = np.int64(len(table) - 1)
    j = np.int64(mix(h) & np.uint64(mask))
    while table[j, 1] != np.uint64(0):
        j = (j + 1) & mask
    table[j, 0] = h
    table[j, 1] = rest


@numba.njit(cache=True)
def _move(table, into):  # type: ignore[no-untyped-def]
    """Moves all entries to an empty table."""
    for j in range(len(table)):
        if table[j, 1] != np.uint64(0):
            _put(into, table[j, 0], table[j, 1])


@numba.njit(cache=True)
def _renumber(table, bits, meta):  # type: ignore[no-untyped-def]
    """Gives all entries positions 1, 2, ... in the order of the old ones. Bits are not kept."""
    ranks = _ranks(bits)
    for j in range(len(table)):
        rest = table[j, 1]
        if rest != np.uint64(0):
            position = np.uint64(1 + _rank_in(bits, ranks, np.int64(rest >> np.uint64(32))))
            table[j, 1] = position << np.uint64(32) | rest & np.uint64(0xFFFFFFFF)
    meta[_NEXT] = 1 + meta[_LIVE]
    meta[_HORIZON] = 1 + meta[_BELOW]


@numba.njit(cache=True)
def _mark(table, bits):  # type: ignore[no-untyped-def]
    """Sets empty bits from the table."""
    for j in range(len(table)):
        rest = table[j, 1]
        if rest != np.uint64(0):
            position = np.int64(rest >> np.uint64(32))
            bits[position >> 6] |= np.uint64(1) << np.uint64(position & 63)


@numba.njit(cache=True)
def _plant(bits, tree):  # type: ignore[no-untyped-def]
    """Sets the tree from the bits."""
    for line in range(len(tree) - 1):
        n = np.int64(0)
        for k in range(line << 3, (line << 3) + 8):
            n += _ones(bits[k])
        tree[line + 1] = n
    for i in range(1, len(tree)):
        above = i + (i & -i)
        if above < len(tree):
            tree[above] += tree[i]


@numba.njit(cache=True)
def _listed(table, bits, blocks, rests):  # type: ignore[no-untyped-def]
    """Entries in the order of their positions."""
    ranks = _ranks(bits)
    for j in range(len(table)):
        rest = table[j, 1]
        if rest != np.uint64(0):
            at = _rank_in(bits, ranks, np.int64(rest >> np.uint64(32)))
            blocks[at] = table[j, 0]
            rests[at] = rest


@numba.njit(cache=True)
def _put_all(table, blocks, rests):  # type: ignore[no-untyped-def]
    for i in range(len(blocks)):
        _put(table, blocks[i], rests[i])


class Scratch:
    """Room for one request's work, shared by any number of caches that are used one after another. It never shrinks: 72 bytes a block."""

    def __init__(self) -> None:
        self._of = self._new(1024)

    def of(self, blocks: int) -> tuple[I64, I64, I64]:
        """Slots, shape (blocks,) at least, and events: distances and changes."""
        if blocks > len(self._of[0]):
            self._of = self._new(2 * blocks)
        return self._of

    @staticmethod
    def _new(blocks: int) -> tuple[I64, I64, I64]:
        return np.empty(blocks, np.int64), np.empty(2 * blocks, np.int64), np.empty((2 * blocks, 3), np.int64)


class StackDistances:
    """Distances of the blocks of one cache's requests. budget: blocks of which all is known; beyond it half of them are the tail."""

    def __init__(self, budget: int, scratch: Scratch | None = None) -> None:
        self.budget = budget
        self._scratch = Scratch() if scratch is None else scratch
        self._meta = np.array([1, 0, 1, 0, 0], np.int64)
        self._empty(MIN_SLOTS)

    def _empty(self, slots: int) -> None:
        self._table = np.zeros((slots, 2), np.uint64)
        lines = slots * POSITIONS_PER_SLOT // _LINE
        self._bits = np.zeros(lines * 8, np.uint64)
        self._tree = np.zeros(lines + 1, np.int32)

    @property
    def blocks(self) -> int:
        """Blocks kept."""
        return int(self._meta[_LIVE])

    @property
    def exact_to(self) -> int | None:
        """Distances up to this are exact; None: all are."""
        return int(self._meta[_LIVE] - self._meta[_BELOW]) if self._meta[_SHIFT] else None

    @property
    def weight(self) -> int:
        """Blocks that one of the tail stands for."""
        return 1 << int(self._meta[_SHIFT])

    def use(self, chain: U64, time_s: float, block_size: int, into: ReuseHistogram, limit: int | None = None) -> int:
        """Counts one request and uses its blocks; returns how many leading blocks an endless cache had (beyond the budget: an estimate).

        chain: names of its blocks, shape (blocks,). Its first `limit` blocks (None: all) are those that a cache may deliver. time_s: unix
        seconds; of two uses the later one counts as the last. block_size: tokens.
        """
        chain = np.require(chain, np.uint64, ["C", "W"])  # one compiled variant, also for read-only arrays
        n = len(chain)
        self._make_room(n)
        exact_to = self.exact_to
        limit = n if limit is None else min(n, limit)
        tick = int(time_s * TICKS_PER_S) & 0xFFFFFFFF
        slots, at, mass = self._scratch.of(n)
        state = self._table, self._bits, self._tree, self._meta
        used, seen = _measure(*state, chain, tick, limit, block_size, slots, at, mass, into.ttl_ticks, into.ttl, into.repeats)
        _use(*state, chain, tick, slots)
        into.add(at[:used], mass[:used], exact_to, self.weight)
        return int(seen)

    def _make_room(self, blocks: int) -> None:
        slots = len(self._table)
        if self.blocks > SLACK * self.budget or (self.blocks > self.budget and self.blocks + blocks > LOAD * slots):
            _thin(self._table, self._bits, self._meta, self.budget)
            _plant(self._bits, self._tree)
        wanted = max(MIN_SLOTS, 1 << int((self.blocks + max(blocks, self.blocks // 4)) / LOAD).bit_length())
        full = self.blocks + blocks > LOAD * slots
        if not (full or wanted * 8 < slots or self._meta[_NEXT] + blocks > len(self._bits) * 64):
            return
        _renumber(self._table, self._bits, self._meta)
        if full or wanted * 8 < slots:
            old = self._table
            self._empty(wanted)
            _move(old, self._table)
        else:
            self._bits[:] = 0
        _mark(self._table, self._bits)
        _plant(self._bits, self._tree)

    def save(self) -> tuple[I64, U64, U64]:
        """Budget, slots and counters; blocks in the order of use; their positions and times."""
        blocks, rests = np.empty(self.blocks, np.uint64), np.empty(self.blocks, np.uint64)
        _listed(self._table, self._bits, blocks, rests)
        return np.concatenate(([self.budget, len(self._table)], self._meta)), blocks, rests

    @staticmethod
    def saved_blocks(head: I64) -> int:
        return int(head[2 + _LIVE])

    @classmethod
    def loaded(cls, head: I64, blocks: U64, rests: U64, scratch: Scratch | None = None) -> StackDistances:
        """The inverse of `save`."""
        out = cls(int(head[0]), scratch)
        out._meta = np.array(head[2:], np.int64)
        out._empty(int(head[1]))
        _put_all(out._table, blocks, rests)
        _mark(out._table, out._bits)
        _plant(out._bits, out._tree)
        return out

    def held_bytes(self) -> int:
        return self._table.nbytes + self._bits.nbytes + self._tree.nbytes
