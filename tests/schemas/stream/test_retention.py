"""Retention of the backends that are ours; Kafka's is Kafka's."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.stream import TopicSpec
from schemas.stream.local import LocalStream
from schemas.stream.memory import MemoryHub, MemoryStream
from tests.schemas.stream.backends import read_all

HOUR_MS = 3_600_000


@pytest.fixture(params=["memory", "local"])
def stream(request: pytest.FixtureRequest, tmp_path: Path):
    opened: LocalStream | MemoryStream
    opened = MemoryHub().open("r") if request.param == "memory" else LocalStream(tmp_path / "log.sqlite", {})
    with opened:
        yield opened


def _append(stream: LocalStream | MemoryStream, topic: str, timestamps_ms: list[int], value: bytes = b"v" * 99) -> None:
    writer = stream.writer()
    for timestamp_ms in timestamps_ms:
        writer.append(topic, b"k", value, timestamp_ms=timestamp_ms)
    writer.flush(10)


def test_age_deletes_the_oldest_and_moves_the_start(stream: LocalStream | MemoryStream) -> None:
    far_ms = 10**13  # ahead of the clock, so that the writer's own sweep leaves these alone
    stream.ensure_topics([TopicSpec("t", retention_s=3600), TopicSpec("kept")])
    _append(stream, "t", [far_ms + i * 1000 for i in range(5000)])
    _append(stream, "kept", [far_ms])
    stream.apply_retention(far_ms + 3000 * 1000 + HOUR_MS)
    assert (stream.start_offsets("t"), stream.end_offsets("t")) == ({0: 3000}, {0: 5000})
    assert stream.start_offsets("kept") == {0: 0}
    records = read_all(stream, "t")[0]
    assert (records[0].offset, len(records)) == (3000, 2000)
    assert stream.held_bytes("t") == 2000 * 100


def test_bytes_are_held_to_the_limit(stream: LocalStream | MemoryStream) -> None:
    stream.ensure_topics([TopicSpec("t", retention_bytes=100_000)])
    _append(stream, "t", [10**13] * 5000)
    stream.apply_retention(0)
    assert stream.held_bytes("t") == 100_000
    assert stream.start_offsets("t") == {0: 4000}
    _append(stream, "t", [10**13])
    assert stream.end_offsets("t") == {0: 5001}


def test_everything_may_go_and_offsets_still_go_on(stream: LocalStream | MemoryStream) -> None:
    stream.ensure_topics([TopicSpec("t", retention_s=1)])
    _append(stream, "t", [10**13] * 3)
    stream.apply_retention(2 * 10**13)
    assert stream.start_offsets("t") == stream.end_offsets("t") == {0: 3}
    assert stream.held_bytes("t") == 0
    _append(stream, "t", [4 * 10**13])
    assert [record.offset for record in read_all(stream, "t")[0]] == [3]


def test_a_running_writer_applies_a_retention_that_ensure_topics_changed(stream: LocalStream | MemoryStream) -> None:
    import time

    stream.ensure_topics([TopicSpec("t")])
    writer = stream.writer()
    writer.append("t", b"k", b"old", timestamp_ms=1000)
    writer.flush(10)
    assert stream.start_offsets("t") == {0: 0}
    stream.ensure_topics([TopicSpec("t", retention_s=60)])
    deadline = time.monotonic() + 10
    while stream.start_offsets("t") != {0: 1}:
        assert time.monotonic() < deadline, "the writer's sweep does not come"
        time.sleep(0.05)
