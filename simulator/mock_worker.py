"""Starts mock engines: in this process (`MockWorker`), or each in its own (`MockWorkerProcess`, `start_workers`).

async with MockWorker(MockEngineSettings(port=0)) as worker:      # in this event loop
    worker.url, worker.event_ports, worker.replay_ports

workers = start_workers(4, MockEngineSettings(port=0))             # four processes; stop them with stop()
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import orjson
import uvicorn
import uvloop

from schemas.settings import SettingsError
from simulator.engine import MockEngine
from simulator.http_app import HttpApp
from simulator.processes import ending_with_us
from simulator.settings import MockEngineSettings


class _Server(uvicorn.Server):
    """Leaves signals to whoever started it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class MockWorker:
    """One mock engine with its HTTP server, inside the running event loop."""

    def __init__(self, settings: MockEngineSettings) -> None:
        self.settings = settings
        self.port = 0
        self._engine: MockEngine | None = None

    @property
    def engine(self) -> MockEngine:
        if self._engine is None:
            raise RuntimeError("the worker is not started")
        return self._engine

    @property
    def url(self) -> str:
        host = self.settings.host
        return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::', '') else host}:{self.port}"

    @property
    def event_ports(self) -> list[int]:
        return [r.publisher.endpoints.port for r in self.engine.ranks]

    @property
    def replay_ports(self) -> list[int]:
        return [r.publisher.endpoints.replay_port for r in self.engine.ranks]

    @property
    def running(self) -> asyncio.Task[None]:
        """The engine's loops. Ends only by an error, which leaving the `async with` raises."""
        return self._running

    def addresses(self) -> dict[str, Any]:
        return {"url": self.url, "http_port": self.port, "event_ports": self.event_ports, "replay_ports": self.replay_ports}

    async def __aenter__(self) -> MockWorker:
        listener = _listen(self.settings.host, self.settings.port)
        try:
            self._engine = MockEngine(self.settings)
        except BaseException:
            listener.close()
            raise
        self.port = int(listener.getsockname()[1])
        config = uvicorn.Config(
            HttpApp(self._engine),
            http="httptools",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="critical",
            timeout_graceful_shutdown=1,
        )
        self._listener = listener
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="mock-engine-http")
        self._running = asyncio.create_task(self._engine.run(), name="mock-engine-steps")
        while not self._server.started:
            if self._serving.done():
                await self.__aexit__(None, None, None)
                raise SettingsError(f"setting `port`: the HTTP server did not start on {self.settings.host}:{self.port}")
            await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving
        self._running.cancel()
        try:
            await asyncio.wait({self._running})
        finally:
            self._listener.close()
            self.engine.close()
        if not self._running.cancelled() and (failure := self._running.exception()) is not None:
            raise failure


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit this on Linux: small stream chunks must not wait for the client's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
    except OSError as e:
        listener.close()
        raise SettingsError(
            f"setting `port`: cannot listen on {host}:{port} ({e.strerror}); name a free port, or 0 to have one found"
        ) from e
    listener.setblocking(False)
    return listener


@dataclass(slots=True)
class MockWorkerProcess:
    """A mock engine in a process of its own. `stop` ends it."""

    process: subprocess.Popen[bytes]
    url: str = ""
    http_port: int = 0
    event_ports: list[int] = field(default_factory=list)
    replay_ports: list[int] = field(default_factory=list)

    @property
    def kv_addresses(self) -> list[tuple[str, str]]:
        """(events, replay) of each rank."""
        pairs = zip(self.event_ports, self.replay_ports, strict=True)
        return [(f"tcp://127.0.0.1:{e}", f"tcp://127.0.0.1:{r}") for e, r in pairs]

    def stop(self, timeout_s: float = 5.0) -> int:
        """Asks the process to end; kills it when it does not. Its exit status."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        status = self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status

    def kill(self) -> None:
        """As when the node is lost."""
        self.process.kill()
        self.stop()


def start_workers(count: int, settings: MockEngineSettings, timeout_s: float = 60.0) -> list[MockWorkerProcess]:
    """`count` mock engines, each in its own process, all ready. Ports in `settings` should be 0 when there are several.
    Raises SettingsError, having stopped all, when one does not come up."""
    command = ending_with_us([sys.executable, "-m", "simulator.mock_worker", settings.model_dump_json(exclude={"hash_key"})])
    workers = [MockWorkerProcess(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)) for _ in range(count)]
    deadline = time.monotonic() + timeout_s
    try:
        for worker in workers:
            said = orjson.loads(_first_line(worker.process, deadline) or b"null")
            if said is None:
                raise SettingsError(
                    f"a mock engine did not start within {timeout_s:.0f} s (exit status {worker.process.poll()}); its messages are above"
                )
            worker.url, worker.http_port = said["url"], said["http_port"]
            worker.event_ports, worker.replay_ports = said["event_ports"], said["replay_ports"]
    except BaseException:
        for worker in workers:
            worker.stop()
        raise
    return workers


def _first_line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            return b""
    return process.stdout.readline()


def run(settings: MockEngineSettings) -> int:
    """Serves until SIGINT or SIGTERM. When ready, prints one JSON line with the addresses on standard output."""

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sig, stop.set)
        async with MockWorker(settings) as worker:
            print(orjson.dumps(worker.addresses()).decode(), flush=True)
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({stopped, worker.running}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()

    uvloop.run(serve())
    return 0


def main(argv: list[str]) -> int:
    """One mock engine with settings as JSON; used by `start_workers`."""
    try:
        return run(MockEngineSettings.model_validate_json(argv[0]))
    except SettingsError as e:
        print(f"mock engine: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
