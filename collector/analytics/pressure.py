"""How full the caches are for what they are asked: working set, active sessions, returns, lives of blocks; the table `pressure`.

    told requests --take--> window --> pool and each worker: distinct blocks, gaps from loss to return, growth of sessions
                                  \\-> pool: each session's newest prompt, as a sample of its blocks
                      \\-----touch--> Lives (lives.py), which watches the kv-events
    census (census.py) --hold-------> what is held and what would fit, as of the last look

The alarm figure is active_blocks / capacity_blocks: what must be held to serve the next turn of every session of the window, against what
can be. Beyond 1 blocks go before their next use whatever the policy, and hit rates of all of them fall.

What is exact and what is not, by `Budgets`: distinct blocks are exact up to a budget, then sampled (distinct.py; 0.6 % and 1.1 % with the
defaults for pool and worker). Blocks of active sessions likewise, one sample over all sessions, so that what they share is counted once.
With more sessions than the budget, sessions are sampled by their names, too, and blocks that only one of them has are scaled up: a little
too high where sessions that are left out share them. Quantiles of gaps and growth come from log buckets, within 4.5 %; those of lives are
the sample's own.

Sessions: named ones alone. A worker's are those whose newest prompt of the window went there. Growth is told against the newest request
before it, as long as the session is among the `sessions` last seen; a request that started earlier than that one tells nothing.

Journal and restart: what `take` counts is saved and loaded with the analyses. `Lives` belongs to the kv-events, is saved with the residency
and read again; a use is placed by its time, so that the order of the two does not matter. The census is a look at the present, never
saved: after a restart it is NULL until the next one.

Pure. tests/collector/analytics/naive_pressure.py is the twin that the tests fuzz it against.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from collector.analytics.attributed import F64, WINDOW_S, Attributed, Rows, counts_in
from collector.analytics.census import Held, Scope
from collector.analytics.distinct import Distinct, mix
from collector.analytics.lives import Lives, Removed
from schemas.block_hash import U64
from schemas.causes import Cause
from schemas.kv_events import WorkerId

MAX_WINDOWS = 64
"""Open at once; a request that would open a further one counts in the nearest."""
_EVICTED, _CLEARED = int(Cause.EVICTED), int(Cause.CLEARED)
_BUCKETS = 400  # of gaps: up to 2 ** 37 seconds
_ZERO = 100  # log bucket of 0 is 0; of a value v > 0 it is `_ZERO` + 8 * log2(v), of a negative one the same below 0
_LEAST = 2.0**-10


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bounds of memory. For each open window: pool_blocks and active_blocks names a pool (8 to 23 bytes each), worker_blocks a worker,
    sessions (about 300 bytes each) a pool, at most `scopes` workers and pools; beyond these a worker counts in its pool alone, and a pool
    not at all. sessions is also how many sessions are remembered from window to window (about 250 bytes each)."""

    pool_blocks: int = 1 << 16
    worker_blocks: int = 1 << 14
    active_blocks: int = 1 << 16
    sessions: int = 1 << 15
    scopes: int = 4096


def log_bucket(value: float) -> int:
    """Eight buckets an octave, symmetrical around 0; what is nearer to 0 than 1/1024 is in bucket 0."""
    if abs(value) < _LEAST:
        return 0
    return int(math.copysign(_ZERO + math.floor(8 * math.log2(abs(value))), value))


def bucket_middle(bucket: int) -> float:
    """Geometric middle of a log bucket: no value in it is further away than 4.5 %."""
    return 0.0 if bucket == 0 else math.copysign(2 ** ((abs(bucket) - _ZERO + 0.5) / 8), bucket)


