"""Opens the published database for reading, and for nothing else.

Why not plain `duckdb.connect(path, read_only=True)`: within one process DuckDB keeps one instance a path, so after the collector has put a
new file in place the old one would be answered from for as long as any session holds it. So every opening is a small instance of its own,
in memory, with the file attached read-only. Before it is handed out it is locked: it reaches the attached file and the Parquet segments
that the file's own views name, no other file, no network, no extension, no Python variable, and its settings can't be changed. The folder
that holds the published file is never opened as a whole: the collector's private state, the stream and the hash key live there.

What the lock does not stop is `COPY ... TO` into the folders of the segments: DuckDB knows no read-only folder, and lets a top-level WITH
hold COPY, INSERT or DELETE. A program that runs SQL it did not write must pass it through `reading_only`. Checking words would not do: they
stand in strings, comments and names too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import duckdb

from schemas.tables.published import MAJOR

FILE_NAME = "warmwatch.duckdb"
DATABASE = "warmwatch"

_OPENINGS = 20
_QUOTED_PARQUET = re.compile(r"'((?:[^']|'')+\.parquet)'")


class PublishedError(Exception):
    """The published database cannot be read; the message says why and what to do.

    PublishedError
    ├── PublishedMissingError        no file yet
    ├── PublishedUnreadableError     a file, but not one that can be opened
    ├── PublishedIncompatibleError   a file of another major version
    └── NotReadingError              a statement that may not be asked here
    """


class PublishedMissingError(PublishedError):
    """There is no published file."""


class PublishedUnreadableError(PublishedError):
    """The file is no published database, or cannot be opened."""


class PublishedIncompatibleError(PublishedError):
    """The file was written by another major version of these tables."""


class NotReadingError(PublishedError):
    """The statement does more than read, or is none, or there are several."""


@dataclass(frozen=True, slots=True)
class FileState:
    """Tells one published file from the next: the collector replaces it whole, so inode or times differ."""

    inode: int
    modified_ns: int
    size_bytes: int


def file_state(path: Path) -> FileState | None:
    """The state of the file now; None: there is none."""
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return FileState(stat.st_ino, stat.st_mtime_ns, stat.st_size)


def open_published(path: Path, *, threads: int = 2, memory_limit: str = "1GB") -> duckdb.DuckDBPyConnection:
    """A locked, read-only connection to the published file as it is now. It keeps seeing that file; open again to see a newer one.

    The current database is the published one. Cursors start in the in-memory one: use `cursor()` of this module. Raises PublishedError.

    DuckDB opens a file twice, for its header and for its blocks. When the collector puts a new file in place in between, header and blocks
    are of two files; so what was opened while the file changed is closed and opened anew.
    """
    for _ in range(_OPENINGS):
        before = file_state(path)
        if before is None:
            hint = "start the collector (warmwatch collect), or set data_dir"
            raise PublishedMissingError(f"there is no published database at {path}: {hint}")
        try:
            connection = _open(path, threads, memory_limit)
        except PublishedError:
            if file_state(path) in (before, None):
                raise
            continue
        if file_state(path) == before:
            return connection
        connection.close()
    raise PublishedUnreadableError(f"{path} was replaced during each of {_OPENINGS} openings: is publish_interval_s far below a second?")


def _open(path: Path, threads: int, memory_limit: str) -> duckdb.DuckDBPyConnection:
    """One try. Raises PublishedError, also for a file that was replaced meanwhile."""
    connection = duckdb.connect(
        ":memory:",
        config={
            "threads": threads,
            "memory_limit": memory_limit,
            "python_enable_replacements": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        },
    )
    try:
        connection.execute(f"ATTACH {_quote(str(path))} AS {DATABASE} (READ_ONLY)")
        connection.execute(f"USE {DATABASE}")
        directories, files = _segments(connection, path.parent)
        connection.execute("SET temp_directory = ''")
        connection.execute("SET GLOBAL TimeZone = 'UTC'")  # now()::TIMESTAMP must mean what the columns mean, wherever the reader sits
        if directories:
            connection.execute(f"SET allowed_directories = [{', '.join(map(_quote, directories))}]")
        if files:
            connection.execute(f"SET allowed_paths = [{', '.join(map(_quote, files))}]")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        _check_version(connection, path)
    except duckdb.Error as e:
        connection.close()
        if file_state(path) is None:
            raise PublishedMissingError(f"the published database at {path} went away while it was opened: is the collector running?") from e
        raise PublishedUnreadableError(f"{path} cannot be read as the published database: {_first_line(e)}") from e
    except PublishedError:
        connection.close()
        raise
    return connection


def cursor(connection: duckdb.DuckDBPyConnection) -> duckdb.DuckDBPyConnection:
    """A cursor whose current database is the published one. One thread at a time may use it."""
    out = connection.cursor()
    out.execute(f"USE {DATABASE}")
    return out


def _segments(connection: duckdb.DuckDBPyConnection, data_dir: Path) -> tuple[list[str], list[str]]:
    """Folders and single files of the Parquet segments that the views name; the data folder itself is never among the folders."""
    views = connection.execute("SELECT sql FROM duckdb_views() WHERE database_name = ? AND NOT internal", [DATABASE]).fetchall()
    directories: set[str] = set()
    files: set[str] = set()
    for (sql,) in views:
        for name in _QUOTED_PARQUET.findall(sql):
            file = Path(name.replace("''", "'"))
            folder = file.parent
            while any(c in str(folder) for c in "*?["):
                folder = folder.parent
            if folder.resolve() in (data_dir.resolve(), *data_dir.resolve().parents):
                files.add(str(file))
            else:
                directories.add(str(folder))
    return sorted(directories), sorted(files)


def _check_version(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
    row = connection.execute("SELECT version FROM published").fetchone()
    version = str(row[0]) if row and row[0] is not None else "unknown"
    if version.partition(".")[0] != str(MAJOR):
        raise PublishedIncompatibleError(
            f"{path} has tables of version {version}, and this program reads {MAJOR}.x: run collector and readers of one release"
        )


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


_EXPLAIN = re.compile(r"^\s*EXPLAIN\s+(ANALYZE\s+)?(?=[A-Z(])", re.IGNORECASE)


def reading_only(at: duckdb.DuckDBPyConnection, sql: str) -> str:
    """One statement in a form in which it can only read: as a subquery, where DuckDB's binder refuses all that writes. EXPLAIN is let
    through. Raises NotReadingError for none, several, or one that is no query; duckdb.ParserException for what is no SQL."""
    statements = at.extract_statements(sql)
    if len(statements) != 1:
        raise NotReadingError("ask one question at a time" if statements else "there is no question; such as: FROM workers")
    text = statements[0].query.strip().rstrip(";")
    explain = _EXPLAIN.match(text)
    asked = at.extract_statements(text[explain.end() :]) if explain else statements
    if len(asked) != 1 or asked[0].type != duckdb.StatementType.SELECT:
        raise NotReadingError("only questions that read can be asked: SELECT, WITH, FROM, VALUES, DESCRIBE, SHOW, SUMMARIZE, EXPLAIN")
    prefix, query = (explain[0], text[explain.end() :]) if explain else ("", text)
    return f"{prefix}SELECT * FROM (\n{query}\n)"  # noqa: S608 - a question on a locked connection
