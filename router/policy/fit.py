"""Prefill seconds told from outcomes: a robust fit of base + a * u + b * u * (h + u / 2), and whether it is worth a new version. Pure.

    outcome -> prefill_seconds -> Window (the newest WINDOW observations) -> new_fit -> PrefillFit, or Refusal with its reason

What is fitted on. u and h are the engine's own prompt and cached tokens. Seconds are the engine's (first token less queue) where it
reports them; else our TTFT, and only of requests that found nobody waiting for a first token on their worker. With other routers in front
of the workers the latter is too long now and then: those are outliers, which the fit leaves out, as it does retries and broken reports.

How. Residuals are relative (twice the prompt, twice the noise). Least absolute deviations as a start, then iteratively reweighted least
squares with Tukey's biweight at 4.685 robust standard deviations: what is far off counts nothing, where Huber's loss would let a fifth of
garbage pull. Coefficients are never negative (the best of the seven subsets of columns).

When. The fit is made on the older four fifths and judged on the newest one. It is refused unless it is better there than its reference
(the newest version, book.py) by _MARGIN, differs from it by more than twice its own standard error, and is plausible at all: reasons in
`Refusal`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from router.policy.cost import F64, Mask, Rates

WINDOW = 1024
FEWEST = 100
_MARGIN = 0.05
"""Share by which the median error must be smaller than the reference's."""
_SPREAD = 2.0
"""Least ratio of a long prompt's uncached tokens (90 %) to a short one's (10 %): else base and slope can't be told apart."""
_MOST_ALIKE = 200.0
"""Condition number of the columns, each brought to length 1: 4 to 40 for mixed prompts, 70 for 1000 to 2500 tokens without anything cached,
infinite for two sizes."""
_GROWTH = 1.1
"""Least ratio of a slow prompt's seconds (90 %) to a quick one's (10 %), as the fit predicts them."""
_WORST_ERROR = 0.5
_MOST_GARBAGE = 0.4
_LONGEST_S = 3600.0
_TUKEY = 4.685
_SUBSETS = tuple([i for i in range(3) if n >> i & 1] for n in range(7, 0, -1))
"""Of the three columns, all of them first."""


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """base_s, a, b with their standard errors (None: at the bound 0, where there is none). Errors are relative, |seconds / predicted - 1|,
    on the newest fifth: its median and its 90 % quantile; before: the reference's, on the same. garbage: share that counted nothing. n:
    observations, the newest fifth included."""

    base_s: float
    a: float
    b: float
    se: tuple[float | None, float | None, float | None]
    n: int
    error_p50: float
    error_p90: float
    error_p50_before: float
    garbage: float

    def seconds(self, uncached: F64, cached: F64) -> F64:
        return self.base_s + self.a * uncached + self.b * uncached * (cached + uncached / 2)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no new fit: few, alike, flat, noisy, garbage, not better, not different."""

    reason: str
    text: str


def prefill_seconds(
    ttft_s: float | None, engine_ttft_s: float | None, engine_queue_s: float | None, found_nobody_waiting: bool
) -> float | None:
    """Seconds of a request's prefill, as far as its outcome tells. None: it does not."""
    if engine_ttft_s is not None and engine_queue_s is not None:
        return engine_ttft_s - engine_queue_s
    return ttft_s if found_nobody_waiting else None


class Window:
    """The newest observations, and how many came or were of no use, by reason."""

    def __init__(self, size: int = WINDOW) -> None:
        self._rows = np.zeros((size, 3))
        self.seen = 0
        self.useless: dict[str, int] = {}

    def observe(self, prompt_tokens: int | None, cached_tokens: int | None, seconds: float | None) -> bool:
        """Takes an outcome in, or counts why not. Returns whether it was taken."""
        if prompt_tokens is None or cached_tokens is None:
            return self._refuse("tokens not reported")
        if seconds is None:
            return self._refuse("seconds not known")
        if not 0 <= cached_tokens < prompt_tokens or not (math.isfinite(seconds) and 0 < seconds < _LONGEST_S):
            return self._refuse("impossible")
        self._rows[self.seen % len(self._rows)] = prompt_tokens - cached_tokens, cached_tokens, seconds
        self.seen += 1
        return True

    def rows(self) -> F64:
        """Uncached, cached, seconds, oldest first, shape (n, 3): a copy."""
        at = self.seen % len(self._rows)
        return self._rows[:at].copy() if self.seen < len(self._rows) else np.concatenate([self._rows[at:], self._rows[:at]])

    def _refuse(self, reason: str) -> bool:
        self.useless[reason] = self.useless.get(reason, 0) + 1
        return False


