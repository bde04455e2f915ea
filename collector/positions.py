"""Where to read each partition from, and what to say when the log is not what it was. Pure.

    stored offset inside the log          go on there
    none stored                           from the oldest record that the log holds
    below the log's start                 retention deleted records before they were read: go on at the start, and say how many are lost
    above the end, same topic             the topic lost its tail: go on at the end (what is below was read already), and say so
    another identity than when stored     the topic was made anew: read it from its start, and say so

State that is rebuilt by reading *again* starts earlier: kv-events at the checkpoint, decisions and outcomes at the oldest open record.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.stream import Partition


@dataclass(frozen=True, slots=True)
class Start:
    """read_from: first offset to read; before: up to there (exclusive) it is read again, for the state alone."""

    read_from: int
    before: int
    event: str | None = None
    lost_records: int | None = None
    """Records that nobody will ever read; None: unknown."""
    forget_state: bool = False
    """What was read of this partition before says nothing about what comes."""
    incomplete: bool = False
    """The state cannot be rebuilt whole: records that it needs are gone."""


def where_to_start(
    part: Partition, stored: int | None, again_from: int | None, start: int, end: int, identity: str | None, stored_identity: str | None
) -> Start:
    """stored: next offset at the last commit; again_from: oldest offset that state needs (None: nothing); start, end: of the log."""
    name = f"{part[0]}/{part[1]}"
    if stored is None:
        return Start(start, start)
    if identity is not None and stored_identity is not None and identity != stored_identity:
        text = f"stream: topic {part[0]} was made anew; {name} is read from offset {start}, what it held beyond {stored} before is lost"
        return Start(start, start, text, None, forget_state=True)
    if stored > end:
        text = (
            f"stream: {name} ends at {end}, before the stored offset {stored}: the topic lost its tail or was made anew; going on at {end}"
        )
        return Start(end, end, text, None, forget_state=True)
    if stored < start:
        lost = start - stored
        text = f"stream: retention deleted {lost} records of {name} (offsets {stored} to {start - 1}) before they were read"
        return Start(start, start, text, lost, forget_state=False, incomplete=True)
    if again_from is None or again_from >= stored:
        return Start(stored, stored)
    return Start(max(again_from, start), stored, incomplete=again_from < start)
