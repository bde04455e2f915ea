"""The whole path as a person runs it: `warmwatch demo` from mock workers to the published file, over the local log and over Kafka."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from schemas.tables.read import FILE_NAME, open_published

SECONDS = 15
LIMIT_S = 300
"""For a demo that should be through in a minute: the machine may have much else to do."""
pytestmark = pytest.mark.timeout(2 * LIMIT_S)


def demo(folder, *arguments, **popen):
    command = [sys.executable, "-m", "warmwatch", "demo", "--data-dir", str(folder), "--headless", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **popen)


def run_demo(folder, *arguments):
    with demo(folder, *arguments) as process:
        try:
            out, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, out


def ask(folder, question):
    with contextlib.closing(open_published(folder / FILE_NAME)) as db:
        return db.execute(question).fetchall()


def check_published(folder):
    """What must hold of every demo run, read from the published file."""
    ((requests, distinct, with_decision, unfinished),) = ask(
        folder,
        "SELECT count(*), count(DISTINCT request_id), count(router), count(*) FILTER (ended_at IS NULL) FROM requests",
    )
    assert requests == distinct == with_decision
    assert requests > 50
    assert unfinished == 0
    assert ask(folder, "SELECT count(*) FROM dead_letters") == [(0,)]
    assert ask(folder, "SELECT DISTINCT trust FROM workers") == [("exact",)]
    ((told, agreeing),) = ask(
        folder,
        "SELECT count(event_hit_tokens), count(*) FILTER (event_hit_tokens = cached_tokens) FROM requests WHERE cached_tokens IS NOT NULL",
    )
    assert told > 0.9 * requests
    assert agreeing > 0.9 * told
    ((rollup, rows),) = ask(folder, "SELECT (SELECT sum(requests) FROM worker_10s), (SELECT count(*) FROM requests)")
    assert rollup == rows


def test_every_request_is_accounted_for_over_the_local_log(tmp_path):
    status, out = run_demo(tmp_path / "demo", "--no-incidents", "--seconds", str(SECONDS))
    assert status == 0, out
    assert "Every one is accounted for" in out
    assert "policy cost" in out
    assert "policy round_robin" in out
    check_published(tmp_path / "demo")


@pytest.mark.kafka
def test_every_request_is_accounted_for_over_kafka(tmp_path, kafka):
    status, out = run_demo(tmp_path / "demo", "--no-incidents", "--seconds", str(SECONDS), "--kafka")
    assert status == 0, out
    assert "Every one is accounted for" in out
    check_published(tmp_path / "demo")


def test_ctrl_c_stops_everything_and_loses_nothing(tmp_path):
    with demo(tmp_path / "demo", start_new_session=True) as process:
        lines = []
        children = []
        for line in process.stdout:
            lines.append(line)
            if "requests, 0 failed" in line:
                children = psutil.Process(process.pid).children(recursive=True)
                os.killpg(process.pid, signal.SIGINT)
                break
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, "".join(lines) + out
    assert "Every one is accounted for" in out
    assert len(children) >= 7
    assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("words", ["starting 4 mock workers", "starting router"])
def test_ctrl_c_while_starting_stops_everything(tmp_path, words):
    with demo(tmp_path / "demo", start_new_session=True) as process:
        read = b""
        while words.encode() not in read:
            read += os.read(process.stdout.fileno(), 4096) or pytest.fail(read.decode())
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, read.decode() + out
    assert "stopped while starting" in out or "Every one is accounted for" in out
    assert children
    assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]


def test_a_killed_demo_leaves_no_process_behind(tmp_path):
    with demo(tmp_path / "demo") as process:
        for line in process.stdout:
            if "traffic runs" in line:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate(timeout=30)
    assert len(children) >= 7
    deadline = time.monotonic() + 40
    while any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children):
        assert time.monotonic() < deadline, [c.cmdline() for c in children if c.is_running()]
        time.sleep(0.1)


def test_a_part_that_ends_by_itself_is_told_and_fails_the_demo(tmp_path):
    with demo(tmp_path / "demo", "--seconds", "12") as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "traffic runs" in line:
                second = demo(tmp_path / "demo")
                out, _ = second.communicate(timeout=LIMIT_S)
                assert second.returncode == 2
                assert "another demo runs in" in out
                (bridge,) = [c for c in psutil.Process(process.pid).children() if "bridge" in c.cmdline()]
                bridge.kill()
        process.wait(LIMIT_S)
    out = "".join(lines)
    assert process.returncode == 1, out
    assert "demo: bridge ENDED by itself with status -9" in out
    assert "NOT in good order: bridge (ended by itself, status -9)" in out


def test_no_setting_of_the_environment_reaches_the_parts(tmp_path):
    settings = tmp_path / "production.toml"
    settings.write_text("[collect]\nno_such_setting = 1\n[route]\nno_such_setting = 1\n")
    environment = {**os.environ, "WARMWATCH_CONFIG": str(settings), "WARMWATCH_TOPIC_PREFIX": "prod."}
    with demo(tmp_path / "demo", "--seconds", "3", env=environment) as process:
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    status, out = run_demo(tmp_path)
    assert status == 2
    assert "setting `data_dir`" in out
    assert (tmp_path / "precious.txt").read_text() == "mine"
