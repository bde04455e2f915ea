"""Plain twin of the pressure analysis, without budgets: every request is kept, and each figure is told from all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from collector.analytics.attributed import WINDOW_S, Attributed
from schemas.causes import Cause


@dataclass
class NaivePressure:
    kept: list[tuple[int, Attributed, int | None]] = field(default_factory=list)  # window, request, growth
    known: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)
    closed_s: int = 0

    def take(self, r: Attributed) -> None:
        grown = None
        if r.session_id is not None:
            before = self.known.get((r.pool, r.session_id))
            if before is None or before[0] <= r.started_s:
                grown = None if before is None else r.prompt_tokens - before[1]
                self.known[r.pool, r.session_id] = r.started_s, r.prompt_tokens
        self.kept.append((max(int(r.prefill_s // WINDOW_S) * WINDOW_S, self.closed_s), r, grown))

    def close(self, before_s: int) -> None:
        self.closed_s = max(self.closed_s, before_s)

    def figures(self, start: int, pool: str, worker: str | None) -> dict[str, object]:
        pools = [(r, grown) for at, r, grown in self.kept if at == start and r.pool == pool]
        mine = [(r, grown) for r, grown in pools if worker in (None, r.worker)]
        newest: dict[str, Attributed] = {}
        for r, _ in pools:
            if r.session_id is not None and (r.session_id not in newest or newest[r.session_id].started_s <= r.started_s):
                newest[r.session_id] = r
        active = [r for r in newest.values() if worker in (None, r.worker)]
        gaps = sorted(float(g) for r, _ in mine for g in r.gone_s if np.isfinite(g))
        growth = sorted(g for _, g in mine if g is not None)
        return {
            "working_set_blocks": len({b for r, _ in mine for b in r.chain.tolist()}),
            "active_sessions": len(active) if newest else None,
            "active_blocks": len({b for r in active for b in r.chain.tolist()}) if newest else None,
            "returned_blocks": sum(
                int(np.isfinite(g) or c in (Cause.EVICTED, Cause.CLEARED)) for r, _ in mine for g, c in zip(r.gone_s, r.causes, strict=True)
            ),
            "return_p50_s": ranked(gaps, 0.5),
            "return_p90_s": ranked(gaps, 0.9),
            "growth_p50_tokens": ranked(growth, 0.5),
            "growth_p90_tokens": ranked(growth, 0.9),
        }


def ranked(values: list[float], q: float) -> float | None:
    """The value below or at which a share q of them is."""
    return next((v for i, v in enumerate(values) if i + 1 >= q * len(values)), None)
