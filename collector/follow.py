"""Follows the stream: where each partition is read, what was received completely, and trouble with it. Hands records to the fold.

`Position`s of the last commit say where to begin; state that is rebuilt by reading *again* begins earlier (see positions.py, fold.py).
What was received *completely* is learnt from ends: once reading passes an end that was asked for at some moment, everything that was
written before that moment is here. What the broker calls committed offsets is never used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from collector.fold import Again, Fold
from collector.health import NOT_YET, Health
from collector.pacing import too_far_ahead
from collector.positions import Start, where_to_start
from collector.settings import CollectorSettings
from collector.store.state import Position
from schemas.stream import OffsetOutOfRange, Partition, Reader, Stream, StreamError
from schemas.topics import CHANGES, DECISIONS, KV_EVENTS, OUTCOMES, WORKER_LOAD, topic_specs

log = logging.getLogger(__name__)

TOPICS = (KV_EVENTS, WORKER_LOAD, DECISIONS, OUTCOMES, CHANGES)
PROBE_S = 0.25
IDENTITY_S = 5.0
PACE_SLACK_S = 20.0
RETRY_S = (0.2, 5.0)


@dataclass(slots=True)
class Probe:
    """The end of a partition at one moment: once it is passed, everything before that moment was received."""

    at_s: float
    end: int


class Follower:
    """Owns the reader. `changed` is set by whatever readers of the published file should see."""

    def __init__(
        self,
        settings: CollectorSettings,
        stream: Stream,
        fold: Fold,
        health: Health,
        stored: Mapping[Partition, Position],
        checkpoint: Mapping[str, int],
        *,
        clock: Callable[[], float],
        wait: Callable[[float], object],
    ) -> None:
        """stored: positions of the last commit; checkpoint: offsets (topic/partition) of kv-events that the loaded state stands for."""
        self.settings = settings
        self.fold, self.health = fold, health
        self.positions: dict[Partition, int] = {}
        self.stream_time_s: dict[Partition, float] = {}
        self.changed = False
        self.reader: Reader | None = None
        self._stream, self._stored, self._checkpoint = stream, stored, checkpoint
        self._clock, self._wait = clock, wait
        self._identities: dict[str, str | None] = {}
        self._identity_at_s = 0.0
        self._probes: dict[Partition, Probe] = {}
        self._probed_s = 0.0
        self._complete_s: dict[Partition, float] = {}
        self._paused_parts: set[Partition] = set()
        self._retry_s = RETRY_S[0]

    def read(self, until_s: float) -> int:
        """Polls (not beyond until_s) and folds; returns the number of records. Trouble becomes `stream_trouble` and a wait."""
        try:
            if self.reader is None or self.health.stream_trouble:
                self._connect()
            assert self.reader is not None
            self._check_identity()
            self._pace()
            timeout_s = max(0.0, min(0.2, until_s - self._clock()))
            got = 0
            for topic, partition, records in self.reader.poll(timeout_s, self.settings.poll_records):
                part = topic, partition
                self.fold.take(part, topic.removeprefix(self.settings.topic_prefix), records, self._clock())
                self.positions[part] = self.reader.position(part)
                self.stream_time_s[part] = records[-1].timestamp / 1000
                got += len(records)
            for part in [p for p, again in self.fold.again.items() if self.reader.position(p) >= again.before]:
                del self.fold.again[part]
            self.changed |= got > 0
            self._probe()
            return got
        except OffsetOutOfRange as e:
            self.health.stream_trouble = str(e)  # connecting again finds out what happened, and says so
            self.changed = True
        except StreamError as e:
            if self.health.stream_trouble in ("", NOT_YET):
                log.warning("the stream is away: %s", e)
            self.changed |= self.health.stream_trouble != str(e)
            self.health.stream_trouble = str(e)
            self._wait(min(self._retry_s, max(0.0, until_s - self._clock())))
            self._retry_s = min(self._retry_s * 2, RETRY_S[1])
        return 0

    def _check_identity(self) -> None:
        now_s = self._clock()
        if now_s - self._identity_at_s < IDENTITY_S:
            return
        self._identity_at_s = now_s
        for topic, known in self._identities.items():
            found = self._stream.identity(topic)
            if found != known:
                raise OffsetOutOfRange(topic, 0, self.positions.get((topic, 0), 0), 0, 0, "the topic was made anew")

    def _probe(self) -> None:
        """Learns the ends of all partitions now and then, and from earlier ends what was received completely."""
        for part in [p for p, probe in self._probes.items() if self.positions[p] >= probe.end]:
            self._complete_s[part] = self._probes.pop(part).at_s
        now_s = self._clock()
        if now_s - self._probed_s < PROBE_S:
            return
        self._probed_s = now_s
        for name in TOPICS:
            topic = self.settings.topic_prefix + name
            for partition, end in self._stream.end_offsets(topic).items():
                part = topic, partition
                if part not in self.positions:
                    self.health.stream_trouble = f"{topic} has more partitions than before: connecting again to read them"
                    continue
                self.health.lag[part] = max(0, end - self.positions[part])
                self._probes.setdefault(part, Probe(now_s, end))

    def _to_pause(self) -> set[Partition]:
        prefix = self.settings.topic_prefix
        paced = {prefix + KV_EVENTS, prefix + DECISIONS, prefix + OUTCOMES}
        if self.fold.again:  # nothing is committed meanwhile, so the others would pile up
            return set(self.positions) - set(self.fold.again)
        behind = {p: self.stream_time_s[p] for p, lag in self.health.lag.items() if p[0] in paced and lag > 0 and p in self.stream_time_s}
        return too_far_ahead(behind, PACE_SLACK_S)

    def _pace(self) -> None:
        assert self.reader is not None
        pause = self._to_pause()
        if pause - self._paused_parts:
            self.reader.pause(pause - self._paused_parts)
        if self._paused_parts - pause:
            self.reader.resume(self._paused_parts - pause)
        self._paused_parts = pause

    def complete(self, name: str) -> float:
        """Everything of this topic before this moment (unix seconds) was received."""
        topic = self.settings.topic_prefix + name
        return min((self._complete_s.get(part, 0.0) for part in self.positions if part[0] == topic), default=0.0)

    def kv_passed(self) -> float:
        """All KV events of before this moment were received; while a backlog is read, by when its records were written."""
        topic = self.settings.topic_prefix + KV_EVENTS
        parts = [p for p in self.positions if p[0] == topic]
        return min((max(self._complete_s.get(p, 0.0), self.stream_time_s.get(p, 0.0)) for p in parts), default=0.0)

    def passed(self) -> float:
        """All decisions and outcomes of requests before this moment were received; while a backlog is read, by what the records say."""
        topics = {self.settings.topic_prefix + DECISIONS, self.settings.topic_prefix + OUTCOMES}
        newest_s = self.fold.newest_s
        return min((max(self._complete_s.get(p, 0.0), newest_s.get(p, 0.0)) for p in self.positions if p[0] in topics), default=0.0)

    def _connect(self) -> None:
        """Opens the reader: the first time at the stored offsets, later where this process stands. Raises StreamError."""
        s = self.settings
        self._stream.ensure_topics(topic_specs(s.topic_prefix, s.partitions))
        if self.reader is None:
            self.reader = self._stream.reader()
        first = not self.positions
        starts: dict[Partition, Start] = {}
        identities: dict[str, str | None] = {}
        for name in TOPICS:
            topic = s.topic_prefix + name
            identities[topic] = self._stream.identity(topic)
            oldest, ends = self._stream.start_offsets(topic), self._stream.end_offsets(topic)
            for partition in oldest:
                part = topic, partition
                stored = self._stored.get(part)
                position, identity, again_from = self.positions.get(part), self._identities.get(topic), None
                if first and stored is not None:
                    position, identity = stored.next_offset, stored.identity
                    again_from = min(unpack_waiting(stored.waiting), default=None)
                    if name == KV_EVENTS:
                        again_from = int(self._checkpoint.get(f"{topic}/{partition}", oldest[partition]))
                starts[part] = where_to_start(
                    part, position, again_from, oldest[partition], ends[partition], identities[topic], identity
                )  # fmt: skip
        self.reader.assign({part: start.read_from for part, start in starts.items()})
        self._paused_parts = set()
        for part, start in starts.items():
            stored = self._stored.get(part) if first else None
            self._apply_start(part, start, {} if stored is None else unpack_waiting(stored.waiting))
            self.positions[part] = start.read_from
        self._identities = identities
        self._identity_at_s = self._clock()
        self._probes.clear()
        self.health.stream_trouble = ""
        self._retry_s = RETRY_S[0]

    def _apply_start(self, part: Partition, start: Start, waiting: dict[int, bool]) -> None:
        fold, now_s = self.fold, self._clock()
        if start.event is not None:
            log.warning("%s", start.event)
            fold.note(now_s, "gap", start.event)
            fold.counters["stream_gaps"] += 1
            fold.counters["stream_lost_records"] += start.lost_records or 0
            self.changed = True
        if part[0] == self.settings.topic_prefix + KV_EVENTS and (start.event is not None or start.incomplete):
            fold.lose(part, now_s)
        gone = [o for o in waiting if o < start.read_from or start.forget_state]
        if gone:
            fold.counters["open_records_lost"] += len(gone)
            fold.note(
                now_s, "gap", f"stream: {len(gone)} open records of {part[0]}/{part[1]} can't be read again; their requests have no row"
            )
        if start.event is not None:
            fold.again.pop(part, None)
        if start.read_from < start.before:
            fold.again[part] = Again(start.before, waiting)

    def current_positions(self) -> dict[Partition, Position]:
        waiting = self.fold.join.waiting()
        return {
            part: Position(offset, pack_waiting(waiting.get(part, ())), self._identities.get(part[0]))
            for part, offset in self.positions.items()
        }

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()


def pack_waiting(offsets: Iterable[int]) -> bytes:
    """`(offset << 1) | counted` of open records as little-endian i64."""
    return np.fromiter(offsets, "<i8").tobytes()


def unpack_waiting(packed: bytes) -> dict[int, bool]:
    """Offset of each open record -> whether its request is in the rollups already."""
    return {int(x) >> 1: bool(x & 1) for x in np.frombuffer(packed, "<i8")}
