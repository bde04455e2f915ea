"""Puts one rank's engine batches in order: gaps, replays, restarts, duplicates. Pure: no clock, no socket.

    live frame ----+                       +--> Apply(seq, batch)      exactly once each, ascending
                   +--> held (by seq) -----+--> Gap(first, last)       lost for good
    replay answer -+    bounded in bytes   +--> Epoch(complete, seq)   a new incarnation of the engine

The sequence starts at 0 in every engine process and grows by one a batch, and nothing else identifies the process. So:

 - what is next is applied; what lies ahead is held until the hole is filled by replay, or given up (Gap) after rounds without progress;
 - a live step back is a restart, unless the very same content was seen under that number (a late copy); live frames that go on in order
   while replay is already past them are no step back, even those so far behind that their content is not remembered;
 - a jump may hide a restart (we were disconnected while a new process overtook the old number). A replay is therefore asked from one batch
   before the hole: if that one's content is not what we applied, the process is another one: restart;
 - after every connection (`verify`) the same question is asked although nothing is missing: an engine that was restarted and then idles, or
   whose first batches went out before we were connected again, shows that it has nothing under our number, or something else;
 - a batch that cannot be read is like one that is missing; when replay gives the same bytes it is given up.

A restarted engine's cache is known to be empty at its sequence 0, so `Epoch` after a restart is complete at once, and what cannot be had
between 0 and the first batch seen is a Gap. At the bridge's own start nothing is known until sequence 0 is seen or replay has answered.

Rejected: dropping replayed batches beyond the newest live one (an idle engine's last batches would be missing): they are applied, and the
late live copy is recognised by its content.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from collector.bridge.decode import BadFrame, Batch, decode_batch

RECENT = 4096  # batches whose content is remembered, to know a late copy from a restart
MAX_HELD_BYTES = 32 << 20
HELD_OVERHEAD_BYTES = 300  # Python's own cost of a batch that waits
MAX_ROUNDS = 20  # of one hole, even with progress
MAX_IDLE_ROUNDS = 2  # in a row without progress
MAX_SILENT_VERIFICATIONS = 5


@dataclass(frozen=True, slots=True)
class Epoch:
    """A new incarnation. complete: its cache was empty before `seq`; restarted: the engine itself began anew, not only we."""

    complete: bool
    seq: int
    restarted: bool = False


@dataclass(frozen=True, slots=True)
class Apply:
    seq: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches first to last, both included."""

    first: int
    last: int


Step = Epoch | Apply | Gap


@dataclass(slots=True)
class _Held:
    """payload None: it came but cannot be read. hopeless: replay gave it no better."""

    payload: bytes | None
    digest: int
    hopeless: bool = False


