"""What this router sent to each target of a pool and is not answered yet.

    admit -> waiting (its predicted prefill counts as queue) -> first token -> decoding -> release

Queue seconds of a target are the predicted prefill seconds of the waiting requests, less what has passed since the oldest of them became
the oldest. An answer that does not stream shows no first token: its prefill counts as done when its predicted seconds are over.

Invariant: every admitted flight is released exactly once, whatever happens (`release` is idempotent), and then all of a target's numbers
are 0 again; they are kept as arrays, so that the cost model reads them without a loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from router.policy.cost import F64, I64


@dataclass(slots=True, eq=False)
class Flight:
    """One request on its way to or at a target."""

    target: int
    prefill_s: float
    streams: bool
    of_replica: bool = False
    waiting: bool = True
    released: bool = False


class PoolLoad:
    """Requests on their way, by target. For one thread at a time; time is monotonic seconds."""

    def __init__(self, targets: int) -> None:
        self.in_flight: I64 = np.zeros(targets, np.int64)
        self.decoding: I64 = np.zeros(targets, np.int64)
        self.of_replicas: I64 = np.zeros(targets, np.int64)
        """Those of in_flight that other replicas have sent."""
        self._waiting_s: F64 = np.zeros(targets)
        self._oldest_since: F64 = np.zeros(targets)
        self._oldest_s: F64 = np.zeros(targets)
        self._waiting: list[dict[Flight, None]] = [{} for _ in range(targets)]  # in order of admission
        self._unstreamed = 0

    def grow(self, targets: int) -> None:
        """Makes room for targets 0 .. targets - 1; what is on its way stays booked."""
        more = targets - len(self.in_flight)
        if more <= 0:
            return
        self.in_flight, self.decoding, self.of_replicas = (
            np.concatenate([a, np.zeros(more, np.int64)]) for a in (self.in_flight, self.decoding, self.of_replicas)
        )
        self._waiting_s, self._oldest_since, self._oldest_s = (
            np.concatenate([a, np.zeros(more)]) for a in (self._waiting_s, self._oldest_since, self._oldest_s)
        )
        self._waiting += [{} for _ in range(more)]

    def admit(self, target: int, prefill_s: float, streams: bool, now_s: float, of_replica: bool = False) -> Flight:
        flight = Flight(target, prefill_s, streams, of_replica)
        self.in_flight[target] += 1
        self.of_replicas[target] += of_replica
        self._waiting[target][flight] = None
        self._waiting_s[target] += prefill_s
        self._unstreamed += not streams
        if len(self._waiting[target]) == 1:
            self._oldest_since[target], self._oldest_s[target] = now_s, prefill_s
        return flight

    def first_token(self, flight: Flight, now_s: float) -> None:
        if flight.waiting and not flight.released:
            self._leave_queue(flight, now_s)
            self.decoding[flight.target] += 1

    def release(self, flight: Flight, now_s: float) -> None:
        if flight.released:
            return
        if flight.waiting:
            self._leave_queue(flight, now_s)
        else:
            self.decoding[flight.target] -= 1
        flight.released = True
        self.in_flight[flight.target] -= 1
        self.of_replicas[flight.target] -= flight.of_replica

    def own(self) -> I64:
        """This router's requests, without those of its replicas, shape (targets,)."""
        return self.in_flight - self.of_replicas

    def queue_s(self, now_s: float) -> F64:
        """Predicted wait for a new request's prefill, shape (targets,)."""
        if self._unstreamed:
            self._settle(now_s)
        spent = np.minimum(now_s - self._oldest_since, self._oldest_s)
        return np.maximum(self._waiting_s - spent, 0.0)

    def _leave_queue(self, flight: Flight, now_s: float) -> None:
        queue, t = self._waiting[flight.target], flight.target
        was_oldest = next(iter(queue)) is flight
        del queue[flight]
        flight.waiting = False
        self._unstreamed -= not flight.streams
        if not queue:
            self._waiting_s[t] = self._oldest_s[t] = 0.0
            return
        self._waiting_s[t] -= flight.prefill_s
        if was_oldest:
            self._oldest_since[t], self._oldest_s[t] = now_s, next(iter(queue)).prefill_s

    def _settle(self, now_s: float) -> None:
        for t, queue in enumerate(self._waiting):
            while queue:
                oldest = next(iter(queue))
                done_s = float(self._oldest_since[t]) + oldest.prefill_s
                if oldest.streams or done_s > now_s:
                    break
                self.first_token(oldest, done_s)
