"""What other routers and direct clients run on each worker, told from the engine's own load. Pure, time is an argument.

The engine's metrics (worker-load: requests running and waiting) count everybody's requests, ours too, and are a second old. Our own flights
are known exactly and now. So they are not added; the rule:

    others(w)  = max(0, running + waiting - the most that we had in flight at w around the reading)
    of these, the engine's share of waiting waits: it adds to the queue, each as long as our own mean prefill
    the rest runs: it adds to the requests decoding

"Around the reading" is `WINDOW_S` to both sides, by buckets that hold the largest number seen, since the reading's time is another
machine's. So what we sent is never counted twice; a few requests of others can be missed while our own number falls quickly. A reading
counts for `fresh_s`; after that nothing is known of others, and nothing is assumed. Because our own flights are always in, at once, many
decisions between two readings do not herd.

What replicas of this router tell of their flights belongs to "we" (pass it in `in_flight`).
"""

from __future__ import annotations

from collections import deque

import numpy as np

from router.policy.cost import F64, I64

BUCKET_S = 0.1
WINDOW_S = 0.25
_KEPT_S = 10.0
_MEAN_WEIGHT = 0.02


class OthersLoad:
    """By target number of one pool. For one thread; time is monotonic seconds."""

    def __init__(self, fresh_s: float) -> None:
        self.fresh_s = fresh_s
        self._running = np.zeros(0)
        self._waiting = np.zeros(0)
        self._read_s = np.full(0, -np.inf)
        self._newest_s = -np.inf
        self._buckets: deque[tuple[int, I64]] = deque(maxlen=int(_KEPT_S / BUCKET_S))
        self._mean_prefill_s: float | None = None

    def note(self, in_flight: I64, now_s: float) -> None:
        """Our own flights now; call it at each decision, when a replica tells of one more, and when readings come."""
        number = int(now_s / BUCKET_S)
        if self._buckets and self._buckets[-1][0] == number and len(self._buckets[-1][1]) == len(in_flight):
            np.maximum(self._buckets[-1][1], in_flight, out=self._buckets[-1][1])
        else:
            self._buckets.append((number, in_flight.copy()))

    def sent(self, target: int, in_flight: int, prefill_s: float, now_s: float) -> None:
        """A request has just gone there; in_flight: with it."""
        if self._buckets and target < len(self._buckets[-1][1]):
            newest = self._buckets[-1][1]
            newest[target] = max(newest[target], in_flight)
        mean_s = self._mean_prefill_s
        self._mean_prefill_s = prefill_s if mean_s is None else mean_s + _MEAN_WEIGHT * (prefill_s - mean_s)

    def hear(self, target: int, running: float, waiting: float, read_s: float) -> None:
        """A reading of the engine, taken at read_s (monotonic seconds of ours)."""
        if target >= len(self._running):
            more = target + 1 - len(self._running)
            self._running = np.append(self._running, np.zeros(more))
            self._waiting = np.append(self._waiting, np.zeros(more))
            self._read_s = np.append(self._read_s, np.full(more, -np.inf))
        if read_s < self._read_s[target]:
            return
        total = running + waiting
        others = max(0.0, total - self._own(target, read_s))
        self._waiting[target] = others * waiting / total if total > 0 else 0.0
        self._running[target] = others - self._waiting[target]
        self._read_s[target] = read_s
        self._newest_s = max(self._newest_s, read_s)

    def gone(self, target: int) -> None:
        """The target's number is free: what was read does not belong to its next owner."""
        if target < len(self._running):
            self._running[target] = self._waiting[target] = 0.0
            self._read_s[target] = -np.inf

    def load(self, workers: int, now_s: float) -> tuple[F64, F64, F64] | None:
        """Seconds of others' queue, their running requests, all their requests; shape (workers,). None: nothing fresh is known."""
        if now_s - self._newest_s > self.fresh_s:
            return None
        n = min(workers, len(self._running))
        fresh = now_s - self._read_s[:n] <= self.fresh_s
        out = np.zeros((3, workers))
        out[1, :n] = self._running[:n] * fresh
        waiting = self._waiting[:n] * fresh
        out[0, :n] = waiting * (self._mean_prefill_s or 0.0)
        out[2, :n] = out[1, :n] + waiting
        return out[0], out[1], out[2]

    def of(self, target: int, now_s: float) -> float | None:
        """Others' requests there. None: nothing fresh is known."""
        if target >= len(self._read_s) or now_s - self._read_s[target] > self.fresh_s:
            return None
        return float(self._running[target] + self._waiting[target])

    def _own(self, target: int, read_s: float) -> int:
        """The most that we had in flight there around that time: of the buckets in the window, and of the last one before it."""
        first, last = int((read_s - WINDOW_S) / BUCKET_S), int((read_s + WINDOW_S) / BUCKET_S)
        most = 0
        for number, in_flight in reversed(self._buckets):
            if number <= last and target < len(in_flight):
                most = max(most, int(in_flight[target]))
            if number < first:
                break
        return most
