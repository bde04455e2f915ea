"""What `warmwatch report` says of files that the collector's own publisher made: full, empty, of some sources only, older, and hostile."""

from __future__ import annotations

import datetime as dt
import os
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import duckdb
import pytest

from schemas.causes import Cause
from schemas.tables.read import FILE_NAME
from schemas.tables.report.as_html import html
from schemas.tables.report.as_text import text
from schemas.tables.report.command import ReportSettings, moment, read, run
from schemas.tables.report.facts import QUESTIONS, question
from schemas.tables.report.sections import Cell, Grid, Page, Section
from schemas.tables.report.words_of import page_of
from schemas.tables.words import LINE, width
from tests.schemas.tables.loss_rows import COST_MODEL, END, NOON, NOW, Row, counts, latency, loss, parting, rungs, spot
from warmwatch import main

Published = Callable[..., Path]
JOINED = "\u00a0"
EVIL = "a\x1b[2J<script>alert('x')</script>\n\u202e🦊" + "very long " * 200


def curve(scale: float, hit: float, worker: str | None = None, **more: Any) -> Row:
    usual: Row = {
        "window_start": NOON, "window_s": 300, "pool": "coder", "worker": worker, "kind": "capacity", "scale": scale, "tier": "GPU",
        "capacity_blocks": int(1000 * scale), "ttl_s": None, "hit_tokens": hit, "prompt_tokens": 1_000_000, "hit_blocks": hit / 16,
        "prompt_blocks": 62_500, "method": "exact", "error": 0.0,
    }  # fmt: skip
    return usual | more


def full_bars(worker: str | None, pressure: float | None) -> Row:
    return {
        "window_start": NOON, "window_s": 300, "pool": "coder", "worker": worker, "capacity_blocks": 1000, "working_set_blocks": 900,
        "active_sessions": 20, "active_blocks": 1300, "pressure": pressure, "duplication": 1.5, "duplicate_tokens": 5000,
        "lifetime_p50_s": 300.0, "idle_p50_s": 20.5, "return_p50_s": 0.5, "returned_blocks": 7,
    }  # fmt: skip


FULL: dict[str, list[Row]] = {
    "worker_10s": [counts("w1", 100_000, 90_000, event_mismatches=3), counts("w2", 50_000, 15_000), counts("w9", 10, 10, pool="other")],
    "latency_10s": [latency(0.2, 200), latency(1.5, 150), latency(3.0, 20, worker="w2")],
    "loss_10s": [
        loss("hit", 105_000), loss("evicted", 30_000, worker="w2"), loss("diverged", 6_000, route="dated"), loss("first_seen", 8_500),
        loss("unexplained", 500, lost_s=None, seconds_known_tokens=0),
    ],
    "ladder_10s": [rungs(150_000, 141_000, 120_000, 119_000, 105_000)],
    "prefixes": [spot(0xABC, 20_000, template="v7"), spot(0, 6_000, route="dated", depth_tokens=0)],
    "divergence": [parting(37, 38, 600_000, route="dated")],
    "reuse_curves": [*(curve(s, h) for s, h in ((0.5, 5e5), (1, 7e5), (2, 8e5))), *(curve(s, 4e5 * s, "w1") for s in (1, 2))],
    "pressure": [full_bars(None, 1.3), full_bars("w1", None)],
    "changes": [{"happened_at": NOON, "kind": "deploy", "text": "prompt v7", "author": "dana", "pool": None, "worker": None}],
    "cost_models": [COST_MODEL],
    "workers": [{"pool": "coder", "worker": "w2", "rank": 0, "trust": "degraded", "trust_reason": "gap of 3 batches", "up": False}],
    "data_health": [
        {"area": "stream", "subject": "kv-events/0", "name": "lag_records", "value": 5.0, "status": "warn", "detail": "5 behind"}
    ],
    "dead_letters": [{"set_aside_at": NOON, "topic": "decisions", "stream_partition": 0, "stream_offset": 1, "reason": "no worker"}],
    "requests": [
        {"request_id": "q", "started_at": NOON, "pool": "coder", "unexplained_tokens": 500, "unexplained_reason": "gap", "hit_tokens": 1,
         "loss_trust": "degraded", "ended_at": NOON, "status": 200},
    ],
}  # fmt: skip


