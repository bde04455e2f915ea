"""The published file as all sessions see it: opened once for the process, again when the collector has replaced it.

A `Snapshot` is one published file: what it says about itself, a locked connection, and the answers that were already asked of it. All
figures of one page come from one snapshot, so they agree with each other. Viewers with the same filters ask the same questions, and each
question is answered once a snapshot, whoever asks; `Answers` is dropped with it. A snapshot lives as long as somebody uses it.

Rejected: a connection a session (17 ms each at every refresh), st.cache_data (it pickles, and outlives the file).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from schemas.tables.published import MINOR, TABLES
from schemas.tables.read import FileState, PublishedError, cursor, file_state, open_published

MOST_ANSWERS = 512


@dataclass(frozen=True, slots=True)
class Published:
    """The row of the table `published`."""

    published_at: datetime | None
    watermark: datetime | None
    version: str
    collector: str | None
    state: str | None
    has_events: bool
    has_decisions: bool
    has_outcomes: bool
    has_load: bool

    def age_s(self, now: datetime) -> float | None:
        """Age of the file, seconds."""
        return None if self.published_at is None else max(0.0, (now - self.published_at).total_seconds())


class LackingError(Exception):
    """The file has no such table or column: it was written by an older collector."""


@dataclass
class Snapshot:
    """One published file. `ask` may be called from any thread."""

    state: FileState
    published: Published
    lacking: tuple[str, ...]
    _connection: duckdb.DuckDBPyConnection
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _answers: OrderedDict[tuple[str, tuple[tuple[str, Any], ...]], pa.Table] = field(default_factory=OrderedDict)

    @property
    def watermark(self) -> datetime | None:
        return self.published.watermark

    def ask(self, sql: str, parameters: Mapping[str, Any]) -> pa.Table:
        """The answer, perhaps from memory. Raises LackingError, or duckdb.Error."""
        key = (sql, tuple(sorted(parameters.items())))
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
                return self._answers[key]
            at = cursor(self._connection)
            try:
                answer = _plain_numbers(at.sql(sql, params=dict(parameters)).to_arrow_table())
            except (duckdb.CatalogException, duckdb.BinderException) as e:
                if self.lacking:
                    raise LackingError(f"the file lacks {', '.join(self.lacking)}: it was written by an older collector; update it") from e
                raise
            finally:
                at.close()
            self._answers[key] = answer
            if len(self._answers) > MOST_ANSWERS:
                self._answers.popitem(last=False)
            return answer

    def close(self) -> None:
        self._connection.close()


class Database:
    """Opens, and opens again when the file changed. One for the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self.opened = 0
        self.open_s = 0.0

    def snapshot(self) -> Snapshot:
        """The newest published file. Raises PublishedError, whose message says what to do."""
        state = file_state(self.path)
        with self._lock:
            if self._snapshot is not None and state is not None and self._snapshot.state == state:
                return self._snapshot
            started = time.perf_counter()
            self._snapshot = None
            try:
                connection = open_published(self.path)
            except PublishedError:
                # A newer one may have come between stat and open; a second look costs little, and only a real fault repeats.
                connection = open_published(self.path)
            self._snapshot = _describe(connection, file_state(self.path) if state is None else state)
            self.opened += 1
            self.open_s = time.perf_counter() - started
            return self._snapshot

    def close(self) -> None:
        with self._lock:
            if self._snapshot is not None:
                self._snapshot.close()
                self._snapshot = None


def _describe(connection: duckdb.DuckDBPyConnection, state: FileState | None) -> Snapshot:
    found = {
        (table, column)
        for table, column in connection.execute(
            "SELECT table_name, column_name FROM duckdb_columns() WHERE database_name = 'warmwatch' AND NOT internal"
        ).fetchall()
    }
    lacking = []
    for table in TABLES:
        if not any(name == table.name for name, _ in found):
            lacking.append(table.name)
        else:
            lacking += [f"{table.name}.{c.name}" for c in table.columns if (table.name, c.name) not in found]
    columns = [d[0] for d in connection.execute("SELECT * FROM published").description or ()]
    row = dict(zip(columns, connection.fetchone() or (), strict=False))
    published = Published(
        published_at=_naive(row.get("published_at")),
        watermark=_naive(row.get("watermark")),
        version=str(row.get("version") or f"?.{MINOR}"),
        collector=row.get("collector"),
        state=row.get("state"),
        has_events=bool(row.get("has_events")),
        has_decisions=bool(row.get("has_decisions")),
        has_outcomes=bool(row.get("has_outcomes")),
        has_load=bool(row.get("has_load")),
    )
    return Snapshot(state or FileState(0, 0, 0), published, tuple(lacking), connection)


def _plain_numbers(answer: pa.Table) -> pa.Table:
    """Sums of integers are 128 bits wide, which Arrow gives as decimals; here they are integers. Raises pa.ArrowInvalid beyond 2^63."""
    for i, column in enumerate(answer.schema):
        if pa.types.is_decimal(column.type) and column.type.scale == 0:
            answer = answer.set_column(i, column.name, answer.column(i).cast(pa.int64()))
    return answer


def _naive(at: Any) -> datetime | None:
    if not isinstance(at, datetime):
        return None
    return at.astimezone(UTC).replace(tzinfo=None) if at.tzinfo else at
