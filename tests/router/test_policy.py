import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from router.index import BLIND, DEGRADED, EXACT
from router.policy import POLICIES, Coefficients, Situation, most_cached_tokens, terms

K = Coefficients()


def situation(workers=4, prompt_tokens=8000, **given):
    base = Situation(
        prompt_tokens=prompt_tokens,
        block_size=16,
        held=np.zeros(workers, np.int64),
        gpu=np.zeros(workers, np.int64),
        expected=np.zeros(workers, np.int64),
        trust=np.full(workers, EXACT, np.uint8),
        queue_s=np.zeros(workers),
        decoding=np.zeros(workers, np.int64),
        in_flight=np.zeros(workers, np.int64),
        allowed=np.ones(workers, np.bool_),
    )
    return replace(base, **{k: np.array(v, getattr(base, k).dtype) for k, v in given.items()})


def holding(held, **given):
    return situation(len(held), held=held, gpu=held, expected=given.pop("expected", held), **given)


def choose(now, policy="cost", seed=1, k=K):
    return POLICIES[policy](k).choose(now, terms(now, k), random.Random(seed))


def test_the_cost_is_the_formula():
    now = holding([0, 4000], queue_s=[0.5, 2.0], decoding=[3, 1])
    t = terms(now, K)
    u, h = 4000, 4000
    prefill = K.a * u + K.b * u * (h + u / 2)
    assert t.prefill_s[1] == pytest.approx(prefill)
    assert t.cost_s[1] == pytest.approx(K.alpha * 2.0 + prefill * (1 + K.beta * 1) + K.expected_output_tokens * K.c * 1)


def test_the_holder_is_chosen_until_its_queue_costs_more_than_the_prefill():
    assert choose(holding([0, 7984, 0, 0])).worker == 1
    assert choose(holding([0, 7984, 0, 0], queue_s=[0, 1.0, 0, 0])).worker == 1
    assert choose(holding([0, 7984, 0, 0], queue_s=[0, 5.0, 0, 0])).worker != 1


def test_expected_blocks_draw_siblings():
    assert choose(holding([0, 0, 0], expected=[0, 0, 7984])).worker == 2


def test_overlap_counts_by_trust():
    now = holding([6400, 6400, 6400], trust=[BLIND, DEGRADED, EXACT])
    prefill_s = terms(now, K).prefill_s
    assert prefill_s[0] > prefill_s[1] > prefill_s[2]
    assert prefill_s[0] == terms(situation(3), K).prefill_s[0]


def test_the_gpu_is_worth_more_than_a_lower_tier():
    now = situation(2, held=[6400, 6400], gpu=[6400, 0], expected=[6400, 6400])
    assert terms(now, K).prefill_s[0] < terms(now, K).prefill_s[1]


def test_equal_workers_share_cold_prompts():
    counts = Counter(choose(situation(), seed=s).worker for s in range(400))
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) < 160


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_takes_a_worker_that_is_not_allowed(policy):
    now = holding([0, 7984, 0, 0], allowed=[True, False, True, False])
    chosen = POLICIES[policy](K)
    rng = random.Random(1)
    assert {chosen.choose(now, terms(now, K), rng).worker for _ in range(50)} <= {0, 2}
    assert chosen.choose(situation(allowed=[False] * 4), terms(now, K), rng) is None


def test_round_robin_takes_turns():
    policy = POLICIES["round_robin"](K)
    now = situation(allowed=[True, True, False, True])
    assert [policy.choose(now, terms(now, K), random.Random(1)).worker for _ in range(6)] == [0, 1, 3, 0, 1, 3]


def test_least_loaded_takes_the_fewest_in_flight():
    assert choose(situation(in_flight=[3, 2, 1, 2]), "least_loaded").worker == 2


@pytest.mark.parametrize(("tokens", "most"), [(0, 0), (1, 0), (32, 0), (33, 32), (64, 32), (65, 64)])
def test_the_last_token_is_never_cached(tokens, most):
    assert most_cached_tokens(tokens, 32) == most
