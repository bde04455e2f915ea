"""What replicas tell each other, as bytes. Pure.

    frame 0   b"warmwatch-replicas"
    frame 1   JSON: version, from (router_name), run, seq, key_id, and one of
                events   [["r", flight, pool, worker, rank, prefill_s, streams, blocks, ttl_s], ["f", flight], ["x", flight, kept], ...]
                flights  [[flight, pool, worker, rank, prefill_s, streams, waiting], ...]      all that are on their way now
                bye      true
    frame 2   the events' block names one after the other, packed little-endian u64

`run` names one life of a process: 64 random bits, so replicas need no names of their own, and one that was restarted is another. `seq`
counts a run's messages. Times are durations: no two clocks are compared. Prompts are not in here, only keyed names of their blocks; those
of another hash key say nothing here (`key_id`).

Everything is bounded, for the port is as open as the network around it; what is not as above is a ValueError, and its sender's loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from schemas.block_hash import U64

TOPIC = b"warmwatch-replicas"
VERSION = 1
MAX_BYTES = 8 << 20
MAX_BLOCKS = 4096
"""Of one reservation: the head of a longer one. 64k tokens of blocks of 16."""
MAX_EVENTS = 10_000
MAX_FLIGHTS = 20_000
LONGEST_S = 600.0
"""No prefill and no expectation counts for longer."""
_NAME_CHARACTERS = 1024

Place = tuple[str, str, int | None]
"""Pool, worker, rank: a target by names, since its number is each replica's own."""


@dataclass(frozen=True, slots=True, eq=False)
class Reserved:
    """A request was sent to a worker, and will leave these blocks there."""

    flight: int
    place: Place
    prefill_s: float
    streams: bool
    blocks: U64
    ttl_s: float


@dataclass(frozen=True, slots=True)
class FirstToken:
    flight: int


@dataclass(frozen=True, slots=True)
class Freed:
    """The request is over. kept: its blocks stay."""

    flight: int
    kept: bool


Event = Reserved | FirstToken | Freed


@dataclass(frozen=True, slots=True)
class Underway:
    """One request of a replica's, as its full state tells it."""

    flight: int
    place: Place
    prefill_s: float
    streams: bool
    waiting: bool


@dataclass(frozen=True, slots=True)
class Message:
    """events: since the message before. flights: all of them, after those events; None: not told. bye: the run ends."""

    sender: str
    run: str
    seq: int
    key_id: str
    events: tuple[Event, ...] = ()
    flights: tuple[Underway, ...] | None = None
    bye: bool = False


def encode(message: Message) -> list[bytes]:
    content: dict[str, Any] = {
        "version": VERSION, "from": message.sender, "run": message.run, "seq": message.seq, "key_id": message.key_id,
    }  # fmt: skip
    if message.events:
        content["events"] = [_event_row(e) for e in message.events]
    if message.flights is not None:
        content["flights"] = [[f.flight, *f.place, f.prefill_s, f.streams, f.waiting] for f in message.flights]
    if message.bye:
        content["bye"] = True
    blocks = [e.blocks.astype("<u8", copy=False).tobytes() for e in message.events if isinstance(e, Reserved)]
    return [TOPIC, orjson.dumps(content), b"".join(blocks)]


def decode(frames: Sequence[bytes]) -> Message:
    """Raises ValueError for what is no message of this version. Unknown fields are ignored."""
    try:
        if len(frames) < 3 or frames[0] != TOPIC:
            raise ValueError("not a message of a replica")
        content = orjson.loads(frames[1])
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']!r}, not {VERSION}")
        rows, flights = content.get("events", []), content.get("flights")
        if len(rows) > MAX_EVENTS or (flights is not None and len(flights) > MAX_FLIGHTS):
            raise ValueError("too many events or flights")
        return Message(
            _name(content["from"]),
            _name(content["run"]),
            _whole(content["seq"]),
            _name(content["key_id"]),
            _events(rows, frames[2]),
            None if flights is None else tuple(_underway(row) for row in flights),
            content.get("bye") is True,
        )
    except (KeyError, IndexError, TypeError, AttributeError) as e:
        raise ValueError(f"a field is missing or of another type: {e}") from e


def _event_row(event: Event) -> list[Any]:
    match event:
        case Reserved():
            return ["r", event.flight, *event.place, event.prefill_s, event.streams, len(event.blocks), event.ttl_s]
        case FirstToken():
            return ["f", event.flight]
        case Freed():
            return ["x", event.flight, event.kept]


def _events(rows: list[Any], packed: bytes) -> tuple[Event, ...]:
    if len(packed) % 8:
        raise ValueError("the blocks are not packed as u64")
    blocks = np.frombuffer(packed, "<u8").astype(np.uint64, copy=False)
    out: list[Event] = []
    at = 0
    for row in rows:
        kind = row[0]
        if kind == "r":
            _, flight, pool, worker, rank, prefill_s, streams, count, ttl_s = row
            if not 0 <= _whole(count) <= min(MAX_BLOCKS, len(blocks) - at):
                raise ValueError("more blocks than there are, or than may be")
            names = blocks[at : at + count].copy()  # who keeps them keeps no other's
            place = _place(pool, worker, rank)
            out.append(Reserved(_whole(flight), place, _seconds(prefill_s), _flag(streams), names, _seconds(ttl_s)))
            at += count
        elif kind == "f":
            out.append(FirstToken(_whole(row[1])))
        elif kind == "x":
            out.append(Freed(_whole(row[1]), _flag(row[2])))
        else:
            raise ValueError(f"an event {kind!r} is not known")
    if at != len(blocks):
        raise ValueError("blocks that no event names")
    return tuple(out)


def _underway(row: Any) -> Underway:
    flight, pool, worker, rank, prefill_s, streams, waiting = row
    return Underway(_whole(flight), _place(pool, worker, rank), _seconds(prefill_s), _flag(streams), _flag(waiting))


def _place(pool: object, worker: object, rank: object) -> Place:
    return _name(pool), _name(worker), None if rank is None else _whole(rank)


def _name(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _NAME_CHARACTERS:
        raise ValueError("a name is no text, empty or too long")
    return value


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("a number is no whole number of 63 bits")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("a flag is neither true nor false")
    return value


def _seconds(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:  # type: ignore[arg-type, operator]
        raise ValueError("seconds are no number from 0 up")
    return min(float(value), LONGEST_S)  # type: ignore[arg-type]
