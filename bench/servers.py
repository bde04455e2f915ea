"""What the routers' benchmark runs: mock workers, the routers one at a time, the load generator. Each is a process on a core of its own,
on loopback, ended with the benchmark however that ends.

    WORKER_CORE   mock workers, load generator, this benchmark        ROUTER_CORE   the router, with all its threads

A router's CPU time is what the kernel has charged to all processes of its session: threads and children included, in steps of 10 ms.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

HERE = Path(__file__).parent
ROOT = HERE.parent
PEERS = ROOT / ".state" / "bench"
WORKERS = 8
ROUTER_CORE, WORKER_CORE = 1, 0
_READY_S = 90.0
_STOP_S = 20.0
_GO = ("/usr/local/go/bin/go", "/usr/lib/go/bin/go")


class Missing(SystemExit):
    """Something that the benchmark needs is not there; the message says what."""


def load_program() -> Path:
    """bench/load, built. Raises Missing."""
    go = shutil.which("go") or next((path for path in _GO if Path(path).exists()), None)
    if go is None:
        raise Missing("bench-router needs Go 1.22 or newer for its load generator and mock workers (bench/load); `go` was not found")
    program = PEERS / "load"
    PEERS.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=mod", "GOPROXY": "off"}
    built = subprocess.run([go, "build", "-o", str(program), "."], cwd=HERE / "load", env=env, capture_output=True, text=True)
    if built.returncode:
        raise Missing(f"bench/load did not build: {built.stderr[-2000:]}")
    return program


def peers_python() -> Path:
    """The Python of the peers' own environment, made when it is not there or not as pinned. Raises Missing."""
    pins = HERE / "peers-requirements.txt"
    venv, mark = PEERS / "venv", PEERS / "installed.txt"
    python = venv / "bin" / "python"
    if python.exists() and mark.exists() and mark.read_text() == pins.read_text():
        return python
    say("installing the peers into an environment of their own (.state/bench) ...")
    PEERS.mkdir(parents=True, exist_ok=True)
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(venv)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement", str(pins)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Missing(f"the peers could not be installed ({' '.join(command[1:4])} ...):\n{done.stderr[-2000:]}")
    mark.write_text(pins.read_text())
    return python


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Processes started inside run on that core, with all their threads."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Process:
    """A server process: started on a core, in a session of its own, its output in a file."""

    def __init__(self, name: str, command: Sequence[str], core: int, folder: Path, cwd: Path = ROOT) -> None:
        self.name, self._log_path = name, folder / f"{name}.log"
        self._log = self._log_path.open("wb")
        setpriv = shutil.which("setpriv")
        env = {k: v for k, v in os.environ.items() if not k.startswith("WARMWATCH_")}
        with on_core(core):
            self.process = subprocess.Popen(
                [setpriv, "--pdeathsig", "KILL", *command] if setpriv else command,
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, cwd=cwd, env=env, start_new_session=True,
            )  # fmt: skip

    def output(self) -> str:
        return self._log_path.read_text(errors="replace")

    def until(self, ready: Callable[[], bool], limit_s: float = _READY_S) -> None:
        deadline = time.monotonic() + limit_s
        while not ready():
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended with status {self.process.returncode}:\n{self.output()[-3000:]}")
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.name} was not ready within {limit_s:.0f} s:\n{self.output()[-3000:]}")
            time.sleep(0.05)

    def cpu_s(self) -> float:
        """User and system seconds of all its threads and children so far."""
        ticks = sum(int(f[11]) + int(f[12]) for _, f in process_stats() if int(f[3]) == self.process.pid)
        return ticks / os.sysconf("SC_CLK_TCK")

    def peak_rss_mb(self) -> float:
        try:
            text = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return 0.0
        return next((round(int(line.split()[1]) / 1024, 1) for line in text.splitlines() if line.startswith("VmHWM:")), 0.0)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(10)
        self._log.close()


