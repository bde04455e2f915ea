"""How far a worker's index can be believed *now*: what its events say of it, and whether anybody still watches it. Pure.

`Residency.trust` falls with what was lost; but a bridge that is gone loses nothing, it says nothing. So trust falls with its silence, too:

    word (load reading or KV batch) <= stale_after_s old    as the events say; at most degraded while the metrics page does not answer
    older                                                   at most degraded
    older than blind_after_s                                blind

The same two limits hold in the router, so that both say the same of a worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from collector.fold import Fold
from schemas.workers import Trust


@dataclass(frozen=True, slots=True)
class AsOf:
    """now_s, read_until_s: unix seconds; every word that was written before read_until_s was received."""

    now_s: float
    read_until_s: float
    stale_after_s: float
    blind_after_s: float


@dataclass(frozen=True, slots=True)
class Standing:
    """reason: why the trust is not exact, else empty. silent_s: age of the newest word from its bridge."""

    trust: Trust
    reason: str
    silent_s: float
    stale: bool


def standing(fold: Fold, number: int, as_of: AsOf) -> Standing:
    trust, reason = fold.residency.trust(number)
    heard_s = fold.heard_s(number)
    silent_s = max(0.0, as_of.now_s - heard_s)
    if silent_s > as_of.stale_after_s:
        if as_of.read_until_s - heard_s > as_of.stale_after_s:
            silence = f"no word from its bridge for {silent_s:.0f} s: is the bridge running?"
        else:
            silence = f"the newest word of its bridge that was read is {silent_s:.0f} s old: the collector is behind, or the stream is away"
        if silent_s > as_of.blind_after_s:
            return Standing(Trust.BLIND, silence, silent_s, True)
        return Standing(Trust.BLIND if trust is Trust.BLIND else Trust.DEGRADED, silence, silent_s, True)
    load = fold.loads.get(fold.workers[number])
    if trust is Trust.EXACT and load is not None and not load.up:
        return Standing(Trust.DEGRADED, "its metrics page does not answer: what its cache holds is not known", silent_s, False)
    return Standing(trust, reason, silent_s, False)


def standings(fold: Fold, as_of: AsOf) -> list[Standing]:
    """By worker number."""
    return [standing(fold, number, as_of) for number in range(len(fold.workers))]
