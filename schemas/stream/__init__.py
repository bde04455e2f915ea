"""The stream between processes: Kafka, a local durable log, or memory behind one small interface (see base.py)."""

from schemas.stream.address import open_stream
from schemas.stream.base import (
    BadStreamUrl,
    OffsetOutOfRange,
    Partition,
    Reader,
    Record,
    RecordTooLarge,
    Slice,
    StoredRecord,
    Stream,
    StreamError,
    StreamFull,
    StreamUnavailable,
    TopicSpec,
    UnknownTopic,
    Writer,
)

__all__ = [
    "BadStreamUrl",
    "OffsetOutOfRange",
    "Partition",
    "Reader",
    "Record",
    "RecordTooLarge",
    "Slice",
    "StoredRecord",
    "Stream",
    "StreamError",
    "StreamFull",
    "StreamUnavailable",
    "TopicSpec",
    "UnknownTopic",
    "Writer",
    "open_stream",
]
