"""Whether one engine process may be sent requests: what its answers and its /health say of it. Pure: time and randomness are arguments.

Two things are kept apart, since they are mended differently:

    reachable   False after a refused connection, or after `unhealthy_after` failed health checks in a row; True again at the first
                health check that answers. A process that is gone costs no request while it is away.
    circuit     of what requests met, for processes whose /health answers while they don't:

        CLOSED --- failures in a row, or a window with mostly 5xx ---> OPEN
        OPEN --- its time is over, or /health answers again after it failed ---> HALF_OPEN
        HALF_OPEN --- a trial is answered ---> CLOSED          HALF_OPEN --- a trial fails ---> OPEN, twice as long
        OPEN --- a request that was sent all the same is answered ---> CLOSED

OPEN lasts `open_s`, doubled each time that it follows the last one soon, at most `longest_open_s`, times 0.5 to 1 at random so that
routers do not all come back in one moment. HALF_OPEN lets a request through, and the next one after the doubled time, rather than when
that one ends: a hung worker then costs few requests though each of them waits for minutes, a trial whose client leaves needs no
book-keeping, and nothing can be left out for ever.

What counts as a failure: no connection, a connection that ends or is silent for too long before the first byte, garbage, and of statuses
500, 502, 503, 504. Two in a row open it; statuses only when `failing_at_least` came in a row, or within the window and were
`failing_share` of its answers, because one prompt can make an engine say 500. 4xx is an answer. 429 and 503 with Retry-After are an
engine that knows what it does: it gets nothing for as long as it says, at most `longest_back_off_s`, and nothing is held against it.

A slow worker is not a dead one: any first byte ends a row of failures, and a health check that was not answered in time does not count
when a request was answered meanwhile.

Nothing but its own /health keeps a process out for ever: one whose health checks fail, or are silent while it is asked nothing, stays out
until one answers (or nobody else is left). Rejected: to shut it out until its /health answers, whatever it did. A hung scheduler answers
/health, so it would be let in again at once, with all requests.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from enum import Enum


class Circuit(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


UP, BACKING_OFF, UNREACHABLE = "up", "backing_off", "unreachable"
STATES = (UP, BACKING_OFF, UNREACHABLE, "open", "half_open")

FAILURES = frozenset((500, 502, 503, 504))
"""Statuses that count against a worker."""


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """See the module. Seconds, counts and shares."""

    failures_in_a_row: int = 2
    failing_at_least: int = 5
    failing_share: float = 0.5
    window_s: float = 10.0
    open_s: float = 1.0
    longest_open_s: float = 30.0
    unhealthy_after: int = 3
    longest_back_off_s: float = 5.0


@dataclass(slots=True)
class Breaker:
    """One engine process. now_s: monotonic seconds, never smaller than before."""

    rules: BreakerRules
    rng: random.Random
    circuit: Circuit = Circuit.CLOSED
    reachable: bool = True
    back_until_s: float = -math.inf
    _in_a_row: int = 0
    _health_in_a_row: int = 0
    _openings: int = 0  # and trials since; each doubles the time
    _until_s: float = -math.inf  # OPEN until then; HALF_OPEN: no further trial until then
    _closed_s: float = -math.inf
    _tried: bool = False  # a request was sent since it opened
    _heard_s: float = -math.inf
    _bad_in_a_row: int = 0
    _good: float = 0.0  # answers of the window, older ones counting less
    _bad: float = 0.0
    _counted_s: float = -math.inf

    def allows(self, now_s: float) -> bool:
        """Whether a request may be sent there. Turns OPEN into HALF_OPEN when its time is over."""
        if not self.reachable or now_s < self.back_until_s:
            return False
        if self.circuit is Circuit.CLOSED:
            return True
        if now_s < self._until_s:
            return False
        if self.circuit is Circuit.OPEN:
            self.circuit = Circuit.HALF_OPEN
        return True

    @property
    def closed(self) -> bool:
        """Requests may go there, but for a short back-off."""
        return self.reachable and self.circuit is Circuit.CLOSED

    def state(self, now_s: float) -> str:
        """One of STATES, for people."""
        if not self.reachable:
            return UNREACHABLE
        if self.circuit is not Circuit.CLOSED:
            return str(self.circuit.value)
        return UP if now_s >= self.back_until_s else BACKING_OFF

    def pristine(self, now_s: float) -> bool:
        """Nothing is held against it, so `allows` stays True until something happens."""
        return self.closed and now_s >= self.back_until_s

    def sent(self, now_s: float) -> None:
        """A request goes there; when it is not CLOSED, as a trial."""
        if self.circuit is not Circuit.CLOSED:
            self._tried = True
            if self.circuit is Circuit.HALF_OPEN:
                self._openings += 1
                self._until_s = now_s + self._span_s()

    def answered(self, now_s: float) -> None:
        """The first byte of an answer that is no failure."""
        self._heard_s = now_s
        self._in_a_row = self._bad_in_a_row = 0
        self._fade(now_s)
        self._good += 1
        if self._health_in_a_row < self.rules.unhealthy_after:
            self.reachable = True  # it was refused once, perhaps for a full backlog
        if self.circuit is not Circuit.CLOSED and self._tried:
            self.circuit = Circuit.CLOSED
            self._closed_s, self._good, self._bad = now_s, 0.0, 0.0

    def refused(self, now_s: float) -> None:
        """No connection."""
        self.reachable = False
        self.broke(now_s)

    def broke(self, now_s: float) -> None:
        """No first byte came: the connection ended, was silent for too long, or brought garbage."""
        self._in_a_row += 1
        if self.circuit is Circuit.HALF_OPEN or self._in_a_row >= self.rules.failures_in_a_row:
            self._open(now_s)

    def failed(self, now_s: float) -> None:
        """The process answered with one of FAILURES. It lives, so a row of broken connections ends."""
        self._heard_s = now_s
        self._in_a_row = 0
        self._fade(now_s)
        self._bad += 1
        self._bad_in_a_row += 1
        many = self._bad >= self.rules.failing_at_least and self._bad >= self.rules.failing_share * (self._bad + self._good)
        if self.circuit is Circuit.HALF_OPEN or many or self._bad_in_a_row >= self.rules.failing_at_least:
            self._open(now_s)

    def asked_to_wait(self, retry_after_s: float, now_s: float) -> None:
        """429 or 503 with Retry-After."""
        self._heard_s = now_s
        self._in_a_row = 0
        self.back_until_s = max(self.back_until_s, now_s + min(retry_after_s, self.rules.longest_back_off_s))

    def health_answered(self, now_s: float) -> None:
        self._health_in_a_row = 0
        if not self.reachable:
            self.reachable = True
            if self.circuit is not Circuit.CLOSED:
                self.circuit, self._until_s, self._tried = Circuit.HALF_OPEN, now_s, False

    def health_failed(self, now_s: float, asked_s: float, silent: bool) -> None:
        """asked_s: when the check was sent. silent: it was not answered in time."""
        if silent and self._heard_s >= asked_s:
            return
        self._health_in_a_row += 1
        if self._health_in_a_row >= self.rules.unhealthy_after:
            self.reachable = False

    def _open(self, now_s: float) -> None:
        """While it is OPEN already, more failures (of requests that were on their way, or sent because nobody was left) add nothing."""
        if self.circuit is Circuit.OPEN and now_s < self._until_s:
            return
        if self.circuit is Circuit.CLOSED:  # a trial has been counted when it was sent
            self._openings = 1 if now_s - self._closed_s > self.rules.longest_open_s else self._openings + 1
        self.circuit, self._tried = Circuit.OPEN, False
        self._until_s = now_s + self._span_s()

    def _span_s(self) -> float:
        longest_s = min(self.rules.longest_open_s, self.rules.open_s * 2.0 ** min(self._openings - 1, 60))
        return longest_s * (0.5 + 0.5 * self.rng.random())

    def _fade(self, now_s: float) -> None:
        """Answers count half after `window_s`, so that no list of them is kept."""
        if self._good or self._bad:
            fade = 0.5 ** ((now_s - self._counted_s) / self.rules.window_s)
            self._good, self._bad = self._good * fade, self._bad * fade
        self._counted_s = now_s
