"""The router of a fleet in virtual time: the live router's index and policies, fed as late as the experiment wants.

The index (`router.index`) learns of a KV batch `lag_s` after its bridge published it, so a decision is made with a view that may be
stale; what it said, and at which (epoch, seq), stands in the decision. Load is known exactly: what was sent and has not ended. No health,
breakers, caps of newcomers or draining: a worker is there or it is not.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from router.index.prefix_index import TRUST_CODES, PrefixIndex
from router.policy.choice import Policy
from router.policy.cost import Coefficients, Rates, Situation, most_cached_tokens, table_of, terms
from router.policy.policies import POLICIES
from router.records.content import RecentPrompts
from schemas.block_hash import U64
from schemas.content import Content, described
from schemas.kv_events import KvBatch, WorkerId
from schemas.requests import pack_hashes, pack_lengths
from simulator.asks import KEY, Ask
from simulator.timing import StepCost

LISTED = 8
"""Candidates in a decision: the chosen one and the best others by cost, and one more that holds the longest prefix."""
_TRUST = tuple(t.value for t in TRUST_CODES)


@dataclass(slots=True, eq=False)
class Flight:
    worker: int
    prefill_s: float
    ticket: int
    first_token: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A decision. fields: of schemas.requests.Decision, but for what the fleet adds."""

    who: WorkerId
    fields: dict[str, Any]
    clock: tuple[int, int] | None
    """(epoch, seq) of the chosen worker that the index had applied; None: nothing yet."""
    content: Content | None
    """What the decision says of the prompt's content; None: its tokens are not known."""


