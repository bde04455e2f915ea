"""The collector's private database: what was read, what was written of it, and the open ends, moved together in one transaction.

    meta       commit number, the kv checkpoint, small carried values (JSON)
    offsets    per topic partition: the next offset to read, and the offsets of records before it that still wait for their other half
    segments   the manifest: the Parquet files that count
    retired    files that no longer count, until readers of older published files are gone
    live_*     10 s buckets that may still change

No indexes, no growth: everything here is bounded by what is open. Large state (who holds which block) is a checkpoint file named in meta.

Rejected: the broker's committed offsets (a second truth), SQLite (a second engine; the manifest and rollups are read by the publisher).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from collector.store.segments import Segment
from schemas.stream import Partition

VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key VARCHAR, value VARCHAR);
CREATE TABLE IF NOT EXISTS offsets (topic VARCHAR, part INTEGER, next_offset UBIGINT, waiting BLOB, identity VARCHAR);
CREATE TABLE IF NOT EXISTS segments
  (table_name VARCHAR, lo UBIGINT, hi UBIGINT, row_count UBIGINT, size_bytes UBIGINT, newest_us BIGINT, level INTEGER);
CREATE TABLE IF NOT EXISTS retired (name VARCHAR, at_s DOUBLE);
"""


class StateError(Exception):
    """The state database cannot be used; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a partition is read next. waiting: packed i64 of `(offset << 1) | counted`; identity: of the topic when it was read."""

    next_offset: int
    waiting: bytes = b""
    identity: str | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """All that one transaction changes."""

    number: int
    positions: Mapping[Partition, Position]
    added: Sequence[Segment] = ()
    removed: Sequence[Segment] = ()
    retired_at_s: float = 0.0
    unlinked: Sequence[str] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    live: Mapping[str, tuple[Sequence[int], pa.Table]] = field(default_factory=dict)
    """table -> (buckets in microseconds to replace or drop, their rows now)"""


class State:
    """One connection, one owner. Raises duckdb.Error from `commit` when the disk is full or the file is damaged."""

    def __init__(self, path: Path, live: Mapping[str, str]) -> None:
        """live: name -> column definitions of each live table; each has a TIMESTAMP column `bucket`."""
        self._path = path
        self._live = live
        self._db = self._open()

    def _open(self) -> duckdb.DuckDBPyConnection:
        try:
            db = duckdb.connect(self._path, config={"threads": 1, "memory_limit": "512MB"})
            db.execute("SET checkpoint_threshold = '4MB'; SET TimeZone = 'UTC'")
            db.execute(_SCHEMA)
            for name, columns in self._live.items():
                db.execute(f'CREATE TABLE IF NOT EXISTS "{name}" ({columns})')
        except duckdb.Error as e:
            raise StateError(
                f"the state database {self._path} cannot be opened ({str(e).splitlines()[0]}): if damaged, move the data folder aside; "
                "the collector then starts from the oldest records that the stream still holds"
            ) from e
        found = db.execute("SELECT value FROM meta WHERE key = 'version'").fetchall()
        if not found:
            db.execute("INSERT INTO meta VALUES ('version', ?)", [str(VERSION)])
        elif found[0][0] != str(VERSION):
            db.close()
            raise StateError(f"{self._path} has version {found[0][0]}, and this collector knows {VERSION}: use a data folder of its own")
        return db

    def reopen(self) -> None:
        """After a failed commit: DuckDB may refuse everything until the file is opened again."""
        self._db.close()
        self._db = self._open()

    @property
    def number(self) -> int:
        return int(self.meta("commit", 0))

    def meta(self, key: str, default: Any = None) -> Any:
        rows = self._db.execute("SELECT value FROM meta WHERE key = ?", [key]).fetchall()
        return json.loads(rows[0][0]) if rows else default

    def positions(self) -> dict[Partition, Position]:
        rows = self._db.execute("SELECT topic, part, next_offset, waiting, identity FROM offsets").fetchall()
        return {(t, p): Position(n, bytes(w), i) for t, p, n, w, i in rows}

    def segments(self) -> list[Segment]:
        rows = self._db.execute(
            "SELECT table_name, lo, hi, row_count, size_bytes, newest_us, level FROM segments ORDER BY table_name, lo"
        ).fetchall()
        return [Segment(*r) for r in rows]

    def retired(self) -> dict[str, float]:
        return dict(self._db.execute("SELECT name, at_s FROM retired").fetchall())

    def live(self, name: str) -> pa.Table:
        rows: pa.Table = self._db.sql(f'SELECT * FROM "{name}"').to_arrow_table()  # noqa: S608 a name of ours
        return rows

    def commit(self, change: Commit) -> None:
        """One transaction: all of it or nothing."""
        db = self._db
        db.execute("BEGIN")
        try:
            for s in change.removed:
                db.execute("DELETE FROM segments WHERE table_name = ? AND lo = ? AND hi = ?", [s.table, s.lo, s.hi])
                db.execute("INSERT INTO retired VALUES (?, ?)", [s.name, change.retired_at_s])
            for s in change.added:
                db.execute(
                    "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?)", [s.table, s.lo, s.hi, s.rows, s.size_bytes, s.newest_us, s.level]
                )
            if change.unlinked:
                db.execute("DELETE FROM retired WHERE list_contains(?, name)", [list(change.unlinked)])
            for name, (buckets, rows) in change.live.items():
                db.execute(f'DELETE FROM "{name}" WHERE list_contains(?, epoch_us(bucket))', [list(buckets)])  # noqa: S608
                if rows.num_rows:
                    db.register("live_rows", rows)
                    db.execute(f'INSERT INTO "{name}" SELECT * FROM live_rows')  # noqa: S608
                    db.unregister("live_rows")
            if change.positions:
                parts = sorted(change.positions)
                where = [change.positions[p] for p in parts]
                db.execute("DELETE FROM offsets WHERE list_contains(?, topic || '/' || part)", [[f"{t}/{p}" for t, p in parts]])
                table = pa.table(
                    {
                        "topic": [t for t, _ in parts],
                        "part": pa.array([p for _, p in parts], pa.int32()),
                        "next_offset": pa.array([w.next_offset for w in where], pa.uint64()),
                        "waiting": pa.array([w.waiting for w in where], pa.binary()),
                        "identity": pa.array([w.identity for w in where], pa.string()),
                    }
                )
                db.register("new_offsets", table)
                db.execute("INSERT INTO offsets SELECT * FROM new_offsets")
                db.unregister("new_offsets")
            meta = {"commit": change.number, **change.meta}
            db.execute("DELETE FROM meta WHERE list_contains(?, key)", [list(meta)])
            db.execute(
                "INSERT INTO meta SELECT unnest(?), unnest(?)", [list(meta), [json.dumps(v, separators=(",", ":")) for v in meta.values()]]
            )
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(duckdb.Error):  # when the transaction is gone already, that is what was wanted
                db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._db.close()
