"""The block table's compiled code, over the arrays of one `State` (what they mean and why: table.py).

One module, since numba does not notice that a kernel inlined from another file has changed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from schemas.block_hash import U64
from schemas.kv_events import WINDOWED, Kind

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]

BLOCKS, EXTRAS = 0, 1
"""The two indexes: block -> its entry; (block, member) -> entry of the copies beyond the first."""
TIERS, EXPECTED, LEVELS = 3, 3, 4
"""Levels of a member: the tiers from the nearest on, then what is expected there."""

# Places in `State.num`. DEPTH, ROWS and SWEPT: one for each of the two indexes.
DEPTH, ROWS = 0, 2
SEGMENT_BITS, SEGMENTS, ENTRIES_TOP, FREE_ENTRY, SETS_TOP, FREE_SET, WORDS, LANES, LIMIT_BYTES = range(4, 13)
DEAD, STALE, SWEPT = 13, 14, 15
UNKNOWN, REFUSED, GIVEN_UP = range(17, 20)
NUMBERS = 20
HASH, REFS, SIZE, NEXT, FOUND = range(5)
"""Columns of `State.info`. FOUND: 1 when the set is in `buckets`. SIZE -1: the number is free, NEXT is the next free one."""
GENERATION, COPIES, EXTRA_ROWS = range(3)
"""Columns of `State.of_slot`."""

MAX_DEPTH = 20
ENTRY_BYTES = 12
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HIGH = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_STORED, _REMOVED = int(Kind.STORED), int(Kind.REMOVED)
_MOST_COPIES = 0xFFFF
"""`State.members` of an extra entry: generation of the slot (4 bits) | slot (12 bits) | copies (16 bits). The last bits of the
generation serve to sweep only; an entry is found by its key, which is made from all of them."""
_SLOT_SHIFT, _SLOT_MASK, _GENERATION_SHIFT, _GENERATION_MASK = 16, 0xFFF, 28, 0xF
NOBODY = 4095
"""As the slot there: of expected copies, which are dropped one by one and never with their slot."""
UNLEARNED, UNFOLLOWED = -1, -2
"""In the lanes of a slot, by attention group: not seen yet; seen and not kept."""
FOLLOWED_GROUPS = 32
"""Groups with a larger number share one place, which is never followed."""
KIND, CHAIN, BLOCK_SIZE, WINDOW_BLOCKS = range(4)
"""Of a lane. CHAIN 0: blocks of the slot's own size."""
NO_LANE, FULL, WINDOW = range(3)


class State(NamedTuple):
    num: I64
    places: U64
    segments: I64  # slots used, depth
    directory: U32
    names: U64
    members: U32
    sets: U64
    info: I64
    buckets: U32
    of_slot: I64
    held: I64
    scratch: U64


def _njit(**options: Any) -> Any:
    return numba.njit(cache=True, error_model="numpy", **options)


@_njit(inline="always")
def _splitmix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@_njit(inline="always")
def _member_hash(lane, level, slot):  # type: ignore[no-untyped-def]
    """What a member adds to the hash of a set."""
    return _splitmix((np.uint64(lane * LEVELS + level) << np.uint64(16) | np.uint64(slot)) * _GOLDEN + _GOLDEN)


@_njit(inline="always")
def _place(t, lane, level, slot):  # type: ignore[no-untyped-def]
    """The word of a set that holds the member's bit."""
    return (lane * LEVELS + level) * t.num[WORDS] + (slot >> 6)


@_njit(inline="always")
def _bit(slot):  # type: ignore[no-untyped-def]
    return np.uint64(1) << np.uint64(slot & 63)


@_njit(inline="always")
def _extra_key(t, key, lane, level, slot):  # type: ignore[no-untyped-def]
    generation = t.of_slot[slot, GENERATION] if level < EXPECTED else np.int64(0)
    owner = np.uint64(generation) << np.uint64(20) | np.uint64(lane * LEVELS + level) << np.uint64(12) | np.uint64(slot)
    x = key ^ _splitmix(owner * _GOLDEN + _GOLDEN)
    return x if x != np.uint64(0) else np.uint64(1)


# --- index ----------------------------------------------------------------------------------------------------------------------