class VirtualRouter:
    def __init__(
        self, pool: str, policy: str, cost: StepCost, *, block_size: int, lag_s: float = 0.0, speculative: bool = True, seed: int = 1
    ) -> None:
        """cost: what prefills take, known to the cost model. Raises KeyError for a policy that there is not."""
        self.lag_s = lag_s
        self.index = PrefixIndex(1 << 30)
        self.workers: list[WorkerId] = []
        rates = Rates(base_s=cost.prefill_base_s / cost.speed, a=cost.prefill_token_s / cost.speed, b=cost.prefill_attention_s / cost.speed)
        self.coefficients = Coefficients(rates=rates)
        self._pool, self._size, self._speculative = pool, block_size, speculative
        self._rng = random.Random(seed)
        self._feed: deque[tuple[float, KvBatch]] = deque()
        self._flights: dict[str, Flight] = {}
        self._queue_s: list[float] = []
        self._in_flight: list[int] = []
        self._decoding: list[int] = []
        self._present: list[bool] = []
        self._slots: list[int] = []
        self._keys: U64 = np.zeros(0, np.uint64)
        self._rates = table_of([])
        self._recent = RecentPrompts()
        self._policy: Policy
        self.use(policy)

    def use(self, policy: str) -> None:
        """From the next decision on."""
        self._policy = POLICIES[policy](self.coefficients)

    def join(self, who: WorkerId) -> None:
        self.workers.append(who)
        self._slots.append(self.index.slot(who).number)
        self._keys = np.array([w.number for w in self.workers], np.uint64)
        self._rates = table_of([self.coefficients.rates] * len(self.workers))
        for row in (self._queue_s, self._in_flight, self._decoding):
            row.append(0)
        self._present.append(True)

    def leave(self, who: WorkerId) -> None:
        self._present[self.workers.index(who)] = False

    def hear(self, batch: KvBatch, now_s: float) -> None:
        """A batch is on the stream; the index applies it lag_s later."""
        self._feed.append((now_s + self.lag_s, batch))

    def send(self, request_id: str, ask: Ask, now_s: float) -> Sent:
        while self._feed and self._feed[0][0] <= now_s:
            due_s, batch = self._feed.popleft()
            self.index.apply(batch, due_s)
        slots = self._slots
        found = self.index.match(ask.chain, now_s)
        held, expected = found.held[slots].astype(np.int64) * self._size, found.expected[slots].astype(np.int64) * self._size
        n, none = len(slots), np.zeros(len(slots), np.int64)
        now = Situation(
            prompt_tokens=ask.prompt_tokens, block_size=self._size, gpu=held, cpu=none, disk=none, expected=expected,
            trust=self.index.trust[slots], queue_s=np.array(self._queue_s, np.float64), decoding=np.array(self._decoding, np.int64),
            in_flight=np.array(self._in_flight, np.int64), allowed=np.array(self._present), draining=np.zeros(n, np.bool_),
            cold_left_tokens=np.full(n, np.inf), keys=self._keys,
            session=None if ask.session_id is None else hash_of(ask.session_id), root=int(ask.chain[0]) if len(ask.chain) else None,
        )  # fmt: skip
        costs = terms(now, self.coefficients, self._rates)
        choice = self._policy.choose(now, costs, self._rng)
        if choice is None:
            raise ValueError("no worker is there to take a request")
        chosen, who = choice.worker, self.workers[choice.worker]
        ticket = -1
        if self._speculative:
            missing = ask.chain[int(held[chosen]) // self._size :]
            ticket = self.index.expect(slots[chosen], missing, now_s + 5.0 + float(costs.prefill_s[chosen] + costs.queue_s[chosen]))
        order = np.argsort(np.where(now.allowed, costs.cost_s, np.inf), kind="stable")
        others = [int(w) for w in order if w != chosen]
        listed = [chosen, *others[: LISTED - 1]]
        longest = int(np.argmax(held)) if held.any() else None
        if longest is not None and longest not in listed:
            listed.append(longest)
        candidates = []
        for w in listed:
            slot = self.index.slot(self.workers[w])
            candidates.append(
                {
                    "worker": self.workers[w].worker, "rank": self.workers[w].rank, "overlap_tokens": int(held[w]),
                    "overlap_gpu_tokens": int(held[w]), "overlap_cpu_tokens": 0, "overlap_disk_tokens": 0,
                    "speculative_tokens": int(expected[w] - held[w]), "queue_s": float(costs.queue_s[w]),
                    "prefill_s": float(costs.prefill_s[w]), "load_s": float(costs.load_s[w]), "decode_s": float(costs.decode_s[w]),
                    "cost_s": None if choice.score is None else float(costs.cost_s[w]), "epoch": slot.epoch, "seq": slot.seq,
                    "trust": _TRUST[now.trust[w]], "in_flight": self._in_flight[w], "decoding": self._decoding[w],
                    "draining": False, "allowed": self._present[w],
                }
            )  # fmt: skip
        runner_up = next((w for w in others if self._present[w]), None)
        slot = self.index.slot(who)
        self._flights[request_id] = Flight(chosen, float(costs.prefill_s[chosen]), ticket)
        self._queue_s[chosen] += float(costs.prefill_s[chosen])
        self._in_flight[chosen] += 1
        fields = {
            "version": 1, "request_id": request_id, "time_s": now_s, "router": "virtual", "pool": self._pool, "model": self._pool,
            "path": "/v1/completions", "route": ask.route, "tenant": ask.tenant, "template": ask.template, "session_id": ask.session_id,
            "stream": True, "policy": self._policy.name, "policy_version": self._policy.version, "token_source": "exact",
            "prompt_tokens": ask.prompt_tokens, "block_size": self._size, "lora": ask.lora, "key_id": KEY.key_id,
            "chain": pack_hashes(ask.chain), "worker": who.worker, "rank": who.rank, "candidates": candidates,
            "workers_considered": sum(self._present), "best_overlap_worker": None if longest is None else self.workers[longest].worker,
            "best_overlap_rank": None if longest is None else self.workers[longest].rank,
            "best_overlap_tokens": 0 if longest is None else int(held[longest]),
            "predicted_tokens": min(int(expected[chosen]), most_cached_tokens(ask.prompt_tokens, self._size)),
            "runner_up_worker": None if runner_up is None else self.workers[runner_up].worker,
            "runner_up_rank": None if runner_up is None else self.workers[runner_up].rank,
            "margin_s": None if runner_up is None else float(costs.cost_s[runner_up] - costs.cost_s[chosen]),
            "index_lag_s": None if slot.newest_s is None else max(0.0, now_s - slot.newest_s),
        }  # fmt: skip
        content = None
        if ask.tokens is not None:
            first = 0 if longest is None else int(held[longest]) // self._size
            content = described(KEY, ask.tokens, self._size, first, ask.lora, ask.salt)
            fields |= {
                "namespace": content.namespace, "content_from": first, "content": pack_hashes(content.fingerprints),
                "chunks": pack_hashes(content.chunks), "chunk_tokens": pack_lengths(content.chunk_tokens),
                "shared_tokens": self._recent.shared((self._pool, ask.template or ask.route), ask.session_id, ask.tokens),
            }  # fmt: skip
        clock = None if slot.epoch is None or slot.seq is None else (slot.epoch, slot.seq)
        return Sent(who, fields, clock, content)

    def first_token(self, request_id: str) -> None:
        flight = self._flights[request_id]
        if not flight.first_token:
            flight.first_token = True
            self._queue_s[flight.worker] = max(0.0, self._queue_s[flight.worker] - flight.prefill_s)
            self._decoding[flight.worker] += 1

    def ended(self, request_id: str, kept: bool) -> None:
        """kept: its blocks are there or on their way."""
        flight = self._flights.pop(request_id)
        self._in_flight[flight.worker] -= 1
        if flight.first_token:
            self._decoding[flight.worker] -= 1
        else:
            self._queue_s[flight.worker] = max(0.0, self._queue_s[flight.worker] - flight.prefill_s)
        if not kept and flight.ticket >= 0:
            self.index.drop(flight.ticket)


def hash_of(name: str) -> int:
    """A name as a number that is the same in every run."""
    out = 0xCBF29CE484222325
    for byte in name.encode():
        out = (out ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return out
