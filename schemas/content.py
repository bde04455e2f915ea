"""What a prompt's text is made of, wherever it stands: fingerprints of its blocks, and content-defined chunks.

The canonical chain (block_hash.py) names a block by everything before it, so one changed token at the head of a prompt gives all that
follows new names. To tell "never seen" from "seen, but after another beginning", a decision also describes, by content alone, the part of
its prompt that no worker held:

    tokens   ... held by some worker | first_token                                  end of the prompt
    blocks                           | c[f]    | c[f+1]  | c[f+2]  | c[f+3]  | rest |
    chunks                           | d0   | d1         | d2    | d3     | ... | dn |

c are `content_fingerprints`: found again when text stays aligned to blocks (a timestamp of fixed width at the head). d are chunks whose
borders are chosen by the tokens around them: found again when text is shifted by any number of tokens.

    g[i]  = mix(tokens[i] + seed)                         mix(x) = y * 0xD6E8FEB86659FD93, y = z ^ (z >> 32), z = x * 0x9E3779B97F4A7C15
    r[i]  = r[i-1] * 2^16 + (g[i] >> 3)                   modulo 2^64, r[-1] = 0: the last four tokens alone count
    a chunk ends after token i when it has MIN_TOKENS and the top `BORDER_BITS` bits of r[i] are 0, when it has MAX_TOKENS, or at the end
    d     = H(key'', tokens of the chunk)                 H as in block_hash.py

`key''` and `seed` are derived from the deployment's key, so nobody without it can test guesses of a prompt, by names or by lengths.

Invariants. Where borders may be depends on four tokens and not on where a description starts; after a change two texts meet again at the
first border that both took, some chunks later. A chunk is 23 tokens long on average (mini-SWE prompts, a tokenizer of 2,048 words). Content
says nothing of what came before it: equal chunks of two prompts need not follow equal beginnings.

Why these parameters: with 19 to 35 tokens a chunk, windows of 2 to 8 tokens, what is recognised of the mini-SWE prompts' missed text moves
by less than 2 points (57 to 59 % untouched, 97 % behind a changed head); longer chunks tell less exactly where prompts differ, shorter ones
make longer records. Rejected: chunks of characters (the router may have token ids alone), a window that starts anew with each chunk (two
texts then meet later).
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from schemas.block_hash import U32, U64, HashKey, content_fingerprints, derived_key, siphash13, tokens_hash
from schemas.requests import Decision, unpack_hashes, unpack_lengths

U16 = npt.NDArray[np.uint16]

MIN_TOKENS = 8
MAX_TOKENS = 64
BORDER_BITS = 4
WINDOW_TOKENS = 4

_GOLDEN, _FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A prompt's content from `first_token` (a multiple of the block size) on to its end.

    namespace: `namespace_of` LoRA and salt. fingerprints: of its full blocks from there on, shape
    (prompt_tokens // block_size - first_token // block_size,). chunks, chunk_tokens: names and lengths of its chunks, shape (chunks,);
    the lengths add up to prompt_tokens - first_token.
    """

    namespace: int
    block_size: int
    first_token: int
    prompt_tokens: int
    fingerprints: U64
    chunks: U64
    chunk_tokens: U16


def described(key: HashKey, tokens: U32, block_size: int, first_block: int, lora: str | None, salt: str | None) -> Content:
    """The content of a prompt from one of its blocks on. tokens: the whole prompt, u32, shape (n,). Raises ValueError for a block beyond
    its end."""
    first = first_block * block_size
    chunks, lengths = content_chunks(key, tokens, first)
    fingerprints = content_fingerprints(key, tokens[first:], block_size)
    return Content(namespace_of(key, lora, salt), block_size, first, len(tokens), fingerprints, chunks, lengths)


