"""Every question against the same sum done by hand on the sample's rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from dashboard import queries
from dashboard.console import Limits, run
from dashboard.database import Snapshot
from dashboard.filters import Filters, Window
from dashboard.site import Site
from tests.dashboard import sample

MORE = {"measure": "ttft", "most": 20}


def ended(rows: sample.Sample, window: Window, **equal: Any) -> list[sample.Row]:
    return [
        r
        for r in rows["requests"]
        if r["ended_at"] is not None and window.since <= r["ended_at"] < window.until and all(r[k] == v for k, v in equal.items())
    ]


def hit_rate(requests: list[sample.Row]) -> float:
    told = [r for r in requests if r["cached_tokens"] is not None]
    return sum(r["cached_tokens"] for r in told) / sum(r["prompt_tokens"] for r in told)


def test_every_file_begins_with_its_question() -> None:
    for name in queries.names():
        found = queries.query(name)
        assert found.question.endswith("?")
        assert found.grain


@pytest.mark.parametrize("form", ["full", "empty", "events_only", "load_only"])
@pytest.mark.parametrize("filters", [Filters(), Filters(route="agent-coder", pool="qwen3-32b", worker="gpu-1:8000"), Filters(range="7d")])
def test_every_question_has_an_answer_on_every_form(form: str, filters: Filters, on: Callable[..., Site]) -> None:
    snapshot = on(form).database.snapshot()
    for name in queries.names():
        queries.ask(snapshot, name, filters, filters.window(snapshot.watermark), **MORE)


@pytest.mark.parametrize(
    "filters",
    [
        Filters(),
        Filters(range="15m"),
        Filters(worker="gpu-3:8000"),
        Filters(route="agent-search"),
        Filters(model="Qwen/Qwen3-32B", range="5m"),
    ],
)
def test_key_figures_equal_the_sum_by_hand(filters: Filters, snapshot: Snapshot, rows: sample.Sample) -> None:
    window = filters.window(snapshot.watermark)
    equal = {k: v for k in ("worker", "route", "model") if (v := getattr(filters, k)) is not None}
    mine = ended(rows, window, **equal)
    told = [r for r in mine if r["cached_tokens"] is not None]
    row = queries.ask(snapshot, "key_figures", filters, window)[0]
    assert row["requests"] == len(mine)
    assert row["failed"] == sum(r["error"] is not None for r in mine)
    assert row["reported_requests"] == len(told)
    assert row["hit_rate"] == pytest.approx(hit_rate(mine))
    assert row["hit_rate_by_request"] == pytest.approx(statistics.fmean(r["cached_tokens"] / r["prompt_tokens"] for r in told))


def test_counters_of_workers_and_of_requests_agree(snapshot: Snapshot, rows: sample.Sample) -> None:
    window = Filters().window(snapshot.watermark)
    by_counter = queries.ask(snapshot, "counts_by_worker", Filters(), window)
    by_request = [queries.ask(snapshot, "counts_by_worker", Filters(route=r), window) for r in {r["route"] for r in rows["requests"]}]
    for row in by_counter:
        same = [r for answer in by_request for r in answer if (r["worker"], r["rank"]) == (row["worker"], row["rank"])]
        for column in ("requests", "failed", "prompt_tokens", "cached_tokens", "reported_requests"):
            assert row[column] == sum(r[column] or 0 for r in same), column


@pytest.mark.parametrize("worker", ["gpu-1:8000", "gpu-5:8000", None])
def test_ttft_percentiles_are_within_a_percent_of_the_exact_ones(worker: str | None, snapshot: Snapshot, rows: sample.Sample) -> None:
    filters = Filters(worker=worker)
    window = filters.window(snapshot.watermark)
    equal = {} if worker is None else {"worker": worker}
    exact = sorted(r["ttft_s"] for r in ended(rows, window, **equal) if r["ttft_s"] is not None)
    row = queries.ask(snapshot, "ttft", filters, window, measure="ttft")[0]
    assert row["n"] == len(exact)
    for name, q in (("p50_s", 0.5), ("p90_s", 0.9), ("p99_s", 0.99)):
        assert row[name] == pytest.approx(exact[math.ceil(q * len(exact)) - 1], rel=0.011)


def test_ttft_by_worker_keeps_ranks_apart(snapshot: Snapshot) -> None:
    found = queries.ask(snapshot, "ttft_by_worker", Filters(), Filters().window(snapshot.watermark), measure="ttft")
    assert [(r["worker"], r["rank"]) for r in found if r["worker"] == "gpu-5:8000"] == [("gpu-5:8000", 0), ("gpu-5:8000", 1)]


def test_the_heatmaps_cells_equal_the_sum_by_hand(snapshot: Snapshot, rows: sample.Sample) -> None:
    window = Filters().window(snapshot.watermark)
    for cell in queries.ask(snapshot, "hit_by_worker_over_time", Filters(), window)[::37]:
        here = Window(cell["bin_at"], cell["bin_at"] + timedelta(seconds=window.bin_s), window.bin_s)
        mine = ended(rows, here, worker=cell["worker"], rank=cell["rank"])
        assert cell["requests"] == len(mine)
        assert cell["hit_rate"] == pytest.approx(hit_rate(mine))


def test_the_policy_that_hurt_is_told_apart(snapshot: Snapshot, rows: sample.Sample) -> None:
    window = Filters().window(snapshot.watermark)
    found = {r["policy"]: r["hit_rate"] for r in queries.ask(snapshot, "hit_by_policy", Filters(), window)}
    assert found == {p: pytest.approx(hit_rate(ended(rows, window, policy=p))) for p in ("cost", "round_robin")}
    assert found["cost"] > found["round_robin"] + 0.2


def test_computed_again_counts_what_some_worker_held(snapshot: Snapshot, rows: sample.Sample) -> None:
    window = Filters().window(snapshot.watermark)
    reported = [r for r in ended(rows, window) if r["cached_tokens"] is not None]
    looked_up = [r for r in reported if r["best_overlap_tokens"] is not None]
    told = [r for r in looked_up if r["token_source"] != "text"]
    assert len(told) < len(looked_up) < len(reported)  # an unknown overlap is no loss, and a guessed one neither
    row = queries.ask(snapshot, "waste", Filters(), window)[0]
    assert (row["known_requests"], row["known_prompt_tokens"]) == (len(told), sum(r["prompt_tokens"] for r in told))
    assert row["computed_again_tokens"] == sum(max(0, min(r["best_overlap_tokens"], r["prompt_tokens"]) - r["cached_tokens"]) for r in told)
    course = queries.ask(snapshot, "waste_over_time", Filters(), window)
    assert sum(r["computed_again_tokens"] for r in course) == row["computed_again_tokens"]
    assert sum(r["computed_tokens"] for r in course) == sum(r["prompt_tokens"] - r["cached_tokens"] for r in told)


def test_prediction_errors_are_capped_and_complete(snapshot: Snapshot, rows: sample.Sample) -> None:
    window = Filters().window(snapshot.watermark)
    found = {r["blocks"]: r["requests"] for r in queries.ask(snapshot, "prediction_error", Filters(), window)}
    told = [r for r in ended(rows, window) if r["cached_tokens"] is not None and r["predicted_tokens"] is not None]
    assert sum(found.values()) == len(told)
    assert found[0] == sum(r["predicted_tokens"] == r["cached_tokens"] for r in told)


def test_nothing_known_is_null_and_never_zero(on: Callable[..., Site]) -> None:
    snapshot = on("events_only").database.snapshot()
    window = Filters().window(snapshot.watermark)
    row = queries.ask(snapshot, "key_figures", Filters(), window)[0]
    assert row["hit_rate"] is None
    assert row["engine_hit_rate"] is None
    assert queries.ask(snapshot, "ttft", Filters(), window, measure="ttft")[0]["p50_s"] is None
    assert queries.ask(snapshot, "waste", Filters(), window)[0]["computed_again_tokens"] is None


def test_names_from_outside_are_parameters_and_literals_are_quoted(on: Callable[..., Site]) -> None:
    here = on("full")
    snapshot = here.database.snapshot()
    filters = Filters(route=sample.NASTY_ROUTE, worker="gpu-1:8000'; DROP TABLE requests; --")
    window = filters.window(snapshot.watermark)
    for name in queries.names():
        text = queries.spelled_out(name, filters, window, **MORE)
        run(here.database.path, text, Limits(20, 1000, "512MB"))
    found = queries.ask(snapshot, "key_figures", Filters(route=sample.NASTY_ROUTE), window)[0]
    assert found["requests"] > 0
