"""Which worker or rank? A table of all, and the chosen one in detail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import figures, units
from dashboard.components.badges import coverage
from dashboard.components.chart import chart
from dashboard.components.panel import lacking, nothing, panel
from dashboard.components.tables import ROW_PX, changes_table, height, toned
from dashboard.components.view import View, begin, go_to_worker, one_worker, switch

Key = tuple[Any, Any, Any]


def workers() -> None:
    view = begin("workers")
    fleet = replace(view.filters, worker=None)
    known = view.ask("workers", filters=fleet)
    coverage(view, known)
    rows = _merged(view, known)
    _table(view, rows)
    if view.filters.worker:
        _detail(view)
    left, right = st.columns(2, gap="small")
    with left:
        _latency(view)
    with right:
        _load(view, rows)
    left, right = st.columns(2, gap="small")
    with left:
        _residency(view, known)
    with right:
        _residency_over_time(view)


def _merged(view: View, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a worker and rank: as last seen, with the window's counts and percentiles."""
    fleet = replace(view.filters, worker=None)
    counts = {_key(r): r for r in view.ask("counts_by_worker", filters=fleet)}
    latency = {_key(r): r for r in view.ask("ttft_by_worker", filters=fleet, measure="ttft")}
    seen = {_key(r): r for r in known}
    outcomes = view.snapshot.published.has_outcomes
    out = []
    # Workers of other models drop out; one with requests of late but no longer in `workers` stays.
    keys = list(seen) + [k for k in counts if k not in seen and not view.filters.model]
    for key in keys:
        worker, count, ttft = seen.get(key, {}), counts.get(key, {}), latency.get(key, {})
        enough = (ttft.get("n") or 0) >= view.site.settings.min_sample
        asks = count.get("requests") if outcomes else None
        out.append(
            {
                "pool": key[0],
                "worker": key[1],
                "rank": key[2],
                "trust": worker.get("trust"),
                "reason": worker.get("trust_reason"),
                "up": worker.get("up"),
                "hit": count.get("hit_rate") if outcomes else count.get("engine_hit_rate"),
                "requests": asks,
                "failed": count.get("failed") if outcomes else None,
                "prompt_tokens": count.get("prompt_tokens") if outcomes else None,
                "n": ttft.get("n"),
                **{p: ttft.get(f"{p}_s") * 1e3 if enough else None for p in ("p50", "p90", "p99")},  # type: ignore[operator]
                "load": count.get("running"),
                "running": worker.get("running"),
                "waiting": worker.get("waiting"),
                "kv_usage": worker.get("kv_usage"),
                "resident": worker.get("resident_blocks"),
                "capacity": worker.get("capacity_blocks"),
                "held": _over(worker.get("resident_blocks"), worker.get("capacity_blocks")),
                "restarts": worker.get("restarts"),
                "since": worker.get("epoch_started_at"),
            }
        )
    return out


