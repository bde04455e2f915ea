"""Who belongs to each pool, from three sources, and who of them is to go.

    fleet file  --from_file--+
    discovery   --found------+--> merged by name --> less who was removed --> Pools.set_workers
    admin port  --add--------+    admin before file before discovery

    drain: present, but only for what goes on there, until nothing is on its way there or `drain_s` is over; then removed
    removed: left out as long as file or discovery name it. When they no longer do, that is forgotten; then it may join anew

What is removed gets no new requests; what is on its way there ends undisturbed. A worker whose address an earlier source names, under
whatever name, is left out: a discovered one that the file names too, or one of the file that the admin port has added already. More workers
than the router can follow change nothing. What the admin port did is not kept over a restart of the router. Each join, drain and removal
goes to the stream as a `change` of kind "scale". Nothing here waits or reads a clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from router.pools import Pools, TooManyWorkers
from router.records.recorder import Recorder
from schemas.changes import Change
from schemas.fleet import Fleet, Worker

log = logging.getLogger(__name__)

Source = Literal["admin", "fleet file", "discovery"]
_SOURCES: tuple[Source, ...] = ("admin", "fleet file", "discovery")


class NotAllowed(ValueError):  # noqa: N818 - a value, named for what it is
    """What was asked makes no sense; the message says what would."""


@dataclass(slots=True)
class _Members:
    """One pool's. drains: when each began, monotonic seconds."""

    by_source: dict[Source, dict[str, Worker]] = field(default_factory=lambda: {s: {} for s in _SOURCES})
    removed: set[str] = field(default_factory=set)
    drains: dict[str, float] = field(default_factory=dict)
    ending: frozenset[str] = frozenset()  # as discovery says; their drains are taken back when it no longer does
    now: dict[str, tuple[Worker, Source]] = field(default_factory=dict)

    def merged(self) -> dict[str, tuple[Worker, Source]]:
        out: dict[str, tuple[Worker, Source]] = {}
        urls: set[str] = set()
        for source in _SOURCES:
            of_source = {n: w for n, w in self.by_source[source].items() if n not in out and w.url not in urls}
            out |= {n: (w, source) for n, w in of_source.items()}
            urls |= {w.url for w in of_source.values()}
        return out


