"""One number with its unit, what it is made of, its change, and its course."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import streamlit as st

from dashboard import units
from dashboard.components.text import markdown_text

TOO_FEW = "too few"
_WORDS = (units.NOT_REPORTED, units.NO_DATA, TOO_FEW)


def key_figure(
    name: str,
    value: str,
    made_of: str,
    *,
    delta: str | None = None,
    good: Literal["up", "down", "neither"] = "neither",
    course: Sequence[float | None] = (),
    explain: str = "",
) -> None:
    """`made_of` is the line below: numerator, denominator, n. `course` is drawn where at least two points are known."""
    known = [c for c in course if c is not None]
    with st.container(border=True, key=f"kf-{''.join(c if c.isalnum() else '-' for c in name.lower())}"):
        extra: dict[str, Any] = {"chart_data": known, "chart_type": "area"} if len(known) > 1 else {}
        st.metric(
            name,
            f":gray[{value}]" if value in _WORDS else value,
            delta,
            delta_color={"up": "normal", "down": "inverse", "neither": "off"}[good],  # type: ignore[arg-type]
            help=explain or None,
            **extra,
        )
        st.caption(markdown_text(made_of))
