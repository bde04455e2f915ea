"""How numbers look, everywhere the same: three significant digits, a thin space before the unit, and words for what is not known."""

from __future__ import annotations

import math
from datetime import datetime

NOT_REPORTED = "not reported"
NO_DATA = "no data yet"
DASH = "–"
_SPACE = "\u202f"
_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def share(value: float | None, unknown: str = NOT_REPORTED) -> str:
    """0.8312 -> 83.1 %"""
    return unknown if _unknown(value) else f"{100 * value:.1f}{_SPACE}%"  # type: ignore[operator]


def points(value: float | None) -> str | None:
    """A difference of two shares: 0.013 -> +1.3 pp; None stays None."""
    return None if value is None else f"{100 * value:+.1f}{_SPACE}pp"


def count(value: float | None, unit: str = "", unknown: str = NOT_REPORTED) -> str:
    """1234567 -> 1.23 M; whole numbers below 10 000 as they are."""
    if value is None or _unknown(value):
        return unknown
    tail = f"{_SPACE}{unit}" if unit else ""
    if abs(value) < 10_000 and float(value).is_integer():
        return f"{int(value)}{tail}"
    for step, letter in _STEPS:
        if abs(value) >= step * 0.9995:
            return f"{_digits(value / step)}{_SPACE}{letter}{unit}"
    return f"{_digits(value)}{tail}"


def rate(per_s: float | None, unit: str = "", unknown: str = NOT_REPORTED) -> str:
    """3.21 -> 3.21 /s"""
    return unknown if per_s is None or _unknown(per_s) else f"{count(per_s, unit)}{'' if unit else _SPACE}/s"


def seconds(value: float | None, unknown: str = NOT_REPORTED) -> str:
    """0.1823 -> 182 ms; 1.234 -> 1.23 s; 75 -> 75 s; 200 -> 3 min 20 s."""
    if value is None or _unknown(value):
        return unknown
    if abs(value) < 0.9995e-3:
        return f"{_digits(value * 1e6)}{_SPACE}µs"
    if abs(value) < 0.9995:
        return f"{_digits(value * 1e3)}{_SPACE}ms"
    if abs(value) < 120:
        return f"{int(value) if abs(value) >= 10 and float(value).is_integer() else _digits(value)}{_SPACE}s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes}{_SPACE}min" + (f" {rest}{_SPACE}s" if rest else "")
    hours, minutes = divmod(minutes, 60)
    return f"{hours}{_SPACE}h" + (f" {minutes}{_SPACE}min" if minutes else "")


def age(value_s: float | None, unknown: str = NOT_REPORTED) -> str:
    """How old: tenths below ten seconds, whole seconds above."""
    if value_s is None or _unknown(value_s):
        return unknown
    return f"{value_s:.1f}{_SPACE}s" if value_s < 9.95 else seconds(round(value_s))


def clock(at: datetime | None, unknown: str = NO_DATA) -> str:
    """The time of day in UTC."""
    return unknown if at is None else f"{at:%H:%M:%S} UTC"


def window_text(length_s: float) -> str:
    """3600 -> 1 h, as the range buttons say it."""
    for unit_s, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if length_s >= unit_s and length_s % unit_s == 0:
            return f"{int(length_s // unit_s)}{_SPACE}{name}"
    return seconds(length_s)


def _unknown(value: float | None) -> bool:
    return value is None or math.isnan(value)


def _digits(value: float) -> str:
    """Three significant digits without exponent."""
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
