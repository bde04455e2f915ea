"""Agent traffic for fleets in virtual time: sessions whose prompts grow turn by turn, made of tokens, told by a seed.

    template               session                        each turn adds
    system prompt + tools  task                     ->    the answer, then a tool's result or what the user says

What a person changes in a deployment can be scheduled: a template gets a timestamp at its head (`Stamp`), a tenant another LoRA adapter or
cache salt (`Namespace`). Both change every name after it, and none of the content.

Figures: growth of a turn, median 655 tokens, 95th percentile 6.3 thousand, and pauses of 16 s (median) and 43 s (80 %), are those of the
public Claude Code sessions, as log-normals; `scale` makes all lengths smaller. Now and then a turn fans out: sub-agents begin at once on
the session's own prompt so far, which is what makes several workers compute the same blocks at a time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from schemas.block_hash import U32
from simulator.asks import Ask, Flow, Turn, ask_of_tokens

GROWTH_SIGMA = math.log(6300 / 655) / 1.645
THINK_SIGMA = math.log(43 / 16) / 0.8416


@dataclass(frozen=True, slots=True)
class Stamp:
    """From from_s on every prompt of the template begins with the time. width: tokens; 0: its length varies."""

    from_s: float
    template: str
    width: int = 8
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Namespace:
    """From from_s on the tenant's requests name an adapter, or a cache salt."""

    from_s: float
    tenant: str
    lora: str | None = None
    salt: str | None = None
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class AgentTraffic:
    pool: str = "sim"
    block_size: int = 16
    sessions: int = 40
    start_s: float = 0.0
    """Unix seconds."""
    spread_s: float = 300.0
    """Sessions start at random within it."""
    templates: int = 3
    tenants: int = 2
    turns: tuple[int, int] = (4, 16)
    system_tokens: tuple[int, int] = (3000, 12000)
    scale: float = 0.1
    answer_tokens: tuple[int, int] = (20, 120)
    think_s: float = 16.0
    fan_out: float = 0.1
    """Share of turns that start sub-agents."""
    stamps: tuple[Stamp, ...] = ()
    namespaces: tuple[Namespace, ...] = ()
    seed: int = 1

    def flows(self) -> list[Flow]:
        """In the order of their start."""
        rng = random.Random(f"{self.seed}/starts")
        starts = sorted(self.start_s + rng.random() * self.spread_s for _ in range(self.sessions))
        return [Flow(at_s, _Session(self, n).turns()) for n, at_s in enumerate(starts)]


class _Session:
    """One conversation. `said` is everything after the template, and grows."""

    def __init__(self, traffic: AgentTraffic, number: int) -> None:
        self._traffic = traffic
        self._rng = random.Random(f"{traffic.seed}/session/{number}")
        self._id = f"s{number}"
        kind = self._rng.randrange(traffic.templates)
        self._template = f"agent-{kind}"
        self._tenant = f"tenant-{number % traffic.tenants}"
        rng = random.Random(f"{traffic.seed}/template/{kind}")
        self._system = _tokens(rng, self._scaled(rng.uniform(*traffic.system_tokens)))
        self._said = _tokens(self._rng, self._scaled(self._growth()))

    def turns(self) -> Iterator[Turn]:
        t, rng = self._traffic, self._rng
        for n in range(rng.randint(*t.turns)):
            beside: tuple[Flow, ...] = ()
            if rng.random() < t.fan_out:
                beside = tuple(Flow(0.001 * (k + 1), iter((self._sub_agent(k),))) for k in range(rng.randint(2, 4)))
            answer = _tokens(rng, rng.randint(*t.answer_tokens))
            think_s = 0.0 if n == 0 else t.think_s * math.exp(rng.gauss(0.0, THINK_SIGMA))
            yield self._turn(think_s, self._said, answer, beside)
            self._said = np.concatenate([self._said, answer, _tokens(rng, self._scaled(self._growth()))])

    def _sub_agent(self, number: int) -> Turn:
        task = _tokens(self._rng, self._scaled(self._growth()))
        answer = _tokens(self._rng, self._rng.randint(*self._traffic.answer_tokens))
        return self._turn(0.0, np.concatenate([self._said, task]), answer, ())

    def _turn(self, think_s: float, said: U32, answer: U32, beside: tuple[Flow, ...]) -> Turn:
        def make(now_s: float) -> Ask:
            t = self._traffic
            space = next((s for s in t.namespaces if s.tenant == self._tenant and s.from_s <= now_s < s.until_s), None)
            prompt = np.concatenate([self._head(now_s), self._system, said])
            lora, salt = (None, None) if space is None else (space.lora, space.salt)
            return ask_of_tokens(
                prompt, answer, t.block_size, t.pool, lora=lora, salt=salt, template=self._template, tenant=self._tenant,
                route=self._template, session_id=self._id,
            )  # fmt: skip

        return Turn(think_s, make, beside)

    def _head(self, now_s: float) -> U32:
        for stamp in self._traffic.stamps:
            if stamp.template == self._template and stamp.from_s <= now_s < stamp.until_s:
                rng = random.Random(f"{now_s:.3f}")
                return _tokens(rng, stamp.width or rng.randint(3, 12))
        return np.zeros(0, np.uint32)

    def _growth(self) -> float:
        return 655 * math.exp(self._rng.gauss(0.0, GROWTH_SIGMA))

    def _scaled(self, tokens: float) -> int:
        return max(1, round(tokens * self._traffic.scale))


def _tokens(rng: random.Random, n: int) -> U32:
    return np.frombuffer(rng.randbytes(4 * n), np.uint32) & np.uint32((1 << 17) - 1)