def process_stats() -> Iterator[tuple[int, list[str]]]:
    """(pid, fields of /proc/PID/stat after the command) of every process: 1 parent, 3 session, 11 to 14 user and system ticks, own and of
    ended children."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


def ask(address: str, method: str, path: str, body: bytes | None = None, timeout_s: float = 5.0) -> tuple[int, dict[str, str], bytes]:
    """Status, headers in lower case, body. Raises OSError or HTTPException."""
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body is not None else {})
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def answers(address: str, path: str, method: str = "GET", body: bytes | None = None) -> bool:
    try:
        return ask(address, method, path, body)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


class Workers:
    """Mock workers of bench/load."""

    def __init__(self, program: Path, folder: Path) -> None:
        self._process = Process("workers", [str(program), "worker", "-n", str(WORKERS)], WORKER_CORE, folder)
        self._process.until(lambda: "\n" in self._process.output())
        self.addresses = [f"127.0.0.1:{port}" for port in json.loads(self._process.output())["ports"]]

    def answer_in(self, writes: int, pause_us: int) -> None:
        """How answers are written from now on."""
        if not answers(self.addresses[0], f"/_bench/answer?writes={writes}&pause_us={pause_us}", "POST", b""):
            raise SystemExit("the mock workers do not take orders")

    def stop(self) -> None:
        self._process.stop()


@dataclass(frozen=True)
class Load:
    """bench/load as the client. `run` returns what it tells."""

    program: Path

    def run(self, to: str, prompts: Path, *flags: str) -> dict[str, Any]:
        with on_core(WORKER_CORE):
            done = subprocess.run(
                [str(self.program), "load", "-to", to, "-prompts", str(prompts), *flags], capture_output=True, text=True, timeout=300
            )
        if done.returncode:
            raise SystemExit(f"the load generator failed: {done.stderr[-2000:]}")
        told: dict[str, Any] = json.loads(done.stdout)
        return told


def peer_command(name: str, policy: str, python: Path, port: int, workers: Sequence[str]) -> list[str]:
    urls = [f"http://{address}" for address in workers]
    shared = ["--host", "127.0.0.1", "--port", str(port), "--policy", policy, "--prometheus-host", "127.0.0.1"]
    shared += ["--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1", "--worker-urls", *urls]
    if name == "sglang-router":
        return [str(python), "-m", "sglang_router.launch_router", "--log-level", "warn", *shared]
    return [str(python.with_name("vllm-router")), "--log-level", "warning", *shared]


class Peer:
    """One of the Rust routers with one of its policies."""

    def __init__(self, name: str, policy: str, python: Path, workers: Sequence[str], body: bytes, folder: Path) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        command = peer_command(name, policy, python, port, workers)
        self.command = " ".join([Path(command[0]).name, *command[1:]])
        self.server = Process(f"{name}-{policy}", command, ROUTER_CORE, folder)
        try:
            self.server.until(lambda: answers(self.address, "/v1/chat/completions", "POST", body))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.server.stop()


class Warmwatch:
    """Our router, as a process: local tokenizer, embedded stream."""

    def __init__(self, workers: Sequence[str], folder: Path, tree: Path = ROOT, flags: Sequence[str] = ()) -> None:
        self.stream, self.key_file = f"local:{folder / 'stream.sqlite'}", folder / "hash.key"
        fleet = folder / "fleet.toml"
        lines = ["[[pools]]", f'name = "{POOL}"', 'model = "bench-model"', f'tokenizer = "{ROOT / "simulator" / "tokenizer"}"']
        for number, address in enumerate(workers):
            lines += ["[[workers]]", f'pool = "{POOL}"', f'name = "{worker_name(number)}"', f'url = "http://{address}"']
        fleet.write_text("\n".join(lines) + "\n")
        arguments = [
            "--fleet",
            str(fleet),
            "--stream",
            self.stream,
            "--hash-key-file",
            str(self.key_file),
            "--port",
            "0",
            "--admin-port",
            "0",
        ]
        self.server = Process(
            "warmwatch", [sys.executable, "-m", "warmwatch", "route", *arguments, *flags], ROUTER_CORE, folder, tree
        )  # fmt: skip
        self.command = "warmwatch route " + " ".join(flags)
        try:
            self.server.until(self._told)
            self.server.until(lambda: answers(self.address, "/readyz"))
        except BaseException:
            self.stop()
            raise

    def _told(self) -> bool:
        for line in self.server.output().splitlines():
            if line.startswith("READY "):
                self.address = urlsplit(line.split("router=")[1].split()[0]).netloc
                return True
        return False

    def metrics(self) -> dict[str, float]:
        """Sums over labels, by name."""
        sums: dict[str, float] = {}
        for line in ask(self.address, "GET", "/metrics")[2].decode().splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.partition("{")[0]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def stop(self) -> None:
        self.server.stop()


POOL = "bench"


def worker_name(number: int) -> str:
    return f"gpu-{number}"
