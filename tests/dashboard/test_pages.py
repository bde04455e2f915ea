"""Each page on each form of the published file, without a browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from streamlit.testing.v1 import AppTest

from dashboard import queries, units
from dashboard.filters import Filters, Window
from dashboard.pages import PAGES
from dashboard.pages.now import _a_second
from dashboard.pages.sql import _csv
from dashboard.run import ENTRY
from dashboard.site import Site
from schemas.tables.published import MAJOR
from tests.dashboard import sample

FORMS = ("full", "empty", "events_only", "load_only")


@pytest.fixture
def page(on: Callable[..., Site]) -> Iterator[Callable[..., AppTest]]:
    """Runs one page of the app with filters in its address."""

    def open_page(name: str, form: str | Path = "full", late_s: float = 1.0, **query: str) -> AppTest:
        on(form, late_s)
        app = AppTest.from_file(str(ENTRY), default_timeout=30)
        app.query_params.update(query)
        app.run()
        if name != "now":
            # AppTest.switch_page knows files only; these pages are functions.
            app._page_hash = app.session_state["pages"][name]._script_hash
            app.run()
        return app

    yield open_page


def texts(app: AppTest) -> str:
    """All that the page says."""
    kinds = ("text", "caption", "markdown", "subheader", "html", "info", "warning", "error", "code")
    return "\n".join(str(getattr(e, "value", None) or e.proto.body) for kind in kinds for e in app.get(kind))


def figures(app: AppTest) -> dict[str, str]:
    return {m.label: m.value.replace("\u202f", " ").removeprefix(":gray[").removesuffix("]") for m in app.metric}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PAGES)
def test_every_page_runs_on_every_form(name: str, form: str, page: Callable[..., AppTest]) -> None:
    app = page(name, form)
    assert not app.exception
    assert not app.error


@pytest.mark.parametrize("name", PAGES)
def test_every_page_runs_with_every_filter(name: str, page: Callable[..., AppTest]) -> None:
    app = page(name, pool="qwen3-32b", worker="gpu-3:8000", route=sample.NASTY_ROUTE, model="Qwen/Qwen3-32B", range="15m")
    assert not app.exception


@pytest.mark.parametrize("name", PAGES)
def test_a_missing_file_says_what_to_do_and_nothing_else(name: str, page: Callable[..., AppTest], tmp_path: Path) -> None:
    app = page(name, tmp_path)
    assert not app.exception
    assert not app.metric
    assert "start the collector (warmwatch collect)" in texts(app)


def test_another_version_says_what_to_do(page: Callable[..., AppTest], tmp_path: Path) -> None:
    sample.write(sample.empty(), tmp_path, version=f"{MAJOR + 1}.0")
    assert "run collector and readers of one release" in texts(page("now", tmp_path))


def test_a_stale_file_is_said_to_be_stale_with_the_time_where_figures_end(page: Callable[..., AppTest]) -> None:
    warnings = [w.value for w in page("now", late_s=240).warning]
    assert len(warnings) == 1
    assert "4\u202fmin old" in warnings[0]
    assert "13:59:59 UTC" in warnings[0]
    assert not page("now", late_s=1).warning


def test_an_empty_database_shows_no_zero_where_nothing_is_known(page: Callable[..., AppTest]) -> None:
    app = page("now", "empty")
    assert set(figures(app).values()) == {"no data yet"}
    assert "nothing has come yet" in app.info[0].value


def test_events_alone_say_what_is_missing_and_keep_residency(page: Callable[..., AppTest]) -> None:
    found = figures(page("now", "events_only"))
    assert found["Hit rate, by token"] == "not reported"
    assert found["Requests"] == "not reported"
    assert found["Failed"] == "not reported"
    assert "no outcomes received yet" in texts(page("now", "events_only"))


def test_load_alone_shows_the_engines_own_hit_rate(page: Callable[..., AppTest], on: Callable[..., Site]) -> None:
    app = page("now", "load_only")
    snapshot = on("load_only").database.snapshot()
    row = queries.ask(snapshot, "key_figures", Filters(), Filters().window(snapshot.watermark))[0]
    assert row["engine_hit_rate"] is not None
    assert figures(app)["Hit rate, by token"] == units.share(row["engine_hit_rate"]).replace("\u202f", " ")


@pytest.mark.parametrize("query", [{}, {"worker": "gpu-3:8000"}, {"range": "15m", "route": "agent-coder"}])
def test_key_figures_equal_sql_on_the_file(query: dict[str, str], page: Callable[..., AppTest], on: Callable[..., Site]) -> None:
    found = figures(page("now", **query))
    snapshot = on("full").database.snapshot()
    filters = Filters.from_url(query)
    window = filters.window(snapshot.watermark)
    row = queries.ask(snapshot, "key_figures", filters, window)[0]
    latency = queries.ask(snapshot, "ttft", filters, window, measure="ttft")[0]
    assert found["Hit rate, by token"] == f"{100 * row['hit_rate']:.1f} %"
    assert found["Failed"] == f"{100 * row['failed'] / row['requests']:.1f} %"
    assert found["TTFT p99"] == units.seconds(latency["p99_s"]).replace("\u202f", " ")


def test_percentiles_of_few_requests_are_hidden_and_said_to_be(page: Callable[..., AppTest]) -> None:
    app = page("now", route=sample.NASTY_ROUTE, range="5m")
    assert figures(app)["TTFT p99"] in ("too few", "not reported")


@pytest.mark.parametrize("name", PAGES)
def test_names_are_shown_as_text_and_never_as_html(name: str, page: Callable[..., AppTest]) -> None:
    app = page(name, route=sample.NASTY_ROUTE, worker="<img src=x onerror=alert(1)>")
    assert not app.exception
    read_as_html = "\n".join(str(e.value) for e in app.get("html"))
    assert "ww-brand" in read_as_html
    assert "<script" not in read_as_html
    assert "<img" not in read_as_html


def test_a_saved_question_is_put_in_the_editor_and_runs(page: Callable[..., AppTest]) -> None:
    app = page("sql")
    app.selectbox(key="sql_question").select("ttft_by_worker").run()
    assert "-- Which TTFT percentiles has each worker?" in app.text_area(key="sql_text").value
    app.button[0].click().run()
    assert not app.exception
    shown = app.dataframe[0].value
    assert {"worker", "p50_s", "p99_s"} <= set(shown.columns)


def test_a_refused_query_says_why(page: Callable[..., AppTest]) -> None:
    app = page("sql")
    app.text_area(key="sql_text").input("DROP TABLE requests").run()
    app.button[0].click().run()
    assert not app.exception
    assert "Only questions that read" in texts(app)


def test_the_schema_browser_tells_every_column(page: Callable[..., AppTest], on: Callable[..., Site]) -> None:
    app = page("sql")
    named = {column for frame in app.dataframe for column in frame.value.get("column_name", [])}
    assert {"watermark", "cached_tokens", "trust_reason"} <= named


def test_the_range_buttons_write_to_the_address(page: Callable[..., AppTest]) -> None:
    app = page("now", worker="gpu-1:8000")
    app.get("button_group")[0].set_value("15m").run()
    assert not app.exception
    assert app.query_params["range"] == "15m"
    assert app.query_params["worker"] == "gpu-1:8000"


def test_no_page_puts_two_different_numbers_for_one_thing(page: Callable[..., AppTest]) -> None:
    """Now's hit rate is the table's on Workers, summed."""
    app = page("workers")
    frame = app.dataframe[0].value
    assert frame["requests"].sum() == int(
        re.sub(r"\D", "", next(c.value for c in page("now").caption if " in 1" in c.value).split(" in ")[0])
    )


@pytest.mark.parametrize(("had_s", "a_second"), [(10, 3.0), (25, 3.0), (5, 6.0), (3, None)])
def test_a_bin_under_way_counts_for_the_seconds_it_has_had(had_s: float, a_second: float | None) -> None:
    start = datetime(2026, 11, 29, 13)
    view: Any = SimpleNamespace(window=Window(start, start + timedelta(minutes=5), 10), snapshot=SimpleNamespace())
    view.snapshot.watermark = start + timedelta(seconds=had_s)
    assert _a_second(view, {"bin_at": start, "requests": 30}, "requests") == a_second
    assert _a_second(view, {"bin_at": start, "requests": None}, "requests") is None


def test_a_download_has_bytes_as_the_screen_has_them() -> None:
    rows = pa.table({"hash": pa.array([b"\xff\x00", None], pa.binary()), "list": [[1, None], None], "n": [1, None]})
    assert _csv(rows).decode().splitlines() == ['"hash","list","n"', '"ff00","[1, None]",1', ",,"]
