"""Parquet segments: the parts of growing tables, written once and never changed.

    data/segments/<table>/<lo>-<hi>.parquet      lo, hi: numbers of the first and last commit whose rows are inside

A segment counts only when the manifest in the state database names it. So a file is first written whole under another name, synced,
renamed, and its folder synced; a crash anywhere leaves files that nobody names, which the next start removes.
Hashes are stored plain: they are random, and no codec makes them smaller.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

SUFFIX = ".parquet"
TEMPORARY = ".tmp"
_PLAIN = ("hashes.list.element", "parent", "chain_head", "chain_tail", "value")


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of the manifest. newest_us: the newest time inside, for retention by age; 0: none. level: how often it was merged."""

    table: str
    lo: int
    hi: int
    rows: int
    size_bytes: int
    newest_us: int
    level: int

    @property
    def name(self) -> str:
        return f"{self.table}/{self.lo:012d}-{self.hi:012d}{SUFFIX}"


def write_segment(folder: Path, table: str, lo: int, hi: int, content: pa.Table, level: int = 0) -> Segment:
    """Writes and syncs one segment. Raises OSError (disk full and the like); then nothing counts."""
    target = folder / f"{table}/{lo:012d}-{hi:012d}{SUFFIX}"
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(target.name + TEMPORARY)
    names: Any = [f.name for f in content.schema if pa.types.is_string(f.type) or pa.types.is_dictionary(f.type)]
    codec: dict[str, Any] = {path: "NONE" if path in _PLAIN else "ZSTD" for path in _leaf_paths(content.schema)}
    with draft.open("wb") as file:
        pq.write_table(content, file, compression=codec, compression_level={c: 1 for c, k in codec.items() if k == "ZSTD"},
                       use_dictionary=names, write_statistics=True, store_schema=False)  # fmt: skip
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    draft.replace(target)
    sync_folder(target.parent)
    return Segment(table, lo, hi, content.num_rows, size, _newest_us(content), level)


def read_segments(folder: Path, segments: Iterable[Segment]) -> pa.Table:
    """All rows, with every column that one of them has: those of an earlier version have NULL where a later one has more."""
    return pa.concat_tables([pq.ParquetFile(folder / s.name).read() for s in segments], promote_options="default")


def columns_of(folder: Path, segment: Segment) -> frozenset[str]:
    """The columns that the file has. Raises OSError, pyarrow.ArrowException."""
    return frozenset(pq.read_schema(folder / segment.name).names)


def sweep(folder: Path, keep: set[str]) -> list[str]:
    """Removes every file that is not among the names to keep; returns what was removed."""
    gone = []
    for path in folder.glob("*/*"):
        name = f"{path.parent.name}/{path.name}"
        if name not in keep:
            path.unlink()
            gone.append(name)
    return gone


def sync_folder(folder: Path) -> None:
    """Makes renames and removals in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _leaf_paths(schema: pa.Schema) -> list[str]:
    return [f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name for f in schema]


def _newest_us(content: pa.Table) -> int:
    """The newest of all times in it; 0: it has none."""
    newest = [pc.max(content[f.name].cast(pa.int64())).as_py() for f in content.schema if pa.types.is_timestamp(f.type)]
    return max((int(n) for n in newest if n is not None), default=0)
