"""What a request would cost on each worker, in seconds. Pure.

For each worker (routers' comparison, section 4 of its notes; measured there: alpha and beta are the knobs that matter, coefficients off
by 5x hardly change the choice):

    J = alpha * Q + T * (1 + beta * D) + E[out] * c * D
    T = a * u + b * u * (h + u / 2)     prefill seconds of u uncached tokens after h held ones
    Q = seconds of prefill admitted there and not yet at the first token
    D = requests decoding there, which a prefill stalls and which share the batch

h counts confirmed blocks, less where the index is not to be trusted or the block lies in a lower tier, and blocks that are expected
there from requests just dispatched. At least one token is always computed: h is at most the whole blocks of the prompt without its
last token.

All of it is vectors over the pool's workers, so that a decision among 64 costs about 20 us.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Of the cost model. Seconds a token (a), a token squared (b), an output token and decoding request (c)."""

    alpha: float = 0.5
    beta: float = 0.1
    a: float = 1.0e-4
    b: float = 1.0e-9
    c: float = 5.0e-5
    expected_output_tokens: float = 200.0
    lower_tier_weight: float = 0.7
    degraded_weight: float = 0.8
    tie_s: float = 0.0005


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """One request and the pool's workers as they are now; arrays of shape (workers,).

    prompt_tokens may be an estimate when the prompt is not tokenized; then all overlaps are 0 and only the load decides.
    held, gpu, expected: tokens of the longest prefix (index.Overlaps, in tokens). trust: code of router.index. allowed: may take it.
    """

    prompt_tokens: int
    block_size: int
    held: I64
    gpu: I64
    expected: I64
    trust: npt.NDArray[np.uint8]
    queue_s: F64
    decoding: I64
    in_flight: I64
    allowed: Mask


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """The cost model's parts in seconds, shape (workers,)."""

    queue_s: F64
    prefill_s: F64
    decode_s: F64
    cost_s: F64


def most_cached_tokens(prompt_tokens: int, block_size: int) -> int:
    """An engine computes at least the last token: so many tokens at most come from the cache."""
    return max(prompt_tokens - 1, 0) // block_size * block_size


def terms(now: Situation, k: Coefficients) -> Terms:
    """The cost model. Confirmed overlap counts by trust: BLIND 0, DEGRADED `degraded_weight`, EXACT 1."""
    out = np.empty((3, len(now.queue_s)))
    _terms(
        now.prompt_tokens, most_cached_tokens(now.prompt_tokens, now.block_size),
        now.held, now.gpu, now.expected, now.trust, now.queue_s, now.decoding,
        k.alpha, k.beta, k.a, k.b, k.c * k.expected_output_tokens, k.lower_tier_weight, k.degraded_weight, out,
    )  # fmt: skip
    return Terms(now.queue_s, out[0], out[1], out[2])


@numba.njit(cache=True)
def _terms(  # type: ignore[no-untyped-def]
    tokens, most, held, gpu, expected, trust, queue_s, decoding, alpha, beta, a, b, c_out, lower_weight, degraded_weight, out
):
    for w in range(len(queue_s)):
        weight = 1.0 if trust[w] == 2 else degraded_weight if trust[w] == 1 else 0.0
        hit = weight * (gpu[w] + lower_weight * (held[w] - gpu[w])) + (expected[w] - held[w])
        hit = min(hit, float(most))
        uncached = tokens - hit
        prefill_s = a * uncached + b * uncached * (hit + uncached / 2)
        decode_s = prefill_s * beta * decoding[w] + c_out * decoding[w]
        out[0, w] = prefill_s
        out[1, w] = decode_s
        out[2, w] = alpha * queue_s[w] + prefill_s + decode_s
