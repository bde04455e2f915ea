"""`warmwatch explain REQUEST_ID`: all that is known of one request, for people or as JSON.

It reads the published database alone, so it also tells of requests that other routers decided. Each question goes to the rows around the
request's own time: segments whose times lie elsewhere are passed over.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import duckdb
from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from schemas.settings import Settings
from schemas.tables.explained import SAME_ID_SHOWN, Facts, Row, page
from schemas.tables.published import ATTEMPTS, CANDIDATES, SHADOWS
from schemas.tables.read import FILE_NAME, PublishedError, cursor, open_published
from schemas.tables.terminal import printable, printable_json

EXIT_TROUBLE = 1
_ID_OF_ANSWER = re.compile(r"^(chatcmpl-|cmpl-|resp_)")
"""What engines put before the id of a request to make that of its answer."""
NEAR, NEWEST_LOOKED_AT, ALIKE = 5, 100_000, 0.85
CHANGES = 3
CHANGES_BEFORE = timedelta(hours=1)
DECISIONS_WITHIN = timedelta(hours=1)
"""Of one request: the first of them and the last."""


class ExplainSettings(Settings):
    """Tells all that is known of one request: warmwatch explain chatcmpl-123, or warmwatch explain --last

    The id is the one that the answer carried as x-warmwatch-request-id, or the answer's own that the engine made of it."""

    model_config = SettingsConfigDict(cli_shortcuts={"as_json": "json", "as-json": "json"})
    command: ClassVar[str] = "explain"

    request_id: CliPositionalArg[str] = Field("", description="id of the request, from x-warmwatch-request-id or the table requests")
    last: bool = Field(False, description="the newest request instead")
    as_json: bool = Field(False, description="as one JSON object: rows of requests, candidates, shadows, attempts and changes")
    data_dir: Path = Field(Path("data"), description="folder of the published database")
    db: Path | None = Field(None, description=f"the published file; default {FILE_NAME} in data_dir")

    @model_validator(mode="after")
    def _one_request(self) -> ExplainSettings:
        if bool(self.request_id) == self.last:
            raise ValueError("name one request id, or say --last" + (", not both" if self.last else ""))
        return self


class NoSuchRequest(Exception):  # noqa: N818 - an answer, named for what it is
    """The message says where it may be, and what is near."""


def run(settings: ExplainSettings) -> int:
    """Prints the page; 1 with the reason on stderr when there is no such request or no database."""
    now = datetime.now(UTC).replace(tzinfo=None)
    try:
        connection = open_published(settings.db or settings.data_dir / FILE_NAME)
        try:
            facts = facts_of(cursor(connection), None if settings.last else settings.request_id, now)
        finally:
            connection.close()
    except (PublishedError, NoSuchRequest) as e:
        print(f"warmwatch explain: {e}", file=sys.stderr)
        return EXIT_TROUBLE
    except duckdb.Error as e:
        print(f"warmwatch explain: the published database could not be read: {str(e).strip()}", file=sys.stderr)
        return EXIT_TROUBLE
    print(as_json(facts) if settings.as_json else page(facts, now))
    return 0


def facts_of(at: duckdb.DuckDBPyConnection, request_id: str | None, now: datetime) -> Facts:
    """request_id None: the newest request. now: naive UTC. Raises NoSuchRequest, duckdb.Error."""
    if request_id is None:
        found = _newest(at)
    else:
        found = _named(at, request_id)
        if not found and (by_part := _named(at, _ID_OF_ANSWER.sub("", request_id))):
            found, request_id = by_part, _ID_OF_ANSWER.sub("", request_id)
    if not found or request_id not in (None, found[0]["request_id"]):
        raise NoSuchRequest(_missing(at, request_id, now))
    request, *same_id = found
    started = request.get("started_at")
    tables = {name for (name,) in at.execute("SELECT table_name FROM information_schema.tables").fetchall()}
    rows: dict[str, list[Row]] = {}
    for table in (CANDIDATES.name, SHADOWS.name, ATTEMPTS.name):
        rows[table] = []
        if table in tables and started is not None:
            rows[table] = _rows(
                at,
                f"SELECT * FROM {table} WHERE request_id = ? AND started_at BETWEEN ? AND ? ORDER BY started_at",  # noqa: S608 ours
                request["request_id"], started - DECISIONS_WITHIN, started,
            )  # fmt: skip
    last = [[r for r in rows[name] if r["started_at"] == started] for name in (CANDIDATES.name, SHADOWS.name)]
    return Facts(
        request,
        candidates=sorted(last[0], key=lambda r: r["position"]),
        shadows=last[1],
        attempts=sorted(rows[ATTEMPTS.name], key=lambda r: r["position"]),
        earlier_decisions=len({r["started_at"] for r in rows[CANDIDATES.name]} - {started}),
        changes=_changes(at, request),
        same_id=[r["request_id"] for r in same_id],
        lacks=[name for name in rows if name not in tables],
    )


