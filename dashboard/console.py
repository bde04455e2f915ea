"""Runs SQL that a viewer wrote: one statement that reads, within time, rows and memory, and nothing but the published tables.

Each run has an instance of its own (schemas/tables/read.py locks it), so no query starves the pages, and the whole is gone afterwards.
The statement is run as a subquery. That is what keeps it from writing: DuckDB lets a top-level WITH hold COPY, INSERT or DELETE, and a
COPY could write into the folder of the segments; inside a subquery its binder refuses all of them. Checking words would not do: they
stand in strings, comments and names too.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa

from schemas.tables.read import cursor, open_published

_EXPLAIN = re.compile(r"^\s*EXPLAIN\s+(ANALYZE\s+)?(?=[A-Z(])", re.IGNORECASE)


_BATCH_ROWS = 256
_MOST_BYTES = 64 << 20
"""Of an answer. DuckDB's memory limit ends where Arrow's memory begins."""


class ConsoleError(Exception):
    """The query was refused or failed; the message says why and what would be right."""


@dataclass(frozen=True, slots=True)
class Limits:
    timeout_s: float
    max_rows: int
    memory: str


@dataclass(frozen=True, slots=True)
class Result:
    """At most `max_rows` rows; `more`: there are further ones."""

    rows: pa.Table
    more: bool
    seconds: float


def run(path: Path, sql: str, limits: Limits) -> Result:
    """Raises ConsoleError, or PublishedError when there is no file to ask."""
    connection = open_published(path, threads=1, memory_limit=limits.memory)
    try:
        at = cursor(connection)
        text = _as_subquery(at, sql, limits.max_rows)
        timer = threading.Timer(limits.timeout_s, at.interrupt)
        timer.daemon = True
        started = time.perf_counter()
        timer.start()
        try:
            rows = _read(at.sql(text).to_arrow_reader(_BATCH_ROWS))
        except (duckdb.InterruptException, pa.ArrowException, OSError) as e:
            if time.perf_counter() - started < limits.timeout_s:
                raise ConsoleError(str(e).strip()) from e
            raise ConsoleError(
                f"Stopped after {limits.timeout_s:g} s. Narrow the time range, aggregate, or ask the file with the duckdb command line."
            ) from e
        finally:
            timer.cancel()
        return Result(rows.slice(0, limits.max_rows), rows.num_rows > limits.max_rows, time.perf_counter() - started)
    except duckdb.OutOfMemoryException as e:
        raise ConsoleError(f"It needs more than {limits.memory} of memory: aggregate, or narrow the time range.") from e
    except duckdb.PermissionException as e:
        raise ConsoleError("Only the published tables can be read here: no other files, no network, no extensions.") from e
    except duckdb.Error as e:
        raise ConsoleError(str(e).strip()) from e
    finally:
        connection.close()


def _read(reader: pa.RecordBatchReader) -> pa.Table:
    """The whole answer, if it is not too large for the page."""
    batches, held_bytes = [], 0
    for batch in reader:
        held_bytes += batch.nbytes
        if held_bytes > _MOST_BYTES:
            raise ConsoleError(f"The answer is larger than {_MOST_BYTES >> 20} MB: choose fewer columns or rows, or aggregate.")
        batches.append(batch)
    return pa.Table.from_batches(batches, reader.schema)


def _as_subquery(at: duckdb.DuckDBPyConnection, sql: str, max_rows: int) -> str:
    statements = at.extract_statements(sql)
    if len(statements) != 1:
        raise ConsoleError("Write one statement." if statements else "Write a query, such as: FROM workers")
    text = statements[0].query.strip().rstrip(";")
    explain = _EXPLAIN.match(text)
    if explain:
        inner = at.extract_statements(text[explain.end() :])
        if len(inner) == 1 and inner[0].type == duckdb.StatementType.SELECT:
            return f"{explain[0]} SELECT * FROM (\n{text[explain.end() :]}\n)"  # noqa: S608 - it is the viewer's query
    if statements[0].type != duckdb.StatementType.SELECT:
        raise ConsoleError("Only queries that read: SELECT, WITH, FROM, VALUES, DESCRIBE, SHOW, SUMMARIZE, EXPLAIN.")
    return f"SELECT * FROM (\n{text}\n) LIMIT {max_rows + 1}"  # noqa: S608 - it is the viewer's query
