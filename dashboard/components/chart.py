"""A Plotly figure that keeps zoom and node when its data change, and reports clicks on any trace, heatmaps included."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import Any

import orjson
import streamlit as st

from dashboard.figures import Figure
from dashboard.palette import DARK, LIGHT


@cache
def plotly_js() -> bytes:
    """Plotly's own library, as the Python package carries it, 5 MB."""
    return resources.files("plotly").joinpath("package_data/plotly.min.js").read_bytes()


@cache
def plotly_path() -> str:
    """Where `warmwatch dashboard` serves it; the name changes with the content, so browsers may keep it for ever."""
    return f"/plotly-{hashlib.sha256(plotly_js()).hexdigest()[:16]}.min.js"


@cache
def _javascript() -> str:
    return resources.files("dashboard.components").joinpath("plotly_chart.js").read_text()


def chart(figure: Figure, key: str, label: str, revision: str = "") -> dict[str, Any] | None:
    """Draws. Returns the click that caused this run: {"custom": customdata of the point, "x": ...}, or None.

    `key` names the node; zoom stays as long as `revision` does; `label` tells what is drawn to those who don't see it.
    """
    mount = st.components.v2.component("warmwatch_chart", js=_javascript(), isolate_styles=False)
    result = mount(
        key=key,
        data={
            "figure": orjson.dumps(figure, option=orjson.OPT_SERIALIZE_NUMPY).decode(),
            "height": figure["layout"]["height"],
            "plotly": plotly_path(),
            "label": label,
            "revision": revision,
            "light": LIGHT,
            "dark": DARK,
        },
        on_click_change=_nothing,
    )
    return result.get("click") if result else None


def _nothing() -> None:
    """A trigger is reported only where a callback is given."""
