"""How long blocks lived in a worker's GPU cache, and how long they lay idle, when they were removed: from KV events of a sample.

    kv-events --watch--> table of blocks that are held, or were removed in an open window      removed: rows of the open windows
                           block, worker | copies, stored_s, used_s | its newest row of ------> block, worker, stored_s, used_s, removed_s
    requests --touch---^  until when one had it in its prompt

The sample is told by the blocks' names (distinct.py): all of them up to the budgets, then one in 2^level. `level` rises when the table or
the rows are full, and never falls.

A use lasts from a request's prefill to its end, and is told long after it happened, perhaps after the block was removed or even stored
again. So it is placed by its time alone: in the newest life of the block that it fell into, as long as the window of that life's end is
open. Hence the state does not depend on how events and uses are interleaved, as long as no use is told before the events of its time are
read; a restart may read all kv-events first and the journal of requests afterwards. (What may differ is the level, when budgets were full
in between, and a use during which the block was evicted, stored again and cleared.)

Belongs to the kv-events and is saved with the residency, not with the analyses. What falls into a window that is closed is dropped, and
counted in `late`.

A life begins with a store that was seen and ends with the removal of its last copy on the GPU (all groups). A clear, a new epoch, a gap,
mark or jump, ends the lives of that worker without a row: when they really ended is not known, and no eviction was it. Blocks that were
there before the first event have no life: until a cache has turned over once, lives look shorter than they are.

Bounds: 40 bytes a slot of the table (and the same for moving), 40 bytes a row, 24 bytes a worker.

Pure. tests/collector/analytics/naive_lives.py is the twin that the tests fuzz it against.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from collector.analytics.attributed import F64
from collector.analytics.distinct import mix
from schemas.block_hash import U64
from schemas.kv_events import Kind, Unpacked

_STORED, _REMOVED, _CLEARED, _EPOCH, _GAP = (int(k) for k in (Kind.STORED, Kind.REMOVED, Kind.CLEARED, Kind.EPOCH_STARTED, Kind.GAP))

LIFE = np.dtype(
    [
        ("block", "<u8"), ("stored_s", "<f8"), ("used_s", "<f8"), ("who", "<u4"), ("copies", "<u4"), ("era", "<u4"), ("row", "<i4"),
    ],
    align=True,
)  # fmt: skip
"""block: mixed name. who: number of the worker + 1; 0: the slot is free. copies 0: removed. era: of the worker when it was stored. row: of
its newest removal among the open windows' rows, -1: none."""

ROW = np.dtype(
    [("block", "<u8"), ("stored_s", "<f8"), ("used_s", "<f8"), ("removed_s", "<f8"), ("who", "<u4"), ("older", "<i4")], align=True
)
"""older: row of the removal before, of the same block and worker; -1: none."""

WORKER = np.dtype([("epoch", "<u8"), ("seq", "<u8"), ("started", "?"), ("era", "<u4")], align=True)

# Columns of `state`.
_USED, _ROWS, _LEVEL, _LATE = range(4)
_LOAD = 0.7


@dataclass(frozen=True, slots=True, eq=False)
class Removed:
    """Blocks of the sample that were removed in one window. number: the worker's, shape (n,); seconds, shape (n,)."""

    number: npt.NDArray[np.int64]
    lifetime_s: F64
    idle_s: F64


@numba.njit(cache=True, inline="always")
def _slot(table, block, who):  # type: ignore[no-untyped-def]
    """Where (block, who) is, or the free slot where it would be."""
    mask = np.uint64(len(table) - 1)
    i = (block ^ np.uint64(who) * np.uint64(0x9E3779B97F4A7C15)) & mask
    while True:
        e = table[np.int64(i)]
        if e["who"] == 0 or (e["block"] == block and e["who"] == who):
            return np.int64(i)
        i = (i + np.uint64(1)) & mask


@numba.njit(cache=True)
def _tidy(table, moving, rows, place, workers, state, closed_s):  # type: ignore[no-untyped-def]
    """Drops what is of no use: rows of closed windows or beyond the level, lives that nobody will end, removed blocks without a row."""
    limit = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(state[_LEVEL])
    kept = 0
    for i in range(state[_ROWS]):
        place[i] = -1
        if rows[i]["removed_s"] >= closed_s and rows[i]["block"] <= limit:
            place[i] = kept
            rows[kept] = rows[i]
            if rows[kept]["older"] >= 0:
                rows[kept]["older"] = place[rows[kept]["older"]]
            kept += 1
    state[_ROWS] = kept
    n = 0
    for i in range(len(table)):
        e = table[i]
        if e["who"] != 0:
            if e["row"] >= 0:
                e["row"] = place[e["row"]]
            held = e["copies"] > 0 and e["era"] == workers[e["who"] - 1]["era"]
            if not held:
                e["copies"] = 0
            if e["block"] <= limit and (held or e["row"] >= 0):
                moving[n] = e
                n += 1
            e["who"] = 0
    for k in range(n):
        at = _slot(table, moving[k]["block"], moving[k]["who"])
        table[at] = moving[k]
    state[_USED] = n


