"""Work on files that the loop must not wait for: merging small segments and writing checkpoints, in a second thread.

Nothing done here counts by itself: the loop takes finished work with its next commit, which names the files in its transaction. What is
never taken (a crash, a failed write, retention that was quicker) is a file that nobody names; it is removed here or by the next start.
One of each at a time. The arguments are copies or never changed, so the threads share nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from collector.store.checkpoint import Arrays, sweep_checkpoints, write_checkpoint
from collector.store.retention import mergeable
from collector.store.segments import Segment, read_segments, write_segment

log = logging.getLogger(__name__)


class Upkeep:
    def __init__(self, segments_dir: Path, checkpoints_dir: Path) -> None:
        self._segments_dir, self._checkpoints_dir = segments_dir, checkpoints_dir
        self._thread = ThreadPoolExecutor(1, "collector-files")
        self._merge: Future[tuple[Sequence[Segment], Segment]] | None = None
        self._saving: Future[str] | None = None
        self._saved: tuple[int, Mapping[str, int]] = (0, {})

    def merge(self, manifest: Sequence[Segment]) -> None:
        """Begins to merge what should be one segment, unless a merge is under way."""
        if self._merge is None and (run := mergeable(manifest)) is not None:
            self._merge = self._thread.submit(self._merged, list(run))

    def _merged(self, run: Sequence[Segment]) -> tuple[Sequence[Segment], Segment]:
        rows = read_segments(self._segments_dir, run)
        first, last = run[0], run[-1]
        return run, write_segment(self._segments_dir, first.table, first.lo, last.hi, rows, first.level + 1)

    def take_merged(self, manifest: Sequence[Segment]) -> tuple[Sequence[Segment], Segment] | None:
        """(segments to remove, the one in their place) of a finished merge, once; None: there is none that still holds."""
        if self._merge is None or not self._merge.done():
            return None
        merge, self._merge = self._merge, None
        if (error := merge.exception()) is not None:
            log.warning("segments could not be merged: %s", error)
            return None
        run, merged = merge.result()
        if all(s in manifest for s in run):
            return run, merged
        (self._segments_dir / merged.name).unlink(missing_ok=True)  # retention was quicker with one of them
        return None

    @property
    def saving(self) -> bool:
        """A checkpoint is being written, or written and not taken yet."""
        return self._saving is not None

    def save(self, number: int, state: Arrays, offsets: Mapping[str, int]) -> None:
        """Begins to write a checkpoint. number: of the last commit, whose `offsets` (topic/partition -> next) the state stands for."""
        self._saved = number, offsets
        self._saving = self._thread.submit(write_checkpoint, self._checkpoints_dir, number, state)

    def take_saved(self) -> dict[str, Any] | None:
        """{file, number, offsets} of a finished checkpoint, once. number: of the commit whose state it is."""
        if self._saving is None or not self._saving.done():
            return None
        saving, self._saving = self._saving, None
        if (error := saving.exception()) is not None:
            log.warning("no checkpoint could be written (%s); a restart reads more of the stream again", error)
            return None
        number, offsets = self._saved
        return {"file": saving.result(), "number": number, "offsets": dict(offsets)}

    def sweep(self, keep: str) -> None:
        """Removes all checkpoints but this one; only right after `take_saved`, while none is being written."""
        sweep_checkpoints(self._checkpoints_dir, keep)

    def wait(self, timeout_s: float) -> None:
        """Until what was begun is done. Raises TimeoutError."""
        for work in (self._merge, self._saving):
            if work is not None:
                work.exception(timeout_s)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
