import random

import pytest

from router.workers.retry_budget import RetryBudget


def test_a_burst_is_there_at_the_start_and_then_a_share_of_requests():
    budget = RetryBudget(0.2, 10)
    assert [budget.take() for _ in range(12)] == [True] * 10 + [False] * 2
    for _ in range(5):
        budget.earn()
    assert (budget.take(), budget.take(), budget.taken, budget.refused) == (True, False, 11, 3)


def test_no_more_than_the_burst_is_kept():
    budget = RetryBudget(0.5, 3)
    for _ in range(1000):
        budget.earn()
    assert [budget.take() for _ in range(4)] == [True, True, True, False]


def test_without_a_burst_there_are_no_retries():
    budget = RetryBudget(0.2, 0)
    budget.earn()
    assert not budget.take()


@pytest.mark.parametrize("seed", range(5))
def test_retries_are_never_more_than_burst_and_share(seed):
    rng, budget, came, taken = random.Random(seed), RetryBudget(0.1, 7), 0, 0
    for _ in range(5000):
        if rng.random() < 0.5:
            came += 1
            budget.earn()
        else:
            taken += budget.take()
        assert taken <= 7 + 0.1 * came + 1e-6
    assert taken > 0.09 * came
