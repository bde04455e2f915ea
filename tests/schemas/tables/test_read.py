"""The published file is replaced under its readers: they see one file or another, never a mixture."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from schemas.tables import read
from schemas.tables.published import MAJOR
from schemas.tables.read import FILE_NAME, PublishedUnreadableError, open_published


def publish(folder: Path, number: int) -> Path:
    """A published file that says its number, put in place as the collector does."""
    draft = folder / "draft"
    with duckdb.connect(str(draft)) as db:
        db.execute(f"CREATE TABLE published AS SELECT '{MAJOR}.0' AS version, {number} AS number")
    return draft.replace(folder / FILE_NAME)


def replaced_during_openings(monkeypatch: pytest.MonkeyPatch, folder: Path, times: int) -> list[int]:
    """From now on the file is replaced in the middle of so many openings. Returns the numbers of the files put in place."""
    placed: list[int] = []
    check = read._check_version

    def and_replace(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
        check(connection, path)
        if len(placed) < times:
            placed.append(len(placed) + 1)
            publish(folder, placed[-1])

    monkeypatch.setattr(read, "_check_version", and_replace)
    return placed


def test_what_was_opened_while_the_file_changed_is_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = publish(tmp_path, 0)
    replaced_during_openings(monkeypatch, tmp_path, times=2)
    with open_published(path) as opened:
        assert opened.execute("SELECT number FROM published").fetchone() == (2,)


def test_an_error_from_a_mixture_of_two_files_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = publish(tmp_path, 0)
    placed = replaced_during_openings(monkeypatch, tmp_path, times=1)
    check = read._check_version

    def torn(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
        already = bool(placed)
        check(connection, path)
        if not already:
            raise duckdb.IOException("Failed to load metadata pointer")

    monkeypatch.setattr(read, "_check_version", torn)
    with open_published(path) as opened:
        assert opened.execute("SELECT number FROM published").fetchone() == (1,)


def test_a_file_that_is_replaced_at_every_opening_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = publish(tmp_path, 0)
    replaced_during_openings(monkeypatch, tmp_path, times=10_000)
    with pytest.raises(PublishedUnreadableError, match="was replaced during each of"):
        open_published(path)
