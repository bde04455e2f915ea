"""Folds the stream into state and rows: residency, open requests, rollups, and what is to be written of them. No I/O, no clock.

    kv-events ---> residency, kv_events rows, worker_10s counts, changes seen (restart, gap, clear)
    decisions ---> open requests, candidates rows          outcomes ---> open requests, worker_10s, latency_10s
    worker-load -> loads, worker_10s gauges                changes ----> changes rows
    settle ------> requests whose hit can be told, or whose other half did not come, become rows

After a restart some records are read *again*: kv-events from the checkpoint of the residency on, decisions and outcomes from the oldest one
that was still open. Up to the committed offset these rebuild state and write nothing; that is what makes each row appear exactly once.
Everything counted here is cumulative since the data folder was made; `counters` is stored with each commit.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, ValidationError

from collector.analytics.attributed import Attributed
from collector.analytics.lives import Lives
from collector.attribution import told
from collector.attribution.dispatch import Contents, Dispatch, Dispatches
from collector.attribution.flights import Flight, Span
from collector.attribution.moments import TOLD, Running, assign, event_time_s, look
from collector.attribution.stores import Stores
from collector.attribution.times import Uses
from collector.attribution.told import Costs, NoCosts
from collector.join import Join, Place, Request, Taken
from collector.kv_rows import kv_event_rows
from collector.request_rows import attempt_rows, candidate_rows, request_row, shadow_rows
from collector.residency import CLEARS, LOST_BATCHES, REMOVED_BLOCKS, RESIDENT, STORED_BLOCKS, Residency
from collector.residency import EVENTS as EVENT_COUNT
from collector.rollups import Rollups
from collector.store.columns import from_rows, micros
from collector.store.publish import SCHEMAS
from schemas.changes import Change
from schemas.kv_events import COMPLETE, ENGINE_RESTARTED, BadBatch, Kind, Unpacked, WorkerId, decode, unpack
from schemas.requests import Decision, Outcome
from schemas.stream import Partition, Record
from schemas.topics import CHANGES, DECISIONS, KV_EVENTS, OUTCOMES, WORKER_LOAD
from schemas.workers import WorkerLoad

LIVES = "lives/"
MAX_MARKS = 1000  # change rows of one slice; a flood of clears is still counted in worker_10s
MAX_REASON = 500
LOOK_S = 0.25  # decisions are looked at together: each look undoes the events of the last second or two
LATEST_S = 4_102_444_800.0  # the year 2100: a bridge time after it is a mistake
AGREE_BUCKET_S, AGREE_BUCKETS = 10, 64
MAX_KEYS = 100  # hash keys of routers remembered
MAX_PREEMPTIONS = 256  # times between two readings of a worker in which it preempted somebody
MAX_SKEW_S = 3600.0  # between an engine's clock and its bridge's, on the same node or near it


@dataclass(slots=True)
class Again:
    """Records of a partition that are read a second time. before: the committed offset; waiting: open offsets -> counted."""

    before: int
    waiting: dict[int, bool] = field(default_factory=dict)


class Fold:
    def __init__(
        self,
        residency: Residency,
        *,
        lateness_s: float = 1.0,
        clock_tolerance_s: float = 0.0,
        outcome_wait_s: float = 900.0,
        decision_wait_s: float = 15.0,
        open_bytes: int = 512 << 20,
        contents: Contents | None = None,
        costs: Costs | None = None,
        lives: Lives | None = None,
    ) -> None:
        """contents: what of prompts was seen before; costs: what a prefill costs; None: nothing is known of either. lives: watches the
        kv-events, too."""
        self.residency = residency
        self.join = Join()
        self.rollups = Rollups()
        self.workers: list[WorkerId] = []
        self.loads: dict[WorkerId, WorkerLoad] = {}
        self.counters: Counter[str] = Counter()
        self.again: dict[Partition, Again] = {}
        self.block_events = 0
        """Stored and removed blocks since the process began, for checkpoints and metrics."""
        self.loads_changed = False
        self.newest_s: dict[Partition, float] = {}
        """Newest time that a decision or outcome of a partition names."""
        self.taken_s = 0.0
        """When records were taken last (unix seconds, this machine's clock)."""
        self.router_keys: dict[tuple[str, str], tuple[float, str]] = {}
        """(pool, key id) -> when a decision named it last (unix seconds), and the router that did."""
        self.agreement: dict[int, list[int]] = {}
        """Start of 10 s (unix seconds) -> requests that ended then with a hit both told and reported, and those where the two differ."""
        self.told: list[Attributed] = []
        """Requests that were told since `take_told`, in order."""
        self.uses = Uses()
        self.lives = Lives() if lives is None else lives
        self._costs = costs or NoCosts()
        self._dispatches = Dispatches(residency, contents)
        self._undispatched: dict[str, Request] = {}
        self._looked_s = self._horizon_s = -np.inf
        self._stores = Stores()
        self._kept_spans: dict[str, list[list[Any]]] = {}
        self._preempted: dict[WorkerId, deque[tuple[float, float]]] = {}
        self._lateness_s = lateness_s
        self._tolerance_s = clock_tolerance_s
        self._outcome_wait_s = outcome_wait_s
        self._decision_wait_s = decision_wait_s
        self._open_bytes = open_bytes
        self._number: dict[WorkerId, int] = {}
        self._ranks: dict[tuple[str, str], list[int]] = {}
        self._partition: dict[int, Partition] = {}
        self._epochs: dict[int, int] = {}
        self._known: set[int] = set()
        self._ids = np.empty(0, np.uint64)
        self._id_numbers = np.empty(0, np.int32)
        self._rows: dict[str, list[tuple[object, ...]]] = {}
        self._tables: list[pa.Table] = []
        self._dead_bytes = 0

    # records

    def take(self, part: Partition, name: str, records: Sequence[Record], now_s: float) -> None:
        """One slice of topic `name` (without the deployment's prefix)."""
        self.taken_s = now_s
        again = self.again.get(part)
        if again is not None:
            old = [r for r in records if r.offset < again.before]
            records = records[len(old) :]
            if old:
                self._take_again(part, name, old, again)
        if not records:
            return
        self.counters[f"records/{name}"] += len(records)
        if name == KV_EVENTS:
            self._kv_events(part, records, now_s)
        elif name == DECISIONS:
            self._each(part, records, Decision, self._decision, now_s)
        elif name == OUTCOMES:
            self._each(part, records, Outcome, self._outcome, now_s)
        elif name == WORKER_LOAD:
            self._each(part, records, WorkerLoad, self._load, now_s)
        elif name == CHANGES:
            self._each(part, records, Change, self._change, now_s)

    def _take_again(self, part: Partition, name: str, records: Sequence[Record], again: Again) -> None:
        if name == KV_EVENTS:
            self._kv_events(part, records, None)
            return
        for record in records:
            counted = again.waiting.pop(record.offset, None)
            if counted is None:
                continue
            value = (Decision if name == DECISIONS else Outcome).model_validate_json(record.value or b"")
            place = part, record.offset
            if isinstance(value, Decision):
                self.join.decision(value, place, record.timestamp / 1000)
            else:
                self.join.outcome(value, place, record.timestamp / 1000)
            self.join.open[value.request_id].counted |= counted
            self._changed(self.join.open[value.request_id], isinstance(value, Decision))

    def _each(self, part: Partition, records: Sequence[Record], model: type[BaseModel], use: Any, now_s: float) -> None:
        for record in records:
            try:
                value = model.model_validate_json(record.value or b"")
            except ValidationError as e:
                self._dead_letter(part, record, _explain(e), now_s)
                continue
            use(value, (part, record.offset), record, now_s)

    def _decision(self, d: Decision, at: Place, record: Record, now_s: float) -> None:
        self.newest_s[at[0]] = max(self.newest_s.get(at[0], 0.0), min(d.time_s, now_s))
        known = self.join.open.get(d.request_id)
        told_attempts = 0 if known is None or known.decision is None else len(known.decision.attempts)
        taken = self.join.decision(d, at, record.timestamp / 1000)
        if taken in (Taken.NEW, Taken.SUPERSEDED):
            self.counters["superseded/decision"] += taken is Taken.SUPERSEDED
            self._rows.setdefault("candidates", []).extend(candidate_rows(d))
            self._rows.setdefault("shadows", []).extend(shadow_rows(d))
            self._rows.setdefault("attempts", []).extend(attempt_rows(d, told_attempts))
            self._changed(self.join.open[d.request_id], decided=True)
            if d.key_id is not None:
                self._router_key(d.pool, d.key_id, min(d.time_s, now_s), d.router)
        else:
            self._not_new(taken, "decision", d.request_id, at, record, now_s)

    def _router_key(self, pool: str, key_id: str, time_s: float, router: str) -> None:
        known = self.router_keys.get((pool, key_id))
        if known is None or time_s >= known[0]:
            self.router_keys[pool, key_id] = time_s, router
        if len(self.router_keys) > MAX_KEYS:
            del self.router_keys[min(self.router_keys, key=lambda k: self.router_keys[k][0])]

    def _outcome(self, o: Outcome, at: Place, record: Record, now_s: float) -> None:
        self.newest_s[at[0]] = max(self.newest_s.get(at[0], 0.0), min(o.time_s, now_s))
        taken = self.join.outcome(o, at, record.timestamp / 1000)
        if taken is not Taken.NEW:
            self._not_new(taken, "outcome", o.request_id, at, record, now_s)
        else:
            self._changed(self.join.open[o.request_id], decided=False)

    def _not_new(self, taken: Taken, what: str, request_id: str, at: Place, record: Record, now_s: float) -> None:
        if taken is Taken.DUPLICATE:
            self.counters[f"duplicate/{what}"] += 1
        else:
            self.counters[f"late/{what}"] += 1
            self._dead_letter(at[0], record, f"late: request {request_id} was closed without this {what}", now_s)

    def _load(self, load: WorkerLoad, at: Place, record: Record, now_s: float) -> None:
        who = WorkerId(load.pool, load.worker, load.rank)
        before = self.loads.get(who)
        if before is not None and load.time_s < before.time_s:
            self.counters["stale/load"] += 1
            return
        self.number(who)
        self.loads[who] = load
        self.loads_changed = True
        self.rollups.count_load(load, before)
        if before is not None and (load.preemptions or 0) > (before.preemptions or 0):
            self._preempted.setdefault(who, deque(maxlen=MAX_PREEMPTIONS)).append((before.time_s, load.time_s))

    def _change(self, c: Change, at: Place, record: Record, now_s: float) -> None:
        self._rows.setdefault("changes", []).append((micros(c.time_s), c.kind, c.text, c.author, c.pool, c.worker))

    def note(self, time_s: float, kind: str, text: str, pool: str | None = None, worker: str | None = None) -> None:
        """A change that the collector saw itself."""
        self._rows.setdefault("changes", []).append((micros(time_s), kind, text, "collector", pool, worker))

    def _dead_letter(self, part: Partition, record: Record, reason: str, now_s: float) -> None:
        self.counters["dead_letters"] += 1
        value, key = record.value or b"", record.key or b""
        self._dead_bytes += len(value)
        self._rows.setdefault("dead_letters", []).append(
            (micros(now_s), *part, record.offset, key.decode("utf-8", "backslashreplace"), reason[:MAX_REASON], len(value), value)
        )

    # KV events

    def number(self, who: WorkerId) -> int:
        """The worker's number here; registers it when it is new."""
        number = self._number.get(who)
        if number is None:
            number = self.residency.worker()
            self._register(who, number)
        return number

    def _register(self, who: WorkerId, number: int) -> None:
        self._number[who] = number
        self.workers.append(who)
        ranks = self._ranks.setdefault((who.pool, who.worker), [])
        ranks.append(number)
        ranks.sort(key=lambda n: self.workers[n].rank)
        self._known.add(who.number)
        ids = np.append(self._ids, np.uint64(who.number))
        order = np.argsort(ids)
        self._ids, self._id_numbers = ids[order], np.append(self._id_numbers, np.int32(number))[order]

    def _kv_events(self, part: Partition, records: Sequence[Record], now_s: float | None) -> None:
        """now_s None: read again, for the state alone."""
        values = [r.value or b"" for r in records]
        batch = unpack(values)
        for i in [*_timeless(batch), *self._misnamed(batch, values)]:
            values[i] = values[i] + b" "  # of no whole words now: the kernel passes it over
            batch = unpack(values)
        if now_s is not None and not batch.ok.all():
            for i in np.flatnonzero(~batch.ok).tolist():
                self._dead_letter(part, records[i], _why_bad(records[i].value or b""), now_s)
        _believe_times(batch)
        numbers = self._numbers(part, batch)
        before = self.residency.workers["lost_batches"][: len(self.workers)].copy()
        tally = self.residency.apply(batch, numbers)
        self.lives.watch(batch, numbers)
        self.block_events += len(batch.hashes)
        marked = self._marks(batch, numbers, now_s is not None)
        if now_s is None or not len(batch.events):
            return
        after = self.residency.workers["lost_batches"][: len(self.workers)]
        for number in np.flatnonzero(after > before).tolist():
            unmarked = int(after[number] - before[number]) - marked[number]
            if unmarked > 0:
                who = self.workers[number]
                text = f"rank {who.rank}: {unmarked} engine batches are missing without a gap mark"
                self.note(float(self.residency.workers["last_bridge_s"][number]), "gap", text, who.pool, who.worker)
        self.counters["kv_events"] += len(batch.events)
        self.counters["blocks"] += len(batch.hashes)
        for number, column in np.argwhere(tally.counts[:, :, EVENT_COUNT] > 0).tolist():
            who, counts = self.workers[number], tally.counts[number, column]
            bucket = self.rollups.at((tally.first_bucket + column) * 10, who.pool, who.worker, who.rank)
            bucket.counts["stored_blocks"] += int(counts[STORED_BLOCKS])
            bucket.counts["removed_blocks"] += int(counts[REMOVED_BLOCKS])
            bucket.counts["clears"] += int(counts[CLEARS])
            bucket.counts["lost_batches"] += int(counts[LOST_BATCHES])
            bucket.resident_blocks = int(counts[RESIDENT])
        offsets = np.fromiter((r.offset for r in records), np.int64, len(records))
        self._tables.append(kv_event_rows(batch, numbers, offsets, part[1], self.workers))

    def _misnamed(self, batch: Unpacked, values: Sequence[bytes]) -> list[int]:
        """Registers the workers that are new here; returns the records whose number does not belong to their names."""
        strange = np.flatnonzero(batch.ok & ~np.isin(batch.worker_number, self._ids))
        bad = []
        for i in strange.tolist():
            if int(batch.worker_number[i]) in self._known:
                continue
            try:
                self.number(decode(values[i]).source)
            except BadBatch:
                bad.append(i)
        return bad

    def _numbers(self, part: Partition, batch: Unpacked) -> npt.NDArray[np.int32]:
        if not len(self._ids):
            return np.zeros(len(batch.ok), np.int32)
        at = np.searchsorted(self._ids, batch.worker_number)
        at[at == len(self._ids)] = 0
        numbers = self._id_numbers[at]
        for number in np.unique(numbers[batch.ok]).tolist():
            self._partition[number] = part
        return numbers

    def _marks(self, batch: Unpacked, numbers: npt.NDArray[np.int32], write: bool) -> Counter[int]:
        """Notes restarts, gaps and clears; returns the lost batches that gap marks told of, by worker."""
        kinds = batch.events["kind"]
        at = np.flatnonzero((kinds >= Kind.CLEARED) & (kinds <= Kind.GAP))
        lost: Counter[int] = Counter()
        records = np.searchsorted(batch.event_end, at, side="right")
        for i, r in zip(at.tolist(), records.tolist(), strict=True):
            number, epoch = int(numbers[r]), int(batch.epoch[r])
            event, who = batch.events[i], self.workers[number]
            seen = self._epochs.get(number)
            if seen is not None and epoch < seen:
                continue
            self._epochs[number] = epoch
            kind, text = "", ""
            if event["kind"] == Kind.GAP:
                gone = max(0, int(event["parent"]) - int(event["seq"]) + 1)
                lost[number] += gone
                kind, text = "gap", f"rank {who.rank}: {gone} engine batches are lost"
            elif event["kind"] == Kind.CLEARED:
                kind, text = "clear", f"rank {who.rank}: the engine's cache was cleared"
            elif seen is None or epoch <= seen:
                pass
            elif event["flags"] & ENGINE_RESTARTED:
                kind, text = "restart", f"rank {who.rank}: the engine restarted, its cache starts anew (epoch {epoch})"
            elif not event["flags"] & COMPLETE:
                text = f"rank {who.rank}: its bridge began anew in the middle; which blocks the cache held before is lost (epoch {epoch})"
                kind = "note"
            if kind and write and len(self._rows.setdefault("changes", [])) < MAX_MARKS:
                self.note(float(event["time_s"] or batch.bridge_time_s[r]), kind, text, who.pool, who.worker)
        return lost

    def lose(self, part: Partition, time_s: float) -> int:
        """The stream lost records of this partition: its workers' trust falls. Returns how many workers."""
        hit = [n for n, p in self._partition.items() if p == part]
        for number in hit:
            self.residency.lose(number, time_s)
            self.lives.lose(number)
        return len(hit)

    # requests

    def settle(self, kv_complete_s: float, requests_passed_s: float, requests_complete_s: float, kv_passed_s: float | None = None) -> None:
        """Tells hits and closes rows. All unix seconds.

        *_complete_s: all records written before were received (kv: of worker-load, too); requests_passed_s: all requests that started or
        ended before are known; kv_passed_s: likewise events of all workers (default: kv_complete_s).
        A hit is told only after both its worker's events and other requests' decisions have passed its end: they may have older claims.
        That nothing more came is no news of a bridge that is gone: its word from after the end is waited for, else the hit stays untold.
        """
        kv_passed_s = kv_complete_s if kv_passed_s is None else max(kv_complete_s, kv_passed_s)
        before_s = min(kv_passed_s, requests_passed_s) - self._lateness_s
        self._horizon_s = max(self._horizon_s, before_s)
        if before_s >= self._looked_s + LOOK_S:
            self._looked_s = before_s
            self._dispatch(before_s)
        due: dict[tuple[str, str], list[Request]] = {}
        done: list[Request] = []
        for r in self.join.joined():
            if not r.last_decision_known and r.written_s + self._decision_wait_s >= requests_complete_s:
                continue
            pool, worker = r.worker
            key = pool or "", worker or ""
            ranks = self._ranks.get(key, [])
            if r.rank is None and len(ranks) == 1:
                r.rank, r.row = self.workers[ranks[0]].rank, None
            if r.rank is not None or not ranks or not self._tellable(r):
                self._count(r)
            if not self._tellable(r):
                done.append(r)
            elif r.running is not None and r.running.ended_s is not None:
                known_s = max(r.running.ended_s, r.written_s)
                if (
                    requests_passed_s <= known_s + self._lateness_s
                    and min(kv_complete_s, requests_complete_s) <= known_s + self._decision_wait_s
                ):
                    continue
                asked = [n for n in ranks if self.workers[n].rank == r.rank] or ranks
                passed_s = max(kv_complete_s, min((float(self.residency.workers["last_bridge_s"][n]) for n in asked), default=-np.inf))
                if any(self._watched_s(n) <= r.running.ended_s + self._lateness_s for n in asked):
                    if min(kv_complete_s, requests_complete_s) > known_s + self._decision_wait_s:
                        self.counters["untold"] += 1
                        self._attribute(r, told.SILENT)
                        self._count(r)
                        done.append(r)
                elif min(passed_s, kv_passed_s, requests_passed_s) > known_s + self._lateness_s:
                    due.setdefault(key, []).append(r)
        if due:
            self._tell(due)
        for requests in due.values():
            done += requests
        for r in done:
            self._close(r)
        for r in self.join.overdue(requests_complete_s, self._outcome_wait_s, self._decision_wait_s):
            if not r.undecided:
                self.counters["outcome_missing" if r.outcome is None else "decision_missing"] += 1
            self._count(r)
            self._close(r)
        for r in self.join.beyond(self._open_bytes):
            self.counters["closed_early"] += 1
            self._count(r)
            self._close(r, told.CLOSED_EARLY)

    def heard_s(self, number: int) -> float:
        """Newest word of a worker's bridge, by the bridge's clock (unix seconds)."""
        load = self.loads.get(self.workers[number])
        return max(float(self.residency.workers["last_bridge_s"][number]), -np.inf if load is None else load.time_s)

    def _watched_s(self, number: int) -> float:
        """Until when events are known to tell all: a KV batch says so, and a load reading of the very epoch that is applied here.

        inf for a worker of which no event ever came: there is nothing to wait for.
        """
        w, load = self.residency.workers[number], self.loads.get(self.workers[number])
        if not w["started"]:
            return np.inf
        known = load is not None and load.up and load.bridge.epoch == int(w["epoch"])
        return max(float(w["last_bridge_s"]), load.time_s if known and load is not None else -np.inf)

    def _names_match(self, r: Request, numbers: Sequence[int]) -> bool:
        """Router and bridge use the same hash key, as far as both say which."""
        mine = None if r.decision is None else r.decision.key_id
        theirs = {load.bridge.key_id for n in numbers if (load := self.loads.get(self.workers[n])) is not None} - {None}
        return mine is None or not theirs or mine in theirs

    def _compare(self, r: Request) -> None:
        if r.outcome is None or r.event_hit_tokens is None or r.outcome.cached_tokens is None:
            return
        counts = self.agreement.setdefault(int(r.outcome.time_s // AGREE_BUCKET_S) * AGREE_BUCKET_S, [0, 0])
        counts[0] += 1
        counts[1] += r.outcome.cached_tokens != r.event_hit_tokens
        if len(self.agreement) > AGREE_BUCKETS:
            del self.agreement[min(self.agreement)]

    @staticmethod
    def _tellable(r: Request) -> bool:
        return r.running is not None and told.has_prefilled(r)

    # attribution

    def _changed(self, r: Request, decided: bool) -> None:
        """A half of the request is new."""
        d = r.dispatch
        if decided and r.decision is not None:
            if d is not None:  # it was sent again
                d.ended_s, d.failed = r.decision.time_s, True
                self._dispatches.landed(d)
            chain = np.empty(0, np.uint64) if r.running is None else r.running.chain
            r.dispatch = Dispatch(r.decision, r.decision.time_s, r.first_s or r.decision.time_s, (), chain, r.content)
            r.content = None
            self._undispatched[r.request_id] = r
        if r.dispatch is not None and r.outcome is not None:
            r.dispatch.ended_s, r.dispatch.failed = r.outcome.time_s, not told.has_prefilled(r)
            self._dispatches.landed(r.dispatch)

    def _dispatch(self, before_s: float) -> None:
        """Looks at the decisions made before before_s (unix seconds)."""
        ready = [r for r in self._undispatched.values() if r.dispatch is not None and r.dispatch.started_s < before_s]
        if ready:
            for r in ready:
                assert r.dispatch is not None
                del self._undispatched[r.request_id]
                pool, worker = r.worker
                numbers = self._ranks.get((pool or "", worker or ""), [])
                r.dispatch.numbers = tuple(n for n in numbers if r.rank in (None, self.workers[n].rank))
            ranks = [(w.pool, w.worker, w.rank) for w in self.workers]
            self._dispatches.look([r.dispatch for r in ready if r.dispatch is not None], ranks)
            for r in ready:
                if r.dispatch is not None:
                    r.dispatch.content = None
                    self._take_over_spans(r)
        if before_s < np.inf:
            waiting = (r.dispatch.started_s for r in self._undispatched.values() if r.dispatch is not None)
            self._dispatches.flights.forget(min(before_s, min(waiting, default=np.inf)))

    def spans(self) -> dict[str, list[list[Any]]]:
        """Who was computing the same blocks as each open request, for `restore`: after a restart those that are closed are not known.

        So decisions that were made before the end of a closed one are looked at first.
        """
        self._dispatch(self._horizon_s)
        kept = {request_id: spans for request_id, spans in self._kept_spans.items() if request_id in self.join.open}
        return kept | {
            r.request_id: [[s.start, s.end, s.flight.request_id, *self._plain(s.flight)] for s in spans]
            for r in self.join.open.values()
            if r.dispatch is not None and r.dispatch.result is not None and (spans := r.dispatch.result.spans)
        }

    def _plain(self, f: Flight) -> list[Any]:
        """Numbers of workers may be others after a restart; their names are not."""
        ranks = [[who.pool, who.worker, who.rank] for who in (self.workers[n] for n in f.numbers)]
        return [f.started_s, ranks, _or_none(f.ended_s), f.failed, _or_none(f.prefilled_s)]

    def _take_over_spans(self, r: Request) -> None:
        known = self._kept_spans.pop(r.request_id, None)
        if known is None or r.dispatch is None or r.dispatch.result is None:
            return
        spans = []
        for start, end, request_id, started_s, ranks, ended_s, failed, prefilled_s in known:
            other = self.join.open.get(request_id)
            flight = None if other is None or other.dispatch is None else other.dispatch.flight
            if flight is None:
                numbers = tuple(n for who in ranks if (n := self._number.get(WorkerId(*who))) is not None)
                flight = Flight(request_id, started_s, -1, numbers, -1, _or_inf(ended_s), failed, _or_inf(prefilled_s))
            spans.append(Span(start, end, flight))
        r.dispatch.result = replace(r.dispatch.result, spans=tuple(spans))

    def _attribute(self, r: Request, untold: str) -> None:
        """untold: why events do not tell it."""
        if r.loss is None and told.attributable(r):
            r.loss = told.tell_untold(r, untold, self._costs)
            self._keep_told(r)

    def _keep_told(self, r: Request) -> None:
        assert r.loss is not None
        r.row = None
        self.rollups.count_loss(r)
        one = told.attributed(r, r.loss)
        if one is not None:
            self.told.append(one)
            self.uses.touch(one)

    def _preempted_while(self, number: int, r: Request) -> bool:
        assert r.decision is not None and r.outcome is not None
        spans = self._preempted.get(self.workers[number], ())
        return any(since_s <= r.outcome.time_s and until_s >= r.decision.time_s for since_s, until_s in spans)

    def _tell(self, due: Mapping[tuple[str, str], list[Request]]) -> None:
        newest_s = max(r.dispatch.started_s for some in due.values() for r in some if r.dispatch is not None)
        self._horizon_s = max(self._horizon_s, *(r.outcome.time_s for some in due.values() for r in some if r.outcome is not None))
        self._dispatch(np.nextafter(newest_s, np.inf))
        beside = {s.flight.request_id for some in due.values() for r in some for s in _spans(r)}
        asked = set(due) | {(r.worker[0] or "", r.worker[1] or "") for q in beside if (r := self.join.open.get(q)) is not None}
        by_worker: dict[tuple[str, str], list[Running]] = {}
        for r in self.join.open.values():
            key = r.worker[0] or "", r.worker[1] or ""
            if r.running is not None and key in asked:
                by_worker.setdefault(key, []).append(r.running)
        for key, running in by_worker.items():
            self._assign(self._ranks.get(key, []), running)
        for key, requests in due.items():
            ranks = self._ranks.get(key, [])
            if ranks:
                self._tell_worker(ranks, requests)
            for r in requests:
                self._count(r)
                self.rollups.count_told(r)
                self._compare(r)

    def _by_rank(self, ranks: list[int]) -> dict[int | None, list[int]]:
        return {None: ranks} | {self.workers[n].rank: [n] for n in ranks}

    def _assign(self, ranks: list[int], running: list[Running]) -> None:
        """Finds the own stores of a worker's requests, those in flight included."""
        rank_of = {q.request_id: r.rank for q in running if (r := self.join.open.get(q.request_id)) is not None}
        for rank, numbers in self._by_rank(ranks).items():
            if len(ranks) == 1 and rank is None:
                continue  # the one rank's: in one call, else each call forgets what the other one's requests wait for
            wanted = {rank, None} if len(ranks) == 1 else {rank}
            group = [q for q in running if rank_of[q.request_id] in wanted]
            assign(self.residency, numbers, group, self._tolerance_s, self._stores)
            for q in group:
                other = self.join.open.get(q.request_id)
                flight = None if other is None or other.dispatch is None else other.dispatch.flight
                if q.own is not None and flight is not None and flight.prefilled_s == np.inf:
                    flight.prefilled_s = event_time_s(self.residency, q.own[1])

    def _tell_worker(self, ranks: list[int], requests: list[Request]) -> None:
        asked = self._by_rank(ranks)
        by_id = {r.request_id: r for r in requests}
        for q in sorted((r.running for r in requests if r.running is not None), key=lambda q: q.started_s):
            r = by_id[q.request_id]
            numbers = asked.get(r.rank, [])
            if not numbers:
                continue
            if not self._names_match(r, numbers):
                self.counters["untold"] += 1
                r.told = True
                self._attribute(r, told.HASH_KEYS)
                continue
            clock = r.clock if len(numbers) == 1 else None
            found = look(self.residency, numbers, q, clock)
            hit = found.hit
            self.counters["told" if hit.blocks is not None else "untold"] += 1
            if hit.worker is not None:
                r.rank = self.workers[hit.worker].rank
            if hit.blocks is not None and r.decision is not None and r.decision.block_size is not None:
                r.event_hit_tokens = hit.blocks * r.decision.block_size
            r.told, r.row = True, None
            if found.code == TOLD and hit.worker is not None and r.prompt_tokens is not None:
                preempted = self._preempted_while(hit.worker, r)
                r.loss = told.tell_told(r, found, clock is not None, self.residency, self.uses, self._costs, preempted)
                self._keep_told(r)
            elif found.code == TOLD:
                self._attribute(r, told.NO_NAMES)
            elif told.attributable(r):
                r.loss = told.tell_untold_look(r, found, self._costs)
                self._keep_told(r)

    def _count(self, r: Request) -> None:
        if not r.counted:
            self.rollups.count_request(r)
            r.counted = True

    def _close(self, r: Request, why: str | None = None) -> None:
        """why: events do not tell it."""
        if why is None:
            why = told.NO_DECISION if r.decision is None else told.NO_NAMES if r.running is None else told.NO_EVENTS
        self._attribute(r, why)
        if why == told.CLOSED_EARLY:  # else its content and its flight are still to be known to others
            self._undispatched.pop(r.request_id, None)
        if r.dispatch is not None and r.dispatch.ended_s is None:
            r.dispatch.ended_s, r.dispatch.failed = max(r.written_s, r.dispatch.started_s), True
            self._dispatches.landed(r.dispatch)
        self._rows.setdefault("requests", []).append(request_row(r, closed=True))
        self.join.close(r)

    def open_rows(self) -> pa.Table:
        """Rows of the requests that are not closed yet."""
        rows = []
        for r in self.join.open.values():
            if r.row is None:
                r.row = request_row(r, closed=False)
            rows.append(r.row)
        return from_rows(SCHEMAS["requests"], rows)

    # what is to be written

    def outputs(self) -> dict[str, pa.Table]:
        """New rows by table since `written`. They stay until `written` is called."""
        out = {name: from_rows(SCHEMAS[name], rows) for name, rows in self._rows.items() if rows}
        if self._tables:
            out["kv_events"] = pa.concat_tables(self._tables)
        return out

    def oldest_open_s(self) -> float:
        """Start of the oldest request that is not closed yet (unix seconds); inf: there is none. What is told yet began then or later."""
        return min((s for r in self.join.open.values() if (s := r.started_s) is not None), default=np.inf)

    def take_told(self) -> list[Attributed]:
        """For the analyses; they keep them until they are journaled. In the order of their ends, however many were told at once."""
        told, self.told = sorted(self.told, key=lambda r: (r.ended_s, r.request_id)), []
        return told

    def written(self) -> None:
        self._rows, self._tables, self._dead_bytes = {}, [], 0
        self.loads_changed = False

    def restore(
        self, counters: Mapping[str, int], loads: Sequence[Mapping[str, Any]], spans: Mapping[str, list[list[Any]]] | None = None
    ) -> None:
        """What each commit stored of the small state. After `load`, so that workers keep their numbers."""
        self.counters.update(counters)
        self._kept_spans = dict(spans or {})
        for raw in loads:
            load = WorkerLoad.model_validate(raw)
            who = WorkerId(load.pool, load.worker, load.rank)
            self.loads[who] = load
            self.number(who)

    @property
    def pending_bytes(self) -> int:
        """Of what waits for `written` and can be large."""
        return sum(t.nbytes for t in self._tables) + self._dead_bytes

    # checkpoint

    def save(self) -> dict[str, npt.NDArray[Any]]:
        """State of the KV side, to be `load`ed after a restart and brought up to date by reading again."""
        oldest = min((q.running.started_s for q in self.join.open.values() if q.running is not None), default=np.inf)
        newest = float(self.residency.workers["last_time_s"][: len(self.workers)].max(initial=0.0))
        since_s = min(oldest, newest - 30.0)
        saved = self.residency.save(since_s)
        first = int(saved["heads"][0]) - len(saved["ring"])
        claims = [at for r in self.join.open.values() if r.running is not None for at in r.running.claims]
        saved["ring"]["taken"][[at - first for at in claims if at >= first]] = 0  # open requests claim their stores again
        about = {
            "since_s": since_s,
            "workers": [[w.pool, w.worker, w.rank] for w in self.workers],
            "epochs": [[n, e] for n, e in self._epochs.items()],
            "partitions": [[n, *p] for n, p in self._partition.items()],
        }
        saved["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
        return saved | {LIVES + name: value for name, value in self.lives.save().items()}

    def load(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        about = json.loads(saved["about"].tobytes())
        self.residency.load(saved)
        lives = {name.removeprefix(LIVES): value for name, value in saved.items() if name.startswith(LIVES)}
        if lives:  # else of an earlier version
            self.lives.load(lives)
        for number, who in enumerate(about["workers"]):
            self._register(WorkerId(*who), number)
        if "since_s" in about and len(saved["ring"]) <= len(self.residency.ring):
            self._dispatches.news.known_since(self.residency, about["since_s"])
        self._epochs = dict(about["epochs"])
        self._partition = {n: (t, p) for n, t, p in about["partitions"]}


def _spans(r: Request) -> tuple[Span, ...]:
    return () if r.dispatch is None or r.dispatch.result is None else r.dispatch.result.spans


def _or_none(time_s: float) -> float | None:
    return None if time_s == np.inf else time_s


def _or_inf(time_s: float | None) -> float:
    return np.inf if time_s is None else time_s


def _timeless(batch: Unpacked) -> list[int]:
    """Records whose bridge tells no time: everything here is ordered and counted by time."""
    at_s = batch.bridge_time_s
    return np.flatnonzero(batch.ok & ~((at_s >= 0.0) & (at_s <= LATEST_S))).tolist()


def _believe_times(batch: Unpacked) -> None:
    """Drops (to 0: not known) the times of events that are far from their bridge's: one engine's broken clock is not the fleet's."""
    times = batch.events["time_s"]
    bridge_s = np.repeat(batch.bridge_time_s, np.diff(batch.event_end, prepend=0))
    times[~(np.abs(times - bridge_s) <= MAX_SKEW_S)] = 0.0


def _why_bad(value: bytes) -> str:
    try:
        found = decode(value)
    except BadBatch as e:
        return f"no KV batch: {e}"
    if not 0.0 <= found.bridge_time_s <= LATEST_S:
        return f"no KV batch: bridge time {found.bridge_time_s:g} is no time between 1970 and 2100 in seconds"
    return "no KV batch that can be unpacked"


def _explain(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_input=False)
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'record'}: {e['msg']}" for e in problems[:3])
