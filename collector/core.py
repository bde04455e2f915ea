"""The collector's state put together: the fold, what it asks while it attributes, and the analyses that are fed with what it tells.

    fold --asks--> contents (what text was seen), costs (what a prefill costs), uses (when a block was used)
      +--told requests--> analyses: uses, costs, divergence, hotspots, reuse curves, pressure

A checkpoint holds all of it; see analytics/analyses.py for what of it is journaled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy.typing as npt

from collector.analytics.analyses import Analyses
from collector.analytics.attributed import Analysis
from collector.analytics.census import Scope, held_now, present_now
from collector.analytics.content_index import ContentIndex
from collector.analytics.contents_journal import ContentsJournal
from collector.analytics.divergence import Divergence
from collector.analytics.holders import holders
from collector.analytics.hotspots import Hotspots
from collector.analytics.pressure import Pressure
from collector.analytics.reuse import ReuseCurves
from collector.fold import Fold
from collector.residency import Residency
from collector.settings import CollectorSettings
from schemas.kv_events import WorkerId
from schemas.workers import WorkerLoad

GPU = "GPU"
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    fold: Fold
    contents: ContentsJournal
    analyses: Analyses
    pressure: Pressure

    @classmethod
    def of(cls, s: CollectorSettings) -> Self:
        """An empty one. Raises SettingsError for a fleet file that cannot be read."""
        contents, costs = ContentsJournal(ContentIndex(s.content_entries)), s.cost_model()
        fold = Fold(
            Residency(s.recent_events, s.recent_hashes, ghosts=s.ghost_blocks, seen=s.seen_blocks, filtered=s.filter_blocks),
            lateness_s=s.lateness_s,
            clock_tolerance_s=s.clock_tolerance_s,
            outcome_wait_s=s.outcome_wait_s,
            decision_wait_s=s.decision_wait_s,
            open_bytes=s.open_bytes,
            contents=contents,
            costs=costs,
        )
        pressure = Pressure(fold.lives, fold.workers)
        parts: dict[str, Analysis] = {
            "uses": fold.uses,
            "costs": costs,
            "divergence": Divergence(),
            "reuse": ReuseCurves(lambda: capacities(fold.workers, fold.loads, fold.taken_s), s.reuse_blocks),
            "pressure": pressure,
            "hotspots": Hotspots(lambda prefix: holders(fold.residency, fold.workers, prefix)),
        }
        return cls(fold, contents, Analyses(parts), pressure)

    def count_held(self) -> None:
        """Looks at what the caches hold now. Reads the whole table."""
        fold = self.fold
        self.pressure.hold(held_now(fold.residency, fold.workers, fold.loads, present_now(fold.workers, fold.loads, fold.taken_s)))

    def save(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of all that `load` needs. Right after a commit."""
        return {
            **self.fold.save(),
            **{f"analyses/{name}": value for name, value in self.analyses.save().items()},
            **{f"contents/{name}": value for name, value in self.contents.save().items()},
        }

    def load(self, saved: Arrays) -> None:
        """A checkpoint of an earlier version may lack parts: these begin empty. Raises KeyError, ValueError for a damaged one."""
        self.fold.load(saved)
        for prefix, part in (("analyses/", self.analyses), ("contents/", self.contents)):
            mine = {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
            if mine:
                part.load(mine)


def capacities(workers: Sequence[WorkerId], loads: Mapping[WorkerId, WorkerLoad], now_s: float) -> dict[Scope, dict[str, int]]:
    """Usable blocks by tier of each worker, ranks together, and each pool, as the engines say that are there (`present_now`).

    Not in it: of whom an engine does not say, and who is down or silent; a pool is as large as those that are left.
    """
    sizes: dict[Scope, list[int | None]] = {}
    for who, there in zip(workers, present_now(workers, loads, now_s), strict=True):
        if there:
            blocks = load.capacity_blocks if (load := loads.get(who)) is not None else None
            for scope in ((who.pool, who.worker), (who.pool, None)):
                sizes.setdefault(scope, []).append(blocks)
    known = {scope: [n for n in parts if n is not None] for scope, parts in sizes.items()}
    return {scope: {GPU: sum(parts)} for scope, parts in known.items() if len(parts) == len(sizes[scope])}
