"""Decisions and outcomes brought together by request id, each request exactly once.

    decision --+--> in flight --outcome--> joined --events have passed its end--> told --> closed (its row is final)
    outcome  --+--> alone ----decision--^
    in flight, alone: closed by themselves after a while, with outcome_missing or decision_missing

Four different things: *missing* the other half did not come in time; *late* it came after the row was closed (set aside with that reason);
*duplicate* the same half came again (the first counts); *unknown* a field nobody reported (None).
A router that sends a request again after its bytes went out writes a further decision with more `attempts`: the last one holds
(*superseded*), as long as the row is open. The outcome's `retries` says how many to expect, so a row waits for the last one like for any
missing half. Counts that were made of an earlier decision without such a hint stay as they are.

Pure: times are handed in. What is open is found again after a restart by reading its records again: the stream offsets of open records are
all that is stored of them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from collector.attribution.moments import Running
from schemas.content import Content, content_of
from schemas.requests import Candidate, Decision, Outcome, unpack_hashes
from schemas.stream import Partition

if TYPE_CHECKING:  # both read requests themselves
    from collector.attribution.dispatch import Dispatch
    from collector.attribution.told import Loss

REMEMBERED = 200_000
OPEN_BYTES, CANDIDATE_BYTES = 6_000, 1_200  # about what Python holds of an open request, and of each candidate of its decision

Place = tuple[Partition, int]
"""(topic partition, offset) of a record."""


class Taken(Enum):
    NEW = auto()
    DUPLICATE = auto()
    LATE = auto()
    SUPERSEDED = auto()
    """An earlier decision of the same request gives way to this one."""


@dataclass(slots=True, eq=False)
class Request:
    """One request, from the first half that came until its row is closed."""

    request_id: str
    decision: Decision | None = None
    decision_at: Place | None = None
    outcome: Outcome | None = None
    outcome_at: Place | None = None
    chain_ends: tuple[int, int | None, int | None] | None = None
    """(blocks, first hash, last hash) of the prompt's chain."""
    running: Running | None = None
    """None: there is no chain of blocks, or no decision."""
    rank: int | None = None
    written_s: float = -math.inf
    """When its newest half happened or was written, whichever is later: waiting starts there, also for records that tell of long ago."""
    counted: bool = False
    """In the rollups, apart from what events tell."""
    told: bool = False
    event_hit_tokens: int | None = None
    content: Content | None = None
    """What its decision tells of the prompt's content, until that is looked up."""
    first_s: float | None = None
    """Of its first decision, where there were several."""
    dispatch: Dispatch | None = None
    """What was true at its (last) decision."""
    loss: Loss | None = None
    """None: not attributed (yet)."""
    held_bytes: int = 0
    row: tuple[object, ...] | None = None
    """The published row, as long as nothing changes."""

    @property
    def worker(self) -> tuple[str | None, str | None]:
        """(pool, worker)."""
        half = self.decision or self.outcome
        pool = None if half is None else half.pool
        if self.outcome is not None and self.outcome.worker is not None:
            return pool, self.outcome.worker
        return pool, None if self.decision is None else self.decision.worker

    @property
    def undecided(self) -> bool:
        """No worker could be chosen, so there is no decision to wait for or to miss."""
        return self.decision is None and self.outcome is not None and self.outcome.worker is None and self.outcome.pool is not None

    @property
    def chosen(self) -> Candidate | None:
        """The chosen worker as the last decision saw it."""
        return None if self.decision is None else chosen_of(self.decision)

    @property
    def clock(self) -> tuple[int, int] | None:
        """(epoch, seq) of the chosen worker's cache that the router's index had applied; None: not told."""
        c = self.chosen
        return None if c is None or c.epoch is None or c.seq is None else (c.epoch, c.seq)

    @property
    def predicted_tokens(self) -> int | None:
        return None if self.decision is None else predicted_tokens(self.decision)

    @property
    def last_decision_known(self) -> bool:
        """No decision of further attempts is to come, by what the outcome says."""
        return self.decision is not None and self.outcome is not None and (self.outcome.retries or 0) <= len(self.decision.attempts)

    @property
    def started_s(self) -> float | None:
        if self.decision is not None:
            return self.decision.time_s
        if self.outcome is not None and self.outcome.e2e_s is not None:
            return self.outcome.time_s - self.outcome.e2e_s
        return None

    @property
    def prompt_tokens(self) -> int | None:
        if self.outcome is not None and self.outcome.prompt_tokens is not None:
            return self.outcome.prompt_tokens
        return None if self.decision is None else self.decision.prompt_tokens


def went_to(d: Decision, worker: str, rank: int | None) -> bool:
    """Whether this is the worker that the request went to; a rank that is not told is no other one."""
    return worker == d.worker and (d.rank is None or rank in (None, d.rank))


def chosen_of(d: Decision) -> Candidate | None:
    return next((c for c in d.candidates if went_to(d, c.worker, c.rank)), None)


def predicted_tokens(d: Decision) -> int | None:
    """Cached tokens that the router expected; where it guesses from text, or has no field for it, the overlap of the chosen worker."""
    if "predicted_tokens" in d.model_fields_set and d.token_source != "text":
        return d.predicted_tokens
    chosen = chosen_of(d)
    if d.token_source == "none" or chosen is None or chosen.overlap_tokens is None:
        return None
    return chosen.overlap_tokens + (chosen.speculative_tokens or 0)


