"""Which credentials go on to the workers: the engines' own key, the client's, or none.

upstream_api_key or its file    that key, on every request to a worker (probes and /tokenize too); the client's stays here
no upstream key, no keys file   what the client sent goes on: the engines check it themselves
no upstream key, keys file      none: the keys are this router's, and a worker has no business with them
forward_credentials             says otherwise where there is no upstream key
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from router.access.keys import CREDENTIAL_HEADERS
from schemas.settings import SettingsError


@dataclass(frozen=True, slots=True)
class UpstreamCredentials:
    """withheld: the client's headers that stay here, lower case. added: what every request to a worker carries; a secret."""

    withheld: frozenset[bytes] = frozenset()
    added: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def upstream_credentials(
    key: SecretStr | None, key_file: Path | None, forward_credentials: bool | None, has_keys_file: bool
) -> UpstreamCredentials:
    """From the settings of these names. Raises SettingsError; its text never holds the key."""
    if key is not None and key_file is not None:
        raise SettingsError("settings `upstream_api_key`, `upstream_api_key_file`: give one of them")
    secret = key.get_secret_value().strip() if key is not None else _read(key_file) if key_file is not None else None
    if secret is None:
        forward = not has_keys_file if forward_credentials is None else forward_credentials
        return UpstreamCredentials(frozenset() if forward else CREDENTIAL_HEADERS)
    if forward_credentials:
        raise SettingsError("setting `forward_credentials`: the engines get their own key (upstream_api_key), so the client's can't go on")
    setting = "upstream_api_key" if key is not None else "upstream_api_key_file"
    if not secret or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise SettingsError(f"setting `{setting}`: must be a key of printable ASCII characters without white space")
    return UpstreamCredentials(CREDENTIAL_HEADERS, (("Authorization", f"Bearer {secret}"),))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as e:
        raise SettingsError(f"setting `upstream_api_key_file`: {path} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError:  # not chained: it holds the file's bytes
        raise SettingsError(f"setting `upstream_api_key_file`: {path} must hold a key, not bytes") from None
