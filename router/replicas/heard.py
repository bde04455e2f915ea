"""What the other replicas have told, booked where decisions look: their requests as flights of the pools, their blocks as expected.

A flight of another replica is a flight like our own (workers/load.py): an engine has one queue, and it is ours and theirs together. What is
kept here is whose it is, so that all of a replica's flights end with it:

    bye                       at once
    silence for silence_s     it died, or the network between; should it speak again, its next full state brings all back
    full state                ends what it no longer names, admits what we did not know: so lost messages heal

Blocks are expected for as long as their sender said, and taken back when it says that they will not come. Those of a silent replica are
left to expire: its requests may well have arrived. With another hash key than ours they match nothing and are left out, counted.

A flight at a target that we do not have (the fleet files differ for a moment) is remembered and booked once we do, by the next full state.
Memory is bounded by replicas times flights. Pure but for the pools it books in; time is monotonic seconds, passed in.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from router.policy.cost import Mask
from router.pools import Pools, PoolState
from router.replicas.messages import Event, FirstToken, Freed, Message, Place, Reserved, Underway
from router.workers.load import Flight

log = logging.getLogger(__name__)

MAX_REPLICAS = 64
MAX_FLIGHTS_EACH = 50_000


@dataclass(slots=True, eq=False)
class _Booked:
    """One request of another replica. flight None: we do not have its target."""

    pool: PoolState | None
    flight: Flight | None
    tickets: list[int]


@dataclass(slots=True, eq=False)
class _Replica:
    name: str
    seq: int
    heard_s: float
    booked: dict[int, _Booked] = field(default_factory=dict)


@dataclass(slots=True)
class HeardCounts:
    """Cumulative since the start."""

    messages: int = 0
    own: int = 0  # our own, come back: our address is among the peers'
    gaps: int = 0  # messages missing between two
    again: int = 0  # messages that came before, by another address of their sender
    silent: int = 0  # replicas given up
    unknown_targets: int = 0
    unknown_flights: int = 0  # first tokens and ends of requests that we never heard of
    other_key: int = 0  # reservations whose blocks have another hash key
    healed: int = 0  # flights admitted or ended by a full state
    refused: int = 0  # over a bound


class Heard:
    """For the event loop that owns the pools."""

    def __init__(self, pools: Pools, run: str, key_id: str, silence_s: float) -> None:
        self._pools, self._run, self._key_id, self._silence_s = pools, run, key_id, silence_s
        self._replicas: dict[str, _Replica] = {}
        self._numbers: dict[str, tuple[Mask, dict[tuple[str, int | None], int]]] = {}  # by pool
        self.counts = HeardCounts()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the replicas that speak."""
        return tuple(r.name for r in self._replicas.values())

    @property
    def flights(self) -> int:
        """Requests of other replicas that are booked here."""
        return sum(b.flight is not None for r in self._replicas.values() for b in r.booked.values())

    def seq_of(self, run: str) -> int:
        """Of the newest message of this run; 0: none was heard."""
        replica = self._replicas.get(run)
        return 0 if replica is None else replica.seq

    def hear(self, message: Message, now_s: float) -> None:
        if message.run == self._run:
            self.counts.own += 1
            return
        replica = self._replicas.get(message.run)
        if replica is None:
            if message.bye or len(self._replicas) >= MAX_REPLICAS:
                self.counts.refused += not message.bye
                return
            replica = self._replicas[message.run] = _Replica(message.sender, message.seq - 1, now_s)
            log.info("replica %r is there", replica.name)
        if message.seq <= replica.seq:
            self.counts.again += 1
            return
        self.counts.messages += 1
        self.counts.gaps += max(0, message.seq - replica.seq - 1)
        replica.seq, replica.heard_s = message.seq, now_s
        if message.bye:
            log.info("replica %r ends", replica.name)
            self._end(message.run, now_s)
            return
        for event in message.events:
            self._apply(replica, event, message.key_id, now_s)
        if message.flights is not None:
            self._agree(replica, message.flights, now_s)

    def look(self, now_s: float) -> None:
        """Ends who was silent for too long."""
        for run in [r for r, replica in self._replicas.items() if now_s - replica.heard_s > self._silence_s]:
            self.counts.silent += 1
            gone = self._replicas[run]
            log.warning("replica %r is silent and given up, with %d requests of its", gone.name, len(gone.booked))
            self._end(run, now_s)

    def end_all(self, now_s: float) -> None:
        for run in list(self._replicas):
            self._end(run, now_s)

    def _end(self, run: str, now_s: float) -> None:
        for booked in self._replicas.pop(run).booked.values():
            _release(booked, now_s)

    def _apply(self, replica: _Replica, event: Event, key_id: str, now_s: float) -> None:
        if isinstance(event, Reserved):
            if event.flight in replica.booked:
                return
            if len(replica.booked) >= MAX_FLIGHTS_EACH:
                self.counts.refused += 1
                return
            booked = replica.booked[event.flight] = self._book(event.place, event.prefill_s, event.streams, now_s)
            if booked.flight is None or booked.pool is None or not len(event.blocks):
                return
            if key_id != self._key_id:
                self.counts.other_key += 1
                return
            slots = booked.pool.slots_of(booked.flight.target)
            booked.tickets = [self._pools.index.expect(s.number, event.blocks, now_s + event.ttl_s) for s in slots]
            return
        known = replica.booked.get(event.flight)
        if known is None:
            self.counts.unknown_flights += 1
        elif isinstance(event, FirstToken):
            if known.pool is not None and known.flight is not None:
                known.pool.load.first_token(known.flight, now_s)
        else:
            self._free(replica, event, known, now_s)

    def _free(self, replica: _Replica, event: Freed, booked: _Booked, now_s: float) -> None:
        del replica.booked[event.flight]
        _release(booked, now_s)
        if not event.kept:
            for ticket in booked.tickets:
                self._pools.index.drop(ticket)

    def _agree(self, replica: _Replica, flights: tuple[Underway, ...], now_s: float) -> None:
        named = {f.flight for f in flights}
        for flight in [f for f in replica.booked if f not in named]:
            _release(replica.booked.pop(flight), now_s)
            self.counts.healed += 1
        for told in flights:
            booked = replica.booked.get(told.flight)
            if booked is None or booked.flight is None:
                if booked is None and len(replica.booked) >= MAX_FLIGHTS_EACH:
                    self.counts.refused += 1
                    continue
                was_unknown = booked is not None
                booked = replica.booked[told.flight] = self._book(told.place, told.prefill_s, told.streams, now_s)
                self.counts.healed += booked.flight is not None
                self.counts.unknown_targets -= was_unknown and booked.flight is None  # counted when it was first heard of
            if not told.waiting and booked.pool is not None and booked.flight is not None:
                booked.pool.load.first_token(booked.flight, now_s)

    def _book(self, place: Place, prefill_s: float, streams: bool, now_s: float) -> _Booked:
        pool_name, worker, rank = place
        pool = self._pools.by_name.get(pool_name)
        number = None if pool is None else self._number(pool, worker, rank)
        if pool is None or number is None:
            self.counts.unknown_targets += 1
            return _Booked(None, None, [])
        flight = pool.load.admit(number, prefill_s, streams, now_s, of_replica=True)
        pool.others.note(pool.load.in_flight, now_s)  # else an engine's own load that has it would be taken for others'
        return _Booked(pool, flight, [])

    def _number(self, pool: PoolState, worker: str, rank: int | None) -> int | None:
        """Of a target that the pool has now."""
        present, numbers = self._numbers.get(pool.name, (None, {}))
        if present is not pool.present:  # another array whenever the workers change
            numbers = {(t.worker, t.rank): t.number for t in pool.targets if pool.present[t.number]}
            self._numbers[pool.name] = pool.present, numbers
        return numbers.get((worker, rank))


def _release(booked: _Booked, now_s: float) -> None:
    if booked.pool is not None and booked.flight is not None:
        booked.pool.load.release(booked.flight, now_s)
