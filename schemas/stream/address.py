"""From a stream's address to the stream.

    local:///var/lib/warmwatch/log.sqlite     a file, absolute; local:data/log.sqlite is relative to the working directory
    kafka://host:9092,host2:9092              bootstrap servers
    memory://name                             inside this process, in the MemoryHub handed in

Options follow as a query; kafka.py and local.py document theirs. A backend is imported when its address is opened. No message repeats
what may be a password that somebody put into the address.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from schemas.stream.base import BadStreamUrl, Stream
from schemas.stream.memory import MemoryHub

FORMS = "local:///absolute/log.sqlite, local:relative/log.sqlite or kafka://host:9092[,host:9092]"


def open_stream(url: str, *, memory: MemoryHub | None = None) -> Stream:
    """Open the stream that `url` names; does not connect yet.

    `memory` is where memory:// addresses live: two opens of one name in one hub see the same records.
    """
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise BadStreamUrl(f"{_shown(url)!r} is no stream address ({error}): use {FORMS}") from error
    if parts.fragment:
        raise BadStreamUrl(f"{_shown(url)!r} has a '#' part, which a stream address does not have: write %23 for #, or use {FORMS}")
    if "@" in parts.netloc:
        raise BadStreamUrl(
            f"{_shown(url)!r}: a user name and password have no place in an address, which is logged: "
            "use sasl.username and sasl.password.file=/path"
        )
    match parts.scheme:
        case "local":
            if parts.netloc:
                raise BadStreamUrl(
                    f"{_shown(url)!r} names {parts.netloc!r} as a host: a local log needs three slashes when absolute "
                    f"(local:///{parts.netloc}{parts.path}) and none when relative (local:{parts.netloc}{parts.path})"
                )
            if parts.path in ("", "/"):
                raise BadStreamUrl(f"{_shown(url)!r} names no file: use {FORMS}")
            from schemas.stream.local import LocalStream

            return LocalStream(Path(parts.path), options)
        case "kafka":
            if parts.path not in ("", "/"):
                raise BadStreamUrl(f"{_shown(url)!r} has a path ({parts.path!r}), which Kafka does not: use {FORMS}")
            from schemas.stream.kafka import KafkaStream

            return KafkaStream(parts.netloc, options)
        case "memory":
            if memory is None:
                raise BadStreamUrl(f"{_shown(url)!r} needs a MemoryHub of this process and is for tests only: use {FORMS}")
            return memory.open(parts.netloc)
        case _:
            raise BadStreamUrl(f"{_shown(url)!r} is no stream address: use {FORMS}")


def _shown(url: str) -> str:
    """The address without what can hide a password: all before the last @, and the options."""
    scheme, slashes, rest = url.partition("//")
    rest, mark, _ = rest.rpartition("@")[2].partition("?")
    return scheme.partition("?")[0] + slashes + rest + (mark and "?...")
