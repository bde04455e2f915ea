"""A week of a fleet's life leaves a collector no larger than its budgets say."""

from __future__ import annotations

from collections import Counter, defaultdict

from collector.core import Core
from collector.settings import CollectorSettings
from schemas.stream.base import StoredRecord
from simulator.agents import AgentTraffic
from simulator.fleet import START_S, Fleet, FleetSpec
from simulator.virtual_worker import EngineSpec

DAY_S = 86_400.0
TURN_S = 1_800.0


class Fed:
    """A sink that hands half an hour at a time to the core of a collector, as its loop would, and writes nothing."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.held_bytes: dict[int, int] = {}
        """By day: the most that was held."""
        self.rows: Counter[str] = Counter()
        self._waiting: dict[str, list[StoredRecord]] = defaultdict(list)
        self._offsets: Counter[str] = Counter()
        self._next_s = START_S + TURN_S

    def __call__(self, topic: str, key: bytes, value: bytes, time_s: float) -> None:
        if time_s >= self._next_s:
            self.turn(time_s)
            self._next_s = time_s + TURN_S
        self._waiting[topic].append(StoredRecord(self._offsets[topic], int(time_s * 1000), key, value, ()))
        self._offsets[topic] += 1

    def turn(self, now_s: float) -> None:
        fold, analyses = self.core.fold, self.core.analyses
        for topic, records in self._waiting.items():
            fold.take((topic, 0), topic, records, now_s)
        self._waiting.clear()
        fold.settle(now_s - 0.01, now_s - 0.01, now_s - 0.01)
        analyses.take(fold.take_told())
        analyses.close(min(now_s - 60.0, fold.oldest_open_s()))
        self.rows.update({table: len(rows) for table, rows in analyses.outputs().items()})
        for start in fold.rollups.closing(now_s - 60.0):
            fold.rollups.drop([start])
        fold.written()
        analyses.written()
        self.core.contents.written()
        day = int((now_s - START_S) // DAY_S)
        held = analyses.held_bytes() + self.core.contents.held_bytes() + fold.residency.held_bytes()
        self.held_bytes[day] = max(self.held_bytes.get(day, 0), held)


def test_memory_stays_bounded_in_a_simulated_week() -> None:
    core = Core.of(
        CollectorSettings(
            recent_events=1 << 12,
            recent_hashes=1 << 16,
            ghost_blocks=2000,
            seen_blocks=2000,
            filter_blocks=20_000,
            content_entries=4000,
            reuse_blocks=4000,
        )
    )
    fed = Fed(core)
    # Ten sessions a day on caches that hold about one of them: everything is evicted again and again.
    traffic = AgentTraffic(start_s=START_S, spread_s=7 * DAY_S, sessions=70, think_s=60.0, scale=0.05, templates=40, turns=(4, 8), seed=5)
    spec = FleetSpec(workers=2, engine=EngineSpec(block_size=16, capacity_blocks=150), load_every_s=3600.0, seed=5)
    Fleet(spec, fed).run(traffic.flows())
    days = sorted(fed.held_bytes)
    assert len(days) >= 7
    assert fed.rows["reuse_curves"] > 1000 and fed.rows["pressure"] > 50, "windows were closed and written"
    first, last = (max(fed.held_bytes[d] for d in some) for some in (days[1:4], days[-3:]))
    assert last < 1.1 * first, f"held bytes by day: {fed.held_bytes}"
    assert core.fold.counters["told"] > 300
