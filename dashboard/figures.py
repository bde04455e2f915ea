"""Figures as plain dictionaries of Plotly's own form, from rows to picture without a library: building one costs tens of microseconds,
where `plotly.graph_objects` takes up to 44 ms a figure, and figures are what a refresh costs. A test lets Plotly check each of them.

Names from data are escaped, since Plotly reads tags in labels. A missing value is a gap, never a zero. Colours are tokens (palette.py).
"""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from dashboard import units
from dashboard.filters import Window
from dashboard.palette import SERIES

Figure = dict[str, Any]
Row = Mapping[str, Any]

_HIT_SCALE = [[0.0, "$h0"], [0.3, "$h1"], [0.55, "$h2"], [0.8, "$h3"], [1.0, "$h4"]]
_LATENCY_TICKS = [m * 10.0**e for e in range(-4, 3) for m in (1, 2, 5)]
MOST_LABEL_CHARS = 28
# Above a plot: the legend, and below it the names of marks.
_TOP_PX, _BOTTOM_PX = 44, 26


def escaped(text: object, most: int = 200) -> str:
    """Text for a Plotly label: no tags, not longer than `most` characters."""
    return html.escape(shortened(str(text), most), quote=False)


def shortened(text: str, most: int = MOST_LABEL_CHARS) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def worker_labels(rows: Sequence[Row]) -> dict[tuple[Any, Any, Any], str]:
    """By pool, worker and rank: the worker's name and rank; with the pool where the name stands in several."""
    keys = dict.fromkeys((r["pool"], r["worker"], r["rank"]) for r in rows)
    pools: dict[Any, set[Any]] = {}
    for pool, worker, _ in keys:
        pools.setdefault(worker, set()).add(pool)
    ranks = Counter((pool, worker) for pool, worker, _ in keys)
    return {
        (pool, worker, rank): (f"{pool} / " if len(pools[worker]) > 1 else "")
        + str(worker)
        + (f" · r{rank}" if rank is not None and (rank or ranks[pool, worker] > 1) else "")
        for pool, worker, rank in keys
    }


def key_of(row: Row) -> tuple[Any, Any, Any]:
    return row["pool"], row["worker"], row["rank"]


