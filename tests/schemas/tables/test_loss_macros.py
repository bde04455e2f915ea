"""The macros of losses, asked of a file that the collector's own publisher made, on the locked connection that people get."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.causes import ACTOR, AVOIDABLE, MEANING, Cause
from schemas.tables.read import cursor, open_published, reading_only
from tests.schemas.tables.loss_rows import COST_MODEL, END, NOON, Row, loss, parting, rungs, spot

Ask = Callable[..., list[Row]]
LATER = NOON + dt.timedelta(seconds=300)
TABLES: dict[str, list[Row]] = {
    "requests": [
        {
            "request_id": "q", "started_at": NOON, "prompt_tokens": 100, "unexplained_reason": "gap",
            "causes": [{"cause": "hit", "tokens": 40}, {"cause": "evicted", "tokens": 50}, {"cause": "unexplained", "tokens": 10}],
        },
        {"request_id": "open", "started_at": NOON, "prompt_tokens": 7, "causes": None},
    ],
    "loss_10s": [
        loss("hit", 600), loss("evicted", 300), loss("evicted", 100, worker="w2", lost_s=None, seconds_known_tokens=0),
        loss("diverged", 50, pool="other"), loss("evicted", 999, bucket=END),
    ],
    "ladder_10s": [rungs(1000, 800, 700, 700, 600), rungs(100, 50, 50, 60, 40), rungs(9, 9, 9, 9, 9, bucket=END)],
    "prefixes": [
        spot(7, 400), spot(7, 300, window_start=LATER, route="agent", copies=None, workers=9, example_request_id="q9"),
        spot(0, 200, route="a", depth_tokens=0), spot(0, 100, route="b"), spot(0, 50, route="a", window_start=LATER),
        spot(8, 1, by_cause=[], top_cause=None),
    ],
    "divergence": [
        parting(32, 64, 600), parting(64, 128, 200), parting(32, 64, 100, window_start=LATER, all_prompt_tokens=500_000),
        parting(0, 16, 5, template=None),
    ],
    "cost_models": [COST_MODEL, COST_MODEL | {"hardware": "h200", "gpus": 4.0}],
}  # fmt: skip


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory, published: Callable[..., Path]) -> Iterator[Ask]:
    connection = open_published(published(tmp_path_factory.mktemp("macros"), TABLES))

    def answer(sql: str, *values: Any) -> list[Row]:
        at = cursor(connection)
        at.execute(reading_only(at, sql), list(values))
        names = [d[0] for d in at.description]
        return [dict(zip(names, row, strict=True)) for row in at.fetchall()]

    yield answer
    connection.close()


def test_why_tells_the_runs_of_one_request_from_its_first_token_on(ask: Ask) -> None:
    found = ask("FROM why('q')")
    assert [(r["from_token"], r["cause"], r["tokens"], r["share"]) for r in found] == [
        (0, "hit", 40, 0.4), (40, "evicted", 50, 0.5), (90, "unexplained", 10, 0.1)
    ]  # fmt: skip
    assert found[1]["meaning"] == MEANING[Cause.EVICTED] and found[1]["who_can_act"] == ACTOR[Cause.EVICTED]
    assert found[2]["meaning"].endswith("; reason: gap")
    (open_one,) = ask("FROM why('open')")
    assert (open_one["cause"], open_one["tokens"], open_one["share"]) == (None, None, None)
    assert open_one["meaning"].startswith("not attributed")
    assert ask("FROM why('nobody')") == []


def test_loss_adds_up_to_all_prompt_tokens_and_costs_what_is_known(ask: Ask) -> None:
    found = {r["cause"]: r for r in ask("FROM loss(?, ?)", NOON, END)}
    assert [*found] == ["hit", "evicted", "diverged"]
    assert sum(r["share"] for r in found.values()) == pytest.approx(1)
    evicted = found["evicted"]
    assert (evicted["tokens"], evicted["requests"], evicted["lost_s"], evicted["seconds_known_tokens"]) == (400, 20, 0.3, 300)
    assert evicted["gpu_s"] == pytest.approx(0.3 * 6)
    assert evicted["money"] == pytest.approx(0.3 * 6 * 4.5 / 3600)
    assert (evicted["currency"], evicted["avoidable"], evicted["who_can_act"]) == ("EUR", True, "capacity")
    assert (found["diverged"]["gpu_s"], found["diverged"]["money"], found["diverged"]["currency"]) == (None, None, None)
    assert found["hit"]["who_can_act"] is None
    assert ask("FROM loss(?, ?)", END + dt.timedelta(hours=1), END + dt.timedelta(hours=2)) == []


def test_the_ladder_says_what_each_step_lost_and_null_where_nothing_is_told(ask: Ask) -> None:
    found = ask("FROM ladder(?, ?)", NOON, END)
    assert [(r["step"], r["tokens"], r["lost_here"]) for r in found] == [
        ("prompt", 1100, None), ("ideal", 850, 250), ("held", 750, 100), ("selected", 760, -10), ("delivered", 640, 120)
    ]  # fmt: skip
    assert found[4]["share"] == pytest.approx(640 / 1100)
    assert [r["tokens"] for r in ask("FROM ladder(?, ?)", NOON - dt.timedelta(days=1), NOON)] == [None] * 5


def test_hotspots_are_added_up_over_windows_and_roots_kept_apart_by_kind(ask: Ask) -> None:
    found = ask("FROM hotspots(?, ?)", NOON, END)
    assert [(r["prefix"], r["route"], r["lost_tokens"]) for r in found] == [(7, "chat", 700), (0, "a", 250), (0, "b", 100), (8, "chat", 1)]
    top = found[0]
    assert (top["error_tokens"], top["requests"], top["windows"], top["workers"], top["copies"]) == (20, 40, 2, 9, None)
    assert (top["by_cause"], top["top_cause"]) == (
        [{"cause": "evicted", "tokens": 525}, {"cause": "load_bypass", "tokens": 175}], "evicted"
    )  # fmt: skip
    assert (top["example_request_id"], top["lost_s"]) == ("q9", pytest.approx(0.7))
    assert [r["lost_tokens"] for r in ask("FROM hotspots(?, ?)", NOON, LATER)] == [400, 200, 100, 1]
    assert [r["lost_tokens"] for r in ask("FROM hotspots(?, ?)", LATER + dt.timedelta(seconds=60), END)] == [300, 50]
    assert found[3]["by_cause"] is None


def test_divergence_names_the_depth_of_most_tokens_and_the_share_of_all_prompt_tokens(ask: Ask) -> None:
    first, second = ask("FROM divergence_of(?, ?)", NOON, END)
    assert (first["template"], first["depth_from"], first["depth_to"], first["diverged_tokens"]) == ("v7", 32, 64, 900)
    assert (first["requests"], first["all_requests"], first["all_prompt_tokens"]) == (90, 200, 1_500_000)
    assert (first["depth_share"], first["share"]) == (pytest.approx(700 / 900), pytest.approx(900 / 1_500_000))
    assert (second["template"], second["diverged_tokens"]) == (None, 5)


def test_every_cause_has_its_words_in_sql(ask: Ask) -> None:
    for c in Cause:
        (said,) = ask("SELECT cause_meaning(?) AS m, cause_actor(?) AS a, cause_avoidable(?) AS v", *[c.label] * 3)
        assert said == {"m": MEANING[c], "a": ACTOR.get(c), "v": c in AVOIDABLE}


def test_every_macro_says_what_it_answers(ask: Ask) -> None:
    found = ask("SELECT function_name, comment FROM duckdb_functions() WHERE database_name = 'warmwatch' AND NOT internal")
    assert {"why", "loss", "ladder", "hotspots", "divergence_of", "hit_rate", "ttft"} <= {r["function_name"] for r in found}
    assert all(r["comment"] for r in found)


def test_one_pool_can_be_asked_for(ask: Ask) -> None:
    assert [r["cause"] for r in ask("FROM loss(?, ?, in_pool := 'other')", NOON, END)] == ["diverged"]
    assert ask("FROM ladder(?, ?, in_pool := 'other')", NOON, END)[0]["tokens"] is None
    for name in ("hotspots", "divergence_of"):
        assert ask(f"FROM {name}(?, ?, in_pool := 'other')", NOON, END) == []
        assert ask(f"FROM {name}(?, ?, in_pool := ?)", NOON, END, "coder") == ask(f"FROM {name}(?, ?, in_pool := ?)", NOON, END, None) != []
