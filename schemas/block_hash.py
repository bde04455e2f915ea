"""The canonical block hash: one 64-bit name for "this prefix", equal on every worker, engine and version.

Engines name KV blocks with hashes of their own, which differ between releases, seeds and restarts, so they cannot be compared across a
fleet. Warmwatch names a block by the whole prefix that ends with it:

    root   = H(key, "warmwatch/root/1" NUL pool NUL lora)              the chain's start; pool and LoRA are part of every name
    h[i]   = H(key, h[i-1] | extra[i] | tokens[i])                     full blocks only
    c[i]   = H(key', tokens[i])                                        content fingerprint: the same tokens at any depth
    extra  = 0, or H(key, "warmwatch/extra/1" NUL canonical JSON)      cache salt, multimodal digests

H is SipHash-1-3 (Aumasson, Bernstein 2012; the reduced-round variant that CPython and Rust use for hash tables) with the deployment's
128-bit key: nobody without the key can craft collisions or test guesses of a prompt. `h[i-1]` and `extra[i]` are little-endian u64,
tokens little-endian u32. `key'` is derived from the key, so fingerprints and chain names share no values.

Invariants: equal (key, pool, lora, extras, tokens) give equal chains whatever the batching; a chain can be continued from its last hash.
0 is never a hash of content here (it would need a 2^-64 accident): `NO_EXTRA` and "no parent" use it.

Rejected: xxhash and other unkeyed hashes (guessable), 128-bit hashes (twice the memory in every index for a collision chance that is
already 3e-6 at ten million distinct blocks), a hash per engine (not comparable).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]

NO_EXTRA = 0
_MASK = (1 << 64) - 1


class HashKey(NamedTuple):
    """The deployment's 128-bit SipHash key as two little-endian 64-bit halves."""

    k0: int
    k1: int

    @classmethod
    def from_hex(cls, text: str) -> HashKey:
        """Reads 32 hexadecimal digits. Raises ValueError that says what would be right; never repeats the text, which is a secret."""
        if not re.fullmatch(r"[0-9a-fA-F]{32}", text.strip()):
            raise ValueError("hash key must be 32 hexadecimal digits (128 bits); make one with: openssl rand -hex 16")
        return cls.from_bytes(bytes.fromhex(text.strip()))

    @classmethod
    def from_bytes(cls, raw: bytes) -> HashKey:
        if len(raw) != 16:
            raise ValueError(f"hash key must be 16 bytes, got {len(raw)}")
        return cls(int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little"))

    def content_key(self) -> HashKey:
        """The derived key of content fingerprints: two SipHash outputs over fixed labels."""
        return derived_key(self, b"warmwatch/content/1")

    @property
    def key_id(self) -> str:
        """Eight hexadecimal digits that tell whether two processes have the same key, and nothing more of it: bridges and routers write
        them into their records, since names made with different keys never match."""
        return f"{siphash13(self, b'warmwatch/key-id/1') & 0xFFFFFFFF:08x}"

    def __repr__(self) -> str:  # never the key itself: it may reach a log
        return "HashKey(secret)"


@functools.lru_cache(maxsize=64)
def derived_key(key: HashKey, label: bytes) -> HashKey:
    """A key of its own for another kind of name: two SipHash outputs over the label, so that the two kinds share no values."""
    return HashKey(siphash13(key, label + b"/0"), siphash13(key, label + b"/1"))


def root_hash(key: HashKey, pool: str, lora: str | None = None) -> int:
    """Where every chain of this pool and LoRA adapter starts (u64)."""
    return siphash13(key, b"\0".join((b"warmwatch/root/1", pool.encode(), (lora or "").encode())))


def extra_digest(key: HashKey, extra: Sequence[Any] | None) -> int:
    """Digest of what else went into a block (cache salt, multimodal digests) in order, u64; `NO_EXTRA` when there is nothing."""
    if not extra:
        return NO_EXTRA
    canonical = json.dumps(list(extra), ensure_ascii=False, separators=(",", ":"), sort_keys=True, default=_jsonable)
    return siphash13(key, b"warmwatch/extra/1\0" + canonical.encode()) or 1


def _jsonable(value: object) -> object:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    raise TypeError(f"an extra key must be made of JSON values or bytes, got {type(value).__name__}")


def hash_chain(key: HashKey, root: int, tokens: npt.ArrayLike, block_size: int, extras: U64 | None = None) -> U64:
    """Names of all full blocks of `tokens`.

    root: `root_hash(...)`, or the last hash of the prefix already named, to continue a chain.
    tokens: any integers below 2^32, shape (n,); the last n % block_size of them name nothing.
    extras: u64, shape (n // block_size,), from `extra_digest`; None means none.
    Returns u64, shape (n // block_size,). Raises ValueError for a block size below 1 or extras of the wrong shape, OverflowError for ids
    that are no u32.
    """
    ids = _token_ids(tokens)
    blocks = _block_count(ids, block_size)
    if extras is None:
        extras = np.zeros(blocks, np.uint64)
    elif extras.shape != (blocks,):
        raise ValueError(f"extras must have one entry per full block: expected shape ({blocks},), got {extras.shape}")
    out = np.empty(blocks, np.uint64)
    _chain(np.uint64(key.k0), np.uint64(key.k1), np.uint64(root), ids, block_size, extras, out)
    return out


def salted_extras(key: HashKey, blocks: int, salt: str | None) -> U64 | None:
    """The extras of a prompt whose request carries a `cache_salt`: it goes into the first block alone (as vLLM does)."""
    if not salt or blocks == 0:
        return None
    extras = np.zeros(blocks, np.uint64)
    extras[0] = extra_digest(key, [salt])
    return extras


def content_fingerprints(key: HashKey, tokens: npt.ArrayLike, block_size: int) -> U64:
    """Unchained hash of each full block's tokens, u64, shape (n // block_size,): the same content at any depth, after any prefix."""
    ids = _token_ids(tokens)
    out = np.empty(_block_count(ids, block_size), np.uint64)
    sub = key.content_key()
    _fingerprints(np.uint64(sub.k0), np.uint64(sub.k1), ids, block_size, out)
    return out


def siphash13(key: HashKey, message: bytes) -> int:
    """SipHash-1-3 of any bytes, u64. The plain Python twin of the kernels; also used for the short labels above."""
    return _siphash(key, message, c_rounds=1, d_rounds=3)


def _siphash(key: HashKey, message: bytes, c_rounds: int, d_rounds: int) -> int:
    v = [
        key.k0 ^ 0x736F6D6570736575,
        key.k1 ^ 0x646F72616E646F6D,
        key.k0 ^ 0x6C7967656E657261,
        key.k1 ^ 0x7465646279746573,
    ]
    whole = len(message) // 8 * 8
    words = [int.from_bytes(message[i : i + 8], "little") for i in range(0, whole, 8)]
    words.append(int.from_bytes(message[whole:], "little") | (len(message) & 0xFF) << 56)
    for word in words:
        v[3] ^= word
        for _ in range(c_rounds):
            _sipround(v)
        v[0] ^= word
    v[2] ^= 0xFF
    for _ in range(d_rounds):
        _sipround(v)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def _sipround(v: list[int]) -> None:
    def rotl(x: int, b: int) -> int:
        return (x << b | x >> (64 - b)) & _MASK

    v[0] = (v[0] + v[1]) & _MASK
    v[1] = rotl(v[1], 13) ^ v[0]
    v[0] = rotl(v[0], 32)
    v[2] = (v[2] + v[3]) & _MASK
    v[3] = rotl(v[3], 16) ^ v[2]
    v[0] = (v[0] + v[3]) & _MASK
    v[3] = rotl(v[3], 21) ^ v[0]
    v[2] = (v[2] + v[1]) & _MASK
    v[1] = rotl(v[1], 17) ^ v[2]
    v[2] = rotl(v[2], 32)


def _token_ids(tokens: npt.ArrayLike) -> U32:
    """Contiguous u32. Raises OverflowError for what does not fit (NumPy itself would wrap an array's numbers silently)."""
    ids = np.asarray(tokens, dtype=None if isinstance(tokens, np.ndarray) else np.uint32)
    if ids.dtype != np.uint32 and len(ids) and not (ids.min() >= 0 and ids.max() < 1 << 32):
        raise OverflowError("token ids must be integers from 0 to 2^32 - 1")
    return np.ascontiguousarray(ids, dtype=np.uint32)


def _block_count(ids: U32, block_size: int) -> int:
    if block_size < 1:
        raise ValueError(f"block size must be at least 1 token, got {block_size}")
    return len(ids) // block_size


@numba.njit(cache=True, inline="always")
def _round(v0, v1, v2, v3):  # type: ignore[no-untyped-def]
    v0 += v1
    v2 += v3
    v1 = ((v1 << np.uint64(13)) | (v1 >> np.uint64(51))) ^ v0
    v3 = ((v3 << np.uint64(16)) | (v3 >> np.uint64(48))) ^ v2
    v0 = (v0 << np.uint64(32)) | (v0 >> np.uint64(32))
    v2 += v1
    v0 += v3
    v1 = ((v1 << np.uint64(17)) | (v1 >> np.uint64(47))) ^ v2
    v3 = ((v3 << np.uint64(21)) | (v3 >> np.uint64(43))) ^ v0
    v2 = (v2 << np.uint64(32)) | (v2 >> np.uint64(32))
    return v0, v1, v2, v3


@numba.njit(cache=True, inline="always")
def tokens_hash(v0, v1, v2, v3, ids, start, stop, length_bytes):  # type: ignore[no-untyped-def]
    """Absorbs ids[start:stop] as u32 pairs, then the final word, and finishes. `length_bytes` counts what came before, too."""
    i = start
    while i + 1 < stop:
        word = np.uint64(ids[i]) | (np.uint64(ids[i + 1]) << np.uint64(32))
        v3 ^= word
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        v0 ^= word
        i += 2
    word = (np.uint64(length_bytes) & np.uint64(0xFF)) << np.uint64(56)
    if i < stop:
        word |= np.uint64(ids[i])
    v3 ^= word
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0 ^= word
    v2 ^= np.uint64(0xFF)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3


@numba.njit("void(u8, u8, u8, u4[::1], i8, u8[::1], u8[::1])", cache=True)
def _chain(k0, k1, root, ids, block_size, extras, out):  # type: ignore[no-untyped-def]
    i0 = k0 ^ np.uint64(0x736F6D6570736575)
    i1 = k1 ^ np.uint64(0x646F72616E646F6D)
    i2 = k0 ^ np.uint64(0x6C7967656E657261)
    i3 = k1 ^ np.uint64(0x7465646279746573)
    parent = root
    for b in range(len(out)):
        v0, v1, v2, v3 = i0, i1, i2, i3
        v3 ^= parent
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        v0 ^= parent
        v3 ^= extras[b]
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        v0 ^= extras[b]
        parent = tokens_hash(v0, v1, v2, v3, ids, b * block_size, (b + 1) * block_size, 16 + 4 * block_size)
        out[b] = parent


@numba.njit("void(u8, u8, u4[::1], i8, u8[::1])", cache=True)
def _fingerprints(k0, k1, ids, block_size, out):  # type: ignore[no-untyped-def]
    i0 = k0 ^ np.uint64(0x736F6D6570736575)
    i1 = k1 ^ np.uint64(0x646F72616E646F6D)
    i2 = k0 ^ np.uint64(0x6C7967656E657261)
    i3 = k1 ^ np.uint64(0x7465646279746573)
    for b in range(len(out)):
        out[b] = tokens_hash(i0, i1, i2, i3, ids, b * block_size, (b + 1) * block_size, 4 * block_size)
