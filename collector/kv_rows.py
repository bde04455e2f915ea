"""Rows of `kv_events` from unpacked records: whole columns at once, no Python per event. Hashes are not copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from collector.store.publish import SCHEMAS
from schemas.kv_events import Kind, Tier, Unpacked, WorkerId

_KINDS = pa.array(["", *(k.name.lower() for k in Kind)])
_TIERS = pa.array([t.name for t in Tier])


def kv_event_rows(
    batch: Unpacked,
    record_worker: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    partition: int,
    workers: Sequence[WorkerId],
) -> pa.Table:
    """One row an event. record_worker, offsets: of each record, shape (n,); workers: by number."""
    events = batch.events
    per_record = np.diff(batch.event_end, prepend=0)
    record = np.repeat(np.arange(len(per_record)), per_record)
    bridge_s = batch.bridge_time_s[record]
    at_s = np.where(events["time_s"] > 0, events["time_s"], bridge_s)
    worker = record_worker[record]
    list_ends = np.concatenate([[0], np.cumsum(events["count"], dtype=np.int64)]).astype(np.int32)
    columns = {
        "happened_at": _times(at_s),
        "bridge_at": _times(bridge_s),
        "pool": _names(worker, [w.pool for w in workers]),
        "worker": _names(worker, [w.worker for w in workers]),
        "rank": np.array([w.rank for w in workers], np.uint16)[worker],
        "epoch": batch.epoch[record],
        "seq": events["seq"],
        "kind": _dictionary(events["kind"].astype(np.int8), _KINDS),
        "tier": _dictionary(np.minimum(events["tier"], len(_TIERS) - 1).astype(np.int8), _TIERS),
        "group_idx": events["group"],
        "block_size": events["block_size"],
        "flags": events["flags"],
        "parent": events["parent"],
        "blocks": events["count"],
        "hashes": _lists(list_ends, batch.hashes),
        "stream_partition": np.full(len(record), partition, np.uint16),
        "stream_offset": offsets[record].astype(np.uint64),
    }
    arrays = []
    for field in SCHEMAS["kv_events"]:
        column = columns[field.name]
        arrays.append(column if isinstance(column, pa.Array) else pa.array(np.ascontiguousarray(column), field.type))
    return pa.table(arrays, names=SCHEMAS["kv_events"].names)


def _times(seconds: npt.NDArray[np.float64]) -> Any:
    return pa.array(np.round(np.clip(seconds, -1e12, 1e12) * 1e6).astype(np.int64)).cast(pa.timestamp("us"))


def _names(index: npt.NDArray[np.int32], names: list[str]) -> Any:
    return _dictionary(index, pa.array(names, pa.string()))


# pyarrow's stubs cannot tell which array a NumPy array becomes; here is the one place that knows.
def _dictionary(index: Any, values: Any) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array(index), values)


def _lists(ends: Any, values: Any) -> Any:
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(values))