def page(folder: Path, **settings: Any) -> Page:
    return page_of(read(ReportSettings(data_dir=folder, **{"since": "10min", **settings}), NOW))


def said(folder: Path, **settings: Any) -> str:
    return " ".join(text(page(folder, **settings)).split())


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, published: Published) -> Path:
    folder = tmp_path_factory.mktemp("full")
    published(folder, FULL)
    return folder


def test_the_whole_story_is_told_with_numerators_denominators_and_what_is_not_known(full: Path) -> None:
    words = said(full)
    for part in (
        "2026-11-30 12:00 to 2026-11-30 12:10 UTC (10 min).",
        "by a collector that is running.",
        "Counts there are from 2026-11-30 12:00:00 to 2026-11-30 12:00:10 only.",
        "Of 150 k attributed prompt tokens, 105 k (70.0%) were found in a cache.",
        "36 k (24.0%) were computed for causes that somebody can act on, which took 36 s of prefill (288 GPU s), 0.36 EUR.",
        "The largest of these is evicted: 30 k tokens (20.0%), evicted from this worker. Who can act: capacity.",
        "computed again most: 1 600 tokens (0000000000000abc) of route chat, template v7, model m, at least 20 k tokens in 20 requests, "
        "most of them evicted.",
        "Prompts of route dated, template v7, model m differ at token 37: 30 of 100 requests computed 600 k tokens again",
        "known after another beginning (60.0% of 1 M prompt tokens, 100.0% of them there, 3 s of prefill), such as q2.",
        "Pool coder, as one cache: twice the cache would bring +10.0 points of hit rate (100 k of 1 M prompt tokens).",
        "a request in a window came to 1.30 times what its caches hold (worst of 1 window, 2026-11-30 12:00:00). Sessions that ended in it "
        "count, too; if all went on, no policy could keep them all.",
        "w1 coder 100 1 90.0% █████▍ 90 000 of 100 000 reports, 100 199 ms 1.5 s 1.5 s 350",
        "2.99 s 2.99 s too few 20",
        "For 3 of 300 requests the engine's report and the KV events disagree.",
        "delivered 105 000 70.0%",
        "14 000 found in its cache",
        "evicted 30 000 20.0% ██▍ 10 30 s 240 GPU s 0.30 EUR capacity",
        "capacity 30 000 20.0% ██▍ evicted: evicted from this worker",
        "unexplained 500 0.3% 10 not known",
        "Prefill seconds are known for 44 500 of 45 000 computed tokens.",
        "coder/m on default: fitted, 500 prefills, typically off by 2 ms",
        "dated coder 6 000 0.0% 6 000 100.0%",
        "none in common dated / v7 / t 6 000",
        "2 x GPU 80.0%",
        "prompt v7 dana",
        "Tokens without a told cause: 500 of 150 000 (0.3%). gap: 500 tokens of 1 request",
        "1 change meanwhile, the newest at 2026-11-30 12:00:00: deploy, fleet.",
        "note: KV events of 1 worker are not complete now; see Data health.",
        "1 told from events that were not complete.",
        "Events of coder/w2/0 are degraded now (gap of 3 batches); its metrics page does not answer.",
        "warn: stream kv-events/0 lag_records: 5 behind",
        "Set aside: 1 record of decisions: no worker",
    ):
        assert part in words, part


def test_a_pool_that_is_not_there_is_told_with_those_that_are(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ReportSettings(data_dir=full, pool="codre\x1b")) == 1
    assert capsys.readouterr().err == "warmwatch report: setting `pool`: there is no pool codre\\x1b; there are coder, other\n"


def test_one_pool_alone_can_be_asked_for(full: Path) -> None:
    words = said(full, pool="other")
    assert "(10 min), pool other." in words
    assert "w9" in words and "w1" not in words
    assert "100.0% of 10 reported prompt tokens were found in a cache. Why the others were computed is not told" in words


def test_an_empty_file_says_no_data_everywhere_and_no_share_of_nothing(tmp_path: Path, published: Published) -> None:
    published(tmp_path, {}, watermark=None, **dict.fromkeys(("has_events", "has_decisions", "has_outcomes", "has_load"), False))
    words = said(tmp_path)
    assert words.count("No data yet.") == 8
    assert "No data yet: no request of this time was attributed, and no engine reported hits." in words
    assert "Nothing was received yet. Never received: KV events" in words
    assert "No counts of any worker lie in this time." in words
    assert "There is no cost model" not in words
    assert "%" not in words and " 0 " not in words.replace("0 s before", "")


