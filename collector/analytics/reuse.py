"""Reuse curves: which share of their prompts caches of other sizes or lifetimes would have hit, per pool and per worker, window by window.

    request --> its pool as one cache      StackDistances --> ReuseHistogram of (window, pool)
            --> its worker's rank          StackDistances --> ReuseHistogram of (window, pool, worker, rank)
                                                               |
    today's capacity (asked when rows are made) ---------------+--> rows of reuse_curves

What a request counts: all full blocks of its prompt, hit or not, at the time of its prefill; distances reach over everything before, not
only over the window. As an engine does, it can hit whole blocks of all but its last token. Prompts without names (block_size 0) are left
out of both sides of the fraction.

What the curves mean. They are about LRU caches that keep full blocks, never restart, and serve this traffic in this order. A pool's curve
is what one cache of that size would have hit; as much memory on several workers holds copies and hits less. A worker's curve is about the
requests that today's routing sent there: had it been larger, a cache-aware router would have sent it others. Where a worker has several
data-parallel ranks, each has a cache of its own with an equal share of the capacity.
Tiers are taken to be inclusive (what lies on the GPU lies below as well), so GPU+CPU is a cache of the larger one's size.

State is a function of `take` and `close` alone; capacities only pick the points that are read.

Memory: `tracked_blocks` a pool and as many for all its workers together, each at most 49 bytes, and up to 45 % more of them before some
are forgotten: at the default 72 MB for a pool and about as much for its workers; and histograms (reuse_histogram.py). A cache idle for a
day is forgotten; so is the one idle longest when there are more than MAX_POOLS pools or MAX_WORKERS ranks in one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from collector.analytics.attributed import WINDOW_S, Attributed, Rows, counts_in
from collector.analytics.reuse_histogram import ENDLESS, Curve, ReuseHistogram
from collector.analytics.stack_distance import TICKS_PER_S, Scratch, StackDistances

I64 = npt.NDArray[np.int64]

Capacities = Callable[[], Mapping[tuple[str, str | None], Mapping[str, int]]]
"""() -> of each pool (worker None) and worker, usable blocks by tier, the nearest tier first; who is not in it is not known."""

TRACKED_BLOCKS = 2_000_000
MAX_TRACKED = 100_000_000  # positions are 32 bits
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
GRID: I64 = np.round(2.0 ** (8 + np.arange(24) * 2 / 3)).astype(np.int64)
"""Capacities for drawing, blocks: 256 to 10.6 M. The same in every window, so that windows can be added up."""
LIFETIMES_S = (1, 2, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400)
IDLE_S = 86_400.0
MAX_POOLS = 64
MAX_WORKERS = 1024
MIN_SHARE = 256
MAX_OPEN = 64  # windows; requests of clocks gone wild count in the nearest one then

_TICKS: I64 = np.array(LIFETIMES_S, np.int64) * TICKS_PER_S
_Who = tuple[str, str | None, int]
"""Pool, worker (None: the whole pool), rank."""


@dataclass(slots=True)
class _Cache:
    distances: StackDistances
    used_s: float


@dataclass(slots=True)
class _Pool:
    whole: _Cache
    ranks: dict[tuple[str, int], _Cache] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Told:
    """Rows of one pool or worker, and what they were made from."""

    of: tuple[object, ...]
    rows: Rows


class ReuseCurves:
    """capacities: today's; tracked_blocks: see the module."""

    tables = ("reuse_curves",)

    def __init__(self, capacities: Capacities, tracked_blocks: int = TRACKED_BLOCKS) -> None:
        if not MIN_SHARE <= tracked_blocks <= MAX_TRACKED:
            raise ValueError(f"tracked_blocks must be {MIN_SHARE} to {MAX_TRACKED}, got {tracked_blocks}")
        self._capacities = capacities
        self._budget = tracked_blocks
        self._scratch = Scratch()
        self._pools: dict[str, _Pool] = {}
        self._windows: dict[int, dict[_Who, ReuseHistogram]] = {}
        self._closed_s = 0
        self._told: dict[tuple[int, str, str | None], _Told] = {}

    def take(self, requests: Sequence[Attributed]) -> None:
        for r in requests:
            if r.block_size == 0:
                continue
            window = self._windows.setdefault(self._start(r.prefill_s), {})
            deliverable = max(r.prompt_tokens - 1, 0) // r.block_size
            rank = r.rank or 0  # not told: all its requests are one cache's
            pool = self._pool(r.pool)
            for who, cache in (((r.pool, None, 0), pool.whole), ((r.pool, r.worker, rank), self._rank(pool, r.worker, rank))):
                histogram = window.get(who)
                if histogram is None:
                    histogram = window[who] = ReuseHistogram(_TICKS)
                cache.used_s = max(cache.used_s, r.prefill_s)
                cache.distances.use(r.chain, r.prefill_s, r.block_size, histogram, deliverable)
                histogram.demand(r.prompt_tokens, r.blocks)

    def _start(self, prefill_s: float) -> int:
        return counts_in(max(int(prefill_s // WINDOW_S) * WINDOW_S, self._closed_s), self._windows, len(self._windows) < MAX_OPEN)

    def _pool(self, name: str) -> _Pool:
        pool = self._pools.get(name)
        if pool is None:
            if len(self._pools) >= MAX_POOLS:
                del self._pools[min(self._pools, key=lambda p: self._pools[p].whole.used_s)]
            pool = self._pools[name] = _Pool(_Cache(StackDistances(self._budget, self._scratch), 0.0))
        return pool

    def _rank(self, pool: _Pool, worker: str, rank: int) -> _Cache:
        cache = pool.ranks.get((worker, rank))
        if cache is None:
            if len(pool.ranks) >= MAX_WORKERS:
                del pool.ranks[min(pool.ranks, key=lambda w: pool.ranks[w].used_s)]
            cache = pool.ranks[worker, rank] = _Cache(StackDistances(self._budget, self._scratch), 0.0)
            self._share(pool)
        return cache

    def _share(self, pool: _Pool) -> None:
        for cache in pool.ranks.values():
            cache.distances.budget = max(MIN_SHARE, self._budget // len(pool.ranks))

    def live(self) -> Mapping[str, Rows]:
        return {"reuse_curves": self._rows(sorted(self._windows))}

    def close(self, before_s: float) -> Mapping[str, Rows]:
        over = sorted(start for start in self._windows if start + WINDOW_S <= before_s)
        rows = self._rows(over)
        for start in over:
            del self._windows[start]
        self._told = {key: told for key, told in self._told.items() if key[0] in self._windows}
        self._closed_s = max(self._closed_s, int(before_s // WINDOW_S) * WINDOW_S)
        self._forget(before_s - IDLE_S)
        return {"reuse_curves": rows}

    def _forget(self, unused_since_s: float) -> None:
        self._pools = {name: p for name, p in self._pools.items() if p.whole.used_s >= unused_since_s}
        for pool in self._pools.values():
            before = len(pool.ranks)
            pool.ranks = {w: c for w, c in pool.ranks.items() if c.used_s >= unused_since_s}
            if len(pool.ranks) < before:
                self._share(pool)

    def _rows(self, starts: Iterable[int]) -> Rows:
        out: Rows = []
        capacities = self._capacities()
        for start in starts:
            groups: dict[tuple[str, str | None], list[ReuseHistogram]] = {}
            for (pool, worker, _), histogram in self._windows[start].items():
                groups.setdefault((pool, worker), []).append(histogram)
            for pool, worker in sorted(groups, key=lambda g: (g[0], g[1] or "")):
                ranks = groups[pool, worker]
                today = capacities.get((pool, worker), {})
                of = (sum(h.requests for h in ranks), len(ranks), tuple(today.items()))
                told = self._told.get((start, pool, worker))
                if told is None or told.of != of:
                    told = self._told[start, pool, worker] = _Told(of, _curve_rows(start, pool, worker, ranks, today))
                out += told.rows
        return out

    def save(self) -> Mapping[str, npt.NDArray[Any]]:
        pools = {name: [[w, rank] for w, rank in p.ranks] for name, p in self._pools.items()}
        caches = [c for p in self._pools.values() for c in (p.whole, *p.ranks.values())]
        stacks = [c.distances.save() for c in caches]
        windows = [(start, who, h.save()) for start, window in self._windows.items() for who, h in window.items()]
        names = {"pools": pools, "windows": [[start, *who] for start, who, _ in windows]}
        return {
            "names": np.frombuffer(json.dumps(names).encode(), np.uint8),
            "closed_s": np.array([self._closed_s]),
            "used_s": np.array([c.used_s for c in caches], np.float64),
            "caches": np.array([head for head, _, _ in stacks], np.int64).reshape((len(stacks), -1) if stacks else (0, 0)),
            "blocks": np.concatenate([np.empty(0, np.uint64), *(blocks for _, blocks, _ in stacks)]),
            "rests": np.concatenate([np.empty(0, np.uint64), *(rests for _, _, rests in stacks)]),
            "histograms": np.array([head for _, _, (head, _) in windows], np.int64).reshape((len(windows), -1) if windows else (0, 0)),
            "rows": np.concatenate([np.empty((0, 4), np.int64), *(rows for _, _, (_, rows) in windows)]),
            "lengths": np.array([len(rows) for _, _, (_, rows) in windows], np.int64),
        }

    def load(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        names = json.loads(saved["names"].tobytes())
        self._closed_s = int(saved["closed_s"][0])
        caches: list[_Cache] = []
        at = 0
        for head, used_s in zip(saved["caches"], saved["used_s"], strict=True):
            end = at + StackDistances.saved_blocks(head)
            caches.append(
                _Cache(StackDistances.loaded(head, saved["blocks"][at:end], saved["rests"][at:end], self._scratch), float(used_s))
            )
            at = end
        left = iter(caches)
        self._pools = {
            name: _Pool(next(left), {(worker, rank): next(left) for worker, rank in ranks}) for name, ranks in names["pools"].items()
        }
        for pool in self._pools.values():
            pool.whole.distances.budget = self._budget
            self._share(pool)
        self._windows, self._told = {}, {}
        ends = np.cumsum(saved["lengths"])
        for (start, pool_name, worker, rank), head, end, length in zip(
            names["windows"], saved["histograms"], ends, saved["lengths"], strict=True
        ):
            histogram = ReuseHistogram(_TICKS)
            histogram.load(head, saved["rows"][end - length : end])
            self._windows.setdefault(start, {})[pool_name, worker, rank] = histogram

    def held_bytes(self) -> int:
        stacks = (c.distances.held_bytes() for p in self._pools.values() for c in (p.whole, *p.ranks.values()))
        return sum(stacks) + sum(h.held_bytes() for window in self._windows.values() for h in window.values())


def _curve_rows(start: int, pool: str, worker: str | None, ranks: Sequence[ReuseHistogram], today: Mapping[str, int]) -> Rows:
    """Rows of one window's curves. ranks: histograms of caches of equal size."""
    points: list[tuple[float | None, str | None, int]] = []
    tiers: list[str] = []
    largest = 0
    for tier, blocks in today.items():
        tiers.append(tier)
        largest = max(largest, blocks)
        points += [(scale, "+".join(tiers), max(1, round(scale * largest))) for scale in SCALES if largest > 0]
    points += [(None, None, int(c)) for c in GRID]
    capacities = np.array([c for _, _, c in points] + [ENDLESS], np.int64)
    tokens, blocks_asked = sum(h.prompt_tokens for h in ranks), sum(h.prompt_blocks for h in ranks)

    def row(
        kind: str, scale: float | None, tier: str | None, size: int | None, ttl_s: float | None, c: Curve, i: int
    ) -> tuple[object, ...]:
        method = "sampled" if c.sampled[i] else "rounded" if c.rounded[i] else "exact"
        error = float(c.error_blocks[i]) / blocks_asked if blocks_asked else 0.0
        hit_tokens, hit_blocks = (
            min(float(c.tokens[i]), tokens),
            min(float(c.blocks[i]), blocks_asked),
        )  # of few requests a sample can say more
        who = (start * 1_000_000, WINDOW_S, pool, worker)
        return *who, kind, scale, tier, size, ttl_s, hit_tokens, tokens, hit_blocks, blocks_asked, method, error

    by_size = _added([h.curve(capacities // len(ranks)) for h in ranks])
    by_age = _added([h.ttl_curve() for h in ranks])
    out = [row("capacity", scale, tier, size, None, by_size, i) for i, (scale, tier, size) in enumerate(points)]
    out += [row("ttl", None, None, None, float(s), by_age, i) for i, s in enumerate(LIFETIMES_S)]
    out.append(row("ideal", None, None, None, None, by_size, len(points)))
    return out


def _added(curves: Sequence[Curve]) -> Curve:
    if len(curves) == 1:
        return curves[0]
    return Curve(
        np.sum([c.blocks for c in curves], axis=0),
        np.sum([c.tokens for c in curves], axis=0),
        np.sum([c.error_blocks for c in curves], axis=0),
        np.any([c.sampled for c in curves], axis=0),
        np.any([c.rounded for c in curves], axis=0),
    )
