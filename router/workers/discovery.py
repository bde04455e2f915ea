"""Workers that are found while the router runs: the addresses of a DNS name, or a Kubernetes endpoints file (form: schemas/discover.py).

A pod that Kubernetes is ending but that still serves is found as draining; one that is not ready is not found. A worker's name is its
host:port, as the bridge names it by default. Where there are addresses of both families those of IPv4 count, for a dual-stack pod would
be two workers otherwise. What cannot be had or read is a NotFound: then nothing changes, because a name server that
is away says nothing about the workers, and their health checks do.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from schemas.discover import Discover
from schemas.fleet import Worker, without_credentials
from schemas.settings import explain

_MOST_BYTES = 64 << 20
_RESOLVE_S = 10.0
MOST_WORKERS = 1024
"""A bound against nonsense; the index is built for half as many."""


class NotFound(Exception):  # noqa: N818 - a value, named for what it is
    """What `discover` names could not be had, or makes no sense."""


@dataclass(frozen=True, slots=True)
class Found:
    """Workers, and the names of those among them that are about to go."""

    workers: tuple[Worker, ...]
    draining: frozenset[str] = frozenset()


async def find(pool: str, discover: Discover) -> Found:
    """Raises NotFound."""
    if discover.kind == "file":
        return await asyncio.to_thread(_read, pool, discover)
    try:
        async with asyncio.timeout(_RESOLVE_S):
            infos = await asyncio.get_running_loop().getaddrinfo(discover.host, int(discover.port or 0), type=socket.SOCK_STREAM)
    except TimeoutError:
        raise NotFound(f"no answer for the name {discover.host} in {_RESOLVE_S:g} s") from None
    except OSError as e:
        raise NotFound(f"the name {discover.host} has no addresses: {e.strerror or e}") from e
    return Found(_workers(pool, discover, _urls(discover, _one_family({(str(info[4][0]), int(info[4][1])) for info in infos}))))


def _read(pool: str, discover: Discover) -> Found:
    try:
        with Path(discover.path).open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as e:
        raise NotFound(f"{discover.path} cannot be read: {e.strerror}") from e
    if len(content) > _MOST_BYTES:
        raise NotFound(f"{discover.path} is over {_MOST_BYTES >> 20} MB")
    try:
        return parse_endpoints(pool, discover, orjson.loads(content))
    except orjson.JSONDecodeError as e:
        raise NotFound(f"{discover.path} is no JSON: {e}") from e
    except NotFound as e:
        raise NotFound(f"{discover.path}: {e}") from e


def parse_endpoints(pool: str, discover: Discover, content: Any) -> Found:
    """content: the file's JSON. Raises NotFound that names the key."""
    if isinstance(content, list) and all(isinstance(url, str) for url in content):
        return Found(_workers(pool, discover, list(dict.fromkeys(content))))
    ready: set[tuple[str, int]] = set()
    ending: set[tuple[str, int]] = set()
    try:
        for item in _items(content):
            for host, port, is_ready in _slice(item, discover) if item["kind"] == "EndpointSlice" else _endpoints(item, discover):
                (ready if is_ready else ending).add((host, port))
    except (KeyError, TypeError, AttributeError) as e:
        raise NotFound(f"is no list of urls, EndpointSlice or Endpoints as Kubernetes writes them ({type(e).__name__}: {e})") from e
    all_of_them = _one_family(ready | ending)  # a pod may be in two slices while it moves
    found = _workers(pool, discover, _urls(discover, all_of_them))
    return Found(found, frozenset(w.name for w, place in zip(found, all_of_them, strict=True) if place not in ready))


def _one_family(places: set[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted([p for p in places if ":" not in p[0]] or places)


def _items(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    kind = content["kind"]
    if kind in ("EndpointSlice", "Endpoints"):
        yield content
    elif kind in ("List", "EndpointSliceList", "EndpointsList"):
        for item in content["items"]:  # items of a typed list may leave their kind out
            yield from _items(item if "kind" in item else item | {"kind": kind.removesuffix("List")})
    else:
        raise NotFound(f"has an object of kind {kind!r}; there should be EndpointSlice, Endpoints or a List of them")


def _slice(item: dict[str, Any], discover: Discover) -> Iterator[tuple[str, int, bool]]:
    """Addresses and ports of an EndpointSlice; unknown (null) conditions mean ready, as Kubernetes has it."""
    if item.get("addressType") == "FQDN" or not item.get("endpoints"):
        return
    port = _port(item.get("ports") or [], discover)
    for endpoint in item["endpoints"]:
        conditions = endpoint.get("conditions") or {}
        ready = conditions.get("ready") is not False
        if ready or (conditions.get("serving") and conditions.get("terminating")):
            for address in endpoint["addresses"][:1]:  # further ones are the same pod
                yield address, port, ready


def _endpoints(item: dict[str, Any], discover: Discover) -> Iterator[tuple[str, int, bool]]:
    for subset in item.get("subsets") or []:
        for address in subset.get("addresses") or []:
            yield address["ip"], _port(subset.get("ports") or [], discover), True


def _port(ports: list[dict[str, Any]], discover: Discover) -> int:
    """The one that `discover` means; without a word of it, the only one."""
    if discover.port is not None and discover.port.isdecimal():
        return int(discover.port)
    fitting = [p for p in ports if discover.port is None or p.get("name") == discover.port]
    if len(fitting) != 1 or not isinstance(fitting[0].get("port"), int):
        names = ", ".join(f"{p.get('name')}: {p.get('port')}" for p in ports) or "none"
        raise NotFound(f"does not tell the port ({names}): say which with ?port=NUMBER or ?port=NAME after `discover`")
    return int(fitting[0]["port"])


def _urls(discover: Discover, places: list[tuple[str, int]]) -> list[str]:
    return [f"{discover.scheme}://{f'[{h}]' if ':' in h else h}:{p}" for h, p in places]


def _workers(pool: str, discover: Discover, urls: list[str]) -> tuple[Worker, ...]:
    if len(urls) > MOST_WORKERS:
        raise NotFound(f"names {len(urls)} workers; a pool may have {MOST_WORKERS}")
    return tuple(_worker(pool, discover, url) for url in urls)


def _worker(pool: str, discover: Discover, url: str) -> Worker:
    try:
        return Worker.model_validate(
            {"pool": pool, "url": url, "engine": discover.engine, "ranks": discover.ranks, "hardware": discover.hardware}
        )
    except ValidationError as e:
        raise NotFound(f"a worker {without_credentials(url)!r} is wrong: {explain(e)}") from e
