"""What a request would cost on each worker, in seconds. Pure.

For each worker (routers' comparison, section 4 of its notes; measured there: alpha and beta are the knobs that matter, coefficients off
by 5x hardly change the choice):

    J = alpha * Q + T * (1 + beta * D) + L + E[out] * (c0 + c1 * D)
    T = base + a * u + b * u * (h + u / 2)   prefill seconds of u uncached tokens after h cached ones
    L = seconds of loading the cached tokens that lie below the GPU
    Q = seconds of prefill admitted there and not yet at the first token
    D = requests decoding there, which a prefill stalls and which share the batch

h counts confirmed tokens, less where the index is not to be trusted, and tokens that are expected there from requests just dispatched.
A block in a lower tier is a hit that costs its loading, unless computing it anew is quicker: the least of "GPU alone", "GPU and CPU" and
"all tiers" counts, so that a slow disk never makes a worker dearer than an empty one. At least one token is always computed: h is at
most the whole blocks of the prompt without its last token.

Each worker has rates of its own, by its hardware, so that a mixed fleet is compared by time and not by tokens. All of it is one compiled
pass over the pool's workers. Rejected: a weight for lower tiers instead of seconds (it had no unit, and none was right for CPU and disk).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import numba
import numpy as np
import numpy.typing as npt

from router.frozen import value

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rates:
    """What one kind of hardware needs. The defaults are an 8B model's on one GPU; loading: 128 KiB of KV a token over PCIe at about
    19 GB/s, from NVMe at about 2.6 GB/s."""

    base_s: float = 0.0  # each prefill
    a: float = 1.0e-4  # seconds an uncached token
    b: float = 1.0e-9  # seconds a pair of an uncached token and one before it
    c0: float = 0.0  # seconds an output token
    c1: float = 5.0e-5  # the same, for each request decoding beside it
    load_cpu_s_per_token: float = 7.0e-6
    load_disk_s_per_token: float = 5.0e-5

    def prefill_s(self, uncached: float, cached: float) -> float:
        return self.base_s + self.a * uncached + self.b * uncached * (cached + uncached / 2)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Of the cost model. rates: of hardware that nothing else is known of."""

    alpha: float = 0.5
    beta: float = 0.1
    expected_output_tokens: float = 200.0
    degraded_weight: float = 0.8
    tie_s: float = 0.0005
    rates: Rates = field(default_factory=Rates)


@value()
class Situation:
    """One request and the pool's workers as they are now; arrays of shape (workers,), by target number.

    prompt_tokens is an estimate when the prompt is not tokenized; then overlaps are what was sent there before, or 0.
    gpu, cpu, disk: confirmed tokens of the longest prefix, by the best tier of each block (index.Overlaps, in tokens); expected: confirmed
    or expected, never less than all three. trust: code of router.index. queue_s, decoding, in_flight: with what others sent there, as far
    as it is known. allowed: may be chosen (eligible.py has been applied). cold_left_tokens: see cold.py, inf: no cap. keys: a worker's
    name as a number, for hashing. session, root: names of the session and of the prompt's first block, or None.
    """

    prompt_tokens: int
    block_size: int
    gpu: I64
    cpu: I64
    disk: I64
    expected: I64
    trust: npt.NDArray[np.uint8]
    queue_s: F64
    decoding: I64
    in_flight: I64
    allowed: Mask
    draining: Mask
    cold_left_tokens: F64
    keys: U64
    session: int | None = None
    root: int | None = None

    @property
    def held(self) -> I64:
        """Confirmed tokens in any tier."""
        return self.gpu + self.cpu + self.disk


@value()
class Terms:
    """The cost model's parts in seconds, shape (workers,)."""

    queue_s: F64
    prefill_s: F64
    load_s: F64
    decode_s: F64
    cost_s: F64


def most_cached_tokens(prompt_tokens: int, block_size: int) -> int:
    """An engine computes at least the last token: so many tokens at most come from the cache."""
    return max(prompt_tokens - 1, 0) // block_size * block_size


def table_of(rates: Sequence[Rates]) -> F64:
    """Rates by worker as the kernel reads them, shape (workers, 7)."""
    return np.array([astuple(r) for r in rates], np.float64).reshape(len(rates), 7)


def terms(now: Situation, k: Coefficients, rates: F64 | None = None) -> Terms:
    """The cost model. Confirmed overlap counts by trust: BLIND 0, DEGRADED `degraded_weight`, EXACT 1. rates: `table_of` the workers'
    rates; None: all have those of k."""
    n = len(now.queue_s)
    out = np.empty((4, n))
    _terms(
        now.prompt_tokens, most_cached_tokens(now.prompt_tokens, now.block_size),
        now.gpu, now.cpu, now.disk, now.expected, now.trust, now.queue_s, now.decoding,
        table_of([k.rates] * n) if rates is None else rates,
        k.alpha, k.beta, k.expected_output_tokens, k.degraded_weight, out,
    )  # fmt: skip
    return Terms(now.queue_s, out[0], out[1], out[2], out[3])


@numba.njit(cache=True)
def _terms(  # type: ignore[no-untyped-def]
    tokens, most, gpu, cpu, disk, expected, trust, queue_s, decoding, rates, alpha, beta, output_tokens, degraded_weight, out
):
    for w in range(len(queue_s)):
        base, a, b, c0, c1, load_cpu, load_disk = rates[w]
        weight = 1.0 if trust[w] == 2 else degraded_weight if trust[w] == 1 else 0.0
        hit = min(weight * gpu[w] + (expected[w] - gpu[w] - cpu[w] - disk[w]), float(most))
        uncached = tokens - hit
        prefill_s = base + a * uncached + b * uncached * (hit + uncached / 2)
        load_s = 0.0
        loading_s = 0.0
        for below, per_token in ((cpu[w], load_cpu), (disk[w], load_disk)):
            more = min(weight * below, most - hit)
            if more > 0.0:
                hit += more
                loading_s += more * per_token
                uncached = tokens - hit
                loaded_s = base + a * uncached + b * uncached * (hit + uncached / 2)
                if loaded_s + loading_s < prefill_s + load_s:
                    prefill_s, load_s = loaded_s, loading_s
        decode_s = prefill_s * beta * decoding[w] + output_tokens * (c0 + c1 * decoding[w])
        out[0, w] = prefill_s
        out[1, w] = load_s
        out[2, w] = decode_s
        out[3, w] = alpha * queue_s[w] + prefill_s + load_s + decode_s
