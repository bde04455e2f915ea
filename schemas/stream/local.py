"""The stream on one machine without Kafka: a durable log in one SQLite file, for several processes at once.

    topics      name, identity, partitions, retention, limit
    partitions  uid, topic, partition, start_offset, next_offset, held_bytes
    records     id = uid * 2^40 + offset (the rowid), timestamp_ms, key, value, headers

The composite rowid makes an append an insert at the end of a partition's own range and a read one range scan, without an index beside
the table. Write-ahead logging lets readers go on while a writer commits. Writers take turns with BEGIN IMMEDIATE; a batch (some
milliseconds of appends) is one transaction: records and next_offset move together, so a killed writer leaves a batch either whole or
absent.

Durability: each commit is synced (`durability=full`), so offsets that a reader has seen survive a power cut, which a collector relies on
when it stores them elsewhere. `durability=process` survives kill -9 but not a power cut, and saves the fsync.

Options of the address (`local:/path/log.sqlite?durability=process&max_bytes=2000000000`):

    durability  full (default) | process
    max_bytes   the file's own limit; beyond it appends are StreamUnavailable until retention frees room. Default: none

Limits: one machine (never on a network file system: WAL needs shared memory); deleted records free room inside the file, which does not
shrink; about 10^12 records a partition.

Rejected: a file of our own format with an index (torn tails, locks and page cache are what SQLite has solved); a row per batch (cheaper,
but offsets inside a row need decoding on every read); WITHOUT ROWID (slow for values over a few hundred bytes).
"""

from __future__ import annotations

import sqlite3
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from schemas.stream.base import (
    BadStreamUrl,
    Headers,
    OffsetOutOfRange,
    Partition,
    Reader,
    RecordTooLarge,
    Slice,
    StoredRecord,
    StreamError,
    StreamUnavailable,
    TopicSpec,
    UnknownTopic,
)
from schemas.stream.buffer import BufferedStream, Delivery, Pending, Refused
from schemas.stream.partitioning import partition_of

APPLICATION_ID = 0x57574C47  # "WWLG": tells our file from any other SQLite file
SCHEMA_VERSION = 1
OFFSET_BITS = 40
PAGE_BYTES = 8192
BUSY_S = 5.0
RETENTION_CHUNK = 2000
RETENTION_BUDGET_S = 0.25  # of each second: deletes keep pace with about 100k records/s and never hold the lock for long
IDLE_MIN_S = 0.001
IDLE_MAX_S = 0.02
REPLACED_CHECK_S = 1.0

