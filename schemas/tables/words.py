"""Words and figures of pages for people: how numbers, times and tables are written, so that every page writes them alike.

Pure. None is a dash or "an unknown time", never 0.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from datetime import timedelta

UNKNOWN = "-"
JOINED = "\u00a0"
"""Stands for a space where a line must not end: between a figure and its unit."""
LINE = 118
_INDENT, _LEAST_WORD = 2, 18
"""Of tables; places down to which a column of words is broken."""


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


def width(text: str) -> int:
    """Places that it takes on a terminal: wide characters and emoji two, combining ones none."""
    return len(text) if text.isascii() else sum(map(_places, text))


def _places(c: str) -> int:
    return 0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], left: set[int]) -> list[str]:
    widths = [max(map(width, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(_padded(c, w, i in left) for i, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip() for line in (head, *rows)
    ]


def _padded(text: str, places: int, left: bool) -> str:
    room = " " * (places - width(text))
    return text + room if left else room + text


def cut(text: str, places: int) -> str:
    """So long as it fits, else its beginning and an ellipsis."""
    if width(text) <= places:
        return text
    shown, room = "", places - 1
    for c in text:
        room -= _places(c)
        if room < 0:
            break
        shown += c
    return shown + "…"


def wrapped(text: str, places: int) -> list[str]:
    """Lines of at most so many places, broken at spaces; a word that is longer is broken where a line ends."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and width(lines[-1]) + 1 + width(word) <= places:
            lines[-1] += f" {word}"
            continue
        if lines[-1]:
            lines.append("")
        for c in word:
            if width(lines[-1]) + _places(c) > places and lines[-1]:
                lines.append("")
            lines[-1] += c
    return lines


def fitted(head: Sequence[str], rows: Sequence[Sequence[str]], left: set[int]) -> tuple[list[str], list[str]]:
    """`aligned` lines of the head, and of the rows, that fit `LINE` when they are indented: words and heads are broken at spaces as far as
    that needs, the longest column of words first. Figures are never broken, so a table of many is wider."""
    widths = _widths(head, rows, left)
    heads = _broken(head, widths)
    lines = aligned(heads[0], [*heads[1:], *(line for row in rows for line in _broken(row, widths))], left)
    return lines[: len(heads)], lines[len(heads) :]


def _widths(head: Sequence[str], rows: Sequence[Sequence[str]], left: set[int]) -> list[int]:
    whole = [max(map(width, column)) for column in zip(head, *rows, strict=True)]
    least = []
    for i, column in enumerate(zip(*rows, strict=True)):
        cells = max(map(width, column))
        longest = max(map(width, head[i].split(" ")))
        least.append(max(longest, min(cells, _LEAST_WORD) if i in left else cells))
    over = sum(whole) + 2 * (len(whole) - 1) + _INDENT - LINE
    while over > 0 and any(w > n for w, n in zip(whole, least, strict=True)):
        i = max((i for i, w in enumerate(whole) if w > least[i]), key=lambda i: (i in left, whole[i], -i))
        whole[i] -= 1
        over -= 1
    return whole


def _broken(row: Sequence[str], widths: Sequence[int]) -> list[list[str]]:
    """One row as lines of the table."""
    cells = [wrapped(cell, places) for cell, places in zip(row, widths, strict=True)]
    return [[cell[n] if n < len(cell) else "" for cell in cells] for n in range(max(map(len, cells)))]


def indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def fold(lines: Iterable[str]) -> Iterable[str]:
    """Sentences longer than a line go on, indented; tables (with runs of spaces) stay as they are."""
    for line in lines:
        text = line.lstrip()
        indent = " " * (len(line) - len(text))
        if width(line) <= LINE or "  " in text:
            yield line
            continue
        now = indent
        for word in text.split(" "):
            if width(now) + 1 + width(word) > LINE and now.strip():
                yield now
                now = indent + "  "
            now += word if not now.strip() else f" {word}"
        yield now
