"""Compiles the collector's kernels (or loads them from numba's cache) before it reads the stream.

On a new machine compiling takes about a minute. A collector that compiled when it first needs a kernel would say READY and then be silent
for most of that minute, in the middle of a commit. So a made-up life goes through a `Core` with the smallest budgets, without any I/O:
what engines say, requests that find all of it or nothing, closed windows, a checkpoint, and another life after it, since arrays out of a
file may have other types for numba. Invariant (tests/collector/test_warm_up.py): a real life afterwards compiles nothing. Rejected: lists
of the kernels' signatures, which nobody would keep up to date.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.core import event
from pydantic import BaseModel

from collector.analytics.analyses import entries_after
from collector.core import Core
from collector.settings import CollectorSettings
from schemas.block_hash import U32, U64, HashKey, hash_chain
from schemas.content import described
from schemas.kv_events import COMPLETE, ENGINE_RESTARTED, EVENT, FIRST, LAST, WINDOWED, Kind, KvBatch, WorkerId, encode
from schemas.requests import Candidate, Decision, Outcome, pack_hashes, pack_lengths
from schemas.stream.base import StoredRecord
from schemas.topics import DECISIONS, KV_EVENTS, OUTCOMES, WORKER_LOAD
from schemas.workers import BridgeHealth, Trust, WorkerLoad

_KEY = HashKey(0, 0)
_SIZE = 16
_ENGINES = tuple(WorkerId("p", worker, rank) for worker, rank in (("a", 0), ("b", 0), ("b", 1)))
_CELLS: tuple[dict[str, int], ...] = ({}, {"tier": 1}, {"group": 1, "flags": WINDOWED})
_TOGETHER = 10
_FIRST_LIFE, _NEXT_LIFE = 80, 10
"""Requests. A first cost model takes 64 of one kind."""
_NONE = np.empty(0, np.uint64)

Mark = tuple[Kind, U64, dict[str, Any]]


def warm_up(say: Callable[[str], None]) -> None:
    """say: is told when something has to be compiled, and when that is done."""
    began, listener = time.monotonic(), _Listener(say)
    with event.install_listener("numba:compile", listener):
        _lives()
    if listener.told:
        say(f"kernels are compiled ({time.monotonic() - began:.0f} s)")


class _Listener(event.Listener):
    """Hears of what the cache does not hold."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self.told = say, False

    def on_start(self, event: object) -> None:
        if not self.told:
            self.told = True
            self._say("compiling kernels: the first start on a machine takes about a minute ...")

    def on_end(self, event: object) -> None:
        pass


def _lives() -> None:
    settings = CollectorSettings(
        data_dir=Path(), recent_events=1 << 12, recent_hashes=1 << 14, ghost_blocks=64, seen_blocks=64, filter_blocks=64,
        content_entries=1000, reuse_blocks=800, prefill_a=1e-5,
    )  # fmt: skip
    first, again = Core.of(settings), Core.of(settings)
    _live(first, 1e9, _FIRST_LIFE)
    again.load(_stored(first.save()))
    again.analyses.replay(entries_after(first.analyses.journal(1), 0))
    again.contents.replay(first.contents.journal(1), 0)
    _live(again, 1e9 + 600, _NEXT_LIFE)


