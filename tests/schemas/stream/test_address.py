from __future__ import annotations

from pathlib import Path

import pytest

from schemas.stream import BadStreamUrl, TopicSpec, open_stream
from schemas.stream.kafka import OPTIONS
from schemas.stream.memory import MemoryHub

BAD = [
    ("log.sqlite", "local:///absolute"),
    ("localhost:9092", "kafka://host:9092"),
    ("redis://x", "kafka://host:9092"),
    ("local:", "names no file"),
    ("local://var/log.sqlite", "local:///var/log.sqlite"),
    ("local:x.sqlite?durability=some", "'full' or 'process'"),
    ("local:x.sqlite?max_bytes=big", "number of bytes"),
    ("local:x.sqlite?max_byte=1", "unknown option max_byte"),
    ("local:x.sqlite#1", "'#'"),
    ("kafka://", "host:port"),
    ("kafka://broker", "host:port"),
    ("kafka://broker:http", "host:port"),
    ("kafka://a:1,b", "'b' must be host:port"),
    ("kafka://a:1/topic", "path"),
    ("kafka://a:1?acks=1", "unknown option; known are security.protocol"),
    ("kafka://a:1?security.protocol=TLS", "SASL_SSL"),
    ("kafka://a:1?sasl.password=x", "sasl.password.file"),
    ("kafka://a:1?sasl.password.file=/nowhere/at/all", "cannot read"),
    ("kafka://a:1?ssl.cafile=/nowhere", "no file"),
    ("kafka://a:1?replication.factor=0", "at least 1"),
    ("kafka://a:1?connect.timeout.s=soon", "number of seconds"),
    ("memory://x", "MemoryHub"),
]


@pytest.mark.parametrize(("url", "says"), BAD, ids=[url for url, _ in BAD])
def test_a_bad_address_is_refused_with_what_would_be_right(url: str, says: str) -> None:
    with pytest.raises(BadStreamUrl) as refused:
        open_stream(url)
    assert says in str(refused.value)


def test_a_relative_local_address_is_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open_stream("local:some/folder/log.sqlite") as stream:
        stream.ensure_topics([TopicSpec("t")])
    assert (tmp_path / "some" / "folder" / "log.sqlite").exists()


def test_two_opens_of_one_memory_name_see_the_same_records() -> None:
    hub = MemoryHub()
    open_stream("memory://a", memory=hub).ensure_topics([TopicSpec("t", partitions=3)])
    assert open_stream("memory://a", memory=hub).partitions("t") == 3


def test_opening_does_not_connect_and_never_shows_the_password(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("hunter2\n")
    query = f"security.protocol=SASL_PLAINTEXT&sasl.mechanism=PLAIN&sasl.username=ww&sasl.password.file={password}"
    with open_stream(f"kafka://127.0.0.1:1,127.0.0.1:2?{query}") as stream:
        assert repr(stream) == "<KafkaStream 127.0.0.1:1,127.0.0.1:2>"


@pytest.mark.parametrize(
    "url",
    [
        "kafka://ww:hunter2@a:9092",
        "kafka://ww:hunter2#@a:9092",
        "kafka://ww:hunter2?@a:9092",
        "kafka://ww:hunter2@a",
        "kafka://a:1?sasl.password=hunter2",
        "kafka://a:1?sasl.password=hunter2#x",
        "kafka://a:1/x?sasl.password=hunter2",
        "kafka://a:1?sasl.password=hunter2&nonsense",
        "kafak://ww:hunter2@a:9092?sasl.password=hunter2",
    ],
)
def test_no_message_repeats_a_password_that_somebody_put_into_the_address(url: str) -> None:
    with pytest.raises(BadStreamUrl) as refused:
        open_stream(url)
    shown = [str(refused.value), *(str(e) for e in (refused.value.__cause__,) if e)]
    assert "hunter2" not in "".join(shown)


def test_the_readme_documents_every_kafka_option() -> None:
    readme = (Path(__file__).parents[3] / "schemas" / "stream" / "README.md").read_text()
    assert [option for option in OPTIONS if f"`{option}`" not in readme] == []


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 250, "a/b"])
def test_a_topic_name_that_kafka_would_refuse_is_refused_everywhere(name: str) -> None:
    with pytest.raises(ValueError, match="topic name"):
        TopicSpec(name)
