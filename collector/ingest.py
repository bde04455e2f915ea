"""The loop: poll -> fold -> commit -> publish. One thread owns all state; a second one writes checkpoints and merges segments.

A commit, in this order; a crash between any two steps loses nothing and doubles nothing:

    1. the new rows of each table become a segment file: written under another name, synced, renamed, folder synced
    2. ONE transaction in state.duckdb: manifest rows, live buckets, offsets (and open records), counters, name of the checkpoint
    3. a new published file is built next to the old one, synced, and renamed over it
    4. files that no longer count are unlinked, once readers of older published files are gone

On start: files that the manifest does not name are removed, state is rebuilt (checkpoint, then reading again without writing; see fold.py),
and reading goes on at the stored offsets (follow.py).

When the disk is nearly full or a write fails, reading pauses (state `paused`) with all rows kept, and the commit is tried again.
When the stream is away, it is tried again with growing waits; what was read is committed and published meanwhile.
"""

from __future__ import annotations

import errno
import logging
import math
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from collector.analytics.analyses import JOURNAL, Closed, entries_after
from collector.analytics.attributed import WINDOW_S
from collector.analytics.contents_journal import CONTENTS
from collector.core import Core
from collector.fold import Fold
from collector.follow import TOPICS, Follower
from collector.health import Health, checks
from collector.join import REMEMBERED
from collector.metrics import Metrics
from collector.rollups import LIVE_COLUMNS
from collector.settings import CollectorSettings
from collector.standing import AsOf, Standing, standings
from collector.status_page import StatusPage
from collector.store.checkpoint import read_checkpoint, sweep_checkpoints
from collector.store.columns import from_rows, micros
from collector.store.lock import FolderInUseError, FolderLock
from collector.store.publish import SCHEMAS, SEGMENTED, Publisher
from collector.store.retention import Keep, expired
from collector.store.segments import Segment, read_segments, sweep, write_segment
from collector.store.state import Commit, State, StateError
from collector.store.upkeep import Upkeep
from collector.warm_up import warm_up
from collector.worker_rows import worker_rows
from schemas.settings import SettingsError
from schemas.stream import BadStreamUrl, Stream, open_stream
from schemas.tables.losses import PRESSURE
from schemas.tables.published import MAJOR, MINOR
from schemas.topics import DECISIONS, KV_EVENTS, OUTCOMES, WORKER_LOAD

log = logging.getLogger(__name__)

PENDING_BYTES = 128 << 20  # uncommitted kv_events rows and dead letters beyond this are committed at once
IDLE_PUBLISHES = 5  # with nothing new, a file is published every so many intervals, so that `published_at` stays fresh
GATHER_S = 0.03  # pause after a small poll, so that records are taken in slices worth a compiled call
LIVE_EVERY_S = 5.0  # age of the analyses' open windows in the published file
COUNT_EVERY_S = 10.0  # of what the caches hold, which reads the whole table: less often where that takes long
COUNT_SHARE = 0.01  # of the time, at most
JOURNALS = (JOURNAL, CONTENTS)
JOURNAL_BYTES = 64 << 20  # a checkpoint is due then, if it is smaller itself
UPKEEP_S = 60.0  # for what is under way when the collector stops
VERSION = metadata.version("warmwatch")


def _nothing(step: str) -> None:
    """Where tests let the process die."""


