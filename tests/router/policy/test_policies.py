import random

import pytest

from router.policy.cost import terms
from router.policy.policies import POLICIES, policies_help
from tests.router.policy.situations import K, chosen, holding, situation


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_takes_a_worker_that_is_not_allowed(policy):
    rng, made = random.Random(1), POLICIES[policy](K)
    for session in (None, *range(30)):
        now = holding([0, 7984, 0, 0], allowed=[True, False, True, False], in_flight=[99, 0, 1, 0], session=session)
        assert made.choose(now, terms(now, K), rng).worker in (0, 2)
    nobody = situation(allowed=[False] * 4, session=1)
    assert made.choose(nobody, terms(nobody, K), rng) is None
    none_at_all = situation(0)
    assert made.choose(none_at_all, terms(none_at_all, K), rng) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_deterministic_under_its_random_source(policy):
    def run():
        rng, made, load = random.Random(5), POLICIES[policy](K), random.Random(6)
        picks = []
        for i in range(60):
            now = holding([0, 160 * (i % 7), 160 * (i % 5), 0], in_flight=[load.randrange(9) for _ in range(4)], root=i % 11)
            picks.append(made.choose(now, terms(now, K), rng).worker)
        return picks

    assert run() == run()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_bears_workers_that_come(policy):
    rng, made = random.Random(5), POLICIES[policy](K)
    for workers in (2, 5, 70):
        now = situation(workers, session=4)
        assert 0 <= made.choose(now, terms(now, K), rng).worker < workers


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_workers_share_cold_prompts(policy):
    rng, made, counts = random.Random(2), POLICIES[policy](K), [0] * 4
    for root in range(400):
        now = situation(root=root)
        counts[made.choose(now, terms(now, K), rng).worker] += 1
    assert max(counts) < 160


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_is_named_as_it_is_registered_and_told_in_the_help(policy):
    assert POLICIES[policy](K).name == policy
    assert f"{policy}: {POLICIES[policy].help}" in policies_help()


def test_the_cost_policy_takes_the_least_cost():
    assert chosen(holding([0, 0, 4000, 0])) == 2
