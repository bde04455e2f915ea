import random
from collections import Counter

import numpy as np
import pytest

from router.policy.choice import least


@pytest.mark.parametrize("seed", range(30))
def test_the_least_agrees_with_its_naive_twin(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 40))
    score, allowed = rng.integers(0, 6, n) / 2.0, rng.random(n) < 0.6
    found = least(score, allowed, 0.5, random.Random(seed))
    able = [w for w in range(n) if allowed[w]]
    if not able:
        assert found is None
        return
    near = [w for w in able if score[w] <= min(score[able]) + 0.5]
    assert found is not None
    assert found.worker == near[int(random.Random(seed).random() * len(near))]


def test_ties_are_shared_evenly_and_only_among_the_nearest():
    rng = random.Random(3)
    score, allowed = np.array([1.0, 1.0002, 1.001, 1.0, 0.5]), np.array([True, True, True, True, False])
    counts = Counter(least(score, allowed, 0.0005, rng).worker for _ in range(900))
    assert set(counts) == {0, 1, 3}
    assert min(counts.values()) > 240


def test_scores_that_are_no_number_or_infinite_are_nobodys():
    assert least(np.array([np.inf, np.nan]), np.array([True, True]), 0.1, random.Random(1)) is None
    assert least(np.array([np.nan, 2.0]), np.array([True, True]), 0.1, random.Random(1)).worker == 1
