"""What became of each block: the part of a cache's past that is kept when the events are gone. `Residency.apply` fills it.

For each hash of a STORED event, `Residency.ring_prior` (u32, parallel to `ring_hashes`) holds what was true just before that store:

    bit 31      NEW_ANYWHERE: no worker ever stored that hash before
    bits 30-29  fate on this worker: NEVER, EVICTED, CLEARED, RESIDENT
    bits 28-0   EVICTED, CLEARED: how long it had been gone, in 10 ms; all ones: long, not known

It is told from four memories, each with a budget:

    table    entries of the last lives of a worker's cache (CLEARED) stay where they are: a clear costs nothing. Each worker has at most
             `LIVES` of them, all together a quarter of the ghosts' budget; beyond it they are *settled*: all become ghosts in one pass
    ghosts   (block, worker) -> fate, when; exact. Made when the count of a block on a (tier, group) falls to 0, the newest removal holds;
             taken out by the next store of the block on any tier or group of the worker
    seen     blocks that some worker stored, exact
    filters  where ghosts and seen go beyond their budgets: Bloom filters of two generations, one line of memory a block. They say
             "evicted here (or: cleared here), long ago" and "stored somewhere", never the opposite

    ghosts: two generations of budget / 2      seen: budget      filters: two generations, the older is forgotten when the newer is full
    [newer] [older] -> filter of what is gone  [set] -> filter of what was seen

A filter errs for less than 0.5 % of the blocks that it does not hold, each generation; below the budgets nothing errs. What is forgotten at
last counts as NEVER and as new anywhere; but a block that some worker holds, or whose loss is told exactly, is never forgotten as seen.

Invariants: all answers depend on the sequence of records alone, not on how they were cut into slices, on when the table was rebuilt or
on saving and loading. So nothing here happens when a table is full, only when a count says so, and passes over a table
only do what is independent of its order.

Rejected: a log of removals (as long as time); ghosts in the table of residency (its owner is a life and a tier, a ghost's is a worker:
clears would have to move them); one filter alone (a wrong cause for each 200th block, and no times); settling when the table is
rebuilt (it depends on slices, so a restart would answer otherwise).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from collector.slots import home_of, is_open, supersede

NEVER, EVICTED, CLEARED, RESIDENT, UNKNOWN = range(5)
"""Fates. UNKNOWN: the store was read before this was kept (a checkpoint of an earlier version)."""

NEW_ANYWHERE = 1 << 31
FATE_SHIFT = 29
LONG = (1 << FATE_SHIFT) - 1
TICKS_PER_S = 100
PRIOR_UNKNOWN = RESIDENT << FATE_SHIFT | LONG

LIVES = 8
_CHUNK = 64  # keys that a filter takes at once
MAX_WORKERS = 1 << 22
MAX_GROUPS = 16  # groups above are counted together with the last one
FILTER_BITS = 12  # a key, when a generation is full

# A ghost's second word: worker 22 bits | generation 1 | fate 2 | ticks of 10 ms since 1970 39 bits. The first is the block.
_WORKER, _GENERATION, _FATE = np.uint64(42), np.uint64(41), np.uint64(39)
_TICKS = np.uint64((1 << 39) - 1)

_G_NOW, _G_N, _G_BUDGET = 0, 1, 3  # generation; entries of both; budget
_F_NOW, _F_N, _F_BUDGET = 4, 5, 7  # filter of what is gone: the same
_S_NOW, _S_N, _S_BUDGET = 8, 9, 11  # filter of what was seen
_SEEN_N, _SEEN_BUDGET = 12, 13
_LIFE_NEXT, _LIFE_BLOCKS = 14, 15
META = 16
_BUDGETS = [_G_BUDGET, _F_BUDGET, _S_BUDGET, _SEEN_BUDGET]

LIFE = np.dtype([("instance", "<u8"), ("blocks", "<i8"), ("ticks", "<i8"), ("order", "<i8")])


class Memory(NamedTuple):
    """All of it, as the kernels take it. ghosts: u64 (slots, 2); seen: u64 (slots,), 0 free; filters: u64 (lines, 2 generations, 8);
    lives: `LIFE` (workers, LIVES), oldest first, lives_n of them; life_of: instance -> worker * LIVES + place + 1, 0: none."""

    ghosts: npt.NDArray[np.uint64]
    seen: npt.NDArray[np.uint64]
    gone_filter: npt.NDArray[np.uint64]
    seen_filter: npt.NDArray[np.uint64]
    meta: npt.NDArray[np.int64]
    lives: npt.NDArray[np.void]
    lives_n: npt.NDArray[np.int64]
    life_of: npt.NDArray[np.uint32]


def make_memory(ghosts: int, seen: int, filtered: int, workers: int, instances: int) -> Memory:
    """ghosts, seen: exact entries; filtered: keys of a generation of each filter, more than either."""
    for name, value in (("ghosts", ghosts), ("seen", seen)):
        if not 2 <= value <= filtered:
            raise ValueError(f"{name}={value} must be at least 2 and at most the filters' {filtered}")
    meta = np.zeros(META, np.int64)
    meta[_BUDGETS] = ghosts, filtered, filtered, seen
    lines = 1 << max(0, (filtered * FILTER_BITS - 1) // 512).bit_length()
    return Memory(
        np.zeros((_slots(ghosts), 2), np.uint64), np.zeros(_slots(seen), np.uint64), _lines(lines), _lines(lines),
        meta, np.zeros((workers, LIVES), LIFE), np.zeros(workers, np.int64), np.zeros(instances, np.uint32),
    )  # fmt: skip


def _slots(entries: int) -> int:
    """A power of two that `entries` fill to five eighths at most."""
    return 1 << (entries * 8 // 5).bit_length()


def _lines(n: int) -> npt.NDArray[np.uint64]:
    """Zeros that start at a line of memory."""
    raw = np.zeros(n * 16 + 8, np.uint64)
    skip = -raw.ctypes.data % 64 // 8
    return raw[skip : skip + n * 16].reshape(n, 2, 8)


@numba.njit(cache=True, inline="always")
def ticks_of(time_s):  # type: ignore[no-untyped-def]
    ticks = time_s * TICKS_PER_S
    if not ticks > 0.0:
        return np.int64(0)
    if ticks > 5e11:
        return np.int64(500_000_000_000)
    return np.int64(ticks)


# filters


@numba.njit(cache=True, inline="always")
def _mixed(x):  # type: ignore[no-untyped-def]
    x ^= x >> np.uint64(31)
    x *= np.uint64(0x7FB5D329728EA185)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x81DADEF4BC2DD44D)
    return x ^ x >> np.uint64(33)


@numba.njit(cache=True, inline="always")
def _key(h, salt):  # type: ignore[no-untyped-def]
    return _mixed(h + np.uint64(salt) * np.uint64(0x9E3779B97F4A7C15))


@numba.njit(cache=True)
def _filter_add(lines, generation, key, kind):  # type: ignore[no-untyped-def]
    at = np.int64(key & np.uint64(len(lines) - 1))
    bits = _mixed(key + np.uint64(kind))
    for j in range(8):
        lines[at, generation, j] |= np.uint64(1) << (bits >> np.uint64(6 * j) & np.uint64(63))


@numba.njit(cache=True)
def _filter_add_all(lines, generation, keys, kinds, n):  # type: ignore[no-untyped-def]
    """Adds keys[:n]. Their lines are read first: independent reads overlap in the memory system."""
    mask = np.uint64(len(lines) - 1)
    noise = np.uint64(0)
    for i in range(n):
        noise |= lines[np.int64(keys[i] & mask), generation, 0]
    for i in range(n):
        _filter_add(lines, generation, keys[i], kinds[i])
    return noise


@numba.njit(cache=True)
def _filter_has(lines, generation, key, kind):  # type: ignore[no-untyped-def]
    at = np.int64(key & np.uint64(len(lines) - 1))
    bits = _mixed(key + np.uint64(kind))
    all_set = np.uint64(1)
    for j in range(8):
        all_set &= lines[at, generation, j] >> (bits >> np.uint64(6 * j) & np.uint64(63))
    return all_set != 0


@numba.njit(cache=True)
def _turn(lines, meta, base):  # type: ignore[no-untyped-def]
    """The older generation is forgotten and becomes the newer one. base: of the filter in `meta`."""
    now = 1 - meta[base]
    for i in range(len(lines)):
        for j in range(8):
            lines[i, now, j] = np.uint64(0)
    meta[base] = now
    meta[base + 1 + now] = 0


# ghosts


@numba.njit(cache=True)
def _ghost_of(ghosts, h, worker):  # type: ignore[no-untyped-def]
    """The second word; 0: none."""
    mask = np.int64(len(ghosts) - 1)
    i = home_of(h, worker, np.uint64(mask))
    while True:
        rest = ghosts[i, 1]
        if rest == 0 or (ghosts[i, 0] == h and rest >> _WORKER == worker):
            return rest
        i = (i + 1) & mask


@numba.njit(cache=True)
def _free_slot(ghosts, hole):  # type: ignore[no-untyped-def]
    mask = np.int64(len(ghosts) - 1)
    j = (hole + 1) & mask
    while ghosts[j, 1] != 0:
        home = home_of(ghosts[j, 0], ghosts[j, 1] >> _WORKER, np.uint64(mask))
        if ((j - home) & mask) >= ((j - hole) & mask):
            ghosts[hole, 0] = ghosts[j, 0]
            ghosts[hole, 1] = ghosts[j, 1]
            hole = j
        j = (j + 1) & mask
    ghosts[hole, 1] = np.uint64(0)


@numba.njit(cache=True)
def _ghost_take(ghosts, meta, h, worker):  # type: ignore[no-untyped-def]
    """Takes a ghost out; returns its second word, 0: there was none."""
    mask = np.int64(len(ghosts) - 1)
    i = home_of(h, worker, np.uint64(mask))
    while True:
        rest = ghosts[i, 1]
        if rest == 0:
            return rest
        if ghosts[i, 0] == h and rest >> _WORKER == worker:
            break
        i = (i + 1) & mask
    meta[_G_N + np.int64(rest >> _GENERATION & np.uint64(1))] -= 1
    _free_slot(ghosts, i)
    return rest


@numba.njit(cache=True)
def _ghost_set(ghosts, meta, h, worker, fate, ticks):  # type: ignore[no-untyped-def]
    now = meta[_G_NOW]
    word = worker << _WORKER | np.uint64(now) << _GENERATION | np.uint64(fate) << _FATE | np.uint64(ticks)
    mask = np.int64(len(ghosts) - 1)
    i = home_of(h, worker, np.uint64(mask))
    while True:
        rest = ghosts[i, 1]
        if rest == 0:
            break
        if ghosts[i, 0] == h and rest >> _WORKER == worker:
            meta[_G_N + np.int64(rest >> _GENERATION & np.uint64(1))] -= 1
            break
        i = (i + 1) & mask
    ghosts[i, 0] = h
    ghosts[i, 1] = word
    meta[_G_N + now] += 1


@numba.njit(cache=True)
def _make_filter_room(m, keys):  # type: ignore[no-untyped-def]
    if m.meta[_F_N + m.meta[_F_NOW]] + keys > m.meta[_F_BUDGET]:
        _turn(m.gone_filter, m.meta, np.int64(_F_NOW))


@numba.njit(cache=True)
def _gone_add(m, h, worker, fate):  # type: ignore[no-untyped-def]
    now = m.meta[_F_NOW]
    _filter_add(m.gone_filter, now, _key(h, worker + np.uint64(1)), np.uint8(fate))
    m.meta[_F_N + now] += 1


@numba.njit(cache=True)
def _turn_ghosts(m):  # type: ignore[no-untyped-def]
    """The older generation goes into the filter; the newer one becomes the older."""
    ghosts, meta = m.ghosts, m.meta
    old = 1 - meta[_G_NOW]
    _make_filter_room(m, meta[_G_N + old])
    now = meta[_F_NOW]
    meta[_F_N + now] += meta[_G_N + old]
    keys, kinds, n = np.empty(_CHUNK, np.uint64), np.empty(_CHUNK, np.uint8), np.int64(0)
    mask = np.int64(len(ghosts) - 1)
    gap = np.int64(0)
    while ghosts[gap, 1] != 0:
        gap += 1
    for k in range(1, mask + 1):  # from a gap on: what moves up to fill a hole was not looked at yet, and never passes the gap
        i = (gap + k) & mask
        while ghosts[i, 1] != 0 and np.int64(ghosts[i, 1] >> _GENERATION & np.uint64(1)) == old:
            rest = ghosts[i, 1]
            keys[n] = _key(ghosts[i, 0], (rest >> _WORKER) + np.uint64(1))
            kinds[n] = rest >> _FATE & np.uint64(3)
            n += 1
            if n == _CHUNK:
                _filter_add_all(m.gone_filter, now, keys, kinds, n)
                n = np.int64(0)
            _free_slot(ghosts, i)
    _filter_add_all(m.gone_filter, now, keys, kinds, n)
    meta[_G_N + old] = 0
    meta[_G_NOW] = old


# seen


@numba.njit(cache=True)
def _seen_slot(seen, h):  # type: ignore[no-untyped-def]
    """Where the block is or would be. 0 means free, so block 0 is block 1 here."""
    mask = np.int64(len(seen) - 1)
    i = home_of(h, np.uint64(0), np.uint64(mask))
    while seen[i] != 0 and seen[i] != h:
        i = (i + 1) & mask
    return i


@numba.njit(cache=True)
def _seen_pour(m, table, retired):  # type: ignore[no-untyped-def]
    """The exact set goes into the filter. When that turns, it keeps what some worker holds or is known to have lost."""
    meta = m.meta
    if meta[_S_N + meta[_S_NOW]] + meta[_SEEN_N] > meta[_S_BUDGET]:
        _turn(m.seen_filter, meta, np.int64(_S_NOW))
        now = meta[_S_NOW]
        for i in range(len(table)):
            rest = table[i, 1]
            if rest != 0:
                instance = rest >> np.uint64(42)
                if retired[instance] == -1 or m.life_of[instance] != 0:
                    _filter_add(m.seen_filter, now, _key(table[i, 0], 0), np.uint8(0))
                    meta[_S_N + now] += 1
        for i in range(len(m.ghosts)):
            if m.ghosts[i, 1] != 0:
                _filter_add(m.seen_filter, now, _key(m.ghosts[i, 0], 0), np.uint8(0))
                meta[_S_N + now] += 1
    now = meta[_S_NOW]
    keys, kinds, n = np.empty(_CHUNK, np.uint64), np.zeros(_CHUNK, np.uint8), np.int64(0)
    for i in range(len(m.seen)):
        if m.seen[i] != 0:
            keys[n] = _key(m.seen[i], 0)
            n += 1
            if n == _CHUNK:
                _filter_add_all(m.seen_filter, now, keys, kinds, n)
                n = np.int64(0)
            m.seen[i] = np.uint64(0)
    _filter_add_all(m.seen_filter, now, keys, kinds, n)
    meta[_S_N + now] += meta[_SEEN_N]
    meta[_SEEN_N] = 0


@numba.njit(cache=True)
def _note_seen(seen, seen_filter, meta, h):  # type: ignore[no-untyped-def]
    """`note_seen` without `_seen_pour`, which must follow when the budget is used up."""
    h = max(h, np.uint64(1))
    at = _seen_slot(seen, h)
    if seen[at] != 0:
        return False
    known = False
    if meta[_S_N] + meta[_S_N + 1] > 0:
        now = meta[_S_NOW]
        key = _key(h, 0)
        if _filter_has(seen_filter, now, key, np.uint8(0)):
            return False
        known = _filter_has(seen_filter, 1 - now, key, np.uint8(0))  # noted anew: that generation is the next to be forgotten
    seen[at] = h
    meta[_SEEN_N] += 1
    return not known


@numba.njit(cache=True)
def note_seen(m, table, retired, h):  # type: ignore[no-untyped-def]
    """Notes that a worker has the block; True: none ever had, as far as memory goes."""
    new = _note_seen(m.seen, m.seen_filter, m.meta, h)
    if m.meta[_SEEN_N] >= m.meta[_SEEN_BUDGET]:
        _seen_pour(m, table, retired)
    return new


@numba.njit(cache=True)
def was_seen(m, h):  # type: ignore[no-untyped-def]
    """Some worker had the block at some time, as far as memory goes."""
    h = max(h, np.uint64(1))
    if m.seen[_seen_slot(m.seen, h)] != 0:
        return True
    if m.meta[_S_N] + m.meta[_S_N + 1] == 0:
        return False
    key = _key(h, 0)
    return _filter_has(m.seen_filter, np.int64(0), key, np.uint8(0)) or _filter_has(m.seen_filter, np.int64(1), key, np.uint8(0))


# lives that are over


@numba.njit(cache=True)
def held_anywhere(table, instance, owners, h):  # type: ignore[no-untyped-def]
    """The life has the block on some tier and group. owners: bits of tier * MAX_GROUPS + group."""
    for bit in range(64):
        if owners >> np.uint64(bit) == 0:
            return False
        if owners >> np.uint64(bit) & np.uint64(1) and is_open(table, h, _owner(instance, bit)):
            return True
    return False


@numba.njit(cache=True, inline="always")
def _owner(instance, bit):  # type: ignore[no-untyped-def]
    return np.uint64(instance) << np.uint64(10) | np.uint64(bit // MAX_GROUPS) << np.uint64(8) | np.uint64(bit % MAX_GROUPS)


@numba.njit(cache=True)
def _life_with(m, table, worker, owners, h):  # type: ignore[no-untyped-def]
    """Place of the newest life that had the block when it ended, unless the worker stored or removed it since; -1: none."""
    for k in range(m.lives_n[worker] - 1, -1, -1):
        if held_anywhere(table, m.lives[worker, k]["instance"], owners, h):
            return k
    return -1


@numba.njit(cache=True)
def supersede_lives(m, table, worker, owners, h):  # type: ignore[no-untyped-def]
    """From now on the block's past on this worker begins later than its lives that are over. Returns `_life_with` of before."""
    newest = -1
    for k in range(m.lives_n[worker]):
        for bit in range(64):
            if owners >> np.uint64(bit) == 0:
                break
            if owners >> np.uint64(bit) & np.uint64(1) and supersede(table, h, _owner(m.lives[worker, k]["instance"], bit)):
                newest = k
    return newest


