"""Which workers hold which block: an open-addressing table from block hash to a set of slots, as compiled code over NumPy arrays.

    keys[r]        block hash, 0: row is free              (hashes are SipHash outputs: their low bits are the home row)
    bits[r, c, w]  word w of the slots that hold the block in class c (0: on the GPU, 1: in a lower tier)
    extra_*        (hash, slot, class) -> copies beyond the first: engines hold equal content twice, and remove each copy by itself

A slot is cleared in place, in one pass: building the table anew took seconds at 3 M rows, while every request waited.

Linear probing with backward-shift deletion, so no tombstones: a look-up's cost does not depend on the table's history. The load stays
below 60 %; `bits` grows by a word for each 64 slots. A row costs 8 + 16 bytes per 64 slots.

Invariants: a row with a free set does not exist; a slot's bit is set exactly when it holds at least one copy; a removal of what is
not held changes nothing and is counted. `match` walks a chain once for all slots: the mask of slots that held everything so far is
and-ed with each block's set, and a slot's overlap is the block at which its bit falls.

Rejected: jump search (3 to 10 us instead of 40 at 32k tokens, but wrong as soon as a block in the middle was evicted, which happens);
a radix tree of tokens (pointers, and eviction needs parents); one table per worker (a walk per worker).
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from schemas.block_hash import U64
from schemas.kv_events import EVENT_WORDS, WINDOWED, Events, Kind, Tier

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

GPU, LOWER = 0, 1
NO_GROUP = -1

_STORED, _REMOVED, _GPU_TIER = int(Kind.STORED), int(Kind.REMOVED), int(Tier.GPU)
_SMALLEST = 1024
_SPARSE = 16
"""A table with fewer than one row in so many shrinks when a slot is cleared."""


class Overlaps(NamedTuple):
    """Blocks of the longest contiguous prefix held, by slot, i32, shape (slots,)."""

    held: I32  # confirmed, any tier
    gpu: I32  # confirmed, on the GPU from the first block on
    expected: I32  # confirmed or expected; never below `held`


class BlockTable:
    """Sets of slots by block hash, with copies. For one thread at a time."""

    def __init__(self, slots: int = 64) -> None:
        self._words = max(1, -(-slots // 64))
        self._used = np.zeros(3, np.int64)  # rows, extra rows, removals of what was not held
        self.clear_all()

    def clear_all(self) -> None:
        """No slot holds anything any more; a small table, at once."""
        self._keys = np.zeros(_SMALLEST, np.uint64)
        self._bits = np.zeros((_SMALLEST, 2, self._words), np.uint64)
        self._extra_hash = np.zeros(_SMALLEST, np.uint64)
        self._extra_owner = np.zeros(_SMALLEST, np.int64)
        self._extra_copies = np.zeros(_SMALLEST, np.int64)
        self._used[:2] = 0
        self.held = np.zeros((64 * self._words, 2), np.int64)  # distinct blocks held, by slot and class

    @property
    def rows(self) -> int:
        return int(self._used[0])

    @property
    def unknown_removals(self) -> int:
        return int(self._used[2])

    @property
    def slots(self) -> int:
        """How many slots fit now; `fit` makes room for more."""
        return 64 * self._words

    @property
    def size_bytes(self) -> int:
        return sum(a.nbytes for a in (self._keys, self._bits, self._extra_hash, self._extra_owner, self._extra_copies, self.held))

    def fit(self, slots: int) -> None:
        """Makes room for slots 0 .. slots - 1."""
        words = max(1, -(-slots // 64))
        if words > self._words:
            more = words - self._words
            self._bits = np.concatenate([self._bits, np.zeros((len(self._keys), 2, more), np.uint64)], axis=2)
            self.held = np.concatenate([self.held, np.zeros((64 * more, 2), np.int64)])
            self._words = words

    def apply(self, slot: int, events: Events, hashes: U64, group: int) -> int:
        """Applies the STORED and REMOVED events among `events`, in order, for one slot. `hashes` belong to them as in a KV batch.

        Only one attention group counts: `group`, or with NO_GROUP the first that is stored without the flag WINDOWED. Returns it.
        """
        self._reserve(len(hashes))
        words = np.ascontiguousarray(events).view(np.uint64).reshape(len(events), EVENT_WORDS)
        return int(
            _apply(
                self._keys, self._bits, self._extra_hash, self._extra_owner, self._extra_copies, self._used, self.held,
                slot, words, hashes, group,
            )
        )  # fmt: skip

    def store(self, slot: int, hashes: U64, level: int = GPU) -> None:
        """One more copy of each hash (class `level`)."""
        self._reserve(len(hashes))
        _store_all(
            self._keys, self._bits, self._extra_hash, self._extra_owner, self._extra_copies, self._used, self.held, slot, level, hashes
        )

    def remove(self, slot: int, hashes: U64, level: int = GPU) -> None:
        """One copy of each hash less; what is not held is counted in `unknown_removals`."""
        _remove_all(
            self._keys, self._bits, self._extra_hash, self._extra_owner, self._extra_copies, self._used, self.held, slot, level, hashes
        )

    def clear(self, slot: int) -> None:
        """The slot holds nothing any more. One pass over the table, unless the slot was empty."""
        if not self.held[slot].any():
            return
        self._used[0] -= _clear(self._keys, self._bits, slot)
        self.held[slot] = 0
        if self._used[1] or len(self._extra_hash) > _SMALLEST:
            self._resize_extra(_capacity(int(self._used[1])), slot)
        if self.rows * _SPARSE < len(self._keys) and len(self._keys) > _SMALLEST:
            self._resize(_capacity(self.rows))

    def match(self, chain: U64, pending: BlockTable | None = None) -> Overlaps:
        """How much of the prompt each slot holds, shape (slots,). `pending` (same slots) holds what is expected but not confirmed."""
        out = np.zeros((3, self.slots), np.int32)
        if pending is None or pending.rows == 0:
            _match(self._keys, self._bits, chain, out[0], out[1])
            out[2] = out[0]
        else:
            _match_two(self._keys, self._bits, pending._keys, pending._bits, chain, out)
        return Overlaps(out[0], out[1], out[2])

    def copies(self, slot: int, block: int, level: int = GPU) -> int:
        """Copies of one block that the slot holds."""
        return int(_copies(self._keys, self._bits, self._extra_hash, self._extra_owner, self._extra_copies, slot, level, np.uint64(block)))

    def _reserve(self, more: int) -> None:
        if (self.rows + more) * 5 > len(self._keys) * 3:
            self._resize(_capacity(self.rows + more))
        if (self._used[1] + more) * 5 > len(self._extra_hash) * 3:
            self._resize_extra(_capacity(int(self._used[1]) + more), -1)

    def _resize(self, capacity: int) -> None:
        keys, bits = np.zeros(capacity, np.uint64), np.zeros((capacity, 2, self._words), np.uint64)
        self._used[0] = _rehash(self._keys, self._bits, keys, bits)
        self._keys, self._bits = keys, bits

    def _resize_extra(self, capacity: int, without_slot: int) -> None:
        new = np.zeros(capacity, np.uint64), np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
        self._used[1] = _rehash_extra(self._extra_hash, self._extra_owner, self._extra_copies, *new, without_slot)
        self._extra_hash, self._extra_owner, self._extra_copies = new


def _capacity(rows: int) -> int:
    """A power of two, at most half full with `rows`."""
    return max(_SMALLEST, 1 << (2 * rows - 1).bit_length()) if rows > 0 else _SMALLEST


@numba.njit(cache=True, inline="always")
def _find(keys, key):  # type: ignore[no-untyped-def]
    """The key's row, or -1 - (the free row where it belongs)."""
    mask = np.uint64(len(keys) - 1)
    r = key & mask
    while keys[r] != np.uint64(0):
        if keys[r] == key:
            return np.int64(r)
        r = (r + np.uint64(1)) & mask
    return np.int64(-1) - np.int64(r)


