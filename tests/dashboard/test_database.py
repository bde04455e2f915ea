from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import duckdb
import pytest

from dashboard.database import Database, LackingError
from dashboard.site import Site
from schemas.tables.published import MAJOR
from schemas.tables.read import FILE_NAME, PublishedIncompatibleError, PublishedMissingError, PublishedUnreadableError, open_published
from tests.dashboard import sample


def test_the_same_file_is_opened_once_and_a_new_one_again(tmp_path: Path) -> None:
    path = sample.write(sample.empty(), tmp_path)
    database = Database(path)
    first = database.snapshot()
    assert database.snapshot() is first
    later = sample.END + timedelta(seconds=10)
    sample.write(sample.empty(later), tmp_path)
    assert database.snapshot().published.published_at == later
    assert database.opened == 2
    assert first.ask("SELECT count(*) AS n FROM published", {}).to_pylist() == [{"n": 1}]
    first.close()
    database.close()


def test_a_question_is_answered_once_a_snapshot(on: Callable[..., Site]) -> None:
    snapshot = on("full").database.snapshot()
    sql = "SELECT count(*) AS n FROM requests WHERE pool = $pool"
    assert snapshot.ask(sql, {"pool": "qwen3-32b"}) is snapshot.ask(sql, {"pool": "qwen3-32b"})
    assert snapshot.ask(sql, {"pool": "qwen3-32b"}) != snapshot.ask(sql, {"pool": "llama-70b"})


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(PublishedMissingError, match="start the collector"):
        Database(tmp_path / FILE_NAME).snapshot()


def test_a_file_that_is_no_database_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 1000)
    with pytest.raises(PublishedUnreadableError, match="cannot be read"):
        Database(tmp_path / FILE_NAME).snapshot()


def test_another_major_version_is_refused_with_both_versions(tmp_path: Path) -> None:
    path = sample.write(sample.empty(), tmp_path, version=f"{MAJOR + 1}.0")
    with pytest.raises(PublishedIncompatibleError, match=rf"{MAJOR + 1}\.0.*{MAJOR}\.x"):
        Database(path).snapshot()


def test_an_older_file_names_what_it_lacks(tmp_path: Path) -> None:
    path = sample.write(sample.build(minutes=5), tmp_path)
    with duckdb.connect(str(path)) as db:
        db.execute("ALTER TABLE worker_10s DROP COLUMN preemptions")
        db.execute("DROP TABLE candidates")
    database = Database(path)
    snapshot = database.snapshot()
    assert snapshot.lacking == ("candidates", "worker_10s.preemptions")
    with pytest.raises(LackingError, match="older collector"):
        snapshot.ask("SELECT sum(preemptions) FROM worker_10s", {})
    database.close()


def test_views_over_segments_can_be_read_and_their_neighbours_not(tmp_path: Path) -> None:
    segments = tmp_path / "segments"
    segments.mkdir()
    (tmp_path / "hash.key").write_text("secret")
    path = tmp_path / FILE_NAME
    with duckdb.connect(str(path)) as db:
        db.execute(f"COPY (SELECT 7 AS n) TO '{segments}/a.parquet'")
        db.execute(f"COPY (SELECT 8 AS n) TO '{tmp_path}/loose.parquet'")
        db.execute(f"CREATE VIEW many AS FROM read_parquet(['{segments}/a.parquet'])")
        db.execute(f"CREATE VIEW loose AS FROM read_parquet('{tmp_path}/loose.parquet')")
        db.execute(f"CREATE TABLE published AS SELECT '{MAJOR}.0' AS version")
    with open_published(path) as opened:
        assert opened.execute("FROM many UNION ALL FROM loose").fetchall() == [(7,), (8,)]
        with pytest.raises(duckdb.PermissionException):
            opened.execute(f"SELECT * FROM read_text('{tmp_path}/hash.key')")
        with pytest.raises(duckdb.Error, match="locked"):
            opened.execute("SET enable_external_access = true")
