"""Keeps topics together while a backlog is read: requests are told against the events of their time, which the ring holds only for a while.

A partition that is caught up never waits. Of those that are behind, the ones more than `slack_s` of stream time ahead of the slowest pause.
"""

from __future__ import annotations

from collections.abc import Mapping

from schemas.stream import Partition


def too_far_ahead(behind: Mapping[Partition, float], slack_s: float) -> set[Partition]:
    """behind: stream time (unix seconds of the newest record read) of each partition that is not caught up."""
    if not behind:
        return set()
    slowest_s = min(behind.values())
    return {part for part, time_s in behind.items() if time_s > slowest_s + slack_s}
