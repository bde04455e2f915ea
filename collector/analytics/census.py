"""What the caches hold now, and how much of it is held more than once: one pass over the residency's table.

Of GPU blocks of current lives. Blocks held are counted exactly; contents from a sample that is told by the blocks' names (distinct.py):
one in 2^level, the same ones on every worker, so that copies meet. With `SAMPLE` names in it the standard error is 0.3 % for a pool that
holds all of them, and 1 % for one that holds a tenth.

Costs a pass over the table (16 bytes a slot): once a window is enough, and once a minute often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from collector.analytics.distinct import mix
from collector.residency import Residency
from collector.slots import COUNT
from schemas.block_hash import U64
from schemas.kv_events import WorkerId
from schemas.workers import WorkerLoad

SAMPLE = 1 << 17
SILENT_S = 60.0
_GROUP = np.uint64(0xFF)

Scope = tuple[str, str | None]
"""(pool, worker); worker None: the pool."""


@dataclass(frozen=True, slots=True)
class Held:
    """None: not known. resident_blocks: copies counted; distinct_blocks: contents among them, with its relative standard error."""

    capacity_blocks: int | None = None
    block_size: int | None = None
    resident_blocks: int | None = None
    distinct_blocks: int | None = None
    error: float = 0.0


@numba.njit(cache=True)
def distinct_blocks(table, place, level, resident, names, places):  # type: ignore[no-untyped-def]
    """Scans the table of `Residency`. place: by instance number, where its blocks are counted, -1: nowhere; i32.

    resident, i64, by place: adds copies. names, places: the sample, mixed names and where they are held, as far as there is room.
    Returns how many are in the sample.
    """
    limit = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(level)
    n = 0
    for i in range(len(table)):
        rest = table[i, 1]
        instance = rest >> np.uint64(42)
        if rest & COUNT == 0 or instance >= len(place) or rest >> np.uint64(40) & np.uint64(3) != 0:
            continue
        p = place[instance]
        if p < 0:
            continue
        resident[p] += np.int64(rest & COUNT)
        m = mix(table[i, 0] ^ (rest >> np.uint64(32) & _GROUP) * np.uint64(0x9E3779B97F4A7C15))
        if m <= limit:
            if n < len(names):
                names[n] = m
                places[n] = p
            n += 1
    return n


def present_now(workers: Sequence[WorkerId], loads: Mapping[WorkerId, WorkerLoad], now_s: float = math.inf) -> list[bool]:
    """Who is part of the fleet, as far as loads tell: not a worker whose engine does not answer, nor one whose newest reading is older than
    the fleet's newest by more than `SILENT_S`. Without any reading it is taken to be there.

    now_s: by the clock here (unix seconds), so that one worker whose clock is ahead does not silence all others."""
    newest_s = min(now_s, max((load.time_s for load in loads.values()), default=0.0))
    return [(load := loads.get(who)) is None or (load.up and load.time_s >= newest_s - SILENT_S) for who in workers]


def held_now(
    residency: Residency,
    workers: Sequence[WorkerId],
    loads: Mapping[WorkerId, WorkerLoad],
    present: Sequence[bool] | None = None,
    sample: int = SAMPLE,
) -> dict[Scope, Held]:
    """Of each worker, ranks together, and each pool. workers: by number; present: likewise, who counts (default: `present_now`)."""
    present = present_now(workers, loads) if present is None else present
    members: dict[Scope, list[int]] = {}
    for n, who in enumerate(workers):
        if present[n]:
            members.setdefault((who.pool, who.worker), []).append(n)
    places = {scope: i for i, scope in enumerate(members)}
    known = [(n, place) for scope, place in places.items() for n in members[scope] if residency.workers[n]["started"]]
    held = _count(residency, [n for n, _ in known], [place for _, place in known], len(places), sample)
    order = np.lexsort((held.names, held.places))
    names, where = held.names[order], held.places[order]
    fresh = np.ones(len(names), np.bool_)
    fresh[1:] = (names[1:] != names[:-1]) | (where[1:] != where[:-1])
    own = np.bincount(where[fresh], minlength=len(places))
    started = {place for _, place in known}
    out: dict[Scope, Held] = {}
    for scope, place in places.items():
        parts = int(held.resident[place]), int(own[place])
        out[scope] = _held(residency, members[scope], workers, loads, held.level, parts if place in started else None)
    for pool in dict.fromkeys(pool for pool, _ in members):
        mine = [place for scope, place in places.items() if scope[0] == pool]
        distinct = len(np.unique(names[np.isin(where, mine)]))
        parts = int(held.resident[mine].sum()), distinct
        everyone = [n for scope, numbers in members.items() if scope[0] == pool for n in numbers]
        out[pool, None] = _held(residency, everyone, workers, loads, held.level, parts if started.intersection(mine) else None)
    return out


def _held(
    residency: Residency, numbers: Sequence[int], workers: Sequence[WorkerId], loads: Mapping[WorkerId, WorkerLoad], level: int,
    counted: tuple[int, int] | None,
) -> Held:  # fmt: skip
    """counted: blocks held, and names in the sample; None: no event was received."""
    capacities = [load.capacity_blocks if (load := loads.get(workers[n])) else None for n in numbers]
    known = [c for c in capacities if c is not None]
    sizes = {int(residency.workers[n]["block_size"]) for n in numbers} - {0}
    resident, kept = counted or (0, 0)
    return Held(
        sum(known) if len(known) == len(capacities) else None,
        sizes.pop() if len(sizes) == 1 else None,
        None if counted is None else resident,
        None if counted is None else kept << level,
        math.sqrt((1 - 0.5**level) / kept) if kept else 0.0,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    level: int
    resident: npt.NDArray[np.int64]
    names: U64
    places: npt.NDArray[np.int32]


def _count(residency: Residency, numbers: Sequence[int], places: Sequence[int], scopes: int, sample: int) -> _Sample:
    which = np.array(numbers, np.int64)
    instances = residency.workers["instance"][which].astype(np.int64)
    place = np.full(int(instances.max(initial=0)) + 1, -1, np.int32)
    place[instances] = places
    slots = int(residency.workers["distinct"][which].sum())
    level = max(0, math.ceil(math.log2(max(1, slots) / sample)))
    while True:
        resident = np.zeros(scopes, np.int64)
        names, where = np.empty(2 * sample, np.uint64), np.empty(2 * sample, np.int32)
        n = int(distinct_blocks(residency.table, place, level, resident, names, where))
        if n <= 2 * sample:
            return _Sample(level, resident, names[:n], where[:n])
        level += 1  # the sample is no fair one: made-up names of a test
