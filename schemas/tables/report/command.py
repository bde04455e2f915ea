"""`warmwatch report`: where tokens were computed again, why, and what it cost, for people: in the terminal, and as one HTML file.

published file --sql/*.sql--> Facts --words_of--> Page --as_html--> FILE, put in place whole
                                                      --as_text--> stdout
"""

from __future__ import annotations

import os
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar

import duckdb
from pydantic import Field, field_validator

from schemas.settings import Settings
from schemas.tables.read import FILE_NAME, PublishedError, cursor, open_published
from schemas.tables.report.as_html import html
from schemas.tables.report.as_text import text
from schemas.tables.report.facts import Facts, facts_of
from schemas.tables.report.words_of import page_of
from schemas.tables.terminal import printable

EXIT_TROUBLE = 1
_POOLS = "SELECT DISTINCT pool FROM (SELECT pool FROM workers UNION ALL SELECT pool FROM worker_10s) WHERE pool IS NOT NULL ORDER BY pool"
_NAMED = 10
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|w)")
_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_LONGEST_S = 100 * 366 * 86400.0


class ReportSettings(Settings):
    """Tells where tokens were computed again, why, and what it cost: warmwatch report --since 24h --html report.html"""

    command: ClassVar[str] = "report"

    since: str = Field("24h", description="how far back from the end (90s, 30min, 24h, 7d), or a time such as 2026-11-30T12:00, in UTC")
    until: str | None = Field(
        None, description="end: so long ago (1h), or a time; default: now, or where the data ends, if the collector writes no more"
    )
    pool: str | None = Field(None, description="one pool alone")
    html: Path | None = Field(None, description="also write the report to this file, as one HTML page that needs nothing else")
    top: int = Field(10, ge=1, le=200, description="rows of the longer lists: hotspots, routes, divergence")
    data_dir: Path = Field(Path("data"), description="folder of the published database")
    db: Path | None = Field(None, description=f"the published file; default {FILE_NAME} in data_dir")
    memory: str = Field("1GB", pattern=r"^\d+(\.\d+)?\s?[KMGT]i?B$", description="memory that the questions may use")

    @field_validator("since", "until")
    @classmethod
    def _a_time(cls, value: str | None) -> str | None:
        if value is not None:
            moment(value, datetime(2026, 1, 1))  # naive UTC, as all times here
        return value


def run(settings: ReportSettings) -> int:
    """Writes the HTML file, then prints; 1 with the reason on stderr when there is no database, or the file cannot be written."""
    now = datetime.now(UTC).replace(tzinfo=None)
    try:
        facts = read(settings, now)
    except (PublishedError, ValueError) as e:
        print(f"warmwatch report: {e}", file=sys.stderr)
        return EXIT_TROUBLE
    except duckdb.Error as e:
        print(f"warmwatch report: the published database could not be read: {str(e).strip()}", file=sys.stderr)
        return EXIT_TROUBLE
    page = page_of(facts)
    status = 0
    if settings.html is not None:  # first, for who reads what is printed may leave, as `head` does
        try:
            _write(settings.html, html(page))
        except OSError as e:
            print(f"warmwatch report: setting `html`: {settings.html} cannot be written: {e.strerror}", file=sys.stderr)
            status = EXIT_TROUBLE
    print(text(page))
    return status


def read(settings: ReportSettings, now: datetime) -> Facts:
    """Raises PublishedError, duckdb.Error; ValueError for a time that ends before it begins. now: naive UTC."""
    connection = open_published(settings.db or settings.data_dir / FILE_NAME, memory_limit=settings.memory)
    try:
        at = cursor(connection)
        row = at.execute("SELECT watermark FROM published").fetchone()
        until = moment(settings.until, now) if settings.until is not None else _end(now, row[0] if row else None)
        since = moment(settings.since, until)
        if since >= until:
            raise ValueError(f"setting `since`: {since} is not before the end, {until} (UTC)")
        if settings.pool is not None:
            _check_pool(settings.pool, [p for (p,) in at.execute(_POOLS).fetchall()])
        return facts_of(at, since, until, settings.pool, now, settings.top)
    finally:
        connection.close()


def _check_pool(pool: str, known: list[str]) -> None:
    """Where no pool is known there is nothing to say, and the report says that. Raises ValueError for one that is not among them."""
    if known and pool not in known:
        some = ", ".join(printable(p) for p in known[:_NAMED]) + (" ..." if len(known) > _NAMED else "")
        raise ValueError(f"setting `pool`: there is no pool {printable(pool)}; there are {some}")


def _end(now: datetime, watermark: datetime | None) -> datetime:
    """The whole 10 s at or after now, or the data's end if that is earlier: nothing of a bucket is cut off."""
    end = now if watermark is None else min(now, watermark)
    over = timedelta(seconds=end.second % 10, microseconds=end.microsecond)
    return end - over + timedelta(seconds=10 if over else 0)


def moment(words: str, end: datetime) -> datetime:
    """'24h' before end, or an ISO 8601 time, UTC where it names no zone. Naive UTC. Raises ValueError, which says what would be right."""
    span = _SPAN.fullmatch(words.strip())
    if span:
        span_s = float(span[1]) * _UNITS_S[span[2]]
        if span_s > _LONGEST_S:
            raise ValueError(f"{words!r} is longer than 100 years")
        return end - timedelta(seconds=span_s)
    try:
        at = datetime.fromisoformat(words.strip())
    except ValueError:
        raise ValueError(f"{words!r} is neither a span such as 90s, 30min, 24h or 7d nor a time such as 2026-11-30T12:00") from None
    return at if at.tzinfo is None else at.astimezone(UTC).replace(tzinfo=None)


def _write(path: Path, page: str) -> None:
    """The whole file or the one before."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
