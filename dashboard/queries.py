"""The questions, one SQL file each in `sql/`. SQL computes; Python names and draws.

A file begins with `-- question`, then `-- parameters: ...`, then `-- grain: ...`. Its parameters are bound by name from the window and
the filters; nothing is ever pasted into the text but `counts`, the one building block that some files name: the counters of workers
(`worker_10s`), or the same columns told from single requests, which is slower but knows model and route.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import resources
from typing import Any

import pyarrow as pa

from dashboard.database import Snapshot
from dashboard.filters import Filters, Window

_PARAMETER = re.compile(r"\$([a-z_]+)")
_HEADER = re.compile(r"^-- (?P<question>.+\?)(?P<note>[^\n]*)\n-- parameters: (?P<parameters>.+)\n-- grain: (?P<grain>.+)\n")
_COUNTS = re.compile(r"\bFROM counts\b|\bJOIN counts\b")


@dataclass(frozen=True, slots=True)
class Query:
    name: str
    question: str
    grain: str
    sql: str
    parameters: frozenset[str]
    uses_counts: bool


def names() -> list[str]:
    return sorted(p.name.removesuffix(".sql") for p in _folder().iterdir() if p.name.endswith(".sql") and not p.name.startswith("_"))


@cache
def query(name: str) -> Query:
    """Reads one file. Raises ValueError when its head is not as it should be."""
    text = _folder().joinpath(f"{name}.sql").read_text()
    head = _HEADER.match(text)
    if head is None:
        raise ValueError(f"dashboard/sql/{name}.sql must begin with its question, `-- parameters:` and `-- grain:`")
    body = text[head.end() :].strip().rstrip(";")
    return Query(name, head["question"], head["grain"], body, frozenset(_PARAMETER.findall(body)), bool(_COUNTS.search(body)))


def ask(snapshot: Snapshot, name: str, filters: Filters, window: Window, **more: Any) -> list[dict[str, Any]]:
    """The rows of an answer."""
    return ask_table(snapshot, name, filters, window, **more).to_pylist()


def ask_table(snapshot: Snapshot, name: str, filters: Filters, window: Window, **more: Any) -> pa.Table:
    sql, parameters = bound(name, filters, window, **more)
    return snapshot.ask(sql, parameters)


def bound(name: str, filters: Filters, window: Window, **more: Any) -> tuple[str, dict[str, Any]]:
    """The text and the parameters that it uses."""
    found = query(name)
    sql = found.sql
    if found.uses_counts:
        counts = _block("_counts_of_requests" if filters.of_requests else "_counts_of_workers")
        sql = f"WITH counts AS (\n{counts}\n)" + (", " + sql[5:] if sql.startswith("WITH ") else "\n" + sql)
    values: dict[str, Any] = {
        "since": window.since,
        "until": window.until,
        "bin_s": window.bin_s,
        "pool": filters.pool,
        "model": filters.model,
        "route": filters.route,
        "worker": filters.worker,
        **more,
    }
    return sql, {p: values[p] for p in _PARAMETER.findall(sql)}


def spelled_out(name: str, filters: Filters, window: Window, **more: Any) -> str:
    """The same as text that the SQL page runs: each parameter written as a literal."""
    sql, parameters = bound(name, filters, window, **more)
    return f"-- {query(name).question}\n" + _PARAMETER.sub(lambda m: literal(parameters[m[1]]), sql)


def literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, datetime):
        return f"TIMESTAMP '{value.isoformat(sep=' ')}'"
    if isinstance(value, int | float):
        return str(value)
    return "'" + str(value).replace("'", "''") + "'"


def first(rows: list[dict[str, Any]]) -> Mapping[str, Any]:
    return rows[0] if rows else {}


@cache
def _block(name: str) -> str:
    lines = _folder().joinpath(f"{name}.sql").read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith("--")).strip().rstrip(";")


def _folder() -> Any:
    return resources.files("dashboard").joinpath("sql")
