"""Settings of every process: command-line flag over environment variable over TOML file over default. Nothing else reads the environment.

A process declares a subclass of `Settings`; each field is one setting:

    class CollectorSettings(Settings):
        command = "collect"
        data_dir: Path = Field(Path("data"), description="folder of the published database")

gives `--data-dir`, `WARMWATCH_DATA_DIR` and `data_dir = ...` in the table `[collect]` of the file named by `--config` or
`WARMWATCH_CONFIG`; what all processes share (`stream` and so on) may stand at its top instead. A wrong value or an unknown key stops the
start with a message that names the key and says what would be right; secrets never appear in it. Building a class directly (tests, the
demo) reads nothing.
"""

from __future__ import annotations

import argparse
import os
import secrets
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import (
    SettingsError as LibrarySettingsError,
)

from schemas.block_hash import HashKey

PREFIX = "WARMWATCH_"
EXIT_BAD_SETTINGS = 2
COMMANDS = (
    "demo",
    "bridge",
    "collect",
    "route",
    "route-key",
    "dashboard",
    "sql",
    "explain",
    "report",
    "mark",
    "mock-engine",
    "traffic",
    "json-schemas",
)
"""The tables that a settings file may have."""


class SettingsError(Exception):
    """A setting is wrong; the message names it and says what would be right."""


class Settings(BaseSettings):
    """What all processes share. Subclasses add their own and set `command`."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=PREFIX,
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        hide_input_in_errors=True,
    )
    command: ClassVar[str] = ""

    config: Path | None = Field(None, description="TOML file with settings")
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
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")

    def key(self) -> HashKey:
        """The hash key. Raises SettingsError when there is none, or when it is not 32 hexadecimal digits."""
        if self.hash_key is not None:
            return _parse_key(self.hash_key.get_secret_value(), "hash_key")
        try:
            if not self.hash_key_file.exists() and self.stream.startswith(("local:", "memory:")):
                _make_key_file(self.hash_key_file)
        except OSError as e:
            raise SettingsError(
                f"setting `hash_key_file`: {self.hash_key_file} cannot be made ({e.strerror}): give this user write access to its folder, "
                f"name another file, or set {PREFIX}HASH_KEY"
            ) from e
        try:
            return _parse_key(self.hash_key_file.read_text(), f"hash_key_file {self.hash_key_file}")
        except OSError as e:
            raise SettingsError(
                f"setting `hash_key`: none given and {self.hash_key_file} cannot be read ({e.strerror}); every process of a deployment "
                f"needs the same key: set {PREFIX}HASH_KEY, or write 32 hexadecimal digits (openssl rand -hex 16) to that file"
            ) from e
        except UnicodeDecodeError:  # not chained: it holds the file's bytes
            raise SettingsError(f"setting `hash_key_file`: {self.hash_key_file} must hold 32 hexadecimal digits, not bytes") from None

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


S = TypeVar("S", bound=Settings)


def load(cls: type[S], argv: Sequence[str]) -> S:
    """Builds the settings of one process. Exits with help for --help; raises SettingsError for anything wrong."""
    first_look = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first_look.add_argument("--config", default=os.environ.get(PREFIX + "CONFIG"))
    config = first_look.parse_known_args(argv)[0].config
    file = _file_values(cls, Path(config)) if config else {}

    command = cls.command

    class Loaded(cls):  # type: ignore[misc, valid-type]
        __doc__ = (
            f"{(cls.__doc__ or '').strip()}\n\nEvery flag is also an environment variable ({PREFIX}LOG_LEVEL for --log-level) "
            "and a key of the settings file."
        )

        @classmethod
        def settings_customise_sources(cls, settings_cls: type[BaseSettings], *_: Any, **__: Any) -> tuple[PydanticBaseSettingsSource, ...]:
            flags: CliSettingsSource[Any] = CliSettingsSource(settings_cls, cli_parse_args=list(argv), cli_prog_name=f"warmwatch {command}")
            return flags, EnvSettingsSource(settings_cls), InitSettingsSource(settings_cls, file)

    try:
        found = Loaded()
    except ValidationError as e:
        raise SettingsError(explain(e)) from e
    except LibrarySettingsError as e:
        raise SettingsError(str(e)) from e
    return cls.model_construct(**dict(found))  # type: ignore[return-value]  # the plugin widens a generic's model_construct


def environment_without_settings() -> dict[str, str]:
    """This process's environment without any setting, for child processes that are told all they need by flags."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}


def explain(error: ValidationError) -> str:
    """One line for each thing that is wrong, naming the key and what would be right. Never the value: it may be a secret."""
    lines = []
    for e in error.errors(include_url=False, include_input=False):
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in e["loc"]).lstrip(".")
        if e["type"] == "extra_forbidden":
            lines.append(f"setting `{key}`: unknown; see --help for those that exist")
        else:
            lines.append(f"setting `{key}`: {e['msg'].removeprefix('Value error, ')}" if key else e["msg"].removeprefix("Value error, "))
    return "\n".join(lines)


def _file_values(cls: type[Settings], path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except OSError as e:
        raise SettingsError(f"settings file {path} cannot be read: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise SettingsError(f"settings file {path} is no TOML: {e}") from e
    for key, value in content.items():
        if key in COMMANDS and not isinstance(value, dict):
            raise SettingsError(f"settings file {path}: `{key}` must be a table")
        if key not in COMMANDS and key not in Settings.model_fields:
            raise SettingsError(
                f"settings file {path}: `{key}` is neither a subcommand's table ({', '.join(f'[{c}]' for c in COMMANDS)}) nor a setting "
                f"of all processes ({', '.join(Settings.model_fields)}); settings of one process belong into its table"
            )
    shared = {k: v for k, v in content.items() if k not in COMMANDS}
    own: dict[str, Any] = content.get(cls.command, {})
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
    try:
        with draft.open("w") as file:
            file.write(secrets.token_hex(16) + "\n")
            file.flush()
            os.fsync(file.fileno())  # an empty key after a power cut would orphan every hash recorded before it
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
