"""The demo's fleet of processes as the incidents see it: workers that can be made to fail, new ones on a node of their own, the router."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from schemas.mark import MarkSettings
from schemas.mark import run as run_mark
from simulator.mock_worker import MockWorkerProcess, start_workers
from simulator.processes import Subprocess
from simulator.settings import TINY_TOKENIZER, MockEngineSettings
from simulator.traffic import Traffic

POOL = "demo"
START_LIMIT_S = 300.0
"""Of a part to get ready. The first start on a machine compiles kernels: a minute or two of two cores, in all parts together."""
Children = dict[str, Callable[[], int | None]]
"""Name of a part -> its exit status, None while it runs."""


@dataclass(slots=True)
class Running:
    """What the incidents need to know of the parts that run."""

    router_url: str
    admin_url: str
    fleet: Path
    workers: list[MockWorkerProcess]
    worker_blocks: int
    stream: str
    common: list[str]
    """Arguments of every subcommand."""
    logs: Path
    parts: contextlib.ExitStack
    children: Children


class LiveFleet:
    """The incidents' hands on the running demo."""

    def __init__(self, running: Running, traffic: Traffic) -> None:
        self._running, self._traffic = running, traffic

    async def restart(self, worker: int) -> None:
        await self._tell(worker, "restart", {})

    async def stamp(self, template: str, on: bool) -> None:
        text = f"{template}: prompt v2, begins with the time" if on else f"{template}: back to prompt v1"
        await asyncio.to_thread(self._mark, text)
        (self._traffic.stamped.add if on else self._traffic.stamped.discard)(template)

    async def limit_cache(self, worker: int, share: float) -> None:
        await self._tell(worker, "capacity", {"blocks": int((self._running.worker_blocks - 1) * share)})

    async def join(self, count: int) -> None:
        await asyncio.to_thread(self._join, count)

    async def follow(self, policy: str) -> None:
        await self._post(f"{self._running.admin_url}/policy", {"policy": policy})

    async def lose_events(self, worker: int, batches: int) -> None:
        await self._tell(worker, "drop_events", {"batches": batches, "for_good": True})

    async def _tell(self, worker: int, what: str, body: dict[str, Any]) -> None:
        workers = self._running.workers
        await self._post(f"{workers[worker % len(workers)].url}/_sim/{what}", body)

    async def _post(self, url: str, body: dict[str, Any]) -> None:
        async with aiohttp.ClientSession() as client, client.post(url, json=body) as answer:
            answer.raise_for_status()

    def _mark(self, text: str) -> None:
        run_mark(MarkSettings(stream=self._running.stream, text=text, kind="deploy", author="demo", pool=POOL))

    def _join(self, count: int) -> None:
        """New workers on a node of their own, with a bridge of their own; the router finds them in the fleet file."""
        r = self._running
        first = len(r.workers)
        r.workers += live_workers(count, r.worker_blocks, r.parts)
        draft = r.fleet.with_suffix(".draft")
        draft.write_text(fleet_file(r.workers))
        draft.replace(r.fleet)
        names = [f"w{i}" for i in range(first, first + count)]
        chosen = [part for name in names for part in ("--workers", name)]
        arguments = [*r.common, "--fleet", str(r.fleet), "--metrics-port", "0", *chosen]
        bridge = r.parts.enter_context(Subprocess("bridge", arguments, r.logs / "second-node"))
        bridge.ready(START_LIMIT_S)
        r.children |= {"second bridge": bridge.status}
        r.children |= {f"mock worker {name}": r.workers[first + i].process.poll for i, name in enumerate(names)}


def live_workers(count: int, blocks: int, parts: contextlib.ExitStack) -> list[MockWorkerProcess]:
    """Mock workers of so many blocks, which end with `parts`. Raises SettingsError when one does not start."""
    workers = start_workers(count, MockEngineSettings(port=0, model=POOL, num_gpu_blocks=blocks, per_request_metrics=True), START_LIMIT_S)
    for worker in workers:
        parts.callback(worker.stop)
    return workers


def fleet_file(workers: list[MockWorkerProcess]) -> str:
    """The fleet file of these workers, named w0, w1 and so on."""
    lines = ["[[pools]]", f'name = "{POOL}"', f'tokenizer = "{TINY_TOKENIZER}"']
    for i, worker in enumerate(workers):
        ((events, replay),) = worker.kv_addresses
        lines += ["", "[[workers]]", f'pool = "{POOL}"', f'name = "w{i}"', f'url = "{worker.url}"']
        lines += [f'events = "{events}"', f'replay = "{replay}"']
    return "\n".join(lines) + "\n"
