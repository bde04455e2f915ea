"""KV batches: what a bridge says about one worker's cache, as one binary record of the stream.

Binary because volume matters: a fleet stores and evicts millions of blocks a second. Every field is 64-bit aligned and the length is a
multiple of 8, so that a reader can join many records into one buffer and take them apart in one compiled pass (`unpack`), or view one
record through NumPy without copying (`decode`). All little-endian.

    word 0   magic "WWKV" (u32) | version (u16) | rank (u16)
    word 1   worker id (u64): SipHash with a zero key of "pool/worker/rank"; a dictionary key, not a secret
    word 2   epoch            word 3   first seq          word 4   last seq
    word 5   engine time (f64, unix seconds of the newest engine batch inside; NaN: the engine gives none)
    word 6   bridge time (f64, unix seconds at which the bridge packed the record)
    word 7   events (u32) | hashes (u32)
    word 8   length of pool name (u16) | length of worker name (u16) | 0 (u32)
    names    pool then worker, UTF-8, together padded with zeros to a multiple of 8
    events   40 bytes each, see `EVENT`
    hashes   u64 each; event k owns the next events[k].count of them, in prefix order

`(epoch, seq)` is the clock of a worker's cache and never repeats: the bridge takes a new, larger epoch for each incarnation (the engine's
sequence stepped back) and whenever it lost its own state. Token ids never appear here: only hashes by `block_hash`.

Event kinds:

    STORED         blocks entered the cache; parent = name of the block before the first one (the chain's root for a first block)
    REMOVED        each hash named once is one physical copy gone
    CLEARED        the worker's whole cache is empty
    EPOCH_STARTED  a new incarnation; the cache is empty (COMPLETE), or its earlier content is unknown (no flag): trust is degraded
    GAP            engine batches seq .. parent (both included) are lost for good: trust is degraded until a clear, a COMPLETE
                   snapshot or a new COMPLETE epoch
    SNAPSHOT       the blocks that the bridge holds resident; FIRST starts a new list, later ones continue it, LAST ends it; a hash
                   named n times has n copies. COMPLETE: the bridge had seen every event, so the list may replace a reader's state
                   and heals its trust
    REPORTED       blocks announced again though nothing was stored (kv_cache_report_mode=full); residency is unchanged
    UNNAMED        `parent` counts blocks that the engine stored without tokens and that no earlier event named: residency unknown
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numba
import numpy as np
import numpy.typing as npt

from schemas.block_hash import U64, HashKey, siphash13
from schemas.topics import worker_key

MAGIC = 0x564B5757  # b"WWKV"
VERSION = 1
HEADER_WORDS = 9
EVENT_WORDS = 5
MAX_NAME_BYTES = 1024


class Kind(IntEnum):
    STORED = 1
    REMOVED = 2
    CLEARED = 3
    EPOCH_STARTED = 4
    GAP = 5
    SNAPSHOT = 6
    REPORTED = 7
    UNNAMED = 8


class Tier(IntEnum):
    """Where a block lies. vLLM: GPU, CPU, STORAGE; SGLang: GPU, CPU_PINNED, DISK, EXTERNAL; connectors write lower case."""

    GPU = 0
    CPU = 1
    DISK = 2
    EXTERNAL = 3


COMPLETE = 1  # EPOCH_STARTED, SNAPSHOT: nothing is missing
FIRST = 2  # SNAPSHOT
LAST = 4  # SNAPSHOT
ENGINE_RESTARTED = 16  # EPOCH_STARTED: the engine itself began anew; without it the bridge did, and the cache may have gone on
WINDOWED = 8  # STORED, SNAPSHOT: a group without full attention (sliding window, mamba): holding it does not mean holding the prefix
WINDOW_SHIFT = 8  # of flags with WINDOWED: from this bit on the window in tokens (mamba: 1), 0 when it is not known

EVENT = np.dtype(
    [
        ("kind", "<u1"),
        ("tier", "<u1"),
        ("group", "<u2"),
        ("count", "<u4"),
        ("seq", "<u8"),
        ("time_s", "<f8"),
        ("parent", "<u8"),
        ("block_size", "<u4"),
        ("flags", "<u4"),
    ]
)
assert EVENT.itemsize == EVENT_WORDS * 8

Events = npt.NDArray[np.void]


class BadBatch(ValueError):  # noqa: N818 - a value, named for what it is
    """The bytes are no KV batch of a version known here; the message says which rule they break."""


@dataclass(frozen=True, slots=True)
class WorkerId:
    """One engine process and data-parallel rank, in its pool."""

    pool: str
    worker: str
    rank: int

    @property
    def key(self) -> bytes:
        return worker_key(self.pool, self.worker, self.rank)

    @property
    def number(self) -> int:
        """The u64 of word 1: a stable dictionary key for (pool, worker, rank)."""
        return _worker_number(self)

    def __str__(self) -> str:
        return f"{self.pool}/{self.worker}/{self.rank}"


@functools.lru_cache(maxsize=65536)
def _worker_number(source: WorkerId) -> int:
    return siphash13(HashKey(0, 0), source.key)


@dataclass(frozen=True, slots=True, eq=False)
class KvBatch:
    """One decoded record. events: `EVENT` rows, shape (n,); hashes: u64, shape (sum of counts,)."""

    source: WorkerId
    epoch: int
    first_seq: int
    last_seq: int
    engine_time_s: float | None
    bridge_time_s: float
    events: Events
    hashes: U64

    def __iter__(self) -> Iterator[tuple[np.void, U64]]:
        """Each event with its own hashes (a view)."""
        at = 0
        for event in self.events:
            count = int(event["count"])
            yield event, self.hashes[at : at + count]
            at += count


def encode(batch: KvBatch) -> bytes:
    """Packs a batch. Raises BadBatch for names that are too long or counts that do not add up."""
    pool, worker = batch.source.pool.encode(), batch.source.worker.encode()
    if not 0 < len(pool) <= MAX_NAME_BYTES or not 0 < len(worker) <= MAX_NAME_BYTES:
        raise BadBatch(f"pool and worker names must have 1 to {MAX_NAME_BYTES} bytes: {batch.source}")
    if int(batch.events["count"].sum()) != len(batch.hashes):
        raise BadBatch(f"events count {int(batch.events['count'].sum())} hashes, the batch holds {len(batch.hashes)}")
    head = np.zeros(HEADER_WORDS, "<u8")
    head[0] = MAGIC | VERSION << 32 | batch.source.rank << 48
    head[1:5] = batch.source.number, batch.epoch, batch.first_seq, batch.last_seq
    head[5:7] = np.array([math.nan if batch.engine_time_s is None else batch.engine_time_s, batch.bridge_time_s], "<f8").view("<u8")
    head[7] = len(batch.events) | len(batch.hashes) << 32
    head[8] = len(pool) | len(worker) << 16
    names = pool + worker
    return b"".join(
        (
            head.tobytes(),
            names,
            bytes(-len(names) % 8),
            batch.events.tobytes(),
            batch.hashes.astype("<u8", copy=False).tobytes(),
        )
    )


def decode(record: bytes) -> KvBatch:
    """Reads one record; arrays are views into it. Raises BadBatch naming the rule that the bytes break."""
    if len(record) % 8 or len(record) < HEADER_WORDS * 8:
        raise BadBatch(f"length {len(record)} is no multiple of 8 of at least {HEADER_WORDS * 8} bytes")
    words = np.frombuffer(record, "<u8")
    w0, sizes, lengths = int(words[0]), int(words[7]), int(words[8])
    if w0 & 0xFFFFFFFF != MAGIC:
        raise BadBatch("does not start with WWKV")
    if (version := w0 >> 32 & 0xFFFF) != VERSION:
        raise BadBatch(f"version {version} is unknown here (known: {VERSION})")
    n_events, n_hashes = sizes & 0xFFFFFFFF, sizes >> 32
    pool_bytes, worker_bytes = lengths & 0xFFFF, lengths >> 16 & 0xFFFF
    name_words = (pool_bytes + worker_bytes + 7) // 8
    if HEADER_WORDS + name_words + n_events * EVENT_WORDS + n_hashes != len(words):
        raise BadBatch(f"{len(words)} words do not hold {n_events} events and {n_hashes} hashes")
    at = HEADER_WORDS * 8
    try:
        pool = record[at : at + pool_bytes].decode()
        worker = record[at + pool_bytes : at + pool_bytes + worker_bytes].decode()
    except UnicodeDecodeError as e:
        raise BadBatch("pool or worker name is not UTF-8") from e
    source = WorkerId(pool, worker, w0 >> 48)
    if not pool or not worker or int(words[1]) != source.number:
        raise BadBatch(f"worker id does not belong to {source}")
    events = np.frombuffer(record, EVENT, n_events, at + name_words * 8)
    hashes = words[len(words) - n_hashes :]
    if int(events["count"].sum(dtype=np.uint64)) != n_hashes:
        raise BadBatch(f"events count {int(events['count'].sum(dtype=np.uint64))} hashes, the record holds {n_hashes}")
    if n_events and not (events["kind"].min() >= 1 and events["kind"].max() <= max(Kind)):
        raise BadBatch(f"event kind {int(events['kind'].max())} is unknown here")
    engine_time_s, bridge_time_s = (float(t) for t in words[5:7].view("<f8"))
    return KvBatch(
        source, int(words[2]), int(words[3]), int(words[4]),
        None if math.isnan(engine_time_s) else engine_time_s, bridge_time_s, events, hashes,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Unpacked:
    """Many records at once, as columns.

    Per record, shape (n,): worker_number, epoch, first_seq, last_seq u64; engine_time_s (NaN: none), bridge_time_s f64;
    event_end, hash_end i64 (exclusive ends of its rows below); ok bool. A record that is not ok owns no rows: `decode` says why.
    events: `EVENT` rows of all records; hashes: u64 of all events, in order.
    """

    worker_number: U64
    epoch: U64
    first_seq: U64
    last_seq: U64
    engine_time_s: npt.NDArray[np.float64]
    bridge_time_s: npt.NDArray[np.float64]
    event_end: npt.NDArray[np.int64]
    hash_end: npt.NDArray[np.int64]
    ok: npt.NDArray[np.bool_]
    events: Events
    hashes: U64


def unpack(records: list[bytes]) -> Unpacked:
    """Takes many records apart in one compiled pass, several times faster than `decode` on each."""
    n = len(records)
    padded = [r if len(r) % 8 == 0 else b"" for r in records]
    ends = np.cumsum(np.fromiter(map(len, padded), np.int64, n) // 8, dtype=np.int64)
    words = np.frombuffer(b"".join(padded), "<u8")
    heads = np.zeros((6, n), np.uint64)
    spans = np.zeros((2, n), np.int64)
    ok = np.zeros(n, np.bool_)
    events, hashes = np.empty(len(words), np.uint64), np.empty(len(words), np.uint64)
    found_events, found_hashes = _unpack(words, ends, heads, spans, ok, events, hashes)
    return Unpacked(
        heads[0], heads[1], heads[2], heads[3], heads[4].view(np.float64), heads[5].view(np.float64),
        spans[0], spans[1], ok, events[: found_events * EVENT_WORDS].view(EVENT),
        hashes[:found_hashes],
    )  # fmt: skip


@numba.njit(
    "Tuple((i8, i8))(Array(u8, 1, 'C', readonly=True), i8[::1], u8[:, ::1], i8[:, ::1], b1[::1], u8[::1], u8[::1])",
    cache=True,
)
def _unpack(words, ends, heads, spans, ok, events, hashes):  # type: ignore[no-untyped-def]
    low32 = np.uint64(0xFFFFFFFF)
    low16 = np.uint64(0xFFFF)
    e_at = np.int64(0)
    h_at = np.int64(0)
    start = np.int64(0)
    for r in range(len(ends)):
        end = ends[r]
        size = end - start
        if size >= HEADER_WORDS and words[start] & np.uint64(0xFFFFFFFFFFFF) == np.uint64(MAGIC | VERSION << 32):
            n_events = np.int64(words[start + 7] & low32)
            n_hashes = np.int64(words[start + 7] >> np.uint64(32))
            lengths = words[start + 8]
            names = np.int64(lengths & low16) + np.int64((lengths >> np.uint64(16)) & low16)
            name_words = (names + 7) // 8
            if HEADER_WORDS + name_words + n_events * EVENT_WORDS + n_hashes == size:
                src = start + HEADER_WORDS + name_words
                good = True
                total = np.int64(0)
                for k in range(n_events):
                    first = words[src + k * EVENT_WORDS]
                    kind = first & np.uint64(0xFF)
                    good = good and np.uint64(1) <= kind <= np.uint64(8)
                    total += np.int64(first >> np.uint64(32))
                if good and total == n_hashes:
                    for k in range(n_events * EVENT_WORDS):
                        events[e_at * EVENT_WORDS + k] = words[src + k]
                    src += n_events * EVENT_WORDS
                    for k in range(n_hashes):
                        hashes[h_at + k] = words[src + k]
                    e_at += n_events
                    h_at += n_hashes
                    for c in range(6):
                        heads[c, r] = words[start + 1 + c]
                    ok[r] = True
        spans[0, r] = e_at
        spans[1, r] = h_at
        start = end
    return e_at, h_at
