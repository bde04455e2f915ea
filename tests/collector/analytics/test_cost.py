"""What a prefill costs is learned from what engines report, and what nobody reported is not made up."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from collector.analytics import cost
from collector.analytics.attributed import Attributed
from collector.analytics.cost import CostModel, CostRules, first_fit, hardware_in
from collector.settings import CollectorSettings
from schemas.causes import Cause
from schemas.fleet import Fleet
from schemas.settings import SettingsError, load
from schemas.tables.losses import COST_MODELS
from simulator.timing import StepCost
from tests.collector.analytics.naive_cost import NaiveFit
from tests.collector.analytics.told import told

RUNS = np.array([Cause.HIT, Cause.EVICTED, Cause.MISROUTED, Cause.GRANULARITY], np.uint8)
LENGTHS = np.array([1000, 3000, 500, 7], np.uint32)


def reported(u: float, h: float, seconds: float, **more: object) -> Attributed:
    """A request whose engine says that it waited 0.5 s and then computed so long."""
    times = {"engine_queue_s": 0.5, "engine_ttft_s": 0.5 + seconds, "ttft_s": 9.0}
    return told(int(u + h), int(h), **(times | more))


def traffic(n: int, seed: int, truth: StepCost | None = None, noise: float = 0.02) -> np.ndarray:
    """(uncached, cached, seconds) of mixed prompts, shape (n, 3)."""
    rng = np.random.default_rng(seed)
    truth = StepCost() if truth is None else truth
    u = np.exp(rng.uniform(np.log(20), np.log(40_000), n)).astype(int) + 1
    h = rng.integers(0, 2, n) * rng.integers(0, 60_000, n)
    seconds = np.array([truth.prefill_s(a, b) for a, b in zip(u.tolist(), h.tolist(), strict=True)])
    return np.stack([u, h, seconds * rng.lognormal(0, noise, n)], axis=1)


def learned(rows: np.ndarray, **more: object) -> CostModel:
    model = CostModel()
    model.take([reported(u, h, s, **more) for u, h, s in rows.tolist()])
    return model


def row_of(model: CostModel) -> dict[str, object]:
    (row,) = model.live()["cost_models"]
    return dict(zip([c.name for c in COST_MODELS.columns], row, strict=True))


PUBLISHED = np.array([[2048, 78], [8192, 250], [16384, 510], [32768, 1173], [49152, 1988]])
"""Tokens and milliseconds of a prefill of gpt-oss-120b on H200, as published (llm-d, 15 August 2026)."""


def test_the_published_curve_is_found() -> None:
    rows = np.array([(tokens, 0, ms / 1e3) for _ in range(60) for tokens, ms in PUBLISHED])
    found = learned(rows).coefficients("p", "w", "m")
    assert found is not None
    assert found.base_s * 1e3 == pytest.approx(24.83, abs=0.05)
    assert found.a_s_per_token * 1e6 == pytest.approx(24.85, abs=0.02)
    assert found.b_s_per_token2 / 2 * 1e9 == pytest.approx(0.3075, abs=0.001)  # published as the coefficient of u * u
    off = [abs(found.prefill_s(tokens, 0) * 1e3 - ms) for tokens, ms in PUBLISHED]
    assert max(off) == pytest.approx(4.5, abs=0.1)
    tokens, ms = PUBLISHED.T
    line = np.polyfit(tokens, ms, 1)
    assert float(np.abs(ms - np.polyval(line, tokens)).max()) == pytest.approx(77.7, abs=0.1)


def test_the_simulators_cost_is_found() -> None:
    truth = StepCost()
    found = learned(traffic(2500, 1)).coefficients("p", "w", "m")
    assert found is not None
    assert found.base_s == pytest.approx(truth.prefill_base_s, rel=0.03)
    assert found.a_s_per_token == pytest.approx(truth.prefill_token_s, rel=0.02)
    assert found.b_s_per_token2 == pytest.approx(truth.prefill_attention_s, rel=0.03)


@pytest.mark.parametrize("wild", [30.0, 1e-3])
def test_one_wild_observation_in_ten_changes_little(wild: float) -> None:
    rows = traffic(2500, 2)
    clean = learned(rows).coefficients("p", "w", "m")
    rows[np.random.default_rng(3).random(len(rows)) < 0.1, 2] *= wild
    found = learned(rows).coefficients("p", "w", "m")
    assert found is not None
    assert clean is not None
    assert found.base_s == pytest.approx(clean.base_s, rel=0.05)
    assert found.a_s_per_token == pytest.approx(clean.a_s_per_token, rel=0.05)
    assert found.b_s_per_token2 == pytest.approx(clean.b_s_per_token2, rel=0.05)


@pytest.mark.parametrize("speed", [0.4, 3.0])
def test_the_fit_follows_when_workers_become_slower_or_faster(speed: float) -> None:
    model = learned(traffic(1500, 4))
    before = row_of(model)["version"]
    model.take([reported(*row) for row in traffic(12_000, 5, StepCost(speed=speed)).tolist()])
    found = model.coefficients("p", "w", "m")
    assert found is not None
    assert found.a_s_per_token == pytest.approx(StepCost().prefill_token_s / speed, rel=0.05)
    assert row_of(model)["version"] != before


def test_a_flood_of_short_prompts_does_not_wash_out_what_long_ones_told() -> None:
    model = learned(traffic(1500, 6))
    long = StepCost().prefill_s(30_000, 10_000)
    rng = np.random.default_rng(7)
    short = StepCost().prefill_s(300, 0)
    model.take([reported(300, 0, short * s) for s in rng.lognormal(0, 0.05, 10_000).tolist()])
    found = model.coefficients("p", "w", "m")
    assert found is not None
    assert found.prefill_s(30_000, 10_000) == pytest.approx(long, rel=0.03)


def test_ttft_with_waiting_in_it_gives_a_flagged_fit_that_follows_the_quick_ones() -> None:
    rng = np.random.default_rng(8)
    rows = traffic(4000, 8)
    waits = np.where(rng.random(len(rows)) < 0.6, rng.exponential(2.0, len(rows)), 0.0)
    model = CostModel()
    model.take([told(int(u + h), int(h), ttft_s=s + w) for (u, h, s), w in zip(rows.tolist(), waits.tolist(), strict=True)])
    found = model.coefficients("p", "w", "m")
    assert found is not None
    assert found.source == "fitted from TTFT"
    assert found.version.startswith("ttft-fit-")
    for (u, h), within in (((2000, 0), 0.2), ((2000, 40_000), 0.15), ((30_000, 0), 0.05)):
        assert found.prefill_s(u, h) == pytest.approx(StepCost().prefill_s(u, h), rel=within)


def test_what_is_configured_goes_before_a_fit_from_ttft_and_after_one_from_engines() -> None:
    rules = CostRules(a_s_per_token=1e-4)
    rows = traffic(200, 9)
    model = CostModel(rules)
    assert model.coefficients("p", "w", "m") == cost.Coefficients("configured-1", "configured", 0.0, 1e-4, 0.0)
    model.take([told(int(u + h), int(h), ttft_s=s) for u, h, s in rows.tolist()])
    assert row_of(model)["source"] == "configured"
    model.take([reported(*row) for row in rows.tolist()])
    assert row_of(model)["source"] == "fitted"


def test_unknown_costs_are_nan_and_hits_cost_nothing() -> None:
    model = CostModel()
    np.testing.assert_equal(model.run_seconds("p", "w", "m", RUNS, LENGTHS), [0.0, np.nan, np.nan, np.nan])
    model.take([reported(100, 0, 0.1)] * (cost.WARM - 1))
    assert math.isnan(model.run_seconds("p", "w", "m", RUNS, LENGTHS)[1])
    assert row_of(model)["version"] is None
    assert row_of(model)["observations"] == cost.WARM - 1


def test_a_first_fit_is_as_new_as_the_newest_of_its_observations() -> None:
    rows = traffic(cost.WARM, 18).tolist()
    model = CostModel()
    model.take([reported(*row, at_s=1000.0 + i) for i, row in enumerate(rows[:-1])])
    assert (row_of(model)["version"], row_of(model)["fitted_at"]) == (None, None)
    model.take([reported(*rows[-1], at_s=2000.0)])
    assert (row_of(model)["version"], row_of(model)["fitted_at"]) == ("fit-1", 2_001_000_000)


def test_prompts_of_one_size_tell_no_curve() -> None:
    model = learned(np.array([[1000.0, 0, 0.1], [1010.0, 0, 0.1]] * 400))
    assert model.coefficients("p", "w", "m") is None
    assert row_of(model)["observations"] == 800
    model.take([reported(*row) for row in traffic(100, 10).tolist()])
    assert model.coefficients("p", "w", "m") is not None


def test_the_seconds_of_runs_add_up_to_the_prefill_less_its_base_and_what_hits_saved() -> None:
    model = CostModel(CostRules(base_s=0.02, a_s_per_token=2.5e-5, b_s_per_token2=6e-10))
    cold = model.coefficients("p", "w", "m")
    assert cold is not None
    n, k = int(LENGTHS.sum()), 1000
    seconds = model.run_seconds("p", "w", "m", RUNS, LENGTHS)
    assert seconds[0] == 0
    assert seconds.sum() == pytest.approx(cold.prefill_s(n - k, k) - cold.base_s, rel=1e-12)
    saved = cold.prefill_s(n, 0) - cold.prefill_s(n - k, k)
    assert seconds.sum() + saved == pytest.approx(cold.prefill_s(n, 0) - cold.base_s, rel=1e-12)
    up_to = LENGTHS.cumsum()
    for i in (1, 2):  # had the run been a hit, too: the prefill after it
        less = cold.prefill_s(n - int(up_to[i - 1]), int(up_to[i - 1])) - cold.prefill_s(n - int(up_to[i]), int(up_to[i]))
        assert seconds[i] == pytest.approx(less, rel=1e-9)


def test_the_same_tokens_split_into_more_runs_cost_the_same() -> None:
    model = CostModel(CostRules(a_s_per_token=2.5e-5, b_s_per_token2=6e-10))
    whole = model.run_seconds("p", "w", "m", np.array([Cause.EVICTED], np.uint8), np.array([5000], np.uint32))
    parts = model.run_seconds("p", "w", "m", np.array([Cause.EVICTED] * 50, np.uint8), np.array([100] * 50, np.uint32))
    assert parts.sum() == pytest.approx(whole[0], rel=1e-12)
    assert (np.diff(parts) > 0).all(), "later tokens have more before them"


def test_the_kernel_is_its_naive_twin() -> None:
    for seed, above in ((11, 1.0), (12, cost.ABOVE_TTFT), (13, 1.0)):
        rows = traffic(260, seed, noise=0.2)
        rng = np.random.default_rng(seed)
        rows[rng.random(len(rows)) < 0.1, 2] *= 20
        if seed == 13:
            rows[:, 2] = 0.01 + rng.exponential(0.05, len(rows))  # no growth with size: some coefficients are 0
        times = np.column_stack([rows, np.arange(len(rows))])
        start = first_fit(times[: cost.WARM], above)
        assert start is not None
        twin = NaiveFit((start[0].copy(), *start[1:]), above)
        twin.typical = float(np.median(rows[: cost.WARM, 2]))
        fit = cost._Fit(above)
        fit.observe(times[: cost.WARM])
        for row in rows[: cost.WARM]:
            twin.observe(*row.tolist(), hold=True)
        for i in range(cost.WARM, len(rows)):
            fit.observe(times[i : i + 1])
            twin.observe(*rows[i].tolist(), hold=False)
            np.testing.assert_allclose(fit.head[cost._NOW : cost._NOW + 3], twin.now, rtol=1e-6, atol=1e-9)
        assert fit.head[cost._VERSION] == twin.version
        assert fit.head[cost._RESIDUAL] == pytest.approx(twin.residual, rel=1e-6)


def test_the_state_depends_on_the_order_of_requests_and_not_on_how_they_are_cut() -> None:
    requests = [reported(*row, worker=f"w{i % 2}") for i, row in enumerate(traffic(400, 14).tolist())]
    one, many = CostModel(), CostModel()
    one.take(requests)
    for lo in range(0, len(requests), 7):
        many.take(requests[lo : lo + 7])
    for a, b in zip(one.save().values(), many.save().values(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_loaded_model_goes_on_as_the_saved_one() -> None:
    first = CostModel()
    early, late = traffic(400, 15).tolist(), traffic(300, 16).tolist()
    first.take([reported(*row, model="é", pool="q") for row in early] + [told(300, 20, ttft_s=0.5)] * 30)
    second = CostModel()
    second.load(first.save())
    for model in (first, second):
        model.take([reported(*row, model="é", pool="q") for row in late])
    assert first.live() == second.live()
    for a, b in zip(first.save().values(), second.save().values(), strict=True):
        np.testing.assert_array_equal(a, b)
    second.load(CostModel().save())
    assert second.live() == {"cost_models": []}


def test_each_pool_model_and_kind_of_worker_has_its_own_curve_and_an_adapter_without_one_has_its_pools() -> None:
    fleet = Fleet.model_validate(
        {
            "pools": [{"name": "p", "discover": "dns://p:1?hardware=l4"}, {"name": "q"}],
            "workers": [
                {"pool": "p", "name": "w", "url": "http://w:1", "hardware": "h100"},
                {"pool": "q", "name": "w", "url": "http://v:1"},
            ],
        }
    )
    model = CostModel(by_hardware={"l4": CostRules(a_s_per_token=1.0)}, hardware_of=hardware_in(fleet))
    model.take([reported(*row) for row in traffic(100, 17).tolist()])
    own, adapter = model.coefficients("p", "w", "m"), model.coefficients("p", "w", "adapter")
    assert own is not None
    assert own == adapter
    found = model.coefficients("p", "found", "m")
    assert found is not None
    assert (found.source, found.a_s_per_token) == ("configured", 1.0)
    assert model.coefficients("q", "w", "m") is None
    assert row_of(model)["hardware"] == "h100"


def test_what_cannot_be_an_observation_is_none() -> None:
    model = CostModel()
    good = reported(1000, 0, 0.1)
    model.take(
        [
            replace(good, hit_tokens=None), replace(good, hit_tokens=1000), told(1000, 0),
            replace(good, engine_ttft_s=0.4), replace(good, engine_ttft_s=1e9), replace(good, engine_ttft_s=math.nan),
        ]
    )  # fmt: skip
    row = row_of(model)
    assert (row["observations"], row["version"], row["source"], row["fitted_at"]) == (0, None, None, None)


def test_what_workers_cost_by_configuration_is_told_without_any_time() -> None:
    model = CostModel(CostRules(a_s_per_token=1e-4, gpus=2.0))
    model.take([told(1000, None)])
    row = row_of(model)
    assert (row["source"], row["gpus"], row["observations"], row["residual_s"]) == ("configured", 2.0, 0, None)


def test_keys_are_bounded() -> None:
    model = CostModel()
    model.take([reported(1000, 0, 0.1, model=f"m{i}") for i in range(cost.MAX_KEYS + 3)])
    assert len(model.live()["cost_models"]) == cost.MAX_KEYS
    assert model.refused == 3
    assert model.held_bytes() < cost.MAX_KEYS * 20 * 1024


def test_settings_say_what_workers_cost(tmp_path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('pools = [{name = "p"}]\n[[workers]]\npool = "p"\nname = "w"\nurl = "http://w:1"\nhardware = "h100"\n')
    file = tmp_path / "settings.toml"
    file.write_text(
        f'[collect]\nfleet = "{fleet}"\nprefill_a = 1e-4\ngpus = 1\nprice_per_gpu_hour = 1.0\ncurrency = "USD"\n'
        "[collect.hardware.h100]\ngpus = 8\nprefill_a = 2e-5\n"
    )
    model = load(CollectorSettings, ["--config", str(file)]).cost_model()
    model.take([reported(1000, 0, 0.1)])
    row = row_of(model)
    assert (row["hardware"], row["gpus"], row["price_per_gpu_hour"], row["currency"]) == ("h100", 8, 1.0, "USD")
    assert (row["source"], row["a_s_per_token"], row["b_s_per_token2"]) == ("configured", 2e-5, 0.0)
    assert CollectorSettings().cost_model().coefficients("p", "w", "m") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("price_per_gpu_hour = 2.0", "setting `currency`: missing"),
        ("hardware.h100.price_per_gpu_hour = 2.0", "setting `currency`: missing"),
        ("hardware.h100.gpu = 2", "setting `hardware.h100.gpu`: unknown"),
        ("gpus = 0", "setting `gpus`: Input should be greater than 0"),
    ],
)
def test_wrong_costs_stop_the_start(tmp_path, text: str, says: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f"[collect]\n{text}\n")
    with pytest.raises(SettingsError, match=says):
        load(CollectorSettings, ["--config", str(file)])
