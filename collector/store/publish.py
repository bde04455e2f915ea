"""Puts a new `warmwatch.duckdb` in place: built next to it, synced, renamed over it. Readers see the old file or the new one, whole.

    template   made once a process: every table, comment and macro of the contract; publishing copies it and fills it in
    live.*     the parts that still change, as tables        parts.*   views: segments of the manifest plus the live part
    main.*     what people read: views over parts.* with the contract's columns and comments

Each publish only rewrites the few views that name files; their comments go with a view and are written again (3 ms a table). Segment paths
are absolute: readers may start anywhere. Segments of an earlier minor version lack columns, which are NULL then. The file has DuckDB's
v1.0.0 storage format, which older command-line clients read, too.
Rejected: a glob in the views (it would count a segment that nobody committed yet, and both sides of a compaction).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import duckdb
import pyarrow as pa

from collector.store.columns import arrow_schema
from collector.store.segments import Segment, columns_of, sync_folder
from schemas.tables.losses import COST_MODELS, DIVERGENCE, LADDER_10S, LOSS_10S, PREFIXES, PRESSURE, REUSE_CURVES
from schemas.tables.published import (
    ATTEMPTS,
    CANDIDATES,
    CHANGES,
    DATA_HEALTH,
    DEAD_LETTERS,
    KV_EVENTS,
    LATENCY_10S,
    PUBLISHED,
    REQUESTS,
    SHADOWS,
    WORKER_10S,
    WORKERS,
    macros_sql,
)
from schemas.tables.read import FILE_NAME
from schemas.tables.table import Table

SEGMENTED: tuple[Table, ...] = (
    REQUESTS, CANDIDATES, SHADOWS, ATTEMPTS, KV_EVENTS, WORKER_10S, LATENCY_10S, LOSS_10S, LADDER_10S, PREFIXES, REUSE_CURVES, DIVERGENCE,
    PRESSURE, CHANGES, DEAD_LETTERS,
)  # fmt: skip
WHOLE: tuple[Table, ...] = (WORKERS, COST_MODELS, DATA_HEALTH, PUBLISHED)
Files = dict[frozenset[str], list[str]]
"""Paths of segments by the columns that they have."""
SCHEMAS = {t.name: arrow_schema(t) for t in (*SEGMENTED, *WHOLE)}


class Publisher:
    def __init__(self, data_dir: Path, segments_dir: Path) -> None:
        self._target = data_dir.resolve() / FILE_NAME
        self._segments_dir = segments_dir.resolve()
        self._draft = self._target.with_name(f".{FILE_NAME}.draft")
        self._template = self._target.with_name(f".{FILE_NAME}.template")
        self._columns: dict[str, frozenset[str]] = {}  # of segments, by name: read once each, since they never change
        self._db = _connect()
        _remove(self._draft)
        self._make_template()

    def publish(self, manifest: Iterable[Segment], parts: Mapping[str, pa.Table]) -> None:
        """parts: live rows of segmented tables and all rows of the others; a missing table is empty. Raises OSError, duckdb.Error."""
        files: dict[str, Files] = {t.name: {} for t in SEGMENTED}
        known, self._columns = self._columns, {}
        for s in manifest:
            if s.table not in files:
                continue  # the journal is for the collector alone
            columns = self._columns[s.name] = known.get(s.name) or self._columns_of(s)
            files[s.table].setdefault(columns, []).append(str(self._segments_dir / s.name))
        _remove(self._draft)
        shutil.copyfile(self._template, self._draft)
        db = self._db
        db.execute(f"ATTACH {_quote(str(self._draft))} AS pub")
        try:
            db.execute("BEGIN")
            for name, rows in parts.items():
                if rows.num_rows:
                    schema = "main" if any(t.name == name for t in WHOLE) else "live"
                    db.register("part", rows)
                    db.execute(f'INSERT INTO pub.{schema}."{name}" SELECT * FROM part')  # noqa: S608 names of ours
                    db.unregister("part")
            db.execute("USE pub")
            for t in SEGMENTED:
                if files[t.name]:
                    db.execute(f'CREATE OR REPLACE VIEW parts."{t.name}" AS {_select(t, files[t.name])};{t.comments("VIEW", "parts")}')
            db.execute("COMMIT")
            db.execute("USE memory")
            db.execute("DETACH pub")
        except BaseException:
            # Whatever state DuckDB is in now (a transaction aborted, a file still attached): the next try begins with a new one.
            db.close()
            self._db = _connect()
            raise
        _sync(self._draft)
        self._draft.replace(self._target)
        sync_folder(self._target.parent)

    def _columns_of(self, segment: Segment) -> frozenset[str]:
        try:
            return columns_of(self._segments_dir, segment)
        except (OSError, pa.ArrowException):  # one damaged file must not keep all others from readers: who asks for its rows will be told
            return frozenset(SCHEMAS[segment.table].names)

    def close(self) -> None:
        self._db.close()
        _remove(self._template)
        _remove(self._draft)

    def _make_template(self) -> None:
        _remove(self._template)
        db = self._db
        db.execute(f"ATTACH {_quote(str(self._template))} AS pub (STORAGE_VERSION 'v1.0.0')")
        try:
            db.execute("USE pub")
            db.execute("BEGIN; CREATE SCHEMA live; CREATE SCHEMA parts")
            for t in WHOLE:
                db.execute(t.ddl())
            for t in SEGMENTED:
                columns = ", ".join(f'"{c.name}" {c.type}' for c in t.columns)
                names = ", ".join(f'"{c.name}"' for c in t.columns)
                db.execute(f'CREATE TABLE live."{t.name}" ({columns});{t.comments("TABLE", "live")}')
                db.execute(f'CREATE VIEW parts."{t.name}" AS {_select(t, {})};{t.comments("VIEW", "parts")}')
                db.execute(f'CREATE VIEW main."{t.name}" AS SELECT {names} FROM parts."{t.name}"')  # noqa: S608 names of ours
                db.execute(t.comments("VIEW"))
            db.execute(macros_sql())
            db.execute("COMMIT")
        finally:
            db.execute("USE memory")
            db.execute("DETACH pub")


def _connect() -> duckdb.DuckDBPyConnection:
    db = duckdb.connect(":memory:", config={"threads": 1, "memory_limit": "512MB"})
    db.execute("SET TimeZone = 'UTC'")
    return db


def _select(table: Table, files: Files) -> str:
    parts = []
    for columns, paths in files.items():
        names = ", ".join(f'"{c.name}"' if c.name in columns else f'NULL::{c.type} AS "{c.name}"' for c in table.columns)
        parts.append(f"SELECT {names} FROM read_parquet([{', '.join(map(_quote, paths))}])")  # noqa: S608 paths of ours
    names = ", ".join(f'"{c.name}"' for c in table.columns)
    parts.append(f'SELECT {names} FROM live."{table.name}"')  # noqa: S608 names of ours
    return " UNION ALL ".join(parts)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.with_name(path.name + ".wal").unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
