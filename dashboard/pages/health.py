"""Can I trust the data?"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import figures, units
from dashboard.components.badges import coverage
from dashboard.components.chart import chart
from dashboard.components.key_figure import key_figure
from dashboard.components.panel import lacking, nothing, panel
from dashboard.components.tables import ROW_PX, height, toned
from dashboard.components.view import View, begin
from dashboard.queries import first

_AREAS = {
    "stream": "Stream",
    "bridge": "Bridge",
    "collector": "Collector",
    "join": "Decisions and outcomes",
}


def health() -> None:
    view = begin("health")
    workers = view.ask("workers")
    coverage(view, workers)
    checks = view.ask("health")
    agreement = view.ask("agreement")
    _key_figures(view, checks, agreement)
    _checks(view, checks)
    left, right = st.columns([3, 2], gap="small")
    with left:
        _agreement(view, agreement)
    with right:
        _prediction(view)
    left, right = st.columns(2, gap="small")
    with left:
        _trust(view, workers)
    with right:
        _failures(view)
    _dead_letters(view)


def _key_figures(view: View, checks: list[dict[str, Any]], agreement: list[dict[str, Any]]) -> None:
    published = view.snapshot.published
    now = view.site.now()
    age_s = published.age_s(now)
    behind = None if published.watermark is None else max(0.0, (now - published.watermark).total_seconds())
    by_status = Counter(c["status"] for c in checks)
    joins = first(view.ask("joins"))
    predicted, exact = _sum(agreement, "predicted_requests"), _sum(agreement, "predicted_exact")
    told, mismatched = _sum(agreement, "event_requests"), _sum(agreement, "event_mismatches")
    with st.container(horizontal=True, gap="small", key="ww-figures"):
        key_figure(
            "Published file",
            units.age(age_s),
            f"old · {published.state or 'state unknown'} · {units.clock(published.published_at)}",
            explain="Age of the file that the collector replaces about once a second.",
        )
        key_figure(
            "Data up to",
            units.clock(published.watermark),
            units.NO_DATA if behind is None else f"{units.age(behind)} ago",
            explain="The watermark: everything before is in, but for late records.",
        )
        key_figure(
            "Checks",
            f"{by_status['bad']} bad, {by_status['warn']} warn" if checks else units.NO_DATA,
            f"{by_status['ok']} ok, {by_status['unknown']} unknown",
        )
        key_figure(
            "Prediction exact",
            units.share(_share(exact, predicted)),
            f"{units.count(exact)} of {units.count(predicted)} requests",
            explain="Requests whose cached tokens, as the engine reported, equal what the router predicted.",
        )
        key_figure(
            "Events agree",
            units.share(_share(None if told is None or mismatched is None else told - mismatched, told)),
            f"{units.count(mismatched)} of {units.count(told)} requests differ",
            explain="Requests whose hit told from KV events equals the engine's report.",
        )
        key_figure(
            "Unjoined",
            units.count((joins.get("decision_missing") or 0) + (joins.get("outcome_missing") or 0))
            if joins.get("requests")
            else units.NO_DATA,
            f"{units.count(joins.get('decision_missing'))} no decision, {units.count(joins.get('outcome_missing'))} no outcome",
            explain="Of requests dispatched in the window.",
        )
        key_figure(
            "In flight",
            units.count(joins.get("in_flight")) if joins.get("requests") else units.NO_DATA,
            f"{units.count(joins.get('not_reported'))} ended without report",
            explain="Requests without an outcome yet; and ended requests whose engine reported no cached tokens.",
        )
        key_figure(
            "Versions",
            published.version,
            f"tables · collector {published.collector or 'unknown'}",
            explain="Version of the published tables.",
        )


def _checks(view: View, checks: list[dict[str, Any]]) -> None:
    with panel(view, "Checks", "what needs a look first, then by area", "health"):
        if not checks:
            nothing("The collector has published no check yet.")
            return
        order = [*_AREAS, *sorted({c["area"] for c in checks} - set(_AREAS))]
        rows = [
            {
                "area": _AREAS.get(c["area"], c["area"]),
                "status": c["status"],
                "subject": c["subject"] or "all",
                "check": str(c["name"]).replace("_", " "),
                "value": (units.DASH if c["status"] == "ok" else "not known") if c["value"] is None else _value(c["value"], c["unit"]),
                "detail": c["detail"],
                "measured_at": c["measured_at"],
            }
            for c in sorted(checks, key=lambda c: (c["status"] == "ok", order.index(c["area"])))
        ]
        st.dataframe(
            toned(pd.DataFrame(rows), "status"),
            key="health-checks",
            hide_index=True,
            row_height=ROW_PX,
            height=height(len(rows), 12),
            placeholder=units.DASH,
            column_config={
                "area": st.column_config.TextColumn("area", width=165),
                "status": st.column_config.TextColumn("status", width=72),
                "subject": st.column_config.TextColumn("of", width=170),
                "check": st.column_config.TextColumn("check", width=130),
                "value": st.column_config.TextColumn("value", width=105),
                "detail": st.column_config.TextColumn("what it means and what to do", width=620),
                "measured_at": st.column_config.DatetimeColumn("measured, UTC", format="HH:mm:ss", width=105),
            },
        )


def _agreement(view: View, rows: list[dict[str, Any]]) -> None:
    with panel(
        view, "One hit rate told three ways", "by the engine's answers, by events, by the engine's counters; they should agree", "agreement"
    ):
        told = [r for r in rows if r["hit_rate"] is not None or r["event_hit_rate"] is not None or r["engine_hit_rate"] is not None]
        if not told:
            nothing(lacking(view, "has_outcomes", "has_load") or "No requests in this window.")
            return
        several, ranked = len({r["pool"] for r in told}) > 1, any(r["rank"] is not None for r in told)
        columns = ["worker", *(["rank"] if ranked else []), *(["pool"] if several else [])]
        columns += ["hit_rate", "event_hit_rate", "engine_hit_rate", "event_requests", "event_mismatches", "predicted_exact_share"]
        frame = pd.DataFrame(told)[columns]
        for share in ("hit_rate", "event_hit_rate", "engine_hit_rate", "predicted_exact_share"):
            frame[share] = pd.array([None if v is None else 100 * v for v in (r[share] for r in told)], dtype="Float64")
        config = st.column_config
        st.dataframe(
            frame,
            key="health-agreement",
            hide_index=True,
            row_height=ROW_PX,
            height=height(len(told)),
            placeholder=units.DASH,
            column_config={
                "worker": config.TextColumn("worker", width=120),
                "rank": config.NumberColumn("rank", width=50),
                "pool": config.TextColumn("pool", width=90),
                "hit_rate": config.NumberColumn(
                    "answers", format="%.1f %%", width=80, help="cached over prompt tokens as reported in the answers"
                ),
                "event_hit_rate": config.NumberColumn(
                    "events", format="%.1f %%", width=80, help="told from KV events, over requests where they suffice"
                ),
                "engine_hit_rate": config.NumberColumn(
                    "counters", format="%.1f %%", width=80, help="growth of the engine's own prefix cache counters"
                ),
                "event_requests": config.NumberColumn("told by events", width=100, help="requests whose hit events could tell"),
                "event_mismatches": config.NumberColumn("differ", width=60, help="of these, events and answer disagree"),
                "predicted_exact_share": config.NumberColumn("prediction exact", format="%.1f %%", width=110),
            },
        )


def _prediction(view: View) -> None:
    rows = view.ask("prediction_error")
    with panel(view, "Predicted against actual", f"n {units.count(sum(r['requests'] for r in rows))} requests", "prediction_error"):
        if not rows:
            nothing(lacking(view, "has_decisions", "has_outcomes") or "No request with both in this window.")
            return
        chart(figures.prediction_error(rows), "health-prediction", "Requests by error of the prediction", view.revision)


def _trust(view: View, workers: list[dict[str, Any]]) -> None:
    doubtful = [w for w in workers if w["trust"] != "exact"]
    with panel(view, "Workers not fully trusted", f"{len(doubtful)} of {len(workers)}", "workers"):
        if not doubtful:
            nothing("Every worker's index is exact." if workers else "No worker is known yet.")
            return
        frame = pd.DataFrame(doubtful)[["worker", "rank", "trust", "trust_reason", "epoch_started_at"]]
        st.dataframe(
            toned(frame, "trust"),
            key="health-trust",
            hide_index=True,
            row_height=ROW_PX,
            height=height(len(doubtful), 8),
            placeholder=units.DASH,
            column_config={
                "worker": st.column_config.TextColumn("worker", width=120),
                "rank": st.column_config.NumberColumn("rank", width=50),
                "trust": st.column_config.TextColumn("trust", width=80),
                "trust_reason": st.column_config.TextColumn("why", width=300),
                "epoch_started_at": st.column_config.DatetimeColumn("epoch since, UTC", format="YYYY-MM-DD HH:mm:ss", width=150),
            },
        )


def _failures(view: View) -> None:
    rows = view.ask("failures")
    with panel(view, "Failed requests", f"{units.count(sum(r['requests'] for r in rows))} in this window", "failures"):
        if not rows:
            nothing(lacking(view, "has_outcomes") or "None in this window.")
            return
        st.dataframe(
            pd.DataFrame(rows).astype({"status": "Int64"}),
            key="health-failures",
            hide_index=True,
            row_height=ROW_PX,
            height=height(len(rows), 8),
            placeholder=units.DASH,
            column_config={
                "error": st.column_config.TextColumn("error"),
                "status": st.column_config.NumberColumn("status", format="%d", width=60),
                "worker": st.column_config.TextColumn("worker"),
                "requests": st.column_config.NumberColumn("requests", width=70),
                "last_at": st.column_config.DatetimeColumn("last, UTC", format="HH:mm:ss", width=80),
            },
        )


def _dead_letters(view: View) -> None:
    reasons = view.ask("dead_letters_by_reason")
    total = sum(r["records"] for r in reasons)
    with panel(view, "Dead letters", f"{units.count(total)} records set aside; nothing else was lost with them", "dead_letters_by_reason"):
        if not reasons:
            nothing("None: every record could be used.")
            return
        time = "YYYY-MM-DD HH:mm:ss"
        st.dataframe(
            pd.DataFrame(reasons)[["records", "topic", "reason", "first_at", "last_at"]],
            key="health-dead-reasons",
            hide_index=True,
            row_height=ROW_PX,
            height=height(len(reasons), 8),
            column_config={
                "records": st.column_config.NumberColumn("records", width=70),
                "topic": st.column_config.TextColumn("topic", width=110),
                "reason": st.column_config.TextColumn("reason", width="large"),
                "first_at": st.column_config.DatetimeColumn("first, UTC", format=time, width=150),
                "last_at": st.column_config.DatetimeColumn("last, UTC", format=time, width=150),
            },
        )
        with st.expander("The last 100 records"):
            st.dataframe(
                pd.DataFrame(view.ask("dead_letters", most=100)),
                key="health-dead-letters",
                hide_index=True,
                row_height=ROW_PX,
                column_config={"set_aside_at": st.column_config.DatetimeColumn("set aside, UTC", format=time)},
            )


def _value(value: float, unit: str | None) -> str:
    if unit == "s":
        return units.seconds(value)
    if unit == "bytes":
        return units.count(value, "B")
    return units.count(value) + (f" {unit}" if unit else "")


def _sum(rows: list[dict[str, Any]], column: str) -> int | None:
    known = [r[column] for r in rows if r[column] is not None]
    return sum(known) if known else None


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
