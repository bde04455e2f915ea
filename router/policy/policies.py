"""Who takes a request: by the cost model, or by something simpler. Pure.

Ties are broken at random among costs that differ by less than `tie_s`: a fixed order would send every cold prompt to the same worker.

To add a policy: write a class with `choose`, and name it in `POLICIES`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from router.policy.cost import F64, Coefficients, Mask, Situation, Terms


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """worker: index into the arrays. score: what was minimised, shape (workers,), or None."""

    worker: int
    score: F64 | None


class Policy(Protocol):
    name: str
    version: str

    def choose(self, now: Situation, terms: Terms, rng: random.Random) -> Choice | None:
        """None: nobody is allowed."""


class Cost:
    """The least cost."""

    name = "cost"
    version = "1"

    def __init__(self, coefficients: Coefficients) -> None:
        self._tie_s = coefficients.tie_s

    def choose(self, now: Situation, terms: Terms, rng: random.Random) -> Choice | None:
        return _least(terms.cost_s, now.allowed, self._tie_s, rng)


class LeastLoaded:
    """The fewest requests in flight, whatever they hold."""

    name = "least_loaded"
    version = "1"

    def choose(self, now: Situation, terms: Terms, rng: random.Random) -> Choice | None:
        return _least(now.in_flight.astype(np.float64), now.allowed, 0.0, rng)


class Random:
    name = "random"
    version = "1"

    def choose(self, now: Situation, terms: Terms, rng: random.Random) -> Choice | None:
        able = np.flatnonzero(now.allowed)
        return Choice(int(able[rng.randrange(len(able))]), None) if len(able) else None


class RoundRobin:
    """One after the other, leaving out who is not allowed."""

    name = "round_robin"
    version = "1"

    def __init__(self) -> None:
        self._next = 0

    def choose(self, now: Situation, terms: Terms, rng: random.Random) -> Choice | None:
        n = len(now.allowed)
        for step in range(n):
            worker = (self._next + step) % n
            if now.allowed[worker]:
                self._next = worker + 1
                return Choice(worker, None)
        return None


POLICIES: dict[str, Callable[[Coefficients], Policy]] = {
    "cost": Cost,
    "round_robin": lambda _: RoundRobin(),
    "least_loaded": lambda _: LeastLoaded(),
    "random": lambda _: Random(),
}
"""By name. Each pool gets a policy of its own, since some keep state."""


def _least(score: F64, allowed: Mask, tie: float, rng: random.Random) -> Choice | None:
    able = np.where(allowed, score, np.inf)
    best = float(able.min(initial=np.inf))
    if best == np.inf:
        return None
    near = np.flatnonzero(able <= best + tie)
    return Choice(int(near[rng.randrange(len(near))] if len(near) > 1 else near[0]), score)
