"""A page as one HTML file: no script, no network, no library; light or dark as the browser wants. Every text in it is escaped."""

from __future__ import annotations

from html import escape

from schemas.tables.report.sections import Cell, Grid, Page, Section
from schemas.tables.terminal import printable
from schemas.tables.words import JOINED

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_SHORT = 34
"""Characters of a name."""
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #5a6675; --line: #d8dee6; --page: #ffffff; --bar: #2f6fde; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9f0; --dim: #9aa7b6; --line: #333d4a; --page: #12171e; --bar: #6aa2ff; } }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; border-bottom: 1px solid var(--line); }
p { margin: .3rem 0; } .about, .note, .caption { color: var(--dim); } .note::before { content: "Note: "; font-weight: 600; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .2rem 0 .8rem; font-variant-numeric: tabular-nums; }
.caption { margin-top: .9rem; } th, td { padding: .15rem .7rem .15rem 0; text-align: right; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid var(--line); } .name, .word { text-align: left; }
th, td { white-space: nowrap; } td.word { white-space: normal; min-width: 12rem; max-width: 26rem; }
td.word:last-child { min-width: 18rem; max-width: 40rem; }
svg { width: 6rem; height: .7rem; margin-left: .5rem; } rect { fill: var(--line); } rect + rect { fill: var(--bar); }
@media print { body { max-width: none; } }
"""


def html(page: Page) -> str:
    """The whole file."""
    body = [f"<h1>{_safe(page.title)}</h1>", *(f'<p class="about">{_safe(line)}</p>' for line in page.about)]
    body += [_section(s) for s in page.sections]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_safe(page.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    lines = ["<section>", f"<h2>{_safe(section.title)}</h2>", *(f"<p>{_safe(s)}</p>" for s in section.sentences)]
    lines += [_grid(grid) for grid in section.grids]
    return "\n".join([*lines, *(f'<p class="note">{_safe(note)}</p>' for note in section.notes), "</section>"])


def _grid(grid: Grid) -> str:
    caption = f'<p class="caption">{_safe(grid.caption)}</p>\n' if grid.caption else ""  # beside the box that scrolls
    classes = [_class(i, grid) for i in range(len(grid.head))]
    head = "".join(f'<th scope="col"{kind}>{_safe(name)}</th>' for kind, name in zip(classes, grid.head, strict=True))
    rows = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{_cell(cell)}</td>" for kind, cell in zip(classes, row, strict=True)) + "</tr>" for row in grid.rows
    )
    return f'{caption}<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'


def _class(column: int, grid: Grid) -> str:
    """Figures and short names stay on one line."""
    if column not in grid.left:
        return ""
    return f' class="{"word" if any(len(row[column].text) > _SHORT for row in grid.rows) else "name"}"'


def _cell(cell: Cell) -> str:
    if cell.bar is None:
        return _safe(cell.text)
    width = f"{100 * min(1.0, max(0.0, cell.bar)):.1f}"
    bar = f'<rect width="100" height="10"/><rect width="{width}" height="10"/>'
    return f'{_safe(cell.text)}<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{bar}</svg>'


def _safe(words: str) -> str:
    """Escaped; characters that are not printable (line breaks, ones that turn the direction of writing) are written out."""
    return escape(JOINED.join(printable(part) for part in words.split(JOINED)))