_SCHEMA = (
    """CREATE TABLE topics (
         topic_id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, identity TEXT NOT NULL, partitions INTEGER NOT NULL,
         retention_s REAL, retention_bytes INTEGER, max_record_bytes INTEGER NOT NULL)""",
    """CREATE TABLE partitions (
         uid INTEGER PRIMARY KEY, topic_id INTEGER NOT NULL REFERENCES topics, partition INTEGER NOT NULL,
         start_offset INTEGER NOT NULL DEFAULT 0, next_offset INTEGER NOT NULL DEFAULT 0, held_bytes INTEGER NOT NULL DEFAULT 0,
         UNIQUE (topic_id, partition))""",
    "CREATE TABLE records (id INTEGER PRIMARY KEY, timestamp_ms INTEGER NOT NULL, key BLOB, value BLOB, headers BLOB)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
_SIZE = "length(key) + length(value) + coalesce(length(headers), 0)"


class LocalStream(BufferedStream):
    """See base.Stream."""

    def __init__(self, path: Path, options: Mapping[str, str]) -> None:
        self._path = path.absolute()
        super().__init__(str(self._path))
        self._synchronous, self._max_bytes = _parse_options(path, options)
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._specs: dict[str, TopicSpec] = {}

    def __repr__(self) -> str:
        return f"<LocalStream {self._path}>"

    def ensure_topics(self, specs: Iterable[TopicSpec]) -> None:
        specs = list(specs)
        self._specs.update((spec.name, spec) for spec in specs)  # first: a writer creates them when the file can be used again
        with self._use() as db:
            _ensure_topics(db, specs)

    def partitions(self, topic: str) -> int:
        return len(self._offsets(topic))

    def start_offsets(self, topic: str) -> dict[int, int]:
        return {partition: start for partition, start, _, _ in self._offsets(topic)}

    def end_offsets(self, topic: str) -> dict[int, int]:
        return {partition: end for partition, _, end, _ in self._offsets(topic)}

    def held_bytes(self, topic: str) -> int | None:
        return sum(held for _, _, _, held in self._offsets(topic))

    def identity(self, topic: str) -> str | None:
        with self._use() as db:
            for (identity,) in db.execute("SELECT identity FROM topics WHERE name = ?", (topic,)):
                return str(identity)
        raise UnknownTopic(topic)

    def delete_before(self, topic: str, offsets: Mapping[int, int]) -> None:
        self._offsets(topic)
        with self._use() as db:
            for partition, offset in offsets.items():
                uid = _uid(db, (topic, partition))
                while _delete_chunk(db, uid, offset):
                    pass

    def apply_retention(self, now_ms: int, budget_s: float = 60.0) -> None:
        """What each writer's thread does about once a second; stops after budget_s and goes on the next time."""
        with self._use() as db:
            _apply_retention(db, now_ms, budget_s)

    def _new_delivery(self) -> Delivery:
        return _LocalDelivery(self._connect, self._specs)

    def _new_reader(self) -> Reader:
        return LocalReader(self._connect)

    def _disconnect(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _connect(self) -> _Connection:
        return _Connection(self._path, self._synchronous, self._max_bytes)

    @contextmanager
    def _use(self) -> Iterator[_Connection]:
        with self._lock:
            if self._connection is not None and self._connection.replaced():
                self._connection.close()
                self._connection = None
            if self._connection is None:
                self._connection = self._connect()
            yield self._connection

    def _offsets(self, topic: str) -> list[tuple[int, int, int, int]]:
        """(partition, start, end, held bytes) of each partition."""
        with self._use() as db:
            rows = db.execute(
                "SELECT partition, start_offset, next_offset, held_bytes FROM partitions JOIN topics USING (topic_id) "
                "WHERE name = ? ORDER BY partition",
                (topic,),
            )
        if not rows:
            raise UnknownTopic(topic)
        return rows


class _Connection:
    """One SQLite connection; SQLite's errors become StreamUnavailable that says what to do."""

    def __init__(self, path: Path, synchronous: str, max_bytes: int | None) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise self._unavailable(error) from error
        try:
            with self.mapped():
                self._set_up(synchronous, max_bytes)
                self._inode = path.stat().st_ino
        except BaseException:
            self._db.close()
            raise

    def execute(self, sql: str, values: Sequence[object] = ()) -> list[tuple]:  # type: ignore[type-arg]  # columns differ
        with self.mapped():
            return self._db.execute(sql, values).fetchall()

    def executemany(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        with self.mapped():
            self._db.executemany(sql, rows)

    @contextmanager
    def transaction(self, kind: str) -> Iterator[None]:
        self.execute(f"BEGIN {kind}")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.rollback()
            raise

    def replaced(self) -> bool:
        """True when the path no longer names the file that is open: what is appended to that would be lost."""
        try:
            return self.path.stat().st_ino != self._inode
        except OSError:
            return True

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def mapped(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise self._unavailable(error) from error

    def _set_up(self, synchronous: str, max_bytes: int | None) -> None:
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                self._refuse_foreign()  # first: the next line would write to another program's database
                self._db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
                self._db.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError as error:
                # SQLite does not wait for the lock here, when two processes make the file at once.
                if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        self._db.execute(f"PRAGMA synchronous = {synchronous}")
        self._db.execute("PRAGMA wal_autocheckpoint = 2000")
        self._db.execute(f"PRAGMA journal_size_limit = {64 * 1024 * 1024}")
        if max_bytes is not None:
            self._db.execute(f"PRAGMA max_page_count = {max(1, max_bytes // PAGE_BYTES)}")
        if self._pragma("user_version") != SCHEMA_VERSION:
            self._create()

    def _create(self) -> None:
        with self.transaction("IMMEDIATE"):
            if self._pragma("user_version") == SCHEMA_VERSION:
                return  # another process was faster
            self._refuse_foreign()
            for statement in _SCHEMA:
                self._db.execute(statement)

    def _refuse_foreign(self) -> None:
        # In this order, since another process may create the log meanwhile: what has tables has its version, too.
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        version = self._pragma("user_version")
        ours = version == SCHEMA_VERSION and self._pragma("application_id") == APPLICATION_ID
        if not ours and (version or tables):
            raise StreamUnavailable(
                f"{self.path} holds something else than a log of version {SCHEMA_VERSION}: give the stream another path, "
                "or move the file aside to start an empty log"
            )

    def _pragma(self, name: str) -> int:
        return int(self._db.execute(f"PRAGMA {name}").fetchone()[0])

    def _unavailable(self, error: Exception) -> StreamUnavailable:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        what = {
            sqlite3.SQLITE_FULL: "the disk (or the log's max_bytes) is full: free room or raise the limit; appends go on by themselves",
            sqlite3.SQLITE_BUSY: f"another process has held the lock for {BUSY_S:g} s: it goes on by itself unless that process hangs",
            sqlite3.SQLITE_NOTADB: "this is not an SQLite file: give the stream another path, or move the file aside",
            sqlite3.SQLITE_CORRUPT: "the file is damaged: stop all processes, move it and its -wal file aside, and start again",
            sqlite3.SQLITE_READONLY: "the file or its folder is read-only: give this user write access",
            sqlite3.SQLITE_CANTOPEN: "the file cannot be opened: check the folder and its permissions",
            sqlite3.SQLITE_IOERR: "reading or writing failed: check the disk and its free space",
        }.get(code, "the file cannot be used: check the folder, its permissions and free space")
        return StreamUnavailable(f"{self.path}: {what} ({error})")


class _LocalDelivery:
    def __init__(self, connect: Callable[[], _Connection], specs: Mapping[str, TopicSpec]) -> None:
        self._connect = connect
        self._specs = specs
        self._db: _Connection | None = None

    def check(self, topic: str, size_bytes: int) -> None:
        spec = self._specs.get(topic)
        if spec is not None and size_bytes > spec.max_record_bytes:
            raise RecordTooLarge(spec.max_record_bytes, size_bytes)

    def deliver(self, batch: Sequence[Pending], report: Callable[[StreamError | None], None], give_up: threading.Event) -> Refused:
        db = self._open()
        with db.transaction("IMMEDIATE"):
            return _insert(db, batch)

    def tend(self) -> None:
        db = self._open()
        _apply_retention(db, time.time_ns() // 1_000_000, RETENTION_BUDGET_S)

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _open(self) -> _Connection:
        if self._db is not None and self._db.replaced():
            self.close()
        if self._db is None:
            db = self._connect()
            try:
                _ensure_topics(db, list(self._specs.values()))
            except BaseException:
                db.close()
                raise
            self._db = db
        return self._db


class LocalReader:
    """See base.Reader. Idle, it looks at SQLite's data_version every 1 to 20 ms, a read of shared memory."""

    def __init__(self, connect: Callable[[], _Connection]) -> None:
        self._connect = connect
        self._db: _Connection | None = None
        self._positions: dict[Partition, int] = {}
        self._uids: dict[Partition, int] = {}
        self._identities: dict[str, str] = {}
        self._paused: set[Partition] = set()
        self._seen_version = -1
        self._more = True
        self._checked_at = 0.0

    def assign(self, offsets: Mapping[Partition, int]) -> None:
        db = self._open(same_topics=False)
        try:
            with db.transaction("DEFERRED"):
                uids = {part: _uid(db, part) for part in offsets}
                identities = dict(db.execute("SELECT name, identity FROM topics"))
                bounds = _bounds(db, uids.values())
            for part, offset in offsets.items():
                _check_offset(part, offset, *bounds[uids[part]])
        except BaseException:
            self.close()  # the file may be another one: the next poll looks whether the old assignment still fits
            raise
        self._positions, self._uids, self._identities = dict(offsets), uids, identities
        self._paused = set()
        self._more = True

    def poll(self, timeout_s: float, max_records: int) -> list[Slice]:
        deadline = time.monotonic() + timeout_s
        idle_s = IDLE_MIN_S
        while True:
            db = self._open()
            version = db.execute("PRAGMA data_version")[0][0]
            if self._more or version != self._seen_version:
                slices = self._read(db, max_records)
                self._seen_version = version  # seen before the read, so that a commit in between is read next time
                self._more = bool(slices)
                if slices:
                    return slices
            now = time.monotonic()
            if now >= deadline:
                return []
            time.sleep(min(idle_s, deadline - now))
            idle_s = min(idle_s * 2, IDLE_MAX_S)

    def pause(self, parts: Iterable[Partition]) -> None:
        self._paused.update(map(self._assigned, parts))

    def resume(self, parts: Iterable[Partition]) -> None:
        self._paused.difference_update(map(self._assigned, parts))
        self._more = True

    def seek(self, part: Partition, offset: int) -> None:
        self._positions[self._assigned(part)] = offset
        self._more = True

    def position(self, part: Partition) -> int:
        return self._positions[self._assigned(part)]

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _assigned(self, part: Partition) -> Partition:
        if part not in self._positions:
            raise ValueError(f"{part[0]}[{part[1]}] is not assigned to this reader")
        return part

    def _open(self, same_topics: bool = True) -> _Connection:
        now = time.monotonic()
        if self._db is not None and now - self._checked_at >= REPLACED_CHECK_S:
            self._checked_at = now
            if self._db.replaced():
                self.close()
        if self._db is None:
            db = self._connect()
            try:
                if same_topics:
                    self._require_same_topics(db)
            except BaseException:
                db.close()
                raise
            self._db = db
            self._checked_at = now
            self._seen_version = -1
            self._more = True
        return self._db

    def _require_same_topics(self, db: _Connection) -> None:
        """A file made anew under the same path must not be read on at the old offsets."""
        found = dict(db.execute("SELECT name, identity FROM topics"))
        for part, position in self._positions.items():
            if part[0] not in found:
                raise UnknownTopic(part[0])
            if found[part[0]] != self._identities[part[0]]:
                start, end = _bounds(db, [uid := _uid(db, part)])[uid]
                raise OffsetOutOfRange(*part, position, start, end, why="the log was made anew; assign again")

    def _read(self, db: _Connection, max_records: int) -> list[Slice]:
        active = [part for part in self._positions if part not in self._paused]
        slices: list[Slice] = []
        with db.transaction("DEFERRED"):
            bounds = _bounds(db, [self._uids[part] for part in active])
            for part in active:
                _check_offset(part, self._positions[part], *bounds[self._uids[part]])
            for part in active:
                uid, position = self._uids[part], self._positions[part]
                if position == bounds[uid][1] or max_records <= 0:
                    continue
                base = uid << OFFSET_BITS
                rows = db.execute(
                    "SELECT id - ?, timestamp_ms, key, value, headers FROM records WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
                    (base, base + position, base + bounds[uid][1], max_records),
                )
                slices.append(Slice(*part, [_record(row) for row in rows]))
                max_records -= len(rows)
        for topic, partition, records in slices:
            # The partition goes to the end of the line, so that a busy one cannot starve the others.
            del self._positions[topic, partition]
            self._positions[topic, partition] = records[-1].offset + 1
        return slices


def _parse_options(path: Path, options: Mapping[str, str]) -> tuple[str, int | None]:
    rest = dict(options)
    durability = rest.pop("durability", "full")
    max_bytes = rest.pop("max_bytes", None)
    if durability not in ("full", "process"):
        raise BadStreamUrl(f"local:{path}: durability={durability!r} must be 'full' or 'process'")
    if max_bytes is not None and not (max_bytes.isdecimal() and int(max_bytes) >= 10 * PAGE_BYTES):
        raise BadStreamUrl(f"local:{path}: max_bytes={max_bytes!r} must be a number of bytes, at least {10 * PAGE_BYTES}")
    if rest:
        raise BadStreamUrl(f"local:{path}: unknown option {', '.join(rest)}: durability and max_bytes are known")
    return ("FULL" if durability == "full" else "NORMAL"), (int(max_bytes) if max_bytes else None)


def _ensure_topics(db: _Connection, specs: Sequence[TopicSpec]) -> None:
    if specs:
        with db.transaction("IMMEDIATE"):
            for spec in specs:
                _ensure_topic(db, spec)


def _ensure_topic(db: _Connection, spec: TopicSpec) -> None:
    settings = (spec.retention_s, spec.retention_bytes, spec.max_record_bytes)
    if db.execute("SELECT 1 FROM topics WHERE name = ?", (spec.name,)):
        db.execute(
            "UPDATE topics SET retention_s = ?, retention_bytes = ?, max_record_bytes = ? WHERE name = ?",
            (*settings, spec.name),
        )
        return
    db.execute(
        "INSERT INTO topics (name, identity, partitions, retention_s, retention_bytes, max_record_bytes) VALUES (?, ?, ?, ?, ?, ?)",
        (spec.name, uuid.uuid4().hex, spec.partitions, *settings),
    )
    for partition in range(spec.partitions):
        db.execute("INSERT INTO partitions (topic_id, partition) SELECT topic_id, ? FROM topics WHERE name = ?", (partition, spec.name))


def _uid(db: _Connection, part: Partition) -> int:
    for (uid,) in db.execute("SELECT uid FROM partitions JOIN topics USING (topic_id) WHERE name = ? AND partition = ?", part):
        return int(uid)
    if db.execute("SELECT 1 FROM topics WHERE name = ?", (part[0],)):
        raise UnknownTopic(f"{part[0]}[{part[1]}]")
    raise UnknownTopic(part[0])


def _bounds(db: _Connection, uids: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Partition uid -> (start, end)."""
    uids = list(uids)
    marks = ",".join("?" * len(uids))
    rows = db.execute(f"SELECT uid, start_offset, next_offset FROM partitions WHERE uid IN ({marks})", uids)  # noqa: S608 only marks
    return {uid: (start, end) for uid, start, end in rows}


def _check_offset(part: Partition, offset: int, start: int, end: int) -> None:
    if not start <= offset <= end:
        raise OffsetOutOfRange(*part, offset, start, end)


def _insert(db: _Connection, batch: Sequence[Pending]) -> Refused:
    """Append the batch inside the caller's transaction; returns what no topic takes."""
    topics = {name: (count, limit) for name, count, limit in db.execute("SELECT name, partitions, max_record_bytes FROM topics")}
    wanted = {record[0] for record in batch} & topics.keys()
    state = {
        (name, partition): [uid << OFFSET_BITS, next_offset, 0]
        for name, partition, uid, next_offset in db.execute(
            "SELECT name, partition, uid, next_offset FROM partitions JOIN topics USING (topic_id)"
        )
        if name in wanted
    }
    refused: Refused = []
    rows: list[tuple[int, int, bytes, bytes, bytes | None]] = []
    for pending in batch:
        name, key, value, headers, timestamp_ms, size = pending
        topic = topics.get(name)
        if topic is None:
            refused.append((pending, UnknownTopic(name)))
            continue
        if size > topic[1]:
            refused.append((pending, RecordTooLarge(topic[1], size)))
            continue
        at = state[name, partition_of(key, topic[0])]
        packed = _pack_headers(headers) if headers else None
        rows.append((at[0] + at[1], timestamp_ms, key, value, packed))
        at[1] += 1
        at[2] += len(key) + len(value) + (len(packed) if packed else 0)
    db.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?)", rows)
    db.executemany(
        "UPDATE partitions SET next_offset = ?, held_bytes = held_bytes + ? WHERE uid = ?",
        [(next_offset, added, base >> OFFSET_BITS) for base, next_offset, added in state.values() if added],
    )
    return refused


def _apply_retention(db: _Connection, now_ms: int, budget_s: float) -> None:
    deadline = time.monotonic() + budget_s
    rows = db.execute(
        "SELECT uid, retention_s, retention_bytes FROM partitions JOIN topics USING (topic_id) "
        "WHERE retention_s IS NOT NULL OR retention_bytes IS NOT NULL ORDER BY random()"  # one that takes all the time starves no other
    )
    for uid, retention_s, retention_bytes in rows:
        oldest_ms = None if retention_s is None else now_ms - int(retention_s * 1000)
        while time.monotonic() < deadline:
            keep_from = _first_kept(db, uid, oldest_ms, retention_bytes)
            if keep_from is None:
                break
            _delete_chunk(db, uid, keep_from)


def _first_kept(db: _Connection, uid: int, oldest_ms: int | None, retention_bytes: int | None) -> int | None:
    """Offset of the oldest record to keep, looking one chunk ahead; None when nothing has to go."""
    start, held = db.execute("SELECT start_offset, held_bytes FROM partitions WHERE uid = ?", (uid,))[0]
    base = uid << OFFSET_BITS
    keep_from = start
    if retention_bytes is None or held <= retention_bytes:  # most sweeps find nothing: one row tells
        span = (base, base + (1 << OFFSET_BITS))
        first = db.execute("SELECT timestamp_ms FROM records WHERE id >= ? AND id < ? ORDER BY id LIMIT 1", span)
        if not first or oldest_ms is None or first[0][0] >= oldest_ms:
            return None
    for record_id, timestamp_ms, size in db.execute(
        f"SELECT id, timestamp_ms, {_SIZE} FROM records WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",  # noqa: S608 a constant
        (base + start, base + (1 << OFFSET_BITS), RETENTION_CHUNK),
    ):
        too_old = oldest_ms is not None and timestamp_ms < oldest_ms
        too_much = retention_bytes is not None and held > retention_bytes
        if not (too_old or too_much):
            break
        held -= size
        keep_from = record_id - base + 1
    return keep_from if keep_from > start else None


def _delete_chunk(db: _Connection, uid: int, before: int) -> bool:
    """Delete at most RETENTION_CHUNK records below offset `before` in one transaction; True when some are left."""
    base = uid << OFFSET_BITS
    with db.transaction("IMMEDIATE"):
        start, end = db.execute("SELECT start_offset, next_offset FROM partitions WHERE uid = ?", (uid,))[0]
        stop = min(before, end, start + RETENTION_CHUNK)
        if stop <= start:
            return False
        span = (base + start, base + stop)
        freed = db.execute(f"SELECT coalesce(sum({_SIZE}), 0) FROM records WHERE id >= ? AND id < ?", span)[0][0]  # noqa: S608
        db.execute("DELETE FROM records WHERE id >= ? AND id < ?", span)
        db.execute("UPDATE partitions SET start_offset = ?, held_bytes = held_bytes - ? WHERE uid = ?", (stop, freed, uid))
        return bool(stop < min(before, end))


def _record(row: tuple[int, int, bytes, bytes, bytes | None]) -> StoredRecord:
    packed = row[4]
    return StoredRecord(row[0], row[1], row[2], row[3], _unpack_headers(packed) if packed else ())


def _pack_headers(headers: Headers) -> bytes:
    """(u16 name length, name, u32 content length, content) for each, little-endian."""
    parts: list[bytes] = []
    for name, content in headers:
        encoded = name.encode()
        parts += (struct.pack("<H", len(encoded)), encoded, struct.pack("<I", len(content)), content)
    return b"".join(parts)


def _unpack_headers(packed: bytes) -> Headers:
    headers: list[tuple[str, bytes]] = []
    at = 0
    while at < len(packed):
        (length,) = struct.unpack_from("<H", packed, at)
        name = packed[at + 2 : at + 2 + length].decode()
        at += 2 + length
        (length,) = struct.unpack_from("<I", packed, at)
        headers.append((name, packed[at + 4 : at + 4 + length]))
        at += 4 + length
    return tuple(headers)
