"""`warmwatch sql`: one question to the published database, answered as a table, CSV or JSON lines.

The question runs on a locked connection, in a form in which it can only read (read.py). Times are UTC.
"""

from __future__ import annotations

import csv
import json
import math
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TextIO

import duckdb
from pydantic import Field
from pydantic_settings import CliPositionalArg

from schemas.settings import Settings
from schemas.tables.read import FILE_NAME, NotReadingError, PublishedError, cursor, open_published, reading_only
from schemas.tables.terminal import printable, printable_json

EXIT_TROUBLE = 1
FETCH_ROWS = 2000
CELL_CHARACTERS = 60


class AskSettings(Settings):
    """Asks the published database: warmwatch sql "SELECT worker, trust, resident_blocks FROM workers" """

    command: ClassVar[str] = "sql"

    question: CliPositionalArg[str] = Field(description="one SELECT, FROM, WITH, DESCRIBE, SHOW or SUMMARIZE")
    data_dir: Path = Field(Path("data"), description="folder of the published database")
    db: Path | None = Field(None, description=f"the published file; default {FILE_NAME} in data_dir")
    format: Literal["table", "csv", "json"] = Field("table", description="how rows are written; json is one object a line")
    max_rows: int = Field(10_000, ge=1, description="rows after which the answer is cut, with a note on stderr")
    timeout_s: float = Field(60.0, gt=0, description="seconds after which the question is stopped")
    memory: str = Field("1GB", pattern=r"^\d+(\.\d+)?\s?[KMGT]i?B$", description="memory that the question may use")


class QuestionError(Exception):
    """The question was refused or failed; the message says why and what would be right."""


def run(settings: AskSettings) -> int:
    """Prints the answer; 1 with the reason on stderr when there is none."""
    path = settings.db or settings.data_dir / FILE_NAME
    try:
        return answer(path, settings, sys.stdout, sys.stderr)
    except (PublishedError, QuestionError) as e:
        print(f"warmwatch sql: {e}", file=sys.stderr)
        return EXIT_TROUBLE


def answer(path: Path, settings: AskSettings, out: TextIO, notes: TextIO) -> int:
    """Raises PublishedError, QuestionError."""
    connection = open_published(path, memory_limit=settings.memory)
    timer: threading.Timer | None = None
    try:
        at = cursor(connection)
        text = reading_only(at, settings.question)
        timer = threading.Timer(settings.timeout_s, at.interrupt)
        timer.daemon = True
        timer.start()
        at.execute(text)
        names = [d[0] for d in at.description]
        rows = _Counted(_rows(at), settings.max_rows)
        _WRITERS[settings.format](out, names, rows)
        if rows.more:
            print(f"(the answer was cut after {settings.max_rows} rows; see --max-rows)", file=notes)
        return 0
    except NotReadingError as e:
        raise QuestionError(str(e)) from e
    except duckdb.InterruptException as e:
        raise QuestionError(f"stopped after {settings.timeout_s:g} s: narrow the time range, aggregate, or raise --timeout-s") from e
    except duckdb.OutOfMemoryException as e:
        raise QuestionError(f"it needs more than {settings.memory} of memory: aggregate, narrow the time range, or raise --memory") from e
    except duckdb.PermissionException as e:
        raise QuestionError("only the published tables can be read here: no other files, no network, no extensions") from e
    except duckdb.Error as e:
        raise QuestionError(str(e).strip()) from e
    finally:
        if timer is not None:
            timer.cancel()
        connection.close()


class _Counted:
    """Hands on at most `limit` rows and remembers whether there were more."""

    def __init__(self, rows: Iterator[Sequence[Any]], limit: int) -> None:
        self._rows, self._limit, self.more = rows, limit, False

    def __iter__(self) -> Iterator[Sequence[Any]]:
        for i, row in enumerate(self._rows):
            if i == self._limit:
                self.more = True
                return
            yield row


def _rows(at: duckdb.DuckDBPyConnection) -> Iterator[Sequence[Any]]:
    while chunk := at.fetchmany(FETCH_ROWS):
        yield from chunk


def _text(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value.hex() if isinstance(value, bytes) else str(value)


def _write_table(out: TextIO, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    cells = [[_short(_text(v)) for v in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    for line in (names, ["-" * w for w in widths], *cells):
        out.write("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() + "\n")


def _short(text: str) -> str:
    text = printable(text.replace("\n", " "))
    return text if len(text) <= CELL_CHARACTERS else text[: CELL_CHARACTERS - 1] + "…"


def _write_csv(out: TextIO, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(["" if v is None else v.hex() if isinstance(v, bytes) else v for v in row] for row in rows)


def _write_json(out: TextIO, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    for row in rows:
        plain = (None if isinstance(v, float) and not math.isfinite(v) else v for v in row)  # JSON has no NaN
        out.write(printable_json(json.dumps(dict(zip(names, plain, strict=True)), default=_text, ensure_ascii=False)) + "\n")


_WRITERS = {"table": _write_table, "csv": _write_csv, "json": _write_json}
