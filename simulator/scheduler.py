"""Continuous batching as vLLM does it, in steps and without a clock: who computes how many tokens in the next step.

Why apart from the engine: what a step holds decides hits, evictions and the order of events, and that must be the same in real
and in virtual time. The owner calls `schedule`, lets the step's time pass, then `complete`. Rules:

- Running requests first, each with its missing tokens (1 when decoding, a chunk when prefilling), within one token budget.
- When a running request finds no free block, the youngest running one is preempted: it gives its blocks back, goes to the head
  of the queue and starts over, over its prompt and what it had generated. Then nobody is admitted in that step.
- Waiting requests are admitted in order of arrival while there is budget, a seat, and room for their whole length.
- The cached tokens that a request reports are those of its *first* admission.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from simulator.prefix_cache import BlockTable, PrefixCache


@dataclass(slots=True, eq=False)
class SimRequest:
    """One request in the engine. Times are the owner's clock, None until they happen."""

    table: BlockTable
    answer: Sequence[int]  # the token ids it will generate, at least one
    finish_reason: str = "length"
    reads_cache: bool = True  # not where log probabilities of the prompt are wanted
    arrived_s: float = 0.0
    computed: int = 0
    produced: int = 0
    hit_tokens: int | None = None
    preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    gap_s: float | None = None  # between the last two tokens
    finished: bool = False
    aborted: bool = False

    @property
    def created_tokens(self) -> int:
        """Prompt tokens newly entered in the cache: the whole blocks of the prompt that were not hit."""
        size = self.table.block_size
        return max(0, self.table.prompt_tokens // size * size - (self.hit_tokens or 0))


@dataclass(slots=True)
class Step:
    """What one step computes. `prefills`: (request, new tokens, tokens already there)."""

    work: list[tuple[SimRequest, int]] = field(default_factory=list)
    prefills: list[tuple[SimRequest, int, int]] = field(default_factory=list)
    decodes: int = 0
    admitted: list[SimRequest] = field(default_factory=list)  # for the first time
    preempted: int = 0

    @property
    def tokens(self) -> int:
        return sum(n for _, n in self.work)


class Scheduler:
    def __init__(self, cache: PrefixCache, max_num_seqs: int = 64, max_num_batched_tokens: int = 2048) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[SimRequest] = deque()
        self.running: list[SimRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: SimRequest) -> None:
        self.waiting.append(request)

    def abort(self, request: SimRequest) -> None:
        """Drop a request wherever it is. No effect on one that is finished."""
        if request.finished:
            return
        request.finished = request.aborted = True
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.cache.release(request.table)

    def schedule(self) -> Step:
        step = Step()
        budget = self.max_num_batched_tokens
        budget = self._schedule_running(step, budget)
        if not step.preempted:
            self._admit_waiting(step, budget)
        return step

    def _schedule_running(self, step: Step, budget: int) -> int:
        running = self.running
        i = 0
        while i < len(running) and budget > 0:
            request = running[i]
            missing = min(len(request.table.tokens) - request.computed, budget)
            while not self.cache.extend(request.table, request.computed + missing):
                victim = running.pop()
                self._preempt(victim)
                step.preempted += 1
                if victim is request:
                    return budget
            self._plan(step, request, missing)
            budget -= missing
            i += 1
        return budget

    def _admit_waiting(self, step: Step, budget: int) -> None:
        cache = self.cache
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            length = len(request.table.tokens)
            hit = cache.lookup(request.table) if request.reads_cache else []
            hit_tokens = len(hit) * cache.block_size
            new_tokens = min(length - hit_tokens, budget)
            if not cache.admit(request.table, hit, new_tokens, reserve_tokens=length):
                return
            self.waiting.popleft()
            self.running.append(request)
            request.computed = hit_tokens
            if request.hit_tokens is None:
                request.hit_tokens = hit_tokens
                step.admitted.append(request)
            self._plan(step, request, new_tokens)
            budget -= new_tokens

    def _plan(self, step: Step, request: SimRequest, tokens: int) -> None:
        step.work.append((request, tokens))
        if request.computed + 1 >= len(request.table.tokens) and request.produced:
            step.decodes += 1
        else:
            step.prefills.append((request, tokens, request.computed))

    def _preempt(self, request: SimRequest) -> None:
        self.cache.release(request.table)
        request.computed = 0
        request.preemptions += 1
        self.waiting.appendleft(request)

    def complete(self, step: Step, now_s: float) -> list[SimRequest]:
        """The step's time has passed: each request whose tokens are all computed generates one. Returns those requests,
        finished ones included (`finished` set, blocks released). Requests aborted meanwhile are passed over."""
        produced: list[SimRequest] = []
        for request, tokens in step.work:
            if request.finished:
                continue
            request.computed += tokens
            table = request.table
            if request.computed < len(table.tokens):
                continue
            table.append(request.answer[request.produced])
            request.produced += 1
            if request.last_token_s is None:
                request.first_token_s = now_s
            else:
                request.gap_s = now_s - request.last_token_s
            request.last_token_s = now_s
            if request.produced >= len(request.answer):
                request.finished = True
                self.running.remove(request)
                self.cache.release(table)
            produced.append(request)
        return produced
