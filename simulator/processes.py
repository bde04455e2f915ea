"""One subcommand of `warmwatch` as a child process: started with a log file, ready when it says so, ended with us.

A subcommand prints `READY name=address ...` on its standard output once it can do its job. All that it says goes to its log, too.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

from schemas.settings import SettingsError, environment_without_settings

READY = "READY "


def ending_with_us(command: list[str]) -> list[str]:
    """The command such that the kernel ends it with SIGTERM when this process is gone, however that came; as it is where util-linux's
    setpriv is missing. The signal comes with the end of the thread that starts it: start from one that stays."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", *command] if setpriv else command


class Subprocess:
    """A running subcommand. A context manager: leaving it asks the process to end, and kills it when it does not."""

    def __init__(self, name: str, arguments: list[str], logs: Path, stop_limit_s: float = 20.0) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = logs / f"{name}.log"
        self._stop_limit_s = stop_limit_s
        self._addresses: dict[str, str] | None = None
        self._told = threading.Event()  # it got ready, or it ended
        self._process = subprocess.Popen(
            ending_with_us([sys.executable, "-m", "warmwatch", name, *arguments]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment_without_settings(),  # a setting meant for a real deployment must not reach into this one
            start_new_session=True,  # Ctrl-C is ours to pass on, in order
        )
        self._listener = threading.Thread(target=self._listen, name=f"{name}-output", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output, self.log.open("wb", buffering=0) as log:
            for line in output:
                log.write(line)
                if self._addresses is None and line.startswith(READY.encode()):
                    words = line.decode(errors="replace").split()[1:]
                    self._addresses = dict(word.split("=", 1) for word in words if "=" in word)
                    self._told.set()
        self._told.set()

    def ready(self, limit_s: float) -> dict[str, str]:
        """The addresses of its READY line. Raises SettingsError with the end of the log when it ends or says nothing in time."""
        told = self._told.wait(limit_s)
        if self._addresses is None:
            status = self._process.wait(5) if told else None  # its output has ended: so will it
            why = f"it did not get ready within {limit_s:.0f} s" if status is None else f"it ended with status {status}"
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])
            raise SettingsError(f"{self.name} did not start: {why}; the end of {self.log}:\n{tail}")
        return self._addresses

    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll()

    def stop(self) -> int:
        """Exit status after SIGTERM, or after SIGKILL when it outlived the limit."""
        if self.status() is None:
            self._process.terminate()
            try:
                self._process.wait(self._stop_limit_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        status = self._process.wait()
        self._listener.join()
        return status

    def __enter__(self) -> Subprocess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
