"""The fleet file: defaults, and errors that name the key."""

import pytest

from schemas.fleet import load_fleet
from schemas.settings import SettingsError

GOOD = """
[[pools]]
name = "coder"
[[workers]]
pool = "coder"
url = "http://gpu-3:8000/"
"""


def test_defaults_are_sane(tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_text(GOOD)
    fleet = load_fleet(file)
    (worker,) = fleet.workers_of("coder")
    assert (worker.name, worker.url, worker.engine, worker.ranks) == ("gpu-3:8000", "http://gpu-3:8000", "vllm", 1)
    assert fleet.pool("coder").model_name == "coder"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"setting `pools`: Field required"),
        (GOOD.replace("http://gpu-3:8000/", "gpu-3:8000"), r"setting `workers\[0\].url`: must be an http:// or https:// address"),
        (GOOD.replace('pool = "coder"', 'pool = "other"'), r"workers\[0\] .* names the pool 'other'"),
        (GOOD + 'events = "gpu-3:5557"', r"setting `workers\[0\].events`: must be a ZeroMQ address"),
        (GOOD.replace(":8000/", ":port"), r"setting `workers\[0\].url`: must be an http"),
        (GOOD + 'events = "tcp://gpu-3:port"', r"setting `workers\[0\].events`: must be a ZeroMQ address"),
        (GOOD + 'events = "tcp://gpu-3"', r"setting `workers\[0\].events`: must be a ZeroMQ address"),
        (GOOD + '[[pools]]\nname = "b"\nmodel = "coder"', "two pools serve the same model name"),
        (GOOD + "evnts = 1", r"setting `workers\[0\].evnts`: unknown"),
        (GOOD + '[[workers]]\npool = "coder"\nurl = "http://gpu-3:8000"', "two workers named 'gpu-3:8000'"),
        (GOOD + '[[workers]]\npool = "coder"\nname = "dup"\nurl = "http://gpu-3:8000/"', r"has 'gpu-3:8000' and 'dup' at one url"),
        (GOOD + '[[pools]]\nname = "coder"', "two pools have the same name"),
        (GOOD.replace('name = "coder"', 'name = "a/b"'), r"setting `pools\[0\].name`"),
        ("[[", "is no TOML"),
    ],
)
def test_a_wrong_file_names_the_key_and_what_would_be_right(tmp_path, text, message):
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message) as e:
        load_fleet(file)
    assert str(file) in str(e.value)


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(SettingsError, match=r"none\.toml cannot be read: No such file"):
        load_fleet(tmp_path / "none.toml")
