"""A fleet in virtual time: workers, router, bridges and traffic without clock or socket, which write the very records that real ones do.

    flows --ask--> VirtualRouter --decision--> records        VirtualWorker --deeds--> KV batch --> records, index (lag_s later)
      ^               |                                             |
      '-- think_s -- ended <------------- run ---------------------'--> outcome, worker-load

Why: thousands of hours of traffic in minutes, the same twice (told by the seed), and with the truth at hand: a `Witness` is told every deed
of every cache, every look-up and every decision, from which `truth` says why each block was computed again.

Times are unix seconds from `start_s` on, and no two decisions share one. Records go to `Sink` in the order of time (KV batches a few
milliseconds late, as bridges are). Incidents are values with a time:

| incident | what happens |
|---|---|
| Restart | the process dies: its requests fail (502), a new epoch begins empty |
| Clear | the cache is emptied once no request holds a block |
| Capacity | the cache shrinks, or grows back |
| Join, Leave | a worker more, or one that gets no more requests |
| UsePolicy | the router decides by another policy |
| LoseFrames | the next batches of a worker never reach the stream; the bridge notices at the one after them and marks the gap |
| Usage | outcomes stop, or begin again, to say what the engine reports |
| Lag | the router's index falls behind by so many seconds |

A template with a timestamp at its head and another namespace are the traffic's doing (`agents`).
Limits: one pool, one rank a worker, GPU tier, full attention; a failed request is not sent again; decoding is not disturbed by prefills.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import orjson

from schemas.block_hash import U64
from schemas.kv_events import COMPLETE, ENGINE_RESTARTED, EVENT, Kind, KvBatch, WorkerId, encode
from schemas.stream import Writer
from schemas.topics import DECISIONS, KV_EVENTS, OUTCOMES, WORKER_LOAD
from schemas.workers import BridgeHealth, Trust, WorkerLoad
from simulator.asks import Ask, Flow, Turn
from simulator.virtual_router import Sent, VirtualRouter
from simulator.virtual_worker import Deed, EngineSpec, Op, Run, VirtualWorker

BRIDGE_S = 0.002
"""Between an engine's batch and its record."""
NETWORK_S = 0.0005
"""Between router and worker, each way; an answer's is 6 times as long, so that its events are older than its first byte."""
APART_S = 0.0001
"""Least time between two decisions: a router takes one after the other."""
START_S = 1_790_000_000.0


@dataclass(frozen=True, slots=True)
class Restart:
    at_s: float
    worker: str


@dataclass(frozen=True, slots=True)
class Clear:
    at_s: float
    worker: str


@dataclass(frozen=True, slots=True)
class Capacity:
    at_s: float
    worker: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Join:
    at_s: float
    worker: str


@dataclass(frozen=True, slots=True)
class Leave:
    at_s: float
    worker: str


@dataclass(frozen=True, slots=True)
class UsePolicy:
    at_s: float
    policy: str


@dataclass(frozen=True, slots=True)
class LoseFrames:
    at_s: float
    worker: str
    batches: int


@dataclass(frozen=True, slots=True)
class Usage:
    at_s: float
    reported: bool


@dataclass(frozen=True, slots=True)
class Lag:
    at_s: float
    seconds: float


Incident = Restart | Clear | Capacity | Join | Leave | UsePolicy | LoseFrames | Usage | Lag
"""at_s: unix seconds."""


@dataclass(frozen=True, slots=True)
class FleetSpec:
    pool: str = "sim"
    workers: int = 4
    engine: EngineSpec = field(default_factory=EngineSpec)
    policy: str = "cost"
    lag_s: float = 0.0
    speculative: bool = True
    seed: int = 1
    start_s: float = START_S
    load_every_s: float = 5.0
    usage_reported: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """How a request ended. hit_blocks: of the first admission, None: it was never admitted."""

    request_id: str
    time_s: float
    status: int
    first_byte_s: float | None
    hit_blocks: int | None
    cached_tokens: int | None
    """As the outcome reports it."""


