"""Which prefix each worker of a pool held at a past moment, for many requests at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from collector.residency import Residency
from schemas.block_hash import U64


def held_at(
    state: Residency, workers: Sequence[int], chains: Sequence[U64], times_s: Sequence[float]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Prefix blocks that each worker held just after its last event at or before a time, and its trust then.

    workers: numbers of the pool's ranks, the same for all queries; chains: block names of each query, as of a prompt; times_s: the
    moment of each query (unix seconds). Returns (blocks i32, trust u8: `residency.BLIND`, `DEGRADED`, `EXACT`), both of
    shape (queries, workers). blocks -1: the ring of recent events no longer reaches back. Windowed groups do not count,
    and a block is held when each other group of the worker has a copy of it on any tier, as in `moments`.
    """
    raise NotImplementedError