@numba.njit(cache=True, inline="always")
def _home_extra(capacity, key, owner):  # type: ignore[no-untyped-def]
    return (key ^ (np.uint64(owner) * np.uint64(0x9E3779B97F4A7C15))) & np.uint64(capacity - 1)


@numba.njit(cache=True)
def _find_extra(hashes, owners, copies, key, owner):  # type: ignore[no-untyped-def]
    mask = np.uint64(len(hashes) - 1)
    r = _home_extra(len(hashes), key, owner)
    while copies[r] != 0:
        if hashes[r] == key and owners[r] == owner:
            return np.int64(r)
        r = (r + np.uint64(1)) & mask
    return np.int64(-1) - np.int64(r)


@numba.njit(cache=True)
def _drop_row(keys, bits, row):  # type: ignore[no-untyped-def]
    """Frees a row and moves later ones of its run back, so that each stays reachable from its home."""
    mask = np.int64(len(keys) - 1)
    hole = row
    r = (hole + 1) & mask
    while keys[r] != np.uint64(0):
        home = np.int64(keys[r] & np.uint64(mask))
        if ((r - home) & mask) >= ((r - hole) & mask):
            keys[hole] = keys[r]
            bits[hole] = bits[r]
            hole = r
        r = (r + 1) & mask
    keys[hole] = np.uint64(0)
    bits[hole] = np.uint64(0)


