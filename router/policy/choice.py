"""What a policy is, what it answers, and the choice of the least with ties at random, in one compiled pass."""

from __future__ import annotations

import random
from typing import Protocol

import numba

from router.frozen import value
from router.policy.cost import F64, Mask, Situation, Terms


@value()
class Choice:
    """worker: index into the arrays. score: what was minimised, shape (workers,), or None."""

    worker: int
    score: F64 | None


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def choose(self, now: Situation, terms: Terms, rng: random.Random) -> Choice | None:
        """None: nobody is allowed."""


def least(score: F64, allowed: Mask, tie: float, rng: random.Random) -> Choice | None:
    """The allowed worker with the least score; among all within `tie` of it, one at random."""
    worker = _least(score, allowed, tie, rng.random())
    return None if worker < 0 else Choice(worker, score)


@numba.njit(cache=True)
def _least(score, allowed, tie, drawn):  # type: ignore[no-untyped-def]
    """drawn: uniform in [0, 1). -1: nobody."""
    best = float("inf")
    for w in range(len(score)):
        if allowed[w] and score[w] < best:
            best = score[w]
    near = 0
    for w in range(len(score)):
        if allowed[w] and score[w] <= best + tie:
            near += 1
    if best == float("inf") or near == 0:
        return -1
    turn = int(drawn * near)
    for w in range(len(score)):
        if allowed[w] and score[w] <= best + tie:
            if turn == 0:
                return w
            turn -= 1
    return -1
