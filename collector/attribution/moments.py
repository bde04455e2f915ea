"""What a request found in the cache, told after the fact from KV events: the rule "event order".

The engine looks a prompt up once, when it admits the request, and says nothing then. But what it computes it stores, and so the request's
*own prefill store* marks the moment: the STORED event, published while the request ran, whose hashes run exactly to the last whole block of
its prompt. Every event before it happened before the lookup could be answered otherwise; so the hit is the longest prefix that was resident
just before it, at most the whole blocks of the prompt less one token (an engine always computes the last token).

    ring of the worker   ... S(p0..p3)  R(x)  S(p4..p9 = own store)  S(d0)  R(p2) ...  now
                                              ^ state wanted: the table of now, with everything from here on undone

A prefill in chunks stores more than once: earlier stores of the same chain that nobody else's prompt ends with, joining up with the own
store, belong to it, and the state before the first of them counts. A wholly cached prompt has no own store: then the first decode store
(its parent is the last whole block) marks the moment, else the first byte, else the end of the answer.
One store belongs to one request: of several with the same blocks in flight together, the one that started first takes the first store.
Token ids of decode stores are unknown here, so requests that share all whole blocks and differ in the tail are told apart by order alone.

NULL instead of a number when the ring no longer reaches back, or when the worker's trust was not exact between that moment and the end.
This equals vLLM's `cached_tokens` in 167 of 167 recorded answers. Pure: no clock, no I/O.

Rejected: replaying all events of a worker for every request (exact, but quadratic); frames in place of events (requests admitted in one
step hit each other's blocks: 163 of 167).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from collector.attribution.stores import FINAL, Stores
from collector.residency import _CLEARED, _EPOCH, _GAP, _REPLACED, _STORED, EXACT, MAX_GROUPS, Residency
from collector.slots import count_of, touch
from schemas.block_hash import U64

_OK, _TOO_FAR, _UNTRUSTED, _NO_RANK = range(4)
TOLD, TOO_FAR, UNTRUSTED, NO_RANK = range(4)
WHY = (
    "",
    "the ring of recent events no longer reaches back",
    "the worker's events were not complete then",
    "no event of this request, so its rank is unknown",
)
NOT_STORED = 0xFFFFFFFF
"""Stands for a prior where the block was not stored since the moment."""


@dataclass(slots=True, eq=False)
class Running:
    """A request on its worker, from its decision until its hit is told."""

    request_id: str
    chain: U64
    hit_blocks_max: int
    """min(whole blocks, (prompt tokens - 1) // block size)."""
    started_s: float
    first_byte_s: float | None = None
    ended_s: float | None = None
    """None: in flight."""
    own: tuple[int, int] | None = None
    """(worker number, ring event) of its own prefill store."""
    chunks: tuple[int, ...] | None = None
    """Ring events of that prefill's earlier stores, newest first; None: not looked for yet."""
    decode: tuple[int, int] | None = None

    @property
    def claims(self) -> list[int]:
        """Ring events that are its own."""
        return [c[1] for c in (self.own, self.decode) if c is not None] + list(self.chunks or ())


@dataclass(frozen=True, slots=True)
class Hit:
    """blocks None: cannot be told, `why` says so. worker: the rank's number; None: unknown."""

    blocks: int | None
    worker: int | None
    why: str


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """What the worker's cache was at the moment of a request's prefill, and at the router's clock; arrays by block of the chain."""

    hit: Hit
    code: int
    """TOLD; else nothing but hit.worker and moment_s is known."""
    moment_s: float
    """Of the own store; else of the first byte, else of the end (unix seconds)."""
    selected: int | None = None
    """Blocks of the longest prefix held at the router's clock; None: not known."""
    resident: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    """1: held at the moment."""
    prior: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """History's word (see history.py) just before the block's first store since the moment, NOT_STORED where there was none."""
    stored_s: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """When that store was (unix seconds); NaN: none."""


@numba.njit(cache=True)
def _is_run(ring, ring_hashes, at, chain, end):  # type: ignore[no-untyped-def]
    """Blocks before the store's first one when its hashes are chain[m:end] with the right parent, else -1."""
    e = ring[at & (len(ring) - 1)]
    count = np.int64(e["count"])
    m = end - count
    if m < 0 or (m > 0 and e["parent"] != chain[m - 1]):
        return -1
    h_mask = len(ring_hashes) - 1
    for k in range(count):
        if ring_hashes[(e["start"] + k) & h_mask] != chain[m + k]:
            return -1
    return m


@numba.njit(cache=True)
def _chunks(ring, ring_hashes, reach, own, chain, first, since_s, out):  # type: ignore[no-untyped-def]
    """Earlier stores of the same prefill, newest first, to `out`; marks them taken. Returns how many."""
    n = 0
    e_mask = len(ring) - 1
    at = ring[own & e_mask]["prev"]
    seq = ring[own & e_mask]["seq"]
    while at >= reach[0] and first > 0:
        e = ring[at & e_mask]
        if e["time_s"] < since_s or e["start"] < reach[1]:
            break
        if e["kind"] == _STORED and e["taken"] == 0 and e["seq"] < seq and e["count"] > 0:
            m = _is_run(ring, ring_hashes, at, chain, first)
            if m >= 0:
                e["taken"] = 1
                out[n] = at
                n += 1
                first = m
        at = e["prev"]
    return n


@numba.njit(cache=True)
def _covers(ring, reach, last, since_s):  # type: ignore[no-untyped-def]
    """The ring still holds all the worker's events since since_s."""
    at = last
    while at >= reach[0]:
        e = ring[at & (len(ring) - 1)]
        if e["start"] < reach[1]:
            return False
        if e["time_s"] < since_s:
            return True
        at = e["prev"]
    return at < 0


@numba.njit(cache=True)
def _first_after(ring, reach, last, time_s):  # type: ignore[no-untyped-def]
    """The worker's first event later than time_s (or one beyond its last)."""
    found = last + 1
    at = last
    while at >= reach[0]:
        e = ring[at & (len(ring) - 1)]
        if e["time_s"] <= time_s:
            break
        found = at
        at = e["prev"]
    return found


@numba.njit(cache=True)
def _is_held(held, groups, columns, i):  # type: ignore[no-untyped-def]
    """Block i is held in each group, in any tier."""
    for c in range(columns):
        if held[i, c] > 0:
            continue
        found = False
        for d in range(columns):
            if groups[d] == groups[c] and held[i, d] > 0:
                found = True
        if not found:
            return False
    return columns > 0


@numba.njit(cache=True)
def _prefix(held, groups, columns, most):  # type: ignore[no-untyped-def]
    """Blocks from the first on, at most `most`, that are held in each group, in any tier."""
    for i in range(most):
        if not _is_held(held, groups, columns, i):
            return i
    return most


@numba.njit(cache=True)
def _look(  # type: ignore[no-untyped-def]
    table, ring, ring_hashes, ring_prior, reach, last, instance, trust, epoch, owners, windowed, chain, most, before, until_s,
    has_clock, clock_epoch, clock_seq, resident, prior, stored,
):  # fmt: skip
    """One walk back over the worker's events, from now to just before ring event `before` (the moment) and on to the router's clock.

    Writes, by block of the chain: resident (1: held at the moment), prior and stored (of the earliest store since the moment: its
    ring_prior, and the ring event; -1: none).
    Returns (hit: longest prefix held at the moment, at most `most` blocks; code; selected: longest prefix held at the clock, -1: not
    known).
    """
    n = len(chain)
    lows = np.empty(64, np.uint64)
    groups = np.empty(64, np.int64)
    columns = np.int64(0)
    for bit in range(64):
        group = bit % MAX_GROUPS
        if owners >> np.uint64(bit) & np.uint64(1) and not (windowed >> np.uint64(group) & np.uint64(1)):
            lows[columns] = np.uint64(bit // MAX_GROUPS) << np.uint64(8) | np.uint64(group)
            groups[columns] = group
            columns += 1
    slots = 4
    while slots < 2 * n:
        slots *= 2
    position = np.full(slots, -1, np.int64)
    for i in range(n):
        at = np.int64(chain[i] & np.uint64(slots - 1))
        while position[at] >= 0:
            at = (at + 1) & (slots - 1)
        position[at] = i
    held = np.zeros((n, max(columns, np.int64(1))), np.int64)
    noise = np.uint64(0)
    fill = True
    hit = np.int64(-1)
    selected = np.int64(-1)
    wants_clock = has_clock and epoch >= clock_epoch
    behind = 0
    at = last
    while True:
        if fill:
            for c in range(columns):
                owner = np.uint64(instance) << np.uint64(10) | lows[c]
                noise |= touch(table, chain, 0, n, owner)
                for i in range(n):
                    held[i, c] = count_of(table, chain[i], owner)
            fill = False
        if at < before and hit < 0:
            if trust != EXACT:
                return np.int64(0), _UNTRUSTED, np.int64(-1), noise
            for i in range(n):
                resident[i] = _is_held(held, groups, columns, i)
            hit = _prefix(held, groups, columns, most)
        readable = at >= reach[0] and ring[at & (len(ring) - 1)]["start"] >= reach[1]
        e = ring[at & (len(ring) - 1)]
        kind = e["kind"]
        if wants_clock and (epoch < clock_epoch or (epoch == clock_epoch and (at < 0 or (readable and _applied(e, clock_seq))))):
            if trust == EXACT:
                selected = _prefix(held, groups, columns, n)
            wants_clock = False
        if hit >= 0 and (not wants_clock or not readable or behind == MAX_BEHIND):
            return hit, _OK, selected, noise
        if not readable:
            return np.int64(0), _TOO_FAR, np.int64(-1), noise
        behind += 1 if hit >= 0 else 0
        if hit < 0 and e["time_s"] <= until_s and trust != EXACT:
            return np.int64(0), _UNTRUSTED, np.int64(-1), noise
        trust = e["trust_before"]
        if kind in (_CLEARED, _EPOCH, _REPLACED):
            instance = e["instance"]
            if kind == _EPOCH:
                epoch = e["parent"]
            fill = True
        elif e["count"] > 0:
            low = np.uint64(e["tier"]) << np.uint64(8) | np.uint64(e["group"])
            for c in range(columns):
                if lows[c] == low:
                    sign = -1 if kind == _STORED else 1
                    for k in range(np.int64(e["count"]) - 1, -1, -1):
                        h_at = (e["start"] + k) & (len(ring_hashes) - 1)
                        h = ring_hashes[h_at]
                        p = np.int64(h & np.uint64(slots - 1))
                        while position[p] >= 0:
                            i = position[p]
                            if chain[i] == h:
                                held[i, c] += sign
                                if kind == _STORED and hit < 0:
                                    prior[i] = ring_prior[h_at]
                                    stored[i] = at
                                break
                            p = (p + 1) & (slots - 1)
        at = e["prev"]


@numba.njit(cache=True)
def _applied(e, clock_seq):  # type: ignore[no-untyped-def]
    """Whether an index at this sequence of the event's epoch had applied it. The first event of an epoch is in all its clocks."""
    return e["kind"] == _EPOCH or (e["kind"] != _GAP and e["seq"] <= clock_seq)


MAX_BEHIND = 1 << 16
"""Events below the moment that are walked for the router's clock; an index further behind is not looked up."""


def assign(
    state: Residency, ranks: Sequence[int], running: Iterable[Running], tolerance_s: float = 0.0, stores: Stores | None = None
) -> None:
    """Gives the worker's stores to the requests that made them. ranks: the numbers of the worker's ranks, by rank.

    running: all requests of that worker that are not told yet, in flight ones included: they may have the older claim.
    tolerance_s: how far the clocks of router and engine may differ. stores: kept from call to call, so that no event is looked at twice.
    """
    waiting = sorted((r for r in running if len(r.chain)), key=lambda r: r.started_s)
    open_ = [r for r in waiting if r.own is None or r.decode is None]
    if not open_:
        return
    since_s: dict[int, float] = {}
    for r in open_:
        since_s.setdefault(int(r.chain[-1]), r.started_s - tolerance_s)
    stores = stores or Stores()
    reach = state.reach()
    finals: dict[int, list[tuple[int, int]]] = defaultdict(list)
    decodes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number in ranks:
        for tail, found in stores.find(state, number, since_s).items():
            for at, role in found:
                (finals if role == FINAL else decodes)[tail].append((number, at))
    e_mask = len(state.ring) - 1
    ring = state.ring
    for r in open_:
        if r.own is None:
            for number, at in finals[int(r.chain[-1])]:
                e = ring[at & e_mask]
                if (
                    not e["taken"]
                    and r.started_s - tolerance_s <= e["time_s"] <= (np.inf if r.ended_s is None else r.ended_s + tolerance_s)
                    and _is_run(ring, state.ring_hashes, at, r.chain, len(r.chain)) >= 0
                ):
                    e["taken"] = 1
                    r.own = number, at
                    break
    for r in open_:  # after all own stores are known, and the earlier request first: its chunks may fit a later one's chain as well
        if r.own is not None and r.chunks is None:
            at = r.own[1]
            first = len(r.chain) - int(ring[at & e_mask]["count"])
            events = np.empty(max(first, 0), np.int64)
            # Without the tolerance: an answer that the prompt goes on with may have ended just before.
            found = _chunks(ring, state.ring_hashes, reach, at, r.chain, first, r.started_s, events)
            r.chunks = tuple(events[:found].tolist())
    for r in open_:
        if r.decode is None:
            for number, at in decodes[int(r.chain[-1])]:
                e = ring[at & e_mask]
                if (
                    not e["taken"]
                    and not _is_chunk(state, e, len(r.chain), waiting, tolerance_s)
                    and (r.own is None or r.own[0] == number)
                    and r.started_s - tolerance_s <= e["time_s"] <= (np.inf if r.ended_s is None else r.ended_s + tolerance_s)
                ):
                    e["taken"] = 1
                    r.decode = number, at
                    break


def _is_chunk(state: Residency, e: Any, depth: int, waiting: Sequence[Running], tolerance_s: float) -> bool:
    """The store goes on with the prompt of a request in flight, so it is no answer's (a later turn's prompt has the answer in it, too)."""
    first = state.ring_hashes[int(e["start"]) & (len(state.ring_hashes) - 1)]
    return any(len(x.chain) > depth and x.chain[depth] == first and x.started_s - tolerance_s <= e["time_s"] for x in waiting)


def look(state: Residency, ranks: Sequence[int], request: Running, clock: tuple[int, int] | None = None) -> Look:
    """What a request found that has ended, after `assign`. Hits count at most `hit_blocks_max` blocks.

    clock: (epoch, seq) of the router's index for the rank that is found.
    """
    if request.ended_s is None:
        raise ValueError(f"request {request.request_id} has not ended")
    if not len(request.chain):
        return Look(Hit(0, None, ""), TOLD, moment_s=_byte_s(request))
    reach = state.reach()
    e_mask = len(state.ring) - 1
    if request.own is not None:
        number, before = request.own
        if request.chunks:
            before = request.chunks[-1]
        if before < reach[0]:
            return _untold(TOO_FAR, number, request)
        until_s, moment_s = -np.inf, float(state.ring[before & e_mask]["time_s"])
    elif request.decode is not None:
        number, before = request.decode
        if before < reach[0]:
            return _untold(TOO_FAR, number, request)
        until_s, moment_s = request.ended_s, _byte_s(request)
    elif len(ranks) == 1:
        number = ranks[0]
        moment_s = _byte_s(request)
        before = int(_first_after(state.ring, reach, state.workers[number]["last"], moment_s))
        until_s = request.ended_s
    else:
        return _untold(NO_RANK, None, request)
    w = state.workers[number]
    if not _covers(state.ring, reach, w["last"], request.started_s):
        return _untold(TOO_FAR, number, request)  # an own store may have been forgotten
    n = len(request.chain)
    resident, prior, stored = np.zeros(n, np.uint8), np.zeros(n, np.uint32), np.full(n, -1, np.int64)
    epoch, seq = (0, 0) if clock is None else clock
    blocks, code, selected, _ = _look(
        state.table, state.ring, state.ring_hashes, state.ring_prior, reach, w["last"], w["instance"], w["trust"], w["epoch"],
        w["owners"], w["windowed"], request.chain, min(n, request.hit_blocks_max), before, until_s,
        clock is not None, np.uint64(epoch), np.uint64(seq), resident, prior, stored,
    )  # fmt: skip
    if code != TOLD:
        return _untold(int(code), number, request)
    prior[stored < 0] = NOT_STORED
    stored_s = np.where(stored >= 0, state.ring["time_s"][stored & e_mask], np.nan)
    return Look(
        Hit(int(blocks), number, ""), TOLD, moment_s, None if selected < 0 else int(selected), resident, prior, stored_s,
    )  # fmt: skip


def tell(state: Residency, ranks: Sequence[int], request: Running) -> Hit:
    """The hit alone."""
    return look(state, ranks, request).hit


def event_time_s(state: Residency, event: int) -> float:
    """Of a ring event that can still be read (unix seconds)."""
    return float(state.ring["time_s"][event & (len(state.ring) - 1)])


def _byte_s(request: Running) -> float:
    assert request.ended_s is not None
    return request.ended_s if request.first_byte_s is None else request.first_byte_s


def _untold(code: int, number: int | None, request: Running) -> Look:
    return Look(Hit(None, number, WHY[code]), code, _byte_s(request))
