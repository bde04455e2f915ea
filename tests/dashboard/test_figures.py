"""Plotly itself checks each figure; names from outside stay text; what is missing is a gap."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import orjson
import plotly.graph_objects as go
import pytest

from dashboard import figures
from dashboard.figures import Figure
from dashboard.filters import Window
from dashboard.palette import DARK, LIGHT

SINCE = datetime(2026, 11, 29, 13)
WINDOW = Window(SINCE, SINCE + timedelta(minutes=5), 60)
NASTY = "<script>alert(1)</script>🦊" + "x" * 300


def painted(value: Any, colours: dict[str, str]) -> Any:
    if isinstance(value, str):
        return colours[value[1:]] if value.startswith("$") else value
    if isinstance(value, dict):
        return {k: painted(v, colours) for k, v in value.items()}
    if isinstance(value, list):
        return [painted(v, colours) for v in value]
    return value


def at(minute: int) -> datetime:
    return SINCE + timedelta(minutes=minute)


def cell(minute: int, hit: float | None, worker: str = "w", rank: int | None = None) -> dict[str, Any]:
    return {"pool": "p", "worker": worker, "rank": rank, "bin_at": at(minute), "hit_rate": hit, "reported_prompt_tokens": 10, "requests": 1}


def ttft(minute: int, n: int) -> dict[str, Any]:
    return {"pool": "p", "worker": NASTY, "rank": None, "bin_at": at(minute), "n": n, "p50_s": 0.1, "p90_s": 0.2, "p99_s": 0.4}


MARKS = [{"happened_at": at(2), "kind": "deploy", "text": NASTY}, {"happened_at": at(90), "kind": "note", "text": "outside"}]
WORKER = {
    "pool": "p", "worker": NASTY, "rank": 1, "load": 2.0, "hit": 0.5, "prompt_tokens": None,
    "resident_blocks": 10, "distinct_blocks": 9, "capacity_blocks": 20,
}  # fmt: skip

FIGURES: dict[str, Figure] = {
    "heatmap": figures.hit_heatmap([cell(0, 0.5), cell(2, None), cell(4, 0.9, NASTY, 1)], WINDOW),
    "shares": figures.shares_over_time([("cost", [0.1, None, 0.3, 0.4, 0.5]), (NASTY, [None] * 5)], WINDOW, MARKS),
    "amounts": figures.amounts_over_time([("n", [0, 1, None, 3, 4])], WINDOW, MARKS),
    "latency": figures.latency_over_time([ttft(0, 50), ttft(1, 3)], WINDOW, 20, MARKS),
    "computed": figures.computed_tokens_over_time([{"bin_at": at(1), "computed_again_tokens": 3, "computed_tokens": 10}], WINDOW),
    "latency by worker": figures.latency_by_worker([ttft(0, 50), ttft(0, 3)], 20),
    "load": figures.load_against_hit([WORKER, WORKER | {"pool": NASTY}], "running"),
    "residency": figures.residency_bars([WORKER, WORKER | {"capacity_blocks": None}]),
    "prediction": figures.prediction_error([{"blocks": 0, "requests": 5}, {"blocks": -10, "requests": 1}]),
}


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_plotly_takes_every_figure(name: str, colours: dict[str, str]) -> None:
    go.Figure(painted(FIGURES[name], colours))


@pytest.mark.parametrize("name", FIGURES)
def test_no_name_is_read_as_a_tag_nor_fills_the_figure(name: str) -> None:
    text = orjson.dumps(FIGURES[name]).decode()
    shown = text.replace(orjson.dumps(NASTY).decode(), "")  # customdata carries names back, and is not drawn
    assert "<script>" not in shown
    assert "x" * 201 not in shown


def test_both_themes_have_the_same_colours() -> None:
    assert LIGHT.keys() == DARK.keys()


def test_a_missing_bin_is_a_gap_and_not_zero() -> None:
    assert FIGURES["heatmap"]["data"][0]["z"] == [[0.5, None, None, None, None], [None, None, None, None, 0.9]]
    assert FIGURES["computed"]["data"][0]["y"] == [None, 3, None, None, None]


def test_percentiles_under_the_least_sample_are_left_out() -> None:
    assert FIGURES["latency"]["data"][0]["y"] == [0.1, None, None, None, None]
    assert len(FIGURES["latency by worker"]["data"][1]["x"]) == 1


@pytest.mark.parametrize("name", FIGURES)
def test_only_axes_of_time_have_formats_of_time(name: str) -> None:
    for axis in (FIGURES[name]["layout"]["xaxis"], FIGURES[name]["layout"]["yaxis"]):
        assert ("tickformatstops" in axis) == (axis.get("type") == "date")


def test_neither_load_nor_hit_rate_is_drawn_where_it_cannot_be() -> None:
    layout = figures.load_against_hit([WORKER | {"load": 0.01, "hit": 0.99}, WORKER | {"load": 4.0, "hit": 0.2}], "running")["layout"]
    assert layout["xaxis"]["range"][0] == 0
    assert layout["yaxis"]["range"] == [pytest.approx(0.0025), pytest.approx(1.02)]


def test_marks_outside_the_window_are_left_out() -> None:
    assert len(FIGURES["shares"]["layout"]["shapes"]) == 1


def test_equal_names_of_two_pools_get_the_pool_in_front() -> None:
    rows = [cell(0, 1.0), cell(0, 1.0) | {"pool": "q"}, cell(0, 1.0, "other", 3)]
    assert list(figures.worker_labels(rows).values()) == ["p / w", "q / w", "other · r3"]
