import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from router.index.prefix_index import BLIND, DEGRADED, EXACT
from router.policy.cost import Coefficients, Situation, most_cached_tokens, terms
from router.policy.policies import POLICIES

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


@pytest.mark.parametrize("seed", range(20))
def test_the_cost_kernel_agrees_with_its_naive_twin(seed):
    rng = np.random.default_rng(seed)
    n, tokens = int(rng.integers(1, 70)), int(rng.integers(1, 40_000))
    expected = rng.integers(0, tokens + 1, n)
    held = rng.integers(0, expected + 1)
    k = Coefficients(*rng.random(6), lower_tier_weight=0.6, degraded_weight=0.3)
    now = situation(
        n, tokens, expected=expected, held=held, gpu=rng.integers(0, held + 1), trust=rng.integers(0, 3, n),
        queue_s=rng.random(n), decoding=rng.integers(0, 9, n),
    )  # fmt: skip
    got = terms(now, k)
    weight = np.array((0.0, k.degraded_weight, 1.0))[now.trust]
    hit = weight * (now.gpu + k.lower_tier_weight * (now.held - now.gpu)) + (now.expected - now.held)
    hit = np.minimum(hit, most_cached_tokens(tokens, 16))
    u = tokens - hit
    prefill_s = k.a * u + k.b * u * (hit + u / 2)
    decode_s = prefill_s * k.beta * now.decoding + k.expected_output_tokens * k.c * now.decoding
    np.testing.assert_allclose(got.prefill_s, prefill_s)
    np.testing.assert_allclose(got.decode_s, decode_s)
    np.testing.assert_allclose(got.cost_s, k.alpha * now.queue_s + prefill_s + decode_s)


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
