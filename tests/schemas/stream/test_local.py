"""What only the local log can suffer: killed writers, full disks, damaged, locked and replaced files."""

from __future__ import annotations

import multiprocessing
import sqlite3
import sys
import threading
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from schemas.stream import OffsetOutOfRange, StreamUnavailable, TopicSpec, open_stream
from schemas.stream import local as local_module
from tests.schemas.stream.backends import read_all


def _write_for_ever(url: str, name: bytes) -> None:
    stream = open_stream(url)
    writer = stream.writer()
    i = 0
    while True:
        writer.append("t", name, b"%d" % i)
        i += 1
        if i % 2000 == 0:
            writer.flush(30)


def test_killed_writers_leave_no_holes_and_do_not_block_the_next(tmp_path: Path) -> None:
    url = f"local://{tmp_path}/log.sqlite"
    with open_stream(url) as stream:
        stream.ensure_topics([TopicSpec("t", partitions=2)])
        context = multiprocessing.get_context("spawn")
        names = [b"victim-%d" % i for i in range(4)]
        for name in names:
            reached = sum(stream.end_offsets("t").values()) + 1000
            process = context.Process(target=_write_for_ever, args=(url, name))
            process.start()
            deadline = time.monotonic() + 30
            while sum(stream.end_offsets("t").values()) < reached:
                assert time.monotonic() < deadline and process.is_alive()
                time.sleep(0.003)
            process.kill()
            process.join()
            process.close()
        seen: dict[bytes, list[int]] = {}
        for records in read_all(stream, "t").values():
            assert [record.offset for record in records] == list(range(len(records)))
            for record in records:
                assert record.key is not None and record.value is not None
                seen.setdefault(record.key, []).append(int(record.value))
        assert set(seen) == set(names)
        assert all(numbers == list(range(len(numbers))) for numbers in seen.values())
        writer = stream.writer()
        writer.append("t", b"k", b"after")
        writer.flush(10)
    with sqlite3.connect(tmp_path / "log.sqlite") as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


def test_a_full_log_says_so_and_goes_on_when_retention_frees_room(tmp_path: Path) -> None:
    with open_stream(f"local://{tmp_path}/log.sqlite?max_bytes=1000000") as stream:
        stream.ensure_topics([TopicSpec("t")])
        writer = stream.writer()
        for i in range(300):
            writer.append("t", b"k", b"%04d" % i + b"x" * 9996)
            if i % 10 == 9 and writer.trouble is None:
                try:
                    writer.flush(0.5)
                except StreamUnavailable as error:
                    assert "full" in str(error)
        with pytest.raises(StreamUnavailable, match=r"max_bytes.*is full: free room"):
            writer.flush(0.3)
        end = stream.end_offsets("t")[0]
        assert 0 < end < 300
        first = read_all(stream, "t")[0]
        deadline = time.monotonic() + 30
        while writer.pending():
            assert time.monotonic() < deadline
            stream.delete_before("t", {0: stream.end_offsets("t")[0]})
            time.sleep(0.02)
        assert stream.end_offsets("t") == {0: 300}
        assert [record.value[:4] for record in first] == [b"%04d" % i for i in range(end)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"no database at all, but long enough to have a header" * 100, "not an SQLite file"),
        (None, "something else than a log"),
    ],
    ids=["text", "another SQLite file"],
)
def test_a_file_that_is_no_log_is_left_alone(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "log.sqlite"
    if content is None:
        db = sqlite3.connect(path)
        db.execute("CREATE TABLE recipes (name)")
        db.commit()
        db.close()
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    with open_stream(f"local://{path}") as stream, pytest.raises(StreamUnavailable, match=says) as refused:
        stream.ensure_topics([TopicSpec("t")])
    assert str(path) in str(refused.value)
    assert path.read_bytes() == before


def test_a_damaged_log_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    with open_stream(f"local://{path}") as stream:
        stream.ensure_topics([TopicSpec("t")])
        writer = stream.writer()
        for _ in range(2000):
            writer.append("t", b"k", b"x" * 100)
        writer.close(10)
    damaged = bytearray(path.read_bytes())
    damaged[local_module.PAGE_BYTES :] = b"\xa5" * (len(damaged) - local_module.PAGE_BYTES)
    path.write_bytes(damaged)
    with open_stream(f"local://{path}") as stream, pytest.raises(StreamUnavailable, match="damaged: stop all processes"):
        stream.end_offsets("t")


def test_an_unwritable_folder_says_so() -> None:
    with open_stream("local:///proc/warmwatch/log.sqlite") as stream, pytest.raises(StreamUnavailable, match="check the folder"):
        stream.ensure_topics([TopicSpec("t")])


def test_a_lock_that_another_process_holds_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_module, "BUSY_S", 0.2)
    path = tmp_path / "log.sqlite"
    with open_stream(f"local://{path}") as stream:
        stream.ensure_topics([TopicSpec("t")])
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        writer = stream.writer()
        for i in range(10):
            writer.append("t", b"k", b"%d" % i)
        with pytest.raises(StreamUnavailable, match=r"10 records .* another process has held the lock"):
            writer.flush(1.0)
        assert read_all(stream, "t") == {0: []}, "readers go on meanwhile"
        holder.execute("ROLLBACK")
        holder.close()
        writer.flush(10)
        assert [record.value for record in read_all(stream, "t")[0]] == [b"%d" % i for i in range(10)]


