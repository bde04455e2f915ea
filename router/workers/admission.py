"""How many requests of a pool may be at its workers at once, and how many may wait here for that.

    arrive -> place free and nobody waits ----------------------------> at a worker -> leave -> the place goes to who waits longest
           -> else wait, first come first served, at most max_wait_s --^
           -> max_waiting wait already, or waited too long: QueueFull -> 429 with Retry-After

Engines queue well, and a router's queue hides load from them, so by default there is no limit here. One is for engines that break under
too much, and for callers that do better to come again than to wait.

Invariants: nobody overtakes; a place that was handed to a client
who left in the same moment goes on to the next. How many places there are is asked each time (workers come and go), so `look` has to be
called when more may have appeared.

Retry-After is the time in which those who wait now would all get a place, at the rate at which places came free lately (1 to 60 s); 1 s
when nothing came free yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable

_RATE_OVER_S = 30.0
_LONGEST_RETRY_S = 60


class QueueFull(Exception):  # noqa: N818 - a value, named for what it is
    """No place and none to wait at. retry_after_s: whole seconds; waited_s: how long it waited in vain."""

    def __init__(self, text: str, retry_after_s: int, waited_s: float) -> None:
        super().__init__(text)
        self.retry_after_s, self.waited_s = retry_after_s, waited_s


class Admission:
    """One pool's. places: how many requests may be at workers now, or None for no limit. For one event loop."""

    def __init__(
        self, places: Callable[[], int | None], max_waiting: int, max_wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._places, self._max_waiting, self._max_wait_s, self._clock = places, max_waiting, max_wait_s, clock
        self._queue: deque[asyncio.Future[None]] = deque()
        self.inside = 0
        self.refused_full = 0
        self.refused_waited = 0
        self.waited = 0
        self.waited_s = 0.0
        self._freed = 0.0  # places that came free, older ones counting less
        self._freed_s = clock()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def enter(self) -> float:
        """Takes a place, which `leave` must give back. Returns how long that took, in seconds. Raises QueueFull; cancelled, it has none."""
        if not self._queue and self._free():
            self.inside += 1
            return 0.0
        return await self._wait()

    def leave(self) -> None:
        self.inside -= 1
        if self._queue or self._places() is not None:
            self._fade()
            self._freed += 1
            self.look()

    def look(self) -> None:
        """Hands free places to those who wait longest."""
        while self._queue and self._free():
            waiter = self._queue.popleft()
            if not waiter.done():  # else its client has just left
                self.inside += 1
                waiter.set_result(None)

    def retry_after_s(self) -> int:
        self._fade()
        if self._freed < 1:
            return 1
        return max(1, min(_LONGEST_RETRY_S, math.ceil((len(self._queue) + 1) / (self._freed / _RATE_OVER_S))))

    def _free(self) -> bool:
        places = self._places()
        return places is None or self.inside < places

    async def _wait(self) -> float:
        if len(self._queue) >= self._max_waiting:
            self.refused_full += 1
            raise QueueFull(f"{self.inside} requests are at the workers and {len(self._queue)} wait", self.retry_after_s(), 0.0)
        since_s, waiter = self._clock(), asyncio.get_running_loop().create_future()
        self._queue.append(waiter)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await waiter
        except BaseException as e:
            has_place = waiter.done() and not waiter.cancelled()  # it came in the same moment
            if has_place and isinstance(e, TimeoutError):
                return self._count(self._clock() - since_s)
            if has_place:
                self.inside -= 1
                self.look()
            else:
                with contextlib.suppress(ValueError):  # `look` has taken it out
                    self._queue.remove(waiter)
            if not isinstance(e, TimeoutError):
                raise
            self.refused_waited += 1
            text = f"no worker had a place within {self._max_wait_s:g} s"
            raise QueueFull(text, self.retry_after_s(), self._clock() - since_s) from None
        return self._count(self._clock() - since_s)

    def _count(self, waited_s: float) -> float:
        self.waited += 1
        self.waited_s += waited_s
        return waited_s

    def _fade(self) -> None:
        """`_freed` is a sum with an exponential memory of `_RATE_OVER_S`, so `_freed / _RATE_OVER_S` is a rate."""
        now_s = self._clock()
        self._freed *= math.exp((self._freed_s - now_s) / _RATE_OVER_S)
        self._freed_s = now_s
