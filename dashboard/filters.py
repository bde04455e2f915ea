"""What the viewer looks at: a time range and names, kept in the URL, so that every view is a link.

`range` is relative to the watermark of the data, not to the clock: a stopped collector leaves the last hour it knew on the screen, and all
viewers of one published file ask the same questions, which are then answered once. `from` and `to` (UTC) fix the range instead.
Anything wrong in a URL falls back to the default; a link must never break a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

RANGES_S: dict[str, int] = {"5m": 300, "15m": 900, "1h": 3600, "6h": 21_600, "24h": 86_400, "7d": 604_800}
DEFAULT_RANGE = "1h"
BINS_S = (10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14_400, 86_400)
MOST_BINS = 72
LEAST_S = 120
MOST_NAME_CHARS = 512

_NAMES = ("pool", "model", "route", "worker")


@dataclass(frozen=True, slots=True)
class Window:
    """[since, until) in UTC without tzinfo, as the tables have it; bin_s divides charts."""

    since: datetime
    until: datetime
    bin_s: int

    @property
    def length_s(self) -> float:
        return (self.until - self.since).total_seconds()

    def coarser(self, times: int) -> Window:
        """The same range in bins `times` wider, or a little more."""
        return Window(self.since, self.until, bin_of(self.length_s * times))

    def from_data(self, first: datetime | None) -> Window:
        """The range without the time before the first data: a fleet that just started is not a dot at the right edge."""
        if first is None or first <= self.since:
            return self
        since = max(self.since, min(first, self.until - timedelta(seconds=LEAST_S)))
        return Window(since, self.until, bin_of((self.until - since).total_seconds()))

    def before(self) -> Window:
        """The window of the same length just before."""
        return Window(self.since - (self.until - self.since), self.since, self.bin_s)


@dataclass(frozen=True, slots=True)
class Filters:
    range: str = DEFAULT_RANGE
    since: datetime | None = None
    until: datetime | None = None
    pool: str | None = None
    model: str | None = None
    route: str | None = None
    worker: str | None = None

    @classmethod
    def from_url(cls, params: Mapping[str, str]) -> Filters:
        since, until = _time(params.get("from")), _time(params.get("to"))
        if since is None or until is None or since >= until:
            since = until = None
        chosen = params.get("range", DEFAULT_RANGE)
        names = {name: params.get(name, "")[:MOST_NAME_CHARS] or None for name in _NAMES}
        return cls(chosen if chosen in RANGES_S else DEFAULT_RANGE, since, until, **names)

    def to_url(self) -> dict[str, str]:
        """Only what differs from the default; `from_url` gives the same filters again."""
        out: dict[str, str] = {}
        if self.since is not None and self.until is not None:
            out |= {"from": _text(self.since), "to": _text(self.until)}
        elif self.range != DEFAULT_RANGE:
            out["range"] = self.range
        return out | {name: value for name in _NAMES if (value := getattr(self, name))}

    def without_names(self) -> Filters:
        return replace(self, pool=None, model=None, route=None, worker=None)

    @property
    def fixed(self) -> bool:
        return self.since is not None

    @property
    def of_requests(self) -> bool:
        """Model and route are known of requests only, not of a worker's counters."""
        return self.model is not None or self.route is not None

    def window(self, watermark: datetime | None) -> Window:
        """The range in UTC. Without data it ends now, and is empty. The end is the end of the watermark's own 10 s bucket."""
        if self.since is not None and self.until is not None:
            since, until = self.since, self.until
        else:
            end = watermark or datetime.now(UTC).replace(tzinfo=None)
            until = _floor(end, BINS_S[0]) + timedelta(seconds=BINS_S[0])
            since = until - timedelta(seconds=RANGES_S[self.range])
        return Window(since, until, bin_of((until - since).total_seconds()))


def bin_of(length_s: float) -> int:
    """The narrowest bin, seconds, that divides a range into no more than MOST_BINS; beyond the list, whole days."""
    day_s = BINS_S[-1]
    return next((b for b in BINS_S if length_s / b <= MOST_BINS), day_s * math.ceil(length_s / day_s / MOST_BINS))


def _floor(at: datetime, step_s: int) -> datetime:
    midnight = at.replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight + timedelta(seconds=(at - midnight).total_seconds() // step_s * step_s)


def _time(text: str | None) -> datetime | None:
    try:
        at = datetime.fromisoformat(text or "")
        if at.tzinfo is not None:
            at = at.astimezone(UTC).replace(tzinfo=None)
    except (ValueError, OverflowError):
        return None
    return at if 1970 <= at.year <= 2200 else None


def _text(at: datetime) -> str:
    return at.isoformat(timespec="seconds") + "Z"