def bins(window: Window) -> list[datetime]:
    """Starts of all bins of the window."""
    number = int(-(-window.length_s // window.bin_s))
    return [window.since + timedelta(seconds=window.bin_s * i) for i in range(number)]


def on_bins(rows: Sequence[Row], window: Window, column: str) -> list[Any]:
    """The column on every bin; None where there is no row."""
    found = {r["bin_at"]: r[column] for r in rows}
    return [found.get(at) for at in bins(window)]


def heatmap_height(workers: int) -> int:
    """Pixels: rows that can be hit by a pointer, and not more than a screen."""
    return max(240, min(620, 22 * workers + 40))


def hit_heatmap(rows: Sequence[Row], window: Window, column: str = "hit_rate", tokens: str = "reported_prompt_tokens") -> Figure:
    """Workers down, time across, hit rate as colour; a click gives pool and worker."""
    workers = worker_labels(rows)
    grid = bins(window)
    place = {at: i for i, at in enumerate(grid)}
    z: dict[Any, list[Any]] = {w: [None] * len(grid) for w in workers}
    hover: dict[Any, list[str]] = {w: [""] * len(grid) for w in workers}
    for r in rows:
        i = place.get(r["bin_at"])
        if i is None:
            continue
        key = key_of(r)
        z[key][i] = r[column]
        hover[key][i] = f"{units.share(r[column])} of {units.count(r[tokens])} prompt tokens<br>{units.count(r['requests'])} requests"
    order = list(workers)
    labels = [escaped(workers[w], MOST_LABEL_CHARS) for w in order]
    out = _figure(heatmap_height(len(order)), left=8)
    out["layout"]["margin"]["t"] = 6
    out["data"] = [
        {
            "type": "heatmap",
            "x": grid,
            "y": _distinct(labels),
            "z": [z[w] for w in order],
            "text": [hover[w] for w in order],
            "customdata": [[[w[0], w[1]]] * len(grid) for w in order],
            "hovertemplate": "%{y}<br>%{x|%H:%M:%S} UTC<br>%{text}<extra></extra>",
            "colorscale": _HIT_SCALE,
            "zmin": 0,
            "zmax": 1,
            "xgap": 1,
            "ygap": 2,
            "colorbar": {
                "thickness": 8,
                "outlinewidth": 0,
                "tickformat": ".0%",
                "tickvals": [0, 0.5, 1],
                "len": 1.0,
                "tickfont": {"color": "$muted", "size": 11},
            },
        }
    ]
    out["layout"]["yaxis"] |= {"type": "category", "autorange": "reversed", "showgrid": False, "automargin": True}
    out["layout"]["xaxis"] |= {"showgrid": False, "range": _range(window)}
    return out


def shares_over_time(series: Sequence[tuple[str, Sequence[Any]]], window: Window, marks: Sequence[Row] = (), height: int = 250) -> Figure:
    """Lines of shares, 0 to 100 %, on the window's bins."""
    out = _over_time(series, window, marks, height)
    out["layout"]["yaxis"] |= {"range": [0, 1.02], "tickformat": ".0%"}
    for trace in out["data"]:
        trace["hovertemplate"] = "%{y:.1%}<extra>%{fullData.name}</extra>"
    return out


def amounts_over_time(
    series: Sequence[tuple[str, Sequence[Any]]], window: Window, marks: Sequence[Row] = (), height: int = 250, unit: str = ""
) -> Figure:
    """Lines of amounts, from zero up."""
    out = _over_time(series, window, marks, height)
    largest = max((y for _, ys in series for y in ys if y is not None), default=0)
    hover = ".3~s" if largest >= 10 else ".3~f"
    out["layout"]["yaxis"] |= {"rangemode": "tozero", "tickformat": "~s" if largest >= 10 else ".2~f"}
    for trace in out["data"]:
        trace["hovertemplate"] = f"%{{y:{hover}}} {unit}<extra>%{{fullData.name}}</extra>"
    return out


def latency_over_time(rows: Sequence[Row], window: Window, min_sample: int, marks: Sequence[Row] = (), height: int = 250) -> Figure:
    """p50, p90, p99 on a logarithmic axis; bins under the least sample stay empty."""
    enough = [r for r in rows if r["n"] >= min_sample]
    out = _over_time([(name, on_bins(enough, window, f"{name}_s")) for name in ("p50", "p90", "p99")], window, marks, height)
    for trace, name in zip(out["data"], ("p50", "p90", "p99"), strict=True):
        trace["line"]["color"] = trace["marker"]["color"] = f"${name}"
        trace["text"] = [units.seconds(v) for v in trace["y"]]
        trace["hovertemplate"] = "%{text}<extra>%{fullData.name}</extra>"
    _latency_axis(out["layout"]["yaxis"], [r[f"{p}_s"] for r in enough for p in ("p50", "p99")])
    return out


def computed_tokens_over_time(rows: Sequence[Row], window: Window, height: int = 250) -> Figure:
    """Bars of computed prompt tokens: those some worker held, and those new to the fleet."""
    again = on_bins(rows, window, "computed_again_tokens")
    new = [None if r is None or a is None else max(0, r - a) for r, a in zip(on_bins(rows, window, "computed_tokens"), again, strict=True)]
    out = _figure(height)
    out["data"] = [
        {
            "type": "bar",
            "name": name,
            "x": bins(window),
            "y": y,
            "marker": {"color": colour},
            "hovertemplate": "%{y:.3~s} tokens<extra>%{fullData.name}</extra>",
        }
        for name, y, colour in (("held by a worker", again, "$bad"), ("new to the fleet", new, "$calm"))
    ]
    out["layout"] |= {"barmode": "stack", "bargap": 0.15, "hovermode": "x unified"}
    out["layout"]["yaxis"] |= {"tickformat": "~s"}
    out["layout"]["xaxis"] |= {"range": _range(window)}
    return out


def latency_by_worker(rows: Sequence[Row], min_sample: int) -> Figure:
    """A line from p50 to p99 with p90 on it, one a worker; a click gives pool and worker."""
    shown = [r for r in rows if r["n"] >= min_sample]
    named = worker_labels(rows)
    labels = _distinct([escaped(named[key_of(r)], MOST_LABEL_CHARS) for r in shown])
    out = _figure(height=max(280, min(620, 24 * len(shown) + 80)), left=8, x="log")
    line_x: list[Any] = []
    line_y: list[Any] = []
    for r, label in zip(shown, labels, strict=True):
        line_x += [r["p50_s"], r["p99_s"], None]
        line_y += [label, label, None]
    out["data"] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": line_x,
            "y": line_y,
            "line": {"color": "$calm", "width": 5},
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]
    out["data"] += [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [r[f"{name}_s"] for r in shown],
            "y": labels,
            "marker": {"color": f"${name}", "size": 10},
            "text": [f"{units.seconds(r[f'{name}_s'])}, n {units.count(r['n'])}" for r in shown],
            "customdata": [[r["pool"], r["worker"]] for r in shown],
            "hovertemplate": "%{y}<br>%{fullData.name} %{text}<extra></extra>",
        }
        for name in ("p50", "p90", "p99")
    ]
    _latency_axis(out["layout"]["xaxis"], [r[f"{p}_s"] for r in shown for p in ("p50", "p99")])
    out["layout"]["yaxis"] |= {"type": "category", "autorange": "reversed", "automargin": True, "showgrid": False}
    return out


