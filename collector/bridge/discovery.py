"""Where a worker's KV events are: from the fleet file, else asked from the engine.

    fleet file   events = "tcp://gpu-3:5557"          rank r uses port + r, for events and replay alike
    vLLM         GET /kv_event_sources (from 0.31)    {"0": {"endpoint": ..., "replay_endpoint": ..., ...}, ...}
    SGLang       GET /server_info                     {"kv_events": {"endpoint_host": ..., "endpoint_port_base": ..., ...}}

Hosts that mean "any" to the engine are replaced by the host of the worker's URL. Pure but for `ask`.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from schemas.fleet import Worker

_ANY_HOSTS = ("*", "0.0.0.0", "::", "[::]", "")
_TCP = re.compile(r"tcp://(?P<host>\[[^\]]*\]|[^:/]*):(?P<port>\d{1,5})$")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """ZMQ addresses of one rank. replay None: there is none."""

    events: str
    replay: str | None = None


def from_fleet(worker: Worker) -> dict[int, Endpoints]:
    """Endpoints of each rank as the fleet file gives them; {} when it gives none."""
    if worker.events is None:
        return {}
    return {
        rank: Endpoints(_of_rank(worker.events, rank), None if worker.replay is None else _of_rank(worker.replay, rank))
        for rank in range(worker.ranks)
    }


def from_vllm(answer: Any, worker: Worker) -> dict[int, Endpoints]:
    """Reads /kv_event_sources. Raises ValueError when the answer has another form."""
    if not isinstance(answer, dict):
        raise ValueError("its answer is no object keyed by rank")
    out = {}
    for name, source in answer.items():
        if not name.isdigit() or not isinstance(source, dict):
            raise ValueError("its answer is no object keyed by rank")
        events = source.get("endpoint")
        if source.get("enable_kv_cache_events") is False or source.get("publisher") == "null" or not isinstance(events, str):
            continue
        replay = source.get("replay_endpoint")
        out[int(name)] = Endpoints(
            _reachable(events, worker.url), _reachable(replay, worker.url) if isinstance(replay, str) and replay else None
        )
    if len(out) == 1 and worker.ranks == 1:  # one rank of several, each its own worker here
        return {0: next(iter(out.values()))}
    return {rank: endpoints for rank, endpoints in out.items() if rank < worker.ranks}


def from_sglang(answer: Any, worker: Worker) -> dict[int, Endpoints]:
    """Reads /server_info. Raises ValueError when its kv_events has another form; {} when it has none."""
    events = answer.get("kv_events") if isinstance(answer, dict) else None
    if not events:
        return {}
    if not isinstance(events, dict) or events.get("publisher") in (None, "null"):
        return {}
    host, base, replay_base = events.get("endpoint_host"), events.get("endpoint_port_base"), events.get("replay_endpoint_port_base")
    if type(base) is not int:
        raise ValueError("its kv_events names no endpoint_port_base")
    host = _host(host if isinstance(host, str) else "*", worker.url)
    return {
        rank: Endpoints(f"tcp://{host}:{base + rank}", f"tcp://{host}:{replay_base + rank}" if type(replay_base) is int else None)
        for rank in range(worker.ranks)
    }


async def ask(session: aiohttp.ClientSession, worker: Worker, timeout_s: float) -> dict[int, Endpoints]:
    """Endpoints as the engine tells them. Raises ValueError that says why there are none; aiohttp and time-out errors pass through."""
    path = "/kv_event_sources" if worker.engine == "vllm" else "/server_info"
    async with session.get(worker.url + path, timeout=aiohttp.ClientTimeout(timeout_s)) as response:
        if response.status != 200:
            raise ValueError(f"GET {path} answers {response.status}")
        answer = await response.json(content_type=None)
    found = from_vllm(answer, worker) if worker.engine == "vllm" else from_sglang(answer, worker)
    if not found:
        raise ValueError(f"GET {path} says that KV events are off")
    return found


def _of_rank(address: str, rank: int) -> str:
    if rank == 0:
        return address
    match = re.fullmatch(r"(.*):(\d+)", address)
    if match is None:
        return f"{address}_dp{rank}"
    return f"{match[1]}:{int(match[2]) + rank}"


def _reachable(address: str, url: str) -> str:
    match = _TCP.match(address)
    return f"tcp://{_host(match['host'], url)}:{match['port']}" if match else address


def _host(host: str, url: str) -> str:
    if host not in _ANY_HOSTS:
        return host
    own = urlsplit(url).hostname or "127.0.0.1"
    try:
        return f"[{own}]" if ipaddress.ip_address(own).version == 6 else own
    except ValueError:
        return own
