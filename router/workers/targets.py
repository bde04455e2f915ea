"""What a request can be sent to: a worker, or one rank of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.fleet import Pool, Worker
from schemas.kv_events import WorkerId

RANK_HEADER = "X-data-parallel-rank"


@dataclass(frozen=True, slots=True)
class Target:
    """What a request can be sent to. rank None: the engine chooses among its ranks. sources: whose blocks it may find there."""

    number: int
    worker: str
    rank: int | None
    url: str
    sources: tuple[WorkerId, ...]
    headers: tuple[tuple[str, str], ...] = ()


def targets_of(pool: Pool, workers: Sequence[Worker], choose_rank: bool) -> tuple[Target, ...]:
    """One target a worker; one a rank where the engine (vLLM) lets the request choose."""
    out: list[Target] = []
    for w in workers:
        sources = tuple(WorkerId(pool.name, w.name, r) for r in range(w.ranks))
        if w.ranks == 1:
            out.append(Target(len(out), w.name, 0, w.url, sources))
        elif choose_rank and w.engine == "vllm":
            for rank, source in enumerate(sources):
                out.append(Target(len(out), w.name, rank, w.url, (source,), ((RANK_HEADER, str(rank)),)))
        else:
            out.append(Target(len(out), w.name, None, w.url, sources))
    return tuple(out)