def test_engine_counters_alone_give_hit_rates_and_say_what_is_missing(tmp_path: Path, published: Published) -> None:
    only = {"bucket": NOON, "pool": "coder", "worker": "w1", "engine_query_tokens": 1000.0, "engine_hit_tokens": 400.0}
    flags = dict.fromkeys(("has_events", "has_decisions", "has_outcomes"), False)
    published(tmp_path, {"worker_10s": [only]}, **flags)
    words = said(tmp_path)
    assert "By the engines' own counters 40.0% of 1 000 looked-up tokens were found in a cache." in words
    assert "w1 coder - - 40.0% ████▊ 400 of 1 000 engine counters" in words
    assert "Without KV events causes, hotspots by loss, the loss ladder and duplication cannot be told." in words
    assert "No time to first token was recorded." in words


def test_events_without_reports_give_hit_rates_from_events(tmp_path: Path, published: Published) -> None:
    row = counts("w1", 1000, 300, reported_requests=0, reported_prompt_tokens=0, cached_tokens=0)
    published(tmp_path, {"worker_10s": [row, counts("w2", 10, 1, event_prompt_tokens=None, reported_prompt_tokens=None)]})
    words = said(tmp_path)
    assert "w1 coder 100 1 30.0% ███▋ 300 of 1 000 KV events, 100" in words
    assert "w2 coder 100 1 not reported nobody" in words


def test_without_prices_and_models_money_is_not_known_and_a_loud_share_of_unexplained_is_at_the_top(
    tmp_path: Path, published: Published
) -> None:
    published(tmp_path, {"loss_10s": [loss("hit", 90, lost_s=0.0), loss("unexplained", 10, lost_s=None, seconds_known_tokens=0)]})
    words = said(tmp_path)
    assert "None were computed for causes that somebody can act on." in words
    assert "note: 10.0% of the tokens have no told cause" in words
    assert "There is no cost model yet: seconds and money are not known." in words
    free = COST_MODEL | {"price_per_gpu_hour": None, "gpus": None, "source": None, "residual_s": None}
    published(tmp_path, {"loss_10s": [loss("evicted", 10)], "cost_models": [free]})
    words = said(tmp_path)
    assert "No price is configured" in words and "The number of GPUs of some workers is not configured" in words
    assert "nothing fitted, 500 prefills" in words
    assert "which took 10 ms of prefill." in words


def test_seconds_of_a_part_are_not_told_as_those_of_all(tmp_path: Path, published: Published) -> None:
    published(tmp_path, {"loss_10s": [loss("evicted", 30), loss("cleared", 10, lost_s=None, seconds_known_tokens=0)]})
    assert "which took 30 ms of prefill as far as known (75.0% of them)." in said(tmp_path)


def test_tokens_an_hour_are_told_of_the_time_with_counts_and_not_of_less_than_a_window(tmp_path: Path, published: Published) -> None:
    until = [NOON + dt.timedelta(seconds=s) for s in (280, 290, 590)]
    for last, rate in zip(until, ("", ", 7.2 M an hour", ", 3.6 M an hour"), strict=True):
        published(tmp_path, {"worker_10s": [counts("w", 9, 9), counts("w", 9, 9, bucket=last)], "divergence": [parting(0, 1, 600_000)]})
        assert f"computed 600 k tokens again that were known after another beginning{rate} (60.0%" in said(tmp_path, since="24h")


def test_the_text_fits_a_terminal_and_breaks_words_where_it_must(full: Path, tmp_path: Path, published: Published) -> None:
    assert max(map(width, text(page(full)).splitlines())) <= LINE
    long = "🦊" * 300
    hostile = {
        "loss_10s": [loss(cause.label, 10**9, route=long, worker=long, pool=long) for cause in Cause],
        "prefixes": [spot(2**64 - 1, 10**10, route=long, template=long, tenant=long, example_request_id="r" * 256)],
        "divergence": [parting(0, 1, 9, route=long)],
        "changes": [{"happened_at": NOON, "kind": "deploy", "text": "prompt " * 40, "author": long, "pool": long, "worker": long}],
    }
    published(tmp_path, hostile)
    assert max(map(width, text(page(tmp_path)).splitlines())) <= LINE


