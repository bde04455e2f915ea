"""Rows of `workers`: what events and metrics pages say of each worker and rank now."""

from __future__ import annotations

from collections.abc import Sequence

from collector.fold import Fold
from collector.standing import Standing
from collector.store.columns import micros


def worker_rows(fold: Fold, standings: Sequence[Standing]) -> list[tuple[object, ...]]:
    """In the contract's column order. standings: by worker number."""
    rows: list[tuple[object, ...]] = []
    for number, who in enumerate(fold.workers):
        w, load = fold.residency.workers[number], fold.loads.get(who)
        started = bool(w["started"])
        rows.append(
            (
                who.pool, who.worker, who.rank,
                None if load is None else load.engine,
                None if load is None else load.model,
                None if load is None else load.up,
                str(standings[number].trust),
                standings[number].reason or None,
                int(w["epoch"]) if started else None,
                int(w["seq"]) if started and w["has_seq"] else None,
                micros(float(w["epoch_at_s"])) if started and w["epoch_at_s"] > 0 else None,
                micros(float(w["last_time_s"])) if started and w["last_time_s"] > 0 else None,
                None if load is None else micros(load.time_s),
                int(w["resident"]) if started else None,
                int(w["peak"]) if started else None,
                int(w["distinct"]) if started else None,
                None if load is None else load.capacity_blocks,
                int(w["block_size"]) or None if load is None or load.block_size is None else load.block_size,
                None if load is None else load.running,
                None if load is None else load.waiting,
                None if load is None else load.kv_usage,
                int(w["restarts"]),
            )
        )  # fmt: skip
    return rows
