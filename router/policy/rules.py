"""What the settings say of choosing, besides the cost model's coefficients, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyRules:
    """drain_min_hit: share of a prompt that a draining worker must hold to take it. cold_tokens_per_s: uncached tokens a second for a
    worker that joined less than cold_s ago, 0 is no cap. engine_load_fresh_s: how long an engine's own load counts. shadows: names of
    POLICIES."""

    drain_min_hit: float = 0.5
    cold_tokens_per_s: float = 8000.0
    cold_s: float = 120.0
    engine_load_fresh_s: float = 3.0
    shadows: tuple[str, ...] = ()