def test_figures_are_never_broken_and_a_table_too_wide_goes_without_bars() -> None:
    rows = [[Cell("name " * 30), *(Cell("1 000 000 000 000".replace(" ", JOINED), 0.5) for _ in range(5))]]
    shown = text(Page("t", [], [Section("s", (), [Grid(["words", *"abcde"], rows)])]))
    assert "█" not in shown and shown.count("1 000 000 000 000") == 5
    assert max(map(width, shown.splitlines())) <= LINE
    assert "███ " in text(Page("t", [], [Section("s", (), [Grid(["words", *"abc"], [rows[0][:4]])])])), "shorter ones, where these fit"
    narrow = text(Page("t", [], [Section("s", (), [Grid(["words", "one"], [[Cell("a"), Cell("1", 0.5)]])])]))
    assert "██████" in narrow


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_where_prompts_differ_is_said_as_exactly_as_it_is_known(tmp_path: Path, published: Published) -> None:
    rows = [
        parting(32, 40, 900, route="a"), parting(0, 1, 300, route="b"), parting(8, 9, 280, route="b"), parting(16, 17, 260, route="b"),
        parting(None, None, 100, route="c"), parting(5, 6, 99, route="c"),
        parting(None, None, 0, route="d", requests=0),
    ]  # fmt: skip
    published(tmp_path, {"divergence": rows})
    words = said(tmp_path)
    for route, where in (
        ("a", "between tokens 32 and 39"),
        ("b", "at many depths, most often at token 0"),
        ("c", "at a depth that is not known"),
    ):
        assert f"route {route}, template v7, model m differ {where}: " in words
    assert "route d" not in words


def test_names_from_outside_can_steer_neither_terminal_nor_browser(tmp_path: Path, published: Published) -> None:
    tables = {
        "loss_10s": [loss("hit", 5, route=EVIL), loss("evicted", 9, route=EVIL)],
        "prefixes": [spot(1, 9, route=EVIL, snippet=EVIL, example_request_id=EVIL), spot(0, 9, route=EVIL, template=None)],
        "divergence": [parting(0, 1, 9, route=EVIL)],
        "changes": [{"happened_at": NOON, "kind": EVIL, "text": EVIL, "author": EVIL, "pool": EVIL, "worker": EVIL}],
        "worker_10s": [counts(EVIL, 10, 5)],
        "workers": [{"pool": EVIL, "worker": EVIL, "rank": 0, "trust": EVIL, "trust_reason": EVIL}],
        "dead_letters": [{"set_aside_at": NOON, "topic": EVIL, "reason": EVIL}],
        "data_health": [{"area": EVIL, "subject": EVIL, "name": EVIL, "value": 1.0, "status": "bad", "detail": EVIL}],
        "pressure": [full_bars(EVIL, 1.0)],
    }
    published(tmp_path, tables, state=EVIL)
    whole = page(tmp_path)
    shown = text(whole)
    assert "a\\x1b[2J<script>" in shown and "🦊" in shown
    assert not {c for c in shown if not c.isprintable()} - {"\n"}
    written = html(whole)
    assert not {c for c in written if not c.isprintable()} - {"\n", JOINED}
    elements = _Elements()
    elements.feed(written)
    assert set(elements.tags) <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "section", "div", "table", "thead", "tbody", "tr",
        "th", "td", "svg", "rect",
    }  # fmt: skip
    assert not {name for name in elements.attributes if name.startswith("on") or name in ("href", "src", "style")}
    assert any("<script>alert('x')</script>" in words for words in elements.words)


def test_the_html_file_needs_nothing_else_and_says_what_the_terminal_says(full: Path) -> None:
    written = html(page(full))
    assert re.search(r"https?:|url\(|@import|<script|<link", written) is None
    assert "default-src 'none'" in written and "prefers-color-scheme: dark" in written
    elements = _Elements()
    elements.feed(written)
    words = "".join(elements.words).replace(JOINED, " ")
    for part in ("Of 150 k attributed prompt tokens, 105 k (70.0%) were found in a cache.", "90 000 of 100 000", "prompt v7"):
        assert part in words
    assert elements.tags.count("svg") == written.count('aria-hidden="true"') > 10


