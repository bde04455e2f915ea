"""All of one rank but its sockets and clock: frames in, records out. The live path and the replay of recorded frames both run through here.

    frames -> decode -> Sequencer -> RankState -> RecordBuilder -> records

Times are arguments (unix seconds). Trust: BLIND until the start is decided; EXACT while every batch since the epoch's start was seen; else
DEGRADED, until a clear or a new epoch. A batch of which a part could not be read is a gap, too. Epochs are unix milliseconds, or one more
than the one before if the clock stood still or went back.
"""

from __future__ import annotations

from collections.abc import Sequence

from collector.bridge.decode import BadFrame, split_frames, split_replay
from collector.bridge.rank_state import RankState
from collector.bridge.record_builder import TARGET_BYTES, BuiltRecord, RecordBuilder
from collector.bridge.sequence import MAX_HELD_BYTES, Apply, Epoch, Gap, Sequencer, Step
from schemas.block_hash import HashKey
from schemas.kv_events import WorkerId
from schemas.workers import BridgeHealth, Trust


class RankFeed:
    def __init__(
        self,
        key: HashKey,
        source: WorkerId,
        *,
        can_replay: bool,
        snapshot_interval_s: float = 60.0,
        target_bytes: int = TARGET_BYTES,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self.source = source
        self._key_id = key.key_id
        self.builder = RecordBuilder(source, target_bytes)
        self.state = RankState(key, source, self.builder)
        self.sequence = Sequencer(can_replay=can_replay, max_held_bytes=max_held_bytes)
        self.trust = Trust.BLIND
        self.epoch = 0
        self.frames = 0
        self.lost_batches = 0
        self.odd_ranks = 0
        self._bad_frames = 0
        self._doing = 0  # batch that is being applied
        self._snapshot_interval_s = snapshot_interval_s
        self._next_snapshot_s: float | None = None
        self._waiting_since_s: float | None = None

    def __repr__(self) -> str:
        return f"RankFeed({self.source}, epoch {self.epoch}, next {self.sequence.next}, {self.trust})"

    @property
    def wanted(self) -> int | None:
        """See Sequencer.wanted."""
        return self.sequence.wanted

    @property
    def waiting_since_s(self) -> float | None:
        """When the oldest event that has not been taken came in."""
        return self._waiting_since_s

    @property
    def seq(self) -> int:
        """The batch that was applied last; 0 when none was (readers: `(epoch, seq)` of control rows)."""
        return max(0, (self.sequence.next or 0) - 1)

    def on_live(self, frames: Sequence[bytes], now_s: float) -> None:
        """One message of the PUB socket. A mangled one is counted and costs only itself."""
        self.frames += 1
        try:
            seq, payload = split_frames(frames)
        except BadFrame:
            self._bad_frames += 1
            return
        self._do(self.sequence.live(seq, payload), now_s)

    def on_replay(self, frames: Sequence[bytes], now_s: float) -> bool:
        """One message of the replay socket. Returns whether it was the end marker."""
        self.frames += 1
        try:
            answer = split_replay(frames)
        except BadFrame:
            self._bad_frames += 1
            return False
        if answer is None:
            return True
        self._do(self.sequence.replay(*answer), now_s)
        return False

    def connected(self) -> None:
        """The live socket is connected, for the first time or again."""
        self.sequence.verify()

    def replay_began(self) -> None:
        self.sequence.round_began()

    def replay_ended(self, marker: bool, now_s: float) -> None:
        self._do(self.sequence.round_ended(marker), now_s)

    def set_can_replay(self, can_replay: bool, now_s: float) -> None:
        if can_replay:
            self.sequence.can_replay = True
        else:
            self._do(self.sequence.no_replay(), now_s)

    def broke(self, now_s: float) -> None:
        """Something unforeseen stopped the batches at hand half way: what was not applied of them is a gap."""
        self.trust = Trust.DEGRADED
        if self.sequence.next is not None and self.epoch:
            self._lose(min(self._doing, self.seq), self.seq, now_s)
            self._waiting_since_s = now_s if self._waiting_since_s is None else self._waiting_since_s

    def snapshot_soon(self) -> None:
        """Readers lost something on the way: they need the whole list."""
        self._next_snapshot_s = 0.0

    def snapshot_due(self, now_s: float) -> bool:
        return self._next_snapshot_s is not None and now_s >= self._next_snapshot_s

    def snapshot(self, now_s: float) -> None:
        """Writes the resident set, and plans the next one."""
        if self.sequence.next is None:
            return
        self.builder.snapshot(self.state.resident(), self.seq, self.trust is Trust.EXACT, now_s)
        self._next_snapshot_s = now_s + self._snapshot_interval_s
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s

    def take(self, now_s: float) -> list[BuiltRecord]:
        """All records so far."""
        self._waiting_since_s = None
        return self.builder.take(now_s)

    def health(self, buffered_records: int = 0, dropped_records: int = 0) -> BridgeHealth:
        counters, sequence = self.state.counters, self.sequence
        seen = [s for s in (sequence.newest_live, None if not sequence.next else sequence.next - 1) if s is not None]
        return BridgeHealth(
            trust=self.trust,
            epoch=self.epoch,
            key_id=self._key_id,
            seq=max(seen, default=None),
            frames=self.frames,
            mangled_frames=self._bad_frames + sequence.mangled,
            skipped_events=counters.skipped_events,
            lost_batches=self.lost_batches,
            replayed_batches=sequence.replayed,
            restarts=sequence.restarts,
            reported_blocks=counters.reported_blocks,
            unnamed_blocks=counters.unnamed_blocks,
            unknown_removals=counters.unknown_removals,
            resident_blocks=self.state.resident_blocks,
            peak_resident_blocks=self.state.peak_resident_blocks,
            buffered_records=buffered_records,
            dropped_records=dropped_records,
        )

    def _do(self, steps: list[Step], now_s: float) -> None:
        for step in steps:
            if isinstance(step, Apply):
                self._doing = step.seq
                self._apply(step, now_s)
            elif isinstance(step, Gap):
                self._lose(step.first, step.last, now_s)
            else:
                self._begin(step, now_s)
        if steps and self._waiting_since_s is None:
            self._waiting_since_s = now_s

    def _lose(self, first: int, last: int, now_s: float) -> None:
        self.builder.gap(first, last, now_s)
        self.lost_batches += last - first + 1
        self.trust = Trust.DEGRADED

    def _begin(self, step: Epoch, now_s: float) -> None:
        self.epoch = max(self.epoch + 1, int(now_s * 1000))
        self.state.forget()
        self.trust = Trust.EXACT if step.complete else Trust.DEGRADED
        self.builder.start_epoch(self.epoch, step.complete, step.seq, now_s, restarted=step.restarted)
        self._next_snapshot_s = now_s + self._snapshot_interval_s

    def _apply(self, step: Apply, now_s: float) -> None:
        if step.batch.rank is not None and step.batch.rank != self.source.rank:
            self.odd_ranks += 1
        conflicts, unreadable = self.state.counters.conflicts, self.state.counters.unreadable_events
        if self.state.apply(step.seq, step.batch, now_s) and self.trust is Trust.DEGRADED:
            self.trust = Trust.EXACT
            self.snapshot_soon()
        if self.state.counters.conflicts > conflicts:
            self.trust = Trust.DEGRADED
        if self.state.counters.unreadable_events > unreadable:
            self._lose(step.seq, step.seq, now_s)