class Sequencer:
    """next: the sequence that is applied next; None until the start is decided."""

    def __init__(self, *, can_replay: bool, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self.can_replay = can_replay
        self.next: int | None = None
        self.newest_live: int | None = None
        self.restarts = 0
        self.mangled = 0
        self.replayed = 0
        self.duplicates = 0
        self._max_held_bytes = max_held_bytes
        self._held: dict[int, _Held] = {}
        self._held_bytes = 0
        self._recent = array("q", bytes(8 * RECENT))
        self._rounds = 0
        self._idle_rounds = 0
        self._news = 0  # batches that the present round brought
        self._answers = 0
        self._unverified = False
        self._verify_rounds = 0
        self._asked_at: int | None = None  # `next` when the present round began
        self._overlap = False  # it brought the batch before that

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def wanted(self) -> int | None:
        """The sequence to ask a replay from, or None when nothing is missing."""
        if not self.can_replay:
            return None
        if self.next is None:
            return 0
        return max(0, self.next - 1) if self._held or self._unverified else None

    def verify(self) -> None:
        """We were not connected a moment ago: make sure that the engine is the one we know and that nothing was missed."""
        if self.can_replay:
            self._unverified = True
            self._verify_rounds = 0

    def live(self, seq: int, payload: bytes) -> list[Step]:
        """One live message."""
        batch = self._read(payload)
        digest = hash(payload)
        known = self._digest(seq)
        behind = (self.newest_live is not None and seq <= self.newest_live) or (self.next is not None and seq < self.next)
        if behind:
            if batch is None:
                return []  # its successor will tell whether this is a restart
            overtaken = known == 0 and (self.newest_live is None or seq > self.newest_live)
            if known == digest or overtaken:
                self.duplicates += 1
                self.newest_live = max(seq, self.newest_live or 0)
                return []
            steps = self._restart()
        else:
            steps = []
        self.newest_live = seq
        if self.next is None and (seq == 0 or not self.can_replay):
            steps.append(Epoch(seq == 0, seq))
            self.next = seq
        return steps + self._take(seq, payload, digest, batch)

    def replay(self, seq: int, payload: bytes) -> list[Step]:
        """One batch of a replay's answer."""
        self._answers += 1
        digest = hash(payload)
        known = self._digest(seq)
        self._overlap |= seq + 1 == self._asked_at and known in (0, digest)
        if known and known != digest:
            batch = self._read(payload)
            if batch is None:
                return []
            return self._restart() + self._replayed(seq, payload, digest, batch)
        held = self._held.get(seq)
        if (self.next is not None and seq < self.next) or (held is not None and held.payload is not None):
            return []
        return self._replayed(seq, payload, digest, self._read(payload))

    def _replayed(self, seq: int, payload: bytes, digest: int, batch: Batch | None) -> list[Step]:
        steps: list[Step] = []
        if batch is not None:
            self._news += 1
            self.replayed += 1
        elif seq in self._held:
            self._held[seq].hopeless = True
            return self._drain()
        if self.next is None and seq == 0:
            steps.append(Epoch(True, 0))
            self.next = 0
        return steps + self._take(seq, payload, digest, batch)

    def round_began(self) -> None:
        self._news = self._answers = 0
        self._asked_at = self.next
        self._overlap = False

    def round_ended(self, marker: bool) -> list[Step]:
        """A replay round is over, with its end marker or by time-out. Gives up what further rounds would not bring."""
        if self.wanted is None:
            return []
        if self._unverified and self.next is not None:
            steps = self._verified(marker)
            if steps or not self._held:
                return steps
        self._rounds += 1
        self._idle_rounds = 0 if self._news else self._idle_rounds + 1
        if self.next is None and not self._held:
            if not marker or self._answers:
                return []  # nobody answers, perhaps the engine is still starting: ask again
            self._settled()
            self.next = 0
            return [Epoch(True, 0)]  # an engine that has published nothing yet
        if self._idle_rounds < MAX_IDLE_ROUNDS and self._rounds < MAX_ROUNDS:
            return []
        return self._give_up()

    def _verified(self, marker: bool) -> list[Step]:
        """What a round says about whether the engine is still the one we know."""
        self._verify_rounds += 1
        if self._overlap or (self._asked_at == 0 and marker) or self._verify_rounds >= MAX_SILENT_VERIFICATIONS:
            self._unverified = False
        elif marker and not self._answers and self._verify_rounds >= MAX_IDLE_ROUNDS:
            steps = self._restart()  # it has never come as far as what we applied: another process
            self.verify()  # which may have published something already
            return steps
        return []

    def no_replay(self) -> list[Step]:
        """There is no replay any more (discovery says so): nothing is waited for."""
        self.can_replay = self._unverified = False
        steps: list[Step] = []
        while self._held:
            steps += self._give_up()
        return steps

    def _read(self, payload: bytes) -> Batch | None:
        try:
            return decode_batch(payload)
        except BadFrame:
            self.mangled += 1
            return None

    def _take(self, seq: int, payload: bytes, digest: int, batch: Batch | None) -> list[Step]:
        if batch is not None and seq == self.next:
            self._forget(seq)
            self.next = seq + 1
            self._recent[seq % RECENT] = digest
            steps: list[Step] = [Apply(seq, batch)]
            return steps + self._drain() if self._held else steps
        self._forget(seq)
        self._held[seq] = _Held(payload if batch is not None else None, digest if batch is not None else 0)
        self._held_bytes += HELD_OVERHEAD_BYTES + (len(payload) if batch is not None else 0)
        if self.next is not None and not self.can_replay:
            return self._give_up()
        if self._held_bytes > self._max_held_bytes:
            return self._give_up()
        return []

    def _forget(self, seq: int) -> None:
        old = self._held.pop(seq, None)
        if old is not None:
            self._held_bytes -= HELD_OVERHEAD_BYTES + len(old.payload or b"")

    def _drain(self) -> list[Step]:
        """Applies what is held and next."""
        steps: list[Step] = []
        while self.next is not None and (held := self._held.get(self.next)) is not None:
            if held.payload is not None:
                steps.append(Apply(self.next, decode_batch(held.payload)))
            elif held.hopeless or not self.can_replay:
                steps.append(Gap(self.next, self.next))
            else:
                break
            self._forget(self.next)
            self._recent[self.next % RECENT] = held.digest
            self.next += 1
        if not self._held:
            self._settled()
        return steps

    def _give_up(self) -> list[Step]:
        """The first hole will not be filled: goes on behind it."""
        readable = [seq for seq, held in self._held.items() if held.payload is not None]
        go_on = min(readable) if readable else max(self._held) + 1
        self._rounds = self._idle_rounds = 0
        steps: list[Step] = []
        if self.next is None:
            steps.append(Epoch(False, go_on))
        elif go_on > self.next:
            steps.append(Gap(self.next, go_on - 1))
            for seq in range(max(self.next, go_on - RECENT), go_on):
                self._recent[seq % RECENT] = 0
        for seq in [s for s in self._held if s < go_on]:
            self._forget(seq)
        self.next = go_on
        return steps + self._drain()

    def _restart(self) -> list[Step]:
        self.restarts += 1
        self._held.clear()
        self._held_bytes = 0
        self._recent = array("q", bytes(8 * RECENT))
        self._settled()
        self.newest_live = None
        self.next = 0
        return [Epoch(True, 0, restarted=True)]

    def _settled(self) -> None:
        self._rounds = self._idle_rounds = 0

    def _digest(self, seq: int) -> int:
        """Digest of the content seen under `seq`, 0 when it is not known."""
        held = self._held.get(seq)
        if held is not None:
            return held.digest
        if self.next is None or not self.next - RECENT <= seq < self.next:
            return 0
        return self._recent[seq % RECENT]
