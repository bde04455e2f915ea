"""Who takes a request: by the cost model, or by something simpler (baselines.py). Pure.

Ties are broken at random among costs that differ by less than `tie_s`: a fixed order would send every cold prompt to the same worker, and
all replicas of a router to the same one.

A policy sees who may be chosen as `Situation.allowed`, with the rules of eligible.py applied; it gets its randomness from its caller and is
deterministic under it. To add a policy: write a class with `choose`, and name it in `POLICIES`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from router.policy.baselines import (
    BoundedLoadHash,
    CacheAware,
    LeastLoaded,
    MaxPrefix,
    Random,
    RoundRobin,
    SessionHash,
)
from router.policy.choice import Choice, Policy, least
from router.policy.cost import Coefficients, Situation, Terms

__all__ = ["POLICIES", "Choice", "Cost", "Kind", "Policy"]


@dataclass(slots=True)
class Cost:
    """The least cost."""

    tie_s: float
    name: str = "cost"
    version: str = "2"

    def choose(self, now: Situation, terms: Terms, rng: random.Random) -> Choice | None:
        return least(terms.cost_s, now.allowed, self.tie_s, rng)


class Kind(NamedTuple):
    """A policy that can be named in the settings."""

    make: Callable[[Coefficients], Policy]
    help: str

    def __call__(self, coefficients: Coefficients) -> Policy:
        return self.make(coefficients)


POLICIES: dict[str, Kind] = {
    "cost": Kind(lambda k: Cost(k.tie_s), "the least seconds: queue, prefill of what is not held, loading, decoding beside it"),
    "round_robin": Kind(lambda _: RoundRobin(), "one after the other"),
    "least_loaded": Kind(lambda _: LeastLoaded(), "the fewest requests in flight"),
    "random": Kind(lambda _: Random(), "anyone"),
    "session_hash": Kind(lambda _: SessionHash(), "always the same worker for a session, without one for a first block"),
    "bounded_load_hash": Kind(lambda _: BoundedLoadHash(), "the same, but nobody above 1.25 times the mean requests in flight"),
    "cache_aware": Kind(lambda _: CacheAware(), "the longest prefix if it is over 0.3 of the prompt, unless load is far apart"),
    "max_prefix": Kind(lambda _: MaxPrefix(), "the longest prefix, whatever the load"),
}
"""By name. Each pool gets a policy of its own, since some keep state."""


def policies_help() -> str:
    return "; ".join(f"{name}: {kind.help}" for name, kind in POLICIES.items())