def _table(view: View, rows: list[dict[str, Any]]) -> None:
    least = view.site.settings.min_sample
    few = sum(1 for r in rows if r["n"] and r["n"] < least)
    note = f"{len(rows)} with their ranks · last {view.window_text} · select a row to look at one"
    if few:
        note += f" · TTFT hidden for {few} under {least} requests"
    with panel(view, "Workers", note, "counts_by_worker"):
        if not rows:
            nothing("No worker is known yet: start a bridge beside each (warmwatch bridge), or send requests through the router.")
            return
        several = len({r["pool"] for r in rows}) > 1
        ranked = any(r["rank"] is not None for r in rows)
        columns = ["worker", *(["rank"] if ranked else []), *(["pool"] if several else []), "trust", "hit", "requests", "failed"]
        columns += ["p50", "p90", "p99", "running", "waiting", "kv_usage", "held", "restarts", "reason"]
        frame = pd.DataFrame(rows)[columns]
        for share in ("hit", "kv_usage", "held"):
            frame[share] = [None if v is None else 100 * v for v in (r[share] for r in rows)]
        numbers = ("hit", "p50", "p90", "p99", "running", "waiting", "kv_usage", "held")
        counts = ("requests", "failed", "restarts", *(["rank"] if ranked else []))
        frame = frame.astype(dict.fromkeys(numbers, "Float64") | dict.fromkeys(counts, "Int64"))
        config = st.column_config
        position = next((i for i, r in enumerate(rows) if r["worker"] == view.filters.worker), None)
        event: Any = st.dataframe(
            toned(frame, "trust"),
            key=f"workers-table-{view.filters.pool}-{view.filters.worker}",
            hide_index=True,
            row_height=ROW_PX,
            height=height(len(rows)),
            placeholder=units.DASH,
            on_select="rerun",
            selection_mode="single-row",
            selection_default={"selection": {"rows": [] if position is None else [position]}},
            column_config={
                "worker": config.TextColumn("worker", width=130),
                "rank": config.NumberColumn("rank", width=48),
                "pool": config.TextColumn("pool", width=95),
                "trust": config.TextColumn("trust", width=74, help="exact: every event seen; degraded: a gap; blind: nothing known"),
                "hit": config.ProgressColumn(
                    "hit rate", format="%.1f %%", min_value=0, max_value=100, width=120, help="by token, in the window"
                ),
                "requests": config.NumberColumn("requests", width=74),
                "failed": config.NumberColumn("failed", width=60),
                "p50": config.NumberColumn("TTFT p50", format="%.0f ms", width=78),
                "p90": config.NumberColumn("TTFT p90", format="%.0f ms", width=78),
                "p99": config.NumberColumn("TTFT p99", format="%.0f ms", width=78),
                "running": config.NumberColumn("running", format="%.1f", width=66, help="requests running now"),
                "waiting": config.NumberColumn("waiting", format="%.1f", width=66, help="requests waiting now"),
                "kv_usage": config.NumberColumn("KV used", format="%.1f %%", width=74, help="share of blocks held by requests now"),
                "held": config.ProgressColumn(
                    "cache filled", format="%.1f %%", min_value=0, max_value=100, width=120, help="blocks held over capacity"
                ),
                "restarts": config.NumberColumn("restarts", width=70, help="the engine began anew"),
                "reason": config.TextColumn("why not exact", width=300),
            },
        )
    chosen = event.selection.rows if event else []
    if not chosen and position is not None:
        switch("workers", replace(view.filters, worker=None))
    # The selection is a position in what is on the screen; the worker is named by what stands there now.
    elif chosen and chosen[0] < len(rows) and rows[chosen[0]]["worker"] != view.filters.worker:
        switch("workers", one_worker(view, rows[chosen[0]]["pool"], rows[chosen[0]]["worker"]))


def _latency(view: View) -> None:
    fleet = replace(view.filters, worker=None)
    least = view.site.settings.min_sample
    rows = view.ask("ttft_by_worker", filters=fleet, measure="ttft")
    few = sum(1 for r in rows if r["n"] < least)
    note = f"n {units.count(sum(r['n'] for r in rows))}" + (f" · {few} under {least} requests left out" if few else "")
    with panel(view, "TTFT percentiles by worker", note, "ttft_by_worker", measure="ttft"):
        if len(rows) == few:
            nothing(lacking(view, "has_outcomes") or f"No worker has {least} streamed answers in this window.")
            return
        clicked = chart(figures.latency_by_worker(rows, least), "workers-ttft", "TTFT percentiles by worker", view.revision)
    go_to_worker(view, clicked)


def _load(view: View, rows: list[dict[str, Any]]) -> None:
    with_load = [r for r in rows if r["load"] is not None and r["hit"] is not None]
    by_requests = not with_load
    if by_requests:
        with_load = [r | {"load": r["requests"] / view.window.length_s} for r in rows if r["requests"] and r["hit"] is not None]
    x_title = "requests ended a second" if by_requests else "mean requests running"
    with panel(view, "Load against hit rate", f"one dot a worker, size: prompt tokens · last {view.window_text}", "counts_by_worker"):
        if not with_load:
            nothing(lacking(view, "has_outcomes", "has_load") or "No requests in this window.")
            return
        clicked = chart(
            figures.load_against_hit(with_load, x_title), "workers-load", "Load against hit rate, one dot a worker", view.revision
        )
    go_to_worker(view, clicked)


def _residency(view: View, known: list[dict[str, Any]]) -> None:
    held = [r for r in known if r["resident_blocks"] is not None]
    with panel(view, "Cache residency", "blocks held now, of the engine's capacity", "workers"):
        if not held:
            nothing(lacking(view, "has_events") or "No worker has told what it holds.")
            return
        chart(figures.residency_bars(held), "workers-residency", "Blocks held by worker", view.revision)


