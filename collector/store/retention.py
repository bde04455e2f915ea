"""What becomes of segments with time: small ones are merged, old ones go. Plans only; the loop carries them out.

Each commit may leave one small segment a table. Sixteen of one level become one of the next, so a table of any age has at most about
sixteen files a level, and a row is written again at most once a level. Segments that are big already are left alone.
Files that no longer count are unlinked after a grace period, because published files that readers still hold open name them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
    """A run of neighbouring segments of one table and level that should become one; None: nothing to do."""
    groups: dict[tuple[str, int], list[Segment]] = {}
    for s in manifest:
        if s.size_bytes * 2 <= merge_bytes:
            groups.setdefault((s.table, s.level), []).append(s)
    for (_, _), segments in sorted(groups.items(), key=lambda g: g[0][1]):
        if len(segments) < fan_in:
            continue
        segments.sort(key=lambda s: s.lo)
        run: list[Segment] = []
        size = 0
        for s in segments[:fan_in]:
            if run and size + s.size_bytes > merge_bytes:
                break
            run.append(s)
            size += s.size_bytes
        if len(run) > 1:
            return run
    return None
