"""`warmwatch route-key`: makes an API key for the router. The key goes to stderr, once, and its entry to stdout:

    warmwatch route-key --name ci --tenant team-a --requests-per-minute 600 >> keys.toml

so that the file gets the hash and nothing else. Nobody can find the key again from the entry.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
from typing import ClassVar

from pydantic import AwareDatetime, Field

from schemas.settings import Settings

_KEY_BYTES = 32


class RouteKeySettings(Settings):
    """Makes an API key for the router: the key on stderr, shown this once; the entry for its keys file (api_keys_file) on stdout."""

    command: ClassVar[str] = "route-key"

    name: str = Field(min_length=1, max_length=200, pattern=r"^[^\s/]+$", description="name of the key in logs, metrics and errors")
    tenant: str = Field("default", min_length=1, max_length=200, description="whose requests they are")
    requests_per_minute: int | None = Field(None, ge=1, description="default: no limit")
    tokens_per_minute: int | None = Field(None, ge=1, description="prompt tokens; default: no limit")
    max_in_flight: int | None = Field(None, ge=1, description="requests at once; default: no limit")
    expires: AwareDatetime | None = Field(None, description="time with its zone, such as 2027-01-31T00:00:00Z; default: never")
    models: tuple[str, ...] | None = Field(None, min_length=1, description="model names that it may use; default: all")


def run(settings: RouteKeySettings) -> int:
    key = new_key()
    print(f"the key, shown this once: {key}", file=sys.stderr)
    print(entry(settings, key), flush=True)
    return 0


def new_key() -> str:
    return "ww-" + secrets.token_urlsafe(_KEY_BYTES)


def entry(settings: RouteKeySettings, key: str) -> str:
    """Of the keys file; JSON's strings and lists of strings are TOML's too."""
    lines = ["[[keys]]", f"name = {_text(settings.name)}", f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
    if settings.tenant != "default":
        lines.append(f"tenant = {_text(settings.tenant)}")
    for name in ("requests_per_minute", "tokens_per_minute", "max_in_flight"):
        value = getattr(settings, name)
        if value is not None:
            lines.append(f"{name} = {value}")
    if settings.expires is not None:
        lines.append(f"expires = {settings.expires.isoformat()}")
    if settings.models is not None:
        lines.append(f"models = [{', '.join(map(_text, settings.models))}]")
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
