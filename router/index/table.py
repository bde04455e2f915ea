"""Which workers hold which block, in which tier: a table from block hash to a set of members, as compiled code over NumPy arrays.

    index     directory: leading bits of the mixed hash -> segment of 4096 places, each (32 bits of the mixed hash, number of an entry)
    entries   names[e] block hash, members[e] number of its set        numbers are given out in order, so a chain lies mostly in a row
    sets      sets[s] a bit for each member = (lane, level, slot)      info[s] hash of the set, entries that refer to it, members
    a second index: (block, member) -> copies beyond the first: engines hold equal content twice, and remove each copy by itself

A slot is one worker and rank. Levels: the tiers GPU, CPU, DISK (disk, or storage outside the machine), and what is expected of requests on
their way. A lane is an attention group of a hybrid model; all others have one.

Made for what is asked most, the overlap of a chain of thousands of blocks with hundreds of workers:
 - the entry after the last one mostly is the next block's: a look, and no search (1 to 2 ns a block, where memory makes a search 30);
 - sets are interned, and blocks of one conversation are mostly held by the same workers: a set is looked at only where it differs from the
   last block's. So an entry takes 12 bytes for 1 or for 512 workers, some 27 with its place in the index;
 - a slot is cleared by taking it out of the sets, some thousands, and not out of the entries, some millions. Entries whose set that left
   empty are dead: they answer nothing, and are taken out when their segment is full.

Growth is extendible hashing: a full segment becomes two, the directory is doubled (4 bytes a segment). The table as a whole is never
built anew. Its arrays are reserved at their largest size and take memory as they are used.

`limit_bytes` bounds all of it. What has no room is refused and counted: then less is known than is held, never more. (A removal for which
the smaller set has no room takes the whole block out: `given_up`.)

Invariants: a slot is a member of a block's set exactly when it holds at least one copy; a removal of what is not held changes nothing and
is counted; the copies that are known never exceed those that there are. Linear probing in segments at most three quarters full, with
backward-shift deletion, so no tombstones.

Rejected: a bit set in each row (192 bytes a row for 512 workers and three tiers, and clearing one was a pass over all rows); one large
array that is rehashed (0.8 s at 3 M rows, while every request waits); jump search (wrong as soon as a block in the middle was evicted,
which happens); a radix tree of tokens (pointers, and eviction needs parents); one table per worker (a walk per worker); touching memory
ahead of the search (what it waits for is mostly a second line).
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from router.index import kernels as k
from schemas.block_hash import U64
from schemas.kv_events import EVENT_WORDS, Events, Tier

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Lanes = npt.NDArray[np.int8]
"""A slot's lane by attention group, shape (FOLLOWED_GROUPS + 1,): a number from 0, UNLEARNED or UNFOLLOWED."""

GPU, CPU, DISK, EXPECTED = range(k.LEVELS)
MAX_SLOTS = k.NOBODY
MAX_LANES = 8
DEFAULT_LIMIT_BYTES = 1 << 30

_SEGMENT_BITS = 12
_SETS_SHARE = 4
"""Sets may take one in so many bytes of the limit."""
_MOST_SETS = 1 << 21
_FIRST_DEPTH = 1

assert (GPU, CPU, DISK) == (Tier.GPU, Tier.CPU, Tier.DISK)
assert EXPECTED == k.EXPECTED


class Overlaps(NamedTuple):
    """Blocks of the longest contiguous prefix that a slot holds, by slot, i32, shape (slots,)."""

    held: I32  # confirmed, any tier
    gpu: I32  # of these, by the best tier of each block: gpu + cpu + disk == held
    cpu: I32
    disk: I32
    expected: I32  # confirmed or expected; never below `held`