class Join:
    """All open requests, and the ids of the last closed ones."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self.open: dict[str, Request] = {}
        self.held_bytes = 0
        """Memory of them, about."""
        self._closed: OrderedDict[str, tuple[bool, bool]] = OrderedDict()
        self._remembered = remembered

    def decision(self, value: Decision, at: Place, written_s: float) -> Taken:
        """written_s: when the record was written to the stream (unix seconds)."""
        request, taken = self.open.get(value.request_id), Taken.NEW
        if request is None:
            closed = self._closed.get(value.request_id)
            if closed is not None:
                return Taken.LATE if closed[0] else Taken.DUPLICATE
            request = self.open[value.request_id] = Request(value.request_id)
        elif request.decision is not None:
            if len(value.attempts) <= len(request.decision.attempts):
                return Taken.DUPLICATE
            taken = Taken.SUPERSEDED
            request.chain_ends = request.running = None
        request.decision, request.decision_at, request.row = value, at, None
        request.first_s = value.time_s if request.first_s is None else min(request.first_s, value.time_s)
        request.written_s = max(request.written_s, written_s, value.time_s)
        answered_by = None if request.outcome is None else request.outcome.rank
        request.rank = value.rank if answered_by is None else answered_by
        self._start(request)
        self._weigh(request)
        return taken

    def outcome(self, value: Outcome, at: Place, written_s: float) -> Taken:
        request = self.open.get(value.request_id)
        if request is None:
            closed = self._closed.get(value.request_id)
            if closed is not None:
                return Taken.LATE if closed[1] else Taken.DUPLICATE
            request = self.open[value.request_id] = Request(value.request_id)
        elif request.outcome is not None:
            return Taken.DUPLICATE
        request.outcome, request.outcome_at, request.row = value, at, None
        request.written_s = max(request.written_s, written_s, value.time_s)
        request.rank = value.rank if value.rank is not None else request.rank
        self._start(request)
        self._weigh(request)
        return Taken.NEW

    def joined(self) -> Iterator[Request]:
        return (r for r in self.open.values() if r.decision is not None and r.outcome is not None)

    def overdue(self, complete_s: float, outcome_wait_s: float, decision_wait_s: float) -> list[Request]:
        """Requests whose other half did not come, though everything before complete_s (unix seconds) was received."""
        return [
            r
            for r in self.open.values()
            if (r.outcome is None and r.decision is not None and r.written_s + outcome_wait_s < complete_s)
            or (r.decision is None and r.outcome is not None and r.written_s + decision_wait_s < complete_s)
        ]

    def beyond(self, budget_bytes: int) -> list[Request]:
        """When they hold more: the oldest open requests, as many as have to go for the rest to fit in nine tenths of it."""
        if self.held_bytes <= budget_bytes:
            return []
        too_much, out = self.held_bytes - budget_bytes * 9 // 10, []
        for r in sorted(self.open.values(), key=lambda r: r.written_s):
            if too_much <= 0:
                break
            out.append(r)
            too_much -= r.held_bytes
        return out

    def close(self, request: Request) -> None:
        del self.open[request.request_id]
        self.held_bytes -= request.held_bytes
        self.remember(request.request_id, request.decision is None, request.outcome is None)

    def remember(self, request_id: str, decision_missing: bool, outcome_missing: bool) -> None:
        self._closed[request_id] = decision_missing, outcome_missing
        if len(self._closed) > self._remembered:
            self._closed.popitem(last=False)

    def waiting(self) -> dict[Partition, list[int]]:
        """`(offset << 1) | counted` of the records of open requests, sorted, by partition."""
        out: dict[Partition, list[int]] = {}
        for r in self.open.values():
            for place in (r.decision_at, r.outcome_at):
                if place is not None:
                    out.setdefault(place[0], []).append(place[1] << 1 | r.counted)
        for offsets in out.values():
            offsets.sort()
        return out

    def _weigh(self, r: Request) -> None:
        candidates = 0 if r.decision is None else len(r.decision.candidates)
        now = OPEN_BYTES + CANDIDATE_BYTES * candidates + (0 if r.running is None else 2 * r.running.chain.nbytes)
        self.held_bytes += now - r.held_bytes
        r.held_bytes = now

    @staticmethod
    def _start(r: Request) -> None:
        d, o = r.decision, r.outcome
        if d is None:
            return
        if d.chain is not None:
            if d.token_source in ("exact", "engine"):  # the names of a text prompt's chunks are no names of blocks
                chain = unpack_hashes(d.chain)
                r.chain_ends = len(chain), int(chain[0]) if len(chain) else None, int(chain[-1]) if len(chain) else None
                if d.block_size is not None:
                    r.running = Running(d.request_id, chain, 0, d.time_s)
            r.content = content_of(d)
            bare = dict.fromkeys(("chain", "content", "chunks", "chunk_tokens"))
            r.decision = d.model_copy(update=bare)  # long prompts in flight are held once, not as text as well
        if r.running is None:
            return
        tokens = r.prompt_tokens
        size = d.block_size or 1
        blocks = len(r.running.chain)
        r.running.hit_blocks_max = blocks if tokens is None else min(blocks, max(0, (tokens - 1) // size))
        if o is not None:
            r.running.ended_s = max(o.time_s, d.time_s)
            r.running.first_byte_s = None if o.ttft_s is None else d.time_s + o.ttft_s
