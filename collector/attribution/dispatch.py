"""What was true when a request was dispatched: told once events have passed that moment, kept as a few numbers until the request is told.

    decisions, by time ---> what of the prompt had been stored anywhere (ideal), and each worker's prefix of it (held)
                       ---> rivals: who held more, and was it cheaper         (rivals.py)
                       ---> who was computing the same then                   (flights.py)
                       ---> which of its content was known                    (analytics/divergence.py)

Decisions are taken in the order of their times, and all of a turn at once: what one worker held is found by undoing its events, which is
walked once for all of them. A prompt's content is known to those dispatched after it, whatever the order of records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from collector.analytics.content_index import Known, Told
from collector.attribution.causes import I64, NO_SPANS
from collector.attribution.flights import Flight, Flights, Span
from collector.attribution.held import held_at
from collector.attribution.rivals import Rival, rivals_of
from collector.attribution.times import News
from collector.residency import BLIND, Residency
from schemas.block_hash import U64
from schemas.causes import Cause
from schemas.content import Content
from schemas.requests import Decision

_CAUSE = np.zeros(len(Known), np.int64)
_CAUSE[Known.NOT], _CAUSE[Known.HERE], _CAUSE[Known.ELSEWHERE] = Cause.FIRST_SEEN, Cause.DIVERGED, Cause.NAMESPACE


class Contents(Protocol):
    """See `ContentIndex`."""

    def register(self, time_s: float, pool: str, content: Content) -> None: ...

    def tell(self, before_s: float, pool: str, content: Content) -> Told: ...


@dataclass(frozen=True, slots=True, eq=False)
class Dispatched:
    """Blocks of a prompt; -1: not known."""

    ideal: int = -1
    """That any worker had stored before."""
    held: dict[int, int] = field(default_factory=dict)
    """Prefix held by each rank of the chosen worker, by number; those that are not known are left out."""
    rivals: tuple[Rival, ...] = ()
    spans: tuple[Span, ...] = ()
    content: I64 = field(default_factory=lambda: NO_SPANS)
    """As in `Facts`."""
    shared_tokens: int = 0
    """Tokens before the first that differs from all earlier prompts."""


@dataclass(slots=True, eq=False)
class Dispatch:
    """One decision to be looked at. numbers: ranks of its worker, by number; chain may be empty."""

    decision: Decision
    started_s: float
    first_s: float
    """Of the request's first decision, when it was sent again."""
    numbers: tuple[int, ...]
    chain: U64
    content: Content | None
    ended_s: float | None = None
    """None: in flight."""
    failed: bool = False
    """It ended without a prefill."""
    flight: Flight | None = None
    result: Dispatched | None = None


class Dispatches:
    """Looks at decisions. workers: (worker, rank) of each number, and the numbers of each pool, as the fold knows them."""

    def __init__(self, state: Residency, contents: Contents | None) -> None:
        self.flights = Flights()
        self.news = News()
        self._state = state
        self._contents = contents
        self._pools: dict[str, int] = {}

    def look(self, dispatches: Sequence[Dispatch], ranks: Sequence[tuple[str, str, int]]) -> None:
        """Fills `flight` and `result`. ranks: (pool, worker, rank) of each worker number. Times must not go back from call to call, but
        for requests that came late."""
        order = sorted(dispatches, key=lambda d: d.started_s)
        for d in order:
            pool = self._pools.setdefault(d.decision.pool, len(self._pools))
            if d.numbers and len(d.chain):
                d.flight = self.flights.begin(d.decision.request_id, d.started_s, pool, d.numbers, d.chain)
                self.landed(d)
            if d.content is not None and self._contents is not None:
                self._contents.register(d.first_s, d.decision.pool, d.content)
        self.news.follow(self._state)
        by_pool: dict[str, list[Dispatch]] = {}
        for d in order:
            by_pool.setdefault(d.decision.pool, []).append(d)
        for pool_name, some in by_pool.items():
            numbers = [n for n, who in enumerate(ranks) if who[0] == pool_name]
            asked = [d for d in some if len(d.chain)]
            held = np.full((len(asked), len(ranks)), -1, np.int64)
            if asked and numbers:
                blocks, trust = held_at(self._state, numbers, [d.chain for d in asked], [d.started_s for d in asked])
                held[:, numbers] = np.where(trust == BLIND, -1, blocks)
            for d in some:
                d.result = Dispatched()
            for d, row in zip(asked, held, strict=True):
                d.result = self._one(d, row, ranks, numbers)

    def landed(self, d: Dispatch) -> None:
        """`ended_s` may have become known."""
        if d.flight is not None and d.ended_s is not None:
            self.flights.end(d.flight, d.ended_s, d.failed)

    def _one(self, d: Dispatch, held: npt.NDArray[np.int64], ranks: Sequence[tuple[str, str, int]], numbers: list[int]) -> Dispatched:
        ideal = self.news.seen_before(self._state, d.chain, d.started_s)
        content, shared = self._content(d, ideal)
        others = [(ranks[n][1], ranks[n][2], int(held[n])) for n in numbers if n not in d.numbers]
        spans = () if d.flight is None else tuple(self.flights.computing(d.flight, d.chain, held))
        own = {n: int(held[n]) for n in d.numbers if held[n] >= 0}
        return Dispatched(ideal, own, rivals_of(d.decision, others), spans, content, shared)

    def _content(self, d: Dispatch, ideal: int) -> tuple[I64, int]:
        if d.content is None or self._contents is None:
            return NO_SPANS, 0
        told = self._contents.tell(d.first_s, d.decision.pool, d.content)
        ends = told.first_token + np.cumsum(told.run_tokens, dtype=np.int64)
        runs = np.stack([np.append(told.first_token, ends), np.append(Cause.FIRST_SEEN, _CAUSE[told.run_known])], axis=1)
        seen_tokens = max(ideal, 0) * told.block_size
        shared = 0 if seen_tokens >= told.prompt_tokens else told.difference(seen_tokens, d.decision.shared_tokens)[0]
        return np.ascontiguousarray(runs, np.int64), shared
