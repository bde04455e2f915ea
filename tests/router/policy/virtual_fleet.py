"""A fleet in virtual time behind the router's own parts (Pools, PrefixIndex, PoolLoad): no sockets, no clock, some thousand requests a second.

    arrive -> decide -> expect, admit -> worker's queue -> prefill, one after the other -> blocks stored, first token -> decode -> release

A worker prefills at 14k uncached tokens a second with an attention term, decodes without interference, and evicts least recently used
blocks. Its KV events reach the index `lag_s` after the prefill.
"""  # noqa: E501

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from router.policy.cost import Coefficients
from router.policy.rules import PolicyRules
from router.pools import Decided, Pools, TrustRules
from router.prompts.prompt import Prompt
from router.workers.load import Flight
from schemas.block_hash import U64, HashKey
from schemas.fleet import Fleet, Pool, Worker
from schemas.kv_events import COMPLETE, EVENT, Kind, KvBatch, Tier, WorkerId

BLOCK = 16
TOKEN_S, PAIR_S, BASE_S, OUTPUT_TOKEN_S = 1 / 14_000, 1.3e-9, 0.015, 0.02


@dataclass(slots=True, eq=False)
class Ask:
    """One request. then: called with the time of its end."""

    tokens: int
    chain: U64
    output_tokens: int = 100
    session: str | None = None
    then: Callable[[float], None] | None = None
    worker: int = -1
    arrived_s: float = 0.0
    ttft_s: float = 0.0
    hit_tokens: int = 0
    decided: Decided | None = None


@dataclass(slots=True)
class Engine:
    """One worker."""

    capacity_blocks: int
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    queue: deque[tuple[Ask, Flight]] = field(default_factory=deque)
    busy: bool = False
    seq: int = 0
    busy_s: float = 0.0
    speed: float = 1.0


