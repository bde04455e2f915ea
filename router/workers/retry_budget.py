"""How many requests may be tried again: a share of those that come, and a burst.

    each request earns `ratio` of a retry; a retry takes one; at most `burst` are kept, and so many there are at the start

A worker that dies with n requests waiting on it makes n retries at once, which is what retries are for, so the burst is large. When
everything fails, retries would multiply the load by `attempts` just then: beyond the burst they add `ratio` to it and no more.
"""

from __future__ import annotations


class RetryBudget:
    """One pool's. ratio 0 and burst 0: no retries."""

    def __init__(self, ratio: float, burst: float) -> None:
        self._ratio, self._burst = ratio, burst
        self.left = burst
        self.taken = 0
        self.refused = 0

    def earn(self) -> None:
        """A request came."""
        self.left = min(self._burst, self.left + self._ratio)

    def take(self) -> bool:
        """Whether a request may be tried once more; then it is counted."""
        if self.left < 1:
            self.refused += 1
            return False
        self.left -= 1
        self.taken += 1
        return True
