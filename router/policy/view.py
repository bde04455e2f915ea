"""What the index says by slot, turned into what a pool's targets hold by target: one compiled pass for a decision.

A target is one slot (worker and rank), or several where the engine chooses among its ranks: then its longest overlap counts and its least
trust. Trust is no better than the silence of the bridge, the lag of the index and the bridge's hash key allow (pools.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from router.policy.cost import I64


class SlotMap(NamedTuple):
    """Slots of target t: numbers[starts[t] : starts[t + 1]]."""

    starts: I64
    numbers: I64

    @classmethod
    def of(cls, slots: Sequence[Sequence[int]]) -> SlotMap:
        return cls(np.cumsum([0, *(len(s) for s in slots)], dtype=np.int64), np.array([n for s in slots for n in s], np.int64))


def trust_by_target(
    slots: SlotMap,
    trust: npt.NDArray[np.uint8],
    heard_s: npt.NDArray[np.float64],
    level_s: float,
    stale_before_s: float,
    blind_before_s: float,
) -> npt.NDArray[np.uint8]:
    """Trust codes by target. heard_s: a word from the slot's bridge; level_s: the index was level with its log. What is older than
    stale_before_s counts as degraded at most, than blind_before_s as blind."""
    out = np.empty(len(slots.starts) - 1, np.uint8)
    _trust(slots.starts, slots.numbers, trust, heard_s, level_s, stale_before_s, blind_before_s, out)
    return out


def tokens_by_target(slots: SlotMap, tiers: Sequence[npt.NDArray[np.int32]], expected: npt.NDArray[np.int32], block_size: int) -> I64:
    """tiers: blocks by slot on GPU, CPU, disk. Shape (4, targets): tokens on each, and expected (at least their sum)."""
    out = np.zeros((4, len(slots.starts) - 1), np.int64)
    _gather(slots.starts, slots.numbers, tiers[0], tiers[1], tiers[2], expected, block_size, out)
    return out


@numba.njit(cache=True)
def _gather(starts, numbers, gpu, cpu, disk, expected, block_size, out):  # type: ignore[no-untyped-def]
    for t in range(len(starts) - 1):
        best, most = -1, -1
        for i in range(starts[t], starts[t + 1]):
            slot = numbers[i]
            if expected[slot] > most:
                best, most = slot, expected[slot]
        if best >= 0:
            out[0, t] = gpu[best] * block_size
            out[1, t] = cpu[best] * block_size
            out[2, t] = disk[best] * block_size
            out[3, t] = most * block_size


@numba.njit(cache=True)
def _trust(starts, numbers, trust, heard_s, level_s, stale_before_s, blind_before_s, out):  # type: ignore[no-untyped-def]
    for t in range(len(starts) - 1):
        least = 2 if starts[t + 1] > starts[t] else 0
        for i in range(starts[t], starts[t + 1]):
            slot = numbers[i]
            word_s = min(heard_s[slot], level_s)
            cap = 0 if word_s < blind_before_s else 1 if word_s < stale_before_s else 2
            least = min(least, cap, trust[slot])
        out[t] = least