def new_fit(rows: F64, reference: Rates) -> PrefillFit | Refusal:
    """Fits observations (uncached, cached, seconds; oldest first) and compares with what there is so far."""
    n = len(rows)
    if n < FEWEST:
        return Refusal("few", f"{n} observations; it takes {FEWEST}")
    cut = n - n // 5
    u, h, seconds = rows[:cut].T
    short, long = np.quantile(u, (0.1, 0.9))
    if long < _SPREAD * short:
        return Refusal("alike", f"most prompts have {short:.0f} to {long:.0f} uncached tokens: too alike to tell base and slope apart")
    x = _columns(u, h)
    theta, counted, sigma, scale = _robust(x, seconds)
    if _alikeness(x / scale[:, None]) > _MOST_ALIKE:
        return Refusal("alike", "prompts are of so few sizes that the base, each token's part and attention's cannot be told apart")
    quick, slow = np.quantile(x @ theta, (0.1, 0.9))
    if slow < _GROWTH * quick:
        return Refusal("flat", f"seconds hardly grow with tokens: {quick:.3f} for a quick prompt, {slow:.3f} for a slow one")
    garbage = 1.0 - float(counted.mean())
    if garbage > _MOST_GARBAGE:
        return Refusal("garbage", f"{garbage:.0%} of the observations fit nothing")
    new_u, new_h, new_s = rows[cut:].T
    fresh = _columns(new_u, new_h)
    errors, before = _errors(fresh @ theta, new_s), _errors(fresh @ _theta(reference), new_s)
    if errors[0] > _WORST_ERROR:
        return Refusal("noisy", f"half of the newest observations are off by more than {errors[0]:.0%}")
    if errors[0] > before[0] * (1 - _MARGIN):
        return Refusal("not better", f"median error {errors[0]:.1%} on the newest fifth, {before[0]:.1%} with the newest version")
    covariance = _covariance(x[counted] / scale[counted, None], theta > 0, sigma)
    typical = _columns(*(np.quantile(column, (0.1, 0.5, 0.9)) for column in (u, h)))
    se = np.sqrt(np.einsum("ij,jk,ik->i", typical, covariance, typical))
    if not (np.abs(typical @ (theta - _theta(reference))) > 2 * se).any():
        return Refusal("not different", "it differs from the newest version by less than twice its standard error")
    own_se = [float(s) if t > 0 else None for s, t in zip(np.sqrt(np.diag(covariance)), theta, strict=True)]
    return PrefillFit(
        float(theta[0]), float(theta[1]), float(theta[2]), (own_se[0], own_se[1], own_se[2]), n, *errors, before[0], garbage
    )  # fmt: skip


def _columns(u: F64, h: F64) -> F64:
    return np.stack([np.ones_like(u), u, u * (h + u / 2)], axis=1)


def _alikeness(x: F64) -> float:
    return float(np.linalg.cond(x / np.sqrt((x**2).mean(axis=0))))


def _theta(rates: Rates) -> F64:
    return np.array([rates.base_s, rates.a, rates.b])


def _errors(predicted: F64, seconds: F64) -> tuple[float, float]:
    relative = np.abs(seconds / np.maximum(predicted, 1e-6) - 1)
    return float(np.quantile(relative, 0.5)), float(np.quantile(relative, 0.9))


def _robust(x: F64, y: F64) -> tuple[F64, Mask, float, F64]:
    """Coefficients, who counted at all, robust standard deviation of the relative residuals, and what they are relative to."""
    smallest = 1e-3 * float(np.median(y))
    theta = _nonnegative(x, y, np.ones(len(y)))
    for _ in range(30):
        theta = _nonnegative(x, y, 1 / np.maximum(np.abs(y - x @ theta), smallest))
    counted, sigma, scale = np.ones(len(y), np.bool_), 0.0, np.ones(len(y))
    for _ in range(30):
        predicted = x @ theta
        scale = np.maximum(predicted, 0.1 * float(np.median(predicted)))
        r = (y - predicted) / scale
        sigma = max(1.4826 * float(np.median(np.abs(r))), 1e-4)
        weight = np.maximum(1 - (r / (_TUKEY * sigma)) ** 2, 0.0) ** 2
        counted = weight > 0
        before, theta = theta, _nonnegative(x, y, weight / scale**2)
        if np.abs(x @ (theta - before)).max() <= 1e-6 * smallest:
            break
    return theta, counted, sigma, scale


def _nonnegative(x: F64, y: F64, weight: F64) -> F64:
    """Weighted least squares with coefficients >= 0: the best of all subsets of columns whose plain solution is not negative."""
    unit = np.sqrt((x**2).mean(axis=0))
    xw = x / unit * weight[:, None]
    gram, moment = xw.T @ (x / unit), xw.T @ y
    best, gain = np.zeros(3), 0.0
    for columns in _SUBSETS:
        part = gram[np.ix_(columns, columns)]
        try:
            solution = np.linalg.solve(part, moment[columns])
        except np.linalg.LinAlgError:  # these columns are the same
            continue
        if len(columns) == 3 and (solution >= 0).all():
            best = solution  # nothing can be better
            break
        if (solution >= 0).all() and (found := float(moment[columns] @ solution)) > gain:
            best, gain = np.zeros(3), found
            best[columns] = solution
    theta: F64 = best / unit
    return theta


def _covariance(x: F64, free: Mask, sigma: float) -> F64:
    """Of the coefficients that are not at their bound; x: columns over scale. 0 elsewhere."""
    unit = np.sqrt((x**2).mean(axis=0))
    columns = np.flatnonzero(free)
    part = (x / unit)[:, columns]
    out = np.zeros((3, 3))
    out[np.ix_(columns, columns)] = sigma**2 * np.linalg.pinv(part.T @ part) / np.outer(unit[columns], unit[columns])
    return out
