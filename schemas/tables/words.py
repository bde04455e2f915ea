"""Words and figures of pages for people: how numbers, times and tables are written, so that every page writes them alike.

Pure. None is a dash or "an unknown time", never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

UNKNOWN = "-"
JOINED = "\u00a0"
"""Stands for a space where a line must not end: between a figure and its unit."""
LINE = 118


def count(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}".replace(",", JOINED)


def seconds(value_s: float | None) -> str:
    if value_s is None:
        return "an unknown time"
    if value_s < 0.001:
        return f"{value_s * 1e6:.0f}{JOINED}us"
    if value_s < 1:
        return f"{value_s * 1e3:.3g}{JOINED}ms"
    return f"{value_s:.3g}{JOINED}s" if value_s < 100 else f"{value_s:.0f}{JOINED}s"


def age(span: timedelta) -> str:
    span_s = max(0.0, span.total_seconds())
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if span_s >= 2 * size:
            return f"{span_s / size:.0f} {unit}"
    return f"{span_s:.0f} s" if span_s >= 10 else f"{span_s:.1f} s"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], left: set[int]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in (head, *rows)
    ]


def indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def fold(lines: Iterable[str]) -> Iterable[str]:
    """Sentences longer than a line go on, indented; tables (with runs of spaces) stay as they are."""
    for line in lines:
        text = line.lstrip()
        indent = " " * (len(line) - len(text))
        if len(line) <= LINE or "  " in text:
            yield line
            continue
        now = indent
        for word in text.split(" "):
            if len(now) + 1 + len(word) > LINE and now.strip():
                yield now
                now = indent + "  "
            now += word if not now.strip() else f" {word}"
        yield now
