"""Merges and checkpoints in the second thread: taken once, only while they still hold, and never left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from collector.store.columns import from_rows
from collector.store.publish import SCHEMAS
from collector.store.retention import FAN_IN
from collector.store.segments import Segment, read_segments, write_segment
from collector.store.upkeep import Upkeep


@pytest.fixture
def upkeep(tmp_path: Path) -> Iterator[Upkeep]:
    made = Upkeep(tmp_path / "segments", tmp_path / "checkpoints")
    yield made
    made.close()


def small_ones(folder: Path) -> list[Segment]:
    rows = (from_rows(SCHEMAS["changes"], [(i + 1, "note", f"{i}", None, None, None)]) for i in range(FAN_IN))
    return [write_segment(folder / "segments", "changes", i, i, r) for i, r in enumerate(rows)]


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.glob("**/*") if p.is_file()}


def test_a_merge_holds_all_rows_in_order_and_is_taken_once(upkeep: Upkeep, tmp_path: Path) -> None:
    manifest = small_ones(tmp_path)
    assert upkeep.take_merged(manifest) is None
    upkeep.merge(manifest)
    upkeep.wait(10)
    taken = upkeep.take_merged(manifest)
    assert taken is not None
    run, merged = taken
    assert (list(run), merged.lo, merged.hi, merged.level) == (manifest, 0, FAN_IN - 1, 1)
    assert read_segments(tmp_path / "segments", [merged])["text"].to_pylist() == [str(i) for i in range(FAN_IN)]
    assert upkeep.take_merged(manifest) is None


def test_a_merge_of_something_that_is_gone_meanwhile_counts_for_nothing_and_leaves_no_file(upkeep: Upkeep, tmp_path: Path) -> None:
    manifest = small_ones(tmp_path)
    before = names(tmp_path)
    upkeep.merge(manifest)
    upkeep.wait(10)
    assert len(names(tmp_path)) == len(before) + 1
    assert upkeep.take_merged(manifest[1:]) is None
    assert names(tmp_path) == before


def test_a_merge_that_fails_is_no_result_and_can_be_tried_again(upkeep: Upkeep, tmp_path: Path) -> None:
    manifest = small_ones(tmp_path)
    hidden = tmp_path / "segments" / manifest[3].name
    content = hidden.read_bytes()
    hidden.unlink()
    upkeep.merge(manifest)
    upkeep.wait(10)
    assert upkeep.take_merged(manifest) is None
    hidden.write_bytes(content)
    upkeep.merge(manifest)
    upkeep.wait(10)
    assert upkeep.take_merged(manifest) is not None


def test_a_checkpoint_stands_for_the_offsets_it_was_begun_with(upkeep: Upkeep, tmp_path: Path) -> None:
    upkeep.save(7, {"a": np.arange(3)}, {"t/0": 5})
    upkeep.wait(10)
    assert upkeep.saving  # until it is taken
    assert upkeep.take_saved() == {"file": "000000000007.npz", "number": 7, "offsets": {"t/0": 5}}
    assert upkeep.take_saved() is None
    upkeep.save(9, {"a": np.arange(3)}, {"t/0": 6})
    upkeep.wait(10)
    upkeep.sweep("000000000009.npz")
    assert names(tmp_path) == {"000000000009.npz"}


def test_a_checkpoint_that_cannot_be_written_is_none(upkeep: Upkeep, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    upkeep.save(7, {"a": np.arange(3)}, {})
    upkeep.wait(10)
    assert upkeep.take_saved() is None
    assert not upkeep.saving
