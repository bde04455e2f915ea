"""Which targets may be sent requests, as far as their answers and health checks have shown: a breaker for each engine process.

All ranks of one process live and die together, so they share one. `up` is the breakers' word as an array by target number, for the
decision; it is kept current by what is told here and by `up_at`, which lets time pass. A change is logged once, with its reason, and
counted. Only what a worker did is known here; who is drained or gone is the pool's (pools.py).
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from router.policy.cost import Mask
from router.workers.breaker import BACKING_OFF, FAILURES, UP, Breaker, BreakerRules
from router.workers.targets import Target
from schemas.fleet import without_credentials

log = logging.getLogger(__name__)


class Health:
    """One pool's. For one thread at a time; `clock` gives monotonic seconds."""

    def __init__(
        self,
        targets: tuple[Target, ...],
        rules: BreakerRules | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._rules, self._clock, self._rng = rules or BreakerRules(), clock, rng or random.Random()
        self._breakers: dict[str, Breaker] = {}  # by address
        self._by_target: list[Breaker] = []
        self._numbers: dict[str, list[int]] = {}
        self._troubled: set[str] = set()  # addresses whose breaker may forbid something
        self._shown: dict[str, str] = {}  # the state that was told last
        self.up: Mask = np.zeros(0, np.bool_)
        self.changes: Counter[tuple[str, str]] = Counter()
        """How often a worker (name) came into a state (see `state`). A worker that is gone keeps its counts."""
        self.went_down: Callable[[list[int]], None] = lambda targets: None
        """Told the targets of a process that is not to be sent requests any more: its cache may be gone."""
        self.set_targets(targets)

    def set_targets(self, targets: tuple[Target, ...], present: Mask | None = None) -> None:
        """The pool's targets are these; of those that were there before, everything is still known. Not present: never up."""
        here = np.ones(len(targets), np.bool_) if present is None else present
        self._targets = targets
        self._by_target = [self._breakers.get(t.url) or self._breakers.setdefault(t.url, Breaker(self._rules, self._rng)) for t in targets]
        self._numbers = {}
        for t in targets:
            if here[t.number]:
                self._numbers.setdefault(t.url, []).append(t.number)
        self._breakers = {t.url: b for t, b in zip(targets, self._by_target, strict=True)}
        self._shown = {url: state for url, state in self._shown.items() if url in self._numbers}
        self.up = here.copy()
        now_s = self._clock()
        self._troubled = {url for url in self._numbers if not self._breakers[url].pristine(now_s)}
        for url in tuple(self._troubled):
            self._show(url, now_s, "its time is over" if url in self._shown else "as when it left")

    def up_at(self, now_s: float) -> Mask:
        """Who may be sent a request now, shape (targets,). Not a copy."""
        for url in tuple(self._troubled):
            self._show(url, now_s, "its time is over")
        return self.up

    def sent(self, target: int) -> None:
        """A request goes there now."""
        if self._troubled:
            url = self._targets[target].url
            if url in self._troubled:
                now_s = self._clock()
                self._by_target[target].sent(now_s)
                self._show(url, now_s, "a trial is on its way")

    def answered(self, target: int) -> None:
        """The first byte of an answer came, whatever its status; a failing one is told by `failed` instead."""
        now_s = self._clock()
        self._by_target[target].answered(now_s)
        self._changed(target, now_s, "it answers")

    def refused(self, target: int) -> None:
        """No connection."""
        now_s = self._clock()
        self._by_target[target].refused(now_s)
        self._changed(target, now_s, "no connection")

    def broke(self, target: int) -> None:
        """Before the first byte the connection ended, was silent for too long, or brought what is no HTTP: perhaps an old connection that
        the worker had closed, perhaps the worker died or hangs."""
        now_s = self._clock()
        self._by_target[target].broke(now_s)
        self._changed(target, now_s, "no first byte")

    def failed(self, target: int, status: int, retry_after_s: float | None = None) -> None:
        """An answer with a status of 400 or more. 429 and 503 that say when to come again are obeyed, other 4xx are answers like any."""
        now_s, breaker = self._clock(), self._by_target[target]
        if status in (429, 503) and retry_after_s is not None:
            breaker.asked_to_wait(retry_after_s, now_s)
        elif status in FAILURES:
            breaker.failed(now_s)
        else:
            breaker.answered(now_s)
        self._changed(target, now_s, f"status {status}")

    def health_answered(self, url: str) -> None:
        breaker, now_s = self._breakers.get(url), self._clock()
        if breaker is not None:
            breaker.health_answered(now_s)
            self._watch(url, now_s, "its /health answers")

    def health_failed(self, url: str, asked_s: float, silent: bool, text: str) -> None:
        """asked_s: when it was asked. silent: no answer in time. text: what was wrong."""
        breaker, now_s = self._breakers.get(url), self._clock()
        if breaker is not None:
            breaker.health_failed(now_s, asked_s, silent)
            self._watch(url, now_s, text)

    def urls(self) -> tuple[str, ...]:
        """Addresses of all processes that belong to the pool."""
        return tuple(self._numbers)

    def down_urls(self) -> set[str]:
        """Those whose breaker is not closed, or that are not reachable."""
        return {url for url in self._troubled if not self._breakers[url].closed}

    def state(self, target: int, now_s: float) -> str:
        """One of breaker.STATES."""
        return self._by_target[target].state(now_s)

    def _changed(self, target: int, now_s: float, why: str) -> None:
        self._watch(self._targets[target].url, now_s, why)

    def _watch(self, url: str, now_s: float, why: str) -> None:
        if url in self._troubled or not self._breakers[url].pristine(now_s):
            self._troubled.add(url)
            self._show(url, now_s, why)

    def _show(self, url: str, now_s: float, why: str) -> None:
        """Writes a breaker's word into `up`, and tells a change."""
        breaker, numbers = self._breakers[url], self._numbers.get(url)
        allowed = breaker.allows(now_s)
        state = breaker.state(now_s)
        if numbers is None:  # gone: what was on its way there still ends
            self._troubled.discard(url)
            return
        for number in numbers:
            self.up[number] = allowed
        if (before := self._shown.get(url, UP)) != state:
            self._shown[url] = state
            worker = self._targets[numbers[0]].worker
            self.changes[worker, state] += 1
            level = logging.INFO if BACKING_OFF in (before, state) else logging.WARNING
            log.log(level, "worker %s (%s) is %s, no longer %s: %s", worker, without_credentials(url), state, before, why)
            if before == UP and state != BACKING_OFF:
                self.went_down(numbers)
        if breaker.pristine(now_s):
            self._troubled.discard(url)


def retry_after_s(value: str | None) -> float | None:
    """A Retry-After header in seconds; None for none, for a date, and for what is neither."""
    return float(value) if value is not None and value.isascii() and value.isdecimal() else None
