"""deploy/kafka/kafka.sh: what it says when it cannot, and that it ends only its own broker."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.kafka_broker import SCRIPT, Broker


def _run(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) if path is None else {**os.environ, "PATH": path}
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60, env=environment)


def _tools_without(tmp_path: Path, *left_out: str) -> str:
    """A PATH with the script's tools, but not these."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "env", "dirname", "mkdir", "sed", "head", "cksum", "flock", "cat", "rm", "tr", "grep", "java", "mvn"):
        found = shutil.which(tool)
        if found and tool not in left_out:
            (tools / tool).symlink_to(found)
    return str(tools)


def test_a_missing_java_is_named_with_the_package_to_install(tmp_path: Path) -> None:
    done = _run("start", "--data", str(tmp_path / "k"), path=_tools_without(tmp_path, "java"))
    assert done.returncode == 1 and "java is missing: install Java 17" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("begin",), "use: kafka.sh start|stop|status"),
        (("start", "--prot", "1"), "unknown argument '--prot'"),
        (("start", "--port", "x"), "--port 'x' must be a number"),
        (("start", "--owner", "me"), "--owner 'me' must be a process id"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    done = subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1 and says in done.stderr


def test_status_and_stop_of_a_broker_that_never_ran(tmp_path: Path) -> None:
    assert _run("status", "--data", str(tmp_path)).returncode == 3
    assert _run("stop", "--data", str(tmp_path)).returncode == 0


def test_stop_leaves_a_process_alone_that_got_the_number_later(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            (tmp_path / "broker.env").write_text(f"PID={other.pid}\nPORT=1\nCONTROLLER_PORT=2\nBOOTSTRAP=127.0.0.1:1\n")
            assert _run("status", "--data", str(tmp_path)).returncode == 3
            assert "not running" in _run("stop", "--data", str(tmp_path)).stderr
            assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.kafka
def test_a_broker_ends_with_its_owner_however_that_ended(own_kafka: Broker) -> None:
    own_kafka.stop()
    with subprocess.Popen(["sleep", "600"]) as owner:
        try:
            data = str(own_kafka.data)
            assert _run("start", "--data", data, "--owner", str(owner.pid)).returncode == 0
            assert own_kafka.running()
        finally:
            owner.kill()
    deadline = time.monotonic() + 20
    while own_kafka.running():
        assert time.monotonic() < deadline, "it outlived its owner"
        time.sleep(0.2)


@pytest.mark.kafka
def test_a_second_start_finds_the_running_broker_and_a_taken_port_is_refused(own_kafka: Broker, tmp_path: Path) -> None:
    data = str(own_kafka.data)
    assert _run("status", "--data", data).stdout.strip() == own_kafka.bootstrap
    assert _run("start", "--data", data).stdout.strip() == own_kafka.bootstrap
    other_port = _run("start", "--data", data, "--port", "1")
    assert other_port.returncode == 1 and "already runs on port" in other_port.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = _run("start", "--data", str(tmp_path / "second"), "--port", str(port))
    assert done.returncode == 1 and f"port {port} is in use" in done.stderr
    own_kafka.stop()
    assert not own_kafka.running()
    assert _run("status", "--data", data).returncode == 3
