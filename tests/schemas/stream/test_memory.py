from __future__ import annotations

import pytest

from schemas.stream import OffsetOutOfRange, StreamUnavailable, TopicSpec, UnknownTopic
from schemas.stream.memory import MemoryHub
from tests.schemas.stream.backends import read_all


def test_an_outage_reaches_everyone_and_ends_with_heal() -> None:
    hub = MemoryHub()
    stream = hub.open("m")
    stream.ensure_topics([TopicSpec("t")])
    reader, writer = stream.reader(), stream.writer()
    reader.assign({("t", 0): 0})
    hub.outage("m", "gone for a test")
    writer.append("t", b"k", b"v")
    with pytest.raises(StreamUnavailable, match="gone for a test"):
        writer.flush(0.2)
    with pytest.raises(StreamUnavailable, match="gone for a test"):
        reader.poll(0.1, 10)
    with pytest.raises(StreamUnavailable):
        stream.end_offsets("t")
    hub.heal("m")
    writer.flush(10)
    assert [record.value for record in read_all(stream, "t")[0]] == [b"v"]
    stream.close()


def test_a_topic_made_anew_has_another_identity() -> None:
    hub = MemoryHub()
    with hub.open("m") as stream:
        stream.ensure_topics([TopicSpec("t")])
        old = stream.identity("t")
        reader = stream.reader()
        reader.assign({("t", 0): 0})
        hub.delete_topic("m", "t")
        with pytest.raises(UnknownTopic):
            reader.poll(0, 1)
        stream.ensure_topics([TopicSpec("t")])
        assert stream.identity("t") != old
        reader.seek(("t", 0), 5)
        with pytest.raises(OffsetOutOfRange):
            reader.poll(0, 1)