def _stored(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """As a checkpoint gives them back."""
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stub takes the names for its own flags
    file.seek(0)
    with np.load(file) as found:
        return {name: found[name] for name in found.files}


def _live(core: Core, at_s: float, requests: int) -> None:
    """Some minutes from at_s (unix seconds) on."""
    epoch, rng = int(at_s), np.random.default_rng(1)
    tokens = rng.integers(0, 1 << 16, 2000, np.uint32)
    _tell(core, KV_EVENTS, *(_start(who, epoch, at_s) for who in _ENGINES))
    for first in range(0, requests, _TOGETHER):
        batches: list[KvBatch] = []
        decisions: list[Decision] = []
        outcomes: list[Outcome] = []
        for i in range(first, first + _TOGETHER):
            at_s += 4.0
            who, n = _ENGINES[i % 3], 100 + 53 * i % 1900
            ids = tokens[:n] if i % 3 else np.append(tokens[: n // 2], rng.integers(0, 1 << 16, n - n // 2, np.uint32))
            chain = hash_chain(_KEY, 0, ids, _SIZE)
            decisions.append(_decision(i, at_s, who, ids, chain, epoch))
            outcomes.append(_outcome(i, at_s, who, n, epoch))
            if i % 5:  # else the worker has it already, as far as it tells
                half = len(chain) // 2
                marks = [(Kind.STORED, chain[:half], {}), (Kind.STORED, chain[half:], {"parent": chain[half - 1]})]
                for k, mark in enumerate([*marks, (Kind.REMOVED, chain[half::-1], {})] if i % 2 else marks):
                    batches.append(_batch(who, epoch, 4 * i + k + 20, at_s + 0.1, mark))
        _tell(core, KV_EVENTS, *batches)
        _tell(core, DECISIONS, *decisions)
        _tell(core, OUTCOMES, *outcomes)
        _tell(core, WORKER_LOAD, *(_load(who, at_s + 3.5, epoch) for who in _ENGINES))
        core.fold.settle(at_s + 3.5, at_s + 3.5, at_s + 3.5)
        core.analyses.take(core.fold.take_told())
        core.analyses.close(at_s)
    core.fold.lose(("", 0), at_s)
    core.count_held()
    core.analyses.live()


def _tell(core: Core, topic: str, *records: KvBatch | BaseModel) -> None:
    values = [encode(r) if isinstance(r, KvBatch) else r.model_dump_json(exclude_unset=True).encode() for r in records]
    core.fold.take(("", 0), topic, [StoredRecord(i, 0, b"", value, ()) for i, value in enumerate(values)], 1e10)


def _batch(who: WorkerId, epoch: int, seq: int, at_s: float, *marks: Mark) -> KvBatch:
    rows = np.zeros(len(marks), EVENT)
    for row, (kind, blocks, fields) in zip(rows, marks, strict=True):
        row["kind"], row["count"], row["seq"], row["time_s"], row["block_size"] = kind, len(blocks), seq, at_s, _SIZE
        for name, value in fields.items():
            row[name] = value
    return KvBatch(who, epoch, seq, seq, at_s, at_s, rows, np.concatenate([blocks for _, blocks, _ in marks]))


def _start(who: WorkerId, epoch: int, at_s: float) -> KvBatch:
    some = np.arange(1, 40, dtype=np.uint64)
    stores = [(Kind.STORED, some, fields) for fields in _CELLS]
    return _batch(
        who, epoch, 10, at_s, (Kind.EPOCH_STARTED, _NONE, {"flags": COMPLETE | ENGINE_RESTARTED}), *stores, (Kind.REMOVED, some[:20], {}),
        (Kind.CLEARED, _NONE, {}), *stores, (Kind.GAP, _NONE, {"seq": 9, "parent": 9}), (Kind.UNNAMED, _NONE, {"parent": 2}),
        (Kind.REPORTED, some, {}), (Kind.SNAPSHOT, some[20:], {"flags": COMPLETE | FIRST | LAST}),
    )  # fmt: skip


def _decision(i: int, at_s: float, who: WorkerId, ids: U32, chain: U64, epoch: int) -> Decision:
    made = described(_KEY, ids, _SIZE, 0, "lora" if i % 7 == 0 else None, None)
    seen = Candidate(worker=who.worker, rank=who.rank, epoch=epoch, seq=4 * i, trust=Trust.EXACT, prefill_s=0.1)
    return Decision(
        request_id=f"{epoch} {i}", time_s=at_s, router="r", pool=who.pool, model="m", path="/", policy="p", policy_version="1",
        token_source="exact", prompt_tokens=len(ids), block_size=_SIZE, chain=pack_hashes(chain), namespace=made.namespace, content_from=0,
        content=pack_hashes(made.fingerprints), chunks=pack_hashes(made.chunks), chunk_tokens=pack_lengths(made.chunk_tokens),
        session_id=f"s{i % 9}", worker=who.worker, rank=None if i % 6 == 2 else who.rank, candidates=(seen,),
    )  # fmt: skip


def _outcome(i: int, at_s: float, who: WorkerId, tokens: int, epoch: int) -> Outcome:
    return Outcome(
        request_id=f"{epoch} {i}", time_s=at_s + 1, worker=who.worker, status=200, ttft_s=0.3, e2e_s=1.0, prompt_tokens=tokens,
        cached_tokens=0, completion_tokens=5, engine_queue_s=0.01, engine_ttft_s=0.02 + tokens * 1e-4,
    )  # fmt: skip


def _load(who: WorkerId, at_s: float, epoch: int) -> WorkerLoad:
    bridge = BridgeHealth(trust=Trust.EXACT, epoch=epoch)
    return WorkerLoad(
        pool=who.pool, worker=who.worker, rank=who.rank, time_s=at_s, engine="vllm", up=True, capacity_blocks=100, bridge=bridge
    )
