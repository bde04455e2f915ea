"""Settings: flag over environment over file over default; what is wrong is named, secrets are not shown."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field

from schemas.settings import COMMANDS, Settings, SettingsError, load
from warmwatch import SUBCOMMANDS, _find, main

ROOT = Path(__file__).parents[2]


class Example(Settings):
    """An example."""

    command = "collect"
    port: int = Field(8080, ge=0, le=65535, description="the port")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("WARMWATCH_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_flag_over_environment_over_own_table_over_default(monkeypatch, tmp_path):
    file = tmp_path / "w.toml"
    assert load(Example, []).port == 8080
    file.write_text('log_level = "error"\n[collect]\nport = 2')
    assert load(Example, ["--config", str(file)]).port == 2
    assert load(Example, ["--config", str(file)]).log_level == "error"
    monkeypatch.setenv("WARMWATCH_CONFIG", str(file))
    assert load(Example, []).port == 2
    monkeypatch.setenv("WARMWATCH_PORT", "3")
    assert load(Example, []).port == 3
    assert load(Example, ["--port", "4"]).port == 4


def test_building_a_class_directly_reads_nothing(monkeypatch):
    monkeypatch.setenv("WARMWATCH_PORT", "3")
    assert Example().port == 8080


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "99999"], "setting `port`: Input should be less than or equal to 65535"),
        (["--port", "x"], "setting `port`: Input should be a valid integer"),
        (["--log-level", "loud"], "setting `log_level`: Input should be 'debug', 'info'"),
        (["--config", "missing.toml"], "missing.toml cannot be read: No such file"),
    ],
)
def test_a_wrong_value_names_its_key(argv, message):
    with pytest.raises(SettingsError, match=message):
        load(Example, argv)


def test_a_wrong_file_names_what_is_wrong(tmp_path):
    file = tmp_path / "w.toml"
    for text, message in [
        ("[collect]\nprot = 1", "setting `prot`: unknown"),
        ("port = ", "is no TOML"),
        ("collect = 3", "`collect` must be a table"),
        ("colour = 3", "`colour` is neither a subcommand's table"),
        ("[colect]\nport = 3", "`colect` is neither a subcommand's table"),
        ("port = 3", "settings of one process belong into its table"),
    ]:
        file.write_text(text)
        with pytest.raises(SettingsError, match=message):
            load(Example, ["--config", str(file)])
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="is no TOML"):
        load(Example, ["--config", str(file)])


def test_the_file_may_hold_settings_of_other_subcommands(tmp_path):
    file = tmp_path / "w.toml"
    file.write_text('stream = "local:x.sqlite"\n[route]\nport = 1')
    assert load(Example, ["--config", str(file)]).stream == "local:x.sqlite"


def test_a_local_deployment_makes_its_own_key_once(tmp_path):
    first, second = Example().key(), Example().key()
    assert first == second
    file = Path("data/hash.key")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(list(file.parent.iterdir())) == 1


def test_a_kafka_deployment_must_be_given_its_key():
    with pytest.raises(SettingsError, match=r"setting `hash_key`: none given .*every process of a deployment needs the same key"):
        Example(stream="kafka://127.0.0.1:9092").key()
    assert not Path("data").exists()


def test_a_key_file_that_cannot_be_made_or_read_says_what_to_do(tmp_path):
    with pytest.raises(SettingsError, match=r"setting `hash_key_file`: /proc/nowhere/hash.key cannot be made .*write access"):
        Example(hash_key_file="/proc/nowhere/hash.key").key()
    file = tmp_path / "hash.key"
    file.write_bytes(bytes(range(128, 144)))
    with pytest.raises(SettingsError, match="must hold 32 hexadecimal digits, not bytes"):
        Example(hash_key_file=file).key()


def test_secrets_are_not_shown(capsys):
    with pytest.raises(SettingsError) as e:
        load(Example, ["--hash-key", "deadbeef"]).key()
    assert "setting `hash_key`: hash key must be 32 hexadecimal digits" in str(e.value)
    assert "deadbeef" not in str(e.value)
    assert "deadbeef" not in repr(load(Example, ["--hash-key", "deadbeef"]))


def test_a_settings_file_may_have_a_table_for_each_subcommand():
    assert set(COMMANDS) == set(SUBCOMMANDS)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_exists_and_every_setting_of_it_is_explained(name, capsys):
    subcommand = SUBCOMMANDS[name]
    settings_class, run = _find(subcommand.settings), _find(subcommand.run)
    assert settings_class.command == name
    assert callable(run)
    assert all(field.description for field in settings_class.model_fields.values())
    with pytest.raises(SystemExit) as e:
        load(settings_class, ["--help"])
    assert e.value.code == 0
    help_text = capsys.readouterr().out
    assert "WARMWATCH_" in help_text
    for field in settings_class.model_fields:
        assert field.replace("_", "-") in help_text or field.upper() in help_text


def test_the_command_explains_itself(capsys):
    assert main([]) == 0
    assert "collect" in capsys.readouterr().out
    assert main(["nope"]) == 2
    assert "no subcommand 'nope'" in capsys.readouterr().err
    assert main(["mark", "x", "--stream", "nonsense"]) == 2
    assert "warmwatch mark: setting `stream`: 'nonsense' is no stream address" in capsys.readouterr().err


def test_output_that_nobody_reads_any_more_is_no_error():
    command = [sys.executable, "-m", "warmwatch", "json-schemas"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_another_broken_pipe_is_not_taken_for_that(monkeypatch):
    def run(settings):
        raise BrokenPipeError("a socket of its own")

    monkeypatch.setattr("schemas.export.run", run)
    with pytest.raises(BrokenPipeError):
        main(["json-schemas"])