@numba.njit(cache=True)
def _make_room(table, moving, rows, place, workers, state, closed_s):  # type: ignore[no-untyped-def]
    """Raises the level until a quarter of the table and of the rows is free."""
    _tidy(table, moving, rows, place, workers, state, closed_s)
    while state[_USED] > len(table) * _LOAD * 0.75 or state[_ROWS] > len(rows) * 0.75:
        state[_LEVEL] += 1
        _tidy(table, moving, rows, place, workers, state, closed_s)


@numba.njit(cache=True)
def _watch(  # type: ignore[no-untyped-def]
    numbers, epochs, first_seqs, last_seqs, bridge_times, event_end, hash_end, ok, events, hashes, table, moving, rows, place, workers,
    state, closed_s,
):  # fmt: skip
    most = np.int64(len(table) * _LOAD)
    limit = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(state[_LEVEL])
    for r in range(len(ok)):
        if not ok[r]:
            continue
        w = workers[numbers[r]]
        who = np.uint32(numbers[r] + 1)
        if w["started"] and (epochs[r] < w["epoch"] or (epochs[r] == w["epoch"] and last_seqs[r] < w["seq"])):
            continue
        e_from = event_end[r - 1] if r > 0 else 0
        h_at = hash_end[r - 1] if r > 0 else 0
        if not w["started"] or epochs[r] > w["epoch"] or first_seqs[r] > w["seq"] + np.uint64(1):
            w["era"] += 1
        w["started"] = True
        w["epoch"] = epochs[r]
        w["seq"] = last_seqs[r]
        for k in range(e_from, event_end[r]):
            e = events[k]
            kind = e["kind"]
            count = np.int64(e["count"])
            time_s = e["time_s"] if e["time_s"] > 0 else bridge_times[r]
            if kind in (_CLEARED, _EPOCH, _GAP):
                w["era"] += 1
                if kind == _GAP and e["parent"] > w["seq"]:
                    w["seq"] = e["parent"]
            elif e["tier"] == 0 and kind == _STORED:
                for i in range(h_at, h_at + count):
                    block = mix(hashes[i])
                    if block > limit:
                        continue
                    if state[_USED] >= most:
                        _make_room(table, moving, rows, place, workers, state, closed_s)
                        limit = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(state[_LEVEL])
                        if block > limit:
                            continue
                    x = table[_slot(table, block, who)]
                    if x["who"] == 0:
                        x["block"] = block
                        x["who"] = who
                        x["copies"] = 0
                        x["row"] = -1
                        state[_USED] += 1
                    if x["copies"] > 0 and x["era"] == w["era"]:
                        x["copies"] += 1
                    else:
                        x["copies"] = 1
                        x["era"] = w["era"]
                        x["stored_s"] = time_s
                        x["used_s"] = time_s
            elif e["tier"] == 0 and kind == _REMOVED:
                for i in range(h_at, h_at + count):
                    block = mix(hashes[i])
                    if block > limit:
                        continue
                    if state[_ROWS] == len(rows):
                        _make_room(table, moving, rows, place, workers, state, closed_s)
                        limit = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(state[_LEVEL])
                        if block > limit:
                            continue
                    x = table[_slot(table, block, who)]
                    if x["who"] == 0 or x["copies"] == 0 or x["era"] != w["era"]:
                        continue
                    x["copies"] -= 1
                    if x["copies"] > 0:
                        continue
                    if time_s < closed_s:
                        state[_LATE] += 1
                        continue
                    y = rows[state[_ROWS]]
                    y["block"] = block
                    y["who"] = who
                    y["stored_s"] = x["stored_s"]
                    y["used_s"] = min(x["used_s"], time_s)
                    y["removed_s"] = time_s
                    y["older"] = x["row"]
                    x["row"] = state[_ROWS]
                    state[_ROWS] += 1
            h_at += count


@numba.njit(cache=True)
def _touch(mixed, who, from_s, to_s, table, rows, workers, state):  # type: ignore[no-untyped-def]
    limit = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(state[_LEVEL])
    for i in range(len(mixed)):
        block = mixed[i]
        if block > limit:
            continue
        x = table[_slot(table, block, who)]
        if x["who"] == 0:
            continue
        k = x["row"]
        if x["stored_s"] <= to_s:
            if x["copies"] > 0 and x["era"] == workers[who - 1]["era"]:
                x["used_s"] = max(x["used_s"], to_s)
                continue
            if k >= 0 and rows[k]["stored_s"] != x["stored_s"]:
                continue  # it fell into a life that ended without a row
        while k >= 0 and rows[k]["stored_s"] > to_s:
            k = rows[k]["older"]
        if k >= 0 and from_s <= rows[k]["removed_s"]:
            rows[k]["used_s"] = max(rows[k]["used_s"], min(to_s, rows[k]["removed_s"]))