@numba.njit(cache=True)
def _read(chain, causes, gone_s, level, counts):  # type: ignore[no-untyped-def]
    """One prompt. Returns (its blocks in the sample of a level, mixed; how many of all returned after a loss).

    counts, by log bucket: adds the seconds for which they had been gone.
    """
    limit = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(level)
    blocks = np.empty(len(chain), np.uint64)
    n = 0
    returned = 0
    for i in range(len(chain)):
        m = mix(chain[i])
        if m <= limit:
            blocks[n] = m
            n += 1
        gone = np.float64(gone_s[i])
        if math.isfinite(gone):
            counts[0 if gone < _LEAST else min(len(counts) - 1, _ZERO + np.int64(math.floor(8 * math.log2(gone))))] += 1
            returned += 1
        elif causes[i] == _EVICTED or causes[i] == _CLEARED:
            returned += 1
    return blocks[:n].copy(), returned


class Histogram:
    """Counts by log bucket."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, value: float) -> None:
        bucket = log_bucket(value)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1

    def merge(self, buckets: Mapping[int, int]) -> None:
        for bucket, n in buckets.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + n

    def quantile(self, q: float) -> float | None:
        """The value below or at which a share q of them is; None: there are none."""
        total = sum(self.counts.values())
        upto = 0
        for bucket in sorted(self.counts):
            upto += self.counts[bucket]
            if upto >= q * total:
                return bucket_middle(bucket)
        return None


class _Counts:
    """Of one window and pool or worker."""

    def __init__(self, most: int) -> None:
        self.blocks = Distinct(most)
        self.gaps, self.growth = Histogram(), Histogram()
        self.returned = 0


@dataclass(slots=True)
class _Session:
    worker: str
    started_s: float
    blocks: U64
    """Of its newest prompt, sampled and mixed."""


class _Sessions:
    """Of one window and pool."""

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        self.level = 0
        """One block in 2^level is kept of a prompt."""
        self.session_level = 0
        """One session in 2^session_level is kept."""
        self.by_name: dict[int, _Session] = {}
        self.held = 0
        self._figures: dict[str | None, tuple[int, int]] | None = None

    def put(self, name: int, worker: str, started_s: float, mixed: U64) -> None:
        """mixed: the prompt's blocks, of a sample of this level at most."""
        if name >> (64 - self.session_level):
            return
        before = self.by_name.get(name)
        if before is not None and before.started_s > started_s:
            return
        blocks = mixed[mixed <= np.uint64(0xFFFFFFFFFFFFFFFF >> self.level)]
        self.by_name[name] = _Session(worker, started_s, blocks)
        self.held += len(blocks) - (0 if before is None else len(before.blocks))
        self._figures = None
        while len(self.by_name) > self._budgets.sessions:
            self.session_level += 1
            self.by_name = {n: s for n, s in self.by_name.items() if not n >> (64 - self.session_level)}
            self.held = sum(len(s.blocks) for s in self.by_name.values())
        while self.held > self._budgets.active_blocks:
            self.level += 1
            limit = np.uint64(0xFFFFFFFFFFFFFFFF >> self.level)
            for s in self.by_name.values():
                s.blocks = s.blocks[s.blocks <= limit]
            self.held = sum(len(s.blocks) for s in self.by_name.values())

    def figures(self) -> dict[str | None, tuple[int, int]]:
        """(sessions, blocks) by worker; None: of the pool."""
        if self._figures is None:
            names = sorted({s.worker for s in self.by_name.values()})
            number = {name: i for i, name in enumerate(names)}
            parts = list(self.by_name.values())
            blocks = np.concatenate([s.blocks for s in parts]) if parts else np.empty(0, np.uint64)
            where = np.repeat(np.array([number[s.worker] for s in parts], np.int64), [len(s.blocks) for s in parts])
            sessions = np.bincount(np.array([number[s.worker] for s in parts], np.int64), minlength=len(names))
            each = np.unique(blocks, return_counts=True)[1]
            self._figures = {None: (len(parts) << self.session_level, self._estimate(len(each), int((each == 1).sum())))}
            order = np.lexsort((blocks, where))
            blocks, where = blocks[order], where[order]
            starts = np.flatnonzero(np.append(True, (blocks[1:] != blocks[:-1]) | (where[1:] != where[:-1]))[: len(blocks)])
            alone = np.diff(np.append(starts, len(blocks))) == 1
            all_, single = (np.bincount(where[part], minlength=len(names)).tolist() for part in (starts, starts[alone]))
            for i, name in enumerate(names):
                self._figures[name] = int(sessions[i]) << self.session_level, self._estimate(all_[i], single[i])
        return self._figures

    def _estimate(self, distinct: int, alone: int) -> int:
        """Of blocks; alone: of these, in one session only."""
        return (distinct - alone + (alone << self.session_level)) << self.level


