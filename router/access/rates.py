"""How much of the fleet one key may use: requests a minute, prompt tokens a minute, requests at once. Pure.

Token buckets: a minute's worth at most is saved up, and it comes back evenly.

    requests   a request takes 1, and needs a whole 1
    tokens     a prompt takes its length, known only after it was read; it needs a balance above 0 and may overdraw it

So the longest prompt gets in too, and pays by waiting: over any stretch a key gets its rate, one saved minute and one prompt more at most.
Nothing is given back, whatever became of the request: a prompt that fails has been computed, too. Rejected: fixed windows (twice the rate
at their edge), a list of past requests (memory with the rate), refusing what is longer than a minute's worth (it could never be asked).

Time is monotonic seconds, passed in; a step back counts as no time. An account is three numbers and a count, one a key of the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

IN_FLIGHT_RETRY_S = 1.0
"""Nobody knows when one of the key's own requests ends."""

Limited = Literal["requests", "tokens", "in_flight"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one key. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_in_flight: int | None = None


@dataclass(frozen=True, slots=True)
class Denied:
    """Over a limit. retry_after_s: until the account can pay for it, if nobody else spends."""

    what: Limited
    retry_after_s: float


@dataclass(slots=True)
class _Bucket:
    """balance None: full, whatever the capacity."""

    balance: float | None = None
    at_s: float = 0.0

    def settle(self, per_minute: int, now_s: float) -> float:
        """The balance now."""
        if self.balance is None:
            self.balance, self.at_s = float(per_minute), now_s
        elapsed_s = max(0.0, now_s - self.at_s)
        self.balance = min(float(per_minute), self.balance + elapsed_s * per_minute / 60)
        self.at_s = max(self.at_s, now_s)
        return self.balance

    def take(self, amount: float) -> None:
        assert self.balance is not None
        self.balance -= amount


@dataclass(slots=True)
class Account:
    """What one key has spent. For one thread at a time; the limits come with each call, since they may change while the process runs."""

    in_flight: int = 0
    _requests: _Bucket = field(default_factory=_Bucket)
    _tokens: _Bucket = field(default_factory=_Bucket)

    def admit(self, limits: Limits, now_s: float) -> Denied | None:
        """Takes one request and one place, or nothing. After None `leave` must follow, once."""
        if limits.max_in_flight is not None and self.in_flight >= limits.max_in_flight:
            return Denied("in_flight", IN_FLIGHT_RETRY_S)
        denied = self._has_tokens(limits, now_s)
        if limits.requests_per_minute is not None:
            balance = self._requests.settle(limits.requests_per_minute, now_s)
            if balance < 1:
                return Denied("requests", (1 - balance) * 60 / limits.requests_per_minute)
            if denied is None:
                self._requests.take(1)
        if denied is None:
            self.in_flight += 1
        return denied

    def spend(self, limits: Limits, prompt_tokens: int, now_s: float) -> Denied | None:
        """Takes the tokens of an admitted request's prompt, or nothing."""
        denied = self._has_tokens(limits, now_s)
        if denied is None and limits.tokens_per_minute is not None:
            self._tokens.take(prompt_tokens)
        return denied

    def leave(self) -> None:
        """An admitted request is over."""
        self.in_flight -= 1

    def left(self, limits: Limits, now_s: float) -> tuple[float | None, float | None]:
        """Requests and tokens left now; None where there is no limit."""
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        return (
            None if requests is None else self._requests.settle(requests, now_s),
            None if tokens is None else self._tokens.settle(tokens, now_s),
        )

    def _has_tokens(self, limits: Limits, now_s: float) -> Denied | None:
        if limits.tokens_per_minute is None:
            return None
        balance = self._tokens.settle(limits.tokens_per_minute, now_s)
        return Denied("tokens", max(1e-3, -balance * 60 / limits.tokens_per_minute)) if balance <= 0 else None


def rate_headers(account: Account, limits: Limits, now_s: float) -> list[tuple[bytes, bytes]]:
    """x-ratelimit-*, as OpenAI's service sends them: the limit, what is left, and the time until nothing is missing."""
    out: list[tuple[bytes, bytes]] = []
    requests, tokens = account.left(limits, now_s)
    for name, limit, left in ((b"requests", limits.requests_per_minute, requests), (b"tokens", limits.tokens_per_minute, tokens)):
        if limit is not None and left is not None:
            out += [
                (b"x-ratelimit-limit-" + name, b"%d" % limit),
                (b"x-ratelimit-remaining-" + name, b"%d" % max(0, int(left))),
                (b"x-ratelimit-reset-" + name, b"%.3fs" % ((limit - left) * 60 / limit)),
            ]
    return out
