"""What this replica has to tell the others: events since the last message, and all its requests that are on their way. Pure.

The full state goes out about once a second: it is the heartbeat, it brings a replica that has just started up to date, and whatever a lost
message left wrong elsewhere ends with it. It holds no block names: those of a lost reservation are a hope that is given up.

Nothing is told of a request twice, and nothing at all when nobody can hear it (`Outbox` is made only where replicas are configured).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from router.replicas.messages import MAX_BLOCKS, MAX_EVENTS, MAX_FLIGHTS, Event, FirstToken, Freed, Message, Place, Reserved, Underway
from schemas.block_hash import U64

_MAX_BLOCKS_A_MESSAGE = 1 << 19
"""4 MB; half of what a message may hold (messages.MAX_BYTES)."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Who tells it. run: one life of the process."""

    name: str
    run: str
    key_id: str


class Outbox:
    """For one thread at a time. dropped: events that had no room until the next message; the next full state makes up for them."""

    def __init__(self, sender: Sender) -> None:
        self.sender: Final = sender
        self._events: list[Event] = []
        self._blocks = 0  # of those events
        self._flights: dict[int, Underway] = {}
        self._next_flight = 0
        self.seq = 0  # of the newest message
        self.dropped = 0

    @property
    def waiting(self) -> int:
        """Events for the next message."""
        return len(self._events)

    @property
    def is_full(self) -> bool:
        """It is time for a message, or one would become too long."""
        return len(self._events) >= MAX_EVENTS // 2 or self._blocks >= _MAX_BLOCKS_A_MESSAGE // 2

    @property
    def flights(self) -> int:
        return len(self._flights)

    def reserve(self, place: Place, prefill_s: float, streams: bool, blocks: U64, ttl_s: float) -> int:
        """A request goes there and will leave these blocks, expected for ttl_s. Returns its number for the calls below."""
        flight = self._next_flight
        self._next_flight += 1
        self._flights[flight] = Underway(flight, place, prefill_s, streams, True)
        room = max(0, _MAX_BLOCKS_A_MESSAGE - self._blocks)
        told = blocks[: min(MAX_BLOCKS, room)]
        self._blocks += len(told)
        self._tell(Reserved(flight, place, prefill_s, streams, told, ttl_s))
        return flight

    def first_token(self, flight: int) -> None:
        known = self._flights.get(flight)
        if known is not None and known.waiting:
            self._flights[flight] = replace(known, waiting=False)
            self._tell(FirstToken(flight))

    def free(self, flight: int, kept: bool) -> None:
        """Again: nothing."""
        if self._flights.pop(flight, None) is not None:
            self._tell(Freed(flight, kept))

    def news(self) -> Message | None:
        """The events since the last message; None: there are none."""
        return self._message(None) if self._events else None

    def state(self) -> Message:
        """The events since the last message, and all that is on its way after them. With more than a message may hold the state is left
        out: a part of it would free the rest."""
        flights = tuple(self._flights.values())
        return self._message(flights if len(flights) <= MAX_FLIGHTS else None)

    def bye(self) -> Message:
        return replace(self._message(None), bye=True)

    def _tell(self, event: Event) -> None:
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)
        else:
            self.dropped += 1

    def _message(self, flights: tuple[Underway, ...] | None) -> Message:
        events, self._events, self._blocks = tuple(self._events), [], 0
        self.seq += 1
        return Message(self.sender.name, self.sender.run, self.seq, self.sender.key_id, events, flights)
