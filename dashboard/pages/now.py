"""Is it real, since when, and can I trust it? The first page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import streamlit as st

from dashboard import figures, units
from dashboard.components.badges import coverage
from dashboard.components.chart import chart
from dashboard.components.key_figure import TOO_FEW, key_figure
from dashboard.components.panel import lacking, nothing, panel
from dashboard.components.tables import changes_table
from dashboard.components.view import View, begin, go_to_worker
from dashboard.queries import first

_ENGINE = "engine counters"


def now() -> None:
    view = begin("now")
    workers = view.ask("workers")
    coverage(view, workers)
    _key_figures(view)
    changes = view.ask("changes", most=50)
    height = figures.heatmap_height(len(workers))
    wide, narrow = st.columns([3, 2], gap="small")
    with wide:
        _heatmap(view)
    with narrow:
        _policies(view, changes, height)
    left, middle, right = st.columns(3, gap="small")
    with left:
        _latency(view, changes)
    with middle:
        _waste(view)
    with right:
        _traffic(view, changes)
    _changes(view, changes)


@dataclass(frozen=True)
class _Hit:
    """The hit rate and where it is from."""

    value: float | None
    hit: float | None
    of: float | None
    source: str


def _hit(figures_row: Any, outcomes: bool) -> _Hit:
    if outcomes or figures_row.get("engine_hit_rate") is None:
        return _Hit(
            figures_row.get("hit_rate"), figures_row.get("cached_tokens"), figures_row.get("reported_prompt_tokens"), "engine reports"
        )
    return _Hit(figures_row["engine_hit_rate"], figures_row["engine_hit_tokens"], figures_row["engine_query_tokens"], _ENGINE)


def _key_figures(view: View) -> None:
    published = view.snapshot.published
    unknown = units.NO_DATA if published.watermark is None else units.NOT_REPORTED
    now_, before = first(view.ask("key_figures")), first(view.ask("key_figures", view.window.before()))
    course = view.ask("key_figures_over_time")
    latency, latency_before = first(view.ask("ttft", measure="ttft")), first(view.ask("ttft", view.window.before(), measure="ttft"))
    latency_course = view.ask("ttft_over_time", measure="ttft")
    waste, waste_before = first(view.ask("waste")), first(view.ask("waste", view.window.before()))
    waste_course = view.ask("waste_over_time")
    hit, hit_before = _hit(now_, published.has_outcomes), _hit(before, published.has_outcomes)
    column = "engine_hit_rate" if hit.source == _ENGINE else "hit_rate"
    asks = now_.get("requests") or 0
    enough = (latency.get("n") or 0) >= view.site.settings.min_sample
    with st.container(horizontal=True, gap="small", key="ww-figures"):
        key_figure(
            "Hit rate, by token",
            units.share(hit.value, unknown),
            _of(hit.hit, hit.of, "tokens"),
            delta=units.points(_minus(hit.value, hit_before.value)),
            good="up",
            course=[r[column] for r in course],
            explain=f"Cached prompt tokens over prompt tokens, from {hit.source}, requests that ended in the last {view.window_text} "
            f"of data (n {units.count(now_.get('reported_requests'))}). Change against the window before.",
        )
        key_figure(
            "Hit rate, by request",
            units.share(now_.get("hit_rate_by_request"), unknown),
            f"mean of {units.count(now_.get('reported_requests'), unknown='0')} requests",
            delta=units.points(_minus(now_.get("hit_rate_by_request"), before.get("hit_rate_by_request"))),
            good="up",
            course=[r["hit_rate_by_request"] for r in course],
            explain="Each request counts once, however long: mean of cached over prompt tokens.",
        )
        per_s = _rate(view, now_) if published.has_outcomes else None
        key_figure(
            "Requests",
            units.rate(per_s, unknown=unknown),
            f"{units.count(asks)} in {view.window_text}" if published.has_outcomes else "no outcomes received",
            delta=_relative(per_s, _rate(view, before) if before.get("requests") else None),
            course=[_a_second(view, r, "requests") for r in course] if published.has_outcomes else (),
            explain="Requests that ended, a second, since the window's start or the first request in it.",
        )
        for name, column_ in (("p50", "p50_s"), ("p90", "p90_s"), ("p99", "p99_s")):
            key_figure(
                f"TTFT {name}",
                units.seconds(latency.get(column_), unknown) if enough else (TOO_FEW if latency.get("n") else unknown),
                f"n {units.count(latency.get('n'), unknown='0')}"
                + ("" if enough or not latency.get("n") else f", shown from {view.site.settings.min_sample}"),
                delta=_relative(latency.get(column_), latency_before.get(column_)) if enough else None,
                good="down",
                course=[r[column_] if r["n"] >= view.site.settings.min_sample else None for r in latency_course],
                explain="Dispatch to first content byte, streamed answers, merged from log-bucket histograms (within 1 %).",
            )
        again, known = waste.get("computed_again_tokens"), waste.get("known_prompt_tokens")
        key_figure(
            "Computed again",
            units.share(_over(again, known), unknown),
            _of(again, known, "tokens"),
            delta=units.points(
                _minus(_over(again, known), _over(waste_before.get("computed_again_tokens"), waste_before.get("known_prompt_tokens")))
            ),
            good="down",
            course=[_over(r["computed_again_tokens"], r["known_prompt_tokens"]) for r in waste_course],
            explain="Prompt tokens that some worker of the pool held at dispatch, but the chosen one computed: lost by routing or evicted.",
        )
        key_figure(
            "Failed",
            units.share(_over(now_.get("failed"), asks), unknown) if published.has_outcomes and asks else unknown,
            f"{units.count(now_.get('failed'))} of {units.count(asks)}" if published.has_outcomes else "no outcomes received",
            delta=units.points(_minus(_over(now_.get("failed"), asks), _over(before.get("failed"), before.get("requests")))),
            good="down",
            course=[_over(r["failed"], r["requests"]) for r in course] if published.has_outcomes else (),
            explain="Requests with an error or a status of 400 and more.",
        )


def _heatmap(view: View) -> None:
    rows = view.ask("hit_by_worker_over_time")
    engine = not view.snapshot.published.has_outcomes
    column, tokens = ("engine_hit_rate", "engine_query_tokens") if engine else ("hit_rate", "reported_prompt_tokens")
    note = f"{_ENGINE if engine else 'by token'} · {units.window_text(view.window.bin_s)} cells · empty: nothing reported · click a worker"
    with panel(view, "Hit rate by worker", note, "hit_by_worker_over_time"):
        if not any(r[column] is not None for r in rows):
            nothing(lacking(view, "has_outcomes") or "No requests in this window.")
            return
        clicked = chart(
            figures.hit_heatmap(rows, view.window, column, tokens),
            "now-heatmap",
            "Hit rate by worker over time, as a heatmap",
            view.revision,
        )
    go_to_worker(view, clicked)


def _policies(view: View, changes: list[dict[str, Any]], height: int) -> None:
    rows = view.ask("hit_by_policy_over_time")
    totals = {r["policy"]: r for r in view.ask("hit_by_policy")}
    note = "by token · " + " · ".join(
        f"{p} {units.share(r['hit_rate'])} of {units.count(r['requests'])} requests" for p, r in totals.items()
    )
    with panel(view, "Hit rate by policy", note if totals else "by token", "hit_by_policy_over_time"):
        if not rows:
            nothing(lacking(view, "has_decisions", "has_outcomes") or "No requests in this window.")
            return
        lines = [(p, figures.on_bins([r for r in rows if r["policy"] == p], view.window, "hit_rate")) for p in sorted(totals)]
        chart(
            figures.shares_over_time(lines, view.window, changes, height),
            "now-policies",
            "Hit rate by routing policy over time",
            view.revision,
        )


def _latency(view: View, changes: list[dict[str, Any]]) -> None:
    rows = view.ask("ttft_over_time", measure="ttft")
    few = sum(1 for r in rows if r["n"] < view.site.settings.min_sample)
    note = f"n {units.count(sum(r['n'] for r in rows))}" + (
        f" · {few} of {len(rows)} bins under {view.site.settings.min_sample} requests left out" if few else ""
    )
    with panel(view, "TTFT", note, "ttft_over_time", measure="ttft"):
        if len(rows) == few:
            nothing(
                lacking(view, "has_outcomes")
                or (f"No bin has {view.site.settings.min_sample} requests." if rows else "No streamed answer in this window.")
            )
            return
        figure = figures.latency_over_time(rows, view.window, view.site.settings.min_sample, changes, 230)
        chart(figure, "now-ttft", "TTFT percentiles over time", view.revision)


def _waste(view: View) -> None:
    rows = view.ask("waste_over_time")
    with panel(view, "Prompt tokens computed", f"tokens in {units.window_text(view.window.bin_s)}", "waste_over_time"):
        if not any(r["computed_again_tokens"] is not None for r in rows):
            nothing(lacking(view, "has_decisions", "has_outcomes") or "No request with both a decision and a report in this window.")
            return
        chart(figures.computed_tokens_over_time(rows, view.window, 230), "now-waste", "Computed prompt tokens over time", view.revision)


def _traffic(view: View, changes: list[dict[str, Any]]) -> None:
    rows = view.ask("key_figures_over_time")
    with panel(view, "Traffic", "requests a second, ended", "key_figures_over_time"):
        if not view.snapshot.published.has_outcomes or not rows:
            nothing(lacking(view, "has_outcomes") or "No requests in this window.")
            return
        rates = [{"bin_at": r["bin_at"], **{c: _a_second(view, r, c) for c in ("requests", "failed")}} for r in rows]
        per_s = [(c, figures.on_bins(rates, view.window, c)) for c in ("requests", "failed")]
        chart(
            figures.amounts_over_time(per_s, view.window, changes, 230, "/s"), "now-traffic", "Requests a second over time", view.revision
        )


def _changes(view: View, changes: list[dict[str, Any]]) -> None:
    with panel(view, "Changes", f"in this window · {len(changes)}" + (", newest 50" if len(changes) == 50 else ""), "changes", most=50):
        if not changes:
            nothing('Nothing marked and nothing seen. Mark one: warmwatch mark "rolled out prompt v7"')
            return
        changes_table(changes, "now-changes")


def _rate(view: View, row: Any) -> float | None:
    """Requests a second, over the part of the window that has data: a fleet that started five minutes ago had no 55 quiet ones before."""
    if not row.get("requests"):
        return 0.0 if view.snapshot.watermark is not None else None
    began = max(0.0, (row["first_bucket"] - view.window.since).total_seconds()) if row is not None else 0.0
    length_s = view.window.length_s - (began if began > 0 else 0.0)
    return row["requests"] / length_s if length_s > 0 else None


def _a_second(view: View, row: dict[str, Any], column: str) -> float | None:
    """A bin's count a second. The bin that is under way counts for the seconds it has had; none while these are too few to tell."""
    value, watermark = row[column], view.snapshot.watermark
    had_s = view.window.bin_s if watermark is None else min(view.window.bin_s, (watermark - row["bin_at"]).total_seconds())
    return None if value is None or had_s < view.window.bin_s / 3 else value / had_s


def _of(part: float | None, whole: float | None, unit: str) -> str:
    return units.NOT_REPORTED if part is None or not whole else f"{units.count(part)} of {units.count(whole)} {unit}"


def _over(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _relative(value: float | None, before: float | None) -> str | None:
    return None if value is None or not before else f"{100 * (value / before - 1):+.0f}\u202f%"
