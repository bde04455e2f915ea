"""One engine process in virtual time: queue, prefill steps, decoding, its cache, and the KV batches that it publishes.

    arrive -> waiting -> a step admits it: hit looked up, blocks taken and named -> the step's seconds pass -> batch published, first token
                                   decoding: a block each block_size tokens -> last token, blocks released

Invariants:
- What a step does to the cache is done when the step starts and published, in that order, when it ends; what decoding does is
  published at once, before the next step starts. Nothing else touches the cache in between, so the order of events is the order of deeds.
  A restart in between leaves nothing of the step.
- A step takes waiting prompts in order of arrival within `batch_tokens`; a longer prompt is computed in chunks of it. With
  `one_at_a_time` a step holds one prompt: FIFO prefill.
- Tokens come out at a fixed pace that prefills do not disturb; what falls into a step happens at its end, as a batch of tokens does.
- A decode that finds no block preempts the youngest request: it goes to the head of the queue and is computed again with what it had
  generated. The cached tokens that it reports are those of its first admission.
- A cache is cleared when no request holds a block: until then nobody is admitted.

Pure: no clock, no randomness, no stream; the owner runs what is due (`Timer`) and is told what happened (`Listener`).
Rejected: `Scheduler` with its step for every decoded token: 340 steps a request, where a fleet needs four events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np

from schemas.block_hash import U64
from schemas.kv_events import WorkerId
from simulator.asks import NO_BLOCKS, Ask
from simulator.name_cache import Held, NameCache
from simulator.timing import StepCost


class Deed(IntEnum):
    """What was done to a cache, in the order of doing."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3
    BEGUN = 4
    """A new life: empty."""


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """number: of this worker's deeds, from 0, never reused."""

    number: int
    deed: Deed
    names: U64
    parent: int = 0
    """STORED: name of the block before the first one."""
    request_id: str | None = None


@dataclass(slots=True, eq=False)
class Run:
    """One request on this worker. Times are unix seconds; None until it happened."""

    request_id: str
    ask: Ask
    arrived_s: float
    names: U64
    """Of all blocks that it will ever fill."""
    held: Held | None = None
    computed: int = 0
    """Tokens whose KV is there."""
    generated: int = 0
    hit_blocks: int | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    preempted: int = 0
    due: int = 0
    """Counts what was scheduled for it: what was scheduled before a preemption is void."""

    @property
    def wanted(self) -> int:
        """Tokens to compute before the next one comes out."""
        return self.ask.prompt_tokens + self.generated


class Listener(Protocol):
    """Who is told what happened, in order."""

    def admitted(self, who: WorkerId, run: Run, now_s: float, op: int) -> None:
        """Its hit was looked up for the first time; op: number of the next deed."""

    def published(self, who: WorkerId, seq: int, now_s: float, ops: list[Op]) -> None: ...
    def first_token(self, who: WorkerId, run: Run, now_s: float) -> None: ...
    def ended(self, who: WorkerId, run: Run, now_s: float, status: int) -> None: ...


