"""The stream between processes: append records to a topic partition, read them from an offset.

Three implementations keep one contract (tests/schemas/stream/test_contract.py): `kafka.py`, `local.py` (one SQLite file for one
machine) and `memory.py` (tests). The interface is Kafka's without its consumer groups: a reader keeps its offsets in its own
store, beside what it made of the records, because only one transaction over both gives exactly-once.

    open_stream(url) -> Stream --+-- ensure_topics, partitions, start_offsets, end_offsets, identity
                                 +-- writer() -> Writer   append (buffered, never blocks), flush
                                 +-- reader() -> Reader   assign at offsets, poll

Order holds per partition, and per key, since the key chooses the partition (Kafka's murmur2) as long as a topic keeps its number of
partitions. Times are Unix milliseconds; a record's timestamp is what retention by age looks at.

Errors (foreign ones are mapped once, with `raise ... from`):

    StreamError
     +-- BadStreamUrl (also a ValueError)   the setting names no stream we can open; says what would be right
     +-- StreamUnavailable                  broker away, file locked, full or corrupt; says what to do; trying again is right
     +-- StreamFull                         the writer's bounded buffer is full; the record was not taken
     +-- OffsetOutOfRange                   asked for an offset that the log does not hold; never a silent jump
     +-- RecordTooLarge                     the record was not taken
     +-- UnknownTopic                       nobody created the topic: call ensure_topics

Rejected: asyncio (kafka-python has one IO thread and the local log is a file: callers on a loop append directly, since append never
blocks, and poll in a thread); a decoder in the reader (slices pass through as the backend made them, for throughput).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol, Self

Headers = Sequence[tuple[str, bytes]]
Partition = tuple[str, int]
"""(topic, partition)"""
OnFailure = Callable[[str, bytes, bytes, "StreamError"], None]
"""on_failure(topic, key, value, error): a record that append took could not be delivered and is dropped. Runs on the writer's thread:
count or queue, do not block."""

DEFAULT_BUFFER_BYTES = 64 * 1024 * 1024
DEFAULT_LINGER_S = 0.005


class StreamError(Exception):
    """Root of all that the stream raises."""


class BadStreamUrl(StreamError, ValueError):  # noqa: N818 the tree's root says that they are errors
    """The stream's address cannot be right."""


class StreamUnavailable(StreamError):  # noqa: N818 the tree's root says that they are errors
    """The broker or the file cannot be used now. Nothing is lost by trying again."""


class StreamFull(StreamError):  # noqa: N818 the tree's root says that they are errors
    """The writer's buffer is full; the record was not taken."""

    def __init__(self, held_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"the stream's write buffer is full ({held_bytes} of {limit_bytes} bytes wait for delivery): "
            "drop and count the record, or try again later"
        )
        self.held_bytes = held_bytes
        self.limit_bytes = limit_bytes


class OffsetOutOfRange(StreamError):  # noqa: N818 the tree's root says that they are errors
    """The log does not hold `wanted`: below `start` retention has deleted it, above `end` the topic was made anew."""

    def __init__(self, topic: str, partition: int, wanted: int, start: int, end: int, why: str | None = None) -> None:
        if why is None:
            why = "retention has deleted it" if wanted < start else "the topic was recreated or lost its tail"
        super().__init__(f"{topic}[{partition}] holds offsets {start} to {end} (exclusive), not {wanted}: {why}")
        self.topic = topic
        self.partition = partition
        self.wanted = wanted
        self.start = start
        self.end = end


class RecordTooLarge(StreamError):  # noqa: N818 the tree's root says that they are errors
    """Key, value and headers together exceed the topic's limit."""

    def __init__(self, limit: int | None, size: int) -> None:
        """`limit` None: the broker refused it by a limit that it does not tell."""
        of = "" if limit is None else f" of {limit} bytes"
        super().__init__(f"a record of {size} bytes is over the topic's limit{of}")
        self.limit = limit
        self.size = size


class UnknownTopic(StreamError):  # noqa: N818 the tree's root says that they are errors
    """The topic does not exist."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r} does not exist: call ensure_topics first")
        self.topic = topic


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """What a topic should be. Retention counts per partition, and None means for ever."""

    name: str
    partitions: int = 1
    retention_s: float | None = None
    retention_bytes: int | None = None
    max_record_bytes: int = 1_000_000

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", self.name):
            raise ValueError(f"topic name {self.name!r} must be 1 to 249 of A-Z a-z 0-9 . _ -")
        if self.partitions < 1:
            raise ValueError(f"topic {self.name}: partitions={self.partitions} must be at least 1")


class Record(Protocol):
    """One record as the backend hands it out; kafka-python's ConsumerRecord fits as it is."""

    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int:
        """Unix milliseconds, as given at append."""

    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Headers: ...


