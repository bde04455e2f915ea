"""Which prefix each worker of a pool held at a past moment, for many requests at once.

What a router could have known at a dispatch is in the table of now, with the events since undone. For one request and one worker that is
`moments._hit`; here the work is shared:

    names    the chains of all queries in one numbering: a name stands for the whole prefix up to it, so chains form a tree
             q0: 0 1 2 3 4      q1: 0 1 2 5 6 (shares 3 with q0)      q2: 0 7 (shares 1 with q0)
    now      per worker, a chain's held prefix begins where the shared part of an earlier query's ends: each node of the tree is looked
             up at most once, and nothing behind the first block that is not held
    undo     per worker, its events are walked back once, newest first, and only blocks of the tree are noted. A query is answered when the
             walk comes to an event of its time; it looks at its chain again only from the first noted block on

An undone store shortens a prefix, an undone removal can lengthen it: then the blocks behind are looked up, too. Behind a clear the life
before it counts. Rejected: a walk over the whole fleet's ring (each event would have to find its worker's notes; the same events are read);
noting which blocks each worker holds (64 workers times 2,048 blocks a request).

Pure. The twin in tests/collector/naive.py keeps a copy of every state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import numpy.typing as npt

from collector.attribution.history import MAX_GROUPS
from collector.residency import _CLEARED, _EPOCH, _REMOVED, _REPLACED, _STORED, Residency
from collector.slots import count_of
from schemas.block_hash import U64

UNKNOWN = -1


@numba.njit(cache=True)
def _number(hashes, ends, slots, ids, names, depths, makers):  # type: ignore[no-untyped-def]
    """Numbers the names of all chains. Writes the node of each position to `ids`, and of each node its name, depth and first query.

    Returns (nodes, base, shared): a chain begins with `shared` nodes of the earlier chain `base`.
    """
    queries = len(ends) - 1
    base, shared = np.zeros(queries, np.int64), np.zeros(queries, np.int64)
    mask = np.int64(len(slots) - 1)
    nodes = 0
    for q in range(queries):
        lead, leading = np.int64(-1), True
        for i in range(ends[q], ends[q + 1]):
            h = hashes[i]
            at = np.int64(h & np.uint64(mask))
            while slots[at] >= 0 and names[slots[at]] != h:
                at = (at + 1) & mask
            if slots[at] < 0:
                leading = False
                slots[at] = nodes
                names[nodes] = h
                depths[nodes] = i - ends[q]
                makers[nodes] = q
                nodes += 1
            elif leading:
                lead = slots[at]
            ids[i] = slots[at]
        if lead >= 0:
            base[q] = makers[lead]
            most = min(ends[q + 1] - ends[q], ends[base[q] + 1] - ends[base[q]])
            n = 0
            while n < most and ids[ends[q] + n] == ids[ends[base[q]] + n]:
                n += 1
            shared[q] = n if base[q] < q else 0
    return nodes, base, shared


@numba.njit(cache=True)
def _holds(table, instance, lows, groups, columns, h):  # type: ignore[no-untyped-def]
    """Each group holds the block on some tier. Columns are sorted by group."""
    c = 0
    while c < columns:
        group, found = groups[c], False
        while c < columns and groups[c] == group:
            found = found or count_of(table, h, np.uint64(instance) << np.uint64(10) | lows[c]) > 0
            c += 1
        if not found:
            return False
    return columns > 0


@numba.njit(cache=True)
def _held_then(table, instance, lows, groups, columns, h, change):  # type: ignore[no-untyped-def]
    """`_holds` with the changes since undone. change: i64, shape (columns,)."""
    c = 0
    while c < columns:
        group, found = groups[c], False
        while c < columns and groups[c] == group:
            found = found or count_of(table, h, np.uint64(instance) << np.uint64(10) | lows[c]) + change[c] > 0
            c += 1
        if not found:
            return False
    return columns > 0


@numba.njit(cache=True)
def _lengths(table, instance, lows, groups, columns, hashes, ends, base, shared, lengths):  # type: ignore[no-untyped-def]
    """Writes how many leading blocks of each chain the life holds now."""
    for q in range(len(lengths)):
        i = shared[q]
        if i > 0 and lengths[base[q]] < i:
            lengths[q] = lengths[base[q]]
            continue
        n = ends[q + 1] - ends[q]
        while i < n and _holds(table, instance, lows, groups, columns, hashes[ends[q] + i]):
            i += 1
        lengths[q] = i


@numba.njit(cache=True)
def _walk(  # type: ignore[no-untyped-def]
    table, ring, ring_hashes, reach, forgotten_s, workers, numbers, hashes, ends, times, order, slots, ids, names, depths, base, shared,
    blocks, trusts,
):  # fmt: skip
    e_mask, h_mask = len(ring) - 1, len(ring_hashes) - 1
    mask = np.int64(len(slots) - 1)
    queries, nodes = len(times), len(names)
    sieve_mask = np.uint64(1 << 16)
    while sieve_mask < np.uint64(16 * nodes):
        sieve_mask *= np.uint64(2)
    sieve = np.zeros(np.int64(sieve_mask) // 8, np.uint8)  # small enough to stay near: most events are of other chains
    sieve_mask -= np.uint64(1)
    for node in range(nodes):
        bit = names[node] >> np.uint64(7) & sieve_mask
        sieve[bit >> np.uint64(3)] |= np.uint8(1) << np.uint8(bit & np.uint64(7))
    lengths = np.zeros(queries, np.int64)
    lows, groups = np.empty(64, np.uint64), np.empty(64, np.int64)
    most = 1
    for number in numbers:
        owners, n = workers[number]["owners"], 0
        while owners:
            owners &= owners - np.uint64(1)
            n += 1
        most = max(most, n)
    changes = np.zeros((nodes, most), np.int64)  # copies that came back by undoing, by node and column
    noted = np.zeros(nodes, np.bool_)
    notes = np.empty(nodes, np.int64)
    for x in range(len(numbers)):
        w = workers[numbers[x]]
        owners, windowed = w["owners"], w["windowed"]
        columns = np.int64(0)
        for group in range(MAX_GROUPS):
            for tier in range(4):
                bit = np.uint64(tier * MAX_GROUPS + group)
                if owners >> bit & np.uint64(1) and not windowed >> np.uint64(group) & np.uint64(1):
                    lows[columns] = np.uint64(tier) << np.uint64(8) | np.uint64(group)
                    groups[columns] = group
                    columns += 1
        instance, trust, at = w["instance"], w["trust"], w["last"]
        n_notes, highest = 0, np.int64(1 << 62)
        _lengths(table, instance, lows, groups, columns, hashes, ends, base, shared, lengths)
        k = 0
        while k < queries:
            inside = at >= reach[0]
            e = ring[at & e_mask]
            then_s = -np.inf if at < 0 else (e["time_s"] if inside else forgotten_s)
            while k < queries and times[order[k]] >= then_s:
                q = order[k]
                n, i = ends[q + 1] - ends[q], lengths[q]
                if highest <= i:
                    i = highest
                    while i < n:
                        node = ids[ends[q] + i]
                        if noted[node]:
                            if not _held_then(table, instance, lows, groups, columns, names[node], changes[node]):
                                break
                        elif i == lengths[q] or (
                            i > lengths[q] and not _holds(table, instance, lows, groups, columns, hashes[ends[q] + i])
                        ):
                            break
                        i += 1
                blocks[q, x] = i
                trusts[q, x] = trust
                k += 1
            if k == queries:
                break
            if not inside or e["start"] < reach[1]:
                while k < queries:
                    blocks[order[k], x] = UNKNOWN
                    trusts[order[k], x] = trust
                    k += 1
                break
            trust = e["trust_before"]
            kind = e["kind"]
            if kind in (_CLEARED, _EPOCH, _REPLACED):
                instance = e["instance"]
                for i in range(n_notes):
                    noted[notes[i]] = False
                    changes[notes[i]] = 0
                n_notes, highest = 0, np.int64(1 << 62)
                _lengths(table, instance, lows, groups, columns, hashes, ends, base, shared, lengths)
            elif kind in (_STORED, _REMOVED):
                low = np.uint64(e["tier"]) << np.uint64(8) | np.uint64(e["group"])
                c = 0
                while c < columns and lows[c] != low:
                    c += 1
                if c < columns:
                    sign = -1 if kind == _STORED else 1
                    for i in range(e["start"], e["start"] + np.int64(e["count"])):
                        h = ring_hashes[i & h_mask]
                        bit = h >> np.uint64(7) & sieve_mask
                        if sieve[bit >> np.uint64(3)] >> np.uint8(bit & np.uint64(7)) & 1 == 0:
                            continue
                        p = np.int64(h & np.uint64(mask))
                        while slots[p] >= 0 and names[slots[p]] != h:
                            p = (p + 1) & mask
                        node = slots[p]
                        if node < 0:
                            continue
                        changes[node, c] += sign
                        if not noted[node]:
                            noted[node] = True
                            notes[n_notes] = node
                            n_notes += 1
                            highest = min(highest, depths[node])
            at = e["prev"]
        for i in range(n_notes):
            noted[notes[i]] = False
            changes[notes[i]] = 0


def held_at(
    state: Residency, workers: Sequence[int], chains: Sequence[U64], times_s: Sequence[float]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Prefix blocks that each worker held just after its last event at or before a time, and its trust then.

    workers: numbers of the pool's ranks, the same for all queries; chains: block names of each query, as of a prompt; times_s: the
    moment of each query (unix seconds). Returns (blocks i32, trust u8: `residency.BLIND`, `DEGRADED`, `EXACT`), both of
    shape (queries, workers). blocks -1: the ring of recent events no longer reaches back. Windowed groups do not count,
    and a block is held when each other group of the worker has a copy of it on any tier, as in `moments`.
    """
    blocks = np.zeros((len(chains), len(workers)), np.int32)
    trusts = np.zeros((len(chains), len(workers)), np.uint8)
    if not blocks.size:
        return blocks, trusts
    hashes = np.concatenate([np.asarray(c, np.uint64) for c in chains])
    ends = np.cumsum([0, *(len(c) for c in chains)], dtype=np.int64)
    slots = np.full(1 << (2 * len(hashes)).bit_length(), -1, np.int32)
    ids = np.empty(len(hashes), np.int32)
    names, depths, makers = (np.empty(len(hashes), t) for t in (np.uint64, np.int64, np.int64))
    nodes, base, shared = _number(hashes, ends, slots, ids, names, depths, makers)
    times = np.asarray(times_s, np.float64)
    _walk(
        state.table, state.ring, state.ring_hashes, state.reach(), state.forgotten_s, state.workers, np.asarray(workers, np.int64),
        hashes, ends, times, np.argsort(-times, kind="stable"), slots, ids, names[:nodes], depths, base, shared, blocks, trusts,
    )  # fmt: skip
    return blocks, trusts