def as_json(facts: Facts) -> str:
    """Rows as they are in the tables; times are ISO 8601 in UTC."""
    shown = {
        "request": facts.request,
        "candidates": facts.candidates,
        "shadows": facts.shadows,
        "attempts": facts.attempts,
        "changes_before": facts.changes,
        "same_id": facts.same_id,
    }
    return printable_json(json.dumps(shown, default=_plain, indent=2, ensure_ascii=False))


def _plain(value: object) -> object:
    return value.isoformat() + "Z" if isinstance(value, datetime) else str(value)


def _changes(at: duckdb.DuckDBPyConnection, request: Row) -> list[Row]:
    """What happened to the worker before, and could have touched its cache or what is known of it."""
    if request.get("started_at") is None or request.get("worker") is None:
        return []
    return _rows(
        at,
        "SELECT happened_at, kind, text FROM changes WHERE worker = ? AND pool IS NOT DISTINCT FROM ? AND happened_at BETWEEN ? AND ? "
        "AND kind IN ('gap', 'restart', 'clear', 'note') ORDER BY happened_at DESC LIMIT ?",
        request["worker"], request.get("pool"), request["started_at"] - CHANGES_BEFORE, request["started_at"], CHANGES,
    )  # fmt: skip


def _missing(at: duckdb.DuckDBPyConnection, request_id: str | None, now: datetime) -> str:
    (about,) = _rows(at, "SELECT count(*) AS n, min(started_at) AS oldest, max(started_at) AS newest FROM requests")
    (file,) = _rows(at, "SELECT published_at, state FROM published")
    age_s = (now - file["published_at"]).total_seconds()
    written = f"written {age_s:.1f} s ago" + ("" if file["state"] == "running" else f", by a collector that is {file['state']}")
    if not about["n"]:
        return f"the published database ({written}) has no requests yet: is a router writing decisions, and is the collector reading them?"
    oldest, newest = (f"{about[x]:%Y-%m-%d %H:%M:%S}" if about[x] else "an unknown time" for x in ("oldest", "newest"))
    lines = [
        f"there is no request {request_id!r} in the published database ({written}).",
        f"It holds {about['n']} requests, from {oldest} to {newest} UTC: older ones may have been dropped "
        "(settings keep_s, keep_bytes of the collector), and a new one appears about a second after its "
        "dispatch. Requests that the router refused before it chose a pool are not recorded.",
    ]
    dead = _rows(at, "SELECT DISTINCT reason FROM dead_letters WHERE key = ? LIMIT 3", request_id)
    if dead:
        lines.append(f"Records with this id were set aside: {'; '.join(printable(r['reason']) for r in dead)}.")
    near = _rows(
        at,
        "SELECT request_id FROM (SELECT request_id FROM requests ORDER BY coalesce(started_at, ended_at) DESC LIMIT ?) "
        "WHERE contains(request_id, ?) OR jaro_winkler_similarity(request_id, ?) >= ? "
        "ORDER BY contains(request_id, ?) DESC, jaro_winkler_similarity(request_id, ?) DESC, request_id LIMIT ?",
        NEWEST_LOOKED_AT, request_id, request_id, ALIKE, request_id, request_id, NEAR,
    )  # fmt: skip
    if near:
        lines.append(f"Near it: {', '.join(printable(r['request_id']) for r in near)}.")
    return "\n".join(lines)


def _named(at: duckdb.DuckDBPyConnection, request_id: str) -> list[Row]:
    """The newest of this id first (an old one may have the same), then some of those that the router gave an ending."""
    return _rows(
        at,
        "SELECT * FROM requests WHERE request_id = ? OR starts_with(request_id, ? || '~') "
        "ORDER BY request_id = ? DESC, coalesce(started_at, ended_at) DESC NULLS LAST LIMIT ?",
        request_id, request_id, request_id, 2 + SAME_ID_SHOWN,
    )  # fmt: skip


def _newest(at: duckdb.DuckDBPyConnection) -> list[Row]:
    """In two steps, so that segments whose times are older are passed over: sorting all took 4 s of 5 million rows, this takes 0.2 s."""
    (about,) = _rows(at, "SELECT max(started_at) AS newest FROM requests")
    since = about["newest"] or datetime(1970, 1, 1)  # naive UTC, as in the tables
    return _rows(
        at,
        "SELECT * FROM requests WHERE started_at >= ? OR (started_at IS NULL AND ended_at >= ?) "
        "ORDER BY coalesce(started_at, ended_at) DESC LIMIT 1",
        since, since,
    )  # fmt: skip


def _rows(at: duckdb.DuckDBPyConnection, sql: str, *values: object) -> list[Row]:
    at.execute(sql, list(values))
    names = [d[0] for d in at.description]
    found: Iterable[tuple[Any, ...]] = at.fetchall()
    return [dict(zip(names, row, strict=True)) for row in found]