@numba.njit(cache=True)
def end_life(m, table, workers, worker, instance, blocks, time_s):  # type: ignore[no-untyped-def]
    """A life of the worker is over, and another has begun. blocks: how many slots it has."""
    if blocks <= 0:
        return
    k = m.lives_n[worker]
    life = m.lives[worker, k]
    life["instance"] = instance
    life["blocks"] = blocks
    life["ticks"] = ticks_of(time_s)
    life["order"] = m.meta[_LIFE_NEXT]
    m.life_of[instance] = worker * LIVES + k + 1
    m.lives_n[worker] = k + 1
    m.meta[_LIFE_NEXT] += 1
    m.meta[_LIFE_BLOCKS] += blocks
    if k + 1 == LIVES or 4 * m.meta[_LIFE_BLOCKS] > m.meta[_G_BUDGET]:
        _settle(m, table, workers)


@numba.njit(cache=True)
def _settle(m, table, workers):  # type: ignore[no-untyped-def]
    """Makes ghosts of the blocks of all lives that are over: the newest lives' exactly, as far as half of the budget goes."""
    half = m.meta[_G_BUDGET] // 2
    many = 0
    for worker in range(len(m.lives_n)):
        many += m.lives_n[worker]
    orders = np.empty(many, np.int64)
    places = np.empty(many, np.int64)
    at = 0
    for worker in range(len(m.lives_n)):
        for k in range(m.lives_n[worker]):
            orders[at] = -m.lives[worker, k]["order"]
            places[at] = worker * LIVES + k
            at += 1
    exact = np.zeros(len(m.lives_n) * LIVES, np.bool_)
    planned, rest_of_them = np.int64(0), np.int64(0)
    for i in np.argsort(orders):
        blocks = m.lives[places[i] // LIVES, places[i] % LIVES]["blocks"]
        if rest_of_them == 0 and planned + blocks <= half:
            planned += blocks
            exact[places[i]] = True
        else:
            rest_of_them += blocks
    if m.meta[_G_N + m.meta[_G_NOW]] + planned > half:
        _turn_ghosts(m)
    if rest_of_them > 0:
        _make_filter_room(m, rest_of_them)
    for i in range(len(table)):
        rest = table[i, 1]
        if rest == 0:
            continue
        place = np.int64(m.life_of[rest >> np.uint64(42)]) - 1
        if place < 0 or not is_open(table, table[i, 0], rest >> np.uint64(32)):
            continue
        who, nth = divmod(place, LIVES)
        h, owners = table[i, 0], workers[who]["owners"]
        if _life_with(m, table, who, owners, h) > nth:
            continue
        if held_anywhere(table, workers[who]["instance"], owners, h):
            _ghost_take(m.ghosts, m.meta, h, np.uint64(who))  # came back with a snapshot: an older loss is no news
        elif exact[place]:
            _ghost_set(m.ghosts, m.meta, h, np.uint64(who), np.uint8(CLEARED), m.lives[who, nth]["ticks"])
        else:
            _ghost_take(m.ghosts, m.meta, h, np.uint64(who))
            _gone_add(m, h, np.uint64(who), CLEARED)
    for worker in range(len(m.lives_n)):
        for k in range(m.lives_n[worker]):
            m.life_of[m.lives[worker, k]["instance"]] = 0
        m.lives_n[worker] = 0
    m.meta[_LIFE_BLOCKS] = 0


# what the events say


@numba.njit(cache=True)
def _touch(m, hashes, lo, hi, worker):  # type: ignore[no-untyped-def]
    """Reads what the look-ups of hashes[lo:hi] need: independent reads overlap in the memory system."""
    ghosts, seen, lines = m.ghosts, m.seen, m.seen_filter
    g_mask, s_mask, f_mask = np.uint64(len(ghosts) - 1), np.uint64(len(seen) - 1), np.uint64(len(lines) - 1)
    noise = np.uint64(0)
    for i in range(lo, hi):
        noise |= ghosts[home_of(hashes[i], worker, g_mask), 1]
    for i in range(lo, hi):
        noise |= seen[home_of(hashes[i], np.uint64(0), s_mask)]
    if m.meta[_S_N] + m.meta[_S_N + 1] > 0:
        for i in range(lo, hi):
            at = np.int64(_key(hashes[i], 0) & f_mask)
            noise |= lines[at, 0, 0] | lines[at, 1, 0]
    return noise


@numba.njit(cache=True)
def note_stores(m, table, retired, worker, instance, owners, hashes, lo, hi, priors, start, ticks):  # type: ignore[no-untyped-def]
    """A worker has stored hashes[lo:hi] on one tier and group.

    priors: a ring, where the copies there were of each before (on that tier and group) stand from `start` on. They become priors.
    """
    noise = _touch(m, hashes, lo, hi, worker)
    ghosts, seen, seen_filter, meta = m.ghosts, m.seen, m.seen_filter, m.meta
    mask = len(priors) - 1
    over = m.lives_n[worker] > 0
    several = owners & (owners - np.uint64(1)) != 0
    for i in range(lo, hi):
        h = hashes[i]
        at = (start + i - lo) & mask
        before = priors[at]
        ghost = _ghost_take(ghosts, meta, h, worker)
        life = -1
        if over:
            life = supersede_lives(m, table, worker, owners, h)
        if before > 0:
            priors[at] = RESIDENT << FATE_SHIFT
            continue
        # On another tier or group; this one's entry is in the table already.
        elsewhere = several and _copies_of(table, instance, owners, h) > 1
        if ghost == 0 and life < 0 and not elsewhere:
            new = _note_seen(seen, seen_filter, meta, h)
            if meta[_SEEN_N] >= meta[_SEEN_BUDGET]:
                _seen_pour(m, table, retired)
            if new:
                priors[at] = NEW_ANYWHERE
                continue
        fate, since = _resolve(m, worker, h, ghost, life, elsewhere)
        if fate in (NEVER, RESIDENT):
            priors[at] = fate << FATE_SHIFT
        else:
            gone = np.int64(LONG) if since < 0 else min(max(ticks - since, np.int64(0)), np.int64(LONG - 1))
            priors[at] = fate << FATE_SHIFT | gone
    return noise


@numba.njit(cache=True)
def _copies_of(table, instance, owners, h):  # type: ignore[no-untyped-def]
    """Tiers and groups on which the life has the block."""
    n = 0
    for bit in range(64):
        if owners >> np.uint64(bit) == 0:
            break
        if owners >> np.uint64(bit) & np.uint64(1) and is_open(table, h, _owner(instance, bit)):
            n += 1
    return n


@numba.njit(cache=True)
def _resolve(m, worker, h, ghost, life, elsewhere):  # type: ignore[no-untyped-def]
    """(fate, ticks since when, -1: not known) of a block that is not held, or held `elsewhere` on the worker only.

    The newest news holds. What was lost with a life and is held elsewhere now came back with a snapshot.
    """
    if life >= 0:
        if elsewhere:
            return RESIDENT, np.int64(-1)
        return CLEARED, m.lives[worker, life]["ticks"]
    if ghost != 0:
        fate = np.int64(ghost >> _FATE & np.uint64(3))
        if fate == CLEARED and elsewhere:
            return RESIDENT, np.int64(-1)
        return fate, np.int64(ghost & _TICKS)
    if elsewhere:
        return RESIDENT, np.int64(-1)
    if m.meta[_F_N] + m.meta[_F_N + 1] > 0:
        key = _key(h, worker + np.uint64(1))
        now = m.meta[_F_NOW]
        for generation in (now, 1 - now):
            if _filter_has(m.gone_filter, generation, key, np.uint8(EVICTED)):
                return EVICTED, np.int64(-1)
            if _filter_has(m.gone_filter, generation, key, np.uint8(CLEARED)):
                return CLEARED, np.int64(-1)
    return NEVER, np.int64(-1)


@numba.njit(cache=True)
def note_removals(m, table, worker, owners, ring_hashes, last, start, n, ticks):  # type: ignore[no-untyped-def]
    """A worker removed n blocks from one tier and group.

    ring_hashes, last: rings; from `start` on the blocks, and 1 where the last copy there went. `last` becomes 0.
    """
    ghosts, meta = m.ghosts, m.meta
    mask, g_mask = len(last) - 1, np.uint64(len(ghosts) - 1)
    noise = np.uint64(0)
    for i in range(start, start + n):
        noise |= ghosts[home_of(ring_hashes[i & mask], worker, g_mask), 1]
    over = m.lives_n[worker] > 0
    for i in range(start, start + n):
        at = i & mask
        if last[at] == 0:
            continue
        last[at] = 0
        if over:
            supersede_lives(m, table, worker, owners, ring_hashes[at])
        if 2 * (meta[_G_N + meta[_G_NOW]] + 1) > meta[_G_BUDGET]:
            _turn_ghosts(m)
        _ghost_set(ghosts, meta, ring_hashes[at], worker, np.uint8(EVICTED), ticks)
    return noise


# answers as of now


@numba.njit(cache=True)
def _is_held(table, instance, owners, windowed, h):  # type: ignore[no-untyped-def]
    """Each group that has the whole past holds it on some tier."""
    some = False
    for group in range(MAX_GROUPS):
        mine = owners >> np.uint64(group) & np.uint64(0x0001000100010001)
        if mine == 0 or windowed >> np.uint64(group) & np.uint64(1):
            continue
        some = True
        if not held_anywhere(table, instance, mine << np.uint64(group), h):
            return False
    return some


@numba.njit(cache=True)
def fates_now(m, table, workers, worker, hashes, fates, since):  # type: ignore[no-untyped-def]
    """Writes the fate of each block and, in ticks, since when it is gone (-1: it is not, or that is not known)."""
    w = workers[worker]
    owners = w["owners"]
    for i in range(len(hashes)):
        h = hashes[i]
        if _is_held(table, w["instance"], owners, w["windowed"], h):
            fates[i], since[i] = RESIDENT, -1
            continue
        life = _life_with(m, table, worker, owners, h)
        ghost = _ghost_of(m.ghosts, h, np.uint64(worker))
        elsewhere = held_anywhere(table, w["instance"], owners, h)
        if life < 0 and ghost == 0 and not elsewhere and not was_seen(m, h):
            fates[i], since[i] = NEVER, -1
        else:
            fates[i], since[i] = _resolve(m, np.uint64(worker), h, ghost, life, elsewhere)


@numba.njit(cache=True)
def evers_now(m, hashes, out):  # type: ignore[no-untyped-def]
    """Writes `was_seen` of each block."""
    for i in range(len(hashes)):
        out[i] = was_seen(m, hashes[i])


# saving


@numba.njit(cache=True)
def _pack_rows(rows, out):  # type: ignore[no-untyped-def]
    n = 0
    for i in range(len(rows)):
        if rows[i, 1] != 0:
            out[n, 0] = rows[i, 0]
            out[n, 1] = rows[i, 1]
            n += 1


@numba.njit(cache=True)
def _unpack_ghosts(saved, ghosts):  # type: ignore[no-untyped-def]
    mask = np.int64(len(ghosts) - 1)
    for k in range(len(saved)):
        i = home_of(saved[k, 0], saved[k, 1] >> _WORKER, np.uint64(mask))
        while ghosts[i, 1] != 0:
            i = (i + 1) & mask
        ghosts[i, 0] = saved[k, 0]
        ghosts[i, 1] = saved[k, 1]


@numba.njit(cache=True)
def _unpack_seen(saved, seen):  # type: ignore[no-untyped-def]
    for k in range(len(saved)):
        seen[_seen_slot(seen, saved[k])] = saved[k]


@numba.njit(cache=True)
def note_all_seen(m, table, retired, hashes):  # type: ignore[no-untyped-def]
    for i in range(len(hashes)):
        note_seen(m, table, retired, hashes[i])


def save_memory(m: Memory, workers: int) -> dict[str, npt.NDArray[Any]]:
    """Copies of all that `load_memory` needs."""
    ghosts = np.empty((int(m.meta[_G_N] + m.meta[_G_N + 1]), 2), np.uint64)
    _pack_rows(m.ghosts, ghosts)
    return {
        "history_ghosts": ghosts,
        "history_seen": m.seen[m.seen != 0],
        "history_gone_filter": m.gone_filter.copy() if m.meta[[_F_N, _F_N + 1]].any() else m.gone_filter[:0],
        "history_seen_filter": m.seen_filter.copy() if m.meta[[_S_N, _S_N + 1]].any() else m.seen_filter[:0],
        "history_meta": m.meta.copy(),
        "history_lives": m.lives[:workers].copy(),
        "history_lives_n": m.lives_n[:workers].copy(),
    }


def load_memory(m: Memory, saved: Any, workers: int) -> Memory:
    """A memory with m's budgets and the saved content; m is used up. Filters of another size are forgotten.

    workers: rows of `Residency.workers`. Raises KeyError when a checkpoint of an earlier version has no history.
    """
    ghosts, seen, lives, lives_n = (saved[f"history_{name}"] for name in ("ghosts", "seen", "lives", "lives_n"))
    meta = saved["history_meta"].copy()
    meta[_BUDGETS] = m.meta[_BUDGETS]
    new = m._replace(
        ghosts=np.zeros((max(len(m.ghosts), _slots(len(ghosts))), 2), np.uint64),
        seen=np.zeros(max(len(m.seen), _slots(len(seen))), np.uint64),
        meta=meta,
        lives=np.zeros((workers, LIVES), LIFE),
        lives_n=np.zeros(workers, np.int64),
        life_of=np.zeros_like(m.life_of),
    )
    _unpack_ghosts(ghosts, new.ghosts)
    _unpack_seen(seen, new.seen)
    new.lives[: len(lives)] = lives
    new.lives_n[: len(lives)] = lives_n
    for worker, n in enumerate(lives_n.tolist()):
        for k in range(n):
            new.life_of[lives[worker, k]["instance"]] = worker * LIVES + k + 1
    for name, base in (("gone_filter", _F_NOW), ("seen_filter", _S_NOW)):
        lines, kept = getattr(new, name), saved[f"history_{name}"]
        lines[:] = 0
        if kept.shape == lines.shape:
            lines[:] = kept
        else:
            meta[[base + 1, base + 2]] = 0
    return new


# decoding


@numba.njit(cache=True)
def prior_fate(prior):  # type: ignore[no-untyped-def]
    """Fate of one u32 of `ring_prior`."""
    if prior == PRIOR_UNKNOWN:
        return UNKNOWN
    return np.int64(prior >> FATE_SHIFT) & 3


@numba.njit(cache=True)
def prior_gone_s(prior):  # type: ignore[no-untyped-def]
    """Seconds that the block had been gone; inf: long, not known; NaN: it was not lost, or that is not known."""
    fate = prior_fate(prior)
    if fate != EVICTED and fate != CLEARED:
        return np.nan
    gone = np.int64(prior) & LONG
    return np.inf if gone == LONG else gone / TICKS_PER_S


@numba.njit(cache=True)
def prior_is_new(prior):  # type: ignore[no-untyped-def]
    """No worker had ever stored it."""
    return np.int64(prior) & NEW_ANYWHERE != 0


def decode_prior(prior: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """(fate u8, gone_s f32, new_anywhere bool), each of prior's shape; gone_s as in `prior_gone_s`."""
    fate = (prior >> np.uint32(FATE_SHIFT) & np.uint32(3)).astype(np.uint8)
    fate[prior == PRIOR_UNKNOWN] = UNKNOWN
    ticks = prior & np.uint32(LONG)
    gone: npt.NDArray[Any] = np.where(ticks == LONG, np.inf, ticks / TICKS_PER_S)
    gone[(fate != EVICTED) & (fate != CLEARED)] = np.nan
    return fate, gone.astype(np.float32), prior & np.uint32(NEW_ANYWHERE) != 0
