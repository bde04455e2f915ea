"""All analyses as one: fed with what attribution tells, kept equal over restarts by a checkpoint and a journal.

    told requests --take--> each analysis --live--> rows of open windows, published
         |                       +--------close--> rows of ended windows, for segments
         +--> journal entries: requests in order, and a mark at each close

An analysis is a function of the entries it was fed, so checkpoint (state after some commit) + journal (entries of later commits) give the
state of an uninterrupted run. Rows of windows closed before the crash are segments already: closing them again writes nothing.
Entries and rows wait here until `written`, whatever becomes of a commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from collector.analytics.attributed import JOURNAL_SCHEMA, WINDOW_S, Analysis, Attributed, Rows, from_arrow, to_arrow

JOURNAL = "journal"
"""Name of the segments that hold the journal; not published."""
SCHEMA = pa.schema([pa.field("commit", pa.uint64()), pa.field("closed_s", pa.float64()), *JOURNAL_SCHEMA])


@dataclass(frozen=True, slots=True)
class Closed:
    """All windows that ended at or before before_s (unix seconds) were closed here."""

    before_s: float


Entry = Attributed | Closed


class Analyses:
    """parts: each analysis by a name, which its arrays carry in the checkpoint."""

    def __init__(self, parts: Mapping[str, Analysis]) -> None:
        self.parts = dict(parts)
        self._pending: list[Entry] = []
        self._rows: dict[str, Rows] = {}
        self.closed_s = 0.0
        """Windows that ended by then (unix seconds) are closed."""

    def take(self, requests: Sequence[Attributed]) -> None:
        if not requests:
            return
        for part in self.parts.values():
            part.take(requests)
        self._pending += requests

    def close(self, complete_s: float) -> None:
        """Closes the windows that are over. complete_s: everything that happened before is in here."""
        before_s = complete_s // WINDOW_S * WINDOW_S
        if before_s <= self.closed_s:
            return
        for table, rows in self._close(before_s).items():
            self._rows.setdefault(table, []).extend(rows)
        self._pending.append(Closed(before_s))

    def _close(self, before_s: float) -> dict[str, Rows]:
        self.closed_s = before_s
        out: dict[str, Rows] = {}
        for part in self.parts.values():
            for table, rows in part.close(before_s).items():
                out.setdefault(table, []).extend(rows)
        return out

    def live(self) -> dict[str, Rows]:
        """Rows of open windows, and closed ones that no commit has written yet."""
        out = {table: list(rows) for table, rows in self._rows.items()}
        for part in self.parts.values():
            for table, rows in part.live().items():
                out.setdefault(table, []).extend(rows)
        return out

    def outputs(self) -> dict[str, Rows]:
        """Rows of closed windows, to be written."""
        return {table: rows for table, rows in self._rows.items() if rows}

    def journal(self, commit: int) -> pa.Table:
        """Entries that no commit has written yet, as rows of the commit that writes them."""
        return journal_rows(commit, self._pending)

    def written(self) -> None:
        self._pending, self._rows = [], {}

    def save(self) -> dict[str, npt.NDArray[Any]]:
        out: dict[str, npt.NDArray[Any]] = {"closed_s": np.array([self.closed_s])}
        for name, part in self.parts.items():
            out |= {f"{name}/{key}": value for key, value in part.save().items()}
        return out

    def load(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        """An analysis that the checkpoint does not know begins empty."""
        self.closed_s = float(saved["closed_s"][0])
        for name, part in self.parts.items():
            mine = {key.removeprefix(f"{name}/"): value for key, value in saved.items() if key.startswith(f"{name}/")}
            if mine:
                part.load(mine)

    def replay(self, entries: Iterable[Entry]) -> None:
        """Takes the journal's entries again: nothing of them is pending, and no row comes out."""
        batch: list[Attributed] = []
        for entry in entries:
            if isinstance(entry, Closed):
                self._feed(batch)
                batch = []
                self._close(entry.before_s)
            else:
                batch.append(entry)
        self._feed(batch)

    def _feed(self, batch: Sequence[Attributed]) -> None:
        if batch:
            for part in self.parts.values():
                part.take(batch)

    def held_bytes(self) -> int:
        return sum(part.held_bytes() for part in self.parts.values())


def journal_rows(commit: int, entries: Sequence[Entry]) -> pa.Table:
    """Rows of `SCHEMA`, one an entry, in order."""
    requests = to_arrow([e for e in entries if isinstance(e, Attributed)])
    places = iter(range(requests.num_rows))
    order = pa.array([None if isinstance(e, Closed) else next(places) for e in entries], pa.int64())
    closed = pa.array([e.before_s if isinstance(e, Closed) else None for e in entries], pa.float64())
    columns: list[Any] = [pa.array([commit] * len(entries), pa.uint64()), closed, *(column.take(order) for column in requests.columns)]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def entries_after(rows: pa.Table, commit: int) -> list[Entry]:
    """The entries of commits after `commit`, in order."""
    rows = rows.filter(pc.greater(rows["commit"], pa.scalar(commit, pa.uint64())))
    told = rows["closed_s"].is_null()
    requests = iter(from_arrow(rows.filter(told).select(JOURNAL_SCHEMA.names)))
    return [next(requests) if s is None else Closed(float(s)) for s in rows["closed_s"].to_pylist()]