@_njit(inline="always")
def _find(index, directory, names, which, depth, bits, key):  # type: ignore[no-untyped-def]
    """The key's place in the index, or -1 - (the free place where it belongs)."""
    high = (key * _GOLDEN) >> _HIGH
    base = np.uint64(directory[which, high >> np.uint64(32 - depth)]) << np.uint64(bits)
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    r = high & mask
    while True:
        there = index[base | r]
        if there >> _HIGH == high and names[there & _LOW] == key:
            return np.int64(base | r)
        if there == np.uint64(0):
            return np.int64(-1) - np.int64(base | r)
        r = (r + np.uint64(1)) & mask


@_njit(inline="always")
def _entry(t, which, key):  # type: ignore[no-untyped-def]
    """The key's entry, 0: none."""
    at = _find(t.places, t.directory, t.names, which, t.num[DEPTH + which], t.num[SEGMENT_BITS], key)
    return np.int64(t.places[at] & _LOW) if at >= 0 else np.int64(0)


@_njit(inline="always")
def _put_in_segment(t, segment, value):  # type: ignore[no-untyped-def]
    bits = t.num[SEGMENT_BITS]
    base = segment << bits
    mask = (np.int64(1) << bits) - 1
    r = np.int64(value >> _HIGH) & mask
    while t.places[base + r] != np.uint64(0):
        r = (r + 1) & mask
    t.places[base + r] = value
    t.segments[segment, 0] += 1


@_njit(inline="always")
def _free_entry(t, entry):  # type: ignore[no-untyped-def]
    t.names[entry] = np.uint64(0)
    t.members[entry] = t.num[FREE_ENTRY]
    t.num[FREE_ENTRY] = entry


@_njit(inline="always")
def _delete(t, which, key):  # type: ignore[no-untyped-def]
    """Frees the key's entry and place, and moves later ones of its run back, so that each stays reachable from its home."""
    at = _find(t.places, t.directory, t.names, which, t.num[DEPTH + which], t.num[SEGMENT_BITS], key)
    bits = t.num[SEGMENT_BITS]
    mask = (np.int64(1) << bits) - 1
    segment = at >> bits
    base = segment << bits
    index = t.places
    _free_entry(t, np.int64(index[at] & _LOW))
    hole = at - base
    r = (hole + 1) & mask
    while index[base + r] != np.uint64(0):
        home = np.int64(index[base + r] >> _HIGH) & mask
        if ((r - home) & mask) >= ((r - hole) & mask):
            index[base + hole] = index[base + r]
            hole = r
        r = (r + 1) & mask
    index[base + hole] = np.uint64(0)
    t.segments[segment, 0] -= 1
    t.num[ROWS + which] -= 1


@_njit(inline="always")
def _left_bytes(t, spared):  # type: ignore[no-untyped-def]
    """How much of the limit is left, where sets count as at least `spared` bytes."""
    of_sets = max(spared, t.num[SETS_TOP] * (t.sets.shape[1] + t.info.shape[1]) * 8)
    return t.num[LIMIT_BYTES] - (t.num[SEGMENTS] << (t.num[SEGMENT_BITS] + 3)) - t.num[ENTRIES_TOP] * ENTRY_BYTES - of_sets


@_njit(inline="always")
def _left_for_blocks(t):  # type: ignore[no-untyped-def]
    """Blocks leave a 32nd to the sets: where these can't change, nothing can be stored or removed, even if the blocks are all dead."""
    return _left_bytes(t, t.num[LIMIT_BYTES] >> 5)


@_njit(inline="always")
def _insert(t, which, key):  # type: ignore[no-untyped-def]
    """A new entry for a key that has none; 0: no memory. Its `members` are the caller's to set."""
    high = (key * _GOLDEN) >> _HIGH
    size = np.int64(1) << t.num[SEGMENT_BITS]
    used = t.segments[t.directory[which, high >> np.uint64(32 - t.num[DEPTH + which])], 0]
    if used >= size - (size >> 2) and not _make_room(t, which, high):
        return np.int64(0)
    if t.num[FREE_ENTRY] == 0 and (t.num[ENTRIES_TOP] + 1 >= len(t.names) or _left_for_blocks(t) < ENTRY_BYTES):
        _reclaim(t)
        if t.num[FREE_ENTRY] == 0:
            return np.int64(0)
    entry = t.num[FREE_ENTRY]
    if entry != 0:
        t.num[FREE_ENTRY] = t.members[entry]
    else:
        entry = t.num[ENTRIES_TOP]
        t.num[ENTRIES_TOP] += 1
    t.names[entry] = key
    _put_in_segment(t, np.int64(t.directory[which, high >> np.uint64(32 - t.num[DEPTH + which])]), high << _HIGH | np.uint64(entry))
    t.num[ROWS + which] += 1
    return entry


