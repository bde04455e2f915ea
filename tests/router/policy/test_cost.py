from dataclasses import astuple, replace

import numpy as np
import pytest

from router.index.prefix_index import BLIND, DEGRADED, EXACT
from router.policy.cost import Coefficients, Rates, Situation, most_cached_tokens, table_of, terms
from tests.router.policy.situations import K, chosen, holding, situation


def naive_terms(now: Situation, k: Coefficients, rates: list[Rates]) -> list[tuple[float, float, float, float]]:
    """The formula, worker by worker, over all three ways to use lower tiers."""
    out = []
    most = most_cached_tokens(now.prompt_tokens, now.block_size)
    for w, r in enumerate(rates):
        weight = {BLIND: 0.0, DEGRADED: k.degraded_weight, EXACT: 1.0}[int(now.trust[w])]
        hoped = now.expected[w] - now.gpu[w] - now.cpu[w] - now.disk[w]
        on_gpu = min(most, weight * now.gpu[w] + hoped)
        from_cpu = min(most - on_gpu, weight * now.cpu[w])
        from_disk = min(most - on_gpu - from_cpu, weight * now.disk[w])
        ways = []
        for hit, load_s in (
            (on_gpu, 0.0),
            (on_gpu + from_cpu, from_cpu * r.load_cpu_s_per_token),
            (on_gpu + from_cpu + from_disk, from_cpu * r.load_cpu_s_per_token + from_disk * r.load_disk_s_per_token),
        ):
            ways.append((r.prefill_s(now.prompt_tokens - hit, hit), load_s))
        prefill_s, load_s = min(ways, key=sum)
        decode_s = prefill_s * k.beta * now.decoding[w] + k.expected_output_tokens * (r.c0 + r.c1 * now.decoding[w])
        out.append((prefill_s, load_s, decode_s, k.alpha * now.queue_s[w] + prefill_s + load_s + decode_s))
    return out


def test_the_cost_is_the_formula():
    now = holding([0, 4000], queue_s=[0.5, 2.0], decoding=[3, 1])
    k = replace(K, rates=Rates(base_s=0.01, c0=0.02))
    t, r = terms(now, k), k.rates
    u, h = 4000, 4000
    prefill = 0.01 + r.a * u + r.b * u * (h + u / 2)
    assert t.prefill_s[1] == pytest.approx(prefill)
    assert t.cost_s[1] == pytest.approx(k.alpha * 2.0 + prefill * (1 + k.beta * 1) + k.expected_output_tokens * (0.02 + r.c1))


@pytest.mark.parametrize("seed", range(30))
def test_the_cost_kernel_agrees_with_its_naive_twin(seed):
    rng = np.random.default_rng(seed)
    n, tokens = int(rng.integers(1, 70)), int(rng.integers(1, 40_000))
    parts = np.sort(rng.integers(0, tokens + 1, (4, n)), axis=0)
    k = Coefficients(*rng.random(3), degraded_weight=0.3)
    rates = [Rates(*(rng.random(7) * astuple(Rates(0.1, 2e-4, 2e-9, 0.1, 1e-4, 1e-4, 3e-4)))) for _ in range(n)]
    now = situation(
        n, tokens, gpu=parts[0], cpu=parts[1] - parts[0], disk=parts[2] - parts[1], expected=parts[3], trust=rng.integers(0, 3, n),
        queue_s=rng.random(n), decoding=rng.integers(0, 9, n),
    )  # fmt: skip
    got = terms(now, k, table_of(rates))
    want = np.array(naive_terms(now, k, rates)).T
    for row, name in zip(want, ("prefill_s", "load_s", "decode_s", "cost_s"), strict=True):
        np.testing.assert_allclose(getattr(got, name), row, rtol=1e-9, atol=1e-12)


def test_the_holder_is_chosen_until_its_queue_costs_more_than_the_prefill():
    assert chosen(holding([0, 7984, 0, 0])) == 1
    assert chosen(holding([0, 7984, 0, 0], queue_s=[0, 1.0, 0, 0])) == 1
    assert chosen(holding([0, 7984, 0, 0], queue_s=[0, 5.0, 0, 0])) != 1


def test_expected_blocks_draw_siblings():
    assert chosen(holding([0, 0, 0], expected=[0, 0, 7984])) == 2


def test_overlap_counts_by_trust():
    now = holding([6400, 6400, 6400], trust=[BLIND, DEGRADED, EXACT])
    prefill_s = terms(now, K).prefill_s
    assert prefill_s[0] > prefill_s[1] > prefill_s[2]
    assert prefill_s[0] == terms(situation(3), K).prefill_s[0]


def test_a_lower_tier_is_a_hit_that_costs_its_loading():
    held = [6400, 0, 0, 0]
    now = situation(4, gpu=held, cpu=[0, 6400, 0, 0], disk=[0, 0, 6400, 0], expected=[6400, 6400, 6400, 0])
    t = terms(now, K)
    assert t.cost_s[0] < t.cost_s[1] < t.cost_s[2] < t.cost_s[3]
    assert t.load_s.tolist() == pytest.approx([0, 6400 * K.rates.load_cpu_s_per_token, 6400 * K.rates.load_disk_s_per_token, 0])
    assert t.prefill_s[0] == t.prefill_s[1] == t.prefill_s[2]


def test_a_tier_that_is_slower_than_computing_makes_nothing_dearer():
    slow = Rates(load_disk_s_per_token=1.0)
    now = situation(3, cpu=[1600, 0, 1600], disk=[4800, 6400, 0], expected=[6400, 6400, 1600])
    t = terms(now, replace(K, rates=slow))
    assert t.cost_s[1] == terms(situation(1), K).cost_s[0]
    assert t.cost_s[0] == t.cost_s[2]  # what lies in CPU memory is loaded all the same


def test_workers_are_compared_by_their_own_hardware():
    fast, slow = Rates(a=5e-5), Rates(a=2e-4)
    table = table_of([slow, fast, fast])
    now = holding([4000, 0, 2000])
    assert terms(now, K, table).cost_s.argmin() == 2
    assert terms(holding([7000, 0, 0]), K, table).cost_s.argmin() == 0
    assert terms(holding([4000, 0, 0]), K, table).cost_s.argmin() in (1, 2)


@pytest.mark.parametrize(("tokens", "most"), [(0, 0), (1, 0), (32, 0), (33, 32), (64, 32), (65, 64)])
def test_the_last_token_is_never_cached(tokens, most):
    assert most_cached_tokens(tokens, 32) == most
