"""Which prompt text was seen before, though its blocks were not: "diverged" and "namespace" told from "never seen".

Decisions describe the part of a prompt that no worker held by what it is made of (schemas/content.py). This index keeps when each piece, a
block's fingerprint or a chunk, was first described, and in which namespace:

    entry       key                      time                                owner
    piece       mix(name, pool)          earliest in any namespace           that namespace
    in another  mix(piece, namespace)    earliest in that one                -          only of namespaces that are not the owner
    elsewhere   mix(piece)               earliest in all but the owner       -          only if there are any

so that a deployment with one namespace pays for one entry a piece. All entries lie in two hash tables of `budget_entries / 2` each, a young
and an old one. What is registered goes into the young one, from the old one too; when that is full it becomes the old one, and what nobody
registered in the meantime is forgotten: then text is told as never seen though it was, once.

Invariants. Answers depend on times alone, not on the order of registering (as long as nothing is forgotten); equal calls give equal states;
registering twice changes nothing. `tell` changes nothing. Namespaces are told apart by 32 bits, pieces by 64: an accident in 4 billion.

Rejected: a set of times for each piece (unbounded), exact order of last use (a list through all entries, for an answer that seldom
differs), forgetting by first time (a template's text is old and needed).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from schemas.block_hash import U32, U64
from schemas.content import Content

U8 = npt.NDArray[np.uint8]
F64 = npt.NDArray[np.float64]

_FIRST_SLOTS = 1 << 12
_BYTES_A_SLOT = 8 + 8 + 4


class Known(IntEnum):
    """Whether a token's content was seen before a dispatch."""

    NOT = 0
    HERE = 1
    """In its own namespace, perhaps in others, too."""
    ELSEWHERE = 2
    """In other namespaces of the pool only."""


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """What was known of a prompt's content from `first_token` on. run_known (of `Known`) and run_tokens: as runs that are alike, shape
    (runs,); chunk_known and chunk_tokens: by chunk, shape (chunks,). Both lengths add up to prompt_tokens - first_token."""

    first_token: int
    block_size: int
    prompt_tokens: int
    run_known: U8
    run_tokens: U32
    chunk_known: U8
    chunk_tokens: U32

    def difference(self, seen_tokens: int, shared_tokens: int | None = None) -> tuple[int, int]:
        """Where the first token lies that earlier prompts did not have there: [from, to), at least one token wide.

        seen_tokens: end of the last block whose name was stored before, a multiple of the block size and less than the prompt: the block
        that follows has a new name, so the difference is in it, if earlier prompts were not just shorter. Chunks narrow that down: those
        that are known and touch the known part are shared, too; the first that is not and begins where a known one ended holds the
        difference. shared_tokens: the decision's own word, which is exact, and holds unless the names say that more was shared.
        """
        low, high = seen_tokens, min(seen_tokens + self.block_size, self.prompt_tokens)
        if shared_tokens is not None and low <= shared_tokens < self.prompt_tokens:
            return shared_tokens, shared_tokens + 1
        ends = self.first_token + np.cumsum(self.chunk_tokens, dtype=np.int64)
        at = int(np.searchsorted(ends, low, side="right"))
        start = int(ends[at - 1]) if at else self.first_token
        begins = start == 0 or (at > 0 and self.chunk_known[at - 1] == Known.HERE)
        while at < len(ends) and start <= low < high - 1:
            end = int(ends[at])
            if self.chunk_known[at] != Known.HERE:
                return low, min(high, end) if begins else high
            low, start, at, begins = min(end, high - 1), end, at + 1, True
        return low, max(high, low + 1)


