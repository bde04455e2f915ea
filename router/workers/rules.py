"""What the settings say of a pool's life with its workers, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.workers.breaker import BreakerRules
from router.workers.probes import ProbeRules


@dataclass(frozen=True, slots=True)
class WorkerRules:
    """max_in_flight: of one target; 0 is no limit. retry_statuses: of engines, before anything was passed on."""

    breaker: BreakerRules = field(default_factory=BreakerRules)
    probes: ProbeRules = field(default_factory=ProbeRules)
    retry_ratio: float = 0.2
    retry_burst: float = 100.0
    retry_statuses: frozenset[int] = frozenset((502, 503))
    max_in_flight: int = 0
    max_queue: int = 1024
    max_queue_wait_s: float = 30.0
    worker_drain_s: float = 600.0
