"""What a report says, as rows: one question a file in `sql/`, each asked of the published database alone.

A question that this file cannot answer, since it is of an earlier version without a table, column or macro, is None; no rows are an
answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from typing import Any

import duckdb

Row = dict[str, Any]
Answer = list[Row] | None
_PARAMETER = re.compile(r"\$(\w+)")


@dataclass(frozen=True, slots=True)
class Facts:
    """Of the time from since to before until (naive UTC), of one pool or of all (None). Each field below is the question of that name."""

    since: datetime
    until: datetime
    pool: str | None
    now: datetime
    file: Answer = None
    covered: Answer = None
    workers: Answer = None
    ttft: Answer = None
    requests: Answer = None
    unexplained: Answer = None
    ladder: Answer = None
    trades: Answer = None
    loss: Answer = None
    ttft_loss: Answer = None
    routes: Answer = None
    hotspots: Answer = None
    divergence: Answer = None
    reuse: Answer = None
    pressure: Answer = None
    changes: Answer = None
    health: Answer = None
    trust: Answer = None
    dead_letters: Answer = None
    cost_models: Answer = None

    def lacks(self) -> list[str]:
        """Questions that the file cannot answer."""
        return [name for name in QUESTIONS if getattr(self, name) is None]


_GIVEN = ("since", "until", "pool", "now")
QUESTIONS = tuple(name for name in Facts.__dataclass_fields__ if name not in _GIVEN)


def facts_of(
    at: duckdb.DuckDBPyConnection,
    since: datetime,
    until: datetime,
    pool: str | None,
    now: datetime,
    top: int,
    only: Iterable[str] = QUESTIONS,
) -> Facts:
    """top: rows of the longer lists. only: the questions to ask. Raises duckdb.Error other than for what an older file lacks."""
    given = {"since": since, "until": until, "pool": pool, "top": top}
    answers: dict[str, Answer] = {}
    for name in only:
        sql = question(name)
        try:
            at.execute(sql, {key: given[key] for key in set(_PARAMETER.findall(sql))})
        except (duckdb.CatalogException, duckdb.BinderException):
            answers[name] = None
            continue
        names = [d[0] for d in at.description]
        answers[name] = [dict(zip(names, row, strict=True)) for row in at.fetchall()]
    return Facts(since, until, pool, now, **answers)


def question(name: str) -> str:
    """The SQL of one question; its first line asks it in English."""
    return resources.files(__package__).joinpath("sql", f"{name}.sql").read_text()