class ContentIndex:
    """Pieces of content by pool and namespace, each with its earliest time. Pure."""

    def __init__(self, budget_entries: int = 4_000_000) -> None:
        """budget_entries: pieces kept, some 40 bytes each when full; 4 million stand for 35 million tokens of distinct text in blocks of
        16. Raises ValueError for less than 1,000."""
        if budget_entries < 1000:
            raise ValueError(f"budget_entries must be at least 1,000, got {budget_entries}")
        self._most = budget_entries // 2
        self._young, self._old = _Table.empty(_FIRST_SLOTS), _Table.empty(_FIRST_SLOTS)
        self.forgotten = 0
        """Entries dropped since the start, those among them that were kept by being registered again."""

    def register(self, time_s: float, pool: str, content: Content) -> None:
        """A decision of this time (unix seconds) had this content. Idempotent; the earliest time is kept, whatever the order."""
        pieces: U64 = np.concatenate([_pieces(content.fingerprints, pool), _pieces(content.chunks, pool)])
        at, namespace = 0, np.uint32(content.namespace & 0xFFFFFFFF)
        while at < len(pieces):
            young, old = self._young, self._old
            at, young.count = _register(
                young.keys, young.times, young.owners, young.count, min(self._most, young.most),
                old.keys, old.times, old.owners, pieces, at, namespace, time_s,
            )  # fmt: skip
            if at < len(pieces):
                self._make_room()

    def tell(self, before_s: float, pool: str, content: Content) -> Told:
        """What of it was registered with a time < before_s. Asked with the time of a request's first decision, its own registrations and
        later ones do not count. Changes nothing."""
        namespace = np.uint32(content.namespace & 0xFFFFFFFF)
        tables = (*self._young.arrays, *self._old.arrays)
        blocks = _known(*tables, _pieces(content.fingerprints, pool), namespace, before_s)
        chunks = _known(*tables, _pieces(content.chunks, pool), namespace, before_s)
        lengths = content.chunk_tokens.astype(np.uint32)
        known, tokens = _runs(blocks, content.block_size, chunks, lengths)
        return Told(content.first_token, content.block_size, content.prompt_tokens, known, tokens, chunks, lengths)

    @property
    def entries(self) -> int:
        """Those that are in both tables count twice."""
        return self._young.count + self._old.count

    def held_bytes(self) -> int:
        return _BYTES_A_SLOT * (len(self._young.keys) + len(self._old.keys))

    def save(self) -> Mapping[str, npt.NDArray[Any]]:
        """Copies of all that `load` needs: 20 bytes an entry."""
        saved: dict[str, npt.NDArray[Any]] = {"forgotten": np.array([self.forgotten], np.int64)}
        for name, table in (("young", self._young), ("old", self._old)):
            taken = table.keys != 0
            saved[f"{name}_keys"], saved[f"{name}_times"] = table.keys[taken], table.times[taken]
            saved[f"{name}_owners"] = table.owners[taken]
        return saved

    def load(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        self.forgotten = int(saved["forgotten"][0])
        self._young, self._old = (
            _Table.of(saved[f"{name}_keys"], saved[f"{name}_times"], saved[f"{name}_owners"]) for name in ("young", "old")
        )

    def _make_room(self) -> None:
        if self._young.count + _MOST_NEW <= self._most:
            self._young = _Table.of(*self._young.arrays, slots=2 * len(self._young.keys))
            return
        self.forgotten += self._old.count
        self._old, self._young = self._young, _Table.empty(len(self._young.keys))


_MOST_NEW = 3
"""Entries that one piece can add."""


@dataclass(slots=True, eq=False)
class _Table:
    """Open addressing, at most 0.6 full. keys: 0 is free."""

    keys: U64
    times: F64
    owners: U32
    count: int

    @classmethod
    def empty(cls, slots: int) -> _Table:
        return cls(np.zeros(slots, np.uint64), np.zeros(slots), np.zeros(slots, np.uint32), 0)

    @classmethod
    def of(cls, keys: U64, times: F64, owners: U32, slots: int = _FIRST_SLOTS) -> _Table:
        """Those that are not free, in at least so many slots."""
        count = int(np.count_nonzero(keys))
        while count + _MOST_NEW > slots * 3 // 5:
            slots *= 2
        made = cls.empty(slots)
        _move(keys, times, owners, made.keys, made.times, made.owners)
        made.count = count
        return made

    @property
    def arrays(self) -> tuple[U64, F64, U32]:
        return self.keys, self.times, self.owners

    @property
    def most(self) -> int:
        return len(self.keys) * 3 // 5


def _pieces(names: U64, pool: str) -> U64:
    """Keys of the pieces with these names."""
    salt = np.uint64(int.from_bytes(hashlib.blake2b(pool.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"))
    out: U64 = _mixed(names ^ salt)
    return out


@numba.njit(cache=True, inline="always")
def _mix(x):  # type: ignore[no-untyped-def]
    """The finisher of splitmix64 (Steele, Lea, Flood 2014), never 0."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x if x != 0 else np.uint64(1)


@numba.njit(cache=True)
def _mixed(names):  # type: ignore[no-untyped-def]
    out = np.empty(len(names), np.uint64)
    for i in range(len(names)):
        out[i] = _mix(names[i])
    return out


@numba.njit(cache=True, inline="always")
def _in_namespace(piece, namespace):  # type: ignore[no-untyped-def]
    return _mix(piece ^ (np.uint64(namespace) | np.uint64(1 << 32)))


@numba.njit(cache=True, inline="always")
def _elsewhere(piece):  # type: ignore[no-untyped-def]
    return _mix(piece ^ np.uint64(1 << 33))


@numba.njit(cache=True)
def _find(keys, key):  # type: ignore[no-untyped-def]
    """Its slot; else -1 - the free slot where it would go."""
    mask = len(keys) - 1
    i = np.int64(key & np.uint64(mask))
    while keys[i] != 0:
        if keys[i] == key:
            return i
        i = (i + 1) & mask
    return -1 - i


@numba.njit(cache=True)
def _move(keys, times, owners, to_keys, to_times, to_owners):  # type: ignore[no-untyped-def]
    for i in range(len(keys)):
        if keys[i] != 0:
            j = -1 - _find(to_keys, keys[i])
            to_keys[j], to_times[j], to_owners[j] = keys[i], times[i], owners[i]


@numba.njit(cache=True)
def _put(keys, times, owners, old_keys, old_times, old_owners, key, time_s, owner):  # type: ignore[no-untyped-def]
    """Its slot in the young table, and whether it is new there. What neither table had begins with time_s and owner."""
    i = _find(keys, key)
    if i >= 0:
        return i, 0
    i = -1 - i
    j = _find(old_keys, key)
    keys[i] = key
    if j >= 0:
        times[i], owners[i] = old_times[j], old_owners[j]
    else:
        times[i], owners[i] = time_s, owner
    return i, 1


@numba.njit(cache=True)
def _register(  # type: ignore[no-untyped-def]
    keys, times, owners, count, most, old_keys, old_times, old_owners, pieces, at, namespace, time_s
):  # fmt: skip
    """Registers pieces[at:] as long as there is room; how far it came, and the new count."""
    while at < len(pieces) and count + _MOST_NEW <= most:
        piece = pieces[at]
        at += 1
        i, new = _put(keys, times, owners, old_keys, old_times, old_owners, piece, time_s, namespace)
        count += new
        if owners[i] == namespace:
            times[i] = min(times[i], time_s)
            continue
        if time_s < times[i]:  # the earliest is another namespace's now
            other, other_s = owners[i], times[i]
            times[i], owners[i] = time_s, namespace
        else:
            other, other_s = namespace, time_s
        for key in (_in_namespace(piece, other), _elsewhere(piece)):
            j, new = _put(keys, times, owners, old_keys, old_times, old_owners, key, other_s, other)
            count += new
            times[j] = min(times[j], other_s)
    return at, count


@numba.njit(cache=True)
def _time_of(keys, times, old_keys, old_times, key):  # type: ignore[no-untyped-def]
    i = _find(keys, key)
    if i >= 0:
        return times[i]
    i = _find(old_keys, key)
    return old_times[i] if i >= 0 else np.inf


@numba.njit(cache=True)
def _known(  # type: ignore[no-untyped-def]
    keys, times, owners, old_keys, old_times, old_owners, pieces, namespace, before_s
):  # fmt: skip
    out = np.zeros(len(pieces), np.uint8)
    for n in range(len(pieces)):
        piece = pieces[n]
        i = _find(keys, piece)
        if i >= 0:
            first_s, owner = times[i], owners[i]
        else:
            i = _find(old_keys, piece)
            if i < 0:
                continue
            first_s, owner = old_times[i], old_owners[i]
        if owner == namespace:
            here_s = first_s
            other_s = np.inf if first_s < before_s else _time_of(keys, times, old_keys, old_times, _elsewhere(piece))
        else:
            here_s, other_s = _time_of(keys, times, old_keys, old_times, _in_namespace(piece, namespace)), first_s
        if here_s < before_s:
            out[n] = 1
        elif other_s < before_s:
            out[n] = 2
    return out


@numba.njit(cache=True)
def _runs(blocks, block_size, chunks, lengths):  # type: ignore[no-untyped-def]
    """A token is known HERE if its block or its chunk is, else ELSEWHERE if one of them is."""
    most = len(blocks) + len(chunks) + 1
    known, tokens = np.zeros(most, np.uint8), np.zeros(most, np.uint32)
    n = at = chunk_end = np.int64(0)
    for c in range(len(chunks)):
        chunk_end += np.int64(lengths[c])
        while at < chunk_end:
            b = at // block_size
            end, state = chunk_end, chunks[c]
            if b < len(blocks):
                end = min(end, (b + 1) * block_size)
                if state != 1 and blocks[b] != 0:
                    state = blocks[b]
            if n and known[n - 1] == state:
                tokens[n - 1] += end - at
            else:
                known[n], tokens[n] = state, end - at
                n += 1
            at = end
    return known[:n].copy(), tokens[:n].copy()