def load_against_hit(rows: Sequence[Row], x_title: str) -> Figure:
    """One dot a worker: `load` across, `hit` up, size by prompt tokens; a click gives pool and worker."""
    pools = sorted({r["pool"] for r in rows})
    most = max((r["prompt_tokens"] or 0 for r in rows), default=0) or 1
    labels = worker_labels(rows)
    named = len(rows) <= 24
    out = _figure(280, x="linear")
    out["data"] = [
        {
            "type": "scatter",
            "mode": "markers+text" if named else "markers",
            "name": escaped(pool, MOST_LABEL_CHARS),
            "x": [r["load"] for r in here],
            "y": [r["hit"] for r in here],
            "text": [escaped(labels[key_of(r)], 18) for r in here],
            "textposition": ["top center", "bottom center", "middle right", "middle left"] * (len(here) // 4 + 1),
            "textfont": {"size": 11, "color": "$muted"},
            "cliponaxis": False,
            "customdata": [[r["pool"], r["worker"]] for r in here],
            "marker": {
                "color": SERIES[i % len(SERIES)],
                "size": [9 + 13 * ((r["prompt_tokens"] or 0) / most) ** 0.5 for r in here],
                "opacity": 0.85,
                "line": {"width": 1, "color": "$surface"},
            },
            "hovertemplate": f"%{{text}}<br>hit rate %{{y:.1%}}<br>%{{x:.3~s}} {x_title}<extra></extra>",
        }
        for i, pool in enumerate(pools)
        for here in [[r for r in rows if r["pool"] == pool]]
    ]
    out["layout"]["hovermode"] = "closest"
    out["layout"]["showlegend"] = len(pools) > 1
    out["layout"]["xaxis"] |= {
        "range": _padded([r["load"] for r in rows]),
        "title": _title(x_title),
        "showgrid": True,
        "tickformat": ".2~f",
    }
    out["layout"]["yaxis"] |= {"range": _padded([r["hit"] for r in rows], most=1.02), "tickformat": ".0%", "title": _title("hit rate")}
    out["layout"]["margin"] |= {"b": 44, "l": 56}
    return out


def residency_bars(rows: Sequence[Row]) -> Figure:
    """Blocks held against capacity, one bar a worker."""
    named = worker_labels(rows)
    labels = _distinct([escaped(named[key_of(r)], MOST_LABEL_CHARS) for r in rows])
    out = _figure(height=max(224, min(620, 24 * len(rows) + 80)), left=8, x="linear")
    capacity = [r["capacity_blocks"] for r in rows]
    held = [r["resident_blocks"] for r in rows]
    parts = [
        ("distinct", [r["distinct_blocks"] for r in rows], "$good"),
        (
            "copies",
            [
                None if r["resident_blocks"] is None or r["distinct_blocks"] is None else r["resident_blocks"] - r["distinct_blocks"]
                for r in rows
            ],
            "$warn",
        ),
        ("free", [None if c is None or h is None else max(0, c - h) for c, h in zip(capacity, held, strict=True)], "$calm"),
    ]
    out["data"] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": labels,
            "x": x,
            "marker": {"color": c},
            "hovertemplate": "%{y}<br>%{x:.4~s} blocks %{fullData.name}<extra></extra>",
        }
        for name, x, c in parts
        if any(v is not None for v in x)
    ]
    out["layout"] |= {"barmode": "stack", "bargap": 0.35}
    out["layout"]["xaxis"] |= {"tickformat": "~s", "showgrid": True}
    out["layout"]["yaxis"] |= {"type": "category", "autorange": "reversed", "automargin": True, "showgrid": False}
    return out