Timer = Callable[[float, Callable[[float], None]], None]
"""later(when_s, do): calls do(when_s) then."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    block_size: int = 16
    capacity_blocks: int = 2048
    cost: StepCost = field(default_factory=StepCost)
    batch_tokens: int = 8192
    one_at_a_time: bool = False
    seats: int = 256
    decode_token_s: float = 0.02


class VirtualWorker:
    def __init__(self, who: WorkerId, spec: EngineSpec, later: Timer, listener: Listener, now_s: float) -> None:
        self.who = who
        self.spec = spec
        self.cache = NameCache(spec.capacity_blocks)
        self.waiting: deque[Run] = deque()
        self.prefilling: list[Run] = []
        self.decoding: list[Run] = []
        self.seq = -1
        self.preemptions = 0
        self._later, self._listener = later, listener
        self._life = 0
        self._next_op = 0
        self._ops: list[Op] = []
        self._deferred: list[Callable[[float], None]] = []
        self._busy = False
        self._clear = False
        self._begin(now_s)

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def arrive(self, request_id: str, ask: Ask, now_s: float) -> None:
        names = np.concatenate([ask.chain, ask.following]) if len(ask.following) else ask.chain
        self.waiting.append(Run(request_id, ask, now_s, names))
        self._step(now_s)

    def restart(self, now_s: float) -> None:
        """The process dies and comes back at once: every request fails, the cache is empty."""
        lost = [*self.prefilling, *self.decoding, *self.waiting]
        self._life += 1
        self.waiting.clear()
        self.prefilling, self.decoding, self._ops, self._deferred = [], [], [], []
        capacity = self.cache.capacity_blocks
        self.cache = NameCache(self.spec.capacity_blocks)
        self.cache.limit_capacity(capacity)
        self._busy = self._clear = False
        self.seq = -1
        for run in lost:
            run.due += 1
            self._listener.ended(self.who, run, now_s, 502)
        self._begin(now_s)

    def clear(self, now_s: float) -> None:
        """As soon as no request holds a block; nobody is admitted until then."""
        self._clear = True
        self._step(now_s)

    def limit_capacity(self, blocks: int, now_s: float) -> None:
        """See NameCache; what it evicts is published with the next batch, as an engine does."""
        if self._busy:
            self._deferred.append(lambda t: self.limit_capacity(blocks, t))
            return
        self.cache.limit_capacity(blocks)
        self._note_removed(None)
        self._step(now_s)

    # inside

    def _begin(self, now_s: float) -> None:
        self._note(Deed.BEGUN)
        self._publish(now_s)

    def _note(self, deed: Deed, names: U64 = NO_BLOCKS, parent: int = 0, request_id: str | None = None) -> None:
        self._ops.append(Op(self._next_op, deed, names, parent, request_id))
        self._next_op += 1

    def _note_removed(self, request_id: str | None) -> None:
        removed = self.cache.take_removed()
        if len(removed):
            self._note(Deed.REMOVED, removed, 0, request_id)

    def _note_stored(self, run: Run, first: int, end: int) -> None:
        self._note_removed(run.request_id)
        if end > first:
            parent = int(run.names[first - 1]) if first else run.ask.root
            self._note(Deed.STORED, run.names[first:end], parent, run.request_id)

    def _publish(self, now_s: float) -> None:
        if self._ops:
            self.seq += 1
            ops, self._ops = self._ops, []
            self._listener.published(self.who, self.seq, now_s, ops)

    def _step(self, now_s: float) -> None:
        """Starts the next step if there is work and none is under way; publishes what was done outside of steps."""
        if self._busy:
            return
        if self._clear and self.cache.clear():
            self._clear = False
            self._note(Deed.CLEARED)
        self._publish(now_s)
        work = self._compose(now_s)
        if not work:
            self._publish(now_s)
            return
        cost = self.spec.cost
        seconds = cost.prefill_base_s + sum(cost.prefill_token_s * u + cost.prefill_attention_s * u * (h + u / 2) for _, u, h in work)
        self._busy = True
        life = self._life
        self._later(now_s + seconds / cost.speed, lambda t: self._step_ends(t, life, work))

    def _compose(self, now_s: float) -> list[tuple[Run, int, int]]:
        """What the step computes: (request, new tokens, tokens before them)."""
        size, left = self.spec.block_size, self.spec.batch_tokens
        work: list[tuple[Run, int, int]] = []
        for run in list(self.prefilling):
            if run.held is None:
                continue  # preempted a moment ago
            n = min(left, run.wanted - run.computed)
            if n and self._grow(run, run.computed + n, run.computed + n, now_s):
                work.append((run, n, run.computed - n))
                left -= n
        while self.waiting and left > 0 and self.running < self.spec.seats and not self._clear:
            if self.spec.one_at_a_time and work:
                break
            run = self.waiting[0]
            hit = self.cache.lookup(run.names, (run.wanted - 1) // size)
            n = min(left, run.wanted - hit * size)
            there = hit * size + n
            held = self.cache.admit(run.names, hit, there // size, -(-there // size), -(-run.wanted // size))
            if held is None:
                if -(-run.wanted // size) > self.cache.capacity_blocks:
                    self.waiting.popleft()
                    self._listener.ended(self.who, run, now_s, 400)
                    continue
                break
            self.waiting.popleft()
            if run.hit_blocks is None:
                run.hit_blocks, run.admitted_s = hit, now_s
                self._listener.admitted(self.who, run, now_s, self._next_op)
            run.held, run.computed = held, there
            self._note_stored(run, hit, there // size)
            self.prefilling.append(run)
            work.append((run, n, there - n))
            left -= n
        return [w for w in work if w[0].held is not None]

    def _grow(self, run: Run, computed: int, room_for: int, now_s: float) -> bool:
        """Blocks for room_for tokens, names for the full ones of `computed`. False: it was preempted itself."""
        size = self.spec.block_size
        while run.held is not None:
            named = run.held.named
            if self.cache.extend(run.held, run.names, computed // size, -(-room_for // size)):
                run.computed = computed
                self._note_stored(run, named, computed // size)
                return True
            self._preempt(max((r for r in (*self.prefilling, *self.decoding)), key=lambda r: (r.admitted_s or 0.0, r.request_id)))
        return False

    def _preempt(self, run: Run) -> None:
        assert run.held is not None
        self.cache.release(run.held)
        run.held = None
        run.computed = 0
        run.preempted += 1
        run.due += 1
        self.preemptions += 1
        for group in (self.prefilling, self.decoding):
            if run in group:
                group.remove(run)
        self.waiting.appendleft(run)

    def _step_ends(self, now_s: float, life: int, work: list[tuple[Run, int, int]]) -> None:
        if life != self._life:
            return
        self._busy = False
        self._publish(now_s)
        for run, _, _ in work:
            if run.held is None or run.computed < run.wanted:
                continue
            self.prefilling.remove(run)
            self.decoding.append(run)
            run.generated += 1
            if run.first_token_s is None:
                run.first_token_s = now_s
                self._listener.first_token(self.who, run, now_s)
            self._decode(run, now_s)
        deferred, self._deferred = self._deferred, []
        for do in deferred:
            do(now_s)
        self._step(now_s)

    def _decode(self, run: Run, now_s: float) -> None:
        """Schedules what happens to it next: a block is full, or the last token is out."""
        left = run.ask.output_tokens - run.generated
        if left <= 0:
            self._end(run, now_s)
            return
        if not self._grow(run, run.computed, run.computed + 1, now_s):
            return
        size = self.spec.block_size
        steps = min(left, (run.computed // size + 1) * size - run.computed)
        run.due += 1
        due = run.due
        self._later(now_s + steps * self.spec.decode_token_s, lambda t: self._decoded(t, run, steps, due))

    def _decoded(self, now_s: float, run: Run, steps: int, due: int) -> None:
        if due != run.due:
            return
        if self._busy:
            self._deferred.append(lambda t: self._decoded(t, run, steps, due))
            return
        run.generated += steps
        if self._grow(run, run.computed + steps, run.computed + steps, now_s):
            self._decode(run, now_s)
        self._step(now_s)

    def _end(self, run: Run, now_s: float) -> None:
        assert run.held is not None
        self.cache.release(run.held)
        self._note_removed(None)
        run.held = None
        run.due += 1
        self.decoding.remove(run)
        self._listener.ended(self.who, run, now_s, 200)