@numba.njit(cache=True)
def _drop_extra(hashes, owners, copies, row):  # type: ignore[no-untyped-def]
    mask = np.int64(len(hashes) - 1)
    hole = row
    r = (hole + 1) & mask
    while copies[r] != 0:
        home = np.int64(_home_extra(len(hashes), hashes[r], owners[r]))
        if ((r - home) & mask) >= ((r - hole) & mask):
            hashes[hole] = hashes[r]
            owners[hole] = owners[r]
            copies[hole] = copies[r]
            hole = r
        r = (r + 1) & mask
    copies[hole] = 0


@numba.njit(cache=True)
def _store(keys, bits, xh, xo, xc, used, held, slot, level, key):  # type: ignore[no-untyped-def]
    if key == np.uint64(0):
        return
    word = slot >> 6
    bit = np.uint64(1) << np.uint64(slot & 63)
    r = _find(keys, key)
    if r < 0:
        r = -1 - r
        keys[r] = key
        used[0] += 1
    if bits[r, level, word] & bit == np.uint64(0):
        bits[r, level, word] |= bit
        held[slot, level] += 1
        return
    owner = np.int64(slot * 2 + level)
    x = _find_extra(xh, xo, xc, key, owner)
    if x < 0:
        x = -1 - x
        xh[x] = key
        xo[x] = owner
        used[1] += 1
    xc[x] += 1


@numba.njit(cache=True)
def _remove(keys, bits, xh, xo, xc, used, held, slot, level, key):  # type: ignore[no-untyped-def]
    word = slot >> 6
    bit = np.uint64(1) << np.uint64(slot & 63)
    r = _find(keys, key)
    if r < 0 or bits[r, level, word] & bit == np.uint64(0):
        used[2] += 1
        return
    if used[1] > 0:
        x = _find_extra(xh, xo, xc, key, np.int64(slot * 2 + level))
        if x >= 0:
            xc[x] -= 1
            if xc[x] == 0:
                xc[x] = 1  # still part of its run while the run is mended
                _drop_extra(xh, xo, xc, x)
                used[1] -= 1
            return
    bits[r, level, word] ^= bit
    held[slot, level] -= 1
    for c in range(2):
        for w in range(bits.shape[2]):
            if bits[r, c, w] != np.uint64(0):
                return
    _drop_row(keys, bits, r)
    used[0] -= 1


@numba.njit(cache=True)
def _store_all(keys, bits, xh, xo, xc, used, held, slot, level, hashes):  # type: ignore[no-untyped-def]
    for i in range(len(hashes)):
        _store(keys, bits, xh, xo, xc, used, held, slot, level, hashes[i])


@numba.njit(cache=True)
def _remove_all(keys, bits, xh, xo, xc, used, held, slot, level, hashes):  # type: ignore[no-untyped-def]
    for i in range(len(hashes)):
        _remove(keys, bits, xh, xo, xc, used, held, slot, level, hashes[i])


@numba.njit(cache=True)
def _apply(keys, bits, xh, xo, xc, used, held, slot, events, hashes, group):  # type: ignore[no-untyped-def]
    at = np.int64(0)
    for e in range(len(events)):
        first = events[e, 0]
        kind = np.int64(first & np.uint64(0xFF))
        level = GPU if np.int64((first >> np.uint64(8)) & np.uint64(0xFF)) == _GPU_TIER else LOWER
        of_group = np.int64((first >> np.uint64(16)) & np.uint64(0xFFFF))
        count = np.int64(first >> np.uint64(32))
        if kind == _STORED and (events[e, 4] >> np.uint64(32)) & np.uint64(WINDOWED) == np.uint64(0):
            if group == NO_GROUP:
                group = of_group
            if of_group == group:
                for i in range(at, at + count):
                    _store(keys, bits, xh, xo, xc, used, held, slot, level, hashes[i])
        elif kind == _REMOVED and (of_group == group or group == NO_GROUP):
            for i in range(at, at + count):
                _remove(keys, bits, xh, xo, xc, used, held, slot, level, hashes[i])
        at += count
    return group


@numba.njit(cache=True)
def _copies(keys, bits, xh, xo, xc, slot, level, key):  # type: ignore[no-untyped-def]
    r = _find(keys, key)
    if r < 0 or bits[r, level, slot >> 6] & (np.uint64(1) << np.uint64(slot & 63)) == np.uint64(0):
        return 0
    x = _find_extra(xh, xo, xc, key, np.int64(slot * 2 + level))
    return 1 if x < 0 else 1 + xc[x]