def prediction_error(rows: Sequence[Row]) -> Figure:
    """Bars of requests by engine's cached minus router's predicted, in blocks."""
    found = {r["blocks"]: r["requests"] for r in rows}
    steps = list(range(-10, 11))
    out = _figure(240, x="linear")
    out["data"] = [
        {
            "type": "bar",
            "x": steps,
            "y": [found.get(s, 0) for s in steps],
            "marker": {"color": ["$good" if s == 0 else "$warn" for s in steps]},
            "hovertemplate": "%{y} requests, %{x} blocks off<extra></extra>",
        }
    ]
    out["layout"] |= {"bargap": 0.2, "showlegend": False}
    out["layout"]["xaxis"] |= {
        "tickvals": [-10, -5, -1, 0, 1, 5, 10],
        "ticktext": ["≤ −10", "−5", "−1", "0", "1", "5", "≥ 10"],
        "title": _title("cached minus predicted, blocks"),
    }
    most = max(found.values(), default=1)
    out["layout"]["yaxis"] |= {"type": "log", "dtick": 1, "range": [math.log10(0.7), math.log10(most * 1.5)], "title": _title("requests")}
    out["layout"]["margin"] |= {"b": 44, "l": 56, "t": 10}
    return out


def _over_time(series: Sequence[tuple[str, Sequence[Any]]], window: Window, marks: Sequence[Row], height: int) -> Figure:
    grid = bins(window)
    out = _figure(height)
    out["data"] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": escaped(name, 40),
            "x": grid,
            "y": list(ys),
            "connectgaps": False,
            "line": {"width": 2, "color": SERIES[i % len(SERIES)]},
            "marker": {"size": 3.5, "color": SERIES[i % len(SERIES)]},
        }
        for i, (name, ys) in enumerate(series)
    ]
    out["layout"]["hovermode"] = "x unified"
    out["layout"]["showlegend"] = len(series) > 1
    out["layout"]["xaxis"] |= {"range": _range(window), "hoverformat": "%H:%M:%S UTC"}
    inside = [m for m in marks if window.since <= m["happened_at"] < window.until]
    out["layout"]["shapes"] = [
        {
            "type": "line",
            "x0": m["happened_at"],
            "x1": m["happened_at"],
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "layer": "below",
            "line": {"color": "$muted", "width": 1, "dash": "dot"},
        }
        for m in inside
    ]
    out["layout"]["annotations"] = [
        {
            "x": m["happened_at"],
            "y": 1,
            "yref": "paper",
            "yanchor": "bottom",
            "text": escaped(m["kind"], 12),
            "hovertext": f"{m['happened_at']:%H:%M:%S} UTC {escaped(m['text'], 80)}",
            "showarrow": False,
            "font": {"size": 10, "color": "$muted"},
        }
        for m in _apart(inside, window)
    ]
    return out


