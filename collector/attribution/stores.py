"""Stores that somebody waits for: those that end with the last block of a request's prompt, and those that follow it. Each event is looked
at once, however long a request is in flight.

    worker's events   ... e3 e4 e5 | e6 e7 e8 | now       upto: all before was looked at for the tails of before
    a tail of before               |<-------->|           only what is new
    a new tail        |<---------- since_s ... ---------->|

Found is what a walk from now back to the oldest request would find; what the ring has forgotten since is left out. Bounded by the requests
that are open. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numba
import numpy as np
import numpy.typing as npt

from collector.residency import _STORED, Residency
from schemas.block_hash import U64

FINAL, DECODE = 0, 1
MAX_MATCHES = 1 << 16


@numba.njit(cache=True)
def _scan(ring, ring_hashes, reach, last, upto, tails, since_s, out):  # type: ignore[no-untyped-def]
    """Walks back from `last` to `since_s`, to event `upto` at most; writes (event, tail, role) of stores that end with or follow a tail.

    tails: sorted. Returns how many.
    """
    e_mask = len(ring) - 1
    h_mask = len(ring_hashes) - 1
    n = 0
    at = last
    while at >= reach[0] and at > upto:
        e = ring[at & e_mask]
        if e["time_s"] < since_s:
            break
        if e["kind"] == _STORED and e["count"] > 0 and e["start"] >= reach[1]:
            h = ring_hashes[(e["start"] + np.int64(e["count"]) - 1) & h_mask]
            i = np.searchsorted(tails, h)
            if i < len(tails) and tails[i] == h and n < len(out):
                out[n, 0] = at
                out[n, 1] = i
                out[n, 2] = FINAL
                n += 1
            i = np.searchsorted(tails, e["parent"])
            if i < len(tails) and tails[i] == e["parent"] and n < len(out):
                out[n, 0] = at
                out[n, 1] = i
                out[n, 2] = DECODE
                n += 1
        at = e["prev"]
    return n


@dataclass(slots=True)
class _Tail:
    since_s: float
    found: list[tuple[int, int]] = field(default_factory=list)
    """(event, role), oldest first."""


class Stores:
    def __init__(self) -> None:
        self._tails: dict[int, dict[int, _Tail]] = {}
        self._upto: dict[int, int] = {}
        self._out: npt.NDArray[np.int64] = np.empty((MAX_MATCHES, 3), np.int64)

    def find(self, state: Residency, number: int, since_s: dict[int, float]) -> dict[int, list[tuple[int, int]]]:
        """(event, role) of the worker's stores by tail, oldest first. since_s: from when on, by tail (unix seconds).

        Tails that are not asked for are forgotten.
        """
        before = self._tails.get(number, {})
        last, upto = int(state.workers[number]["last"]), self._upto.get(number, -1)
        now = {tail: before[tail] for tail, at_s in since_s.items() if tail in before and before[tail].since_s <= at_s}
        self._collect(state, last, upto, -np.inf, now)
        fresh = {tail: _Tail(at_s) for tail, at_s in since_s.items() if tail not in now}
        if fresh:
            self._collect(state, last, -1, min(t.since_s for t in fresh.values()), fresh)
        self._tails[number], self._upto[number] = now | fresh, last
        low, low_hash = (int(x) for x in state.reach())
        starts = state.ring["start"]
        out = {}
        for tail, t in self._tails[number].items():
            while t.found and (t.found[0][0] < low or starts[t.found[0][0] & (len(starts) - 1)] < low_hash):
                del t.found[0]
            out[tail] = t.found
        return out

    def _collect(self, state: Residency, last: int, upto: int, since_s: float, tails: dict[int, _Tail]) -> None:
        if not tails or last <= upto:
            return
        named: U64 = np.array(sorted(tails), np.uint64)
        n = _scan(state.ring, state.ring_hashes, state.reach(), last, upto, named, since_s, self._out)
        names = named.tolist()
        for at, i, role in self._out[:n][::-1].tolist():
            tails[names[i]].found.append((at, role))
