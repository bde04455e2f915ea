"""The three backends as the contract suite sees them, and what differs between them to set a test up."""

from __future__ import annotations

import itertools
import os
import time
import uuid
from dataclasses import dataclass, field

from schemas.stream import Reader, Record, Stream, open_stream
from schemas.stream.memory import MemoryHub

_numbers = itertools.count()


@dataclass
class Backend:
    name: str
    url: str
    across_processes: bool
    hub: MemoryHub | None = None
    opened: list[Stream] = field(default_factory=list)

    def open(self) -> Stream:
        stream = open_stream(self.url, memory=self.hub)
        self.opened.append(stream)
        return stream

    def close(self) -> None:
        for stream in self.opened:
            stream.close()


def topic_name() -> str:
    return f"t-{os.getpid()}-{next(_numbers)}-{uuid.uuid4().hex[:6]}"


def read_all(stream: Stream, topic: str, reader: Reader | None = None, deadline_s: float = 20.0) -> dict[int, list[Record]]:
    """Everything the topic holds, by partition."""
    own = reader is None
    reader = reader or stream.reader()
    ends = stream.end_offsets(topic)
    starts = stream.start_offsets(topic)
    reader.assign({(topic, partition): offset for partition, offset in starts.items()})
    found: dict[int, list[Record]] = {partition: [] for partition in ends}
    deadline = time.monotonic() + deadline_s
    while any(reader.position((topic, partition)) < end for partition, end in ends.items()):
        assert time.monotonic() < deadline, f"only {found} of {ends}"
        for piece in reader.poll(0.5, 1000):
            found[piece.partition].extend(piece.records)
    if own:
        reader.close()
    return found
