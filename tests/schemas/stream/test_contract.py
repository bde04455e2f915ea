"""What every stream promises (schemas/stream/base.py), run against memory, the local log and a real Kafka broker."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from schemas.stream import (
    OffsetOutOfRange,
    RecordTooLarge,
    Stream,
    StreamError,
    StreamFull,
    StreamUnavailable,
    TopicSpec,
    UnknownTopic,
    open_stream,
)
from schemas.stream.partitioning import partition_of
from tests.schemas.stream.backends import Backend, read_all, topic_name

NOW_MS = time.time_ns() // 1_000_000


def fill(stream: Stream, topic: str, count: int, keys: int = 5) -> None:
    """`count` records whose values number them per key: b"key:i"."""
    writer = stream.writer()
    for i in range(count):
        key = b"key-%d" % (i % keys)
        writer.append(topic, key, b"%b:%d" % (key, i // keys))
    writer.flush(20)
    writer.close(5)


def test_records_come_back_in_order_per_key_with_dense_offsets(backend: Backend) -> None:
    stream, topic = backend.open(), topic_name()
    stream.ensure_topics([TopicSpec(topic, partitions=3)])
    fill(stream, topic, 1000, keys=7)
    by_partition = read_all(stream, topic)
    assert sum(map(len, by_partition.values())) == 1000
    seen: dict[bytes, list[int]] = {}
    for partition, records in by_partition.items():
        assert [record.offset for record in records] == list(range(len(records)))
        for record in records:
            assert record.key is not None and record.value is not None
            assert partition_of(record.key, 3) == partition
            seen.setdefault(record.key, []).append(int(record.value.rsplit(b":")[-1]))
    assert len(seen) == 7
    assert all(numbers == list(range(len(numbers))) for numbers in seen.values())


def test_key_value_headers_and_timestamp_arrive_as_given(backend: Backend) -> None:
    stream, topic = backend.open(), topic_name()
    stream.ensure_topics([TopicSpec(topic)])
    writer = stream.writer()
    headers = (("schema", b"\x01\x00"), ("schema", b"again"), ("größe", b""))
    writer.append(topic, b"", b"", headers, timestamp_ms=NOW_MS - 12345)
    before_ms = time.time_ns() // 1_000_000
    writer.append(topic, b"k\x00\xff", bytes(range(256)))
    writer.flush(20)
    first, second = read_all(stream, topic)[0]
    assert (first.key, first.value, first.timestamp) == (b"", b"", NOW_MS - 12345)
    assert tuple(first.headers) == headers
    assert (second.key, second.value, tuple(second.headers)) == (b"k\x00\xff", bytes(range(256)), ())
    assert before_ms <= second.timestamp <= time.time_ns() // 1_000_000
    writer.close(5)


def test_start_and_end_offsets_follow_appends_and_deletes(backend: Backend) -> None:
    stream, topic = backend.open(), topic_name()
    stream.ensure_topics([TopicSpec(topic, partitions=2)])
    assert stream.partitions(topic) == 2
    assert stream.start_offsets(topic) == stream.end_offsets(topic) == {0: 0, 1: 0}
    fill(stream, topic, 100, keys=10)
    ends = stream.end_offsets(topic)
    assert sum(ends.values()) == 100 and stream.start_offsets(topic) == {0: 0, 1: 0}
    assert min(ends.values()) > 3, "the keys must reach both partitions"
    held = stream.held_bytes(topic)
    assert held is not None and held > 100
    stream.delete_before(topic, {0: 3})
    assert stream.start_offsets(topic) == {0: 3, 1: 0}
    assert stream.end_offsets(topic) == ends
    assert read_all(stream, topic)[0][0].offset == 3


def test_reading_below_the_start_or_above_the_end_is_said_never_skipped(backend: Backend) -> None:
    stream, topic = backend.open(), topic_name()
    stream.ensure_topics([TopicSpec(topic)])
    fill(stream, topic, 10)
    stream.delete_before(topic, {0: 4})
    part = (topic, 0)
    reader = stream.reader()
    with pytest.raises(OffsetOutOfRange) as below:
        reader.assign({part: 3})
    assert (below.value.topic, below.value.partition) == part
    assert (below.value.wanted, below.value.start, below.value.end) == (3, 4, 10)
    assert "retention" in str(below.value)
    with pytest.raises(OffsetOutOfRange, match="recreated"):
        reader.assign({part: 11})
    reader.assign({part: 10})
    reader.seek(part, 2)
    with pytest.raises(OffsetOutOfRange) as at_poll:
        for _ in range(20):
            assert reader.poll(0.5, 10) == []
    assert (at_poll.value.wanted, at_poll.value.start, at_poll.value.end) == (2, 4, 10)
    assert reader.position(part) == 2
    reader.seek(part, 4)
    assert _poll_values(reader, 6)[0].endswith(b":0")


def test_records_deleted_under_a_reader_are_said_at_its_next_poll(backend: Backend) -> None:
    stream, topic = backend.open(), topic_name()
    stream.ensure_topics([TopicSpec(topic)])
    reader = stream.reader()
    reader.assign({(topic, 0): 0})
    reader.pause([(topic, 0)])
    fill(stream, topic, 10)
    stream.delete_before(topic, {0: 8})
    assert reader.poll(0.1, 10) == []
    reader.resume([(topic, 0)])
    with pytest.raises(OffsetOutOfRange) as said:
        for _ in range(20):
            assert reader.poll(0.5, 10) == []
    assert (said.value.wanted, said.value.start) == (0, 8)


def test_a_reopened_stream_goes_on_where_the_old_one_ended(backend: Backend) -> None:
    topic = topic_name()
    with backend.open() as stream:
        stream.ensure_topics([TopicSpec(topic)])
        fill(stream, topic, 10)
        identity = stream.identity(topic)
    with backend.open() as stream:
        stream.ensure_topics([TopicSpec(topic)])
        assert stream.identity(topic) == identity is not None
        fill(stream, topic, 10)
        assert [record.offset for record in read_all(stream, topic)[0]] == list(range(20))


def test_ensure_topics_keeps_an_existing_topics_partitions(backend: Backend) -> None:
    stream, topic = backend.open(), topic_name()
    stream.ensure_topics([TopicSpec(topic, partitions=2), TopicSpec(topic + "-b")])
    stream.ensure_topics([TopicSpec(topic, partitions=5)])
    assert stream.partitions(topic) == 2


def test_max_records_bounds_a_poll_and_partitions_take_turns(backend: Backend) -> None:
    stream, topic = backend.open(), topic_name()
    stream.ensure_topics([TopicSpec(topic, partitions=2)])
    fill(stream, topic, 200, keys=10)
    reader = stream.reader()
    reader.assign({(topic, 0): 0, (topic, 1): 0})
    sizes, early = [], set()
    deadline = time.monotonic() + 20
    while sum(sizes) < 200:
        assert time.monotonic() < deadline
        pieces = reader.poll(0.5, 16)
        assert len({piece.partition for piece in pieces}) == len(pieces)
        sizes.append(sum(len(piece.records) for piece in pieces))
        if sum(sizes) <= 200 // 2:
            early.update(piece.partition for piece in pieces)
    assert max(sizes) <= 16
    assert backend.name == "kafka" or early == {0, 1}


def test_pause_hands_out_nothing_and_resume_continues_at_the_position(backend: Backend) -> None:
    stream, topic = backend.open(), topic_name()
    stream.ensure_topics([TopicSpec(topic)])
    part = (topic, 0)
    fill(stream, topic, 20, keys=1)
    reader = stream.reader()
    reader.assign({part: 0})
    assert _poll_values(reader, 5, max_records=5) == [b"key-0:%d" % i for i in range(5)]
    reader.pause([part])
    assert reader.poll(0.3, 100) == []
    assert reader.position(part) == 5
    reader.resume([part])
    assert _poll_values(reader, 15) == [b"key-0:%d" % i for i in range(5, 20)]
    reader.seek(part, 18)
    assert _poll_values(reader, 2) == [b"key-0:18", b"key-0:19"]
    with pytest.raises(ValueError, match="not assigned"):
        reader.pause([(topic, 1)])


def test_poll_returns_soon_after_an_append(backend: Backend) -> None:
    stream, topic = backend.open(), topic_name()
    stream.ensure_topics([TopicSpec(topic)])
    reader, writer = stream.reader(), stream.writer()
    reader.assign({(topic, 0): 0})
    assert reader.poll(0.1, 10) == []
    writer.append(topic, b"warm", b"up")
    assert _poll_values(reader, 1) == [b"up"]
    began = time.monotonic()
    writer.append(topic, b"k", b"v")
    assert _poll_values(reader, 1, timeout_s=5.0) == [b"v"]
    assert time.monotonic() - began < 2.0
    writer.close(5)


def test_poll_waits_no_longer_than_asked(backend: Backend) -> None:
    stream, topic = backend.open(), topic_name()
    stream.ensure_topics([TopicSpec(topic)])
    reader = stream.reader()
    reader.assign({(topic, 0): 0})
    began = time.monotonic()
    assert reader.poll(0.2, 10) == []
    assert 0.15 <= time.monotonic() - began < 1.5


def test_large_records_pass_up_to_the_topics_limit_and_not_beyond(backend: Backend) -> None:
    import random

    stream, topic = backend.open(), topic_name()
    stream.ensure_topics([TopicSpec(topic, max_record_bytes=900_010)])
    value = random.Random(1).randbytes(900_000)
    writer = stream.writer()
    for _ in range(3):
        writer.append(topic, b"0123456789", value)
    with pytest.raises(RecordTooLarge) as refused:
        writer.append(topic, b"0123456789", value, [("h", b"")])
    assert (refused.value.limit, refused.value.size) == (900_010, 900_011)
    writer.flush(20)
    assert [record.value == value for record in read_all(stream, topic)[0]] == [True] * 3
    assert (writer.delivered, writer.failed, writer.pending()) == (3, 0, 0)
    writer.close(5)


def test_an_unknown_topic_is_named_and_does_not_stop_the_others(backend: Backend) -> None:
    stream, topic = backend.open(), topic_name()
    stream.ensure_topics([TopicSpec(topic)])
    for ask in (stream.partitions, stream.start_offsets, stream.end_offsets, stream.identity):
        with pytest.raises(UnknownTopic, match="t-nobody-made"):
            ask("t-nobody-made")
    with pytest.raises(UnknownTopic):
        stream.reader().assign({("t-nobody-made", 0): 0})
    failures: list[tuple[str, bytes, bytes, StreamError]] = []
    writer = stream.writer(on_failure=lambda *failure: failures.append(failure))
    writer.append("t-nobody-made", b"k", b"lost")
    writer.append(topic, b"k", b"kept")
    writer.flush(20)
    ((name, key, value, error),) = failures
    assert (name, key, value) == ("t-nobody-made", b"k", b"lost") and isinstance(error, UnknownTopic)
    assert (writer.delivered, writer.failed) == (1, 1)
    assert [record.value for record in read_all(stream, topic)[0]] == [b"kept"]
    writer.close(5)


def test_a_full_buffer_refuses_the_record_at_once(backend: Backend) -> None:
    stream, topic = backend.open(), topic_name()
    stream.ensure_topics([TopicSpec(topic)])
    writer = stream.writer(max_buffer_bytes=10_000, linger_s=5.0)
    taken = 0
    with pytest.raises(StreamFull) as full:
        for _ in range(100):
            writer.append(topic, b"k", b"v" * 999)
            taken += 1
    assert 5 <= taken <= 10 and full.value.limit_bytes == 10_000
    writer.flush(20)
    writer.append(topic, b"k", b"after")
    writer.close(20)
    assert len(read_all(stream, topic)[0]) == taken + 1


def test_close_delivers_what_was_appended_and_then_refuses(backend: Backend) -> None:
    stream, topic = backend.open(), topic_name()
    stream.ensure_topics([TopicSpec(topic)])
    writer = stream.writer()
    for i in range(100):
        writer.append(topic, b"k", b"%d" % i)
    writer.close(20)
    assert writer.delivered == 100
    with pytest.raises(StreamUnavailable, match="closed"):
        writer.append(topic, b"k", b"late")
    assert len(read_all(stream, topic)[0]) == 100


def _write_from_another_process(url: str, topic: str, name: bytes, count: int) -> None:
    with open_stream(url) as stream:
        writer = stream.writer()
        for i in range(count):
            writer.append(topic, name, b"%b:%d" % (name, i))
            if i % 100 == 99:
                writer.flush(30)
        writer.close(30)
        assert writer.delivered == count


def test_writers_in_several_processes_lose_and_reorder_nothing(backend: Backend) -> None:
    if not backend.across_processes:
        pytest.skip("memory lives in one process")
    stream, topic = backend.open(), topic_name()
    stream.ensure_topics([TopicSpec(topic, partitions=2)])
    context = multiprocessing.get_context("spawn")
    names = [b"writer-%d" % i for i in range(3)]
    processes = [context.Process(target=_write_from_another_process, args=(backend.url, topic, name, 500)) for name in names]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    seen: dict[bytes, list[bytes]] = {name: [] for name in names}
    for records in read_all(stream, topic).values():
        assert [record.offset for record in records] == list(range(len(records)))
        for record in records:
            assert record.key is not None and record.value is not None
            seen[record.key].append(record.value)
    assert seen == {name: [b"%b:%d" % (name, i) for i in range(500)] for name in names}


def test_threads_may_share_a_writer(backend: Backend) -> None:
    import threading

    stream, topic = backend.open(), topic_name()
    stream.ensure_topics([TopicSpec(topic)])
    writer = stream.writer()

    def append(name: bytes) -> None:
        for i in range(300):
            writer.append(topic, name, b"%d" % i)

    threads = [threading.Thread(target=append, args=(b"thread-%d" % i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.flush(20)
    seen: dict[bytes, list[int]] = {}
    for record in read_all(stream, topic)[0]:
        assert record.key is not None and record.value is not None
        seen.setdefault(record.key, []).append(int(record.value))
    assert list(seen.values()) == [list(range(300))] * 4
    writer.close(5)


def _poll_values(reader, count: int, max_records: int = 1000, timeout_s: float = 20.0) -> list[bytes]:
    values: list[bytes] = []
    deadline = time.monotonic() + timeout_s
    while len(values) < count:
        assert time.monotonic() < deadline, f"{len(values)} of {count} came"
        for piece in reader.poll(0.5, max_records):
            values.extend(record.value for record in piece.records)
    return values


def test_an_empty_assignment_reads_nothing_and_a_new_one_replaces_the_old(backend: Backend) -> None:
    stream, topic = backend.open(), topic_name()
    stream.ensure_topics([TopicSpec(topic, partitions=2)])
    fill(stream, topic, 100, keys=10)
    reader = stream.reader()
    assert reader.poll(0.05, 10) == []
    reader.assign({(topic, 0): 1, (topic, 1): 0})
    reader.pause([(topic, 0)])
    reader.assign({})
    assert reader.poll(0.2, 10) == []
    reader.assign({(topic, 0): 1})
    assert len(_poll_values(reader, stream.end_offsets(topic)[0] - 1)) == stream.end_offsets(topic)[0] - 1
    with pytest.raises(ValueError, match="not assigned"):
        reader.position((topic, 1))