@_njit(inline="always")
def _is_dead(t, which, entry):  # type: ignore[no-untyped-def]
    """An entry that says nothing any more: of a set that was emptied, or of copies whose slot was."""
    value = np.int64(t.members[entry])
    if which == BLOCKS:
        return t.info[value, SIZE] == 0
    slot = (value >> _SLOT_SHIFT) & _SLOT_MASK
    return slot != NOBODY and (value >> _GENERATION_SHIFT) != (t.of_slot[slot, GENERATION] & _GENERATION_MASK)


@_njit()
def _living(t, which, segment):  # type: ignore[no-untyped-def]
    """Frees the segment's dead entries. Returns how many are left; their places stand in `scratch`, and are the caller's to put back where
    there are fewer than before."""
    any_dead = t.num[DEAD] if which == BLOCKS else t.num[STALE]
    base = segment << t.num[SEGMENT_BITS]
    n = 0
    for r in range(base, base + (np.int64(1) << t.num[SEGMENT_BITS])):
        value = t.places[r]
        if value == np.uint64(0):
            continue
        entry = np.int64(value & _LOW)
        if any_dead > 0 and _is_dead(t, which, entry):
            t.num[ROWS + which] -= 1
            if which == BLOCKS:
                t.num[DEAD] -= 1
                _let_go(t, np.int64(t.members[entry]))
            else:
                t.num[STALE] -= 1
            _free_entry(t, entry)
            continue
        t.scratch[n] = value
        n += 1
    return n


@_njit()
def _put_back(t, segment, other, n):  # type: ignore[no-untyped-def]
    """The n places in `scratch` are all that the segment holds; with another one (from 0), both, by the bit that tells them apart."""
    base = segment << t.num[SEGMENT_BITS]
    t.places[base : base + (np.int64(1) << t.num[SEGMENT_BITS])] = np.uint64(0)
    t.segments[segment, 0] = 0
    shift = np.uint64(64 - t.segments[segment, 1])
    for i in range(n):
        to = segment
        if other >= 0 and (t.scratch[i] >> shift) & np.uint64(1):
            to = other
        _put_in_segment(t, to, t.scratch[i])


@_njit()
def _make_room(t, which, high):  # type: ignore[no-untyped-def]
    """Room for one more in the segment: without its dead entries, or in two. One segment is all that is touched. False: no room."""
    size = np.int64(1) << t.num[SEGMENT_BITS]
    most = size - (size >> 2)
    while True:
        segment = np.int64(t.directory[which, high >> np.uint64(32 - t.num[DEPTH + which])])
        before = t.segments[segment, 0]
        if before < most:
            return True
        n = _living(t, which, segment)
        other = np.int64(-1)
        if n > most - (size >> 3):
            other = _new_segment(t, which, segment, high)
            if other < 0 and n == before:
                return False
        _put_back(t, segment, other, n)


@_njit()
def _reclaim(t):  # type: ignore[no-untyped-def]
    """Frees dead entries, a segment after the other from where the last call stopped, until there is a free one.

    Of blocks, all that are counted as dead are found. Of copies, those of sixteen generations ago may not be: one segment a call then.
    """
    for which in range(2):
        depth = t.num[DEPTH + which]
        tried = np.int64(0)
        while tried >> depth == 0 and t.num[FREE_ENTRY] == 0 and t.num[DEAD if which == BLOCKS else STALE] > 0:
            at = t.num[SWEPT + which] >> (32 - depth)
            segment = np.int64(t.directory[which, at])
            span = np.int64(1) << (depth - t.segments[segment, 1])
            t.num[SWEPT + which] = (at + span) << (32 - depth) & np.int64(_LOW)
            tried += span if which == BLOCKS else np.int64(1) << depth
            before = t.segments[segment, 0]
            n = _living(t, which, segment)
            if n < before:
                _put_back(t, segment, np.int64(-1), n)


