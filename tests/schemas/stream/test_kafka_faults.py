"""Kafka away, killed and come back, with its records and without."""

from __future__ import annotations

import socket
import time

import pytest

from schemas.stream import OffsetOutOfRange, Slice, StreamError, StreamUnavailable, TopicSpec, UnknownTopic, open_stream
from schemas.stream.kafka import KafkaStream
from tests.kafka_broker import Broker
from tests.schemas.stream.backends import read_all, topic_name

pytestmark = pytest.mark.usefixtures("kafka_may_fail")


def test_a_broker_that_is_not_there_is_named_with_what_to_do() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        port = bound.getsockname()[1]
        failures: list[StreamError] = []
        with open_stream(f"kafka://127.0.0.1:{port}?connect.timeout.s=1") as stream:
            spec = TopicSpec("t")
            for ask in (lambda: stream.ensure_topics([spec]), lambda: stream.end_offsets("t")):
                with pytest.raises(StreamUnavailable, match=rf"127.0.0.1:{port} does not answer: check .*refused"):
                    ask()
            with pytest.raises(StreamUnavailable, match="does not answer"):
                stream.reader().assign({("t", 0): 0})
            writer = stream.writer(on_failure=lambda topic, key, value, error: failures.append(error))
            writer.append("t", b"k", b"v")
            with pytest.raises(StreamUnavailable, match=r"1 records .* not delivered after 0.3 s.*refused"):
                writer.flush(0.3)
            writer.close(0.1)
            assert (writer.failed, writer.delivered) == (1, 0)
            assert isinstance(failures[0], StreamUnavailable)


def test_a_listener_that_is_no_broker_is_unavailable_in_bounded_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with open_stream(f"kafka://127.0.0.1:{silent.getsockname()[1]}?connect.timeout.s=1") as stream:
            began = time.monotonic()
            with pytest.raises(StreamUnavailable, match="does not answer"):
                stream.end_offsets("t")
            assert time.monotonic() - began < 5


@pytest.mark.kafka
def test_a_killed_broker_costs_neither_records_nor_order(own_kafka: Broker) -> None:
    with open_stream(own_kafka.url) as stream:
        stream.ensure_topics([TopicSpec("t")])
        writer, reader = stream.writer(), stream.reader()
        reader.assign({("t", 0): 0})
        numbers: list[int] = []
        for i in range(1000):
            writer.append("t", b"k", b"%d" % i)
        writer.flush(20)
        _poll_until(reader, numbers, 500)

        for i in range(1000, 1500):  # some of these are under way when it dies
            writer.append("t", b"k", b"%d" % i)
        own_kafka.kill()
        for i in range(1500, 2000):
            writer.append("t", b"k", b"%d" % i)
        with pytest.raises(StreamUnavailable, match="records for Kafka"):
            writer.flush(3)
        assert isinstance(writer.trouble, StreamUnavailable)
        with pytest.raises(StreamUnavailable, match="does not answer"):
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                _take(reader.poll(0.5, 1000), numbers)

        own_kafka.start()
        writer.flush(60)
        assert (writer.delivered, writer.failed, writer.trouble) == (2000, 0, None)
        _poll_until(reader, numbers, 2000)
        assert numbers == list(range(2000))
        assert stream.end_offsets("t") == {0: 2000}


@pytest.mark.kafka
def test_a_broker_that_comes_back_empty_gets_its_topics_and_readers_are_told(own_kafka: Broker) -> None:
    with open_stream(own_kafka.url) as stream:
        stream.ensure_topics([TopicSpec("t"), TopicSpec("quiet")])
        writer, reader, quiet = stream.writer(), stream.reader(), stream.reader()
        for i in range(100):
            writer.append("t", b"k", b"%d" % i)
        writer.flush(20)
        reader.assign({("t", 0): 100})
        quiet.assign({("quiet", 0): 0})
        identity = stream.identity("quiet")
        own_kafka.stop()
        own_kafka.lose_all_records()
        own_kafka.start()
        writer.append("t", b"k", b"new")
        writer.flush(60)
        with pytest.raises(OffsetOutOfRange, match=r"t\[0\]"):
            _poll_through_outages(reader)
        assert stream.identity("quiet") != identity
        with pytest.raises(OffsetOutOfRange, match="made anew"):
            _poll_through_outages(quiet)
        reader.assign({("t", 0): 0})
        values = [record.value for piece in reader.poll(10, 10) for record in piece.records]
        assert values[-1] == b"new"


@pytest.mark.kafka
def test_a_topic_made_anew_with_fewer_partitions_costs_what_was_under_way_and_no_more(kafka: str) -> None:
    """Records for a partition that is no more would wait for ever, and with them all that comes behind."""
    topic = topic_name()
    failed: list[bytes] = []
    with open_stream(f"kafka://{kafka}") as stream, open_stream(f"kafka://{kafka}") as operator:
        stream.ensure_topics([TopicSpec(topic, partitions=4)])
        writer = stream.writer(on_failure=lambda topic, key, value, error: failed.append(value))
        for i in range(40):
            writer.append(topic, b"k%d" % i, b"before %d" % i)
        writer.flush(20)
        assert isinstance(operator, KafkaStream)
        with operator._asking() as admin:
            admin.delete_topics([topic])
        _until_gone(operator, topic)
        operator.ensure_topics([TopicSpec(topic, partitions=1)])
        for i in range(40):
            writer.append(topic, b"k%d" % i, b"meanwhile %d" % i)
        writer.flush(40)
        for i in range(40):
            writer.append(topic, b"k%d" % i, b"after %d" % i)
        writer.flush(20)
        assert all(value.startswith(b"meanwhile") for value in failed) and len(failed) == writer.failed
        held = [record.value or b"" for record in read_all(stream, topic)[0]]
        assert [value for value in held if value.startswith(b"after")] == [b"after %d" % i for i in range(40)]
        assert sorted(held[:-40] + failed) == sorted(b"meanwhile %d" % i for i in range(40)), "neither lost nor doubled"


def _until_gone(stream: KafkaStream, topic: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            stream.partitions(topic)
        except UnknownTopic:
            return
        time.sleep(0.1)
    raise AssertionError(f"{topic} is still there")


def _poll_through_outages(reader) -> None:
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        try:
            assert reader.poll(0.5, 10) == []
        except (StreamUnavailable, UnknownTopic):
            time.sleep(0.1)


def _take(pieces: list[Slice], numbers: list[int]) -> None:
    numbers += [int(record.value or b"") for piece in pieces for record in piece.records]


def _poll_until(reader, numbers: list[int], count: int) -> None:
    deadline = time.monotonic() + 30
    while len(numbers) < count:
        assert time.monotonic() < deadline, f"{len(numbers)} of {count}"
        _take(reader.poll(0.5, 500), numbers)
