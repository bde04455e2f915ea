"""Where the other replicas are: fixed addresses, or one name that leads to all of them (a headless service of Kubernetes).

A name is looked up again every few seconds; a look-up that fails leaves the addresses as they were. Which of them is our own we need not
know: what we hear of ourselves is left out by its run.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]


def checked_address(value: str, listens: bool = False) -> str:
    """tcp://HOST:PORT or ipc://FILE. Raises ValueError that says what would be right."""
    if value.startswith("ipc://") and len(value) > len("ipc://"):
        return value
    try:
        parts = urlsplit(value)
        good = parts.scheme == "tcp" and bool(parts.hostname) and parts.port is not None and not parts.path
        wild = parts.hostname == "*" or parts.port == 0
    except ValueError:  # the port is no number up to 65535
        good = wild = False
    if not good or (wild and not listens):
        raise ValueError(f"must be a ZeroMQ address such as {'tcp://10.0.0.7:5570' if listens else 'tcp://routers:5570'}, or ipc://FILE")
    return value


def host_and_port(address: str) -> tuple[str, int] | None:
    """Of an address whose host is a name that has to be looked up; else None."""
    if not address.startswith("tcp://"):
        return None
    parts = urlsplit(address)
    assert parts.hostname is not None
    assert parts.port is not None
    try:
        ipaddress.ip_address(parts.hostname)
    except ValueError:
        return parts.hostname, parts.port
    return None


async def system_lookup(host: str, port: int) -> Sequence[str]:
    """All addresses of a host. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for *_, sockaddr in found]


async def resolved(addresses: Sequence[str], before: Sequence[str], lookup: Lookup) -> tuple[str, ...]:
    """Addresses to connect to, each once. before: those of the last time, kept where a name can't be looked up now."""
    out: dict[str, None] = {}
    for address in addresses:
        name = host_and_port(address)
        if name is None:
            out[address] = None
            continue
        host, port = name
        try:
            found = await lookup(host, port)
        except (OSError, UnicodeError):  # the latter for what can be no name
            out |= dict.fromkeys(a for a in before if a not in addresses and a.endswith(f":{port}"))
            continue
        for ip in found:
            out[f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"] = None
    return tuple(out)
