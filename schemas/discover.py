"""Where a pool's workers are found while the router runs: `discover` in the fleet file.

    dns://coder.default.svc:8000     each address of the name (A and AAAA records) is a worker on this port
    file:///run/endpoints.json       Kubernetes EndpointSlices or Endpoints as `kubectl get -o json` writes them, or a list of urls

Both may end in options that hold for each worker found: ?engine=sglang&ranks=2&hardware=h100&scheme=https; for a file also port= (a
number, or the name of one of its ports), needed where it has several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlsplit

_FORM = "must be such as dns://coder:8000 or file:///run/endpoints.json, with options such as ?engine=sglang&ranks=2"
_CHOICES = {"engine": ("vllm", "sglang"), "scheme": ("http", "https")}
_OPTIONS = {"dns": ("engine", "ranks", "hardware", "scheme"), "file": ("engine", "ranks", "hardware", "scheme", "port")}


@dataclass(frozen=True, slots=True)
class Discover:
    """kind dns: host and port; kind file: path. port: a number, or for a file perhaps a name, or None."""

    kind: Literal["dns", "file"]
    host: str
    path: str
    port: str | None
    engine: str = "vllm"
    ranks: int = 1
    hardware: str | None = None
    scheme: str = "http"


def parse_discover(address: object) -> Discover:
    """Raises ValueError that says what would be right."""
    try:
        parts = urlsplit(address) if isinstance(address, str) else urlsplit("")
        host, port = parts.hostname or "", parts.port
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise ValueError(_FORM) from None
    dns = parts.scheme == "dns" and host and port and parts.path in ("", "/")
    if not dns and not (parts.scheme == "file" and not parts.netloc and parts.path.startswith("/")):
        raise ValueError(_FORM)
    known = _OPTIONS[parts.scheme]
    for name, value in options.items():
        if name not in known or not value:
            raise ValueError(f"has the option {name!r}; there are {', '.join(known)}, each with a value")
        if name in _CHOICES and value not in _CHOICES[name]:
            raise ValueError(f"has {name}={value}; it is {' or '.join(_CHOICES[name])}")
        if name == "ranks" and not (value.isdecimal() and 1 <= int(value) <= 1024):
            raise ValueError(f"has ranks={value}; it is a number from 1 to 1024")
    return Discover(
        "dns" if dns else "file", host, unquote(parts.path), str(port) if dns else options.get("port"),
        options.get("engine", "vllm"), int(options.get("ranks", 1)), options.get("hardware"), options.get("scheme", "http"),
    )  # fmt: skip