@_njit()
def _new_segment(t, which, segment, high):  # type: ignore[no-untyped-def]
    """A second segment for the keys whose next bit is set, entered in the directory; -1: the memory or the directory is used up."""
    depth = t.segments[segment, 1]
    bits = t.num[SEGMENT_BITS]
    other = t.num[SEGMENTS]
    if other >= len(t.segments) or _left_for_blocks(t) < np.int64(8) << bits:
        return np.int64(-1)
    if depth == t.num[DEPTH + which]:
        if depth == MAX_DEPTH or (np.int64(2) << depth) > t.directory.shape[1]:
            return np.int64(-1)
        for i in range((np.int64(1) << depth) - 1, -1, -1):
            t.directory[which, 2 * i] = t.directory[which, 2 * i + 1] = t.directory[which, i]
        t.num[DEPTH + which] += 1
    t.num[SEGMENTS] += 1
    prefix = np.int64(high >> np.uint64(32 - depth))
    span = np.int64(1) << (t.num[DEPTH + which] - depth)
    for i in range(prefix * span + span // 2, (prefix + 1) * span):
        t.directory[which, i] = other
    t.segments[segment, 1] = t.segments[other, 1] = depth + 1
    return other


# --- sets -----------------------------------------------------------------------------------------------------------------------


@_njit(inline="always")
def _bucket(t, h):  # type: ignore[no-untyped-def]
    return h & np.int64(len(t.buckets) - 1)


@_njit()
def _link(t, s):  # type: ignore[no-untyped-def]
    b = _bucket(t, t.info[s, HASH])
    t.info[s, NEXT] = t.buckets[b]
    t.buckets[b] = s
    t.info[s, FOUND] = 1


@_njit()
def link_all(t):  # type: ignore[no-untyped-def]
    """Enters the sets in new buckets."""
    for s in range(1, t.num[SETS_TOP]):
        if t.info[s, SIZE] > 0 and t.info[s, FOUND]:
            _link(t, s)


@_njit()
def _unlink(t, s):  # type: ignore[no-untyped-def]
    b = _bucket(t, t.info[s, HASH])
    at = np.int64(t.buckets[b])
    if at == s:
        t.buckets[b] = t.info[s, NEXT]
    else:
        while t.info[at, NEXT] != s:
            at = t.info[at, NEXT]
        t.info[at, NEXT] = t.info[s, NEXT]
    t.info[s, FOUND] = 0


@_njit()
def _toggled(t, s, at, bit, member):  # type: ignore[no-untyped-def]
    """The set that has one member more or less than `s`: word `at`, `bit`. Not referred to yet. -1: no memory for another set."""
    size = t.info[s, SIZE] + (1 if t.sets[s, at] & bit == np.uint64(0) else -1)
    if size == 0:
        return np.int64(0)
    h = t.info[s, HASH] ^ np.int64(member)
    width = t.sets.shape[1]
    c = np.int64(t.buckets[_bucket(t, h)])
    while c != 0:
        if t.info[c, HASH] == h:
            same = t.sets[c, at] == t.sets[s, at] ^ bit
            for w in range(width):
                if w != at and t.sets[c, w] != t.sets[s, w]:
                    same = False
                    break
            if same:
                return c
        c = t.info[c, NEXT]
    c = t.num[FREE_SET]
    if c != 0:
        t.num[FREE_SET] = t.info[c, NEXT]
    else:
        c = t.num[SETS_TOP]
        if c >= len(t.info) or _left_bytes(t, np.int64(0)) < (width + t.info.shape[1]) * 8:
            return np.int64(-1)
        t.num[SETS_TOP] += 1
    for w in range(width):
        t.sets[c, w] = t.sets[s, w]
    t.sets[c, at] ^= bit
    t.info[c, HASH] = h
    t.info[c, REFS] = 0
    t.info[c, SIZE] = size
    _link(t, c)
    return c


@_njit()
def _let_go(t, s):  # type: ignore[no-untyped-def]
    """One entry less refers to the set; the last one frees it."""
    if s == 0:
        return
    t.info[s, REFS] -= 1
    if t.info[s, REFS] <= 0:
        if t.info[s, FOUND]:
            _unlink(t, s)
        t.info[s, SIZE] = -1
        t.info[s, NEXT] = t.num[FREE_SET]
        t.num[FREE_SET] = s


@_njit()
def clear(t, slot):  # type: ignore[no-untyped-def]
    """Takes the slot's tiers out of every set; entries are not touched. A set that equals another one then stays beside it, not FOUND."""
    bit = _bit(slot)
    for s in range(1, t.num[SETS_TOP]):
        if t.info[s, SIZE] <= 0:
            continue
        taken = np.uint64(0)
        gone = 0
        for lane in range(t.num[LANES]):
            for level in range(TIERS):
                at = _place(t, lane, level, slot)
                if t.sets[s, at] & bit:
                    if gone == 0 and t.info[s, FOUND]:
                        _unlink(t, s)
                    t.sets[s, at] ^= bit
                    taken ^= _member_hash(lane, level, slot)
                    gone += 1
        if gone == 0:
            continue
        t.info[s, HASH] ^= np.int64(taken)
        t.info[s, SIZE] -= gone
        if t.info[s, SIZE] == 0:
            t.num[DEAD] += t.info[s, REFS]
            continue
        c = np.int64(t.buckets[_bucket(t, t.info[s, HASH])])
        while c != 0 and not (t.info[c, HASH] == t.info[s, HASH] and np.array_equal(t.sets[c], t.sets[s])):
            c = t.info[c, NEXT]
        if c == 0:
            _link(t, s)
    t.of_slot[slot, GENERATION] += 1
    t.of_slot[slot, COPIES] = 0
    t.num[STALE] += t.of_slot[slot, EXTRA_ROWS]
    t.of_slot[slot, EXTRA_ROWS] = 0
    t.held[:, :TIERS, slot] = 0


# --- blocks ---------------------------------------------------------------------------------------------------------------------


@_njit()
def _store_copy(t, key, lane, level, slot):  # type: ignore[no-untyped-def]
    """One more copy of a block that the slot holds. False: no room, so the last removal of it will find nothing."""
    x = _extra_key(t, key, lane, level, slot)
    entry = _entry(t, EXTRAS, x)
    if entry != 0:
        if t.members[entry] & _MOST_COPIES == _MOST_COPIES:
            return False
        t.members[entry] += 1
        return True
    entry = _insert(t, EXTRAS, x)
    if entry == 0:
        return False
    if level < EXPECTED:
        t.members[entry] = (t.of_slot[slot, GENERATION] & _GENERATION_MASK) << _GENERATION_SHIFT | slot << _SLOT_SHIFT | 1
        t.of_slot[slot, EXTRA_ROWS] += 1
    else:
        t.members[entry] = NOBODY << _SLOT_SHIFT | 1
    return True


@_njit()
def store_all(t, slot, lane, level, hashes):  # type: ignore[no-untyped-def]
    at = _place(t, lane, level, slot)
    bit = _bit(slot)
    member = _member_hash(lane, level, slot)
    before = np.int64(-1)  # blocks of one event mostly come from one set and go to one set
    after = np.int64(-1)
    entry = np.int64(0)
    for i in range(len(hashes)):
        key = hashes[i]
        if key == np.uint64(0):
            continue
        if t.names[entry + 1] == key:  # often stored together before (table.py)
            entry += 1
        else:
            entry = _entry(t, BLOCKS, key)
        s = np.int64(t.members[entry]) if entry != 0 else np.int64(0)
        if t.sets[s, at] & bit:
            if not _store_copy(t, key, lane, level, slot):
                t.num[REFUSED] += 1
            elif level < EXPECTED:
                t.of_slot[slot, COPIES] += 1
            continue
        if s != before:
            before, after = s, _toggled(t, s, at, bit, member)
        if after < 0:
            before = np.int64(-1)
            t.num[REFUSED] += 1
            continue
        t.info[after, REFS] += 1  # before anything is moved: a set without entries would be free
        if entry == 0:
            entry = _insert(t, BLOCKS, key)
            if entry == 0:
                before = np.int64(-1)
                _let_go(t, after)
                t.num[REFUSED] += 1
                continue
        else:
            if t.info[s, SIZE] == 0:
                t.num[DEAD] -= 1
            _let_go(t, s)
        t.members[entry] = after
        t.held[lane, level, slot] += 1
        if level < EXPECTED:
            t.of_slot[slot, COPIES] += 1


@_njit()
def _drop_copies(t, key, lane, level, slot):  # type: ignore[no-untyped-def]
    """Forgets the copies beyond the first; how many they were."""
    if t.num[ROWS + EXTRAS] == 0:
        return np.int64(0)
    x = _extra_key(t, key, lane, level, slot)
    entry = _entry(t, EXTRAS, x)
    if entry == 0:
        return np.int64(0)
    n = np.int64(t.members[entry] & _MOST_COPIES)
    _delete(t, EXTRAS, x)
    if level < EXPECTED:
        t.of_slot[slot, EXTRA_ROWS] -= 1
    return n


@_njit()
def _drop_block(t, s, key):  # type: ignore[no-untyped-def]
    """Nobody holds the block any more: what is done where there is no memory for the smaller set. Never false, only less than is held."""
    words = t.num[WORDS]
    for at in range(t.sets.shape[1]):
        left = t.sets[s, at]
        slot = np.int64(at % words) << 6
        lane, level = at // words // LEVELS, at // words % LEVELS
        while left != np.uint64(0):
            if left & np.uint64(1):
                t.held[lane, level, slot] -= 1
                n = 1 + _drop_copies(t, key, lane, level, slot)
                if level < EXPECTED:
                    t.of_slot[slot, COPIES] -= n
                t.num[GIVEN_UP] += n
            left >>= np.uint64(1)
            slot += 1
    _delete(t, BLOCKS, key)
    _let_go(t, s)


@_njit()
def remove_all(t, slot, lane, level, hashes, whole):  # type: ignore[no-untyped-def]
    """One copy of each less, or with `whole` all of them. Of tiers, what is not held is counted."""
    at = _place(t, lane, level, slot)
    bit = _bit(slot)
    member = _member_hash(lane, level, slot)
    before = np.int64(-1)
    to = np.int64(-1)
    for i in range(len(hashes)):
        key = hashes[i]
        if key == np.uint64(0):
            continue
        entry = _entry(t, BLOCKS, key)
        s = np.int64(t.members[entry]) if entry != 0 else np.int64(0)
        if t.sets[s, at] & bit == np.uint64(0):
            if level < EXPECTED:
                t.num[UNKNOWN] += 1
            continue
        n = np.int64(1)
        if whole:
            n += _drop_copies(t, key, lane, level, slot)
        elif t.num[ROWS + EXTRAS] > 0:
            x = _extra_key(t, key, lane, level, slot)
            extra = _entry(t, EXTRAS, x)
            if extra != 0:
                if t.members[extra] & _MOST_COPIES == 1:
                    _drop_copies(t, key, lane, level, slot)
                else:
                    t.members[extra] -= 1
                if level < EXPECTED:
                    t.of_slot[slot, COPIES] -= 1
                continue
        if s != before or to < 0:
            before, to = s, _toggled(t, s, at, bit, member)
        if to < 0:
            _drop_block(t, s, key)
            continue
        t.held[lane, level, slot] -= 1
        if level < EXPECTED:
            t.of_slot[slot, COPIES] -= n
        if to == 0:
            _delete(t, BLOCKS, key)
        else:
            t.info[to, REFS] += 1
            t.members[entry] = to
        _let_go(t, s)


@_njit()
def copies_of(t, slot, lane, level, key):  # type: ignore[no-untyped-def]
    entry = _entry(t, BLOCKS, key)
    if entry == 0 or t.sets[t.members[entry], _place(t, lane, level, slot)] & _bit(slot) == np.uint64(0):
        return np.int64(0)
    extra = _entry(t, EXTRAS, _extra_key(t, key, lane, level, slot))
    return np.int64(1) + (np.int64(t.members[extra] & _MOST_COPIES) if extra != 0 else np.int64(0))


# --- KV events ------------------------------------------------------------------------------------------------------------------


@_njit()
def apply(t, slot, lanes, events, hashes, e, at):  # type: ignore[no-untyped-def]
    """STORED and REMOVED events from event `e` and hash `at` on, until one is of a group that has no lane yet: (its number, its hash).

    What is stored in a lane of full attention is expected no longer.
    """
    while e < len(events):
        first = events[e, 0]
        kind = np.int64(first & np.uint64(0xFF))
        tier = min(np.int64((first >> np.uint64(8)) & np.uint64(0xFF)), TIERS - 1)
        group = np.int64((first >> np.uint64(16)) & np.uint64(0xFFFF))
        count = np.int64(first >> _HIGH)
        lane = np.int64(lanes[min(group, FOLLOWED_GROUPS)])
        if kind == _STORED:
            if lane == UNLEARNED:
                return e, at
            if lane >= 0:
                store_all(t, slot, lane, tier, hashes[at : at + count])
                if t.held[0, EXPECTED, slot] > 0 and (events[e, 4] >> _HIGH) & np.uint64(WINDOWED) == np.uint64(0):
                    remove_all(t, slot, 0, EXPECTED, hashes[at : at + count], True)
        elif kind == _REMOVED and lane >= 0:
            remove_all(t, slot, lane, tier, hashes[at : at + count], False)
        at += count
        e += 1
    return e, at


# --- matching -------------------------------------------------------------------------------------------------------------------


@_njit(inline="always")
def _fall(fallen, word, depth, out):  # type: ignore[no-untyped-def]
    """Each slot whose bit is set in `fallen` held `depth` blocks."""
    s = word * 64
    while fallen != np.uint64(0):
        if fallen & np.uint64(1):
            out[s] = depth
        fallen >>= np.uint64(1)
        s += 1


@_njit(inline="always")
def _add(mask, word, n, out):  # type: ignore[no-untyped-def]
    s = word * 64
    while mask != np.uint64(0):
        if mask & np.uint64(1):
            out[s] += n
        mask >>= np.uint64(1)
        s += 1


@_njit()
def match(num, index, directory, names, members, sets, counting, chain, out):  # type: ignore[no-untyped-def]
    """Overlaps of a chain: rows of `out` are held, gpu, cpu, disk, expected, shape (5, slots), zeros before.

    counting[lane]: slots whose group in that lane must hold a block; counting[lanes]: slots with such a lane.
    """
    words, lanes = num[WORDS], num[LANES]
    depth, bits = num[DEPTH], num[SEGMENT_BITS]
    masks = np.empty((4, words), np.uint64)  # held so far; expected so far; of this run's blocks: on CPU, on disk
    for w in range(words):
        masks[0, w] = counting[lanes, w]
        masks[1, w] = ~np.uint64(0)
        masks[2, w] = masks[3, w] = np.uint64(0)
    last = np.uint32(0xFFFFFFFF)
    lower = False
    run = 0
    end = len(chain)
    entry = np.uint64(0)
    for i in range(len(chain)):
        key = chain[i]
        if names[entry + np.uint64(1)] == key and key != np.uint64(0):  # 0 is the name of free entries
            entry += np.uint64(1)
        else:
            at = _find(index, directory, names, BLOCKS, depth, bits, key)
            entry = index[np.uint64(at)] & _LOW if at >= 0 else np.uint64(0)
        s = members[entry]
        if s == last:
            continue
        if lower:
            for w in range(words):
                _add(masks[2, w], w, i - run, out[2])
                _add(masks[3, w], w, i - run, out[3])
            lower = False
        last, run = s, i
        alive = np.uint64(0)
        for w in range(words):
            if masks[1, w] == np.uint64(0):
                continue
            gpu = cpu = disk = counting[lanes, w]
            for lane in range(lanes):
                spared = ~counting[lane, w]
                first = lane * LEVELS * words + w
                found = sets[s, first]
                gpu &= found | spared
                found |= sets[s, first + words]
                cpu &= found | spared
                found |= sets[s, first + 2 * words]
                disk &= found | spared
            held = masks[0, w]
            kept = held & disk
            if kept != held:
                _fall(held ^ kept, w, i, out[0])
                masks[0, w] = kept
            masks[2, w] = kept & cpu & ~gpu
            masks[3, w] = kept & ~cpu
            lower = lower or (masks[2, w] | masks[3, w]) != np.uint64(0)
            held = masks[1, w]
            kept = held & (disk | sets[s, EXPECTED * words + w])
            if kept != held:
                _fall(held ^ kept, w, i, out[4])
                masks[1, w] = kept
            alive |= kept
        if alive == np.uint64(0):
            end = i
            break
    for w in range(words):
        if lower:
            _add(masks[2, w], w, end - run, out[2])
            _add(masks[3, w], w, end - run, out[3])
        if end == len(chain):
            _fall(masks[0, w], w, end, out[0])
            _fall(masks[1, w], w, end, out[4])
    for slot in range(out.shape[1]):
        out[1, slot] = out[0, slot] - out[2, slot] - out[3, slot]


@_njit()
def sets_of(t, chain, out):  # type: ignore[no-untyped-def]
    """The number of each block's set."""
    for i in range(len(chain)):
        out[i] = t.members[_entry(t, BLOCKS, chain[i])]


@_njit(inline="always")
def _has(t, s, lane, slot):  # type: ignore[no-untyped-def]
    """Whether the slot holds the blocks of this set in this lane, in any tier."""
    found = np.uint64(0)
    for level in range(TIERS):
        found |= t.sets[s, _place(t, lane, level, slot)]
    return found & _bit(slot) != np.uint64(0)


@_njit()
def _last_window(t, slot, lane, blocks, size, window, unit, n):  # type: ignore[no-untyped-def]
    """Tokens of the longest prefix of at most n blocks, a multiple of `unit`, whose last `window` blocks (or all) are held in the lane."""
    run = 0
    for i in range(n - 1, -1, -1):
        if run == 0 and (i + 1) * size % unit != 0:
            continue
        if not _has(t, blocks[i], lane, slot):
            run = 0
            continue
        run += 1
        if run >= window:
            return (i + run) * size
    return run * size


@_njit()
def settle(t, slots, lanes, base, unit, lengths, blocks, out):  # type: ignore[no-untyped-def]
    """Shortens the overlaps of slots with more than one kind of group to what all their groups hold (prefix_index.py says the rule).

    lanes[slot, lane]: kind, chain, block size, window in blocks; base, unit: tokens, by slot; blocks[chain], lengths[chain]: numbers of
    sets, of the prompt cut into the lane's block size (length -1: not given, so nothing can be said of the slot).
    """
    for k in range(len(slots)):
        slot = slots[k]
        before = np.int64(out[0, slot])
        if before == 0:
            continue
        tokens = before * base[slot] // unit[slot] * unit[slot]
        for lane in range(lanes.shape[1]):
            kind, chain, size = lanes[slot, lane, KIND], lanes[slot, lane, CHAIN], lanes[slot, lane, BLOCK_SIZE]
            if kind == NO_LANE:
                continue
            if lengths[chain] < 0:
                tokens = np.int64(0)
            elif kind == FULL and chain != 0:
                i = 0
                while i < min(lengths[chain], tokens // size) and _has(t, blocks[chain, i], lane, slot):
                    i += 1
                tokens = min(tokens, i * size // unit[slot] * unit[slot])
        shorter = True
        while shorter and tokens > 0:
            shorter = False
            for lane in range(lanes.shape[1]):
                if lanes[slot, lane, KIND] != WINDOW:
                    continue
                chain, size = lanes[slot, lane, CHAIN], lanes[slot, lane, BLOCK_SIZE]
                n = min(lengths[chain], tokens // size)
                found = _last_window(t, slot, lane, blocks[chain], size, lanes[slot, lane, WINDOW_BLOCKS], unit[slot], n)
                if found < tokens:
                    tokens = found
                    shorter = True
        held = tokens // base[slot]
        if held == before:
            continue
        if out[4, slot] == before:  # else requests on their way will leave the rest
            out[4, slot] = held
        out[0, slot] = held
        if out[1, slot] == before:
            out[1, slot] = held
            continue
        out[1:4, slot] = 0
        for i in range(held):
            out[1 + _level(t, blocks[0, i], lanes, slot), slot] += 1


@_njit()
def _level(t, s, lanes, slot):  # type: ignore[no-untyped-def]
    """The tier of a block that all full lanes of the slot's own block size hold: the farthest of their nearest."""
    bit = _bit(slot)
    worst = 0
    for lane in range(lanes.shape[1]):
        if lanes[slot, lane, KIND] != FULL or lanes[slot, lane, CHAIN] != 0:
            continue
        level = 0
        while level < TIERS - 1 and t.sets[s, _place(t, lane, level, slot)] & bit == np.uint64(0):
            level += 1
        worst = max(worst, level)
    return worst
