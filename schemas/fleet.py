"""The fleet file: which pools and workers there are. Bridge and router read the same file.

[[pools]]
name = "coder"                      # workers of a pool serve one model with one tokenizer, block size and cache namespace
model = "Qwen/Qwen3-Coder"          # the name that clients send; default: the pool's name
tokenizer = "/models/coder"         # folder with tokenizer.json and the chat template; without it the engine's /tokenize is asked
tokens = "auto"                     # how prompts are read: exact (tokenizer), engine (/tokenize), text (pieces of text); default: setting
discover = "dns://coder:8000"       # more workers, found while the router runs (form: schemas/discover.py); the bridge does not look there

[[workers]]
pool = "coder"
name = "gpu-3:8000"                 # default: host:port of the url
url = "http://gpu-3:8000"           # the engine's HTTP address
engine = "vllm"                     # or "sglang"
events = "tcp://gpu-3:5557"         # ZMQ address of rank 0's KV events; rank r uses port + r. Default: asked from the engine
replay = "tcp://gpu-3:5657"         # likewise, for replay
ranks = 1                           # data-parallel ranks
hardware = "h100"                   # any label; workers with the same one in a pool are taken to be equally fast
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from schemas.discover import parse_discover
from schemas.settings import SettingsError, explain


def _http_url(value: object) -> object:
    if not isinstance(value, str) or not value.startswith(("http://", "https://")) or not _has_host_and_port(value):
        raise ValueError("must be an http:// or https:// address such as http://gpu-3:8000")
    return value.rstrip("/")


def _zmq_address(value: object) -> object:
    if value is None or (isinstance(value, str) and value.startswith("ipc://")):
        return value
    if not isinstance(value, str) or not value.startswith("tcp://") or not _has_host_and_port(value, port_needed=True):
        raise ValueError("must be a ZeroMQ address such as tcp://gpu-3:5557")
    return value


def _discover_address(value: object) -> object:
    if value is not None:
        parse_discover(value)
    return value


def _has_host_and_port(address: str, port_needed: bool = False) -> bool:
    try:
        parts = urlsplit(address)
        return bool(parts.hostname) and (parts.port is not None or not port_needed)
    except ValueError:  # the port is no number up to 65535
        return False


def without_credentials(url: str) -> str:
    """For logs and people: an engine's address may have a user and a password in it."""
    return re.sub(r"//[^/]*@", "//", url)


ZmqAddress = Annotated[str | None, BeforeValidator(_zmq_address)]


TokensBy = Literal["auto", "exact", "engine", "text"]
"""How a router reads prompts: auto is exact with a tokenizer, else engine, and text where the engine does not answer."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Pool(_Part):
    name: str = Field(min_length=1, max_length=200, pattern=r"^[^/\s]+$", description="no slash or white space")
    model: str | None = Field(None, min_length=1, max_length=1024)
    tokenizer: Path | None = None
    tokens: TokensBy | None = None
    discover: Annotated[str | None, BeforeValidator(_discover_address)] = None

    @property
    def model_name(self) -> str:
        return self.model or self.name


class Worker(_Part):
    pool: str
    name: str = Field("", max_length=200, pattern=r"^[^/\s]*$", description="no slash or white space; default host:port")
    url: Annotated[str, BeforeValidator(_http_url)]
    engine: Literal["vllm", "sglang"] = "vllm"
    events: ZmqAddress = None
    replay: ZmqAddress = None
    ranks: int = Field(1, ge=1, le=1024)
    hardware: str | None = Field(
        None, min_length=1, max_length=100, description="label; workers of a pool with the same one are equally fast"
    )

    @property
    def address(self) -> str:
        """Its url as it may be shown."""
        return without_credentials(self.url)

    @model_validator(mode="before")
    @classmethod
    def _default_name(cls, data: object) -> object:
        if isinstance(data, dict) and not data.get("name") and isinstance(data.get("url"), str):
            return {**data, "name": urlsplit(data["url"]).netloc.rpartition("@")[2]}
        return data


class Fleet(_Part):
    pools: tuple[Pool, ...] = Field(min_length=1)
    workers: tuple[Worker, ...] = ()

    @model_validator(mode="after")
    def _names(self) -> Fleet:
        pools = [p.name for p in self.pools]
        if len(set(pools)) != len(pools):
            raise ValueError("two pools have the same name")
        models = [p.model_name for p in self.pools]
        if len(set(models)) != len(models):
            raise ValueError(f"two pools serve the same model name, so a request could not tell which it means: {models}")
        seen = set()
        at: dict[tuple[str, str], str] = {}
        for i, w in enumerate(self.workers):
            if w.pool not in pools:
                raise ValueError(f"workers[{i}] ({w.name}) names the pool {w.pool!r}, which is not among the pools {pools}")
            if (w.pool, w.name) in seen:
                raise ValueError(f"workers[{i}]: the pool {w.pool!r} has two workers named {w.name!r}")
            seen.add((w.pool, w.name))
            if (other := at.setdefault((w.pool, w.url), w.name)) != w.name:
                raise ValueError(
                    f"workers[{i}]: the pool {w.pool!r} has {other!r} and {w.name!r} at one url, {w.address}; an engine is one worker"
                )
        return self

    def pool(self, name: str) -> Pool:
        return next(p for p in self.pools if p.name == name)

    def workers_of(self, pool: str) -> tuple[Worker, ...]:
        return tuple(w for w in self.workers if w.pool == pool)


def load_fleet(path: Path) -> Fleet:
    """Reads and checks a fleet file. Raises SettingsError that names the file, the key and what would be right."""
    try:
        text = path.read_text()
    except OSError as e:
        raise SettingsError(
            f"fleet file {path} cannot be read: {e.strerror}; name one with --fleet (see schemas/fleet.py for its form)"
        ) from e
    except UnicodeDecodeError as e:
        raise SettingsError(f"fleet file {path} is no TOML: {e}") from e
    try:
        return Fleet.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as e:
        raise SettingsError(f"fleet file {path} is no TOML: {e}") from e
    except ValidationError as e:
        raise SettingsError(f"fleet file {path}:\n{explain(e)}") from e
