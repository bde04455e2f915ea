"""One subcommand of `warmwatch` as a child process: started with a log file, ready when it says so, ended with us.

A subcommand prints `READY name=address ...` on its standard output once it can do its job; everything else it says goes to the log.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from schemas.settings import SettingsError

PR_SET_PDEATHSIG = 1


class Subprocess:
    """A running subcommand. A context manager: leaving it asks the process to end, and kills it when it does not."""

    def __init__(self, name: str, arguments: list[str], logs: Path, stop_limit_s: float = 20.0) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = logs / f"{name}.log"
        self._stop_limit_s = stop_limit_s
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "warmwatch", name, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is ours to pass on, in order
                preexec_fn=end_with_parent if sys.platform == "linux" else None,  # no thread of ours holds a lock yet
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self, limit_s: float) -> dict[str, str]:
        """The addresses of its READY line. Raises SettingsError with the end of the log when it ends or says nothing in time."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                line = self._read_line(self._process.stdout)
                if line.startswith("READY "):
                    return dict(part.split("=", 1) for part in line.split()[1:] if "=" in part)
                if not line:
                    break
        status = self._process.poll()
        why = f"it did not get ready within {limit_s:.0f} s" if status is None else f"it ended with status {status}"
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])
        raise SettingsError(f"{self.name} did not start: {why}; the end of {self.log}:\n{tail}")

    @staticmethod
    def _read_line(stdout: IO[bytes]) -> str:
        return stdout.readline().decode(errors="replace").strip()

    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> int:
        """Exit status after SIGTERM, or after SIGKILL when it outlived the limit."""
        if self.running():
            self._process.terminate()
            try:
                self._process.wait(self._stop_limit_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        status = self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return status

    def __enter__(self) -> Subprocess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def end_with_parent() -> None:
    """In the child, before it starts: the kernel sends it SIGTERM when the parent is gone, however that came."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