def _residency_over_time(view: View) -> None:
    rows = view.ask("worker_over_time")
    names = figures.worker_labels(rows)
    lines: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        lines.setdefault(names[figures.key_of(r)], []).append(r)
    told = {name: here for name, here in lines.items() if any(r["resident_blocks"] is not None for r in here)}
    with panel(view, "Blocks held over time", "at the end of each bin, from events", "worker_over_time"):
        if not told:
            nothing(lacking(view, "has_events") or "No event in this window.")
            return
        if len(told) > 8:
            # More lines than colours say nothing: those with the lowest fill at the end are the ones to look at.
            told = dict(
                sorted(told.items(), key=lambda item: next((r["resident_blocks"] for r in reversed(item[1]) if r["resident_blocks"]), 0))[
                    :8
                ]
            )
            st.caption("The eight workers that hold least.")
        series = [(name, figures.on_bins(here, view.window, "resident_blocks")) for name, here in told.items()]
        marks = [c for c in view.ask("changes", most=50) if c["kind"] in ("restart", "gap", "clear", "scale")]
        figure = figures.amounts_over_time(series, view.window, marks, 24 * max(6, len(told)) + 80, "blocks")
        chart(figure, "workers-held", "Blocks held over time", view.revision)


def _detail(view: View) -> None:
    name = view.filters.worker or ""
    changes = view.ask("changes", most=50)
    # One worker has few requests a bin: wider bins keep percentiles above the least sample.
    view = replace(view, window=view.window.coarser(4))
    left, middle, right = st.columns(3, gap="small")
    with left, panel(view, "Hit rate of this worker", name, "hit_by_worker_over_time"):
        rows = view.ask("hit_by_worker_over_time")
        if rows:
            ranks = sorted({r["rank"] for r in rows}, key=str)
            column = "hit_rate" if view.snapshot.published.has_outcomes else "engine_hit_rate"
            series = [
                (f"rank {k}" if k is not None else "hit rate", figures.on_bins([r for r in rows if r["rank"] == k], view.window, column))
                for k in ranks
            ]
            chart(figures.shares_over_time(series, view.window, changes, 220), "worker-hit", "Hit rate of the worker", view.revision)
        else:
            nothing(lacking(view, "has_outcomes") or "No requests in this window.")
    with middle, panel(view, "TTFT of this worker", name, "ttft_over_time", measure="ttft"):
        rows = view.ask("ttft_over_time", measure="ttft")
        least = view.site.settings.min_sample
        if any(r["n"] >= least for r in rows):
            chart(figures.latency_over_time(rows, view.window, least, changes, 220), "worker-ttft", "TTFT of the worker", view.revision)
        elif rows:
            total = view.ask("ttft", measure="ttft")[0]
            enough = (total["n"] or 0) >= least
            percentiles = ", ".join(f"{p} {units.seconds(total[f'{p}_s'])}" for p in ("p50", "p90", "p99"))
            whole = f"Whole window: {percentiles}, n {total['n']}." if enough else ""
            nothing(f"No bin of {units.window_text(view.window.bin_s)} has {least} requests; look at a longer range. {whole}")
        else:
            nothing(lacking(view, "has_outcomes") or "No streamed answer in this window.")
    with right, panel(view, "Load of this worker", name, "worker_over_time"):
        rows = [r for r in view.ask("worker_over_time") if r["running"] is not None]
        if rows:
            ranks = sorted({r["rank"] for r in rows}, key=str)
            series = [
                (f"{what}{'' if k is None else f' · rank {k}'}", figures.on_bins([r for r in rows if r["rank"] == k], view.window, what))
                for k in ranks
                for what in ("running", "waiting")
            ]
            chart(
                figures.amounts_over_time(series, view.window, changes, 220, "requests"), "worker-load", "Load of the worker", view.revision
            )
        else:
            nothing(lacking(view, "has_load") or "No reading in this window.")
    with panel(view, "Changes that concern this worker", "in this window", "changes", most=50):
        if changes:
            changes_table(changes, "worker-changes")
        else:
            nothing("None.")


def _key(row: dict[str, Any]) -> Key:
    return row["pool"], row["worker"], row["rank"]


def _over(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