class StoredRecord(NamedTuple):
    """The record of the backends that are ours."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class Slice(NamedTuple):
    """Records of one partition in ascending order of offset. Not empty."""

    topic: str
    partition: int
    records: Sequence[Record]


class Writer(Protocol):
    """Buffers records and delivers them in order. Safe to share between threads.

    While the stream is away the buffer fills and nothing expires; when it is back everything is delivered, in order. A record that append
    took is either delivered or counted in `failed` and handed to on_failure; a process that is killed loses what it still buffers.
    """

    def append(self, topic: str, key: bytes, value: bytes, headers: Headers = (), timestamp_ms: int | None = None) -> None:
        """Take one record; never waits for IO. timestamp_ms None means now.

        Raises StreamFull, RecordTooLarge, UnknownTopic (when the backend can tell at once; else on_failure gets it).
        """

    def flush(self, timeout_s: float) -> None:
        """Return when all that was appended before is delivered (or failed); else StreamUnavailable naming what is pending."""

    def pending(self) -> int:
        """Records taken but neither delivered nor failed."""

    @property
    def delivered(self) -> int:
        """Records delivered since the start."""

    @property
    def failed(self) -> int:
        """Records given up since the start; each was handed to on_failure."""

    @property
    def trouble(self) -> StreamError | None:
        """Why delivery is stuck right now, or None: for /readyz and logs."""

    def close(self, timeout_s: float) -> None:
        """Flush for at most timeout_s, then give up the rest (counted, on_failure). Does not raise for what it gave up."""


class Reader(Protocol):
    """Reads assigned partitions from explicit offsets. For one thread at a time."""

    def assign(self, offsets: Mapping[Partition, int]) -> None:
        """Read exactly these partitions, each from its offset. Replaces what was assigned; nothing is paused.

        Raises OffsetOutOfRange, UnknownTopic, StreamUnavailable; the assignment before then still stands.
        """

    def poll(self, timeout_s: float, max_records: int) -> list[Slice]:
        """Up to max_records in all, at most one slice a partition, advancing `position`; [] when nothing came in time.

        Raises OffsetOutOfRange (position unchanged: seek or assign, and say so) and StreamUnavailable (poll again later).
        """

    def pause(self, parts: Iterable[Partition]) -> None:
        """Hand out nothing of these until resume; positions stay."""

    def resume(self, parts: Iterable[Partition]) -> None: ...

    def seek(self, part: Partition, offset: int) -> None:
        """Go on at `offset`; whether the log holds it shows at the next poll."""

    def position(self, part: Partition) -> int:
        """Offset of the next record to be handed out."""

    def close(self) -> None: ...


class Stream(Protocol):
    """A connection to one stream. Opening does not connect: what needs the broker or file raises StreamUnavailable itself."""

    def ensure_topics(self, specs: Iterable[TopicSpec]) -> None:
        """Create what is missing; idempotent. An existing topic keeps its partitions (order per key); the local log and memory take
        over a changed retention or limit, a Kafka topic stays as its operator made it."""

    def partitions(self, topic: str) -> int: ...

    def start_offsets(self, topic: str) -> dict[int, int]:
        """Partition -> the oldest offset still held (equal to the end when empty)."""

    def end_offsets(self, topic: str) -> dict[int, int]:
        """Partition -> the offset that the next record will get."""

    def identity(self, topic: str) -> str | None:
        """Changes when a topic is deleted and made anew; None if the backend cannot tell."""

    def held_bytes(self, topic: str) -> int | None:
        """Bytes the topic holds now, as the backend counts them (Kafka: compressed); None if it cannot tell."""

    def delete_before(self, topic: str, offsets: Mapping[int, int]) -> None:
        """Delete the records below each partition's offset; start offsets move there."""

    def writer(
        self,
        *,
        on_failure: OnFailure | None = None,
        max_buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        linger_s: float = DEFAULT_LINGER_S,
    ) -> Writer: ...

    def reader(self) -> Reader: ...

    def close(self) -> None:
        """Close the connection and the readers and writers made from it (writers give up what they buffer: close them first)."""

    def __enter__(self) -> Self: ...

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None: ...


def record_bytes(key: bytes, value: bytes, headers: Headers) -> int:
    """Size that max_record_bytes limits: key, value, and headers with their names."""
    size = len(key) + len(value)
    for name, content in headers:
        size += len(name) + len(content)
    return size
