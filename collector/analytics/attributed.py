"""One request whose tokens are told apart: what every analysis reads, and the only thing it reads of requests.

Attribution makes these in the order in which requests are told. They are written to a journal with the commit that counts them, so that
after a restart the analyses are loaded from the last checkpoint and fed the same values again, in order: equal input, equal state.
Token ids and text are not in here, but for the snippets that an operator may switch on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.block_hash import U64

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Rows = list[tuple[object, ...]]

WINDOW_S = 300
"""Analyses that cannot be kept each 10 s count in windows of this length, by the time of the prefill."""


@dataclass(frozen=True, slots=True, eq=False)
class Attributed:
    """Times are unix seconds, lengths tokens; None: not known or not reported."""

    request_id: str
    started_s: float
    """Dispatch."""
    prefill_s: float
    """When the engine looked its prompt up, as far as events tell; else the first byte, else the end."""
    ended_s: float
    pool: str
    worker: str
    rank: int | None
    model: str
    route: str
    tenant: str
    template: str | None
    session_id: str | None
    policy: str | None
    block_size: int
    """0: not known, and the chain is empty."""
    prompt_tokens: int
    completion_tokens: int | None
    hit_tokens: int | None
    """Delivered: as the engine reported, else told from events."""
    chain: U64
    """Names of all full blocks of the prompt, shape (blocks,)."""
    causes: U8
    """`Cause` of each full block, HIT included, shape (blocks,); of a block of several causes the one with most tokens."""
    gone_s: F32
    """Seconds between a block's loss on this worker and this prefill, shape (blocks,); NaN: it was not lost, or that is not known."""
    idle_s: F32
    """Seconds between its last use and its eviction, shape (blocks,); NaN likewise."""
    run_causes: U8
    """The prompt as runs of one cause each, from its first token on, shape (runs,)."""
    run_tokens: U32
    """Their lengths; they add up to prompt_tokens."""
    run_seconds: F64
    """Prefill seconds that each run cost (0 of hits), shape (runs,); NaN: the cost model knows nothing yet."""
    diverged_at: int | None
    """Tokens that it shares with earlier prompts before the first token that differs; None: it did not diverge, or that is not known."""
    ttft_s: float | None
    engine_queue_s: float | None
    engine_ttft_s: float | None
    snippet: str | None = None
    """Beginning of the prompt's text; None unless an operator switched snippets on in the router."""

    @property
    def blocks(self) -> int:
        return len(self.chain)


class Analysis(Protocol):
    """One analysis: pure, bounded, and equal for equal input. Its windows are `WINDOW_S` long and start at multiples of it."""

    @property
    def tables(self) -> tuple[str, ...]:
        """Published tables that it fills."""

    def take(self, requests: Sequence[Attributed]) -> None:
        """Counts requests, in the order of telling. One whose window is closed counts in the oldest open one."""

    def live(self) -> Mapping[str, Rows]:
        """Rows of the open windows, by table, in the contract's column order; times in microseconds."""

    def close(self, before_s: float) -> Mapping[str, Rows]:
        """Rows of the windows that ended at or before before_s, which are forgotten."""

    def save(self) -> Mapping[str, npt.NDArray[Any]]:
        """Copies of all that `load` needs."""

    def load(self, saved: Mapping[str, npt.NDArray[Any]]) -> None: ...

    def held_bytes(self) -> int: ...


def counts_in(wanted: int, windows: Collection[int], room: bool) -> int:
    """The window in which something of window `wanted` counts: that one, or the nearest of the open ones when there is no room for more,
    as when clocks have gone wild. Windows by number or by start."""
    if wanted in windows or room or not windows:
        return wanted
    return min(windows, key=lambda w: (abs(w - wanted), w))


_ARRAYS: dict[str, np.dtype[Any]] = {
    "chain": np.dtype("<u8"), "causes": np.dtype("u1"), "gone_s": np.dtype("<f4"), "idle_s": np.dtype("<f4"),
    "run_causes": np.dtype("u1"), "run_tokens": np.dtype("<u4"), "run_seconds": np.dtype("<f8"),
}  # fmt: skip
_NAMES = tuple(f.name for f in fields(Attributed))
_TYPES = {
    "rank": pa.uint16(), "block_size": pa.uint32(), "prompt_tokens": pa.uint32(), "completion_tokens": pa.uint32(),
    "hit_tokens": pa.uint32(), "diverged_at": pa.uint32(),
}  # fmt: skip


def _type(name: str) -> pa.DataType:
    if name in _ARRAYS:
        return pa.binary()
    return _TYPES.get(name, pa.float64() if name.endswith("_s") else pa.string())


JOURNAL_SCHEMA = pa.schema([pa.field(name, _type(name)) for name in _NAMES])


def to_arrow(requests: Sequence[Attributed]) -> pa.Table:
    """Rows of the journal, in order."""
    columns = []
    for name in _NAMES:
        values: list[object] = [getattr(r, name) for r in requests]
        if name in _ARRAYS:
            values = [np.ascontiguousarray(v, _ARRAYS[name]).tobytes() for v in values]
        columns.append(pa.array(values, _type(name)))
    return pa.Table.from_arrays(columns, schema=JOURNAL_SCHEMA)


def from_arrow(rows: pa.Table) -> list[Attributed]:
    """The inverse of `to_arrow`."""
    out = []
    for row in rows.to_pylist():
        for name, dtype in _ARRAYS.items():
            row[name] = np.frombuffer(row[name], dtype=dtype)
        out.append(Attributed(**row))
    return out
