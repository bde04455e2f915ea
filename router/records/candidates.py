"""Which workers a decision names, and what it says of them: the chosen one, the best others, the runner-up, the longest prefix anywhere.

One compiled pass over the pool's workers takes out of the decision's arrays what is recorded (some 10 us at 64 and at 512 workers; 60 us
by NumPy, a number at a time). tests/router/records/test_candidates.py holds its plain twin.
"""

from __future__ import annotations

import numba
import numpy as np

from router.frozen import value
from router.pools import Decided

MOST = 8
"""The chosen worker and the best others by cost; one more where none of them holds the longest prefix."""

_INTS = ("held", "gpu", "cpu", "disk", "expected", "trust", "in_flight", "decoding", "allowed", "draining")
_FLOATS = ("queue_s", "prefill_s", "load_s", "decode_s", "cost_s")


@value(eq=True)
class Listed:
    """Targets by number. ints, floats: a row for each of `numbers`, in the order of _INTS and _FLOATS. runner_up, longest: None: nobody."""

    numbers: list[int]
    ints: list[list[int]]
    floats: list[list[float]]
    runner_up: int | None
    margin_s: float | None
    longest: int | None
    longest_tokens: int
    considered: int


def listed(decided: Decided) -> Listed:
    """The chosen one first, then by what the policy minimised (else the model's cost), those that could not be chosen last."""
    now, terms, score = decided.now, decided.terms, decided.choice.score
    numbers, ints, floats, runner_up, longest, considered = _listed(
        now.gpu, now.cpu, now.disk, now.expected, now.trust, now.in_flight, now.decoding, now.allowed, now.draining,
        decided.pool.present, terms.queue_s, terms.prefill_s, terms.load_s, terms.decode_s, terms.cost_s,
        terms.cost_s if score is None else score, decided.target.number, MOST,
    )  # fmt: skip
    tokens = 0 if longest < 0 else int(now.gpu[longest] + now.cpu[longest] + now.disk[longest])
    margin_s = None if runner_up < 0 else float(terms.cost_s[runner_up] - terms.cost_s[decided.target.number])
    return Listed(
        numbers.tolist(), ints.tolist(), floats.tolist(), None if runner_up < 0 else runner_up, margin_s, longest if tokens else None,
        tokens, considered,
    )  # fmt: skip


@numba.njit(cache=True)
def _listed(  # type: ignore[no-untyped-def]
    gpu, cpu, disk, expected, trust, in_flight, decoding, allowed, draining, present, queue_s, prefill_s, load_s, decode_s, cost_s, key,
    chosen, most,
):  # fmt: skip
    numbers = np.full(most + 1, -1, np.int64)
    numbers[0] = chosen
    keys = np.full(most, np.inf)
    n = 1
    runner_up = longest = np.int64(-1)
    longest_tokens = np.int64(-1)
    considered = 0
    for w in range(len(key)):
        if not present[w]:
            continue
        held = gpu[w] + cpu[w] + disk[w]
        if held > longest_tokens:
            longest, longest_tokens = np.int64(w), held
        if allowed[w]:
            considered += 1
        if w == chosen:
            continue
        if allowed[w] and (runner_up < 0 or cost_s[w] < cost_s[runner_up]):
            runner_up = np.int64(w)
        mine = key[w] if allowed[w] else np.inf
        if n == most and not mine < keys[n - 1]:
            continue
        if n < most:
            n += 1
        at = n - 1
        while at > 1 and mine < keys[at - 1]:
            numbers[at], keys[at] = numbers[at - 1], keys[at - 1]
            at -= 1
        numbers[at], keys[at] = w, mine
    if longest_tokens > 0 and not (numbers[:n] == longest).any():
        numbers[n] = longest
        n += 1
    ints = np.empty((n, 10), np.int64)
    floats = np.empty((n, 5))
    for i in range(n):
        w = numbers[i]
        ints[i, 0] = gpu[w] + cpu[w] + disk[w]
        ints[i, 1], ints[i, 2], ints[i, 3], ints[i, 4] = gpu[w], cpu[w], disk[w], expected[w]
        ints[i, 5], ints[i, 6], ints[i, 7], ints[i, 8], ints[i, 9] = trust[w], in_flight[w], decoding[w], allowed[w], draining[w]
        floats[i, 0], floats[i, 1], floats[i, 2] = queue_s[w], prefill_s[w], load_s[w]
        floats[i, 3], floats[i, 4] = decode_s[w], cost_s[w]
    return numbers[:n], ints, floats, runner_up, longest, considered
