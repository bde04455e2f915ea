"""A real Kafka broker for tests, through deploy/kafka/kafka.sh."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

KAFKA_DIR = Path(__file__).parents[1] / "deploy" / "kafka"
SCRIPT = KAFKA_DIR / "kafka.sh"


class Broker:
    """One broker on free loopback ports, with its records under `data`. It keeps its address when it is started again."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.bootstrap = ""

    @property
    def url(self) -> str:
        return f"kafka://{self.bootstrap}?connect.timeout.s=2"

    def start(self) -> None:
        """Start and wait until it answers (first time about 5 s, again about 5 s)."""
        self.bootstrap = self._run("start").strip()

    def stop(self) -> None:
        """End it in good order."""
        self._run("stop")

    def kill(self) -> None:
        """End it with SIGKILL."""
        state = dict(line.split("=", 1) for line in (self.data / "broker.env").read_text().splitlines())
        if self.running():
            os.kill(int(state["PID"]), signal.SIGKILL)
            self._run("stop")  # returns when the process is gone

    def lose_all_records(self) -> None:
        """Make it start empty, at the same address, as another cluster. Stop it first."""
        shutil.rmtree(self.data / "log")

    def running(self) -> bool:
        return self._call("status").returncode == 0

    def _run(self, command: str) -> str:
        done = self._call(command)
        if done.returncode:
            raise RuntimeError(f"kafka.sh {command}: {done.stderr.strip()}")
        return done.stdout

    def _call(self, command: str) -> subprocess.CompletedProcess[str]:
        arguments = [str(SCRIPT), command, "--data", str(self.data)]
        # Output goes through files, not pipes: the broker lives on and would hold a pipe open.
        out, err = self.data / f"{command}.out", self.data / f"{command}.err"
        with out.open("w") as stdout, err.open("w") as stderr:
            code = subprocess.run(arguments, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, timeout=300).returncode
        return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())


def missing() -> str | None:
    """What this machine lacks for a broker; None when nothing."""
    if shutil.which("java") is None:
        return "java is missing (Debian: apt-get install openjdk-17-jre-headless)"
    if shutil.which("mvn") is None and not (KAFKA_DIR / "lib" / ".complete").exists():
        return "mvn is missing (Debian: apt-get install maven)"
    return None