class BlockTable:
    """Sets of members by block hash, with copies. For one thread at a time. segment_bits: for tests, which want many small segments."""

    def __init__(self, slots: int = 64, limit_bytes: int = DEFAULT_LIMIT_BYTES, segment_bits: int = _SEGMENT_BITS) -> None:
        self._limit_bytes, self._segment_bits = limit_bytes, segment_bits
        self._words, self._lanes = max(1, -(-slots // 64)), 1
        self._state = self._empty()

    def clear_all(self) -> None:
        """No slot holds anything any more; a small table, at once."""
        counted = self._state.num[k.UNKNOWN :]
        self._state = self._empty()
        self._state.num[k.UNKNOWN :] = counted

    def _empty(self) -> k.State:
        segments = max(2, self._limit_bytes // (8 << self._segment_bits))
        num = np.zeros(k.NUMBERS, np.int64)
        num[k.DEPTH : k.DEPTH + 2] = _FIRST_DEPTH
        num[[k.SEGMENT_BITS, k.SEGMENTS, k.ENTRIES_TOP, k.SETS_TOP]] = self._segment_bits, 2, 1, 1
        num[[k.WORDS, k.LANES, k.LIMIT_BYTES]] = self._words, self._lanes, self._limit_bytes
        directory = np.zeros((2, min(1 << k.MAX_DEPTH, 16 << segments.bit_length())), np.uint32)
        directory[k.EXTRAS, : 1 << _FIRST_DEPTH] = 1
        entries = min(max(64, self._limit_bytes // k.ENTRY_BYTES), 1 << 32)
        places, names = _reserved(segments << self._segment_bits, np.uint64), _reserved(entries, np.uint64)
        members = _reserved(entries, np.uint32)
        return k.State(
            num, places, np.zeros((segments, 2), np.int64), directory, names, members, *self._room_for_sets(0),
            np.zeros((self.slots, 3), np.int64), np.zeros((self._lanes, k.LEVELS, self.slots), np.int64),
            np.zeros(1 << self._segment_bits, np.uint64),
        )  # fmt: skip

    def _room_for_sets(self, used: int) -> tuple[U64, I64, npt.NDArray[np.uint32]]:
        width = self._lanes * k.LEVELS * self._words
        most = min(_MOST_SETS, max(256, self._limit_bytes // _SETS_SHARE // ((width + 5) * 8)))
        most = max(most, used + 1)
        return np.zeros((most, width), np.uint64), np.zeros((most, 5), np.int64), np.zeros(1 << (most - 1).bit_length(), np.uint32)

    @property
    def rows(self) -> int:
        """Distinct blocks held by, or expected of, anyone."""
        return int(self._state.num[k.ROWS] - self._state.num[k.DEAD])

    @property
    def sets(self) -> int:
        """Distinct sets of members needed at once, at most."""
        return int(self._state.num[k.SETS_TOP])

    @property
    def unknown_removals(self) -> int:
        return int(self._state.num[k.UNKNOWN])

    @property
    def refused(self) -> int:
        """Copies that were not taken in for want of memory."""
        return int(self._state.num[k.REFUSED])

    @property
    def given_up(self) -> int:
        """Copies, of any slot, that were forgotten for want of memory."""
        return int(self._state.num[k.GIVEN_UP])

    @property
    def slots(self) -> int:
        """How many slots fit now; `fit` makes room for more."""
        return 64 * self._words

    @property
    def lanes(self) -> int:
        return self._lanes

    @property
    def words(self) -> int:
        return self._words

    @property
    def size_bytes(self) -> int:
        """Memory in use; what was used once is kept, and used again."""
        num = self._state.num
        of_sets: int = int(num[k.SETS_TOP]) * (self._state.sets.shape[1] + self._state.info.shape[1]) * 8
        return (int(num[k.SEGMENTS]) << (self._segment_bits + 3)) + int(num[k.ENTRIES_TOP]) * k.ENTRY_BYTES + of_sets

    @property
    def held(self) -> I64:
        """Distinct blocks, shape (lanes, levels, slots)."""
        return self._state.held

    def copies_held(self, slot: int) -> int:
        """Copies of blocks that the slot holds, over lanes and tiers."""
        return int(self._state.of_slot[slot, k.COPIES])

    def fit(self, slots: int, lanes: int = 1) -> None:
        """Makes room for slots 0 .. slots - 1 and lanes 0 .. lanes - 1. Copies the sets when there are more."""
        if slots > MAX_SLOTS or lanes > MAX_LANES:
            raise ValueError(f"the index follows at most {MAX_SLOTS} workers and ranks (now {slots}) and {MAX_LANES} groups (now {lanes})")
        old, before = self._state, (self._lanes, k.LEVELS, self._words)
        self._words, self._lanes = max(self._words, -(-slots // 64)), max(self._lanes, lanes)
        if (self._lanes, k.LEVELS, self._words) == before:
            return
        used = int(old.num[k.SETS_TOP])
        sets, info, buckets = self._room_for_sets(used)
        after = (self._lanes, k.LEVELS, self._words)
        sets[:used].reshape(used, *after)[:, : before[0], :, : before[2]] = old.sets[:used].reshape(used, *before)
        info[:used] = old.info[:used]
        held = np.zeros((self._lanes, k.LEVELS, self.slots), np.int64)
        held[: before[0], :, : 64 * before[2]] = old.held
        of_slot = np.zeros((self.slots, 3), np.int64)
        of_slot[: len(old.of_slot)] = old.of_slot
        self._state = old._replace(sets=sets, info=info, buckets=buckets, held=held, of_slot=of_slot)
        self._state.num[[k.WORDS, k.LANES]] = self._words, self._lanes
        k.link_all(self._state)

    def apply(self, slot: int, lanes: Lanes, events: Events, hashes: U64, event: int = 0, at: int = 0) -> tuple[int, int]:
        """Applies the STORED and REMOVED events among `events`, in order, for one slot. `hashes` belong to them as in a KV batch.

        Begins at number `event`, whose hashes begin at `at`, and stops at a stored event of a group that is UNLEARNED: returns its
        number and where its hashes begin, or those of the end.
        """
        words = np.ascontiguousarray(events).view(np.uint64).reshape(len(events), EVENT_WORDS)
        event, at = k.apply(self._state, slot, lanes, _fixed(words), _fixed(hashes), event, at)
        return int(event), int(at)

    def store(self, slot: int, hashes: U64, level: int = GPU, lane: int = 0) -> None:
        """One more copy of each hash."""
        k.store_all(self._state, slot, lane, level, _fixed(hashes))

    def remove(self, slot: int, hashes: U64, level: int = GPU, lane: int = 0) -> None:
        """One copy of each hash less; what is not held is counted in `unknown_removals`, unless it was only expected."""
        k.remove_all(self._state, slot, lane, level, _fixed(hashes), False)

    def clear(self, slot: int) -> None:
        """The slot holds nothing any more; what is expected of it stays. One pass over the sets, unless the slot was empty."""
        if self._state.of_slot[slot, k.COPIES]:
            k.clear(self._state, slot)

    def match(self, chain: U64, counting: U64) -> Overlaps:
        """How much of the prompt each slot holds.

        counting: slots for which a lane counts, shape (lanes + 1, words), a word for each 64 slots; the last row: those for which any does.
        """
        out, t = np.zeros((5, self.slots), np.int32), self._state
        k.match(t.num, t.places, t.directory, t.names, t.members, t.sets, counting, _fixed(chain), out)
        return Overlaps(*out)

    def settle(self, slots: I64, lanes: I64, base: I64, unit: I64, chains: list[U64 | None], found: Overlaps) -> Overlaps:
        """What `match` found, shortened where groups differ in kind or block size: kernels.settle. chains: None where not given."""
        lengths = np.array([-1 if c is None else len(c) for c in chains], np.int64)
        blocks = np.zeros((len(chains), max(1, int(lengths.max()))), np.int64)
        for chain, row in zip(chains, blocks, strict=True):
            if chain is not None:
                k.sets_of(self._state, _fixed(chain), row)
        out = np.stack(found)
        k.settle(self._state, slots, lanes, base, unit, lengths, blocks, out)
        return Overlaps(*out)

    def copies(self, slot: int, block: int, level: int = GPU, lane: int = 0) -> int:
        """Copies of one block that the slot holds."""
        return int(k.copies_of(self._state, slot, lane, level, np.uint64(block)))


def _fixed(values: U64) -> U64:
    """A view that can't be written to, as arrays from the stream are: so that a kernel is compiled for one kind, in warm_up.py."""
    if values.flags.writeable:
        values = values.view()
        values.flags.writeable = False
    return values


def _reserved(n: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Zeros that take memory a small page at a time as they are touched. (NumPy asks for huge pages for large arrays: each then stalls its
    first writer, by 5 to 25 ms where memory is in pieces.)"""
    memory = mmap.mmap(-1, n * np.dtype(dtype).itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype)
