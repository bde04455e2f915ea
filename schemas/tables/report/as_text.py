"""A page for a terminal of `LINE` places: what could steer it is escaped, names are cut, bars are drawn with blocks.

A table that is wider breaks the words of its cells and head into lines, the longest column first; if that is not enough its bars are
shorter, or go. One that is wider still stays so, and the terminal breaks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from schemas.tables.report.sections import Cell, Grid, Page, Section
from schemas.tables.terminal import printable
from schemas.tables.words import JOINED, LINE, cut, fitted, fold, indented, width

_WORD, _LAST_WORD = 36, 240
_BARS = (12, 6)
"""Places: of a bar; of one where that is too much."""
_LONGEST_WORD = 100
"""Places from which one word of a sentence, as the name of a route, is cut."""
_PARTS = " ▏▎▍▌▋▊▉█"


def text(page: Page) -> str:
    """The whole page, without a final newline."""
    parts = [[page.title, "=" * len(page.title), *map(_sentence, page.about)], *(_section(s) for s in page.sections)]
    return "\n\n".join("\n".join(fold(lines)) for lines in parts).replace(JOINED, " ")


def _section(section: Section) -> list[str]:
    lines = [section.title, "-" * len(section.title), *map(_sentence, section.sentences)]
    for grid in section.grids:
        lines += ["", *_grid(grid)]
    if section.notes:
        lines += ["", *(f"  note: {_sentence(note)}" for note in section.notes)]
    return lines


def _grid(grid: Grid) -> list[str]:
    drawn = {i for row in grid.rows for i, cell in enumerate(row) if cell.bar is not None}
    for bar in _BARS if drawn else ():
        table = _table(grid, drawn, bar)
        if _widest(table) + 2 <= LINE:
            break
    else:
        table = _table(grid, set(), 0)
    return [*([f"  {_safe(grid.caption)}"] if grid.caption else []), *indented(table)]


def _table(grid: Grid, drawn: set[int], bar: int) -> list[str]:
    """Head, ruler and rows, as narrow as they need to be."""
    head, left = _split([*grid.head], drawn, grid.left)
    last = len(grid.head) - 1
    rows = [
        [part for i, cell in enumerate(row) for part in _parts(cell, bar if i in drawn else 0, _LAST_WORD if i == last else _WORD)]
        for row in grid.rows
    ]
    heads, table = fitted(head, rows, left)
    return [*heads, "-" * _widest([*heads, *table]), *table]


def _widest(table: Iterable[str]) -> int:
    return max(map(width, table))


def _split(head: Sequence[str], drawn: set[int], left: frozenset[int]) -> tuple[list[str], set[int]]:
    """A column with bars becomes two."""
    names: list[str] = []
    words: set[int] = set()
    for i, name in enumerate(head):
        if i in left:
            words.add(len(names))
        names.append(name)
        if i in drawn:
            words.add(len(names))
            names.append("")
    return names, words


def _parts(cell: Cell, bar: int, most: int) -> list[str]:
    return [cut(_safe(cell.text), most), *([_bar(cell.bar, bar)] if bar else [])]


def _bar(share: float | None, places: int) -> str:
    if share is None:
        return ""
    eighths = round(8 * places * min(1.0, max(0.0, share)))
    return (_PARTS[8] * (eighths // 8) + _PARTS[eighths % 8]).strip()


def _sentence(words: str) -> str:
    return " ".join(cut(word, _LONGEST_WORD) for word in _safe(words).split(" "))


def _safe(words: str) -> str:
    return JOINED.join(printable(part) for part in words.split(JOINED))
