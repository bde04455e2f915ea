"""The workers of a pool as the router knows them by itself: what it sent them, and whether they answer.

Requests on their way are booked per target (a worker, or one rank of it):

    admit -> waiting (its predicted prefill counts as queue) -> first token -> decoding -> release

Queue seconds of a target are the predicted prefill seconds of the waiting requests, less what has passed since the oldest of them became
the oldest. An answer that does not stream shows no first token: its prefill counts as done when its predicted seconds are over.

Invariant: every admitted flight is released exactly once, whatever happens (`release` is idempotent), and then all of a target's numbers
are 0 again; they are kept as arrays, so that the cost model reads them without a loop.

Health: a connection that fails marks the worker down at once; a connection that breaks before the first byte does so when it happens
twice in a row. A worker that is down is asked for /health until it answers (`probe`). 4xx and 5xx answers are answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from router.policy import F64, I64, Mask
from schemas.fleet import Pool, Worker
from schemas.kv_events import WorkerId

log = logging.getLogger(__name__)

RANK_HEADER = "X-data-parallel-rank"
_BREAKS_UNTIL_DOWN = 2


@dataclass(frozen=True, slots=True)
class Target:
    """What a request can be sent to. rank None: the engine chooses among its ranks. sources: whose blocks it may find there."""

    number: int
    worker: str
    rank: int | None
    url: str
    sources: tuple[WorkerId, ...]
    headers: tuple[tuple[str, str], ...] = ()


def targets_of(pool: Pool, workers: Sequence[Worker], choose_rank: bool) -> tuple[Target, ...]:
    """One target a worker; one a rank where the engine (vLLM) lets the request choose."""
    out: list[Target] = []
    for w in workers:
        sources = tuple(WorkerId(pool.name, w.name, r) for r in range(w.ranks))
        if w.ranks == 1:
            out.append(Target(len(out), w.name, 0, w.url, sources))
        elif choose_rank and w.engine == "vllm":
            for rank, source in enumerate(sources):
                out.append(Target(len(out), w.name, rank, w.url, (source,), ((RANK_HEADER, str(rank)),)))
        else:
            out.append(Target(len(out), w.name, None, w.url, sources))
    return tuple(out)


@dataclass(slots=True, eq=False)
class Flight:
    """One request on its way to or at a target."""

    target: int
    prefill_s: float
    streams: bool
    waiting: bool = True
    released: bool = False


class PoolLoad:
    """Requests on their way, by target. For one thread at a time; time is monotonic seconds."""

    def __init__(self, targets: int) -> None:
        self.in_flight: I64 = np.zeros(targets, np.int64)
        self.decoding: I64 = np.zeros(targets, np.int64)
        self._waiting_s: F64 = np.zeros(targets)
        self._oldest_since: F64 = np.zeros(targets)
        self._oldest_s: F64 = np.zeros(targets)
        self._waiting: list[dict[Flight, None]] = [{} for _ in range(targets)]  # in order of admission
        self._unstreamed = 0

    def admit(self, target: int, prefill_s: float, streams: bool, now_s: float) -> Flight:
        flight = Flight(target, prefill_s, streams)
        self.in_flight[target] += 1
        self._waiting[target][flight] = None
        self._waiting_s[target] += prefill_s
        self._unstreamed += not streams
        if len(self._waiting[target]) == 1:
            self._oldest_since[target], self._oldest_s[target] = now_s, prefill_s
        return flight

    def first_token(self, flight: Flight, now_s: float) -> None:
        if flight.waiting and not flight.released:
            self._leave_queue(flight, now_s)
            self.decoding[flight.target] += 1

    def release(self, flight: Flight, now_s: float) -> None:
        if flight.released:
            return
        if flight.waiting:
            self._leave_queue(flight, now_s)
        else:
            self.decoding[flight.target] -= 1
        flight.released = True
        self.in_flight[flight.target] -= 1

    def queue_s(self, now_s: float) -> F64:
        """Predicted wait for a new request's prefill, shape (targets,)."""
        if self._unstreamed:
            self._settle(now_s)
        spent = np.minimum(now_s - self._oldest_since, self._oldest_s)
        return np.maximum(self._waiting_s - spent, 0.0)

    def _leave_queue(self, flight: Flight, now_s: float) -> None:
        queue, t = self._waiting[flight.target], flight.target
        was_oldest = next(iter(queue)) is flight
        del queue[flight]
        flight.waiting = False
        self._unstreamed -= not flight.streams
        if not queue:
            self._waiting_s[t] = self._oldest_s[t] = 0.0
            return
        self._waiting_s[t] -= flight.prefill_s
        if was_oldest:
            self._oldest_since[t], self._oldest_s[t] = now_s, next(iter(queue)).prefill_s

    def _settle(self, now_s: float) -> None:
        for t, queue in enumerate(self._waiting):
            while queue:
                oldest = next(iter(queue))
                done_s = float(self._oldest_since[t]) + oldest.prefill_s
                if oldest.streams or done_s > now_s:
                    break
                self.first_token(oldest, done_s)


@dataclass(slots=True)
class Health:
    """Which targets answer, as far as requests and probes have shown."""

    targets: tuple[Target, ...]
    up: Mask = field(init=False)
    breaks: I64 = field(init=False)

    def __post_init__(self) -> None:
        self.up = np.ones(len(self.targets), np.bool_)
        self.breaks = np.zeros(len(self.targets), np.int64)

    def answered(self, target: int) -> None:
        self._set(self.targets[target].url, True)

    def refused(self, target: int) -> None:
        """No connection."""
        self._set(self.targets[target].url, False)

    def broke(self, target: int) -> None:
        """The connection ended, or was silent for too long, before the first byte: perhaps an old one that the worker had closed, perhaps
        the worker died or hangs."""
        self.breaks[target] += 1
        if self.breaks[target] >= _BREAKS_UNTIL_DOWN:
            self._set(self.targets[target].url, False)

    def down_urls(self) -> set[str]:
        return {t.url for t in self.targets if not self.up[t.number]}

    def _set(self, url: str, up: bool) -> None:
        """All ranks of one engine process live and die together."""
        for t in self.targets:
            if t.url == url:
                if bool(self.up[t.number]) != up:
                    log.warning("worker %s (%s) is %s", t.worker, t.url, "up again" if up else "down")
                self.up[t.number] = up
                self.breaks[t.number] = 0

    async def probe(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        """Asks every worker that is down for its /health, once."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)

        async def ask(url: str) -> None:
            try:
                async with session.get(f"{url}/health", timeout=timeout) as response:
                    if response.status == 200:
                        self._set(url, True)
            except (TimeoutError, aiohttp.ClientError, OSError):
                pass  # still down

        await asyncio.gather(*(ask(url) for url in sorted(self.down_urls())))
