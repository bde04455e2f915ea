"""The published file: whole or the one before, also after a publish that failed half way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from collector.store.columns import from_rows
from collector.store.publish import SCHEMAS, Publisher
from collector.store.segments import read_segments, write_segment
from schemas.tables.read import FILE_NAME


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    made = Publisher(tmp_path, tmp_path / "segments")
    yield made
    made.close()


def change(text: str) -> pa.Table:
    return from_rows(SCHEMAS["changes"], [(1, "note", text, None, None, None)])


def texts(folder: Path) -> list[str]:
    db = duckdb.connect(folder / FILE_NAME, read_only=True)
    try:
        return [t for (t,) in db.execute("SELECT text FROM changes ORDER BY text").fetchall()]
    finally:
        db.close()


def test_segments_and_the_live_part_are_one_table_and_nothing_else_is_in_it(publisher: Publisher, tmp_path: Path) -> None:
    named = write_segment(tmp_path / "segments", "changes", 1, 1, change("a"))
    write_segment(tmp_path / "segments", "changes", 2, 2, change("nobody names it"))
    publisher.publish([named], {"changes": change("b")})
    assert texts(tmp_path) == ["a", "b"]
    publisher.publish([named], {})
    assert texts(tmp_path) == ["a"]


def test_a_publish_that_failed_half_way_leaves_the_file_of_before_and_the_next_one_works(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish([], {"changes": change("before")})
    with pytest.raises(duckdb.Error):
        publisher.publish([], {"changes": change("half"), "requests": pa.table({"no such column": [1]})})
    assert texts(tmp_path) == ["before"]
    publisher.publish([], {"changes": change("after")})
    assert texts(tmp_path) == ["after"]


def test_segments_of_an_earlier_version_lack_columns_and_are_null_there(publisher: Publisher, tmp_path: Path) -> None:
    """Written before the table had `author`; merged with newer ones later."""
    old = write_segment(tmp_path / "segments", "changes", 1, 1, change("old").drop_columns(["author"]))
    row = from_rows(SCHEMAS["changes"], [(1, "note", "new", "dana", None, None)])
    new = write_segment(tmp_path / "segments", "changes", 2, 2, row)
    merged = write_segment(tmp_path / "segments", "changes", 1, 2, read_segments(tmp_path / "segments", [old, new]), level=1)
    for manifest in ([old, new], [old], [merged]):
        publisher.publish(manifest, {"changes": change("live")})
        with duckdb.connect(tmp_path / FILE_NAME, read_only=True) as db:
            found = db.execute("SELECT text, author FROM changes ORDER BY text").fetchall()
        assert found == [("live", None), *([("new", "dana")] if new in manifest or merged in manifest else []), ("old", None)]


def test_every_table_and_column_of_every_schema_has_its_comment(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish([write_segment(tmp_path / "segments", "changes", 1, 1, change("a"))], {"changes": change("b")})
    db = duckdb.connect(tmp_path / FILE_NAME, read_only=True)
    try:
        assert (
            db.execute(
                "SELECT schema_name, table_name, column_name FROM duckdb_columns() WHERE comment IS NULL AND NOT internal"
            ).fetchall()
            == []
        )
        for kind in ("tables", "views"):
            assert db.execute(
                f"SELECT count(*) FILTER (comment IS NULL), count(*) > 6 FROM duckdb_{kind}() WHERE NOT internal"
            ).fetchall() == [(0, True)]
    finally:
        db.close()
