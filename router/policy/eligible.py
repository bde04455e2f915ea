"""Who may be chosen at all, before any policy looks. Pure, and the same for every policy.

Two rules, in this order, each lifted when nobody would be left:

    draining   a worker that is to go takes only what goes on there: a hit that is more than nothing and at least `drain_min_hit` of the
               prompt, so that it empties while its sessions end where their blocks are
    cold cap   a worker that has just joined and has had its share of cold tokens (cold.py) takes only prompts of which it holds half

A hit counts expected blocks, too: the turn before may be on its way. It counts nothing where the index is blind, but for those.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from router.policy.cost import F64, I64, Mask

WARM_HIT = 0.5
"""Share of a prompt that a worker must hold for the prompt not to be cold there."""


def eligible(
    allowed: Mask,
    prompt_tokens: int,
    gpu: I64,
    cpu: I64,
    disk: I64,
    expected: I64,
    trust: npt.NDArray[np.uint8],
    draining: Mask,
    cold_left_tokens: F64,
    drain_min_hit: float,
) -> Mask:
    """Those of `allowed` that the rules leave; shape (workers,). Tokens as in cost.Situation."""
    out = np.empty((2, len(allowed)), np.bool_)
    which = _eligible(allowed, prompt_tokens, gpu, cpu, disk, expected, trust, draining, cold_left_tokens, drain_min_hit, out)
    return allowed if which < 0 else out[which]


@numba.njit(cache=True)
def _eligible(allowed, tokens, gpu, cpu, disk, expected, trust, draining, cold_left, drain_min_hit, out):  # type: ignore[no-untyped-def]
    """Row 0 of out: after the first rule; row 1: after both. Returns the row that holds, -1: nobody is left by the first rule."""
    drained = capped = False
    for pass_ in range(2):  # the second one lifts the first rule
        for w in range(len(allowed)):
            hit = expected[w] - (gpu[w] + cpu[w] + disk[w] if trust[w] == 0 else 0)
            stays = not draining[w] or (hit > 0 and hit >= drain_min_hit * tokens)
            out[0, w] = allowed[w] and (stays or pass_ == 1)
            out[1, w] = out[0, w] and (cold_left[w] > 0.0 or hit >= WARM_HIT * tokens)
            drained = drained or out[0, w]
            capped = capped or out[1, w]
        if drained:
            break
    return 1 if capped else 0 if drained else -1
