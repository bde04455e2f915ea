"""Segments and what becomes of them: written whole or not at all, merged when small, dropped by age and size."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from collector.store.columns import arrow_schema, from_rows, micros
from collector.store.publish import SCHEMAS
from collector.store.retention import Keep, expired, mergeable
from collector.store.segments import Segment, read_segments, sweep, write_segment
from schemas.tables.published import TABLES


def change(text: str, at_us: int) -> pa.Table:
    return from_rows(SCHEMAS["changes"], [(at_us, "note", text, None, None, None)])


def segment(lo: int, hi: int | None = None, size: int = 100, newest_s: float = 0.0, level: int = 0, table: str = "t") -> Segment:
    return Segment(table, lo, lo if hi is None else hi, 1, size, int(newest_s * 1e6), level)


def test_every_published_column_has_an_arrow_type() -> None:
    for table in TABLES:
        assert arrow_schema(table).names == [c.name for c in table.columns]


def test_a_segment_comes_back_as_it_was_and_knows_its_newest_time(tmp_path: Path) -> None:
    rows = pa.concat_tables([change("a", 5), change("b", 9)])
    written = write_segment(tmp_path, "changes", 3, 3, rows)
    assert written.name == "changes/000000000003-000000000003.parquet"
    assert (written.rows, written.newest_us, written.size_bytes) == (2, 9, (tmp_path / written.name).stat().st_size)
    assert read_segments(tmp_path, [written]).to_pylist() == rows.to_pylist()
    assert [p.name for p in (tmp_path / "changes").iterdir()] == [Path(written.name).name]


def test_hashes_keep_all_64_bits(tmp_path: Path) -> None:
    big = (1 << 64) - 1
    table = pa.table({"at": pa.array([1], pa.timestamp("us")), "hashes": pa.array([[big, 0]], pa.list_(pa.uint64()))})
    written = write_segment(tmp_path, "kv_events", 1, 1, table)
    assert read_segments(tmp_path, [written])["hashes"].to_pylist() == [[big, 0]]


def test_files_that_nobody_names_go_and_drafts_with_them(tmp_path: Path) -> None:
    kept = write_segment(tmp_path, "changes", 1, 1, change("a", 1))
    write_segment(tmp_path, "changes", 2, 2, change("b", 2))
    (tmp_path / "changes" / "x.parquet.tmp").touch()
    assert len(sweep(tmp_path, {kept.name})) == 2
    assert [p.name for p in (tmp_path / "changes").iterdir()] == [Path(kept.name).name]


def test_old_segments_go_and_the_oldest_of_a_table_that_is_too_big() -> None:
    keep = {"t": Keep(100.0, 250), "u": Keep(1e9, 10**9)}
    manifest = [segment(1, newest_s=850.0), segment(2, newest_s=950.0), segment(3, newest_s=960.0), segment(4, newest_s=970.0)]
    assert [s.lo for s in expired(manifest, keep, 1000.0)] == [1, 2]
    assert expired([segment(1, table="u")], keep, 1000.0) == []
    with pytest.raises(KeyError):
        expired([segment(1, table="other")], keep, 1000.0)


def test_rows_that_lack_some_of_their_times_are_as_old_as_the_newest_they_have_and_never_old_without_any(tmp_path: Path) -> None:
    rows = [[None] * len(SCHEMAS["requests"])]
    rows[0][SCHEMAS["requests"].names.index("ended_at")] = 7
    assert write_segment(tmp_path, "requests", 1, 1, from_rows(SCHEMAS["requests"], rows)).newest_us == 7
    timeless = write_segment(tmp_path, "requests", 2, 2, from_rows(SCHEMAS["requests"], [[None] * len(SCHEMAS["requests"])]))
    assert expired([timeless], {"requests": Keep(1.0, 1 << 30)}, 1e9) == []


def test_sixteen_small_neighbours_of_a_level_are_merged_and_big_ones_left_alone() -> None:
    assert mergeable([segment(i) for i in range(15)]) is None
    run = mergeable([segment(i) for i in range(20)])
    assert run is not None
    assert [s.lo for s in run] == list(range(16))
    assert mergeable([segment(i, size=40 << 20) for i in range(40)]) is None
    some = mergeable([segment(i, size=20 << 20) for i in range(20)])
    assert some is not None
    assert len(some) == 3
    mixed = [*(segment(i, level=1) for i in range(10)), *(segment(100 + i) for i in range(10))]
    assert mergeable(mixed) is None


def test_only_neighbours_are_merged_so_that_rows_keep_the_order_of_their_commits() -> None:
    """A journal is fed again in that order."""
    before, big, after = [segment(i) for i in range(5)], segment(5, size=40 << 20), [segment(i) for i in range(6, 30)]
    assert mergeable([big, *after, *before]) == before
    merged = segment(0, level=1)
    assert mergeable([merged, big, *after[:15]]) is None
    assert mergeable([merged, big, *after]) == after[:16]
    assert mergeable([segment(0), big]) is None


def test_times_of_broken_clocks_are_clamped_to_what_a_timestamp_holds() -> None:
    assert micros(1.5) == 1_500_000
    assert from_rows(SCHEMAS["changes"], [(micros(1e300), "note", "x", None, None, None)]).num_rows == 1
