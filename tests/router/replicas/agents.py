"""Agents over simulated workers in virtual time, routed by any number of replicas: each request goes to a replica drawn at random, as a
balancer without hashing does it, or (hashed) each session to one.

A worker: an LRU cache of blocks, one prefill at a time in order of arrival, decoding beside it. Blocks are entered when their prefill
starts; its events reach every replica 50 ms after its end, as over a stream. Replicas are what the router has: Pools, Booking, Link.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from router.booking import Booking
from router.policy.cost import Coefficients
from router.pools import Pools, TrustRules
from router.prompts.prompt import Prompt
from router.replicas.heard import Heard
from router.replicas.link import Link
from router.replicas.outbox import Outbox, Sender
from schemas.block_hash import U64, HashKey
from schemas.fleet import Fleet
from schemas.kv_events import COMPLETE, EVENT, Kind, KvBatch, Tier, WorkerId

BLOCK = 64
WORKERS = 8
CACHE_BLOCKS = 2500
EVENT_LAG_S = 0.05
TICK_S = 0.02
PREFILL_TOKEN_S = 1e-4
DECODE_TOKEN_S = 0.02


class Clock:
    """Virtual seconds and what is to happen at which."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def __call__(self) -> float:
        return self.now_s

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (max(when_s, self.now_s), self._count, what))

    def step(self, until_s: float) -> bool:
        """Does the next thing that is due by then; False: there is none."""
        if not self._due or self._due[0][0] > until_s:
            self.now_s = max(self.now_s, until_s)
            return False
        self.now_s, _, what = heapq.heappop(self._due)
        what()
        return True

    @property
    def idle(self) -> bool:
        return not self._due


@dataclass
class Replica:
    pools: Pools
    link: Link | None

    @property
    def pool(self):
        return self.pools.by_name["p"]


@dataclass
class Ask:
    """One request. then: called with its end."""

    chain: U64
    output_tokens: int
    session: str
    then: Callable[[], None]
    arrived_s: float = 0.0
    booking: Booking | None = None

    @property
    def tokens(self) -> int:
        return len(self.chain) * BLOCK + BLOCK // 2


@dataclass
class SimWorker:
    name: str
    clock: Clock
    publish: Callable[[str, list[tuple[Kind, list[int]]]], None]
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    queue: deque[Ask] = field(default_factory=deque)
    busy: bool = False
    hit_tokens: int = 0
    prompt_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)

    def arrive(self, ask: Ask) -> None:
        self.queue.append(ask)
        if not self.busy:
            self._start()

    def _start(self) -> None:
        self.busy = bool(self.queue)
        if not self.queue:
            return
        ask = self.queue.popleft()
        chain = ask.chain.tolist()
        hit = next((i for i, h in enumerate(chain) if h not in self.cache), len(chain))
        self.hit_tokens += hit * BLOCK
        self.prompt_tokens += ask.tokens
        events = self._keep(chain, hit)
        done_s = self.clock.now_s + 0.005 + PREFILL_TOKEN_S * (ask.tokens - hit * BLOCK)
        self.clock.at(done_s, lambda: self._computed(ask, events))

    def _keep(self, chain: list[int], hit: int) -> list[tuple[Kind, list[int]]]:
        for h in reversed(chain):  # the head is the newest, so the tail goes first
            self.cache[h] = None
            self.cache.move_to_end(h)
        gone = [self.cache.popitem(last=False)[0] for _ in range(max(0, len(self.cache) - CACHE_BLOCKS))]
        return [(Kind.REMOVED, gone), (Kind.STORED, chain[hit:])]

    def _computed(self, ask: Ask, events: list[tuple[Kind, list[int]]]) -> None:
        self.ttft_s.append(self.clock.now_s - ask.arrived_s)
        ask.booking.first_token(self.clock.now_s)
        self.publish(self.name, events)
        self.clock.at(self.clock.now_s + DECODE_TOKEN_S * ask.output_tokens, lambda: self._over(ask))
        self._start()

    def _over(self, ask: Ask) -> None:
        ask.booking.end(True, self.clock.now_s)
        ask.then()


@dataclass(frozen=True)
class Result:
    hit_rate: float
    mean_ttft_s: float
    requests: int
    gaps: int = 0


