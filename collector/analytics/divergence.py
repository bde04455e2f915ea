"""Where prompts of one kind stop being alike, and what that costs. Fills the table `divergence`.

A request diverged when some of its tokens were computed although their content was known: they stood after another beginning (cause
`diverged`). A conversation that goes on with a new last message did not: the new text is new. Counted are requests by how many tokens they
share with earlier prompts before the first that differs (`diverged_at`), in bins:

    depth 0 .. 15    a bin each
    beyond           eight bins a doubling: 32 to 35, 36 to 39, ... 64 to 71, ...      within 13 %

A bin in which all depths are the same says that one depth: "at token 37", which is how a timestamp in a template shows. Requests whose
depth is not known have a row without one, and so does a kind of which no request diverged: each kind of a window is in the table, with its
denominators `all_requests` and `all_prompt_tokens`, the same in all its rows.

Invariants: within a window and kind, requests add up to those that diverged, diverged_tokens to the tokens of that cause. Pure; equal
input, equal rows. Bounded: `KINDS` kinds a window and `HELD_KINDS` in all open ones (further ones share one without labels) of at most 233
bins, `OPEN_WINDOWS` windows: a collector that catches up reads many windows at once, and counts each on its own.

Rejected: every depth by itself (a client that sends random beginnings has as many as requests), quantiles of depth (the one depth at which
a template breaks is a peak, which quantiles blur).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from collector.analytics.attributed import WINDOW_S, Attributed, Rows, counts_in
from collector.analytics.content_index import ContentIndex, Known, Told
from schemas.causes import Cause
from schemas.tables.losses import DIVERGENCE

__all__ = ["ContentIndex", "Divergence", "Known", "Told", "bin_of"]

KINDS, HELD_KINDS, OPEN_WINDOWS = 1024, 3072, 288
"""A day of windows is open at most; what comes beyond, as of a clock gone wild, counts in the nearest open one."""
_ID_CHARACTERS = 256
_DIVERGED = int(Cause.DIVERGED)
_BYTES_A_BIN, _BYTES_A_KIND = 500, 1000  # Python's own objects, about

Kind = tuple[str | None, str | None, str | None, str | None, str | None]
"""Pool, model, route, tenant, template."""
VARIOUS: Kind = (None, None, None, None, None)


@dataclass(slots=True)
class _Bin:
    """depth: the one that all have, None: several. lost_s NaN: not known of some."""

    depth: int | None
    requests: int = 0
    tokens: int = 0
    lost_s: float = 0.0
    example: str = ""


@dataclass(slots=True, eq=False)
class _Counts:
    """Of one kind. bins by their first depth; -1: not known."""

    requests: int
    prompt_tokens: int
    bins: dict[int, _Bin]


class Divergence:
    """See collector/analytics/attributed.py for what an analysis promises."""

    tables = (DIVERGENCE.name,)

    def __init__(self) -> None:
        self._windows: dict[int, dict[Kind, _Counts]] = {}
        self._kinds = 0
        """Kinds of all open windows."""
        self._closed = 0
        """Windows before this number are closed."""

    def take(self, requests: Sequence[Attributed]) -> None:
        for r in requests:
            kinds = self._windows.setdefault(self._window_of(r.prefill_s), {})
            kind: Kind = (r.pool, r.model, r.route, r.tenant, r.template)
            if kind not in kinds and (len(kinds) >= KINDS or self._kinds >= HELD_KINDS):
                kind = VARIOUS
            counts = kinds.get(kind)
            if counts is None:
                counts = kinds[kind] = _Counts(0, 0, {})
                self._kinds += 1
            counts.requests += 1
            counts.prompt_tokens += r.prompt_tokens
            causes = r.run_causes.tobytes()
            if _DIVERGED not in causes:
                continue
            runs = zip(causes, r.run_tokens.tolist(), r.run_seconds.tolist(), strict=True)
            mine = [(n, run_s) for cause, n, run_s in runs if cause == _DIVERGED and n]
            if not mine:
                continue
            first = -1 if r.diverged_at is None else bin_of(r.diverged_at)[0]
            found = counts.bins.get(first)
            if found is None:
                found = counts.bins[first] = _Bin(r.diverged_at)
            if found.depth != r.diverged_at:
                found.depth = None
            found.requests += 1
            found.tokens += sum(n for n, _ in mine)
            found.lost_s += sum(run_s for _, run_s in mine)
            found.example = r.request_id[:_ID_CHARACTERS]

    def live(self) -> Mapping[str, Rows]:
        return {DIVERGENCE.name: [row for window in sorted(self._windows) for row in self._rows(window)]}

    def close(self, before_s: float) -> Mapping[str, Rows]:
        self._closed = max(self._closed, int(before_s // WINDOW_S))
        rows: Rows = []
        for window in sorted(w for w in self._windows if w < self._closed):
            rows += self._rows(window)
            self._kinds -= len(self._windows.pop(window))
        return {DIVERGENCE.name: rows}

    def save(self) -> Mapping[str, npt.NDArray[Any]]:
        windows = [
            [window, [[kind, c.requests, c.prompt_tokens, [[at, *astuple(b)] for at, b in c.bins.items()]] for kind, c in kinds.items()]]
            for window, kinds in self._windows.items()
        ]
        kept = json.dumps({"closed": self._closed, "windows": windows})
        return {"kept": np.frombuffer(kept.encode(), np.uint8).copy()}

    def load(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        kept = json.loads(saved["kept"].tobytes())
        self._closed = kept["closed"]
        self._windows = {
            window: {
                tuple(kind): _Counts(requests, tokens, {at: _Bin(*values) for at, *values in bins})
                for kind, requests, tokens, bins in kinds
            }
            for window, kinds in kept["windows"]
        }
        self._kinds = sum(map(len, self._windows.values()))

    def held_bytes(self) -> int:
        """About."""
        counts = [c for kinds in self._windows.values() for c in kinds.values()]
        return sum(_BYTES_A_KIND + _BYTES_A_BIN * len(c.bins) for c in counts)

    def _window_of(self, at_s: float) -> int:
        """The window of this time; of one that is closed, or one too many, the open one that is nearest."""
        room = len(self._windows) < OPEN_WINDOWS and self._kinds < HELD_KINDS
        return counts_in(max(self._closed, int(at_s // WINDOW_S)), self._windows, room)

    def _rows(self, window: int) -> Rows:
        rows: Rows = []
        for kind, counts in self._windows[window].items():
            bins = counts.bins or {-1: _Bin(None)}
            for first in sorted(bins):
                b = bins[first]
                low, high = (None, None) if first < 0 else bin_of(first) if b.depth is None else (b.depth, b.depth + 1)
                rows.append(
                    (
                        window * WINDOW_S * 1_000_000, WINDOW_S, *kind, low, high, b.requests, b.tokens, counts.requests,
                        counts.prompt_tokens, None if math.isnan(b.lost_s) else b.lost_s, b.example or None,
                    )
                )  # fmt: skip
        return rows


def bin_of(depth: int) -> tuple[int, int]:
    """The bin of a depth: [from, to)."""
    width = 1 << max(0, depth.bit_length() - 4)
    first = depth // width * width
    return first, first + width
