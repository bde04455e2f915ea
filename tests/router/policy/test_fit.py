import numpy as np
import pytest

from router.policy.cost import Rates
from router.policy.fit import FEWEST, PrefillFit, Refusal, Window, new_fit, prefill_seconds

TRUE = Rates(base_s=0.015, a=7e-5, b=1.3e-9)
CONFIGURED = Rates()


def outcomes(n, seed=0, noise=0.05, garbage=0.0, rates=TRUE):
    """uncached, cached, seconds of agent traffic: long histories, short turns, some cold."""
    rng = np.random.default_rng(seed)
    total = rng.integers(500, 60_000, n)
    cached = np.where(rng.random(n) < 0.7, total * rng.random(n), 0).astype(int) // 16 * 16
    uncached = total - cached
    seconds = rates.prefill_s(uncached, cached) * np.exp(rng.normal(0, noise, n))
    bad = rng.random(n) < garbage
    seconds[bad] = rng.choice([1e-4, 40.0, 600.0], n)[bad] * rng.random(n)[bad]
    return np.stack([uncached, cached, seconds], axis=1).astype(float)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("garbage", [0.0, 0.2])
def test_known_coefficients_are_recovered(seed, garbage):
    fit = new_fit(outcomes(1000, seed, garbage=garbage), CONFIGURED)
    assert isinstance(fit, PrefillFit)
    assert fit.a == pytest.approx(TRUE.a, rel=0.05)
    assert fit.b == pytest.approx(TRUE.b, rel=0.05)
    assert fit.base_s == pytest.approx(TRUE.base_s, rel=0.5)
    assert fit.error_p50 < 0.06 < fit.error_p50_before
    assert garbage - 0.08 < fit.garbage < garbage + 0.08


def test_the_standard_error_covers_the_truth():
    off = []
    for seed in range(40):
        fit = new_fit(outcomes(400, seed, garbage=0.1), CONFIGURED)
        assert isinstance(fit, PrefillFit)
        off.append([(got - want) / se for got, want, se in zip((fit.a, fit.b), (TRUE.a, TRUE.b), fit.se[1:], strict=True)])
    assert (np.abs(off) < 3).mean() > 0.9


def test_late_answers_alone_do_not_pull():
    """A fifth waited behind somebody that we could not see: all errors to one side."""
    rows = outcomes(1000, 3)
    late = np.random.default_rng(1).random(1000) < 0.2
    rows[late, 2] += np.random.default_rng(2).exponential(5.0, late.sum())
    fit = new_fit(rows, CONFIGURED)
    assert isinstance(fit, PrefillFit)
    assert fit.a == pytest.approx(TRUE.a, rel=0.08)


def refusal(rows, in_use=CONFIGURED):
    found = new_fit(np.asarray(rows, float), in_use)
    assert isinstance(found, Refusal), found
    return found.reason


def test_nonsense_is_refused_with_its_reason():
    rng = np.random.default_rng(0)
    rows = outcomes(600)
    assert refusal(rows[: FEWEST - 1]) == "few"
    assert refusal(np.zeros((0, 3))) == "few"
    assert refusal(np.stack([rng.integers(900, 1000, 600), np.zeros(600), rng.random(600)], 1)) == "alike"
    falling = rows.copy()
    falling[:, 2] = 5.0 / (1 + rows[:, 0] / 1000)
    assert refusal(falling) in ("flat", "noisy", "garbage", "not better")
    constant = rows.copy()
    constant[:, 2] = 0.3
    assert refusal(constant) == "flat"
    noise = rows.copy()
    noise[:, 2] = np.exp(rng.normal(0, 3, 600))
    assert refusal(noise) in ("flat", "noisy", "garbage")


@pytest.mark.parametrize("seed", range(8))
def test_prompts_of_two_sizes_tell_nothing_of_others(seed):
    rng = np.random.default_rng(seed)
    uncached, nothing = rng.choice([1000.0, 4000.0], 600), np.zeros(600)
    seconds = TRUE.prefill_s(uncached, 0.0) * np.exp(rng.normal(0, 0.05, 600))
    assert refusal(np.stack([uncached, nothing, seconds], 1)) == "alike"
    cached = rng.integers(0, 200, 600) * 16.0  # then a token and a pair of tokens are two things
    seconds = TRUE.prefill_s(uncached, cached) * np.exp(rng.normal(0, 0.05, 600))
    assert isinstance(new_fit(np.stack([uncached, cached, seconds], 1), CONFIGURED), PrefillFit)


def test_there_is_no_new_version_unless_it_is_better_and_different():
    assert refusal(outcomes(1000, 1), TRUE) == "not better"
    near = Rates(base_s=TRUE.base_s, a=TRUE.a * 1.002, b=TRUE.b)
    assert refusal(outcomes(200, 2, noise=0.3), near) in ("not better", "not different")


def test_the_newest_fifth_judges():
    """The engine became three times slower just now: what fitted the past is not adopted."""
    rows = np.concatenate([outcomes(800, 1), outcomes(200, 2, rates=Rates(0.045, 2.1e-4, 3.9e-9))])
    assert refusal(rows, Rates(0.045, 2.1e-4, 3.9e-9)) in ("noisy", "not better")


def test_coefficients_are_never_negative():
    rows = outcomes(600, 4, rates=Rates(base_s=0.0, a=7e-5, b=0.0))
    fit = new_fit(rows, Rates(a=5e-4))
    assert isinstance(fit, PrefillFit)
    assert min(fit.base_s, fit.a, fit.b) >= 0
    assert fit.a == pytest.approx(7e-5, rel=0.05)


@pytest.mark.parametrize(
    ("told", "seconds"),
    [((0.9, 0.8, 0.3, False), 0.5), ((0.9, None, None, True), 0.9), ((0.9, None, None, False), None), ((None, None, None, True), None)],
)
def test_seconds_are_the_engines_or_of_requests_that_did_not_wait(told, seconds):
    assert prefill_seconds(*told) == pytest.approx(seconds)


def test_a_window_keeps_the_newest_in_order_and_counts_what_is_of_no_use():
    window = Window(4)
    for i in range(1, 7):
        assert window.observe(100 + i, 100, i / 10)
    assert window.rows()[:, 0].tolist() == [3, 4, 5, 6]
    useless = [(None, 1, 1.0), (100, None, 1.0), (100, 0, None), (100, 100, 1.0), (100, -1, 1.0), (100, 0, 0.0), (100, 0, float("nan")),
               (100, 0, float("inf")), (100, 0, -3.0), (100, 0, 1e9)]  # fmt: skip
    assert not any(window.observe(*u) for u in useless)
    assert window.useless == {"tokens not reported": 2, "seconds not known": 1, "impossible": 7}
    assert len(window.rows()) == 4
