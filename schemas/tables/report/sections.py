"""The shape of a page: what a terminal and a browser both can show. Texts are as they came from anybody: who writes a page escapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    bar: float | None = None
    """0 to 1: drawn beside the text."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. left: which columns are words; the others are figures."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    left: frozenset[int] = frozenset({0})
    caption: str = ""
    """What numerators, denominators and counts are, and of which time."""


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    sentences: Sequence[str] = ()
    grids: Sequence[Grid] = ()
    notes: Sequence[str] = ()
    """What is not known, and what not to conclude."""


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    about: Sequence[str]
    sections: Sequence[Section] = field(default=())
