"""What a prefill costs, learned from what engines report: seconds = base + a*u + b*u*(cached + u/2) of u uncached tokens.

    told requests --> an observation (u, cached, seconds) of (pool, model, kind of worker)
                        |  the first `WARM`: least absolute deviations, and whether sizes differ enough to tell base, a and b apart
                        v
                      sums of each size class --> best base, a, b >= 0 --> moved noticeably? --> a new version, used from then on

Recursive least squares in the form of sums: instead of a covariance it keeps, by size class (half octaves of u), the discounted sums
that the normal equations need; the coefficients are the best of the seven subsets of columns whose solution is not negative, which is the
exact projection. An observation makes its class forget (`KEPT`), and all others hardly (`KEPT_OTHERS`): a flood of short prompts does not
wash out what long ones told, so the sums never degenerate, which is what recursive least squares with one factor of forgetting dies of.

Robust: Huber's loss with a threshold of `HUBER` robust standard deviations of the residuals of that size class. Within it, it is least
squares on seconds, or on relative residuals where noise turns out to grow with the prompt: both sums are kept, and used are those under
whose assumption the classes' residuals are more alike. (On plain seconds the noise of long prompts drowns the base; relative ones alone
would not give the published curve of an engine whose residuals do not grow.)

Where engines report no times, TTFT is all there is, and waiting is in it: what is above the curve then counts a tenth of what is below, so
that the curve follows the quick ones of each size. It is right as long as a quarter of the requests of each size find nobody waiting, else
too high; it is called "fitted from TTFT", and what is configured goes before it.

Unknown is NaN, never 0. Coefficients belong to a version: they stay as they are until predictions move by `MOVED`, but for a young fit,
which is taken anew whenever its observations have doubled.

Bounds: `MAX_KEYS` triples of (pool, model, kind), 20 KiB each.

Rejected: TTFT as if it were prefill (queueing would be sold as computing), TTFT less the router's predicted queue (predicted with the very
coefficients that are to be found), one factor of forgetting (see above), Tukey's biweight as in the router's fit of a window (one pass
cannot go back to what it left out once).

Pure: no clock, no randomness; the state depends on the order of requests alone and not on how they are cut into calls.
tests/collector/analytics/naive_cost.py is the twin that the tests fuzz it against.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from collector.analytics.attributed import F64, U8, U32, Attributed, Rows
from schemas.causes import Cause
from schemas.discover import parse_discover
from schemas.fleet import Fleet

DEFAULT_HARDWARE = "default"
"""Kind of the workers that have no label."""

MAX_KEYS = 256
WARM = 64
"""Observations before a first fit."""
CLASSES = 48
KEPT = 1 - 1 / 128
KEPT_OTHERS = 1 - 1 / 16384
HUBER = 2.0 * 1.4826
"""Of the median absolute residual: two standard deviations of normal noise."""
LEAST_NOISE = 1e-3
"""Share of the expected seconds that is taken for noise at least."""
CUT = 3.0
"""Beyond so many thresholds a residual counts nothing, so that wild ones do not pull at all; the threshold follows when all are there.
Not above a curve of TTFT: what lies there must pull, or a curve that is too low stays."""
MOVED = 0.03
"""Share by which a prediction must have changed for a new version."""
ENOUGH_CLASSES = 8
"""Size classes that it takes to tell how noise grows."""
YOUNG = 1024
"""Observations up to which a fit is taken anew at each doubling."""
LEAST_BETWEEN = 32
"""Observations between two versions."""
MOST_ALIKE = 200.0
"""Condition number of the columns, each brought to length 1, above which base, a and b cannot be told apart (as in the router's fit)."""
ABOVE_TTFT = 0.1
LONGEST_S = 3600.0
_STEP = 1.05  # by which a running median moves at each observation
_ENOUGH = 8.0  # weight of a class whose prediction is looked at
_UNITS = np.array([1.0, 1e-3, 1e-6])  # columns in 1, thousands, thousands squared: sums of squares stay within a few decimal powers

# Columns of a fit's `head`.
_WARMED, _OBSERVATIONS, _RESIDUAL, _RELATIVE, _NEWEST, _VERSION, _SINCE, _GROWS, _TYPICAL = range(9)
_NOW, _USED = 9, 12  # three coefficients each
_HEAD = 15


@dataclass(frozen=True, slots=True)
class CostRules:
    """What is configured of one kind of worker; None: not set. Coefficients hold where nothing is fitted: a makes them a model."""

    base_s: float | None = None
    a_s_per_token: float | None = None
    b_s_per_token2: float | None = None
    gpus: float | None = None
    """That one prefill occupies: those of one data-parallel rank."""
    price_per_gpu_hour: float | None = None
    currency: str | None = None


@dataclass(frozen=True, slots=True)
class Coefficients:
    """One version. source: fitted, configured, or fitted from TTFT."""

    version: str
    source: str
    base_s: float
    a_s_per_token: float
    b_s_per_token2: float

    def prefill_s(self, uncached: float, cached: float) -> float:
        return self.base_s + self.run_s(uncached, cached)

    def run_s(self, tokens: float, before: float) -> float:
        """Seconds of `tokens` that have `before` tokens before them, computed or not; without the base."""
        return tokens * (self.a_s_per_token + self.b_s_per_token2 * (before + tokens / 2))


@numba.njit(cache=True)
def _best(g, v, out):  # type: ignore[no-untyped-def]
    """The x >= 0 that is smallest in x'gx - 2v'x over all subsets of columns: the exact projection. g: (3, 3), v, out: (3,)."""
    s0, s1, s2 = math.sqrt(max(g[0, 0], 1e-300)), math.sqrt(max(g[1, 1], 1e-300)), math.sqrt(max(g[2, 2], 1e-300))
    c01, c02, c12 = g[0, 1] / (s0 * s1), g[0, 2] / (s0 * s2), g[1, 2] / (s1 * s2)
    q0, q1, q2 = v[0] / s0, v[1] / s1, v[2] / s2
    det = 1 - c01 * c01 - c02 * c02 - c12 * c12 + 2 * c01 * c02 * c12
    if det > 1e-10:
        x0 = (q0 * (1 - c12 * c12) + q1 * (c02 * c12 - c01) + q2 * (c01 * c12 - c02)) / det
        x1 = (q0 * (c02 * c12 - c01) + q1 * (1 - c02 * c02) + q2 * (c01 * c02 - c12)) / det
        x2 = (q0 * (c01 * c12 - c02) + q1 * (c01 * c02 - c12) + q2 * (1 - c01 * c01)) / det
        if x0 >= 0 and x1 >= 0 and x2 >= 0:
            out[0], out[1], out[2] = x0 / s0, x1 / s1, x2 / s2
            return
    out[0], out[1], out[2] = 0.0, 0.0, 0.0
    gain = 0.0
    for k in range(3):  # without the k-th
        if k == 0:
            c, p, q = c12, q1, q2
        elif k == 1:
            c, p, q = c02, q0, q2
        else:
            c, p, q = c01, q0, q1
        det = 1 - c * c
        if det > 1e-10:
            x, y = (p - c * q) / det, (q - c * p) / det
            if x >= 0 and y >= 0 and x * p + y * q > gain:
                gain = x * p + y * q
                out[0] = 0.0 if k == 0 else x / s0
                out[1] = 0.0 if k == 1 else (x if k == 0 else y) / s1
                out[2] = 0.0 if k == 2 else y / s2
    if q0 > 0 and q0 * q0 > gain:
        gain = q0 * q0
        out[0], out[1], out[2] = q0 / s0, 0.0, 0.0
    if q1 > 0 and q1 * q1 > gain:
        gain = q1 * q1
        out[0], out[1], out[2] = 0.0, q1 / s1, 0.0
    if q2 > 0 and q2 * q2 > gain:
        out[0], out[1], out[2] = 0.0, 0.0, q2 / s2


@numba.njit(cache=True)
def _noise_grows(sums, scale, now):  # type: ignore[no-untyped-def]
    """1: relative residuals are more alike than absolute ones, over the size classes; else 0."""
    n = 0
    s = np.zeros(4)
    for i in range(CLASSES):
        if sums[i, 0] >= _ENOUGH:
            expected = (now[0] * sums[i, 0] + now[1] * sums[i, 1] + now[2] * sums[i, 2]) / sums[i, 0]
            absolute = math.log(scale[i])
            relative = absolute - math.log(max(expected, 1e-9))
            n += 1
            s[0] += absolute
            s[1] += absolute * absolute
            s[2] += relative
            s[3] += relative * relative
    return 1.0 if n >= ENOUGH_CLASSES and s[3] - s[2] * s[2] / n < s[1] - s[0] * s[0] / n else 0.0


@numba.njit(cache=True)
def _moved(sums, now, used):  # type: ignore[no-untyped-def]
    """Largest relative change of a size class's predicted seconds."""
    moved = 0.0
    for i in range(CLASSES):
        if sums[i, 0] >= _ENOUGH:
            old = used[0] * sums[i, 0] + used[1] * sums[i, 1] + used[2] * sums[i, 2]
            new = now[0] * sums[i, 0] + now[1] * sums[i, 1] + now[2] * sums[i, 2]
            moved = max(moved, abs(new - old) / max(old, 1e-12))
    return moved


@numba.njit(cache=True)
def _learn(sums, scale, head, rows, above, hold):  # type: ignore[no-untyped-def]
    """Takes observations in, one after the other. rows: (uncached, cached, seconds, unix seconds), shape (n, 4).

    sums, shape (2, CLASSES, 9): w*(1, x1, x2, x1*x1, x1*x2, x2*x2, y, x1*y, x2*y) of each class, with x in `_UNITS`; in the second one
    w is divided by the square of what was expected, or of a tenth of a typical time if that is more.
    scale, shape (CLASSES,): running median of absolute residuals, 0: none yet.
    above: weight of what lies above the curve; 1 for times that have no waiting in them. hold: the coefficients stay as they are.
    """
    g = np.zeros((3, 3))
    v = np.zeros(3)
    total = np.zeros(9)
    now = head[_NOW : _NOW + 3]
    used = head[_USED : _USED + 3]
    for k in range(len(rows)):
        u = rows[k, 0]
        y = rows[k, 2]
        x1 = u * 1e-3
        x2 = u * (rows[k, 1] + u / 2) * 1e-6
        c = min(CLASSES - 1, int(2 * math.log2(u)))
        expected = now[0] + now[1] * x1 + now[2] * x2
        r = y - expected
        size = abs(r)
        if scale[c] == 0:
            scale[c] = max(head[_RELATIVE] * expected, head[_RESIDUAL], 1e-2 * expected, 1e-6)
        limit = HUBER * scale[c]
        w = 1.0 if size <= limit else limit / size if size <= CUT * limit or (r > 0 and above != 1.0) else 0.0
        if above == 1.0 or r < 0:
            scale[c] = max(scale[c] * (_STEP if size > scale[c] else 1 / _STEP), LEAST_NOISE * expected, 1e-9)
        if r > 0:
            w *= above
        head[_TYPICAL] *= _STEP if y > head[_TYPICAL] else 1 / _STEP
        for p in range(2):
            for i in range(CLASSES):
                for j in range(9):
                    sums[p, i, j] *= KEPT if i == c else KEPT_OTHERS
            sums[p, c, 0] += w
            sums[p, c, 1] += w * x1
            sums[p, c, 2] += w * x2
            sums[p, c, 3] += w * x1 * x1
            sums[p, c, 4] += w * x1 * x2
            sums[p, c, 5] += w * x2 * x2
            sums[p, c, 6] += w * y
            sums[p, c, 7] += w * x1 * y
            sums[p, c, 8] += w * x2 * y
            w /= max(expected, 0.1 * head[_TYPICAL]) ** 2
        head[_OBSERVATIONS] += 1
        n_seen = np.int64(head[_OBSERVATIONS])
        if n_seen % 32 == 0:
            head[_GROWS] = _noise_grows(sums[0], scale, now)
        which = np.int64(head[_GROWS])
        for j in range(9):
            total[j] = 0.0
            for i in range(CLASSES):
                total[j] += sums[which, i, j]
        g[0, 0], g[0, 1], g[0, 2] = total[0], total[1], total[2]
        g[1, 0], g[1, 1], g[1, 2] = total[1], total[3], total[4]
        g[2, 0], g[2, 1], g[2, 2] = total[2], total[4], total[5]
        v[0], v[1], v[2] = total[6], total[7], total[8]
        head[_NEWEST] = max(head[_NEWEST], rows[k, 3])
        if hold:
            continue
        _best(g, v, now)
        off = abs(y - (used[0] + used[1] * x1 + used[2] * x2))
        head[_RESIDUAL] = max(head[_RESIDUAL] * (_STEP if off > head[_RESIDUAL] else 1 / _STEP), 1e-9)
        head[_SINCE] += 1
        if head[_SINCE] >= LEAST_BETWEEN and (_moved(sums[0], now, used) > MOVED or (n_seen & (n_seen - 1) == 0 and n_seen <= YOUNG)):
            for j in range(3):
                used[j] = now[j]
            head[_VERSION] += 1
            head[_SINCE] = 0


class _Fit:
    """What is learned of one key from one kind of times."""

    def __init__(self, above: float) -> None:
        self.above = above
        self.sums = np.zeros((2, CLASSES, 9))
        self.scale = np.zeros(CLASSES)
        self.head = np.zeros(_HEAD)
        self.warm = np.zeros((WARM, 4))

    @property
    def ready(self) -> bool:
        return bool(self.head[_VERSION] > 0)

    @property
    def observations(self) -> int:
        return int(self.head[_OBSERVATIONS])

    def observe(self, rows: F64) -> None:
        """rows: as in `_learn`."""
        while not self.ready and len(rows):
            at = int(self.head[_WARMED])
            n = min(WARM - at, len(rows))
            self.warm[at : at + n] = rows[:n]
            self.head[_WARMED] = at + n
            rows = rows[n:]
            if at + n == WARM:
                self._begin()
        if len(rows):
            _learn(self.sums, self.scale, self.head, rows, self.above, False)

    def _begin(self) -> None:
        """A first fit; or, when these prompts are too much alike, room for half of them anew."""
        start = first_fit(self.warm, self.above)
        if start is None:
            self.warm[: WARM // 2] = self.warm[WARM // 2 :].copy()
            self.head[_WARMED] = WARM // 2
            self.head[_OBSERVATIONS] += WARM // 2
            return
        theta, residual, relative = start
        self.head[_NOW : _NOW + 3] = self.head[_USED : _USED + 3] = theta
        self.head[_RESIDUAL], self.head[_RELATIVE], self.head[_VERSION] = residual, relative, 1
        self.head[_TYPICAL] = np.median(self.warm[:, 2])
        _learn(self.sums, self.scale, self.head, self.warm, self.above, True)

    def coefficients(self, name: str, source: str) -> Coefficients:
        base_s, a, b = (self.head[_USED : _USED + 3] * _UNITS).tolist()
        return Coefficients(f"{name}-{int(self.head[_VERSION])}", source, base_s, a, b)


def first_fit(rows: F64, above: float = 1.0) -> tuple[F64, float, float] | None:
    """Least absolute deviations of (uncached, cached, seconds, ...), shape (n, >= 3).

    Returns coefficients in `_UNITS`, and the medians of the absolute and the relative residuals (of those below the curve, if above is
    not 1); None: too much alike.
    """
    u, h, y = rows[:, 0], rows[:, 1], rows[:, 2]
    x = np.stack([np.ones_like(u), u, u * (h + u / 2)], axis=1) * _UNITS
    if not np.linalg.cond(x / np.sqrt((x**2).mean(axis=0))) <= MOST_ALIKE:
        return None
    theta = np.zeros(3)
    weight = np.ones(len(y))
    least = 1e-3 * float(np.median(y))
    for _ in range(50):
        _best((x * weight[:, None]).T @ x, (x * weight[:, None]).T @ y, theta)
        r = y - x @ theta
        weight = np.where(r > 0, above, 1.0) / np.maximum(np.abs(r), least)
    predicted = np.maximum(x @ theta, 1e-9)
    r = y - predicted
    told = r < 0 if above != 1.0 and (r < 0).any() else np.ones(len(r), np.bool_)
    return theta, max(float(np.median(np.abs(r[told]))), 1e-9), max(float(np.median(np.abs(r / predicted)[told])), 1e-6)


@dataclass(slots=True)
class _Entry:
    engine: _Fit
    ttft: _Fit


_Key = tuple[str, str, str]


def _one_kind(pool: str, worker: str) -> str:
    return DEFAULT_HARDWARE


def hardware_in(fleet: Fleet) -> Callable[[str, str], str]:
    """A worker's label by (pool, worker). Workers that are no part of the file are taken for found ones: they have their pool's."""
    named = {(w.pool, w.name): w.hardware or DEFAULT_HARDWARE for w in fleet.workers}
    found = {p.name: parse_discover(p.discover).hardware or DEFAULT_HARDWARE for p in fleet.pools if p.discover}
    return lambda pool, worker: named.get((pool, worker)) or found.get(pool, DEFAULT_HARDWARE)


class CostModel:
    """An `Analysis`: learns in `take`, is asked by attribution, and fills `cost_models` as of now (no windows).

    rules: of all kinds of workers; by_hardware: instead of it, of kinds by label. hardware_of: a worker's label, from (pool, worker).
    """

    tables: tuple[str, ...] = ("cost_models",)

    def __init__(
        self,
        rules: CostRules | None = None,
        by_hardware: Mapping[str, CostRules] | None = None,
        hardware_of: Callable[[str, str], str] = _one_kind,
    ) -> None:
        self._rules = CostRules() if rules is None else rules
        self._by_hardware = dict(by_hardware or {})
        self._hardware_of = hardware_of
        self._entries: dict[_Key, _Entry] = {}
        self._resolved: dict[_Key, Coefficients | None] = {}
        self.refused = 0
        """Observations of keys beyond `MAX_KEYS`."""

    def rules(self, hardware: str) -> CostRules:
        return self._by_hardware.get(hardware, self._rules)

    def run_seconds(self, pool: str, worker: str, model: str, run_causes: U8, run_tokens: U32) -> F64:
        """Prefill seconds that each run of a prompt cost, shape (runs,): 0 of hits, NaN where nothing is known of such workers.

        run_causes, run_tokens: as in `Attributed`. A token costs a + b * (tokens before it), whatever became of those before; so with
        S(x) = a*x + b*x*x/2 a run from s to e costs S(e) - S(s), and for a prompt of n tokens of which the first k were hits

            sum of runs = S(n) - S(k) = prefill(n - k, k) - base = [prefill(n, 0) - base] - [prefill(n, 0) - prefill(n - k, k)]

        that is all that its prefill could cost less what the hits saved. Of the base nothing is given to any run: it is paid whatever
        is cached.
        """
        tokens = run_tokens.astype(np.float64)
        found = self.coefficients(pool, worker, model)
        if found is None:
            return np.where(run_causes == Cause.HIT, 0.0, np.nan)
        before = np.cumsum(tokens) - tokens
        return np.where(run_causes == Cause.HIT, 0.0, tokens * (found.a_s_per_token + found.b_s_per_token2 * (before + tokens / 2)))

    def coefficients(self, pool: str, worker: str, model: str) -> Coefficients | None:
        """Those in use: fitted, else configured, else fitted from TTFT; of a model without any, those of the pool's best known model on
        that kind of worker. None: nothing is known."""
        key = pool, model, self._hardware_of(pool, worker)
        if key not in self._resolved:
            if len(self._resolved) >= 4 * MAX_KEYS:
                self._resolved.clear()
            self._resolved[key] = self._resolve(key)
        return self._resolved[key]

    def _resolve(self, key: _Key) -> Coefficients | None:
        own = self._entries.get(key)
        alike = [e for (pool, _, hardware), e in self._entries.items() if (pool, hardware) == (key[0], key[2])]
        for name, source, fits in (
            ("fit", "fitted", [e.engine for e in ([own] if own else []) + sorted(alike, key=lambda e: -e.engine.observations)]),
            ("configured", "configured", []),
            ("ttft-fit", "fitted from TTFT", [e.ttft for e in ([own] if own else []) + sorted(alike, key=lambda e: -e.ttft.observations)]),
        ):
            rules = self.rules(key[2])
            if name == "configured" and rules.a_s_per_token is not None:
                return Coefficients("configured-1", source, rules.base_s or 0.0, rules.a_s_per_token, rules.b_s_per_token2 or 0.0)
            for fit in fits:
                if fit.ready:
                    return fit.coefficients(name, source)
        return None

    def take(self, requests: Sequence[Attributed]) -> None:
        by_key: dict[_Key, tuple[list[tuple[float, ...]], list[tuple[float, ...]]]] = {}
        for r in requests:
            engine, ttft = by_key.setdefault((r.pool, r.model, self._hardware_of(r.pool, r.worker)), ([], []))
            if r.hit_tokens is None or not 0 <= r.hit_tokens < r.prompt_tokens:
                continue
            times, seconds = ttft, r.ttft_s
            if r.engine_ttft_s is not None and r.engine_queue_s is not None:
                times, seconds = engine, r.engine_ttft_s - r.engine_queue_s
            if seconds is not None and 0 < seconds < LONGEST_S:
                times.append((float(r.prompt_tokens - r.hit_tokens), float(r.hit_tokens), seconds, r.ended_s))
        for key, (engine, ttft) in by_key.items():
            entry = self._entry(key)
            if entry is None:
                self.refused += len(engine) + len(ttft)
                continue
            for fit, rows in ((entry.engine, engine), (entry.ttft, ttft)):
                if rows:
                    before = fit.head[_VERSION]
                    fit.observe(np.array(rows))
                    if fit.head[_VERSION] != before:
                        self._resolved.clear()

    def _entry(self, key: _Key) -> _Entry | None:
        found = self._entries.get(key)
        if found is None and len(self._entries) < MAX_KEYS:
            found = self._entries[key] = _Entry(_Fit(1.0), _Fit(ABOVE_TTFT))
        return found

    def live(self) -> Mapping[str, Rows]:
        rows: Rows = []
        for key in sorted(self._entries):
            pool, model, hardware = key
            entry, rules, found = self._entries[key], self.rules(hardware), self._resolve(key)
            fit = entry.ttft if found is not None and found.source == "fitted from TTFT" else entry.engine
            fitted = found is not None and found.source != "configured" and fit.ready
            newest = max(entry.engine.head[_NEWEST], entry.ttft.head[_NEWEST])
            rows.append(
                (
                    pool, model, hardware,
                    found and found.version, found and found.source,
                    found and found.base_s, found and found.a_s_per_token, found and found.b_s_per_token2,
                    fit.observations + (0 if fit.ready else int(fit.head[_WARMED])),
                    float(fit.head[_RESIDUAL]) if fitted else None,
                    rules.gpus, rules.price_per_gpu_hour, rules.currency,
                    round(newest * 1e6) if newest else None,
                )
            )  # fmt: skip
        return {"cost_models": rows}

    def close(self, before_s: float) -> Mapping[str, Rows]:
        return {}

    def save(self) -> Mapping[str, npt.NDArray[Any]]:
        fits = [f for e in self._entries.values() for f in (e.engine, e.ttft)]
        return {
            "keys": np.frombuffer(json.dumps(list(self._entries)).encode(), np.uint8).copy(),
            "refused": np.array([self.refused], np.int64),
            "sums": np.array([f.sums for f in fits]).reshape(-1, 2, CLASSES, 9),
            "scale": np.array([f.scale for f in fits]).reshape(-1, CLASSES),
            "head": np.array([f.head for f in fits]).reshape(-1, _HEAD),
            "warm": np.array([f.warm for f in fits]).reshape(-1, WARM, 4),
        }

    def load(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        self._entries.clear()
        self._resolved.clear()
        self.refused = int(saved["refused"][0])
        for i, (pool, model, hardware) in enumerate(json.loads(saved["keys"].tobytes())):
            entry = self._entries[pool, model, hardware] = _Entry(_Fit(1.0), _Fit(ABOVE_TTFT))
            for fit, at in ((entry.engine, 2 * i), (entry.ttft, 2 * i + 1)):
                fit.sums, fit.scale, fit.head, fit.warm = (saved[name][at].copy() for name in ("sums", "scale", "head", "warm"))

    def held_bytes(self) -> int:
        return len(self._entries) * 2 * 8 * (CLASSES * 19 + _HEAD + 4 * WARM)
