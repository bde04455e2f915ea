"""The content index as attribution sees it, with a journal: what decisions described is not in any told request, and must not be lost.

Like the analyses' journal (analyses.py): entries since the last commit wait here until `written`; after a restart the checkpoint's index is
fed the entries of later commits again. Registering is idempotent, so what an open request registers a second time changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from collector.analytics.content_index import ContentIndex, Told
from schemas.content import Content

CONTENTS = "journal_contents"
"""Name of the segments that hold it; not published."""
_TYPES: dict[str, pa.DataType] = {
    "commit": pa.uint64(), "time_s": pa.float64(), "pool": pa.string(), "namespace": pa.uint64(), "block_size": pa.uint32(),
    "first_token": pa.uint32(), "prompt_tokens": pa.uint32(), "fingerprints": pa.binary(), "chunks": pa.binary(),
    "chunk_tokens": pa.binary(),
}  # fmt: skip
SCHEMA = pa.schema(_TYPES)


class ContentsJournal:
    def __init__(self, index: ContentIndex) -> None:
        self.index = index
        self._pending: list[tuple[float, str, Content]] = []

    def register(self, time_s: float, pool: str, content: Content) -> None:
        self.index.register(time_s, pool, content)
        if len(content.fingerprints) or len(content.chunks):
            self._pending.append((time_s, pool, content))

    def tell(self, before_s: float, pool: str, content: Content) -> Told:
        return self.index.tell(before_s, pool, content)

    def journal(self, commit: int) -> pa.Table:
        """Entries that no commit has written yet, as rows of the commit that writes them."""
        rows = [
            (
                commit, time_s, pool, c.namespace, c.block_size, c.first_token, c.prompt_tokens, c.fingerprints.astype("<u8").tobytes(),
                c.chunks.astype("<u8").tobytes(), c.chunk_tokens.astype("<u2").tobytes(),
            )
            for time_s, pool, c in self._pending
        ]  # fmt: skip
        columns = zip(*rows, strict=True) if rows else [()] * len(SCHEMA)
        return pa.Table.from_arrays([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)

    def written(self) -> None:
        self._pending = []

    def replay(self, rows: pa.Table, after: int) -> None:
        """Takes the entries of commits after `after` again."""
        for r in rows.filter(pc.greater(rows["commit"], pa.scalar(after, pa.uint64()))).to_pylist():
            content = Content(
                r["namespace"], r["block_size"], r["first_token"], r["prompt_tokens"], np.frombuffer(r["fingerprints"], "<u8"),
                np.frombuffer(r["chunks"], "<u8"), np.frombuffer(r["chunk_tokens"], "<u2"),
            )  # fmt: skip
            self.index.register(r["time_s"], r["pool"], content)

    def save(self) -> Mapping[str, npt.NDArray[Any]]:
        return self.index.save()

    def load(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        self.index.load(saved)

    def held_bytes(self) -> int:
        return self.index.held_bytes()
