"""What became of each block: codes and their decoding. (The kernels follow.)

For each hash of a STORED event, `Residency.ring_prior` (u32, parallel to `ring_hashes`) holds what was true just before that store:

    bit 31      NEW_ANYWHERE: no worker ever stored that hash before
    bits 30-29  fate on this worker: NEVER, EVICTED, CLEARED, RESIDENT
    bits 28-0   EVICTED, CLEARED: how long it had been gone, in 10 ms; all ones: long, not known

`Residency.fate(worker, hash) -> (fate, gone_since_s | None)` and `Residency.ever(hash) -> bool` answer as of now, and for arrays
`Residency.fates(worker, hashes, now_s) -> (u8 fate, f32 gone_s)` and `Residency.evers(hashes) -> bool array`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

NEVER, EVICTED, CLEARED, RESIDENT, UNKNOWN = range(5)
"""Fates. UNKNOWN: the store was read before this was kept (a checkpoint of an earlier version)."""

NEW_ANYWHERE = 1 << 31
FATE_SHIFT = 29
LONG = (1 << FATE_SHIFT) - 1
TICKS_PER_S = 100
PRIOR_UNKNOWN = RESIDENT << FATE_SHIFT | LONG


@numba.njit(cache=True)
def prior_fate(prior):  # type: ignore[no-untyped-def]
    """Fate of one u32 of `ring_prior`."""
    if prior == PRIOR_UNKNOWN:
        return UNKNOWN
    return np.int64(prior >> FATE_SHIFT) & 3


@numba.njit(cache=True)
def prior_gone_s(prior):  # type: ignore[no-untyped-def]
    """Seconds that the block had been gone; inf: long, not known; NaN: it was not lost, or that is not known."""
    fate = prior_fate(prior)
    if fate != EVICTED and fate != CLEARED:
        return np.nan
    gone = np.int64(prior) & LONG
    return np.inf if gone == LONG else gone / TICKS_PER_S


@numba.njit(cache=True)
def prior_is_new(prior):  # type: ignore[no-untyped-def]
    """No worker had ever stored it."""
    return np.int64(prior) & NEW_ANYWHERE != 0


def decode_prior(prior: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """(fate u8, gone_s f32, new_anywhere bool), each of prior's shape; gone_s as in `prior_gone_s`."""
    fate = (prior >> np.uint32(FATE_SHIFT) & np.uint32(3)).astype(np.uint8)
    fate[prior == PRIOR_UNKNOWN] = UNKNOWN
    ticks = prior & np.uint32(LONG)
    gone: npt.NDArray[Any] = np.where(ticks == LONG, np.inf, ticks / TICKS_PER_S)
    gone[(fate != EVICTED) & (fate != CLEARED)] = np.nan
    return fate, gone.astype(np.float32), prior & np.uint32(NEW_ANYWHERE) != 0