class Collector:
    """Owns the data folder. `start`, then `turn` again and again, then `stop`."""

    def __init__(
        self,
        settings: CollectorSettings,
        stream: Stream,
        *,
        clock: Callable[[], float] = time.time,
        wait: Callable[[float], object] = time.sleep,
        at_step: Callable[[str], None] = _nothing,
    ) -> None:
        self.settings = settings
        self.health = Health()
        self.metrics = Metrics()
        self._stream = stream
        self._clock, self._wait, self._at_step = clock, wait, at_step
        self._dir = settings.data_dir.resolve()
        self._segments_dir = self._dir / "segments"
        self._checkpoints_dir = self._dir / "checkpoints"
        self._next_commit_s = 0.0
        self._idle = 0
        self._changed = True
        self._upkeep = Upkeep(self._segments_dir, self._checkpoints_dir)
        self._checkpoint: dict[str, Any] = {}
        self._saved_blocks, self._saved_bytes, self._saved_at_s = 0, 0, 0.0
        self._live_tables: dict[int, dict[str, pa.Table]] = {}
        self._live_rows: dict[str, pa.Table] = {}
        self._live_rows_at_s, self._counted_at_s, self._count_next_s = -math.inf, 0.0, 0.0
        self._replay_after: int | None = None
        self._lock: FolderLock | None = None
        self._in_commit: tuple[Commit, list[int]] | None = None

    # start

    def start(self) -> None:
        """Takes the folder, brings the state back, publishes. Raises SettingsError, StateError."""
        s = self.settings
        try:
            self._segments_dir.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self._dir)
        except FolderInUseError as e:
            raise SettingsError(str(e)) from e
        except OSError as e:
            raise SettingsError(
                f"setting `data_dir`: {s.data_dir} cannot be used ({e.strerror}); name a folder that this user may write"
            ) from e
        self._state = State(self._dir / "state.duckdb", {f"live_{name}": columns for name, columns in LIVE_COLUMNS.items()})
        self.manifest = self._state.segments()
        self._retired = self._state.retired()
        self._checkpoint = self._state.meta("checkpoint", {})
        removed = sweep(self._segments_dir, {x.name for x in self.manifest} | self._retired.keys())
        if removed:
            log.info("removed %d files that no commit names", len(removed))
        self.core = Core.of(s)
        self._restore()
        self.follow = Follower(
            s, self._stream, self.core.fold, self.health, self._state.positions(), self._checkpoint.get("offsets", {}),
            clock=self._clock, wait=self._wait,
        )  # fmt: skip
        self.metrics.begin(self.fold.counters)
        try:
            self._publisher = Publisher(self._dir, self._segments_dir)
            self._publish("running")
        except (OSError, duckdb.Error) as e:
            raise SettingsError(
                f"setting `data_dir`: nothing can be written in {s.data_dir} ({str(e).splitlines()[0]}): is the disk full? "
                "Free some space, or name another folder"
            ) from e

    @property
    def fold(self) -> Fold:
        return self.core.fold

    def _restore(self) -> None:
        name = self._checkpoint.get("file")
        if isinstance(name, str):
            try:
                self.core.load(read_checkpoint(self._checkpoints_dir, name))
            except (OSError, ValueError, KeyError) as e:
                self._begin_without(name, int(self._checkpoint.get("number", 0)), e)
        fold = self.core.fold
        self._replay_after = int(self._checkpoint.get("number", 0))
        sweep_checkpoints(self._checkpoints_dir, name if isinstance(name, str) else None)
        fold.rollups.restore({name: self._state.live(f"live_{name}") for name in LIVE_COLUMNS})
        fold.restore(self._state.meta("counters", {}), self._state.meta("loads", []), self._state.meta("spans", {}))
        for start in fold.rollups.workers:
            self._live_tables[start] = fold.rollups.rows(start)
        recent: list[pa.Table] = []
        for segment in [x for x in self.manifest if x.table == "requests"][::-1]:
            if sum(t.num_rows for t in recent) >= REMEMBERED:
                break
            columns = ["request_id", "decision_missing", "outcome_missing"]
            recent.append(pq.ParquetFile(self._segments_dir / segment.name).read(columns=columns))
        if recent:  # the oldest first, since the oldest are forgotten first
            rows = pa.concat_tables(reversed(recent))
            for row in rows.slice(max(0, rows.num_rows - REMEMBERED)).to_pylist():
                fold.join.remember(row["request_id"], row["decision_missing"], row["outcome_missing"])

    def _say(self, what: str) -> None:
        """In the log and in `changes`."""
        log.warning("%s", what)
        self.fold.note(self._clock(), "note", f"collector: {what}")

    def _begin_without(self, checkpoint: str, number: int, error: Exception) -> None:
        """The journal before the checkpoint of this commit is gone with it: what is known again is less than it was, and that is said."""
        self._checkpoint = {}
        self.core = Core.of(self.settings)
        self._say(
            f"the checkpoint {checkpoint} cannot be read ({error}): caches are rebuilt from the stream alone; hotspots, reuse "
            f"curves, divergence, pressure and fitted costs begin with what was told after commit {number}, so windows that were open then "
            "are incomplete; text described before it counts as never seen"
        )
        self.fold.lives.close(self._written_s())  # removals are read again from the oldest on

    def _written_s(self) -> float:
        """Windows of the analyses that ended by then (unix seconds) are segments."""
        return max((s.newest_us / 1e6 + WINDOW_S for s in self.manifest if s.table == PRESSURE.name), default=0.0)

    def _replay(self) -> None:
        """Feeds the analyses what the commits after the checkpoint's told them, in their order. Once, after the kv-events of that time
        were read again, since some of them look uses of blocks up among these."""
        if self._replay_after is None:
            return
        after, self._replay_after = self._replay_after, None
        for segment in [x for x in self.manifest if x.table in JOURNALS and x.hi > after]:
            try:
                rows = read_segments(self._segments_dir, [segment])
                if segment.table == CONTENTS:
                    self.core.contents.replay(rows, after)
                    continue
                entries = entries_after(rows, after)
            except (OSError, pa.ArrowException, KeyError, TypeError) as e:  # the last two: of a version that had other columns
                self._say(f"the journal {segment.name} cannot be read ({e}): hotspots, curves and the like miss its requests")
                continue
            self.core.analyses.replay(entries)
        if self._written_s() > self.core.analyses.closed_s:  # it stood in a journal that cannot be read
            self.core.analyses.replay([Closed(self._written_s())])

    # the loop

    def turn(self) -> None:
        """One round: read, fold, and once an interval commit and publish. Does not raise for trouble of stream or disk."""
        now_s = self._clock()
        if self.health.state == "paused":
            self._commit_and_publish()
            if self.health.state == "paused":
                self._wait(min(1.0, self.settings.publish_interval_s))
            return
        got = self.follow.read(self._next_commit_s)
        now_s = self._clock()
        self.health.rebuilding = bool(self.fold.again)
        if not self.fold.again and self.follow.positions:
            self._replay()
            requests_s = min(self.follow.complete(DECISIONS), self.follow.complete(OUTCOMES))
            kv_s = min(self.follow.complete(KV_EVENTS), self.follow.complete(WORKER_LOAD))
            self.fold.settle(kv_s, self.follow.passed(), requests_s, self.follow.kv_passed())
        if now_s >= self._next_commit_s or self.fold.pending_bytes > PENDING_BYTES:
            self._commit_and_publish()
        elif got < self.settings.poll_records // 8:
            self._wait(GATHER_S)

    # commit and publish

    def _commit_and_publish(self) -> None:
        now_s = self._clock()
        self._next_commit_s = now_s + self.settings.publish_interval_s
        free = shutil.disk_usage(self._dir).free
        if free < self.settings.min_free_bytes:
            self._pause(
                f"only {free >> 20} MiB are free in {self._dir}, less than min_free_bytes ({self.settings.min_free_bytes >> 20} MiB): "
                "free some; reading goes on by itself and nothing is lost"
            )
            self._try_publish(now_s)
            return
        try:
            # While state is rebuilt there is nothing to commit, and positions are behind the stored ones.
            if not self.fold.again and self.follow.positions:
                self._commit(now_s)
        except (OSError, duckdb.Error, pa.ArrowException) as e:
            full = isinstance(e, OSError) and e.errno == errno.ENOSPC
            what = "the disk is full" if full else f"writing failed ({str(e).splitlines()[0]})"
            self._pause(f"{what}: check {self._dir}; the commit is tried again each second and nothing is lost")
            self._recover(e)
            self._try_publish(now_s)
            return
        if self.health.state == "paused":
            log.info("writing works again; reading goes on")
            self.health.state, self.health.reason = "running", ""
        self._try_publish(now_s)

    def _pause(self, reason: str) -> None:
        if self.health.state != "paused":
            log.error("paused: %s", reason)
        self.health.state, self.health.reason = "paused", reason
        self._changed = True

    def _recover(self, error: Exception) -> None:
        """After a failed commit: DuckDB may need opening again; and the transaction may have been committed all the same."""
        try:
            self._state.reopen()
            number = self._state.number
        except (StateError, duckdb.Error, OSError) as e:
            log.error("the state database cannot be opened again yet: %s", e)
            return
        if self._in_commit is not None and number == self._in_commit[0].number:
            self._committed(*self._in_commit)

    def _commit(self, now_s: float) -> None:
        began = time.perf_counter()
        self._replay()
        fold = self.fold
        committed = self._state.number  # raises while the database cannot be used: what became of the last try is not known before
        if self._in_commit is not None and committed == self._in_commit[0].number:
            self._committed(*self._in_commit)
        self._in_commit = None
        number = committed + 1
        newest_complete = min((self.follow.complete(n) for n in TOPICS), default=0.0)
        closing = fold.rollups.closing(newest_complete - self.settings.bucket_close_s)
        for start in fold.rollups.dirty:
            self._live_tables[start] = fold.rollups.rows(start)
        outputs = fold.outputs()
        if closing:
            outputs |= self._published_buckets(closing)
        analyses, contents = self.core.analyses, self.core.contents
        if not self._counted_at_s <= now_s < self._count_next_s:
            counting = time.perf_counter()
            self.core.count_held()
            self._counted_at_s = now_s
            self._count_next_s = now_s + max(COUNT_EVERY_S, (time.perf_counter() - counting) / COUNT_SHARE)
        analyses.take(fold.take_told())
        analyses.close(min(newest_complete - self.settings.bucket_close_s, fold.oldest_open_s()))
        outputs |= {table: from_rows(SCHEMAS[table], rows) for table, rows in analyses.outputs().items()}
        outputs |= {JOURNAL: analyses.journal(number), CONTENTS: contents.journal(number)}
        removed: list[Segment] = []
        merged = self._upkeep.take_merged(self.manifest)
        if merged is not None:
            removed += merged[0]
        gone = expired([s for s in self.manifest if s not in removed], self._keep(), now_s)
        removed += gone
        added = [] if merged is None else [merged[1]]
        # 1. segments
        for table, rows in outputs.items():
            if rows.num_rows:
                self._at_step(f"before segment {table}")
                added.append(write_segment(self._segments_dir, table, number, number, rows))
        self._at_step("segments written")
        # 2. the transaction
        live = sorted(fold.rollups.dirty | set(closing))
        meta: dict[str, object] = {"counters": dict(fold.counters), "spans": fold.spans()}
        checkpoint = self._upkeep.take_saved()
        if checkpoint is not None:
            meta["checkpoint"] = checkpoint
            removed += [s for s in self.manifest if s.table in JOURNALS and s.hi <= checkpoint["number"] and s not in removed]
        if fold.loads_changed:
            meta["loads"] = [x.model_dump(mode="json") for x in fold.loads.values()]
        # By the time of the published file, since the one of before still names them when publishing fails.
        unlinked = [n for n, at_s in self._retired.items() if at_s + self.settings.reader_grace_s < self.health.published_at_s]
        for name in unlinked:
            (self._segments_dir / name).unlink(missing_ok=True)
        change = Commit(
            number, self.follow.current_positions(), added, removed, now_s, unlinked, meta, self._live_change(live, set(closing))
        )  # fmt: skip
        self._in_commit = change, closing
        self._at_step("before transaction")
        self._state.commit(change)
        self._at_step("transaction committed")
        self._committed(change, closing)
        if checkpoint is not None:
            self._upkeep.sweep(checkpoint["file"])
        self._begin_upkeep(now_s)
        self.health.commit_s = time.perf_counter() - began

    def _committed(self, change: Commit, closed: list[int]) -> None:
        """Memory follows the transaction. closed: live buckets that are segments now."""
        gone = {(s.table, s.lo, s.hi) for s in change.removed}
        self.manifest = [s for s in self.manifest if (s.table, s.lo, s.hi) not in gone] + list(change.added)
        for s in change.removed:
            self._retired[s.name] = change.retired_at_s
        for name in change.unlinked:
            self._retired.pop(name, None)
        self._changed |= bool(change.added or change.removed or change.live)
        if self.core.analyses.outputs():
            self._live_rows_at_s = -math.inf  # these rows are in segments now, and would count twice
        self.fold.written()
        self.core.analyses.written()
        self.core.contents.written()
        self.fold.rollups.dirty.clear()
        self.fold.rollups.drop(closed)
        for start in closed:
            self._live_tables.pop(start, None)
        if "checkpoint" in change.meta:
            self._checkpoint = change.meta["checkpoint"]
        self.metrics.committed(change)
        self._in_commit = None

    def _live_change(self, buckets: list[int], closing: set[int]) -> dict[str, tuple[list[int], pa.Table]]:
        if not buckets:
            return {}
        starts = [b * 1_000_000 for b in buckets]
        kept = [b for b in buckets if b not in closing]
        none = {name: rows.slice(0, 0) for name, rows in self._live_tables[buckets[0]].items()}
        return {
            f"live_{name}": (starts, pa.concat_tables([self._live_tables[b][name] for b in kept] or [none[name]])) for name in LIVE_COLUMNS
        }

    def _published_buckets(self, buckets: Iterable[int]) -> dict[str, pa.Table]:
        """Rows of live buckets, by table, with the published columns."""
        tables = [self._live_tables[b] for b in buckets]
        return {name: pa.concat_tables([t[name].select(SCHEMAS[name].names) for t in tables]) for name in LIVE_COLUMNS if tables}

    def _try_publish(self, now_s: float) -> None:
        # 3. the published file
        self._idle += 1
        if not (self._changed or self.follow.changed) and self._idle < IDLE_PUBLISHES:
            return
        try:
            self._publish(self.health.state)
            self.health.publish_trouble = ""
        except (OSError, duckdb.Error, pa.ArrowException) as e:
            if not self.health.publish_trouble:
                log.error("the published file could not be written; readers keep the one before: %s", e)
            self.health.publish_trouble = str(e).splitlines()[0]

    def _publish(self, state: str) -> None:
        began = time.perf_counter()
        now_s = self._clock()
        fold = self.fold
        has = [fold.counters[f"records/{name}"] > 0 for name in (KV_EVENTS, DECISIONS, OUTCOMES, WORKER_LOAD)]
        complete_s = min(self.follow.complete(n) for n in TOPICS)
        watermark = micros(complete_s - self.settings.lateness_s) if complete_s and any(has) else None
        stand = self._standings(now_s)
        found = checks(fold, self.health, stand, self.follow.stream_time_s, resident_bytes(), now_s)
        self._at_step("before publish")
        self._publisher.publish(
            self.manifest,
            {
                "requests": fold.open_rows(),
                **self._published_buckets(sorted(self._live_tables)),
                **self._analyses_rows(now_s),
                "workers": from_rows(SCHEMAS["workers"], worker_rows(fold, stand)),
                "data_health": from_rows(SCHEMAS["data_health"], [c.row(now_s) for c in found]),
                "published": from_rows(SCHEMAS["published"], [(micros(now_s), watermark, f"{MAJOR}.{MINOR}", VERSION, *has, state)]),
            },
        )
        self._at_step("published")
        self.health.published_at_s, self.health.publish_s = now_s, time.perf_counter() - began
        self._changed = self.follow.changed = False
        self._idle = 0
        self.metrics.published(fold, self.health, found, stand)

    def _analyses_rows(self, now_s: float) -> dict[str, pa.Table]:
        """Rows of the analyses' open windows; made anew every few seconds, since some take a while to make.

        None before the journal was fed again: windows that the checkpoint holds open may be segments by now."""
        if self._replay_after is not None:
            return {}
        if not 0 <= now_s - self._live_rows_at_s < LIVE_EVERY_S:
            self._live_rows_at_s = now_s
            self._live_rows = {table: from_rows(SCHEMAS[table], rows) for table, rows in self.core.analyses.live().items()}
        return self._live_rows

    def _standings(self, now_s: float) -> list[Standing]:
        read_until_s = min(self.follow.complete(KV_EVENTS), self.follow.complete(WORKER_LOAD))
        return standings(self.fold, AsOf(now_s, read_until_s, self.settings.stale_after_s, self.settings.blind_after_s))

    # checkpoints, merges, retention

    def _begin_upkeep(self, now_s: float) -> None:
        self._upkeep.merge(self.manifest)
        if not self._upkeep.saving and self._wants_checkpoint(now_s):
            self._save(now_s)

    def _save(self, now_s: float) -> None:
        state = self.core.save()
        self._saved_blocks, self._saved_at_s = self.fold.block_events, now_s
        self._saved_bytes = sum(a.nbytes for a in state.values())
        self._upkeep.save(self._state.number, state, self._kv_offsets())

    def _wants_checkpoint(self, now_s: float) -> bool:
        new = self.fold.block_events - self._saved_blocks
        journal_bytes = sum(s.size_bytes for s in self.manifest if s.table in JOURNALS)
        if new <= 0 and not journal_bytes:
            return False
        if not self._saved_at_s:
            self._saved_at_s = now_s
        # A checkpoint writes all that is held: not more often than as much has been read, or told.
        much = max(self.settings.checkpoint_blocks, self.fold.residency.used_slots)
        much_told = max(JOURNAL_BYTES, self._saved_bytes)
        return new >= much or journal_bytes >= much_told or now_s - self._saved_at_s >= self.settings.checkpoint_interval_s

    def _kv_offsets(self) -> dict[str, int]:
        topic = self.settings.topic_prefix + KV_EVENTS
        return {f"{t}/{p}": offset for (t, p), offset in self.follow.positions.items() if t == topic}

    def _keep(self) -> dict[str, Keep]:
        s = self.settings
        keep = {t.name: Keep(s.keep_s, s.keep_bytes) for t in SEGMENTED}
        keep["kv_events"] = Keep(s.kv_events_keep_s, s.kv_events_keep_bytes)
        keep |= dict.fromkeys(JOURNALS, Keep(math.inf, 1 << 62))  # they go with the next checkpoint
        return keep

    # stop

    @property
    def ready(self) -> tuple[bool, str]:
        """For /readyz: the stream is read, writing works, and the published file is fresh."""
        h = self.health
        if h.state == "paused":
            return False, h.reason
        if h.stream_trouble:
            return False, f"stream: {h.stream_trouble}"
        if h.rebuilding:
            return False, "state is being rebuilt from the stream"
        if h.publish_trouble:
            return False, f"publishing: {h.publish_trouble}"
        age_s = self._clock() - h.published_at_s
        if age_s > 10 * self.settings.publish_interval_s + 5:
            return False, f"the published file is {age_s:.0f} s old"
        return True, "reading, and the published file is fresh"

    def stop(self) -> None:
        """A last commit, with a checkpoint so that the next start is quick, and a last file with state `stopped`."""
        try:
            now_s = self._clock()
            self._upkeep.wait(UPKEEP_S)
            if not self.fold.again and self.follow.positions:
                self._commit(now_s)
                journaled = any(s.table in JOURNALS for s in self.manifest)
                if not self._upkeep.saving and (self.fold.block_events > self._saved_blocks or journaled):
                    self._save(now_s)
                if self._upkeep.saving:
                    self._upkeep.wait(UPKEEP_S)
                    self._commit(now_s)
            self._live_rows_at_s = -math.inf  # this file stays for long
            self._publish("stopped")
        except (OSError, duckdb.Error, pa.ArrowException, TimeoutError) as e:
            log.error("the last commit failed (%s); the next start reads these records again, nothing is lost", e)
        finally:
            self.close()

    def close(self) -> None:
        """Lets go of everything without a last commit, as a crash would."""
        self._upkeep.close()
        for name in ("follow", "_publisher", "_state"):
            part = getattr(self, name, None)
            if part is not None:
                part.close()
        if self._lock is not None:
            self._lock.release()


def resident_bytes() -> int:
    """Memory of this process now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(settings: CollectorSettings) -> int:
    """`warmwatch collect`: until SIGTERM or SIGINT. Returns 0; raises SettingsError for what has to be set otherwise."""
    try:
        stream = open_stream(settings.stream)
    except BadStreamUrl as e:
        raise SettingsError(f"setting `stream`: {e}") from e
    settings.cost_model()  # what is wrong in the fleet file is said at once, not after the kernels are compiled
    warm_up(log.info)  # before signals wait for the end of a turn: a minute would be too long, and nothing is begun yet
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    with stream:
        collector = Collector(settings, stream, wait=stopping.wait)
        try:
            collector.start()
        except StateError as e:
            collector.close()
            raise SettingsError(f"setting `data_dir`: {e}") from e
        except BaseException:
            collector.close()
            raise
        page = None
        try:
            page = StatusPage(settings.metrics_host, settings.metrics_port, collector.metrics.registry, lambda: collector.ready)
            log.info("collecting from %s into %s; status on %s/readyz", settings.stream, settings.data_dir, page.url)
            print(f"READY metrics={page.url}", flush=True)
            while not stopping.is_set():
                collector.turn()
        finally:
            collector.stop()
            if page is not None:
                page.close()
    return 0
