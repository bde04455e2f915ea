"""Tokens by cause and the loss ladder, by 10 s, worker and kind of traffic: `loss_10s`, `ladder_10s`. See rollups.py for live and closed.

Seconds are sums of what is known; the tokens that they stand for are counted beside them, so that an unknown share shows and is no zero.
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from collector.analytics.attributed import F64, U8, U32
from collector.store.columns import from_rows
from collector.store.publish import SCHEMAS
from schemas.causes import Cause
from schemas.tables.losses import LADDER_10S, LOSS_10S

Kind = tuple[str | None, str | None, int | None, str | None, str | None, str | None]
"""(pool, worker, rank, model, route, tenant)"""

LIVE_COLUMNS = {t.name: ", ".join(f'"{c.name}" {c.type}' for c in t.columns) for t in (LOSS_10S, LADDER_10S)}
_LADDER = ("requests", "prompt_tokens", "ideal_tokens", "held_tokens", "selected_tokens", "hit_tokens", "regret_tokens")
_LADDER_S = ("misrouted_s", "bypass_bought_s")


@dataclass(frozen=True, slots=True)
class Ladder:
    """Of one request whose events were complete. regret_s: see `requests`."""

    prompt_tokens: int
    ideal_tokens: int
    held_tokens: int
    selected_tokens: int
    hit_tokens: int
    regret_tokens: int
    regret_s: float | None


@dataclass(slots=True)
class _Loss:
    tokens: int = 0
    requests: int = 0
    lost_s: float = 0.0
    known_tokens: int = 0


class Losses:
    """By bucket: its start in whole seconds."""

    def __init__(self) -> None:
        self._losses: dict[int, dict[tuple[Kind, int], _Loss]] = {}
        self._ladders: dict[int, dict[tuple[Kind, str | None], list[float]]] = {}

    def count(self, bucket: int, kind: Kind, run_causes: U8, run_tokens: U32, run_seconds: F64) -> None:
        rows = self._losses.setdefault(bucket, {})
        seen: set[int] = set()
        for cause, tokens, seconds in zip(run_causes.tolist(), run_tokens.tolist(), run_seconds.tolist(), strict=True):
            row = rows.get((kind, cause))
            if row is None:
                row = rows[kind, cause] = _Loss()
            row.tokens += tokens
            row.requests += cause not in seen
            seen.add(cause)
            if not math.isnan(seconds):
                row.lost_s += seconds
                row.known_tokens += tokens

    def count_ladder(self, bucket: int, kind: Kind, policy: str | None, ladder: Ladder) -> None:
        row = self._ladders.setdefault(bucket, {}).setdefault((kind, policy), [0.0] * 9)
        values = 1, *(getattr(ladder, name) for name in _LADDER[1:])
        for i, value in enumerate(values):
            row[i] += value
        if ladder.regret_s is not None:
            row[7] += max(0.0, ladder.regret_s)
            row[8] += max(0.0, -ladder.regret_s)

    def drop(self, bucket: int) -> None:
        self._losses.pop(bucket, None)
        self._ladders.pop(bucket, None)

    def rows(self, bucket: int) -> dict[str, pa.Table]:
        """Rows of one bucket by table."""
        at = bucket * 1_000_000
        losses = [
            (at, *kind, Cause(cause).label, x.tokens, x.requests, x.lost_s if x.known_tokens else None, x.known_tokens)
            for (kind, cause), x in self._losses.get(bucket, {}).items()
        ]
        ladders = [(at, *kind, policy, *(int(v) for v in x[:7]), *x[7:]) for (kind, policy), x in self._ladders.get(bucket, {}).items()]
        return {"loss_10s": from_rows(SCHEMAS["loss_10s"], losses), "ladder_10s": from_rows(SCHEMAS["ladder_10s"], ladders)}

    def restore(self, bucket: int, table: str, row: Mapping[str, object]) -> None:
        """Takes over one live row that the state database holds."""
        kind = tuple(row[name] for name in ("pool", "worker", "rank", "model", "route", "tenant"))
        if table == "loss_10s":
            cause = Cause[str(row["cause"]).upper()]
            numbers = row["tokens"], row["requests"], row["lost_s"] or 0.0, row["seconds_known_tokens"]
            self._losses.setdefault(bucket, {})[kind, int(cause)] = _Loss(*numbers)  # type: ignore[index, arg-type]  # as the contract has it
        else:
            values = [float(row[name]) for name in (*_LADDER, *_LADDER_S)]  # type: ignore[arg-type]
            self._ladders.setdefault(bucket, {})[kind, row["policy"]] = values  # type: ignore[index]
