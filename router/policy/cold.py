"""How many uncached tokens a worker that has just joined may be given: a token bucket for each of them. Pure, time is an argument.

An empty worker has no queue, so every cold prompt of the fleet would go there at once, all their prefills would stand in one line, and
what the others were about to share would be computed there again. So a newcomer gets at most `tokens_per_s` uncached tokens a second (and
one prompt beyond: a prompt is taken while anything is left, and what it takes too much is owed).

A worker is new for `new_s` after it joined, and no longer than until it holds half as many blocks as the pool's median worker (Pools tells
which). Who joins a pool that has nobody is not new, as the router's first fleet is not: nobody is warmer there.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from router.policy.cost import F64


class ColdCaps:
    """Buckets by target number. A bucket is full, with one second's tokens, when its worker is met first."""

    def __init__(self, tokens_per_s: float, new_s: float) -> None:
        """tokens_per_s 0: no cap."""
        self.tokens_per_s, self.new_s = tokens_per_s, new_s
        self._left: dict[int, tuple[float, float]] = {}  # tokens left, and when that was
        self._no_caps: F64 = np.empty(0)

    def left(self, workers: int, new: Collection[int], now_s: float) -> F64:
        """Tokens left by target number, shape (workers,), not to be written to; inf for all that are not `new`, whose buckets are
        forgotten."""
        if not new or self.tokens_per_s <= 0:
            self._left = {}
            if len(self._no_caps) != workers:
                self._no_caps = np.full(workers, np.inf)
            return self._no_caps
        out = np.full(workers, np.inf)
        kept: dict[int, tuple[float, float]] = {}
        for target in new:
            kept[target] = self._left.get(target, (self.tokens_per_s, now_s))
            out[target] = self._level(kept[target], now_s)
        self._left = kept
        return out

    def take(self, target: int, tokens: float, now_s: float) -> None:
        """A request with so many uncached tokens goes there. Without effect on workers that are not new."""
        if target in self._left:
            self._left[target] = (self._level(self._left[target], now_s) - tokens, now_s)

    def _level(self, bucket: tuple[float, float], now_s: float) -> float:
        left, at_s = bucket
        return min(self.tokens_per_s, left + (now_s - at_s) * self.tokens_per_s)
