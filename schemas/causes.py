"""Why a prompt token was computed again: the names that records, tables and pages use. Exactly one holds for every token that was no hit.

The rules that tell them apart are in collector/attribution; the order here is the order in which they are asked, and the first that fits
wins. hit + all causes = prompt tokens, for every request.
"""

from __future__ import annotations

from enum import IntEnum
from types import MappingProxyType


class Cause(IntEnum):
    """HIT is none: the token was found in the cache."""

    HIT = 0
    GRANULARITY = 1
    TOO_SHORT = 2
    NAMESPACE = 3
    FIRST_SEEN = 4
    DIVERGED = 5
    IN_FLIGHT = 6
    STALE_VIEW = 7
    MISROUTED = 8
    LOAD_BYPASS = 9
    CLEARED = 10
    EVICTED = 11
    EVICTED_ELSEWHERE = 12
    UNEXPLAINED = 13

    @property
    def label(self) -> str:
        """As in tables: lower case."""
        return self.name.lower()


LOSSES = tuple(c for c in Cause if c is not Cause.HIT)

MEANING = MappingProxyType(
    {
        Cause.HIT: "found in the worker's cache",
        Cause.GRANULARITY: "the last partial block, and the last block of a wholly cached prompt, which an engine must compute",
        Cause.TOO_SHORT: "shared with an earlier prompt, but the shared part is shorter than one block",
        Cause.NAMESPACE: "the same content is known under another LoRA, salt or other extra key",
        Cause.FIRST_SEEN: "never seen before",
        Cause.DIVERGED: "this content was seen, but after another beginning: an earlier token changed",
        Cause.IN_FLIGHT: "another request was computing it at that moment",
        Cause.STALE_VIEW: "the router's index said the worker held it; it was removed before the prefill",
        Cause.MISROUTED: "another worker held it, and would have been cheaper",
        Cause.LOAD_BYPASS: "another worker held it, but this one was cheaper",
        Cause.CLEARED: "lost by a clear, a restart or an event gap of this worker",
        Cause.EVICTED: "evicted from this worker",
        Cause.EVICTED_ELSEWHERE: "was only ever on other workers, and is gone there: evicted, or lost with a restart of theirs",
        Cause.UNEXPLAINED: "not told: an event gap, a report that the events do not explain, or no report at all",
    }
)

ACTOR = MappingProxyType(
    {
        Cause.GRANULARITY: "nobody (block size)",
        Cause.TOO_SHORT: "operator (block size)",
        Cause.NAMESPACE: "client",
        Cause.FIRST_SEEN: "nobody",
        Cause.DIVERGED: "prompt author",
        Cause.IN_FLIGHT: "scheduler",
        Cause.STALE_VIEW: "event lag",
        Cause.MISROUTED: "router",
        Cause.LOAD_BYPASS: "policy (a trade)",
        Cause.CLEARED: "operator",
        Cause.EVICTED: "capacity",
        Cause.EVICTED_ELSEWHERE: "placement and capacity",
        Cause.UNEXPLAINED: "not known",
    }
)

AVOIDABLE = frozenset(LOSSES) - {Cause.GRANULARITY, Cause.FIRST_SEEN, Cause.LOAD_BYPASS, Cause.UNEXPLAINED}
"""Causes that somebody can do something about without paying for it elsewhere."""
