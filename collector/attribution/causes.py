"""Why each token of one prompt was computed again: the rules, on what was found out about each block. Pure.

    prompt   | b0 | b1 | b2 | b3 | b4 | b5 |.|        hit_tokens = k                 exactly one cause for every token beyond k
             |<--- hit --->|<---- causes --->|        event_blocks: hit as told from events

For each block beyond k the first rule that fits wins (the numbers are those of `Cause`, not of the order):

    1. last block of a prompt of whole blocks, and all before it was hit            GRANULARITY
    2. it lies below event_blocks: the engine says less than the events             UNEXPLAINED
    3. another request was computing it (flights.py)                                IN_FLIGHT
    4. no worker had ever stored it before the dispatch (at or beyond ideal)        by content: TOO_SHORT, DIVERGED, NAMESPACE, FIRST_SEEN
    5. held at the moment, but a block before it was not: it shares that block's fate
    6. in the prefix that the worker held at the clock of the router's index        STALE_VIEW
    7. in the prefix that a cheaper worker held at the dispatch                     MISROUTED
    8. in the prefix that any other worker held at the dispatch                     LOAD_BYPASS
    9. lost here by a clear, a restart or a replacing snapshot                      CLEARED
   10. evicted here                                                                 EVICTED
   11. never here                                                                   EVICTED_ELSEWHERE
   12. else                                                                         UNEXPLAINED

The rest of the prompt behind its last whole block is GRANULARITY; a prompt shorter than a block is TOO_SHORT; whole blocks that have no
name (the chain is shorter than the prompt) are UNEXPLAINED, and so is everything beyond k of a request that events do not tell.

Invariant: whatever comes in, run lengths are positive and add up to the prompt's tokens, and no two neighbouring runs have the same cause.

Rejected: causes by token throughout (only content has borders inside blocks); rules asked in Python (a prompt has thousands of blocks).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numba
import numpy as np
import numpy.typing as npt

from collector.analytics.attributed import U8, U32
from collector.attribution import history
from collector.attribution.history import CLEARED, EVICTED, NEVER, RESIDENT
from schemas.causes import Cause

I64 = npt.NDArray[np.int64]

NEVER_HERE, WAS_EVICTED, WAS_CLEARED, IS_RESIDENT, UNKNOWN = NEVER, EVICTED, CLEARED, RESIDENT, history.UNKNOWN
"""What became of a block on the chosen worker, as of the moment."""

_HIT, _GRANULARITY, _TOO_SHORT, _FIRST_SEEN = int(Cause.HIT), int(Cause.GRANULARITY), int(Cause.TOO_SHORT), int(Cause.FIRST_SEEN)
_IN_FLIGHT, _STALE_VIEW, _MISROUTED, _LOAD_BYPASS = (
    int(Cause.IN_FLIGHT),
    int(Cause.STALE_VIEW),
    int(Cause.MISROUTED),
    int(Cause.LOAD_BYPASS),
)
_CLEARED, _EVICTED, _ELSEWHERE, _UNEXPLAINED = int(Cause.CLEARED), int(Cause.EVICTED), int(Cause.EVICTED_ELSEWHERE), int(Cause.UNEXPLAINED)
_NEW = 100  # to be told by content
CAUSES = len(Cause)

NO_SPANS = np.empty((0, 2), np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """What is known of one request. Blocks are counted from the first one of the prompt; -1: not known."""

    prompt_tokens: int
    block_size: int
    """0: not known."""
    blocks: int
    """Named whole blocks of the prompt."""
    hit_tokens: int
    event_blocks: int = -1
    """The hit told from events; -1: events do not tell this request, and nothing below counts."""
    ideal: int = -1
    """Blocks that had been stored anywhere before the dispatch."""
    selected: int = -1
    cheaper: int = 0
    """Longest prefix that a cheaper worker held at the dispatch."""
    elsewhere: int = 0
    """Longest prefix that any other worker held at the dispatch."""
    flights: I64 = field(default_factory=lambda: NO_SPANS)
    """Blocks [from, to) that others were computing, shape (spans, 2)."""
    fates: U8 = field(default_factory=lambda: np.empty(0, np.uint8))
    """Shape (blocks,)."""
    new: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    """No worker had stored it before it was stored after the moment; counts where `ideal` is not known; shape (blocks,)."""
    content: I64 = field(default_factory=lambda: NO_SPANS)
    """(end token, cause) of consecutive runs from the prompt's first token on, of DIVERGED, NAMESPACE or FIRST_SEEN; shape (runs, 2)."""
    shared_tokens: int = 0
    """Tokens before the first one that differs from all earlier prompts; counts where it lies inside the first block."""


