"""The keys file: what it may say, how it is wrong without telling a secret, and who a request's headers are."""

import hashlib
from pathlib import Path

import pytest

from router.access.keys import KeyEntry, load_keys
from router.access.rates import Limits
from router.access.refusal import Refused
from schemas.settings import SettingsError

KEY, OTHER = "ww-abc", "ww-def"
NOW = 1_800_000_000.0


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return path


@pytest.fixture
def ring(tmp_path):
    return load_keys(
        file(
            tmp_path,
            f"""
[[keys]]
name = "ci"
sha256 = "{sha(KEY).upper()}"
tenant = "team-a"
requests_per_minute = 60
max_in_flight = 2
models = ["coder"]

[[keys]]
name = "old"
sha256 = "{sha(OTHER)}"
expires = 2027-01-15T08:00:00Z
""",
        )
    )


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", f"Bearer {KEY}".encode())],
        [(b"authorization", f"bearer  {KEY} ".encode())],
        [(b"x-api-key", KEY.encode())],
        [(b"authorization", b"Bearer sk-something-else"), (b"x-api-key", KEY.encode())],
        [(b"authorization", b"Basic Zm9vOmJhcg=="), (b"x-api-key", KEY.encode())],
    ],
)
def test_a_key_is_found_in_either_header(ring, headers):
    caller = ring.authenticate(headers, NOW)
    assert (caller.name, caller.tenant, caller.models) == ("ci", "team-a", {"coder"})
    assert caller.limits == Limits(requests_per_minute=60, max_in_flight=2)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ([], "no_key"),
        ([(b"authorization", b"Basic Zm9vOmJhcg==")], "no_key"),
        ([(b"authorization", b"Bearer nobody")], "unknown_key"),
        ([(b"authorization", b"Bearer ")], "unknown_key"),
        ([(b"authorization", b"Bearer " + sha(KEY).encode())], "unknown_key"),  # the hash is no key
        ([(b"x-api-key", b"\xff\xfe")], "unknown_key"),
    ],
)
def test_who_has_no_key_is_refused_and_what_was_given_is_not_repeated(ring, headers, reason):
    with pytest.raises(Refused) as refused:
        ring.authenticate(headers, NOW)
    assert (refused.value.reason, refused.value.status) == (reason, 401)
    assert "nobody" not in refused.value.text


def test_a_key_ends_when_it_expires(ring):
    expires_s = 1_800_000_000.0
    headers = [(b"x-api-key", OTHER.encode())]
    assert ring.authenticate(headers, expires_s - 1).name == "old"
    with pytest.raises(Refused) as refused:
        ring.authenticate(headers, expires_s)
    assert refused.value.reason == "expired_key"


def test_a_repr_tells_no_hash(ring):
    assert repr(ring) == "Keyring(2 keys)"
    assert sha(KEY) not in repr(KeyEntry(name="a", sha256=sha(KEY)))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "keys"),
        ("keys = []", "keys"),
        (f'[[keys]]\nname = "a"\nsha256 = "{KEY}"', "keys[0].sha256`: must be the key's SHA-256"),
        (f'[[keys]]\nname = "a"\nkey = "{KEY}"\nsha256 = "{sha(KEY)}"', "keys[0].key`: unknown"),
        (f'[[keys]]\nname = "a b"\nsha256 = "{sha(KEY)}"', "keys[0].name"),
        (f'[[keys]]\nname = "a"\nsha256 = "{sha(KEY)}"\nrequests_per_minute = 0', "requests_per_minute"),
        (f'[[keys]]\nname = "a"\nsha256 = "{sha(KEY)}"\nexpires = 2027-01-31T00:00:00', "expires`: Input should have timezone"),
        (f'[[keys]]\nname = "a"\nsha256 = "{sha(KEY)}"\nmodels = []', "models"),
        (
            f'[[keys]]\nname = "a"\nsha256 = "{sha(KEY)}"\n[[keys]]\nname = "a"\nsha256 = "{sha(OTHER)}"',
            "keys[0] and keys[1] have the same name",
        ),
        (f'[[keys]]\nname = "a"\nsha256 = "{sha(KEY)}"\n[[keys]]\nname = "b"\nsha256 = "{sha(KEY)}"', "have the same sha256"),
        (f"[[keys]]\nname = {KEY}", "is no TOML"),
    ],
)
def test_a_wrong_file_names_what_is_wrong_and_tells_no_secret(tmp_path, text, complaint):
    with pytest.raises(SettingsError) as e:
        load_keys(file(tmp_path, text))
    assert "api_keys_file" in str(e.value)
    assert complaint in str(e.value)
    assert KEY not in str(e.value)
    assert sha(KEY) not in str(e.value)


def test_a_file_that_is_not_there_says_how_to_make_one(tmp_path):
    with pytest.raises(SettingsError, match="warmwatch route-key"):
        load_keys(tmp_path / "none.toml")


def test_bytes_that_are_no_text_are_not_shown(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_bytes(b"\xff\xfe" + KEY.encode())
    with pytest.raises(SettingsError, match="not UTF-8") as e:
        load_keys(path)
    assert e.value.__cause__ is None
