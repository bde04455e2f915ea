"""Engine wire frames -> engine-neutral events, whatever the engine, its version and its layout.

One rim for vLLM 0.9 to 0.33, SGLang 0.4.6 to 0.5.23 and the Mooncake master: a batch is an array of two or more elements or a map; an event
is a positional array (tag first) or a map (tag under `type`, or `event_type` in lower case); hashes are unsigned or signed 64-bit integers
or byte strings; tokens are integers, pairs (EAGLE: the first of each pair is the token) or absent.

Invariants: unknown fields and extra positions are ignored; a bad event costs only itself (`Batch.skipped`); a bad frame raises `BadFrame`
and costs only itself. Nothing here keeps or prints token ids: `Stored` has a repr without them.

Hashes become one u64 each: integers modulo 2^64 (so that signed and unsigned spellings meet), byte strings by their last 8 bytes, which is
what vLLM itself publishes as its integer form. They are keys inside one rank only.

Rejected: typed msgspec structs per release (two dozen layouts, and a new field would cost the frame).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from schemas.block_hash import U32, U64
from schemas.kv_events import WINDOW_SHIFT, Tier

MASK64 = (1 << 64) - 1
MAX_PAYLOAD_BYTES = 64 << 20
MAX_BLOCK_TOKENS = 1 << 16
MAX_WINDOW_TOKENS = (1 << 32 - WINDOW_SHIFT) - 1
MILLISECONDS_ABOVE = 1e11  # a time stamp above this is in milliseconds: as seconds it would lie past the year 5000
EMPTY_TUPLE_HASH = 5740354900026072187  # CPython's hash(()): what SGLang up to 0.5.3 names as the parent of the root's children

_TIERS = {
    "gpu": Tier.GPU,
    "cpu": Tier.CPU,
    "cpu_pinned": Tier.CPU,
    "storage": Tier.DISK,
    "disk": Tier.DISK,
    "external": Tier.EXTERNAL,
}
_FULL_KINDS = (None, "full_attention", "mla_attention")
_STORED_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys", "group_idx",
    "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_NO_HASHES: U64 = np.empty(0, np.uint64)


class BadFrame(ValueError):  # noqa: N818 - a value, named for what it is
    """A message that is no KV batch. `seq` is its sequence when at least that could be read."""

    def __init__(self, why: str, seq: int | None = None) -> None:
        super().__init__(why)
        self.seq = seq


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Stored:
    """hashes: u64 engine names, shape (n,), in prefix order. parent: engine name, None at the root.

    tokens: u32, or None for a placeholder; may cover more blocks than there are hashes (sparse groups). block_size 0: unknown.
    windowed: without full attention; window: how far its attention reaches back, in tokens (mamba: 1), 0 when that is not told.
    extras: per hash what else went into the block, or None when nothing did; LoRA's name already taken out. lora: None is the base model.
    """

    hashes: U64
    parent: int | None
    tokens: U32 | None
    block_size: int
    tier: Tier
    group: int
    windowed: bool
    window: int
    lora: str | None
    extras: tuple[tuple[Any, ...] | None, ...] | None

    def __repr__(self) -> str:
        return f"Stored({len(self.hashes)} blocks of {self.block_size}, {self.tier.name}, group {self.group})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Removed:
    hashes: U64
    tier: Tier
    group: int

    def __repr__(self) -> str:
        return f"Removed({len(self.hashes)} blocks, {self.tier.name}, group {self.group})"


@dataclass(frozen=True, slots=True)
class Cleared:
    """The rank's whole cache is empty."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Batch:
    """time_s: unix seconds by the engine's clock, None when it gives none.

    skipped: events that are of unknown kinds, and those that could not be read; unreadable: the latter, so what they did is not known.
    """

    time_s: float | None
    rank: int | None
    events: tuple[Event, ...]
    skipped: int = 0
    unknown_media: int = 0
    unreadable: int = 0

    def __repr__(self) -> str:
        return f"Batch({self.events}, skipped {self.skipped})"