def content_of(decision: Decision) -> Content | None:
    """What a decision says of its prompt's content; None: nothing. That its parts fit was checked when it was read."""
    d = decision
    if d.content_from is None or d.namespace is None or d.content is None or d.chunks is None or d.chunk_tokens is None:
        return None
    assert d.block_size is not None and d.prompt_tokens is not None
    return Content(
        d.namespace, d.block_size, d.content_from * d.block_size, d.prompt_tokens,
        unpack_hashes(d.content), unpack_hashes(d.chunks), unpack_lengths(d.chunk_tokens),
    )  # fmt: skip


def content_chunks(key: HashKey, tokens: U32, first_token: int = 0) -> tuple[U64, U16]:
    """Content-defined chunks of tokens[first_token:]: names and lengths, both of shape (chunks,); the lengths add up.

    tokens: u32, shape (n,). Raises ValueError when first_token is not among 0 .. n.
    """
    if not 0 <= first_token <= len(tokens):
        raise ValueError(f"content must begin within the prompt's {len(tokens)} tokens, not at {first_token}")
    k0, k1, seed = _chunk_keys(key)
    most = (len(tokens) - first_token) // MIN_TOKENS + 1
    names, lengths = np.empty(most, np.uint64), np.empty(most, np.uint16)
    n = _chunks(k0, k1, seed, plain_ids(tokens), first_token, names, lengths)
    return names[:n], lengths[:n]


def plain_ids(tokens: U32) -> U32:
    """As kernels with a fixed signature take them: u32, contiguous, writeable. The same array where it is so already."""
    flags = tokens.flags
    if flags.c_contiguous and flags.writeable and tokens.dtype == np.uint32:
        return tokens
    return np.require(tokens, np.uint32, ["C", "W"])


@functools.lru_cache(maxsize=4096)
def namespace_of(key: HashKey, lora: str | None, salt: str | None) -> int:
    """Digest (u64) of what starts a prompt's chain besides its pool: H(key, "warmwatch/namespace/1" NUL JSON of [lora, salt])."""
    named = json.dumps([lora, salt], ensure_ascii=False, separators=(",", ":"))
    return siphash13(key, b"warmwatch/namespace/1\0" + named.encode("utf-8", "surrogatepass"))


@functools.lru_cache(maxsize=64)
def _chunk_keys(key: HashKey) -> tuple[np.uint64, np.uint64, np.uint64]:
    sub = derived_key(key, b"warmwatch/chunk/1")
    return np.uint64(sub.k0), np.uint64(sub.k1), np.uint64(siphash13(key, b"warmwatch/chunk/1/seed"))


@numba.njit("i8(u8, u8, u8, u4[::1], i8, u8[::1], u2[::1])", cache=True)
def _chunks(k0, k1, seed, ids, first, names, lengths):  # type: ignore[no-untyped-def]
    i0 = k0 ^ np.uint64(0x736F6D6570736575)
    i1 = k1 ^ np.uint64(0x646F72616E646F6D)
    i2 = k0 ^ np.uint64(0x6C7967656E657261)
    i3 = k1 ^ np.uint64(0x7465646279746573)
    rolling = np.uint64(0)
    start, n = first, 0
    for i in range(max(0, first - WINDOW_TOKENS + 1), len(ids)):
        mixed = (np.uint64(ids[i]) + seed) * _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(32))) * _FACTOR
        rolling = (rolling << np.uint64(64 // WINDOW_TOKENS)) + (mixed >> np.uint64(3))
        length = i + 1 - start
        if i < first or length < MIN_TOKENS:
            continue
        if length == MAX_TOKENS or (rolling >> np.uint64(64 - BORDER_BITS)) == 0:
            names[n] = tokens_hash(i0, i1, i2, i3, ids, start, i + 1, 4 * length)
            lengths[n] = length
            start, n = i + 1, n + 1
    if start < len(ids):
        names[n] = tokens_hash(i0, i1, i2, i3, ids, start, len(ids), 4 * (len(ids) - start))
        lengths[n] = len(ids) - start
        n += 1
    return n
