"""Situations of a request and a few workers, for the tests of policies."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

from router.index.prefix_index import EXACT
from router.policy.choice import Choice
from router.policy.cost import Coefficients, Situation, terms
from router.policy.policies import POLICIES

K = Coefficients()


def situation(workers: int = 4, prompt_tokens: int = 8000, session: int | None = None, root: int | None = None, **given: Any) -> Situation:
    """Empty, idle, exact workers that are all allowed, but for what is given."""
    nothing = np.zeros(workers, np.int64)
    base = Situation(
        prompt_tokens, 16, nothing, nothing, nothing, nothing, np.full(workers, EXACT, np.uint8), np.zeros(workers), nothing, nothing,
        np.ones(workers, np.bool_), np.zeros(workers, np.bool_), np.full(workers, np.inf),
        np.arange(workers, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(7), session, root,
    )  # fmt: skip
    return replace(base, **{k: np.array(v, getattr(base, k).dtype) for k, v in given.items()})


def holding(held: list[int], **given: Any) -> Situation:
    """Workers that hold so many tokens of the prompt on the GPU."""
    return situation(len(held), gpu=held, expected=given.pop("expected", held), **given)


def choose(now: Situation, policy: str = "cost", seed: int = 1, k: Coefficients = K) -> Choice | None:
    return POLICIES[policy](k).choose(now, terms(now, k), random.Random(seed))


def chosen(now: Situation, policy: str = "cost", seed: int = 1) -> int:
    found = choose(now, policy, seed)
    assert found is not None
    return found.worker
