"""`warmwatch collect` as a process: killed at any moment, asked by others all the while, stopped in good order."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from schemas.stream import StreamFull, open_stream
from schemas.tables.published import MAJOR, MINOR
from schemas.tables.read import FILE_NAME
from schemas.topics import topic_specs
from tests.collector.driven import ask
from tests.collector.traffic import WHAT_IS_THERE, Traffic, what_must_be_there

ROOT = Path(__file__).parents[2]
DUCKDB = shutil.which("duckdb", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
READER_S = float(os.environ.get("WARMWATCH_TEST_READER_S", "60"))


class Process:
    """One `warmwatch collect`."""

    def __init__(self, data_dir: Path, stream: str, prefix: str = "", port: int = 0, **more: object) -> None:
        self.log = data_dir.parent / f"collect-{uuid.uuid4().hex[:6]}.log"
        arguments = {
            "stream": stream, "topic-prefix": prefix, "data-dir": data_dir, "metrics-port": port, "publish-interval-s": 0.2,
            "keep-s": 1e12, "kv-events-keep-s": 1e12, "min-free-bytes": 0, "checkpoint-blocks": 200, "recent-hashes": 1 << 16,
            "recent-events": 1 << 14, **more,
        }  # fmt: skip
        with self.log.open("w") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "warmwatch", "collect", *(f"--{k}={v}" for k, v in arguments.items())],
                stdout=out,
                stderr=out,
                cwd=ROOT,
            )

    def address(self) -> str:
        wait_for(lambda: "status on http://" in self.log.read_text() or self.popen.poll() is not None, self.log.read_text)
        return (
            next(line for line in self.log.read_text().splitlines() if "status on" in line).split("status on ")[1].removesuffix("/readyz")
        )

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.address() + path, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as e:
            with e:
                return e.code, e.read().decode()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(10)

    def stop(self) -> int:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(60)


def wait_for(ready: Callable[[], object], why: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


@contextmanager
def two_readers(data_dir: Path, folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Yields a list that holds what the readers say once the block has ended."""
    stop = folder / "stop"
    command = [sys.executable, "-m", "tests.collector.reader", str(data_dir / FILE_NAME), str(stop)]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) for _ in range(2)]
    said: list[dict[str, Any]] = []
    try:
        yield said
    finally:
        stop.touch()
        for reader in readers:
            out, _ = reader.communicate(timeout=60)
            said.append(json.loads(out))


@contextmanager
def steady_traffic(url: str, prefix: str, steps_per_s: float) -> Iterator[Traffic]:
    """Writes in a thread until the block ends; then all is delivered."""
    done = threading.Event()
    with open_stream(url) as stream:
        stream.ensure_topics(topic_specs(prefix, 2))
        writer = stream.writer()
        traffic = Traffic(writer, prefix, rng=random.Random(7), time_s=time.time())

        def write() -> None:
            while not done.wait(1 / steps_per_s):
                try:
                    traffic.step()
                except StreamFull:
                    time.sleep(0.1)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            yield traffic
        finally:
            done.set()
            thread.join()
            writer.flush(60)
            writer.close(10)


