"""Runs SQL that a viewer wrote: one statement that reads, within time, rows and memory, and nothing but the published tables.

Each run has an instance of its own, locked and told to read only (schemas/tables/read.py), so no query starves the pages, and the whole is
gone afterwards.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa

from schemas.tables.read import NotReadingError, cursor, open_published, reading_only

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
        text = reading_only(at, sql)
        timer = threading.Timer(limits.timeout_s, at.interrupt)
        timer.daemon = True
        started = time.perf_counter()
        timer.start()
        try:
            rows = _read(at.sql(text).to_arrow_reader(_BATCH_ROWS), limits.max_rows)
        except (duckdb.InterruptException, pa.ArrowException, OSError) as e:
            if time.perf_counter() - started < limits.timeout_s:
                raise ConsoleError(str(e).strip()) from e
            raise ConsoleError(
                f"Stopped after {limits.timeout_s:g} s. Narrow the time range, aggregate, or ask the file with the duckdb command line."
            ) from e
        finally:
            timer.cancel()
        return Result(rows.slice(0, limits.max_rows), rows.num_rows > limits.max_rows, time.perf_counter() - started)
    except NotReadingError as e:
        raise ConsoleError(f"{str(e)[0].upper()}{str(e)[1:]}.") from e
    except duckdb.OutOfMemoryException as e:
        raise ConsoleError(f"It needs more than {limits.memory} of memory: aggregate, or narrow the time range.") from e
    except duckdb.PermissionException as e:
        raise ConsoleError("Only the published tables can be read here: no other files, no network, no extensions.") from e
    except duckdb.Error as e:
        raise ConsoleError(str(e).strip()) from e
    finally:
        connection.close()


def _read(reader: pa.RecordBatchReader, max_rows: int) -> pa.Table:
    """The answer, or more than max_rows rows of it, if it is not too large for the page."""
    batches, held_bytes, rows = [], 0, 0
    for batch in reader:
        held_bytes += batch.nbytes
        if held_bytes > _MOST_BYTES:
            raise ConsoleError(f"The answer is larger than {_MOST_BYTES >> 20} MB: choose fewer columns or rows, or aggregate.")
        batches.append(batch)
        rows += batch.num_rows
        if rows > max_rows:
            break
    return pa.Table.from_batches(batches, reader.schema)
