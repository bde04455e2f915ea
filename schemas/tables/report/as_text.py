"""A page for a terminal: what could steer it is escaped, names are cut, bars are drawn with blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from schemas.tables.report.sections import Cell, Grid, Page, Section
from schemas.tables.terminal import printable
from schemas.tables.words import JOINED, aligned, fold, indented

_WORD, _LAST_WORD, _BAR = 36, 110, 12
_PARTS = " ▏▎▍▌▋▊▉█"


def text(page: Page) -> str:
    """The whole page, without a final newline."""
    parts = [[page.title, "=" * len(page.title), *map(_safe, page.about)], *(_section(s) for s in page.sections)]
    return "\n\n".join("\n".join(fold(lines)) for lines in parts).replace(JOINED, " ")


def _section(section: Section) -> list[str]:
    lines = [section.title, "-" * len(section.title), *map(_safe, section.sentences)]
    for grid in section.grids:
        lines += ["", *_grid(grid)]
    if section.notes:
        lines += ["", *(f"  note: {_safe(note)}" for note in section.notes)]
    return lines


def _grid(grid: Grid) -> list[str]:
    drawn = {i for row in grid.rows for i, cell in enumerate(row) if cell.bar is not None}
    head, left = _split([*grid.head], drawn, grid.left)
    last = len(grid.head) - 1
    rows = [
        [part for i, cell in enumerate(row) for part in _parts(cell, i in drawn, _LAST_WORD if i == last else _WORD)] for row in grid.rows
    ]
    table = aligned(head, rows, left=left)
    return [*([f"  {_safe(grid.caption)}"] if grid.caption else []), *indented([table[0], _ruler(table), *table[1:]])]


def _ruler(table: Iterable[str]) -> str:
    return "-" * max(map(len, table))


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


def _parts(cell: Cell, drawn: bool, most: int) -> list[str]:
    return [_cut(_safe(cell.text), most), *([_bar(cell.bar)] if drawn else [])]


def _bar(share: float | None) -> str:
    if share is None:
        return ""
    eighths = round(8 * _BAR * min(1.0, max(0.0, share)))
    return (_PARTS[8] * (eighths // 8) + _PARTS[eighths % 8]).strip()


def _cut(word: str, most: int) -> str:
    return word if len(word) <= most else word[: most - 1] + "…"


def _safe(words: str) -> str:
    return JOINED.join(printable(part) for part in words.split(JOINED))