@dataclass(frozen=True, slots=True, eq=False)
class Causes:
    """As in `Attributed`."""

    blocks: U8
    run_causes: U8
    run_tokens: U32

    def tokens(self) -> I64:
        """By cause, shape (causes,)."""
        return np.bincount(self.run_causes, weights=self.run_tokens, minlength=CAUSES).astype(np.int64)


def causes_of(f: Facts) -> Causes:
    """Never raises for values that do not fit together: what cannot be is cut to what can."""
    prompt = max(0, f.prompt_tokens)
    size = max(0, f.block_size)
    blocks = 0 if size == 0 else max(0, min(f.blocks, prompt // size))
    told = f.event_blocks >= 0 and len(f.fates) >= blocks and len(f.new) >= blocks
    out = np.empty(blocks, np.uint8)
    runs = np.empty((2 * blocks + len(f.content) + 8, 2), np.int64)
    n = _assign(
        prompt, size, blocks, min(max(0, f.hit_tokens), prompt), f.event_blocks if told else -1, f.ideal, f.selected, f.cheaper,
        f.elsewhere, f.flights, f.fates, f.new, f.content, f.shared_tokens, out, runs,
    )  # fmt: skip
    return Causes(out, runs[:n, 0].astype(np.uint8), runs[:n, 1].astype(np.uint32))


@numba.njit(cache=True)
def _push(runs, n, cause, tokens):  # type: ignore[no-untyped-def]
    if tokens <= 0:
        return n
    if n > 0 and runs[n - 1, 0] == cause:
        runs[n - 1, 1] += tokens
        return n
    runs[n, 0] = cause
    runs[n, 1] = tokens
    return n + 1


@numba.njit(cache=True)
def _assign(  # type: ignore[no-untyped-def]
    prompt, size, blocks, hit, event_blocks, ideal, selected, cheaper, elsewhere, flights, fates, new, content, shared, out, runs
):
    n = _push(runs, np.int64(0), np.int64(_HIT), hit)
    hit_blocks = hit // size if size > 0 else 0
    weight = np.zeros(CAUSES, np.int64)
    c_at = 0
    before = _UNEXPLAINED  # of the block before, for those that only it kept from being hit
    for i in range(blocks):
        start, end = i * size, (i + 1) * size
        if hit >= end:
            out[i] = _HIT
            continue
        lost_from = max(start, hit)
        if end == prompt and i == hit_blocks:
            cause = _GRANULARITY
        elif event_blocks < 0 or i < event_blocks:
            cause = _UNEXPLAINED
        else:
            cause = -1
            for s in range(len(flights)):
                if flights[s, 0] <= i < flights[s, 1]:
                    cause = _IN_FLIGHT
            if cause >= 0:
                pass
            elif i >= ideal if ideal >= 0 else new[i]:
                cause = _NEW
            elif fates[i] == IS_RESIDENT:
                cause = before
            elif i < selected:
                cause = _STALE_VIEW
            elif i < cheaper:
                cause = _MISROUTED
            elif i < elsewhere:
                cause = _LOAD_BYPASS
            elif fates[i] == WAS_CLEARED:
                cause = _CLEARED
            elif fates[i] == WAS_EVICTED:
                cause = _EVICTED
            elif fates[i] == NEVER_HERE:
                cause = _ELSEWHERE
            else:
                cause = _UNEXPLAINED
        if cause != _NEW:
            n = _push(runs, n, cause, end - lost_from)
            out[i] = cause if 2 * (end - lost_from) > size else _HIT
            before = cause
            continue
        weight[:] = 0
        weight[_HIT] = lost_from - start
        at = lost_from
        if i == 0 and shared > at and shared < end:
            weight[_TOO_SHORT] += shared - at
            n = _push(runs, n, np.int64(_TOO_SHORT), shared - at)
            at = shared
        while at < end:
            while c_at < len(content) and content[c_at, 0] <= at:
                c_at += 1
            to = end
            cause = _FIRST_SEEN
            if c_at < len(content):
                to = min(end, content[c_at, 0])
                cause = content[c_at, 1]
            weight[cause] += to - at
            n = _push(runs, n, cause, to - at)
            at = to
        out[i] = np.argmax(weight)
        before = _FIRST_SEEN
    named = blocks * size
    if size > 0:
        whole = prompt // size * size
        n = _push(runs, n, np.int64(_UNEXPLAINED), whole - max(named, hit))
        n = _push(runs, n, np.int64(_TOO_SHORT if prompt < size else _GRANULARITY), prompt - max(whole, hit))
    else:
        n = _push(runs, n, np.int64(_UNEXPLAINED), prompt - hit)
    return n
