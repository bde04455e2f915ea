"""The keys file: who may send requests, for which tenant, how much, and until when.

[[keys]]
name = "ci"                              # in logs, metrics and errors; never the key itself
sha256 = "9f86d081884c7d65..."           # of the key; `warmwatch route-key` makes a key and this entry
tenant = "team-a"                        # default: "default"
requests_per_minute = 600                # each of these may be left out: no limit
tokens_per_minute = 2_000_000            # prompt tokens
max_in_flight = 64
expires = 2027-01-31T00:00:00Z
models = ["coder"]                       # names that clients send; default: all

Plain SHA-256 is right here, and a slow salted hash (scrypt, argon2) is not: those make guessing dear where people choose the secret. A key
of `route-key` is 256 random bits, which nobody guesses at any speed, two keys are never equal, and a hash on each request that takes 50 ms
would be a way to stop the router. What is looked up in a table is the digest: its bytes can't be steered without breaking SHA-256, so
how long the look-up takes says nothing about a key. Keys that people made up are not safe in this file.

A key comes as `Authorization: Bearer KEY` (OpenAI's clients) or `x-api-key: KEY` (Anthropic's); with both, one that is known is enough.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from router.access.rates import Limits
from router.access.refusal import Refused
from schemas.settings import SettingsError, explain

CREDENTIAL_HEADERS = frozenset((b"authorization", b"x-api-key"))

_HOW = "send `Authorization: Bearer KEY` or `x-api-key: KEY`"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, as its key tells it. expires_s: unix seconds. models None: all."""

    name: str
    tenant: str = "default"
    limits: Limits = field(default_factory=Limits)
    expires_s: float | None = None
    models: frozenset[str] | None = None


def _digest(value: object) -> object:
    """Says what would be right without repeating the text: somebody may have put a key there."""
    if not isinstance(value, str) or len(value) != 64 or not set(value.lower()) <= set("0123456789abcdef"):
        raise ValueError("must be the key's SHA-256 as 64 hexadecimal digits; warmwatch route-key makes a key and its entry")
    return value.lower()


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class KeyEntry(_Part):
    name: str = Field(min_length=1, max_length=200, pattern=r"^[^\s/]+$", description="no slash or white space")
    sha256: Annotated[str, BeforeValidator(_digest)] = Field(repr=False)
    tenant: str = Field("default", min_length=1, max_length=200)
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    max_in_flight: int | None = Field(None, ge=1)
    expires: AwareDatetime | None = None
    models: tuple[str, ...] | None = Field(None, min_length=1)

    def caller(self) -> Caller:
        return Caller(
            self.name,
            self.tenant,
            Limits(self.requests_per_minute, self.tokens_per_minute, self.max_in_flight),
            None if self.expires is None else self.expires.timestamp(),
            None if self.models is None else frozenset(self.models),
        )


class KeysFile(_Part):
    keys: tuple[KeyEntry, ...] = Field(min_length=1)  # an empty file is a file half written, not a door shut on purpose

    @model_validator(mode="after")
    def _each_once(self) -> KeysFile:
        for what in ("name", "sha256"):
            seen: dict[str, int] = {}
            for i, entry in enumerate(self.keys):
                first = seen.setdefault(getattr(entry, what), i)
                if first != i:
                    raise ValueError(f"keys[{first}] and keys[{i}] have the same {what}")
        return self


class Keyring:
    """The keys of one state of the file. Never changes: a file that changed is another keyring."""

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        self._callers = {bytes.fromhex(e.sha256): e.caller() for e in entries}

    def __repr__(self) -> str:
        return f"Keyring({len(self._callers)} keys)"

    @property
    def names(self) -> frozenset[str]:
        return frozenset(c.name for c in self._callers.values())

    def authenticate(self, headers: Iterable[tuple[bytes, bytes]], now_unix_s: float) -> Caller:
        """headers: names in lower case. Raises Refused."""
        given = False
        for name, value in headers:
            if name not in CREDENTIAL_HEADERS:
                continue
            if name == b"authorization":
                scheme, _, value = value.partition(b" ")
                if scheme.lower() != b"bearer":
                    continue
            given = True
            caller = self._callers.get(hashlib.sha256(value.strip()).digest())
            if caller is None:
                continue
            if caller.expires_s is not None and now_unix_s >= caller.expires_s:
                raise Refused("expired_key", f"the API key {caller.name} has expired")
            return caller
        if given:
            raise Refused("unknown_key", f"the API key is not valid here; {_HOW}")
        raise Refused("no_key", f"an API key is needed: {_HOW}")


def load_keys(path: Path) -> Keyring:
    """Reads and checks a keys file. Raises SettingsError that names the file, the key and what would be right; never a value."""
    try:
        content = tomllib.loads(path.read_text())
    except OSError as e:
        raise SettingsError(f"setting `api_keys_file`: {path} cannot be read: {e.strerror}; make an entry with warmwatch route-key") from e
    except tomllib.TOMLDecodeError as e:
        raise SettingsError(f"setting `api_keys_file`: {path} is no TOML: {e}") from e
    except UnicodeDecodeError:  # not chained: it holds the file's bytes
        raise SettingsError(f"setting `api_keys_file`: {path} is no TOML: not UTF-8") from None
    try:
        return Keyring(KeysFile.model_validate(content).keys)
    except ValidationError as e:
        raise SettingsError(f"setting `api_keys_file`: {path}:\n{explain(e)}") from None