class _Window:
    def __init__(self) -> None:
        self.scopes: dict[Scope, _Counts] = {}
        self.sessions: dict[str, _Sessions] = {}


class Pressure:
    """An `Analysis`. lives: fed with kv-events by whoever reads them. numbered: the workers that its numbers mean, a list that may grow."""

    tables: tuple[str, ...] = ("pressure",)

    def __init__(self, lives: Lives | None = None, numbered: Sequence[WorkerId] = (), budgets: Budgets | None = None) -> None:
        self.lives = Lives() if lives is None else lives
        self._numbered = numbered
        self._budgets = Budgets() if budgets is None else budgets
        self._windows: dict[int, _Window] = {}
        self._known: dict[int, tuple[float, int]] = {}
        """Session -> (start of its newest request, prompt tokens); least recently seen first."""
        self._closed_s = 0
        self._held: Mapping[Scope, Held] = {}
        self._numbers: dict[tuple[str, str, int | None], list[int]] = {}
        self._numbers_seen = 0
        self.refused = 0
        """Counts of pools and workers beyond the budget of scopes, by request."""

    def hold(self, held: Mapping[Scope, Held]) -> None:
        """Takes a census: what rows tell of capacity and residency from now on."""
        self._held = held

    def take(self, requests: Sequence[Attributed]) -> None:
        for r in requests:
            window = self._window(r.prefill_s)
            parts = [
                c
                for c in (
                    self._counts(window, (r.pool, None), self._budgets.pool_blocks),
                    self._counts(window, (r.pool, r.worker), self._budgets.worker_blocks),
                )
                if c is not None
            ]
            session = None if r.session_id is None else _session(r)
            sessions = None if session is None or (r.pool, None) not in window.scopes else self._sessions(window, r.pool)
            level = min([self.lives.level, *(c.blocks.level for c in parts), *([] if sessions is None else [sessions.level])])
            gone = np.zeros(_BUCKETS, np.int64)
            blocks, returned = _read(r.chain, r.causes, r.gone_s, level, gone)
            at = np.flatnonzero(gone)
            gaps = dict(zip(at.tolist(), gone[at].tolist(), strict=True))
            grown = None if session is None else self._grown(session, r)
            for counts in parts:
                counts.blocks.add_mixed(blocks)
                counts.returned += returned
                counts.gaps.merge(gaps)
                if grown is not None:
                    counts.growth.add(grown)
            if session is not None and sessions is not None:
                sessions.put(session, r.worker, r.started_s, blocks)
            if len(blocks):
                self.lives.touch(blocks, self._ranks(r), r.prefill_s, r.ended_s)

    def _counts(self, window: _Window, scope: Scope, most: int) -> _Counts | None:
        counts = window.scopes.get(scope)
        if counts is None:
            if len(window.scopes) >= self._budgets.scopes:
                self.refused += 1
                return None
            counts = window.scopes[scope] = _Counts(most)
        return counts

    def _sessions(self, window: _Window, pool: str) -> _Sessions:
        found = window.sessions.get(pool)
        if found is None:
            found = window.sessions[pool] = _Sessions(self._budgets)
        return found

    def _window(self, at_s: float) -> _Window:
        start = counts_in(max(int(at_s // WINDOW_S * WINDOW_S), self._closed_s), self._windows, len(self._windows) < MAX_WINDOWS)
        return self._windows.setdefault(start, _Window())

    def _grown(self, name: int, r: Attributed) -> int | None:
        """Tokens by which the session's prompt grew."""
        before = self._known.pop(name, None)
        if before is not None and before[0] > r.started_s:
            self._known[name] = before
            return None
        self._known[name] = r.started_s, r.prompt_tokens
        if len(self._known) > self._budgets.sessions:
            del self._known[next(iter(self._known))]
        return None if before is None else r.prompt_tokens - before[1]

    def _ranks(self, r: Attributed) -> Iterable[int]:
        for n in range(self._numbers_seen, len(self._numbered)):
            who = self._numbered[n]
            for rank in (who.rank, None):
                self._numbers.setdefault((who.pool, who.worker, rank), []).append(n)
            self._numbers_seen = n + 1
        return self._numbers.get((r.pool, r.worker, r.rank), ())

    def live(self) -> Mapping[str, Rows]:
        return {"pressure": [row for start in self._open() for row in self._rows(start)]}

    def close(self, before_s: float) -> Mapping[str, Rows]:
        over = [start for start in self._open() if start + WINDOW_S <= before_s]
        rows = [row for start in over for row in self._rows(start)]
        for start in over:
            self._windows.pop(start, None)
        self._closed_s = max(self._closed_s, int(before_s // WINDOW_S * WINDOW_S))
        self.lives.close(self._closed_s)
        return {"pressure": rows}

    def _open(self) -> list[int]:
        """Windows of requests, and of events where there are no requests."""
        return sorted(self._windows.keys() | {int(at_s) for at_s in self.lives.windows(WINDOW_S)})

    def _rows(self, start: int) -> Rows:
        """Of one open window, pools first, in the contract's column order."""
        window = self._windows.get(start) or _Window()
        removed = self._removed(start)
        scopes = sorted(window.scopes.keys() | removed.keys(), key=lambda s: (s[0], s[1] or ""))
        return [self._row(start, window, scope, removed.get(scope)) for scope in scopes]

    def _removed(self, start: int) -> dict[Scope, Removed]:
        """By worker and pool."""
        found = self.lives.removed(start, start + WINDOW_S)
        order = np.argsort(found.number, kind="stable")
        numbers, firsts = np.unique(found.number[order], return_index=True)
        parts: dict[Scope, list[npt.NDArray[np.int64]]] = {}
        for n, (lo, hi) in zip(numbers.tolist(), pairwise([*firsts.tolist(), len(order)]), strict=True):
            if n < len(self._numbered):
                who = self._numbered[n]
                for scope in ((who.pool, who.worker), (who.pool, None)):
                    parts.setdefault(scope, []).append(order[lo:hi])
        which = {scope: np.concatenate(part) for scope, part in parts.items()}
        return {scope: Removed(found.number[i], found.lifetime_s[i], found.idle_s[i]) for scope, i in which.items()}

    def _row(self, start: int, window: _Window, scope: Scope, removed: Removed | None) -> tuple[object, ...]:
        pool, worker = scope
        counts, held = window.scopes.get(scope), self._held.get(scope, Held())
        figures = window.sessions[pool].figures() if pool in window.sessions else None
        sessions, active = (None, None) if figures is None else figures.get(worker, (0, 0))
        # A worker of whom nothing was counted had no requests, if its pool's were counted and there was room for it.
        none = 0 if (pool, None) in window.scopes and len(window.scopes) < self._budgets.scopes else None
        working = none if counts is None else counts.blocks.estimate()
        pressure = None if active is None or not held.capacity_blocks else active / held.capacity_blocks
        resident, distinct = held.resident_blocks, held.distinct_blocks
        if resident is not None and distinct is not None:
            distinct = min(distinct, resident)
        duplication = None if resident is None or not distinct else resident / distinct
        twice = None if resident is None or distinct is None or held.block_size is None else (resident - distinct) * held.block_size
        gaps, growth = (Histogram(), Histogram()) if counts is None else (counts.gaps, counts.growth)
        lives, idle = (None, None) if removed is None else (removed.lifetime_s, removed.idle_s)
        return (
            start * 1_000_000, WINDOW_S, pool, worker, held.capacity_blocks, working, sessions, active, pressure, resident, distinct,
            duplication, twice, *_quantiles(lives), *_quantiles(idle),
            0 if removed is None else len(removed.number), gaps.quantile(0.5), gaps.quantile(0.9),
            none if counts is None else counts.returned, growth.quantile(0.5), growth.quantile(0.9),
        )  # fmt: skip

    def save(self) -> Mapping[str, npt.NDArray[Any]]:
        """Of what `take` counts; `lives` is saved by its owner."""
        arrays: list[U64] = []

        def keep(a: npt.NDArray[Any]) -> int:
            arrays.append(a.astype(np.uint64))
            return len(arrays) - 1

        windows = []
        for start, window in self._windows.items():
            scopes = [
                [*scope, keep(c.blocks.save()), [*c.gaps.counts.items()], [*c.growth.counts.items()], c.returned]
                for scope, c in window.scopes.items()
            ]
            sessions = [
                [pool, s.level, s.session_level, [[name, x.worker, x.started_s, keep(x.blocks)] for name, x in s.by_name.items()]]
                for pool, s in window.sessions.items()
            ]
            windows.append([start, scopes, sessions])
        known = [[name, *value] for name, value in self._known.items()]
        plain = json.dumps([self._closed_s, self.refused, windows, known]).encode()
        return {
            "plain": np.frombuffer(plain, np.uint8).copy(),
            "ends": np.cumsum([len(a) for a in arrays], dtype=np.int64),
            "names": np.concatenate(arrays) if arrays else np.empty(0, np.uint64),
        }

    def load(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        ends = [0, *saved["ends"].tolist()]

        def kept(i: int) -> U64:
            return saved["names"][ends[i] : ends[i + 1]].copy()

        self._closed_s, self.refused, windows, known = json.loads(saved["plain"].tobytes())
        self._known = {name: (started_s, tokens) for name, started_s, tokens in known}
        self._windows = {}
        for start, scopes, of_pools in windows:
            window = self._windows[start] = _Window()
            for pool, worker, at, gaps, growth, returned in scopes:
                counts = window.scopes[pool, worker] = _Counts(self._budgets.pool_blocks if worker is None else self._budgets.worker_blocks)
                counts.blocks.load(kept(at))
                counts.gaps.counts, counts.growth.counts, counts.returned = dict(gaps), dict(growth), returned
            for pool, level, session_level, by_name in of_pools:
                sessions = window.sessions[pool] = _Sessions(self._budgets)
                sessions.level, sessions.session_level = level, session_level
                sessions.by_name = {name: _Session(worker, started_s, kept(at)) for name, worker, started_s, at in by_name}
                sessions.held = sum(len(s.blocks) for s in sessions.by_name.values())

    def held_bytes(self) -> int:
        """Sessions and scopes at what they weigh about."""
        total = self.lives.held_bytes() + 250 * len(self._known)
        for window in self._windows.values():
            total += sum(c.blocks.held_bytes() + 1000 for c in window.scopes.values())
            total += sum(8 * s.held + 300 * len(s.by_name) for s in window.sessions.values())
        return total


def _session(r: Attributed) -> int:
    """A session's name as a number; sessions of different pools are different ones."""
    return int.from_bytes(hashlib.blake2b(f"{r.pool}\0{r.session_id}".encode(), digest_size=8).digest(), "big")


def _quantiles(values: F64 | None) -> tuple[float | None, float | None]:
    """Median and 90th percentile, by rank."""
    if values is None or not len(values):
        return None, None
    ordered = np.sort(values)
    p50, p90 = (float(ordered[max(0, math.ceil(q * len(ordered)) - 1)]) for q in (0.5, 0.9))
    return p50, p90
