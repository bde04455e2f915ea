"""Tables that several pages show. Cells are drawn on a canvas, so names in them are text whatever they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from dashboard.units import DASH

_TONES = {
    "exact": "#2a9d8f",
    "ok": "#2a9d8f",
    "degraded": "#d9902f",
    "warn": "#d9902f",
    "blind": "#d4532f",
    "bad": "#d4532f",
    "unknown": "#8a96a3",
}
ROW_PX = 30


def height(rows: int, most: int = 14) -> int:
    """Height of a table of so many rows, with its head."""
    return ROW_PX * (min(rows, most) + 1) + 4


def toned(frame: pd.DataFrame, *columns: str) -> Any:
    """Status words in their colour."""
    return frame.style.map(lambda word: f"color: {_TONES.get(str(word), 'inherit')}; font-weight: 600", subset=list(columns))


def changes_table(changes: Sequence[dict[str, Any]], key: str) -> None:
    st.dataframe(
        pd.DataFrame(changes, columns=["happened_at", "kind", "text", "worker", "pool", "author"]),
        key=key,
        hide_index=True,
        row_height=ROW_PX,
        height=height(len(changes), 8),
        placeholder=DASH,
        column_config={
            "happened_at": st.column_config.DatetimeColumn("time, UTC", format="YYYY-MM-DD HH:mm:ss", width=150),
            "kind": st.column_config.TextColumn("kind", width=80),
            "text": st.column_config.TextColumn("what", width="large"),
            "worker": st.column_config.TextColumn("worker", width="small"),
            "pool": st.column_config.TextColumn("pool", width="small"),
            "author": st.column_config.TextColumn("by", width="small"),
        },
    )