def test_the_command_prints_and_writes(full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    out.write_text("before")
    assert main(["report", "--since", "10min", "--until", "2026-11-30T12:10", "--data-dir", str(full), "--html", str(out)]) == 0
    assert "Of 150 k attributed prompt tokens" in capsys.readouterr().out.replace(JOINED, " ")
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_who_stops_reading_gets_a_quiet_end_and_the_whole_html_file(full: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    command = [sys.executable, "-m", "warmwatch", "report", "--since", "24h", "--data-dir", str(full), "--html", str(out)]
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert out.read_text(encoding="utf-8").endswith("</html>\n")


def test_the_report_is_printed_also_where_the_html_file_cannot_be_written(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--data-dir", str(full), "--html", "/nowhere/at/all.html"]) == 1
    assert "Warmwatch report" in capsys.readouterr().out


def test_the_share_of_time_to_first_token_is_told_where_times_are_known(tmp_path: Path, published: Published) -> None:
    row = {"request_id": "q", "started_at": NOON, "pool": "coder", "ttft_s": 2.0, "lost_s": 1.0, "avoidable_s": 0.5}
    published(tmp_path, {"requests": [row], "loss_10s": [loss("evicted", 9)]})
    words = said(tmp_path)
    assert (
        "by the cost model 50.0% of the time to first token was prefill of what was no hit, 25.0% of what somebody can act on (1" in words
    )


def test_where_the_collector_stopped_the_report_ends_with_the_data(full: Path) -> None:
    later = read(ReportSettings(data_dir=full, since="10min"), NOW + dt.timedelta(days=1))
    assert (later.since, later.until) == (NOON, END)
    assert "From a file published 24 h before that by a collector that is running. It has not been renewed since." in " ".join(
        page_of(later).about
    )


@pytest.mark.parametrize(
    ("given", "status", "says"),
    [
        (["--since", "soon"], 2, "'soon' is neither a span such as 90s"),
        (["--until", "2026-13-40"], 2, "until"),
        (["--since", "99999w"], 2, "longer than 100 years"),
        (["--since", "2026-11-30T12:30", "--until", "2026-11-30T12:00"], 1, "is not before the end"),
        (["--html", "/nowhere/at/all.html"], 1, "setting `html`: /nowhere/at/all.html cannot be written: No such file or directory"),
        (["--db", "/nowhere/at/all.duckdb"], 1, "there is no published database at /nowhere/at/all.duckdb"),
    ],
)
def test_what_is_wrong_is_said_by_name(full: Path, capsys: pytest.CaptureFixture[str], given: list[str], status: int, says: str) -> None:
    assert main(["report", "--data-dir", str(full), *given]) == status
    assert says in capsys.readouterr().err


def test_a_file_of_an_earlier_version_is_told_as_far_as_it_goes(full: Path, tmp_path: Path) -> None:
    old = tmp_path / FILE_NAME
    old.write_bytes((full / FILE_NAME).read_bytes())
    with duckdb.connect(old) as db:
        for view in ("loss_10s", "prefixes", "reuse_curves", "divergence"):
            db.execute(f"DROP VIEW main.{view}")
        db.execute("DROP MACRO TABLE ladder")
    words = said(tmp_path)
    assert "90.0%" in words
    assert words.count("Not in this file: it is of an earlier version.") == 6
    assert "cannot answer: ladder, loss, routes, hotspots, divergence, reuse." in words


def test_times_are_spans_before_the_end_or_moments_in_utc() -> None:
    assert moment("90s", END) == END - dt.timedelta(seconds=90)
    assert moment("1.5h", END) == moment("90 min", END) == moment("90m", END)
    assert moment("7d", END) == moment("1w", END)
    assert moment("2026-11-30T13:00+01:00", END) == moment("2026-11-30 12:00", END) == moment("2026-11-30T12:00Z", END) == NOON
    with pytest.raises(ValueError, match="neither a span"):
        moment("1 fortnight", END)


def test_each_question_stands_in_a_file_whose_first_line_asks_it() -> None:
    folder = Path(__file__).parents[3] / "schemas" / "tables" / "report" / "sql"
    assert {p.stem for p in folder.iterdir()} == set(QUESTIONS)
    for name in QUESTIONS:
        first = question(name).splitlines()[0]
        assert first.startswith("-- ") and "?" in first
