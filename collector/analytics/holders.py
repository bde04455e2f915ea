"""Who holds a prefix now: since a block's name covers all before it, whoever holds the last block holds the prefix, or did until lately."""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np

from collector.residency import MAX_GROUPS, Residency, count_of
from schemas.kv_events import WorkerId


@numba.njit(cache=True)
def _holding(table, block, instances, owners, out):  # type: ignore[no-untyped-def]
    """out, by worker number: it holds copies of the block in any tier and group. owners: bits of the (tier, group)s that it ever used."""
    for w in range(len(instances)):
        out[w] = False
        for bit in range(64):
            if owners[w] >> np.uint64(bit) & np.uint64(1):
                low = np.uint64(bit // MAX_GROUPS) << np.uint64(8) | np.uint64(bit % MAX_GROUPS)
                if count_of(table, block, np.uint64(instances[w]) << np.uint64(10) | low) > 0:
                    out[w] = True
                    break


def holders(residency: Residency, workers: Sequence[WorkerId], block: int) -> int | None:
    """How many workers, ranks told apart, hold this block; None: of no worker any event was received. workers: by number."""
    known = residency.workers[: len(workers)]
    if not known["started"].any():
        return None
    out = np.empty(len(known), np.bool_)
    _holding(residency.table, np.uint64(block), known["instance"].copy(), known["owners"].copy(), out)
    return int(out.sum())