class Lives:
    """slots: of the table, a power of two, 70 % are used; rows: removals of the open windows."""

    def __init__(self, slots: int = 1 << 17, rows: int = 1 << 15) -> None:
        if slots < 8 or slots & (slots - 1):
            raise ValueError(f"slots={slots} must be a power of two of at least 8")
        if rows < 4:
            raise ValueError(f"rows={rows} must be at least 4")
        self._table: npt.NDArray[np.void] = np.zeros(slots, LIFE)
        self._moving: npt.NDArray[np.void] = np.zeros(slots, LIFE)
        self._rows: npt.NDArray[np.void] = np.zeros(rows, ROW)
        self._place = np.zeros(rows, np.int32)
        self._workers: npt.NDArray[np.void] = np.zeros(16, WORKER)
        self._state = np.zeros(4, np.int64)
        self._closed_s = 0.0

    @property
    def level(self) -> int:
        """One block in 2^level is in the sample."""
        return int(self._state[_LEVEL])

    @property
    def late(self) -> int:
        """Removals of the sample that fell into a closed window."""
        return int(self._state[_LATE])

    def watch(self, batch: Unpacked, record_worker: npt.NDArray[np.int32]) -> None:
        """Takes records in order. record_worker: the number of each record's worker, as for `Residency.apply`."""
        if not batch.ok.any():
            return
        self._know(int(record_worker[batch.ok].max()))
        _watch(
            record_worker, batch.epoch, batch.first_seq, batch.last_seq, batch.bridge_time_s, batch.event_end, batch.hash_end, batch.ok,
            batch.events, batch.hashes, self._table, self._moving, self._rows, self._place, self._workers, self._state, self._closed_s,
        )  # fmt: skip

    def lose(self, number: int) -> None:
        """The stream lost records of this worker: its lives end unseen."""
        self._know(number)
        self._workers[number]["era"] += 1

    def touch(self, mixed: U64, numbers: Iterable[int], from_s: float, to_s: float) -> None:
        """Blocks that a request held from its prefill to its end (unix seconds), on these workers: one, or all ranks that it may have been.

        mixed: their names by `distinct.mix`, of a sample of this level at most.
        """
        for number in numbers:
            if number < len(self._workers):
                _touch(mixed, np.uint32(number + 1), from_s, to_s, self._table, self._rows, self._workers, self._state)

    def removed(self, from_s: float, to_s: float) -> Removed:
        """Of removals in [from_s, to_s)."""
        rows = self._rows[: self._state[_ROWS]]
        rows = rows[(rows["removed_s"] >= from_s) & (rows["removed_s"] < to_s)]
        return Removed(
            rows["who"].astype(np.int64) - 1,
            np.maximum(rows["removed_s"] - rows["stored_s"], 0.0),
            np.maximum(rows["removed_s"] - rows["used_s"], 0.0),
        )

    def windows(self, length_s: int) -> list[float]:
        """Starts of the windows of that length that removals fell into, unix seconds."""
        starts: list[float] = (np.unique(self._rows[: self._state[_ROWS]]["removed_s"] // length_s) * length_s).tolist()
        return starts

    def close(self, before_s: float) -> None:
        """Forgets removals before before_s, and takes none any more."""
        if before_s > self._closed_s:
            self._closed_s = float(before_s)  # of an int kernels would be compiled anew
            _tidy(self._table, self._moving, self._rows, self._place, self._workers, self._state, self._closed_s)

    def save(self) -> dict[str, npt.NDArray[Any]]:
        used = self._table[self._table["who"] != 0]
        return {
            "lives": used[np.lexsort((used["who"], used["block"]))],
            "rows": self._rows[: self._state[_ROWS]].copy(),
            "workers": self._workers.copy(),
            "state": self._state.copy(),
            "closed_s": np.array([self._closed_s]),
        }

    def load(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        """Budgets may differ from the saved one's: what does not fit raises the level."""
        lives, rows = saved["lives"].astype(LIFE), saved["rows"].astype(ROW)  # a file's types are not aligned, and so are others to numba
        self._workers = saved["workers"].astype(WORKER)
        self._closed_s = float(saved["closed_s"][0])
        self._state[:] = saved["state"]
        self._table["who"] = 0
        while (lives["who"] > 0).sum() > len(self._table) * _LOAD or len(rows) > len(self._rows):
            self._state[_LEVEL] += 1
            limit = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(self.level)
            stay = rows["block"] <= limit
            place = np.append(np.where(stay, np.cumsum(stay) - 1, -1), -1)
            lives, rows = lives[lives["block"] <= limit], rows[stay]
            lives["row"], rows["older"] = place[lives["row"]], place[rows["older"]]
        self._rows[: len(rows)] = rows
        _insert(self._table, np.ascontiguousarray(lives))
        self._state[_USED], self._state[_ROWS] = len(lives), len(rows)

    def held_bytes(self) -> int:
        return sum(a.nbytes for a in (self._table, self._moving, self._rows, self._place, self._workers))

    def _know(self, number: int) -> None:
        while number >= len(self._workers):
            self._workers = np.concatenate([self._workers, np.zeros_like(self._workers)])


@numba.njit(cache=True)
def _insert(table, lives):  # type: ignore[no-untyped-def]
    for k in range(len(lives)):
        table[_slot(table, lives[k]["block"], lives[k]["who"])] = lives[k]
