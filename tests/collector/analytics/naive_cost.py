"""Plain twin of the cost model's kernel: a list of weighted observations and least squares on it, anew at each step."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from collector.analytics import cost


def best_of_all_subsets(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Weighted least squares with coefficients >= 0."""
    best, error = np.zeros(3), float((w * y**2).sum())
    root = np.sqrt(w)
    for n in (1, 2, 3):
        for columns in itertools.combinations(range(3), n):
            part = x[:, columns]
            size = np.sqrt((w[:, None] * part**2).sum(axis=0))
            found = np.linalg.lstsq(part * root[:, None] / size, y * root, rcond=None)[0] / size
            off = float((w * (y - part @ found) ** 2).sum())
            if (found >= 0).all() and off < error:
                best, error = np.zeros(3), off
                best[list(columns)] = found
    return best


@dataclass
class NaiveFit:
    """Begins with coefficients of somebody else's: `start` is what `first_fit` gave."""

    start: tuple[np.ndarray, float, float]
    above: float = 1.0
    rows: list[list[float]] = field(default_factory=list)  # class, w, w relative, x1, x2, y
    scale: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now, self.residual, self.relative = self.start
        self.used = self.now
        self.version, self.n, self.since, self.grows, self.typical = 1, 0, 0, False, 0.0

    def observe(self, u: float, h: float, y: float, hold: bool) -> None:
        x1, x2 = u / 1e3, u * (h + u / 2) / 1e6
        c = int(2 * math.log2(u))
        expected = float(self.now @ [1, x1, x2])
        r = y - expected
        m = self.scale.setdefault(c, max(self.relative * expected, self.residual, 0.01 * expected, 1e-6))
        limit = cost.HUBER * m
        w = 1.0 if abs(r) <= limit else limit / abs(r) if abs(r) <= cost.CUT * limit or (r > 0 and self.above != 1.0) else 0.0
        if self.above == 1.0 or r < 0:
            self.scale[c] = max(m * 1.05 if abs(r) > m else m / 1.05, cost.LEAST_NOISE * expected, 1e-9)
        if r > 0:
            w *= self.above
        self.typical *= 1.05 if y > self.typical else 1 / 1.05
        for row in self.rows:
            row[1] *= cost.KEPT if row[0] == c else cost.KEPT_OTHERS
            row[2] *= cost.KEPT if row[0] == c else cost.KEPT_OTHERS
        self.rows.append([c, w, w / max(expected, 0.1 * self.typical) ** 2, x1, x2, y])
        self.n += 1
        classes = self._classes()
        if self.n % 32 == 0:
            absolute = [math.log(self.scale[i]) for i, _ in classes]
            relative = [math.log(self.scale[i]) - math.log(max(1e-9, float(self.now @ x))) for i, x in classes]
            self.grows = len(classes) >= cost.ENOUGH_CLASSES and bool(np.var(relative) < np.var(absolute))
        if hold:
            return
        all_ = np.array(self.rows)
        x = np.stack([np.ones(len(all_)), all_[:, 3], all_[:, 4]], axis=1)
        self.now = best_of_all_subsets(x, all_[:, 5], all_[:, 2 if self.grows else 1])
        off = abs(y - float(self.used @ [1, x1, x2]))
        self.residual = max(self.residual * (1.05 if off > self.residual else 1 / 1.05), 1e-9)
        self.since += 1
        moved = max((abs(float(self.now @ x) / float(self.used @ x) - 1) for _, x in classes), default=0.0)
        if self.since >= cost.LEAST_BETWEEN and (moved > cost.MOVED or self.n in (64, 128, 256, 512, 1024)):
            self.used = self.now
            self.version += 1
            self.since = 0

    def _classes(self) -> list[tuple[int, np.ndarray]]:
        """Those with enough weight, and the mean of their columns."""
        out = []
        for c in sorted({int(row[0]) for row in self.rows}):
            part = np.array([row for row in self.rows if row[0] == c])
            w = part[:, 1]
            if w.sum() >= 8:
                out.append((c, np.array([1, (w * part[:, 3]).sum() / w.sum(), (w * part[:, 4]).sum() / w.sum()])))
        return out
