"""What a request can be sent to: a worker, or one rank of it.

A target's number is its place in all arrays of its pool. It is stable: who joins takes the number of one that is gone and has nothing on
its way any more, or a new one (`renumbered`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from schemas.fleet import Pool, Worker
from schemas.kv_events import WorkerId

RANK_HEADER = "X-data-parallel-rank"


@dataclass(frozen=True, slots=True)
class Target:
    """What a request can be sent to. rank None: the engine chooses among its ranks. sources: whose blocks it may find there.
    hardware: its label in the fleet file, for the cost model's rates."""

    number: int
    worker: str
    rank: int | None
    url: str
    sources: tuple[WorkerId, ...]
    headers: tuple[tuple[str, str], ...] = ()
    hardware: str | None = None


def targets_of(pool: Pool, workers: Sequence[Worker], choose_rank: bool) -> tuple[Target, ...]:
    """One target a worker; one a rank where the engine (vLLM) lets the request choose."""
    out: list[Target] = []
    for w in workers:
        sources = tuple(WorkerId(pool.name, w.name, r) for r in range(w.ranks))
        if w.ranks == 1:
            out.append(Target(len(out), w.name, 0, w.url, sources, hardware=w.hardware))
        elif choose_rank and w.engine == "vllm":
            for rank, source in enumerate(sources):
                out.append(Target(len(out), w.name, rank, w.url, (source,), ((RANK_HEADER, str(rank)),), w.hardware))
        else:
            out.append(Target(len(out), w.name, None, w.url, sources, hardware=w.hardware))
    return tuple(out)


def renumbered(
    old: tuple[Target, ...], present: Sequence[bool], wanted: Sequence[Target], may_reuse: Callable[[int], bool]
) -> tuple[tuple[Target, ...], tuple[bool, ...]]:
    """The tuple of targets after a change, and which of them are present. Who stays keeps his number; who goes keeps his place until it is
    taken. Equal but for the number is the same target: with another address or other ranks a worker is a new one."""
    targets, here = list(old), [False] * len(old)
    at = {replace(t, number=0): t.number for t in old if present[t.number]}
    joining = []
    for target in wanted:
        number = at.get(replace(target, number=0))
        if number is None:
            joining.append(target)
        else:
            here[number] = True
    free = [t.number for t in old if not here[t.number] and may_reuse(t.number)]
    for target in joining:
        if free:
            number = free.pop(0)
            targets[number], here[number] = replace(target, number=number), True
        else:
            targets.append(replace(target, number=len(targets)))
            here.append(True)
    return tuple(targets), tuple(here)
