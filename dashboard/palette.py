"""Colours of both themes. Figures name colours by token (`$ink`, `$c1`); the chart component puts in those of the viewer's theme, so a
figure is built once for all viewers. Warm colours are for work done again, cool ones for work saved; both scales stay apart for
colour-blind eyes.
"""

from __future__ import annotations

from typing import Any

LIGHT: dict[str, str] = {
    "ink": "#1d2733",
    "muted": "#6a7684",
    "grid": "#e6e9ed",
    "surface": "#ffffff",
    "c1": "#1d7874",
    "c2": "#d2691e",
    "c3": "#4466aa",
    "c4": "#8a5a9e",
    "c5": "#7a8b2a",
    "c6": "#b0413e",
    "c7": "#3f94c0",
    "c8": "#8c6d46",
    "good": "#1d7874",
    "warn": "#c77d0a",
    "bad": "#c2452d",
    "calm": "#c5ccd4",
    "p50": "#1d7874",
    "p90": "#d99a3d",
    "p99": "#c2452d",
    "h0": "#c2452d",
    "h1": "#e8a26b",
    "h2": "#f3ead6",
    "h3": "#82b8b2",
    "h4": "#1d7874",
}

DARK: dict[str, str] = {
    "ink": "#e6eaef",
    "muted": "#93a0ae",
    "grid": "#2a323c",
    "surface": "#171c22",
    "c1": "#46b8ac",
    "c2": "#e8924e",
    "c3": "#7f9fe0",
    "c4": "#b98acb",
    "c5": "#a9ba58",
    "c6": "#de7a74",
    "c7": "#6fb9dd",
    "c8": "#bd9c72",
    "good": "#46b8ac",
    "warn": "#e0a54a",
    "bad": "#ea7355",
    "calm": "#48525e",
    "p50": "#46b8ac",
    "p90": "#e0b060",
    "p99": "#ea7355",
    "h0": "#e0623f",
    "h1": "#a8623f",
    "h2": "#4a4741",
    "h3": "#2c7b74",
    "h4": "#4cc4b6",
}

SERIES = tuple(f"$c{i}" for i in range(1, 9))

# Streamlit's own options; `warmwatch dashboard` passes them at the start, so no config.toml has to be found.
_SHARED: dict[str, Any] = {
    "baseFontSize": 14,
    "baseRadius": "6px",
    "showWidgetBorder": True,
    "headingFontWeights": [600, 600, 600, 600, 600, 600],
}
THEME: dict[str, Any] = {
    **{f"theme.{k}": v for k, v in _SHARED.items()},
    "theme.light.primaryColor": LIGHT["c1"],
    "theme.light.backgroundColor": LIGHT["surface"],
    "theme.light.secondaryBackgroundColor": "#f4f6f8",
    "theme.light.textColor": LIGHT["ink"],
    "theme.light.borderColor": "#dfe3e8",
    "theme.dark.primaryColor": DARK["c1"],
    "theme.dark.backgroundColor": DARK["surface"],
    "theme.dark.secondaryBackgroundColor": "#1f262e",
    "theme.dark.textColor": DARK["ink"],
    "theme.dark.borderColor": "#313a45",
}
