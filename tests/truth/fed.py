"""A fleet in virtual time beside a collector that is fed with its records, and the comparison of what both say of every block."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from collector.analytics.attributed import Attributed
from collector.analytics.content_index import ContentIndex
from collector.fold import Fold
from collector.residency import Residency
from schemas.causes import Cause
from schemas.stream.base import StoredRecord
from simulator.asks import Flow
from simulator.fleet import Fleet, FleetSpec, Incident
from simulator.truth import History, Truth

TURN_S = 0.5
LADDER = ("ideal_tokens", "held_tokens", "selected_tokens", "hit_tokens")


class Feeder:
    """A sink that hands a collector's fold everything that happened, a turn at a time, and closes requests as time passes."""

    def __init__(
        self, slots: int = 1 << 12, recent_events: int = 1 << 16, recent_hashes: int = 1 << 20, past: int = 1 << 18, turn_s: float = TURN_S
    ) -> None:
        """past: blocks whose history is exact; the usual budgets take longer to touch than a small fleet to play."""
        state = Residency(recent_events, recent_hashes, slots, ghosts=past, seen=past, filtered=past)
        self.fold = Fold(state, contents=ContentIndex())
        self.told: dict[str, Attributed] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self._turn_s = turn_s
        self._next_s = -math.inf
        self._waiting: dict[str, list[StoredRecord]] = defaultdict(list)
        self._offsets: Counter[str] = Counter()

    def __call__(self, topic: str, key: bytes, value: bytes, time_s: float) -> None:
        if time_s >= self._next_s:
            self.turn(time_s)
            self._next_s = time_s + self._turn_s
        self._waiting[topic].append(StoredRecord(self._offsets[topic], int(time_s * 1000), key, value, ()))
        self._offsets[topic] += 1

    def turn(self, now_s: float, passed_s: float | None = None) -> None:
        """now_s: of this time and before it, everything is here (KV batches a few milliseconds later)."""
        for topic, records in self._waiting.items():
            self.fold.take((topic, 0), topic, records, now_s)
        self._waiting.clear()
        passed_s = now_s - 0.01 if passed_s is None else passed_s
        self.fold.settle(passed_s, passed_s, passed_s)
        for one in self.fold.take_told():
            assert one.request_id not in self.told, "told once"
            self.told[one.request_id] = one
        requests = self.fold.outputs().get("requests")
        if requests is not None:
            self.rows |= {row["request_id"]: row for row in requests.to_pylist()}
        self.fold.written()

    def finish(self, now_s: float) -> None:
        """Nothing more will come."""
        self.turn(now_s)
        self.turn(now_s, now_s + 10_000.0)


@dataclass(frozen=True, slots=True)
class Deviation:
    request_id: str
    block: int
    truth: Cause
    told: Cause
    why: str


@dataclass(slots=True)
class Comparison:
    requests: int = 0
    blocks: int = 0
    tokens: Counter[Cause] = field(default_factory=Counter)
    """By the truth."""
    not_told: list[str] = field(default_factory=list)
    hits: list[tuple[str, int | None, int | None]] = field(default_factory=list)
    """Requests whose hit differs: truth, told."""
    causes: list[Deviation] = field(default_factory=list)
    ladders: list[tuple[str, str, int | None, int | None]] = field(default_factory=list)
    """(request, step, truth, told) where they differ."""
    lost_tokens: list[str] = field(default_factory=list)
    """Requests whose tokens do not add up."""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def kinds(self) -> Counter[tuple[str, str]]:
        """Blocks that deviate, by (truth, told)."""
        return Counter((d.truth.label, d.told.label) for d in self.causes)

    def summary(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "blocks": self.blocks,
            "tokens_by_cause": {c.label: n for c, n in sorted(self.tokens.items())},
            "not_told": len(self.not_told),
            "hits_that_differ": len(self.hits),
            "blocks_that_deviate": len(self.causes),
            "deviations": {f"{a} told as {b}": n for (a, b), n in self.kinds.most_common()},
            "ladders_that_differ": Counter(step for _, step, _, _ in self.ladders),
            "not_conserved": len(self.lost_tokens),
        }


def compared(spec: FleetSpec, flows: Iterable[Flow], incidents: Iterable[Incident] = (), feeder: Feeder | None = None) -> Comparison:
    """Plays it, and compares every request that ended well."""
    history, feeder = History(spec.engine.block_size), feeder or Feeder()
    fleet = Fleet(spec, feeder, history)
    fleet.run(flows, incidents)
    feeder.finish(fleet.now_s)
    out = Comparison()
    for request_id, asked in history.asked.items():
        if asked.ended is not None and asked.ended.status == 200:
            _compare(out, history.truth(request_id), feeder, spec.engine.block_size)
    return out


def _compare(out: Comparison, truth: Truth, feeder: Feeder, block_size: int) -> None:
    request_id = truth.request_id
    told = feeder.told.get(request_id)
    out.requests += 1
    out.tokens += truth.tokens(block_size)
    if told is None:
        out.not_told.append(request_id)
        return
    out.blocks += len(truth.blocks)
    if sum(truth.tokens(block_size).values()) != truth.prompt_tokens or int(told.run_tokens.sum()) != truth.prompt_tokens:
        out.lost_tokens.append(request_id)
    if told.hit_tokens != truth.hit_tokens:
        out.hits.append((request_id, truth.hit_tokens, told.hit_tokens))
    if truth.hit_tokens is None:
        if told.run_causes.tolist() != [Cause.UNEXPLAINED]:
            out.hits.append((request_id, None, told.hit_tokens))
        return
    for i, (want, got, why) in enumerate(zip(truth.blocks, told.causes.tolist(), truth.why, strict=True)):
        if want != got:
            out.causes.append(Deviation(request_id, i, want, Cause(got), why))
    row = feeder.rows[request_id]
    ladder = truth.ladder
    for step, value in zip(LADDER, (ladder.ideal, ladder.held_anywhere, ladder.selected, ladder.delivered), strict=True):
        if row.get(step) != value:
            out.ladders.append((request_id, step, value, row.get(step)))