class Run:
    """replicas of them; exchange: they tell each other, through sockets in folder."""

    def __init__(
        self, replicas: int, exchange: bool, folder: str, sessions: int = 40, turns: int = 8, seed: int = 1, hashed: bool = False
    ) -> None:
        self.clock, self.rng, self.seed = Clock(), random.Random(seed), seed
        self.sessions, self.turns, self.hashed = sessions, turns, hashed
        workers = [{"pool": "p", "name": f"w{i}", "url": f"http://127.0.0.1:{i + 1}"} for i in range(WORKERS)]
        fleet = Fleet.model_validate({"pools": [{"name": "p"}], "workers": workers})
        at = [f"ipc://{folder}/{replicas}-{i}" for i in range(replicas)]
        self.replicas = []
        for i in range(replicas):
            pools = Pools(fleet, {}, "cost", Coefficients(), HashKey(1, 2), TrustRules(1e9, 1e9), random.Random(f"{seed}/{i}"))
            pools.by_name["p"].learn_block_size(BLOCK)
            link = None
            if exchange:
                link = Link(
                    Outbox(Sender(f"r{i}", f"run-{i}", "key")), Heard(pools, f"run-{i}", "key", 3.5), at[i],
                    [a for a in at if a != at[i]], clock=self.clock, flush_s=3600.0, state_s=3600.0,
                )  # fmt: skip
            self.replicas.append(Replica(pools, link))
        self.workers = [SimWorker(f"w{i}", self.clock, self._publish) for i in range(WORKERS)]
        self._seq = dict.fromkeys((w.name for w in self.workers), 0)
        self.requests = 0
        for w in self.workers:
            self._apply(w.name, [(Kind.EPOCH_STARTED, [])])

    async def result(self) -> Result:
        links = [r.link for r in self.replicas if r.link is not None]
        for link in links:
            await link.start()
        try:
            await self._meet(links)
            self._begin()
            tick, beat_s = 0, 1.0
            while not self.clock.idle:
                tick += 1
                while self.clock.step(tick * TICK_S):
                    pass
                for link in links:
                    link.flush()
                if tick * TICK_S >= beat_s:
                    beat_s += 1.0
                    for link in links:
                        link.beat()
                await self._delivered(links)
            assert all(not r.pool.load.in_flight.any() and not r.pool.load.decoding.any() for r in self.replicas)
            assert all(not link.heard.flights and not link.outbox.flights for link in links)
        finally:
            for link in links:
                await link.stop()
        ttft_s = [s for w in self.workers for s in w.ttft_s]
        return Result(
            sum(w.hit_tokens for w in self.workers) / sum(w.prompt_tokens for w in self.workers),
            sum(ttft_s) / len(ttft_s),
            len(ttft_s),
            sum(link.heard.counts.gaps for link in links),
        )

    async def _meet(self, links: list[Link]) -> None:
        deadline_s = time.monotonic() + 20
        while any(len(link.heard.names) < len(links) - 1 for link in links):
            assert time.monotonic() < deadline_s
            for link in links:
                link.beat()
            await asyncio.sleep(0.01)
        await self._delivered(links)

    async def _delivered(self, links: list[Link]) -> None:
        """Until each has heard all that the others have sent so far."""
        deadline_s = time.monotonic() + 20
        newest = {link.outbox.sender.run: link.outbox.seq for link in links}
        while any(link.heard.seq_of(run) < seq for link in links for run, seq in newest.items() if run != link.outbox.sender.run):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0)

    # the agents

    def _begin(self) -> None:
        rng = random.Random(f"{self.seed}/templates")
        templates = [_blocks(rng, 40 + 10 * i) for i in range(5)]
        for i in range(self.sessions):
            own = random.Random(f"{self.seed}/session/{i}")  # so a session is the same whatever the others and the routing do
            head = np.concatenate([own.choice(templates), _blocks(own, 8)])
            self._after(own.uniform(0, 15), lambda own=own, head=head, i=i: self._turn(own, head, f"s{i}", self.turns))

    def _turn(self, rng: random.Random, chain: U64, session: str, left: int) -> None:
        if rng.random() < 0.15:  # helpers who start within a moment from one brief that nobody holds yet
            brief = np.concatenate([chain, _blocks(rng, 100)])
            for _ in range(8):
                ask = Ask(np.concatenate([brief, _blocks(rng, 2)]), 100, session, lambda: None)
                self._after(rng.uniform(0, 0.25), lambda ask=ask: self._send(ask))
        output = rng.randint(20, 200)

        def then() -> None:
            if left > 1:
                longer = np.concatenate([chain, _blocks(rng, output // BLOCK + rng.randint(4, 30))])
                self._after(rng.uniform(0.2, 4.0), lambda: self._turn(rng, longer, session, left - 1))

        self._send(Ask(chain, output, session, then))

    def _send(self, ask: Ask) -> None:
        drawn = self.rng.randrange(len(self.replicas))
        replica = self.replicas[hash_of(ask.session) % len(self.replicas) if self.hashed else drawn]
        now_s = ask.arrived_s = self.clock.now_s
        prompt = Prompt("exact", ask.tokens, ask.tokens, ask.chain, BLOCK)
        decided = replica.pools.decide(replica.pool, prompt, set(), now_s, ask.session)
        assert decided is not None
        ask.booking = Booking(replica.pools, replica.link, decided, prompt, True, 2.0, now_s)
        self.requests += 1
        self.workers[decided.target.number].arrive(ask)

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        self.clock.at(self.clock.now_s + seconds, what)

    def _publish(self, worker: str, events: list[tuple[Kind, list[int]]]) -> None:
        self._after(EVENT_LAG_S, lambda: self._apply(worker, events))

    def _apply(self, worker: str, events: list[tuple[Kind, list[int]]]) -> None:
        rows = [
            (kind, Tier.GPU, 0, len(hashes), self._seq[worker], 1.0, 0, BLOCK, COMPLETE if kind == Kind.EPOCH_STARTED else 0)
            for kind, hashes in events
            if hashes or kind == Kind.EPOCH_STARTED
        ]
        if not rows:
            return
        blocks = np.array([h for _, hashes in events for h in hashes], np.uint64)
        seq = self._seq[worker]
        self._seq[worker] += 1
        batch = KvBatch(WorkerId("p", worker, 0), 1, seq, seq, 1.0, 1.0, np.array(rows, EVENT), blocks)
        for replica in self.replicas:
            replica.pools.index.apply(batch, self.clock.now_s)


def hash_of(session: str) -> int:
    return int.from_bytes(hashlib.blake2b(session.encode(), digest_size=8).digest(), "little")


def _blocks(rng: random.Random, count: int) -> U64:
    return np.array([rng.getrandbits(64) | 1 for _ in range(count)], np.uint64)