@numba.njit(cache=True, inline="always")
def _is_free(bits, r):  # type: ignore[no-untyped-def]
    for c in range(2):
        for w in range(bits.shape[2]):
            if bits[r, c, w] != np.uint64(0):
                return False
    return True


@numba.njit(cache=True)
def _clear(keys, bits, slot):  # type: ignore[no-untyped-def]
    """Takes the slot out of every set, and frees the rows that held nothing else; how many."""
    keep = ~(np.uint64(1) << np.uint64(slot & 63))
    word = slot >> 6
    freed = 0
    r = 0
    while r < len(keys):
        if keys[r] != np.uint64(0):
            bits[r, 0, word] &= keep
            bits[r, 1, word] &= keep
            if _is_free(bits, r):
                _drop_row(keys, bits, r)
                freed += 1
                continue  # a later row may have moved here
        r += 1
    return freed


@numba.njit(cache=True)
def _rehash(keys, bits, new_keys, new_bits):  # type: ignore[no-untyped-def]
    n = 0
    for r in range(len(keys)):
        if keys[r] != np.uint64(0) and not _is_free(bits, r):
            to = -1 - _find(new_keys, keys[r])
            new_keys[to] = keys[r]
            new_bits[to] = bits[r]
            n += 1
    return n


@numba.njit(cache=True)
def _rehash_extra(hashes, owners, copies, new_hashes, new_owners, new_copies, without_slot):  # type: ignore[no-untyped-def]
    n = 0
    for r in range(len(hashes)):
        if copies[r] != 0 and owners[r] >> 1 != without_slot:
            to = -1 - _find_extra(new_hashes, new_owners, new_copies, hashes[r], owners[r])
            new_hashes[to] = hashes[r]
            new_owners[to] = owners[r]
            new_copies[to] = copies[r]
            n += 1
    return n


@numba.njit(cache=True, inline="always")
def _fall(fallen, word, depth, out):  # type: ignore[no-untyped-def]
    """Each slot whose bit is set in `fallen` held `depth` blocks."""
    s = word * 64
    while fallen != np.uint64(0):
        if fallen & np.uint64(1):
            out[s] = depth
        fallen >>= np.uint64(1)
        s += 1


@numba.njit(cache=True)
def _match(keys, bits, chain, held, gpu):  # type: ignore[no-untyped-def]
    words = bits.shape[2]
    any_mask = np.full(words, ~np.uint64(0))
    gpu_mask = np.full(words, ~np.uint64(0))
    for i in range(len(chain)):
        r = _find(keys, chain[i])
        alive = np.uint64(0)
        for w in range(words):
            on_gpu = bits[r, 0, w] if r >= 0 else np.uint64(0)
            below = bits[r, 1, w] if r >= 0 else np.uint64(0)
            kept = gpu_mask[w] & on_gpu
            if kept != gpu_mask[w]:
                _fall(gpu_mask[w] ^ kept, w, i, gpu)
                gpu_mask[w] = kept
            kept = any_mask[w] & (on_gpu | below)
            if kept != any_mask[w]:
                _fall(any_mask[w] ^ kept, w, i, held)
                any_mask[w] = kept
            alive |= kept
        if alive == np.uint64(0):
            return
    for w in range(words):
        _fall(gpu_mask[w], w, len(chain), gpu)
        _fall(any_mask[w], w, len(chain), held)


@numba.njit(cache=True)
def _match_two(keys, bits, pending_keys, pending_bits, chain, out):  # type: ignore[no-untyped-def]
    words = min(bits.shape[2], pending_bits.shape[2])
    masks = np.full((3, words), ~np.uint64(0))
    for i in range(len(chain)):
        r = _find(keys, chain[i])
        p = _find(pending_keys, chain[i])
        alive = np.uint64(0)
        for w in range(words):
            on_gpu = bits[r, 0, w] if r >= 0 else np.uint64(0)
            held = on_gpu | bits[r, 1, w] if r >= 0 else np.uint64(0)
            coming = held | pending_bits[p, 0, w] if p >= 0 else held
            for k in range(3):
                kept = masks[k, w] & (held if k == 0 else on_gpu if k == 1 else coming)
                if kept != masks[k, w]:
                    _fall(masks[k, w] ^ kept, w, i, out[k])
                    masks[k, w] = kept
            alive |= masks[2, w]
        if alive == np.uint64(0):
            return
    for k in range(3):
        for w in range(words):
            _fall(masks[k, w], w, len(chain), out[k])
