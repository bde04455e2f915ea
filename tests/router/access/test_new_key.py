"""`warmwatch route-key`: what it prints on stdout is an entry that lets its key in."""

import pytest

from router.access.keys import load_keys
from router.access.new_key import RouteKeySettings, new_key, run
from warmwatch import main


def test_the_entry_lets_the_key_in_and_does_not_hold_it(capsys, tmp_path):
    settings = RouteKeySettings(
        name="ci", tenant='te"am \\ é\x7f', requests_per_minute=6, tokens_per_minute=7, max_in_flight=8, models=("a/b", "c"),
        expires="2030-01-31T01:00:00+01:00",
    )  # fmt: skip
    assert run(settings) == 0
    out, err = capsys.readouterr()
    key = err.split()[-1]
    assert key not in out
    path = tmp_path / "keys.toml"
    path.write_text(out)
    caller = load_keys(path).authenticate([(b"x-api-key", key.encode())], 0.0)
    assert (caller.name, caller.tenant, caller.models) == ("ci", 'te"am \\ é\x7f', {"a/b", "c"})
    assert (caller.limits.requests_per_minute, caller.limits.tokens_per_minute, caller.limits.max_in_flight) == (6, 7, 8)
    assert caller.expires_s == 1896048000.0


def test_entries_can_be_put_one_after_the_other(capsys, tmp_path):
    path = tmp_path / "keys.toml"
    for name in ("a", "b"):
        assert main(["route-key", "--name", name]) == 0
        with path.open("a") as file:
            file.write(capsys.readouterr().out)
    assert load_keys(path).names == {"a", "b"}


def test_no_two_keys_are_alike():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert min(len(k) for k in keys) == len("ww-") + 43


@pytest.mark.parametrize(
    ("flags", "key"), [([], "name"), (["--name", "a b"], "name"), (["--name", "a", "--expires", "2027-01-31"], "expires")]
)
def test_a_wrong_flag_is_named(capsys, flags, key):
    assert main(["route-key", *flags]) == 2
    assert f"setting `{key}`" in capsys.readouterr().err