def _apart(marks: Sequence[Row], window: Window) -> list[Row]:
    """Marks whose labels have room beside each other: at least a tenth of the window apart."""
    out: list[Row] = []
    for m in sorted(marks, key=lambda m: m["happened_at"]):
        if not out or (m["happened_at"] - out[-1]["happened_at"]).total_seconds() > window.length_s / 10:
            out.append(m)
    return out


def _figure(height: int, left: int = 48, x: str = "date") -> Figure:
    """x: the axis' type. Formats of dates stand on no other axis, where they would undo its numbers' own."""
    axis = {"gridcolor": "$grid", "linecolor": "$grid", "zeroline": False, "tickfont": {"color": "$muted", "size": 11}, "ticks": ""}
    return {
        "data": [],
        "layout": {
            "height": height,
            "margin": {"l": left, "r": 8, "t": _TOP_PX, "b": _BOTTOM_PX},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "Source Sans, system-ui, sans-serif", "size": 12, "color": "$ink"},
            "hoverlabel": {"bgcolor": "$surface", "bordercolor": "$grid", "font": {"color": "$ink", "size": 12}, "namelength": -1},
            "legend": {
                "orientation": "h",
                "x": 0,
                "y": 1 + 17 / (height - _TOP_PX - _BOTTOM_PX),
                "yanchor": "bottom",
                "itemwidth": 30,
                "font": {"color": "$ink", "size": 11.5},
                "bgcolor": "rgba(0,0,0,0)",
            },
            "xaxis": {**axis, "type": x, "showgrid": False, **({"tickformatstops": _TIME_FORMATS} if x == "date" else {})},
            "yaxis": {**axis, "showgrid": True},
        },
    }


_TIME_FORMATS = [
    {"dtickrange": [None, 60_000], "value": "%H:%M:%S"},
    {"dtickrange": [60_000, 86_400_000], "value": "%H:%M"},
    {"dtickrange": [86_400_000, None], "value": "%-d %b"},
]


def _latency_axis(axis: dict[str, Any], values: Sequence[float | None]) -> None:
    known = [v for v in values if v]
    low, high = (min(known) / 1.4, max(known) * 1.4) if known else (0.01, 10.0)
    ticks = [t for t in _LATENCY_TICKS if low <= t <= high]
    axis |= {
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [units.seconds(t).replace(".00", "").replace(".0", "") for t in ticks],
        "showgrid": True,
    }


def _range(window: Window) -> list[datetime]:
    """From half a bin before the first start to half a bin after the last: heatmap cells and bars stand around their start."""
    half = timedelta(seconds=window.bin_s / 2)
    return [window.since - half, window.until - half]


def _padded(values: Sequence[float], most: float = math.inf) -> list[float]:
    """A range with room around all values, so that neither dots nor their names are cut; never below 0 or above `most`."""
    low, high = min(values), max(values)
    room = max((high - low) * 0.25, abs(high) * 0.05, 0.01)
    return [max(0.0, low - room), min(most, high + room)]


def _title(text: str) -> dict[str, Any]:
    return {"text": text, "font": {"size": 11, "color": "$muted"}, "standoff": 6}


def _distinct(labels: Sequence[str]) -> list[str]:
    """Categories must differ: equal labels (after shortening) get invisible endings."""
    seen: dict[str, int] = {}
    out = []
    for label in labels:
        n = seen.get(label, 0)
        seen[label] = n + 1
        out.append(label + "\u200b" * n)
    return out
