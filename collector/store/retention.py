"""What becomes of segments with time: small ones are merged, old ones go. Plans only; the loop carries them out.

Each commit may leave one small segment a table. Sixteen of one level become one of the next, so a table of any age has at most about
sixteen files a level, and a row is written again at most once a level. Segments that are big already are left alone.
Files that no longer count are unlinked after a grace period, because published files that readers still hold open name them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from collector.store.segments import Segment

FAN_IN = 16
MERGE_BYTES = 64 << 20
"""A merged segment gets no bigger than this; it is read into memory whole."""


@dataclass(frozen=True, slots=True)
class Keep:
    """How long rows of one table are kept: by age of the newest row of a segment, and by bytes of all."""

    age_s: float
    size_bytes: int


def expired(manifest: Iterable[Segment], keep: Mapping[str, Keep], now_s: float) -> list[Segment]:
    """Segments that have to go: too old, or the oldest of a table that is too big. Raises KeyError for a table without a rule."""
    by_table: dict[str, list[Segment]] = {}
    for s in manifest:
        by_table.setdefault(s.table, []).append(s)
    out = []
    for table, segments in by_table.items():
        rule = keep[table]
        held = sum(s.size_bytes for s in segments)
        for s in sorted(segments, key=lambda s: s.lo):
            if 0 < s.newest_us < (now_s - rule.age_s) * 1e6 or held > rule.size_bytes:
                out.append(s)
                held -= s.size_bytes
    return out


def mergeable(manifest: Iterable[Segment], fan_in: int = FAN_IN, merge_bytes: int = MERGE_BYTES) -> Sequence[Segment] | None:
    """A run of neighbouring segments of one table and level that should become one; None: nothing to do.

    Nothing of the table lies between them, so that rows keep the order of their commits. As many as `fan_in`, or fewer before one that is
    too big to be merged, where no more can come.
    """
    by_table: dict[str, list[Segment]] = {}
    for s in manifest:
        by_table.setdefault(s.table, []).append(s)
    found: list[Sequence[Segment]] = []
    for segments in by_table.values():
        run: list[Segment] = []
        for s in sorted(segments, key=lambda s: s.lo):
            big = s.size_bytes * 2 > merge_bytes
            if run and (big or s.level != run[0].level):
                if big and len(run) > 1:
                    found.append(_within(run, merge_bytes))
                run = []
            if not big:
                run.append(s)
            if len(run) == fan_in:
                found.append(_within(run, merge_bytes))
                break
    return min(found, key=lambda run: run[0].level, default=None)


def _within(run: Sequence[Segment], merge_bytes: int) -> Sequence[Segment]:
    """The first of them, two at least, whose sizes add up to at most merge_bytes."""
    sizes = accumulate(s.size_bytes for s in run)
    return run[: max(2, sum(size <= merge_bytes for size in sizes))]