def split_frames(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Sequence and payload of a live message (topic, sequence, payload). Raises BadFrame."""
    if len(frames) != 3:
        raise BadFrame(f"a message of {len(frames)} frames instead of 3")
    return _sequence(frames[1]), frames[2]


def split_replay(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """The same for a replay answer, with or without the topic frame, read from the end; None is the end marker. Raises BadFrame."""
    if not 2 <= len(frames) <= 4:
        raise BadFrame(f"a replay answer of {len(frames)} frames instead of 3 or 4")
    if frames[-1] == b"" and frames[-2] == b"\xff" * 8:
        return None
    return _sequence(frames[-2]), frames[-1]


def _sequence(frame: bytes) -> int:
    if len(frame) != 8:
        raise BadFrame(f"a sequence of {len(frame)} bytes instead of 8")
    seq = int.from_bytes(frame, "big")
    if seq >> 63:
        raise BadFrame("a sequence beyond 2^63")
    return seq


def decode_batch(payload: bytes) -> Batch:
    """Reads one payload. Raises BadFrame; never repeats content, which may be customers' tokens."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise BadFrame(f"a payload of {len(payload)} bytes; the limit is {MAX_PAYLOAD_BYTES}")
    try:
        raw = msgspec.msgpack.decode(payload)
    except (ValueError, RecursionError, MemoryError, OverflowError) as e:
        raise BadFrame(f"no MessagePack: {type(e).__name__}") from None
    if isinstance(raw, dict):
        time_s, events, rank = raw.get("ts"), raw.get("events"), raw.get("data_parallel_rank")
    elif isinstance(raw, list) and len(raw) >= 2:
        time_s, events, rank = raw[0], raw[1], raw[2] if len(raw) > 2 else None
    else:
        raise BadFrame("no batch: neither a map nor an array of two or more")
    if not isinstance(events, list):
        raise BadFrame("no batch: its events are no array")
    good: list[Event] = []
    odd = _Odd()
    for event in events:
        try:
            good.append(_event(event, odd))
        except _UnknownKind:
            odd.skipped += 1
        except (ValueError, TypeError, OverflowError, AttributeError, IndexError, KeyError, RecursionError):
            odd.skipped += 1
            odd.unreadable += 1
    known_rank = rank if type(rank) is int and 0 <= rank < 65536 else None
    return Batch(_time_s(time_s), known_rank, tuple(good), odd.skipped, odd.unknown_media, odd.unreadable)


@dataclass(slots=True)
class _Odd:
    """What was odd about the batch that is being read."""

    skipped: int = 0
    unknown_media: int = 0
    unreadable: int = 0


class _UnknownKind(ValueError):  # noqa: N818 - a value, named for what it is
    """An event that a newer engine may well send; it says nothing about blocks that could be missed here."""


def _time_s(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        return None
    return value / 1000 if value > MILLISECONDS_ABOVE else float(value)


def _event(raw: Any, odd: _Odd) -> Event:
    if isinstance(raw, list):
        tag, fields = raw[0], None
    else:
        tag, fields = raw.get("type") or raw.get("event_type"), raw
    if tag in ("BlockStored", "stored"):
        return _stored(fields if fields is not None else dict(zip(_STORED_FIELDS, raw[1:], strict=False)), odd)
    if tag in ("BlockRemoved", "removed"):
        get = (fields if fields is not None else dict(zip(_REMOVED_FIELDS, raw[1:], strict=False))).get
        return Removed(_hashes(_first(get, "block_hashes", "seq_hashes")), _tier(get("medium"), odd), _group(get))
    if tag in ("AllBlocksCleared", "cleared"):
        return Cleared()
    if isinstance(tag, str):
        raise _UnknownKind
    raise ValueError("no event")


def _stored(fields: dict[str, Any], odd: _Odd) -> Stored:
    get = fields.get
    hashes = _hashes(_first(get, "block_hashes", "seq_hashes"))
    raw_parent = _first(get, "parent_block_hash", "parent_hash")
    parent = None if raw_parent is None else int(_hashes([raw_parent])[0])
    if parent in (0, EMPTY_TUPLE_HASH):
        parent = None
    tokens = _tokens(get("token_ids"))
    block_size = get("block_size") or 0
    if type(block_size) is not int or not 0 <= block_size <= MAX_BLOCK_TOKENS:
        raise ValueError("block size")
    lora = get("lora_name")
    if lora is None and get("lora_id") is not None:
        lora = f"lora-id:{int(fields['lora_id'])}"  # before 0.14.1 there is no name: kept apart from the base model at least
    elif lora is not None and not isinstance(lora, str):
        raise ValueError("LoRA name")
    extras = _extras(get("extra_keys"), len(hashes), lora)
    salt = get("cache_salt")
    if salt and extras is None and parent is None and len(hashes):
        extras = ((salt,), *(None,) * (len(hashes) - 1))
    kind = get("kv_cache_spec_kind")
    window = _window(kind, get("kv_cache_spec_sliding_window"))
    return Stored(
        hashes, parent, tokens, block_size, _tier(get("medium"), odd), _group(get), kind not in _FULL_KINDS, window, lora or None, extras
    )


def _window(kind: Any, told: Any) -> int:
    if kind in _FULL_KINDS:
        return 0
    if kind == "mamba":
        return 1
    return min(told, MAX_WINDOW_TOKENS) if type(told) is int and told > 0 else 0


def _first(get: Any, name: str, other: str) -> Any:
    value = get(name)
    return get(other) if value is None else value


def _hashes(raw: Any) -> U64:
    if not isinstance(raw, list):
        raise TypeError("hashes")
    if not raw:
        return _NO_HASHES
    try:
        return np.frombuffer(array("Q", raw), np.uint64)
    except (OverflowError, TypeError):
        return np.array([_one_hash(h) for h in raw], np.uint64)


def _one_hash(raw: Any) -> int:
    if type(raw) is int:
        return raw & MASK64
    if isinstance(raw, bytes) and raw:
        return int.from_bytes(raw[-8:], "big")
    raise TypeError("hash")


def _tokens(raw: Any) -> U32 | None:
    if not raw:
        return None
    if not isinstance(raw, list):
        raise TypeError("tokens")
    if isinstance(raw[0], list):
        raw = [pair[0] for pair in raw]
    return np.frombuffer(array("I", raw), np.uint32)


def _tier(medium: Any, odd: _Odd) -> Tier:
    if medium is None or medium == "GPU":
        return Tier.GPU
    if not isinstance(medium, str):
        raise TypeError("medium")
    tier = _TIERS.get(medium.lower())
    if tier is None:
        odd.unknown_media += 1
        return Tier.EXTERNAL
    return tier


def _group(get: Any) -> int:
    group = get("group_idx")
    if group is None:
        group = get("group_id")
    if group is None:
        return 0
    if type(group) is not int or not 0 <= group < 65536:
        raise ValueError("group")
    return group


def _extras(raw: Any, blocks: int, lora: str | None) -> tuple[tuple[Any, ...] | None, ...] | None:
    if raw is None or not any(raw):
        return None
    if len(raw) != blocks:
        raise ValueError("extra keys")
    return tuple(_without_lora(entry, lora) for entry in raw)


def _without_lora(entry: Any, lora: str | None) -> tuple[Any, ...] | None:
    if not entry:
        return None
    if not isinstance(entry, list):
        raise TypeError("extra keys")
    rest = list(entry)
    if lora is not None and lora in rest:
        rest.remove(lora)
    return tuple(rest) or None
