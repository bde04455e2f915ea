"""What goes wrong in the demo, and when: a script in shares of its time, so that it fits into a minute as well as into five.

    time   0 ........................................................................ 1
           |  warm   | w1 restarts  | agent-0 gets a timestamp | w2's cache shrinks | w4, w5 join | round robin | w0's events are lost

Each line of `incidents.jsonl` says what truly happened and when: the ground truth that figures can be held against. What people would note
in a real fleet (a deploy, a scale-out) is marked there, too, by the same means; a cache that shrinks and frames that are lost tell nobody.
Pure but for the actions, which the demo hands in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import orjson

LOST_BATCHES = 40
"""Event batches that are lost for good in the last incident: some seconds' worth."""
SHRUNK_SHARE = 0.45
JOINING = 2
STAMPED_TEMPLATE = "agent-0"


class Fleet(Protocol):
    """What the script can do."""

    async def restart(self, worker: int) -> None: ...
    async def stamp(self, template: str, on: bool) -> None:
        """Puts the time at the head of that template's system prompt."""

    async def limit_cache(self, worker: int, share: float) -> None:
        """Of its size at the start."""

    async def join(self, count: int) -> None: ...
    async def follow(self, policy: str) -> None: ...
    async def lose_events(self, worker: int, batches: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Incident:
    """begin, end: shares of the whole time; end None: it does not end by itself."""

    name: str
    what: str
    begin: float
    end: float | None
    start: Callable[[Fleet], Awaitable[None]]
    stop: Callable[[Fleet], Awaitable[None]] | None = None


def script(policy: str, other: str) -> tuple[Incident, ...]:
    """The incidents in order. policy: the router's own; other: the one it changes to for a while; empty: it never changes."""
    incidents = [
        Incident("restart", "worker w1 restarts: its cache is empty", 0.14, None, lambda f: f.restart(1)),
        Incident(
            "timestamp", f"the system prompt of {STAMPED_TEMPLATE} begins with the time", 0.24, 0.4,
            lambda f: f.stamp(STAMPED_TEMPLATE, True), lambda f: f.stamp(STAMPED_TEMPLATE, False),
        ),
        Incident(
            "shrink", f"the cache of w2 shrinks to {SHRUNK_SHARE:.0%}", 0.46, 0.6,
            lambda f: f.limit_cache(2, SHRUNK_SHARE), lambda f: f.limit_cache(2, 1.0),
        ),
        Incident("join", f"{JOINING} workers join", 0.64, None, lambda f: f.join(JOINING)),
    ]  # fmt: skip
    if other:
        what = f"the router's policy is {other}"
        incidents.append(Incident("policy", what, 0.74, 0.86, lambda f: f.follow(other), lambda f: f.follow(policy)))
    incidents.append(Incident("events", "event frames of w0 are lost for good", 0.9, None, lambda f: f.lose_events(0, LOST_BATCHES)))
    return tuple(incidents)


async def play(
    incidents: Sequence[Incident],
    fleet: Fleet,
    total_s: float,
    book: Path,
    say: Callable[[str], None],
    wall: Callable[[], float] = time.time,
) -> None:
    """Plays the script once over total_s seconds, and notes in `book` (JSON lines) what happened when."""
    steps = [(i.begin, i, True) for i in incidents] + [(i.end, i, False) for i in incidents if i.end is not None]
    began = asyncio.get_running_loop().time()
    for share, incident, begins in sorted(steps, key=lambda s: s[0]):
        await asyncio.sleep(max(0.0, began + share * total_s - asyncio.get_running_loop().time()))
        act = incident.start if begins else incident.stop
        if act is not None:
            await act(fleet)
        say(f"incident: {incident.what}" if begins else f"over: {incident.what}")
        note = {"time_s": wall(), "name": incident.name, "what": incident.what, "event": "begins" if begins else "ends"}
        with book.open("ab") as lines:
            lines.write(orjson.dumps(note) + b"\n")
