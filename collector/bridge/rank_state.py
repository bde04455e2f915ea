"""What one rank's cache holds, told from its engine's events: the map from engine hashes to canonical names, and reference counts.

    decode.Batch --> RankState.apply --> rows of RecordBuilder (STORED, REMOVED, CLEARED, REPORTED, UNNAMED)

Naming. A block's name continues the chain of its parent's name (`schemas.block_hash`), which the map knows by the engine's hash; a chain
begins at root_hash(key, pool, lora). Blocks that cannot be named are counted (UNNAMED), and so are their children: unknown is not guessed.
 - no tokens (offload placeholders, the Mooncake master): named through the map when the engine's hash is known, at any block size;
 - parent not in the map (a late start, a gap): likewise;
 - more tokens than hashes (sparse groups: masked blocks have tokens but no hash): which blocks are meant cannot be told from the event, so
   named through the map, which other groups of the same batch fill first;
 - an engine hash that is resident under another name (SGLang up to 0.5.3 hashes a page without its prefix, so equal pages at different
   depths share one hash): the first name stays, the newcomer is unnamed, nothing is named as the child of such a hash any more,
   `conflicts` counts it and trust falls.
A block that was stored before it could be named gets its STORED row as soon as an event names it.

Counting. One count for each (tier, group, engine hash): each STORED or REMOVED name is one physical copy. An announcement from the root
whose blocks are all present is no store (`kv_cache_report_mode=full`): REPORTED. A removal that finds nothing is counted and not passed on.

Removals that follow one another in a batch become one row; stores keep theirs, so the order between them stays what the engine wrote.

Pure: no clock, no socket. Memory is bounded by what the engine holds plus as much again of what it held lately (`block_table`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from collector.bridge.block_table import PLAIN, REPORTED, BlockTable, Place
from collector.bridge.decode import Batch, Cleared, Event, Removed, Stored
from collector.bridge.record_builder import RecordBuilder
from schemas.block_hash import NO_EXTRA, U64, HashKey, extra_digest, hash_chain, root_hash
from schemas.kv_events import WINDOW_SHIFT, WINDOWED, Kind, WorkerId

MAX_TABLES = 64  # block sizes of one rank; engines use one to three
MAX_AMBIGUOUS = 1 << 16  # conflicting hashes remembered; beyond it every parent of that rank counts as ambiguous
NO_PARENT = 0


@dataclass(slots=True)
class Counters:
    """Cumulative since the bridge started."""

    skipped_events: int = 0
    unreadable_events: int = 0  # of them, those that may have moved blocks
    unknown_media: int = 0
    reported_blocks: int = 0
    unnamed_blocks: int = 0
    unknown_removals: int = 0
    conflicts: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0


class RankState:
    """One rank's map and counts. `apply` writes rows to the builder; it never raises for what an engine sends."""

    def __init__(self, key: HashKey, source: WorkerId, builder: RecordBuilder) -> None:
        self._key = key
        self._source = source
        self._out = builder
        self._tables: dict[int, BlockTable] = {}
        self._flags: dict[int, int] = {}  # by group, of those without full attention
        self._ambiguous: set[int] = set()
        self._digest = functools.lru_cache(maxsize=4096)(functools.partial(_digest, key))
        self._root = functools.lru_cache(maxsize=4096)(functools.partial(root_hash, key, source.pool))
        self.counters = Counters()
        self.peak_resident_blocks = 0

    @property
    def resident_blocks(self) -> int:
        """Physical copies held now, unnamed ones included."""
        return sum(t.resident for t in self._tables.values())

    @property
    def held_bytes(self) -> int:
        return sum(t.held_bytes for t in self._tables.values())

    def resident(self) -> list[tuple[int, int, int, int, U64]]:
        """(tier, group, block size, flags, names) of each place, a name as often as it has copies."""
        return [
            (place[0], place[1], table.block_size, self._flags.get(place[1], 0), names)
            for table in self._tables.values()
            for place in table.places
            if len(names := table.resident_names(place))
        ]

    def forget(self) -> None:
        """A new incarnation: nothing of the old one holds, not even its hashes."""
        self._tables = {}
        self._flags = {}
        self._ambiguous = set()

    def apply(self, seq: int, batch: Batch, now_s: float) -> bool:
        """Takes one engine batch in. Returns whether it cleared the cache. now_s is the events' time if the engine gives none."""
        time_s = now_s if batch.time_s is None else batch.time_s
        counters = self.counters
        counters.skipped_events += batch.skipped
        counters.unreadable_events += batch.unreadable
        counters.unknown_media += batch.unknown_media
        self._out.batch(seq, batch.time_s, now_s)
        cleared = False
        if len(batch.events) > 1 and any(isinstance(e, Stored) and _is_sparse(e) for e in batch.events):
            self._name_ahead(batch)
        for event in _removals_joined(batch.events):
            if isinstance(event, Stored):
                try:
                    self._store(event, seq, time_s)
                except (TypeError, ValueError):  # an extra key that is no JSON value, a block size that names nothing
                    counters.skipped_events += 1
                    counters.unreadable_events += 1
            elif isinstance(event, Removed):
                self._remove(event, seq, time_s)
            else:
                assert isinstance(event, Cleared)
                for table in self._tables.values():
                    table.clear()
                self._ambiguous.clear()
                self._out.row(Kind.CLEARED, seq, time_s)
                cleared = True
            self.peak_resident_blocks = max(self.peak_resident_blocks, self.resident_blocks)
        return cleared

    def _table(self, block_size: int) -> BlockTable:
        table = self._tables.get(block_size)
        if table is None:
            if len(self._tables) >= MAX_TABLES:
                raise ValueError("too many block sizes")
            table = self._tables[block_size] = BlockTable(block_size)
        return table

    def _name_of(self, engine_hash: int) -> int:
        """Canonical name of a known block, else 0."""
        if self._ambiguous and (engine_hash in self._ambiguous or len(self._ambiguous) >= MAX_AMBIGUOUS):
            return 0
        probe = np.array([engine_hash], np.uint64)
        for table in self._tables.values():
            slot = int(table.find(probe)[0])
            if slot >= 0 and table.names[slot]:
                return int(table.names[slot])
        return 0

    def _chain(self, event: Stored) -> tuple[U64, int] | None:
        """Names of an event's blocks and of the block before them, or None if it cannot be named from tokens."""
        tokens, size = event.tokens, event.block_size
        if tokens is None or size < 1 or not len(event.hashes):
            return None
        if len(event.hashes) == 1 and len(tokens) < size:
            size = len(tokens)  # a partial chunk: its own span counts
        if len(tokens) != size * len(event.hashes):
            return None
        parent = self._root(event.lora) if event.parent is None else self._name_of(event.parent)
        if parent == 0:
            return None
        extras = None
        if event.extras is not None:
            extras = np.array([self._extra(e) for e in event.extras], np.uint64)
        return hash_chain(self._key, parent, tokens, size, extras), parent

    def _extra(self, extra: tuple[Any, ...] | None) -> int:
        return NO_EXTRA if extra is None else self._digest(_frozen(extra))

    def _name_ahead(self, batch: Batch) -> None:
        """Enters the names of a batch's dense events without copies, so that sparse ones find them whatever the order of the groups."""
        for event in batch.events:
            if isinstance(event, Stored) and not _is_sparse(event):
                try:
                    named = self._chain(event)
                    if named is not None:
                        table = self._table(event.block_size)
                        table.make_room(len(event.hashes))
                        for slot, name in zip(table.insert(event.hashes), named[0], strict=True):
                            if table.totals[slot] == 0:
                                table.rename(int(slot), name)
                except (TypeError, ValueError):
                    continue  # counted when its turn comes

    def _store(self, event: Stored, seq: int, time_s: float) -> None:
        place = (int(event.tier), event.group)
        if event.windowed and (event.window or event.group not in self._flags):
            self._flags[event.group] = WINDOWED | event.window << WINDOW_SHIFT
        flags = self._flags.get(event.group, 0)
        named = self._chain(event)
        if named is None:
            self._store_known(event, place, seq, time_s, flags)
            return
        names, parent = named
        size = event.block_size if event.tokens is None or len(event.hashes) > 1 else len(event.tokens)
        table = self._table(size)
        verdict = table.store(event.hashes, names, place, event.parent is None)
        if verdict == PLAIN:
            self.counters.stored_blocks += len(names)
            self._out.row(Kind.STORED, seq, time_s, names, place[0], place[1], parent, size, flags)
        elif verdict == REPORTED:
            self.counters.reported_blocks += len(names)
            self._out.row(Kind.REPORTED, seq, time_s, names, place[0], place[1], parent, size, flags)
        else:
            self._store_odd(event.hashes, names, parent, table, place, seq, time_s, flags)

    def _store_odd(
        self, hashes: U64, names: U64, parent: int, table: BlockTable, place: Place, seq: int, time_s: float, flags: int
    ) -> None:
        """One by one: blocks that had copies before they had a name, and names at odds."""
        table.make_room(len(hashes))
        slots = table.insert(hashes)
        run: list[int] = []
        run_parent = before = parent
        unnamed = 0

        def end_run() -> None:
            if run:
                self._out.row(Kind.STORED, seq, time_s, np.array(run, np.uint64), place[0], place[1], run_parent, table.block_size, flags)
                self.counters.stored_blocks += len(run)

        for engine_hash, slot, name in zip(map(int, hashes), map(int, slots), names, strict=True):
            if table.names[slot] not in (0, name) and table.totals[slot] > 0:
                end_run()
                run, run_parent = [], int(name)
                unnamed += 1
                self.counters.conflicts += 1
                if len(self._ambiguous) < MAX_AMBIGUOUS:
                    self._ambiguous.add(engine_hash)
            else:
                if table.names[slot] == 0 and table.totals[slot] > 0:
                    for (tier, group), held in table.places.items():
                        if held[slot] > 0:
                            copies = np.full(held[slot], name, np.uint64)
                            theirs = self._flags.get(group, 0)
                            self._out.row(Kind.STORED, seq, time_s, copies, tier, group, before, table.block_size, theirs)
                table.rename(slot, name)
                table.add(slot, place)
                if not run:
                    run_parent = before
                run.append(int(name))
            before = int(name)
        end_run()
        self._unnamed(unnamed, place, table.block_size, seq, time_s, flags)

    def _store_known(self, event: Stored, place: Place, seq: int, time_s: float, flags: int) -> None:
        """Blocks that only the map can name. They are counted with or without a name."""
        unnamed = 0
        for i in range(len(event.hashes)):
            one = event.hashes[i : i + 1]
            table, slot = self._find_named(one, event.block_size)
            if table is None:
                table = self._table(event.block_size)
                table.make_room(1)
                slot = int(table.insert(one)[0])
            table.add(slot, place)
            name = table.names[slot]
            if name:
                self.counters.stored_blocks += 1
                self._out.row(Kind.STORED, seq, time_s, np.array([name], np.uint64), *place, NO_PARENT, table.block_size, flags)
            else:
                unnamed += 1
        self._unnamed(unnamed, place, event.block_size, seq, time_s, flags)

    def _find_named(self, one: U64, block_size: int) -> tuple[BlockTable | None, int]:
        tables = [self._tables[block_size]] if block_size in self._tables else [] if block_size else list(self._tables.values())
        for table in tables:
            slot = int(table.find(one)[0])
            if slot >= 0 and table.names[slot]:
                return table, slot
        return None, -1

    def _unnamed(self, blocks: int, place: Place, block_size: int, seq: int, time_s: float, flags: int) -> None:
        if blocks:
            self.counters.unnamed_blocks += blocks
            self._out.row(Kind.UNNAMED, seq, time_s, tier=place[0], group=place[1], parent=blocks, block_size=block_size, flags=flags)

    def _remove(self, event: Removed, seq: int, time_s: float) -> None:
        place, hashes = (int(event.tier), event.group), event.hashes
        for table in self._tables.values():
            if not len(hashes):
                break
            names, _, hashes = table.remove(hashes, place)
            if len(names):
                self.counters.removed_blocks += len(names)
                self._out.row(Kind.REMOVED, seq, time_s, names, place[0], place[1], 0, table.block_size)
        self.counters.unknown_removals += len(hashes)


def _removals_joined(events: tuple[Event, ...]) -> Iterator[Event]:
    """Consecutive removals from one place as one: vLLM writes an event for each evicted block, dozens in a row."""
    run: list[Removed] = []
    for event in events:
        if isinstance(event, Removed) and (not run or (event.tier is run[0].tier and event.group == run[0].group)):
            run.append(event)
            continue
        if run:
            yield _joined(run)
        if isinstance(event, Removed):
            run = [event]
        else:
            run = []
            yield event
    if run:
        yield _joined(run)


def _joined(run: list[Removed]) -> Removed:
    return run[0] if len(run) == 1 else Removed(np.concatenate([e.hashes for e in run]), run[0].tier, run[0].group)


def _is_sparse(event: Stored) -> bool:
    return event.tokens is not None and event.block_size > 0 and len(event.tokens) > event.block_size * len(event.hashes)


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, dict):
        raise TypeError("a map as extra key")
    return value


def _digest(key: HashKey, extra: tuple[Any, ...]) -> int:
    return extra_digest(key, extra)
