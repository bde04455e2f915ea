"""A titled frame: what is shown, over which window and how many, the question it answers, and its SQL one click away."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import streamlit as st

from dashboard import queries
from dashboard.components.text import html_text
from dashboard.components.view import SOURCES, View


@contextmanager
def panel(view: View, title: str, note: str = "", query: str = "", explain: str = "", **more: object) -> Iterator[None]:
    key = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    with st.container(border=True, key=f"panel-{key}", height="stretch"):
        with st.container(horizontal=True, vertical_alignment="center", gap="small", wrap=False):
            st.html(f'<div class="ww-title"><b>{html_text(title)}</b><span>{html_text(note)}</span></div>')
            if query:
                with st.popover("SQL", type="tertiary", key=f"sql-{key}"):
                    st.caption(f"{queries.query(query).question} Grain: {queries.query(query).grain}.")
                    if explain:
                        st.caption(explain)
                    st.code(view.sql(query, **more), language="sql", wrap_lines=True)
        yield


def nothing(text: str) -> None:
    """Instead of an empty figure."""
    st.html(f'<div class="ww-none">{html_text(text)}</div>')


def lacking(view: View, *needs: str) -> str | None:
    """What must be there for a figure but never came, in a sentence; None: all there."""
    missing: Sequence[tuple[str, str, str]] = [s for s in SOURCES if s[0] in needs and not getattr(view.snapshot.published, s[0])]
    if not missing:
        return None
    return "Not available: " + "; ".join(f"no {name} received yet ({what})" for _, name, what in missing) + "."
