"""Where prompts of one kind stop being alike, as one sentence for people. Pure: a row of the macro `divergence_of` in, words out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SCATTERED = 0.5
"""Below this share of the diverged tokens the commonest depth is one of many."""


def differs(row: Mapping[str, Any], span_s: float) -> str:
    """row: of `divergence_of`. span_s: seconds that it was asked for, over 0.

    "The prompts of route review differ at token 37; 12 M tokens an hour (41 % of their prompt tokens) are computed again for it."
    """
    rate = _short(row["diverged_tokens"] * 3600 / span_s)
    share = "" if row["share"] is None else f" ({_percent(row['share'])} of their prompt tokens)"
    return f"The prompts of {_kind(row)} differ{_where(row)}; {rate} tokens an hour{share} are computed again for it."


def _kind(row: Mapping[str, Any]) -> str:
    if row["route"] is None:
        return "kinds too many to tell apart"
    return f"route {row['route']}" if row["template"] in (None, row["route"]) else f"template {row['template']} (route {row['route']})"


def _where(row: Mapping[str, Any]) -> str:
    low, high = row["depth_from"], row["depth_to"]
    if low is None or high is None:
        return ", at a depth that is not known"
    place = f"at token {low}" if high - low == 1 else f"between tokens {low} and {high - 1}"
    if row["depth_share"] is not None and row["depth_share"] < _SCATTERED:
        return f" at many depths, most often {place}"
    return f" {place}"


def _percent(share: float) -> str:
    return "under 1 %" if 0 < share < 0.01 else f"{share * 100:.0f} %"


def _short(number: float) -> str:
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size * 0.9995:
            return f"{number / size:.{0 if number >= 9.95 * size else 1}f}{unit}"
    return f"{number:.0f}"
