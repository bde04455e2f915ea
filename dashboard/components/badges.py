"""Which sources are present, and how far the workers' indexes are to be trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import streamlit as st

from dashboard.components.text import html_text
from dashboard.components.view import SOURCES, View

_TRUST = (("exact", "good", "every event seen"), ("degraded", "warn", "a gap or an incomplete start"), ("blind", "bad", "nothing known"))


def coverage(view: View, workers: Sequence[dict[str, Any]]) -> None:
    """One line of chips."""
    chips = []
    for attribute, name, what in SOURCES:
        present = getattr(view.snapshot.published, attribute)
        chips.append(_chip("good" if present else "off", name if present else f"no {name}", what))
    trust = Counter(w["trust"] for w in workers)
    chips += [_chip(tone, f"{trust[t]} {t}", f"workers whose index is {t}: {what}") for t, tone, what in _TRUST if trust[t]]
    st.html(f'<div class="ww-chips" data-testid="coverage">{"".join(chips)}</div>')


def _chip(tone: str, text: str, title: str) -> str:
    return f'<span class="ww-chip {tone}" title="{html_text(title)}"><i></i>{html_text(text)}</span>'
