"""What one dispatch takes at a worker, here and at the other replicas, and gives back on every way out.

    Booking()       blocks expected there, a flight in the pool's load, and the same told to the replicas
    first_token()   it waits no longer
    end(kept)       it is over; kept: its blocks are there or on their way, so what was expected stays until it expires

Neither call needs to know whether it came before: a second one does nothing.
"""

from __future__ import annotations

from typing import Protocol

from router.pools import Decided, Pools
from router.prompts.prompt import Prompt
from schemas.block_hash import U64

_Place = tuple[str, str, int | None]


class Replicas(Protocol):
    """Whom to tell (replicas/link.py)."""

    def reserve(self, place: _Place, prefill_s: float, streams: bool, blocks: U64, ttl_s: float) -> int: ...
    def first_token(self, flight: int) -> None: ...
    def free(self, flight: int, kept: bool) -> None: ...


class Booking:
    """replicas None: there are none. expect_ttl_s: beyond the predicted first token, blocks are expected. Time is monotonic seconds."""

    __slots__ = ("_decided", "_flight", "_pools", "_replicas", "_tickets", "_told")

    def __init__(
        self, pools: Pools, replicas: Replicas | None, decided: Decided, prompt: Prompt, streams: bool, expect_ttl_s: float, now_s: float
    ) -> None:
        pool, target = decided.pool, decided.target
        self._pools, self._replicas, self._decided = pools, replicas, decided
        self._tickets = pools.expect(decided, prompt, expect_ttl_s, now_s)
        self._flight = pool.load.admit(target.number, decided.prefill_s, streams, now_s)
        self._told: int | None = None
        if replicas is not None:
            place = (pool.name, target.worker, target.rank)
            self._told = replicas.reserve(place, decided.prefill_s, streams, decided.missing(prompt), decided.expected_s(expect_ttl_s))

    def first_token(self, now_s: float) -> None:
        self._decided.pool.load.first_token(self._flight, now_s)
        if self._replicas is not None and self._told is not None:
            self._replicas.first_token(self._told)

    def end(self, kept: bool, now_s: float) -> None:
        self._decided.pool.load.release(self._flight, now_s)
        tickets, self._tickets = self._tickets, []
        if not kept:
            for ticket in tickets:
                self._pools.index.drop(ticket)
        if self._replicas is not None and self._told is not None:
            self._replicas.free(self._told, kept)
