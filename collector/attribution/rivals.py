"""Other workers that held more of a prompt, and whether they would have been cheaper by the router's own costs, as its decision tells.

A policy without a cost (round robin, a session's hash) still records the terms that a cost is made of; then the cost is
J = alpha * queue + prefill + load + decode (see router/policy/cost.py) with that model's usual alpha. A worker that the decision does
not list is dearer than all that it lists, where it lists only the best. Where neither tells, what is left is the prefill: who held more
computes less, so it counts as cheaper, by how much not being known. A worker that could not be chosen (down, draining) is no cheaper
choice.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from collector.join import chosen_of
from schemas.requests import Candidate, Decision

ALPHA = 0.5
"""Weight of waiting in the router's cost model where it says nothing else."""


@dataclass(frozen=True, slots=True)
class Rival:
    """Another worker (or rank) and the prefix that it held at the dispatch."""

    worker: str
    rank: int | None
    blocks: int
    cheaper: bool
    gain_s: float | None
    """Cost of the chosen worker minus its cost, seconds; None: not told."""


def rivals_of(d: Decision, held: Iterable[tuple[str, int | None, int]]) -> tuple[Rival, ...]:
    """held: (worker, rank, blocks) of the other ranks of the pool. Only those that can matter: of two, the one with more blocks and more
    gain makes the other superfluous."""
    chosen = chosen_of(d)
    listed = {(c.worker, c.rank): c for c in d.candidates}
    beyond_s = _least_unlisted_s(d, chosen)
    out = []
    unlisted: tuple[int, str, int | None] | None = None  # of these only the one that holds most can matter
    for worker, rank, blocks in held:
        if blocks <= 0:
            continue
        c = listed.get((worker, rank)) or listed.get((worker, None))
        gain_s: float | None = None
        if c is not None and chosen is not None and c is not chosen:
            if c.allowed is False:
                out.append(Rival(worker, rank, blocks, False, None))
                continue
            gain_s = _gain_s(chosen, c)
            cheaper = gain_s is None or gain_s > 0
            out.append(Rival(worker, rank, blocks, cheaper, gain_s))
        elif unlisted is None or blocks > unlisted[0]:
            unlisted = blocks, worker, rank
    if unlisted is not None:
        out.append(Rival(unlisted[1], unlisted[2], unlisted[0], beyond_s is None or beyond_s < 0, None))
    return _undominated(out)


def _undominated(rivals: list[Rival]) -> tuple[Rival, ...]:
    kept: list[Rival] = []
    for r in sorted(rivals, key=lambda r: (-r.blocks, not r.cheaper, _order(r.gain_s), r.worker, r.rank or 0)):
        if not any(k.cheaper >= r.cheaper and (r.gain_s is None or (k.gain_s is not None and k.gain_s >= r.gain_s)) for k in kept):
            kept.append(r)
    return tuple(kept)


def _order(gain_s: float | None) -> float:
    return float("inf") if gain_s is None else -gain_s


def _least_unlisted_s(d: Decision, chosen: Candidate | None) -> float | None:
    """Least that an unlisted worker costs beyond the chosen one; None: not known."""
    if chosen is None or d.workers_considered is None or d.workers_considered <= sum(c.allowed is not False for c in d.candidates):
        return None
    gains = [_gain_s(chosen, c) for c in d.candidates if c is not chosen and c.allowed is not False]
    known = [-g for g in gains if g is not None]
    return max(known) if known and len(known) == len(gains) else None


def _gain_s(chosen: Candidate, other: Candidate) -> float | None:
    if chosen.cost_s is not None and other.cost_s is not None:
        return chosen.cost_s - other.cost_s
    costs = _from_terms(chosen), _from_terms(other)
    if costs[0] is not None and costs[1] is not None:
        return costs[0] - costs[1]
    if chosen.prefill_s is not None and other.prefill_s is not None:
        return chosen.prefill_s - other.prefill_s
    return None


def _from_terms(c: Candidate) -> float | None:
    if c.queue_s is None or c.prefill_s is None:
        return None
    return ALPHA * c.queue_s + c.prefill_s + (c.load_s or 0.0) + (c.decode_s or 0.0)