class Sink(Protocol):
    """Where records go. value is what the stream carries."""

    def __call__(self, topic: str, key: bytes, value: bytes, time_s: float) -> None: ...


class Witness(Protocol):
    """Who is told everything, in order."""

    def dispatched(self, sent: Sent, ask: Ask, now_s: float) -> None: ...
    def admitted(self, who: WorkerId, request_id: str, hit_blocks: int, op: int) -> None:
        """The cache was looked up; op: number of the worker's next deed."""

    def published(self, who: WorkerId, epoch: int, seq: int, now_s: float, ops: list[Op], lost: bool) -> None:
        """Deeds are done and told; lost: their record never reached the stream."""

    def ended(self, ended: Ended) -> None: ...


def to_stream(writer: Writer, prefix: str = "") -> Sink:
    """Appends to a stream under the virtual time."""

    def append(topic: str, key: bytes, value: bytes, time_s: float) -> None:
        writer.append(prefix + topic, key, value, timestamp_ms=int(time_s * 1000))

    return append


class Fleet:
    def __init__(self, spec: FleetSpec, sink: Sink, witness: Witness | None = None) -> None:
        self.spec = spec
        self.now_s = spec.start_s
        self.workers: dict[str, VirtualWorker] = {}
        self.counts: Counter[str] = Counter()
        """requests, failed; of what ended well the sums of prompt_tokens, hit_tokens, ttft_us; records, blocks stored and removed."""
        self.router = VirtualRouter(
            spec.pool, spec.policy, spec.engine.cost, block_size=spec.engine.block_size, lag_s=spec.lag_s,
            speculative=spec.speculative, seed=spec.seed,
        )  # fmt: skip
        self._sink, self._witness = sink, witness
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._pushed = 0
        self._decided_s = -math.inf
        self._open: dict[str, tuple[Flow, float]] = {}
        self._epochs: dict[WorkerId, int] = {}
        self._lose: dict[WorkerId, int] = {}
        self._lost: dict[WorkerId, tuple[int, int]] = {}
        self._seqs: dict[WorkerId, int] = {}
        self._trust: dict[WorkerId, Trust] = {}
        self._usage = spec.usage_reported
        self._left: set[str] = set()
        self._pending = 0
        """What is to come beside open requests: starts, turns, outcomes."""
        for n in range(spec.workers):
            self.join(f"w{n}")

    # the outside

    def run(self, flows: Iterable[Flow], incidents: Iterable[Incident] = (), until_s: float = math.inf) -> None:
        """Plays everything, until no flow goes on (or until_s, unix seconds: what is under way then stays open)."""
        waiting = iter(flows)
        self._feed_flows(waiting)
        for incident in incidents:
            self.later(incident.at_s, partial(self.apply, incident))
        self._heartbeat(self.now_s)
        while self._due and (self._open or self._pending) and self._due[0][0] <= until_s:
            self.now_s, _, do = heapq.heappop(self._due)
            do(self.now_s)
        for _ in range(2):  # the bridges' word from after the end
            self.now_s += self.spec.load_every_s
            self._loads(self.now_s)

    def later(self, when_s: float, do: Callable[[float], None]) -> None:
        self._pushed += 1
        heapq.heappush(self._due, (max(when_s, self.now_s), self._pushed, do))

    def join(self, worker: str) -> None:
        who = WorkerId(self.spec.pool, worker, 0)
        self._epochs[who] = self._epochs.get(who, 0)
        self.router.join(who)
        self.workers[worker] = VirtualWorker(who, self.spec.engine, self.later, self, self.now_s)

    def apply(self, incident: Incident, now_s: float) -> None:
        match incident:
            case Restart():
                self.workers[incident.worker].restart(now_s)
            case Clear():
                self.workers[incident.worker].clear(now_s)
            case Capacity():
                self.workers[incident.worker].limit_capacity(incident.blocks, now_s)
            case Join():
                self.join(incident.worker)
            case Leave():
                self.router.leave(self.workers[incident.worker].who)
            case UsePolicy():
                self.router.use(incident.policy)
            case LoseFrames():
                self._lose[self.workers[incident.worker].who] = incident.batches
            case Usage():
                self._usage = incident.reported
            case Lag():
                self.router.lag_s = incident.seconds

    # flows

    def _feed_flows(self, waiting: Any) -> None:
        """Takes the next flow; when it starts, the one after it. So a long trace is never in memory as a whole."""
        flow = next(waiting, None)
        if flow is None:
            return
        self._pending += 1

        def start(now_s: float) -> None:
            self._pending -= 1
            self._feed_flows(waiting)
            self._go_on(flow, now_s)

        self.later(flow.starts_s, start)

    def _go_on(self, flow: Flow, now_s: float) -> None:
        turn = next(flow.turns, None)
        if turn is None:
            return
        self._pending += 1
        self.later(now_s + turn.think_s, lambda t: self._dispatch(flow, turn, t))

    def _dispatch(self, flow: Flow, turn: Turn, now_s: float) -> None:
        if now_s < self._decided_s + APART_S:
            self.later(self._decided_s + APART_S, lambda t: self._dispatch(flow, turn, t))
            return
        self._pending -= 1
        self._decided_s = now_s
        ask = turn.make(now_s)
        request_id = f"v{self.counts['requests']}"
        self.counts["requests"] += 1
        sent = self.router.send(request_id, ask, now_s)
        self._open[request_id] = flow, now_s
        if self._witness is not None:
            self._witness.dispatched(sent, ask, now_s)
        self._record(DECISIONS, request_id.encode(), orjson.dumps(sent.fields), now_s)
        worker = self.workers[sent.who.worker]
        self.later(now_s + NETWORK_S, lambda t: worker.arrive(request_id, ask, t))
        for beside in turn.beside:
            self._pending += 1
            self.later(now_s + beside.starts_s, partial(self._begin_beside, beside))

    def _begin_beside(self, flow: Flow, now_s: float) -> None:
        self._pending -= 1
        self._go_on(flow, now_s)

    # what workers tell

    def admitted(self, who: WorkerId, run: Run, now_s: float, op: int) -> None:
        if self._witness is not None:
            assert run.hit_blocks is not None
            self._witness.admitted(who, run.request_id, run.hit_blocks, op)

    def published(self, who: WorkerId, seq: int, now_s: float, ops: list[Op]) -> None:
        restarted = ops[0].deed is Deed.BEGUN
        if restarted:
            self._epochs[who] = self._epochs.get(who, 0) + 1
            self._trust[who] = Trust.EXACT
        if any(op.deed is Deed.CLEARED for op in ops):
            self._trust[who] = Trust.EXACT
        epoch = self._epochs[who]
        lost = self._lose.get(who, 0) > 0 and not restarted
        if self._witness is not None:
            self._witness.published(who, epoch, seq, now_s, ops, lost)
        self._seqs[who] = seq
        if lost:
            self._lose[who] -= 1
            first, _ = self._lost.get(who, (seq, seq))
            self._lost[who] = first, seq
            return
        gap = self._lost.pop(who, None)
        if gap is not None and not restarted:
            self._trust[who] = Trust.DEGRADED
            mark = np.zeros(1, EVENT)
            mark["kind"], mark["seq"], mark["parent"], mark["time_s"] = Kind.GAP, gap[0], gap[1], now_s
            self._kv(KvBatch(who, epoch, gap[0], gap[1], now_s, now_s + BRIDGE_S, mark, np.zeros(0, np.uint64)))
        rows = np.zeros(len(ops), EVENT)
        rows["seq"], rows["time_s"] = seq, now_s
        for row, op in zip(rows, ops, strict=True):
            row["count"] = len(op.names)
            if op.deed is Deed.STORED:
                row["kind"], row["parent"], row["block_size"] = Kind.STORED, op.parent, self.spec.engine.block_size
            elif op.deed is Deed.REMOVED:
                row["kind"] = Kind.REMOVED
            elif op.deed is Deed.CLEARED:
                row["kind"] = Kind.CLEARED
            else:
                row["kind"], row["flags"] = Kind.EPOCH_STARTED, COMPLETE | (ENGINE_RESTARTED if epoch > 1 else 0)
        names: U64 = np.concatenate([op.names for op in ops])
        self._kv(KvBatch(who, epoch, seq, seq, now_s, now_s + BRIDGE_S, rows, names))

    def _kv(self, batch: KvBatch) -> None:
        self.counts["blocks"] += len(batch.hashes)
        self.router.hear(batch, batch.bridge_time_s)
        self._record(KV_EVENTS, batch.source.key, encode(batch), batch.bridge_time_s)

    def first_token(self, who: WorkerId, run: Run, now_s: float) -> None:
        self.router.first_token(run.request_id)

    def ended(self, who: WorkerId, run: Run, now_s: float, status: int) -> None:
        flow, sent_s = self._open.pop(run.request_id)
        ok = status == 200
        self.router.ended(run.request_id, ok)
        time_s = now_s + 6 * NETWORK_S
        first_s = None if run.first_token_s is None else run.first_token_s + 6 * NETWORK_S
        ask, size = run.ask, self.spec.engine.block_size
        cached = None if not ok or not self._usage or run.hit_blocks is None else run.hit_blocks * size
        if ok:
            assert run.hit_blocks is not None
            self.counts["prompt_tokens"] += ask.prompt_tokens
            self.counts["hit_tokens"] += run.hit_blocks * size
            self.counts["ttft_us"] += round(((first_s or time_s) - sent_s) * 1e6)
        else:
            self.counts["failed"] += 1
        fields = {
            "version": 1, "request_id": run.request_id, "time_s": time_s, "worker": who.worker, "rank": who.rank, "status": status,
            "error": None if ok else "upstream", "ttft_s": None if first_s is None else first_s - sent_s, "e2e_s": time_s - sent_s,
        }  # fmt: skip
        if ok and self._usage:
            assert run.admitted_s is not None
            assert run.first_token_s is not None
            fields |= {
                "prompt_tokens": ask.prompt_tokens, "cached_tokens": cached, "completion_tokens": ask.output_tokens,
                "engine_queue_s": run.admitted_s - run.arrived_s, "engine_ttft_s": run.first_token_s - run.arrived_s,
            }  # fmt: skip
        if self._witness is not None:
            self._witness.ended(Ended(run.request_id, time_s, status, first_s, run.hit_blocks, cached))
        self._pending += 1
        self.later(time_s, lambda t: self._outcome(run.request_id, orjson.dumps(fields), t))
        self._go_on(flow, time_s)

    def _outcome(self, request_id: str, value: bytes, now_s: float) -> None:
        self._pending -= 1
        self._record(OUTCOMES, request_id.encode(), value, now_s)

    # loads

    def _heartbeat(self, now_s: float) -> None:
        self._loads(now_s)
        self.later(now_s + self.spec.load_every_s, self._heartbeat)

    def _loads(self, now_s: float) -> None:
        for worker in self.workers.values():
            who, cache = worker.who, worker.cache
            load = WorkerLoad(
                pool=who.pool, worker=who.worker, rank=who.rank, time_s=now_s, engine="vllm", model=self.spec.pool, up=True,
                running=worker.running, waiting=len(worker.waiting), kv_usage=cache.held_blocks / cache.capacity_blocks,
                capacity_blocks=cache.capacity_blocks, block_size=self.spec.engine.block_size, preemptions=worker.preemptions,
                bridge=BridgeHealth(
                    trust=self._trust[who], epoch=self._epochs[who], seq=self._seqs[who], resident_blocks=cache.cached_blocks
                ),
            )  # fmt: skip
            self._record(WORKER_LOAD, who.key, load.model_dump_json(exclude_unset=True).encode(), now_s)

    def _record(self, topic: str, key: bytes, value: bytes, time_s: float) -> None:
        self.counts["records"] += 1
        self._sink(topic, key, value, time_s)