def killed_again_and_again(url: str, prefix: str, tmp_path: Path, kills: int, at_least_s: float, steps_per_s: float) -> None:
    data_dir = tmp_path / "data"
    rng = random.Random(3)
    began = time.monotonic()
    deaths_while_reading = 0
    first = Process(data_dir, url, prefix)
    wait_for(lambda: (data_dir / FILE_NAME).exists(), first.log.read_text)
    with two_readers(data_dir, tmp_path) as said:
        with steady_traffic(url, prefix, steps_per_s) as traffic:
            victim = first
            for _ in range(kills):
                if rng.random() < 0.8:
                    wait_for(lambda: victim.get("/readyz")[0] == 200, victim.log.read_text)  # noqa: B023 used at once
                    deaths_while_reading += 1
                    time.sleep(rng.random() * 1.2)
                else:
                    time.sleep(rng.random() * 2.5)
                victim.kill()
                ask(data_dir, WHAT_IS_THERE)
                victim = Process(data_dir, url, prefix)
            while time.monotonic() - began < at_least_s:
                time.sleep(0.2)
        want = what_must_be_there(traffic.sent)
        wait_for(lambda: ask(data_dir, WHAT_IS_THERE) == [want], lambda: (ask(data_dir, WHAT_IS_THERE), want, victim.log.read_text()))
        assert victim.stop() == 0
    assert deaths_while_reading >= kills / 2
    for reader in said:
        assert reader["errors"] == []
        assert reader["asked"] > 20
    assert ask(data_dir, WHAT_IS_THERE) == [want]
    held = dict(ask(data_dir, "SELECT worker, resident_blocks FROM workers"))
    assert held == {w.worker: c.total() for w, c in traffic.held.items()}
    assert ask(data_dir, "SELECT DISTINCT trust FROM workers") == [("exact",)]
    assert ask(data_dir, "SELECT state FROM published") == [("stopped",)]


@pytest.mark.timeout(180)
def test_kill_9_over_the_local_log_loses_nothing_while_two_readers_ask(tmp_path: Path) -> None:
    killed_again_and_again(f"local:{tmp_path / 's.sqlite'}", "", tmp_path, kills=4, at_least_s=0, steps_per_s=150)


@pytest.mark.kafka
@pytest.mark.timeout(600)
def test_kill_9_twenty_times_over_kafka_loses_nothing_while_two_readers_ask_for_a_minute(kafka: str, tmp_path: Path) -> None:
    killed_again_and_again(f"kafka://{kafka}", f"k{uuid.uuid4().hex[:8]}.", tmp_path, kills=20, at_least_s=READER_S, steps_per_s=150)


def test_status_pages_metrics_and_a_port_in_use(tmp_path: Path) -> None:
    url = f"local:{tmp_path / 's.sqlite'}"
    data_dir = tmp_path / "data"
    one = Process(data_dir, url)
    try:
        wait_for(lambda: one.get("/readyz")[0] == 200, one.log.read_text)
        assert one.get("/healthz") == (200, "alive\n")
        assert one.get("/nothing")[0] == 404
        with steady_traffic(url, "", 400) as traffic:
            wait_for(lambda: traffic.sent["kv_records"] > 50, lambda: traffic.sent)
        want = f'warmwatch_collector_records_total{{topic="kv-events"}} {float(traffic.sent["kv_records"])}'
        wait_for(lambda: want in one.get("/metrics")[1], lambda: one.get("/metrics")[1])
        page = one.get("/metrics")[1]
        for name in ("block_events_total", "lag_records", "dead_letters_total", "publish_seconds_count", "resident_blocks", "paused 0.0"):
            assert f"warmwatch_collector_{name}" in page
        port = int(one.address().rpartition(":")[2])
        other = Process(tmp_path / "other", url, port=port)
        assert other.popen.wait(60) == 2
        assert f"setting `metrics_port`: {port} is in use on 127.0.0.1: name another one, or 0 for a free one" in other.log.read_text()
        rival = Process(data_dir, url)
        assert rival.popen.wait(60) == 2
        assert f"another collector (process {one.popen.pid}) works in {data_dir}" in rival.log.read_text()
        assert one.stop() == 0
    finally:
        one.kill()
    assert "Traceback" not in one.log.read_text()


@pytest.mark.skipif(DUCKDB is None, reason="no duckdb command line beside this Python or on the PATH")
def test_the_plain_duckdb_command_line_reads_the_file_while_the_collector_runs(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    one = Process(data_dir, f"local:{tmp_path / 's.sqlite'}")
    try:
        wait_for(lambda: (data_dir / FILE_NAME).exists(), one.log.read_text)
        done = subprocess.run(
            [str(DUCKDB), "-readonly", "-csv", str(data_dir / FILE_NAME), "SELECT state, version FROM published"],
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert done.stdout.splitlines()[-1] == f"running,{MAJOR}.{MINOR}", done.stderr
    finally:
        one.kill()
