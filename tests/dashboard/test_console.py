"""What people may run on the SQL page, and what not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from dashboard.console import ConsoleError, Limits, run
from schemas.tables.published import MAJOR
from schemas.tables.read import FILE_NAME

LIMITS = Limits(timeout_s=5, max_rows=100, memory="256MB")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A published file with a view over a segment, and beside it what nobody may read."""
    folder = tmp_path_factory.mktemp("console")
    (folder / "segments").mkdir()
    (folder / "hash.key").write_text("00112233445566778899aabbccddeeff")
    path = folder / FILE_NAME
    with duckdb.connect(str(path)) as db:
        db.execute(f"COPY (SELECT range AS n FROM range(1000)) TO '{folder}/segments/a.parquet'")
        db.execute(f"CREATE VIEW numbers AS FROM read_parquet('{folder}/segments/a.parquet')")
        db.execute(f"CREATE TABLE published AS SELECT '{MAJOR}.0' AS version")
    yield path
    assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == ["a.parquet", "hash.key", FILE_NAME]


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT 1 AS one", 1),
        ("FROM numbers;", 100),
        ("WITH a AS (SELECT 1) FROM a -- a comment", 1),
        ("VALUES (1), (2)", 2),
        ("DESCRIBE numbers", 1),
        ("SUMMARIZE numbers", 1),
        ("SHOW TABLES", 2),
        ("SELECT 'drop; copy' AS words", 1),
        ("SELECT n, n AS n FROM numbers LIMIT 3", 3),
    ],
)
def test_what_reads_is_run(sql: str, rows: int, path: Path) -> None:
    assert run(path, sql, LIMITS).rows.num_rows == rows


def test_order_is_kept_and_rows_beyond_the_limit_are_cut_and_said(path: Path) -> None:
    result = run(path, "FROM numbers ORDER BY n DESC", LIMITS)
    assert result.rows.column("n").to_pylist() == list(range(999, 899, -1))
    assert result.more
    assert not run(path, "FROM numbers LIMIT 100", LIMITS).more


@pytest.mark.parametrize("sql", ["EXPLAIN FROM numbers", "EXPLAIN ANALYZE SELECT count(*) FROM numbers"])
def test_plans_can_be_seen(sql: str, path: Path) -> None:
    found = run(path, sql, LIMITS).rows.to_pylist()
    assert found[0]["explain_key"].endswith("plan")
    assert found[0]["explain_value"]


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "-- nothing",
        "SELECT 1; SELECT 2",
        "INSERT INTO published VALUES ('x')",
        "DELETE FROM published RETURNING *",
        "WITH a AS (DELETE FROM published RETURNING *) FROM a",
        "CREATE TABLE t AS SELECT 1",
        "CREATE TEMP TABLE t AS SELECT 1",
        "DROP VIEW numbers",
        "ATTACH ':memory:' AS m",
        "ATTACH '{folder}/warmwatch.duckdb' AS again",
        "COPY numbers TO '{folder}/segments/evil.parquet'",
        "COPY (SELECT 1) TO '{folder}/evil.csv'",
        "WITH a AS (COPY (SELECT 1) TO '{folder}/segments/evil.csv') SELECT * FROM a",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{folder}/segments/evil.csv'",
        "EXPLAIN ANALYZE WITH a AS (COPY (SELECT 1) TO '{folder}/segments/evil.csv') SELECT * FROM a",
        "SELECT * FROM query('WITH a AS (COPY (SELECT 1) TO ''{folder}/segments/evil.csv'') FROM a')",
        "EXPORT DATABASE '{folder}/export'",
        "SELECT * FROM read_text('{folder}/hash.key')",
        "SELECT * FROM read_blob('{folder}/segments/../hash.key')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM glob('{folder}/*')",
        "SELECT * FROM 'http://127.0.0.1:9/x.parquet'",
        "SELECT * FROM read_parquet('s3://bucket/x.parquet')",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET threads = 64",
        "RESET allowed_directories",
        "PRAGMA enable_external_access",
        "CALL pragma_version()",
        "USE memory",
        "PREPARE p AS SELECT 1",
        "SELECT 1) UNION ALL (SELECT 2",
        "SELECT * FROM at",
        "SELECT getenv('HOME')",
    ],
)
def test_what_writes_or_reaches_elsewhere_is_refused(sql: str, path: Path) -> None:
    with pytest.raises(ConsoleError):
        run(path, sql.replace("{folder}", str(path.parent)), LIMITS)


def test_a_long_query_is_stopped_and_said(path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ConsoleError, match="Stopped after"):
        run(path, "SELECT count(*) FROM range(10000000) a, range(100000) b WHERE a.range + b.range = 7", Limits(0.3, 100, "256MB"))
    assert time.monotonic() - began < 5


def test_an_answer_too_large_for_the_page_is_stopped_and_said(path: Path) -> None:
    with pytest.raises(ConsoleError, match="larger than 64 MB"):
        run(path, "SELECT repeat('x', 50_000) FROM range(10_000)", Limits(20, 10_000, "256MB"))


def test_a_query_that_tells_its_rows_slowly_is_stopped_too(path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ConsoleError, match="Stopped after"):
        run(
            path,
            "SELECT a.range FROM range(10000000) a, range(100000) b WHERE hash(a.range, b.range) % 1000000 = 7",
            Limits(0.5, 10**9, "256MB"),
        )
    assert time.monotonic() - began < 5


def test_a_query_that_needs_too_much_memory_is_stopped_and_said(path: Path) -> None:
    with pytest.raises(ConsoleError, match="memory"):
        run(path, "SELECT list(range) FROM range(100000000)", Limits(20, 100, "64MB"))
