"""What a prefill costs: seconds = base + a*u + b*u*(cached + u/2) of u uncached tokens behind `cached` cached ones."""

from __future__ import annotations

import numpy as np

from collector.analytics.attributed import F64, U8, U32
from schemas.causes import Cause


class CostModel:
    """Coefficients by (pool, model, kind of worker)."""

    def run_seconds(self, pool: str, worker: str, model: str, run_causes: U8, run_tokens: U32) -> F64:
        """Prefill seconds that each run of a prompt cost, shape (runs,): 0 of hits, NaN where nothing is known of such workers.

        run_causes, run_tokens: as in `Attributed`.
        """
        return np.where(run_causes == Cause.HIT, 0.0, np.nan)
