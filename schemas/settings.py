"""Settings of every process: command-line flag over environment variable over TOML file over default. Nothing else reads the environment.

A process declares a subclass of `Settings`; each field is one setting:

    class CollectorSettings(Settings):
        data_dir: Path = Field(Path("data"), description="folder of the published database")

gives `--data-dir`, `WARMWATCH_DATA_DIR` and `data_dir = ...` in the file named by `--config` or `WARMWATCH_CONFIG` (top level, or in a
table named after the subcommand, which wins). A wrong value, or an unknown key in the file's own table, stops the start with a message
that names the key and says what would be right; secrets (`SecretStr`) never appear in it.
"""

from __future__ import annotations

import argparse
import os
import secrets
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from schemas.block_hash import HashKey

PREFIX = "WARMWATCH_"
EXIT_BAD_SETTINGS = 2


class SettingsError(Exception):
    """A setting is wrong; the message names it and says what would be right."""


class Settings(BaseModel):
    """What all processes share. Subclasses add their own and set `command`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    command: ClassVar[str] = ""

    stream: str = Field(
        "local:data/stream.sqlite",
        description="the stream: local:FILE (embedded, one machine) or kafka://HOST:PORT[,HOST:PORT]",
    )
    hash_key: SecretStr | None = Field(
        None, description="the deployment's 128-bit hash key, 32 hexadecimal digits; the same for every process of a deployment"
    )
    hash_key_file: Path = Field(
        Path("data/hash.key"), description="file that holds the hash key; with a local stream it is made when missing"
    )
    topic_prefix: str = Field("", max_length=100, pattern=r"^[a-zA-Z0-9._-]*$", description="put before every topic name")
    log_level: typing.Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")

    def key(self) -> HashKey:
        """The hash key. Raises SettingsError when there is none, or when it is not 32 hexadecimal digits."""
        if self.hash_key is not None:
            return _parse_key(self.hash_key.get_secret_value(), "hash_key")
        if not self.hash_key_file.exists() and self.stream.startswith(("local:", "memory:")):
            _make_key_file(self.hash_key_file)
        try:
            return _parse_key(self.hash_key_file.read_text(), f"hash_key_file {self.hash_key_file}")
        except OSError as e:
            raise SettingsError(
                f"setting `hash_key`: none given and {self.hash_key_file} cannot be read ({e.strerror}); every process of a deployment needs "
                f"the same key: set {PREFIX}HASH_KEY, or write 32 hexadecimal digits (openssl rand -hex 16) to that file"
            ) from e


S = TypeVar("S", bound=Settings)


def load(cls: type[S], argv: Sequence[str], environ: Mapping[str, str] | None = None) -> S:
    """Builds the settings of one process. Exits with help for --help; raises SettingsError for anything wrong."""
    environ = os.environ if environ is None else environ
    given = vars(parser(cls).parse_args(argv))
    config = given.pop("config") or environ.get(PREFIX + "CONFIG")
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, found in (
        (f"in {config}", _file_values(cls, Path(config)) if config else {}),
        ("from the environment", _environment_values(cls, environ)),
        ("on the command line", {k: v for k, v in given.items() if v is not None}),
    ):
        values |= found
        origin |= dict.fromkeys(found, source)
    try:
        return cls.model_validate(values)
    except ValidationError as e:
        raise SettingsError(explain(e, origin)) from e


def parser(cls: type[Settings]) -> argparse.ArgumentParser:
    """One flag a setting, with its environment variable and default in the help text."""
    out = argparse.ArgumentParser(prog=f"warmwatch {cls.command}", description=(cls.__doc__ or "").strip().splitlines()[0])
    out.add_argument("--config", metavar="FILE", help=f"TOML file with settings [{PREFIX}CONFIG]")
    for name, field in cls.model_fields.items():
        default = "none" if field.default is None else "required" if field.is_required() else str(field.default)
        text = f"{field.description} [{PREFIX}{name.upper()}; {default}]".replace("%", "%%")
        if _is(field, bool):
            out.add_argument(_flag(name), action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            out.add_argument(_flag(name), metavar=name.upper(), nargs="*" if _is_list(field) else None, help=text)
    return out


def explain(error: ValidationError, origin: Mapping[str, str] | None = None) -> str:
    """One line for each thing that is wrong, naming the key, where it came from, and what would be right."""
    lines = []
    for e in error.errors(include_url=False):
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in e["loc"]).lstrip(".")
        if e["type"] == "extra_forbidden":
            lines.append(f"setting `{key}`: unknown; see --help for those that exist")
            continue
        top = str(e["loc"][0]) if e["loc"] else ""
        where = f" ({origin[top]})" if origin and top in origin else ""
        got = "" if e["type"] == "missing" or "secret" in top or "key" in top else f", got {e['input']!r}"
        lines.append(f"setting `{key}`{where}: {e['msg'].removeprefix('Value error, ')}{got}")
    return "\n".join(lines)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is(field: FieldInfo, kind: type) -> bool:
    return field.annotation is kind


def _is_list(field: FieldInfo) -> bool:
    hint = field.annotation
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return any(typing.get_origin(o) in (list, tuple) for o in options)


def _environment_values(cls: type[Settings], environ: Mapping[str, str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
        value = environ.get(PREFIX + name.upper())
        if value is not None:
            out[name] = value.replace(",", " ").split() if _is_list(field) else value
    return out


def _file_values(cls: type[Settings], path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except OSError as e:
        raise SettingsError(f"settings file {path} cannot be read: {e.strerror}") from e
    except tomllib.TOMLDecodeError as e:
        raise SettingsError(f"settings file {path} is no TOML: {e}") from e
    own = content.get(cls.command, {})
    if not isinstance(own, dict):
        raise SettingsError(f"settings file {path}: `{cls.command}` must be a table")
    shared = {k: v for k, v in content.items() if k in cls.model_fields}
    return shared | own


def _parse_key(text: str, name: str) -> HashKey:
    try:
        return HashKey.from_hex(text)
    except ValueError as e:
        raise SettingsError(f"setting `{name}`: {e}") from e


def _make_key_file(path: Path) -> None:
    """Several processes may start at once: whoever links the file first decides."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    draft.touch(mode=0o600)
    draft.write_text(secrets.token_hex(16) + "\n")
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