class VirtualFleet:
    """Run it with `at` and `run`; then `done` holds every request."""

    def __init__(
        self,
        workers: int,
        policy: str = "cost",
        capacity_tokens: int = 400_000,
        speculative: bool = True,
        lag_s: float = 0.02,
        seed: int = 1,
        hardware: Sequence[str] = (),
        book: Any = None,
        **rules: Any,
    ) -> None:
        self.workers = tuple(
            Worker(pool="p", name=f"w{i}", url=f"http://h{i}:1", hardware=hardware[i] if hardware else None) for i in range(workers)
        )
        fleet = Fleet(pools=(Pool(name="p"),), workers=self.workers)
        self.pools = Pools(
            fleet, {}, policy, Coefficients(), HashKey(1, 2), TrustRules(1e12, 1e12), random.Random(seed),
            policy_rules=PolicyRules(**rules), book=book,
        )  # fmt: skip
        (self.pool,) = self.pools
        self.pool.learn_block_size(BLOCK)
        self.engines: list[Engine] = []
        self.now_s = 0.0
        self.done: list[Ask] = []
        self._capacity, self._speculative, self._lag_s = capacity_tokens // BLOCK, speculative, lag_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._open()

    def join(self, *names: str) -> None:
        """New, empty workers."""
        self.workers += tuple(Worker(pool="p", name=n, url=f"http://{n}:1") for n in names)
        self.pools.set_workers("p", self.workers, self.now_s)
        self._open()

    def _open(self) -> None:
        """Engines for workers that have none, whose epochs start."""
        for number in range(len(self.engines), len(self.pool.targets)):
            self.engines.append(Engine(self._capacity))
            self._tell(number, [(Kind.EPOCH_STARTED, COMPLETE, [])])

    def ask(self, tokens: Sequence[int] | np.ndarray[Any, Any], **given: Any) -> Ask:
        ids = np.asarray(tokens, np.uint32)
        chain = self.pool.chain(ids, None, None)
        assert chain is not None
        return Ask(len(ids), chain, **given)

    def at(self, time_s: float, what: Ask | Callable[[], None]) -> None:
        act = (lambda: self._arrive(what)) if isinstance(what, Ask) else what
        heapq.heappush(self._events, (time_s, next(self._order), act))

    def run(self, until_s: float = float("inf")) -> VirtualFleet:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._events)
            act()
        return self

    def _arrive(self, ask: Ask) -> None:
        prompt = Prompt("exact", ask.tokens, ask.tokens, ask.chain, BLOCK)
        decided = self.pools.decide(self.pool, prompt, set(), self.now_s, ask.session)
        assert decided is not None
        tickets = self.pools.expect(decided, prompt, 2.0, self.now_s)
        if not self._speculative:
            for ticket in tickets:
                self.pools.index.drop(ticket)
        ask.worker, ask.arrived_s, ask.decided = decided.target.number, self.now_s, decided
        flight = self.pool.load.admit(ask.worker, decided.prefill_s, True, self.now_s)
        self.engines[ask.worker].queue.append((ask, flight))
        self._next(ask.worker)

    def _next(self, number: int) -> None:
        engine = self.engines[number]
        if engine.busy or not engine.queue:
            return
        ask, flight = engine.queue.popleft()
        held = 0
        for block in ask.chain[: (ask.tokens - 1) // BLOCK].tolist():
            if block not in engine.blocks:
                break
            held += 1
        ask.hit_tokens = h = held * BLOCK
        u = ask.tokens - h
        seconds = (BASE_S + TOKEN_S * u + PAIR_S * u * (h + u / 2)) / engine.speed
        engine.busy, engine.busy_s = True, engine.busy_s + seconds
        self.at(self.now_s + seconds, lambda: self._first_token(number, ask, flight))

    def _first_token(self, number: int, ask: Ask, flight: Flight) -> None:
        engine = self.engines[number]
        stored, removed = [], []
        for block in reversed(ask.chain.tolist()):  # tail first, so that a prefix outlives what follows it
            if block not in engine.blocks:
                stored.append(block)
            engine.blocks[block] = None
            engine.blocks.move_to_end(block)
        while len(engine.blocks) > engine.capacity_blocks:
            removed.append(engine.blocks.popitem(last=False)[0])
        self.at(self.now_s + self._lag_s, lambda: self._tell(number, [(Kind.REMOVED, 0, removed), (Kind.STORED, 0, stored[::-1])]))
        ask.ttft_s = self.now_s - ask.arrived_s
        self.pool.load.first_token(flight, self.now_s)
        self.at(self.now_s + ask.output_tokens * OUTPUT_TOKEN_S, lambda: self._end(ask, flight))
        engine.busy = False
        self._next(number)

    def _end(self, ask: Ask, flight: Flight) -> None:
        self.pool.load.release(flight, self.now_s)
        self.done.append(ask)
        if ask.then is not None:
            ask.then(self.now_s)

    def _tell(self, number: int, events: list[tuple[Kind, int, list[int]]]) -> None:
        engine = self.engines[number]
        rows = [(kind, Tier.GPU, 0, len(hashes), engine.seq, 0.0, 0, BLOCK, flags) for kind, flags, hashes in events]
        hashes = np.array([h for _, _, hs in events for h in hs], np.uint64)
        source = WorkerId("p", self.pool.targets[number].worker, 0)
        self.pools.index.apply(KvBatch(source, 1, engine.seq, engine.seq, 0.0, 0.0, np.array(rows, EVENT), hashes), self.now_s)
        engine.seq += 1

    @property
    def mean_ttft_s(self) -> float:
        return float(np.mean([a.ttft_s for a in self.done]))

    @property
    def hit_rate(self) -> float:
        return sum(a.hit_tokens for a in self.done) / sum(a.tokens for a in self.done)

    @property
    def shares(self) -> Counter[int]:
        """Requests by worker."""
        return Counter(a.worker for a in self.done)
