"""A stream of records whose right answer is known: what a collector must hold after it, whatever happened in between."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from schemas.changes import Change
from schemas.kv_events import COMPLETE, Kind, WorkerId, encode
from schemas.requests import Candidate, Decision, Outcome, pack_hashes
from schemas.stream import Writer
from schemas.topics import CHANGES, DECISIONS, KV_EVENTS, OUTCOMES, WORKER_LOAD
from schemas.workers import BridgeHealth, Trust, WorkerLoad
from tests.collector.batches import batch, event

WORKERS = tuple(WorkerId("p", f"w{i}", 0) for i in range(3))


def decision(request_id: str, time_s: float, worker: str = "w0", **more: Any) -> Decision:
    values: dict[str, Any] = {
        "router": "r", "pool": "p", "model": "m", "path": "/v1/completions", "policy": "cost", "policy_version": "1",
        "token_source": "none",
        "candidates": (Candidate(worker=worker, rank=0, overlap_tokens=16, overlap_gpu_tokens=16, trust=Trust.EXACT),),
    }  # fmt: skip
    return Decision(request_id=request_id, time_s=time_s, worker=worker, rank=0, **(values | more))


def outcome(request_id: str, time_s: float, worker: str = "w0", **more: Any) -> Outcome:
    values: dict[str, Any] = {"status": 200, "ttft_s": 0.1, "e2e_s": 0.5, "prompt_tokens": 100, "cached_tokens": 32, "completion_tokens": 7}
    return Outcome(request_id=request_id, time_s=time_s, worker=worker, rank=0, **(values | more))


def load(who: WorkerId, time_s: float, *, up: bool = True, epoch: int = 1, key_id: str | None = None, **more: Any) -> WorkerLoad:
    return WorkerLoad(
        pool=who.pool, worker=who.worker, rank=who.rank, time_s=time_s, engine="vllm", up=up,
        bridge=BridgeHealth(trust=Trust.EXACT, epoch=epoch, key_id=key_id), **more,
    )  # fmt: skip


def put(writer: Writer, prefix: str, value: Decision | Outcome | WorkerLoad | Change) -> None:
    topic = {Decision: DECISIONS, Outcome: OUTCOMES, WorkerLoad: WORKER_LOAD, Change: CHANGES}[type(value)]
    key = value.request_id if isinstance(value, Decision | Outcome) else getattr(value, "worker", None) or "x"
    writer.append(prefix + topic, key.encode(), value.model_dump_json(exclude_unset=True).encode())


@dataclass
class Traffic:
    """Writes one step after the other and keeps count."""

    writer: Writer
    prefix: str = ""
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    sent: Counter[str] = field(default_factory=Counter)
    held: dict[WorkerId, Counter[int]] = field(default_factory=lambda: {w: Counter() for w in WORKERS})
    seq: dict[WorkerId, int] = field(default_factory=lambda: dict.fromkeys(WORKERS, 0))
    time_s: float = 1_790_000_000.0

    def step(self) -> None:
        self.time_s += self.rng.random() * 0.3
        who = self.rng.choice(WORKERS)
        self._kv(who)
        dice = self.rng.random()
        if dice < 0.5:
            request_id = f"q{self.sent['requests']}"
            chain = pack_hashes_of(range(1, 4))
            put(self.writer, self.prefix, decision(request_id, self.time_s, who.worker, chain=chain, block_size=16, token_source="exact"))
            put(self.writer, self.prefix, outcome(request_id, self.time_s + 0.5, who.worker))
            put(self.writer, self.prefix, load(who, self.time_s + 1.0))  # its bridge is alive after the end
            self.sent["requests"] += 1
        elif dice < 0.6:
            put(self.writer, self.prefix, load(who, self.time_s, running=2.0))
            self.sent["loads"] += 1
        elif dice < 0.65:
            self.writer.append(self.prefix + DECISIONS, b"bad", b"{no json")
            self.sent["dead_letters"] += 1
        elif dice < 0.7:
            put(self.writer, self.prefix, Change(time_s=self.time_s, text=f"change {self.sent['changes']}"))
            self.sent["changes"] += 1

    def _kv(self, who: WorkerId) -> None:
        events = []
        held, seq = self.held[who], self.seq[who]
        if seq == 0:
            events.append(event(Kind.EPOCH_STARTED, flags=COMPLETE))
        stored = [self.rng.randrange(1, 500) for _ in range(self.rng.randint(1, 5))]
        removed = self.rng.sample(sorted(held.elements()), min(held.total(), self.rng.randint(0, 3)))
        if removed:
            events.append(event(Kind.REMOVED, removed))
        events.append(event(Kind.STORED, stored, block_size=16))
        held.subtract(removed)
        held.update(stored)
        self.writer.append(self.prefix + KV_EVENTS, who.key, encode(batch(who, 1, seq, self.time_s, *events)))
        self.seq[who] += 1
        self.sent["kv_records"] += 1
        self.sent["events"] += len(events)
        self.sent["stored"] += len(stored)
        self.sent["removed"] += len(removed)


def pack_hashes_of(hashes: Any) -> str:
    import numpy as np

    return pack_hashes(np.array(list(hashes), np.uint64))


WHAT_IS_THERE = """
SELECT
  (SELECT count(*) FROM requests),
  (SELECT count(DISTINCT request_id) FROM requests),
  (SELECT count(*) FROM requests WHERE ended_at IS NULL OR started_at IS NULL),
  (SELECT count(*) FROM candidates),
  (SELECT count(*) FROM kv_events),
  (SELECT count(*) FROM (SELECT DISTINCT stream_partition, stream_offset FROM kv_events)),
  (SELECT coalesce(sum(blocks), 0) FROM kv_events WHERE kind = 'stored'),
  (SELECT coalesce(sum(blocks), 0) FROM kv_events WHERE kind = 'removed'),
  (SELECT count(*) FROM dead_letters),
  (SELECT count(*) FROM changes WHERE author IS NULL),
  (SELECT coalesce(sum(requests), 0) FROM worker_10s),
  (SELECT coalesce(sum(stored_blocks), 0) FROM worker_10s),
  (SELECT coalesce(sum(removed_blocks), 0) FROM worker_10s),
  (SELECT coalesce(sum(n), 0) FROM latency_10s WHERE measure = 'ttft')
"""


def what_must_be_there(sent: Counter[str]) -> tuple[int, ...]:
    """The one row of WHAT_IS_THERE when nothing is lost and nothing is there twice."""
    r = sent["requests"]
    return (
        r, r, 0, r, sent["events"], sent["kv_records"], sent["stored"], sent["removed"], sent["dead_letters"], sent["changes"],
        r, sent["stored"], sent["removed"], r,
    )  # fmt: skip