class Membership:
    """Of all pools. now_s: monotonic seconds."""

    def __init__(self, fleet: Fleet, pools: Pools, recorder: Recorder | None, router_name: str, drain_s: float) -> None:
        """fleet: what the pools were built from."""
        self._pools, self._recorder, self._router_name, self._drain_s = pools, recorder, router_name, drain_s
        self._members = {p.name: _Members() for p in fleet.pools}
        for name, members in self._members.items():
            members.by_source["fleet file"] = {w.name: w for w in fleet.workers_of(name)}
            members.now = members.merged()
        self.joined = 0
        self.left = 0

    def from_file(self, fleet: Fleet, now_s: float) -> None:
        """The fleet file names these workers now. Raises TooManyWorkers."""
        for name in self._members:
            self._named(name, "fleet file", fleet.workers_of(name), now_s)

    def found(self, pool: str, workers: Sequence[Worker], ending: frozenset[str], now_s: float) -> None:
        """Discovery finds these workers now, of which some are about to go. Raises TooManyWorkers."""
        members = self._members[pool]
        self._named(pool, "discovery", workers, now_s)
        for name in (members.ending - ending) & members.by_source["discovery"].keys():
            self._undrain(pool, name)
        begun, members.ending = ending - members.ending, ending
        for name in begun & members.now.keys():
            self._drain(pool, name, now_s, "discovery says that it is about to go")

    def add(self, pool: str, worker: Worker, now_s: float) -> None:
        """By the admin port. Raises NotAllowed for a name or an address that is there already, TooManyWorkers."""
        members = self._of(pool)
        for name, (other, _) in members.now.items():
            if name == worker.name or other.url == worker.url:
                raise NotAllowed(f"`{'name' if name == worker.name else 'url'}`: the pool {pool} has {name} at {other.address} already")
        was_removed = worker.name in members.removed
        members.removed.discard(worker.name)
        try:
            self._named(pool, "admin", [*members.by_source["admin"].values(), worker], now_s)
        except TooManyWorkers:
            members.removed |= {worker.name} if was_removed else set()
            raise

    def remove(self, pool: str, worker: str, now_s: float) -> None:
        """By the admin port. Raises NotAllowed when there is no such worker."""
        self._must_have(pool, worker)
        self._remove(pool, worker, now_s, "by the admin port")

    def drain(self, pool: str, worker: str, now_s: float) -> None:
        """By the admin port. Raises NotAllowed when there is no such worker."""
        self._must_have(pool, worker)
        if worker not in self._members[pool].drains:
            self._drain(pool, worker, now_s, "by the admin port")

    def undrain(self, pool: str, worker: str, now_s: float) -> None:
        """Takes a drain or removal back. Raises NotAllowed when there is nothing to take back."""
        members = self._of(pool)
        if worker in members.drains:
            self._undrain(pool, worker)
        elif worker in members.removed:
            members.removed.discard(worker)
            self._settle(pool, now_s)
        else:
            raise NotAllowed(f"the pool {pool} has no worker {worker!r} that drains or was removed")

    def tend(self, pool: str, now_s: float) -> None:
        """Takes out draining workers that are empty, or have had their time. Call about once a second."""
        for worker, since_s in tuple(self._members[pool].drains.items()):
            busy = self._pools.by_name[pool].busy(worker)
            if not busy or now_s - since_s >= self._drain_s:
                self._remove(pool, worker, now_s, f"drained, {busy} requests still on their way" if busy else "drained")

    def source_of(self, pool: str, worker: str) -> Source:
        return self._members[pool].now[worker][1]

    def removed(self, pool: str) -> tuple[str, ...]:
        """Names that their sources still name, but that were removed or drained."""
        return tuple(sorted(self._members[pool].removed))

    def workers(self, pool: str) -> tuple[Worker, ...]:
        return tuple(w for w, _ in self._members[pool].now.values())

    def _remove(self, pool: str, worker: str, now_s: float, why: str) -> None:
        members = self._members[pool]
        members.removed.add(worker)
        members.by_source["admin"].pop(worker, None)
        members.drains.pop(worker, None)
        self._settle(pool, now_s, why)

    def _drain(self, pool: str, worker: str, now_s: float, why: str) -> None:
        self._members[pool].drains[worker] = now_s
        self._pools.by_name[pool].drain(worker)
        self._tell(pool, worker, f"drains: {why}")

    def _undrain(self, pool: str, worker: str) -> None:
        if self._members[pool].drains.pop(worker, None) is not None:
            self._pools.by_name[pool].drain(worker, on=False)
            self._tell(pool, worker, "drains no longer")

    def _named(self, pool: str, source: Source, workers: Sequence[Worker], now_s: float) -> None:
        """The source names these now. Raises TooManyWorkers, and then its word of before holds."""
        by_source = self._members[pool].by_source
        before, by_source[source] = by_source[source], {w.name: w for w in workers}
        try:
            self._settle(pool, now_s)
        except TooManyWorkers:
            by_source[source] = before
            raise

    def _settle(self, pool: str, now_s: float, why: str | None = None) -> None:
        """Makes the pool's workers what the sources say. Raises TooManyWorkers, and then nothing has changed."""
        members, before = self._members[pool], self._members[pool].now
        now = {n: entry for n, entry in members.merged().items() if n not in members.removed}
        changed = [w for w, _ in now.values()] != [w for w, _ in before.values()]
        if changed:
            self._pools.set_workers(pool, [w for w, _ in now.values()], now_s)
        members.now = now
        members.removed &= {n for of_source in members.by_source.values() for n in of_source}
        if not changed:
            return
        if not now:
            log.warning("pool %s: no worker is left", pool)
        for name, (worker, source) in before.items():
            if name not in members.now:
                members.drains.pop(name, None)
                self.left += 1
                self._tell(pool, name, f"at {worker.address} is taken out: {why or f'the {source} no longer names it'}")
        for name, (worker, source) in members.now.items():
            if name not in before:
                self.joined += 1
                self._tell(pool, name, f"at {worker.address} joins: {source}")
            elif before[name][0] != worker:
                self._tell(pool, name, f"is another one now, at {worker.address}: {source}")
        for name in members.drains:  # one with a new address drains on
            self._pools.by_name[pool].drain(name)

    def _tell(self, pool: str, worker: str, text: str) -> None:
        log.info("pool %s: worker %s %s", pool, worker, text)
        if self._recorder is not None:
            change = Change(
                time_s=time.time(), kind="scale", text=f"worker {worker} {text}"[:2000], author=self._router_name, pool=pool, worker=worker
            )
            self._recorder.change(change.kind, change.model_dump_json().encode())

    def _of(self, pool: str) -> _Members:
        if pool not in self._members:
            raise NotAllowed(f"there is no pool {pool!r}; there are {', '.join(self._members)}")
        return self._members[pool]

    def _must_have(self, pool: str, worker: str) -> None:
        members = self._of(pool)
        if worker not in members.now:
            raise NotAllowed(f"the pool {pool} has no worker {worker!r}; it has {', '.join(members.now) or 'none'}")