def test_a_log_removed_while_in_use_is_made_anew_and_readers_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_module, "REPLACED_CHECK_S", 0.05)
    path = tmp_path / "log.sqlite"
    with open_stream(f"local://{path}") as stream:
        stream.ensure_topics([TopicSpec("t")])
        writer, reader = stream.writer(), stream.reader()
        writer.append("t", b"k", b"old")
        writer.flush(10)
        reader.assign({("t", 0): 0})
        assert reader.poll(5, 10)[0].records[0].value == b"old"
        for file in tmp_path.iterdir():
            file.unlink()
        writer.append("t", b"k", b"new")
        writer.flush(10)
        for _ in range(2):  # and told again until the caller assigns
            with pytest.raises(OffsetOutOfRange, match="made anew"):
                for _ in range(50):
                    reader.poll(0.1, 10)
            assert reader.position(("t", 0)) == 1
            with pytest.raises(OffsetOutOfRange):
                reader.assign({("t", 0): 5})
        reader.assign({("t", 0): 0})
        assert reader.poll(5, 10)[0].records[0].value == b"new"


LOGS = 12


def _create(folder: Path, topic: str, together: Barrier) -> None:
    for i in range(LOGS):
        together.wait(30)
        with open_stream(f"local://{folder}/{i}.sqlite") as stream:
            stream.ensure_topics([TopicSpec(topic), TopicSpec("shared", partitions=2)])


def test_processes_may_create_the_log_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(6)
    processes = [context.Process(target=_create, args=(tmp_path, f"p{i}", together)) for i in range(4)]
    for process in processes:
        process.start()
    threads = [threading.Thread(target=_create, args=(tmp_path, f"t{i}", together)) for i in range(2)]
    for thread in threads:
        thread.start()
    for worker in (*processes, *threads):
        worker.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    for i in range(LOGS):
        with open_stream(f"local://{tmp_path}/{i}.sqlite") as stream:
            assert [stream.partitions(name) for name in ("p0", "p1", "p2", "p3", "t0", "t1")] == [1] * 6
            assert stream.partitions("shared") == 2
    for process in processes:
        process.close()


def test_an_idle_poll_costs_next_to_nothing(tmp_path: Path) -> None:
    with open_stream(f"local://{tmp_path}/log.sqlite") as stream:
        stream.ensure_topics([TopicSpec("t")])
        reader = stream.reader()
        reader.assign({("t", 0): 0})
        began, cpu_s = time.monotonic(), time.thread_time()
        assert reader.poll(1.0, 10) == []
        share = (time.thread_time() - cpu_s) / (time.monotonic() - began)
        assert share < 0.1, f"{share:.0%} of a core on {sys.version}"
