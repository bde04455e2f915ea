"""Who stands in a decision's record, against a plain twin over random pools; and the cases that matter, one by one."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from router.records.candidates import MOST, listed

INTS = ("gpu", "cpu", "disk", "expected", "trust", "in_flight", "decoding", "allowed", "draining")
TERMS = ("queue_s", "prefill_s", "load_s", "decode_s", "cost_s")


def decided(workers: list[dict[str, float]], chosen: int, score: list[float] | None = None) -> Any:
    """A decision over workers that are told by what is not 0 of them; all are present and allowed unless they say otherwise."""
    usual = {"allowed": 1, "present": 1, "trust": 2}

    def column(name: str) -> list[float]:
        return [w.get(name, usual.get(name, 0)) for w in workers]

    types = {"trust": np.uint8, "allowed": np.bool_, "draining": np.bool_}
    now = SimpleNamespace(**{n: np.array(column(n), types.get(n, np.int64)) for n in INTS})
    terms = SimpleNamespace(**{n: np.array(column(n), np.float64) for n in TERMS})
    pool = SimpleNamespace(present=np.array(column("present"), np.bool_))
    choice = SimpleNamespace(score=None if score is None else np.array(score))
    return SimpleNamespace(pool=pool, target=SimpleNamespace(number=chosen), choice=choice, now=now, terms=terms)


def twin(workers: list[dict[str, float]], chosen: int, key: list[float]) -> tuple[list[int], int | None, int | None, int]:
    """(numbers, runner-up, longest, considered)."""
    here = [w for w in range(len(workers)) if workers[w].get("present", 1)]
    able = [w for w in here if workers[w].get("allowed", 1)]
    held = {w: workers[w].get("gpu", 0) + workers[w].get("cpu", 0) + workers[w].get("disk", 0) for w in here}
    numbers = [chosen, *sorted((w for w in here if w != chosen), key=lambda w: (key[w] if w in able else math.inf, w))][:MOST]
    longest = max(here, key=lambda w: (held[w], -w))
    if held[longest] and longest not in numbers:
        numbers.append(longest)
    others = [w for w in able if w != chosen]
    runner_up = min(others, key=lambda w: (workers[w]["cost_s"], w), default=None)
    return numbers, runner_up, longest if held[longest] else None, len(able)


@pytest.mark.parametrize("seed", range(60))
def test_as_its_plain_twin_says(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.choice([1, 2, 7, 8, 9, 10, 40])
    workers = [
        {
            **{name: rng.choice([0, 0, 16, 48, 1024]) for name in ("gpu", "cpu", "disk")},
            "cost_s": rng.choice([0.1, 0.2, rng.random()]),
            "queue_s": rng.random(),
            "allowed": rng.random() < 0.8,
            "present": rng.random() < 0.9,
            "in_flight": rng.randrange(9),
        }
        for _ in range(n)
    ]
    chosen = rng.randrange(n)
    workers[chosen] |= {"allowed": 1, "present": 1}
    score = [rng.choice([1.0, 2.0, 3.0]) for _ in range(n)] if rng.random() < 0.5 else None
    found = listed(decided(workers, chosen, score))
    key = [w["cost_s"] for w in workers] if score is None else score
    assert (found.numbers, found.runner_up, found.longest, found.considered) == twin(workers, chosen, key)
    for number, ints, floats in zip(found.numbers, found.ints, found.floats, strict=True):
        w = workers[number]
        assert ints[:4] == [w["gpu"] + w["cpu"] + w["disk"], w["gpu"], w["cpu"], w["disk"]]
        assert (ints[6], ints[8], floats[0], floats[4]) == (w["in_flight"], w["allowed"], w["queue_s"], w["cost_s"])
    if found.runner_up is not None:
        assert found.margin_s == pytest.approx(workers[found.runner_up]["cost_s"] - workers[chosen]["cost_s"])


def test_the_longest_prefix_is_recorded_though_its_worker_is_the_dearest_and_cannot_be_chosen() -> None:
    workers: list[dict[str, float]] = [{"cost_s": i / 100} for i in range(20)]
    workers[19] |= {"disk": 160, "allowed": 0, "draining": 1}
    found = listed(decided(workers, 0))
    assert found.numbers == [*range(MOST), 19]
    assert (found.longest, found.longest_tokens, found.ints[-1][-2:]) == (19, 160, [0, 1])


def test_a_worker_that_is_gone_is_nowhere() -> None:
    found = listed(decided([{"cost_s": 1}, {"cost_s": 0.1, "gpu": 64, "present": 0, "allowed": 0}], 0))
    assert (found.numbers, found.runner_up, found.margin_s, found.longest, found.considered) == ([0], None, None, None, 1)
