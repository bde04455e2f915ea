"""Who was computing the same blocks at that time: all requests in flight, by their chains.

A block's name covers all before it, so two chains are equal up to some block and differ in all that follow: what two prompts have in
common is one number, found by bisection. Request q, dispatched before r and in flight when r was dispatched, computes the blocks from what
its worker held then to where the two chains part:

    q on v   |== held by v ==|---- being computed ----|~~ its own ~~
    r on w   |================= the same names =======|- others -
                             ^ from                   ^ to             r's blocks in [from, to) that it does not hit: in flight

Kept of a request until nobody who was dispatched before its end is still to be looked up. Bounded by what is open: 8 bytes a block, about
what `Join` counts.

Rejected: an index from each block to the open requests that hold it (inserting 2,000 blocks a request costs more than one probe for each
request in flight); the requests' own stores as proof (of one that failed, or is still waiting, there is none); asking at the dispatch
whether q was through with its prefill (its own store is known then or not, as the records happened to come): the span keeps the flight,
and whoever tells r asks then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from schemas.block_hash import U64

I64 = npt.NDArray[np.int64]

ROW = np.dtype(
    [
        ("started_s", "<f8"),
        ("ended_s", "<f8"),
        ("pool", "<i4"),
        ("first", "<i4"),
        ("start", "<i8"),
        ("blocks", "<i8"),
        ("order", "<i8"),
    ]
)
"""first: lowest number of the ranks that it may be on; -1: the row is free."""


MOST_SPANS = 32


@dataclass(slots=True, eq=False)
class Flight:
    """One dispatch. numbers: of the ranks that it may be on."""

    request_id: str
    started_s: float
    pool: int
    numbers: tuple[int, ...]
    row: int = -1
    ended_s: float = np.inf
    failed: bool = False
    """Nothing was computed for it."""
    prefilled_s: float = np.inf
    """Of its own store, once that is found (unix seconds): from then on it computes no more of its prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Blocks [start, end) of a prompt that a flight was computing when that prompt was dispatched."""

    start: int
    end: int
    flight: Flight


class Flights:
    def __init__(self) -> None:
        self._rows: npt.NDArray[np.void] = np.zeros(64, ROW)
        self._rows["first"] = -1
        self._flights: list[Flight | None] = [None] * 64
        self._free = list(range(63, -1, -1))
        self._blocks = np.empty(1 << 12, np.uint64)
        self._used = 0
        self._live = self._begun = 0
        self._ended: list[Flight] = []

    def __len__(self) -> int:
        return len(self._flights) - len(self._free)

    def begin(self, request_id: str, started_s: float, pool: int, numbers: tuple[int, ...], chain: U64) -> Flight:
        """numbers must not be empty."""
        flight = Flight(request_id, started_s, pool, numbers)
        if not self._free:
            n = len(self._rows)
            self._rows = np.concatenate([self._rows, np.zeros(n, ROW)])
            self._rows["first"][n:] = -1
            self._flights += [None] * n
            self._free = list(range(2 * n - 1, n - 1, -1))
        self._room(len(chain))
        row = flight.row = self._free.pop()
        self._flights[row] = flight
        self._blocks[self._used : self._used + len(chain)] = chain
        self._rows[row] = (started_s, np.inf, pool, numbers[0], self._used, len(chain), self._begun)
        self._begun += 1
        self._used += len(chain)
        self._live += len(chain)
        return flight

    def end(self, flight: Flight, time_s: float, failed: bool) -> None:
        if flight.row >= 0 and flight.ended_s == np.inf:
            self._rows["ended_s"][flight.row] = time_s
            self._ended.append(flight)
        flight.ended_s = min(flight.ended_s, time_s)
        flight.failed |= failed

    def forget(self, before_s: float) -> None:
        """Drops those that ended before before_s (unix seconds)."""
        kept = []
        for flight in self._ended:
            if flight.ended_s >= before_s:
                kept.append(flight)
                continue
            self._live -= int(self._rows["blocks"][flight.row])
            self._rows["first"][flight.row] = -1
            self._flights[flight.row] = None
            self._free.append(flight.row)
            flight.row = -1
        self._ended = kept

    def computing(self, flight: Flight, chain: U64, held: I64) -> list[Span]:
        """What others were computing of `chain` when `flight`, its own dispatch, was made.

        held: blocks of the chain's prefix that each worker number held then, i64, shape (workers,); below 0: not known, and then nobody is
        said to compute there. Of very many, the `MOST_SPANS` that reach farthest.
        """
        out = np.empty((len(self._rows), 3), np.int64)
        n = _computing(self._rows, self._blocks, flight.started_s, flight.pool, flight.row, chain, held, out)
        spans = []
        for row, start, end in out[:n].tolist():
            other = self._flights[row]
            assert other is not None
            if len(other.numbers) > 1:  # its rank is not known: the one that held most
                start = max((int(held[m]) for m in other.numbers if m < len(held)), default=-1)
            if 0 <= start < end and not other.failed:
                spans.append(Span(start, end, other))
        return sorted(spans, key=lambda s: -s.end)[:MOST_SPANS]

    def held_bytes(self) -> int:
        return self._blocks.nbytes + self._rows.nbytes

    def _room(self, blocks: int) -> None:
        """Moves the chains together when too much of the buffer is unused, else grows it."""
        if self._used + blocks <= len(self._blocks):
            return
        size = len(self._blocks)
        while size < 2 * (self._live + blocks):
            size *= 2
        fresh = np.empty(size, np.uint64)
        self._used = int(_pack(self._rows, self._blocks, fresh))
        self._blocks = fresh


@numba.njit(cache=True)
def _pack(rows, blocks, fresh):  # type: ignore[no-untyped-def]
    used = 0
    for i in range(len(rows)):
        if rows[i]["first"] < 0:
            continue
        start, n = rows[i]["start"], rows[i]["blocks"]
        for k in range(n):  # compiled much faster than a slice
            fresh[used + k] = blocks[start + k]
        rows[i]["start"] = used
        used += n
    return used


@numba.njit(cache=True)
def _computing(rows, blocks, at_s, pool, own, chain, held, out):  # type: ignore[no-untyped-def]
    """Writes (row, first block it computes, block where the chains part)."""
    n = 0
    for i in range(len(rows)):
        q = rows[i]
        if q["first"] < 0 or q["pool"] != pool or i == own or q["started_s"] > at_s or q["ended_s"] <= at_s:
            continue
        if q["started_s"] == at_s and own >= 0 and q["order"] > rows[own]["order"]:
            continue  # of two at one time the one that was told of first counts as the earlier one
        first = held[q["first"]] if q["first"] < len(held) else -1
        most = min(q["blocks"], np.int64(len(chain)))
        if first < 0 or first >= most or blocks[q["start"] + first] != chain[first]:
            continue
        low, high = first + 1, most
        while low < high:
            middle = (low + high) // 2
            if blocks[q["start"] + middle] == chain[middle]:
                low = middle + 1
            else:
                high = middle
        out[n, 0] = i
        out[n, 1] = first
        out[n, 2] = low
        n += 1
    return n
