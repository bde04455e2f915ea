"""The KV events that vLLM 0.32 publishes, field by field, as msgspec values.

Why own types: the simulator must write what the engine writes, with an encoder that shares nothing with the bridge's tolerant
decoder, so that the two check each other. Rules taken from the captures: a map with the key `type`; fields without a default
are always there, null included; fields with a default are left out when unset. The batch is the array `[ts, events, rank]`.
"""

from __future__ import annotations

from typing import Any

import msgspec

BlockHash = int | bytes
"""Unsigned 64-bit integer (the engine's default), or the whole 32-byte digest."""


class BlockStored(msgspec.Struct, tag="BlockStored", frozen=True, omit_defaults=True):
    """Full blocks entered in the prefix cache, in prefix order."""

    block_hashes: list[Any]  # list[BlockHash]; a union of int and bytes costs a check a value
    parent_block_hash: Any  # hash before the first one, None at the root
    token_ids: list[int]  # block_size * len(block_hashes)
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None  # one entry a hash: what else went into it
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", frozen=True, omit_defaults=True):
    """One evicted block; vLLM writes one event per block."""

    block_hashes: list[Any]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", frozen=True, omit_defaults=True):
    """The prefix cache was reset."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared

_encoder = msgspec.msgpack.Encoder()


def encode_batch(ts: float, events: list[KvEvent], rank: int) -> bytes:
    """The msgpack payload of one batch. `ts`: unix seconds at which the step's results were processed."""
    return _encoder.encode((ts, events, rank))
