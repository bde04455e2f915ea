"""What a person sees: every page in both themes and at two widths, the numbers, the clicks, the refresh."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import duckdb
import pytest
from playwright.sync_api import Page

from tests.dashboard import sample
from tests.dashboard.browser.conftest import READY

pytestmark = pytest.mark.browser

PATHS = {"now": "/", "workers": "/workers", "health": "/health", "sql": "/sql"}
METRICS = "[data-testid=stMetric]"


def figures(page: Page) -> dict[str, str]:
    """Key figures by name, thin spaces made plain."""
    pairs = page.eval_on_selector_all(
        METRICS,
        """all => all.map(m => [m.querySelector('[data-testid=stMetricLabel]').innerText.trim(),
                                m.querySelector('[data-testid=stMetricValue]').innerText.trim()])""",
    )
    return {name: value.replace("\u202f", " ") for name, value in pairs}


def query(page: Page) -> dict[str, list[str]]:
    return parse_qs(urlsplit(page.url).query)


@pytest.mark.parametrize("name", PATHS)
def test_every_page_renders_whole_in_both_themes_and_widths(name: str, address: str, visit: Callable[..., Page]) -> None:
    page = visit(address + PATHS[name])
    for scheme, background in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(23, 28, 34)")):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.wait_for_function(f"getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor === '{background}'")
        for width in (1440, 420):
            page.set_viewport_size({"width": width, "height": 1000})
            page.wait_for_function(
                f"[...document.querySelectorAll('.ww-chart .main-svg')].every(c => c.getBoundingClientRect().width < {width})"
            )
            page.wait_for_function(READY)
            _assert_whole(page, width)


def _assert_whole(page: Page, width: int) -> None:
    """No exception, nothing clipped, nothing beyond the right edge."""
    assert page.locator("[data-testid=stException], [data-testid=stBidiComponentError]").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    clipped = page.eval_on_selector_all(
        "[data-testid=stMetricValue], .ww-live, .ww-chip, .ww-title",
        "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText)",
    )
    assert clipped == []
    beyond = page.eval_on_selector_all(
        f"{METRICS}, .ww-chart", "(all, w) => all.filter(e => e.getBoundingClientRect().right > w).length", width
    )
    assert beyond == 0


def test_the_figures_shown_equal_sql_on_the_file(address: str, visit: Callable[..., Page], data_dirs: dict[str, Path]) -> None:
    shown = figures(visit(address + "/"))
    with duckdb.connect(str(data_dirs["full"] / "warmwatch.duckdb"), read_only=True) as db:
        window = "TIMESTAMP '2026-11-29 13:00:00', TIMESTAMP '2026-11-29 14:00:00'"
        (hit,) = db.execute(f"SELECT hit_rate({window})").fetchone() or (None,)
        p50, p99 = db.execute(f"SELECT ttft(NULL, 0.5, {window}), ttft(NULL, 0.99, {window})").fetchone() or (None, None)
        requests, failed = db.execute("SELECT sum(requests), sum(failed) FROM worker_10s").fetchone() or (None, None)
    assert hit is not None
    assert shown["Hit rate, by token"] == f"{100 * hit:.1f} %"
    assert shown["TTFT p50"] == f"{1e3 * p50:.0f} ms"
    assert shown["TTFT p99"] == f"{1e3 * p99:.0f} ms"
    assert shown["Failed"] == f"{100 * failed / requests:.1f} %"


def test_a_link_restores_what_was_looked_at(address: str, visit: Callable[..., Page]) -> None:
    page = visit(address + "/?worker=gpu-3%3A8000&range=15m")
    assert "gpu-3:8000" in page.locator(".st-key-f_worker").inner_html()
    all_workers = figures(visit(address + "/?range=15m"))
    assert figures(page)["Requests"] != all_workers["Requests"]


def test_filters_stay_when_the_page_changes(address: str, visit: Callable[..., Page]) -> None:
    page = visit(address + "/?range=15m")
    page.get_by_role("link", name="Data health").click()
    page.wait_for_selector(".st-key-panel-checks")
    assert query(page) == {"range": ["15m"]}
    assert urlsplit(page.url).path == "/health"


def test_a_click_on_a_cell_opens_its_worker(address: str, visit: Callable[..., Page]) -> None:
    page = visit(address + "/")
    plot = page.locator(".st-key-now-heatmap .nsewdrag")
    box = plot.bounding_box()
    assert box is not None
    plot.hover(position={"x": box["width"] * 0.3, "y": box["height"] * 4.5 / 6})
    page.wait_for_timeout(150)  # Plotly finds the cell below the pointer at most 20 times a second.
    page.mouse.down()
    page.mouse.up()
    page.wait_for_url("**/workers?*")
    assert query(page) == {"worker": ["gpu-3:8000"]}
    page.wait_for_selector(".st-key-worker-hit .main-svg")


def test_a_row_of_the_table_selects_its_worker_and_lets_go_of_it(address: str, visit: Callable[..., Page]) -> None:
    page = visit(address + "/workers")
    table = page.locator(".st-key-panel-workers [data-testid=stDataFrame]").first
    table.click(position={"x": 16, "y": 30 * 3 + 15})
    page.wait_for_url("**/workers?*")
    assert query(page)["worker"] == ["gpu-1:8000"]
    page.wait_for_selector(".st-key-worker-hit .main-svg")
    page.wait_for_function(READY)
    assert query(page)["worker"] == ["gpu-1:8000"]
    page.locator(".st-key-panel-workers [data-testid=stDataFrame]").first.click(position={"x": 16, "y": 30 * 3 + 15})
    page.wait_for_function("!location.search.includes('worker')")


def test_names_from_outside_do_not_run(address: str, visit: Callable[..., Page]) -> None:
    page = visit(address + "/?worker=%3Cimg%20src%3Dx%20onerror%3D%22window.evil%3D1%22%3E&route=%3Cscript%3Ewindow.evil%3D1%3C/script%3E")
    assert page.evaluate("window.evil") is None


def test_sql_runs_and_refuses(address: str, visit: Callable[..., Page]) -> None:
    page = visit(address + "/sql")
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_selector(".st-key-panel-sql [data-testid=stDataFrame]")
    page.get_by_role("button", name="CSV", exact=True).wait_for()  # comes a moment after the table
    page.get_by_label("Query").fill("DROP TABLE requests")
    page.get_by_label("Query").press("Control+Enter")
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_selector(".st-key-sql-error")
    assert "Only questions that read" in page.locator(".st-key-sql-error").inner_text()


def test_a_page_fills_by_itself_keeps_its_zoom_and_stands_still_while_paused(
    serve: Callable[[Path], str], visit: Callable[..., Page], tmp_path: Path
) -> None:
    page = visit(serve(tmp_path) + "/")
    assert "start the collector" in page.locator(".st-key-ww-unavailable").inner_text()

    sample.write(sample.build(minutes=20), tmp_path)
    page.wait_for_selector(METRICS)
    page.wait_for_function(READY)
    page.evaluate("document.querySelector('.st-key-now-ttft .ww-chart').wwMine = true")
    plot = page.locator(".st-key-now-ttft .nsewdrag")
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 90, steps=5)
    page.mouse.up()
    zoom = "document.querySelector('.st-key-now-ttft .ww-chart').layout.xaxis.range.map(String)"
    page.wait_for_function(f"new Date({zoom}[1]) - new Date({zoom}[0]) < 10 * 60000")
    zoomed = page.evaluate(zoom)

    later = sample.END + timedelta(seconds=30)
    sample.write(sample.build(seed=2, minutes=20, end=later), tmp_path)
    page.wait_for_function("document.querySelector('.ww-live').innerText.includes('14:00:29 UTC')")
    points = "document.querySelector('.st-key-now-traffic .ww-chart').data[0].x.at(-1)"
    page.wait_for_function(f"String({points}).startsWith('2026-11-29T14:00:00')")
    assert page.evaluate(zoom) == zoomed
    assert page.evaluate("document.querySelector('.st-key-now-ttft .ww-chart').wwMine") is True

    page.locator(".st-key-paused label").click()
    page.wait_for_function("document.querySelector('.ww-live').innerText.includes('paused')")
    before = figures(page)
    sample.write(sample.build(seed=3, minutes=20, end=sample.END + timedelta(seconds=90)), tmp_path)
    page.wait_for_function("document.querySelector('.ww-live').innerText.includes('14:01:29 UTC')")
    assert figures(page) == before
    page.locator(".st-key-paused label").click()
    page.wait_for_function(f"String({points}).startsWith('2026-11-29T14:01:00')")
    assert figures(page) != before
