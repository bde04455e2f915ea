import pytest
from pydantic import SecretStr

from router.access.keys import CREDENTIAL_HEADERS
from router.access.upstream_key import upstream_credentials
from schemas.settings import SettingsError

SECRET = "engine-secret"


@pytest.mark.parametrize(
    ("forward", "has_keys_file", "goes_on"),
    [(None, False, True), (None, True, False), (True, True, True), (False, False, False)],
)
def test_the_clients_credentials_go_on_only_where_they_are_meant_for_the_engines(forward, has_keys_file, goes_on):
    found = upstream_credentials(None, None, forward, has_keys_file)
    assert found.withheld == (frozenset() if goes_on else CREDENTIAL_HEADERS)
    assert not found.added


def test_the_engines_own_key_takes_the_place_of_the_clients_and_is_in_no_repr(tmp_path):
    (tmp_path / "key").write_text(SECRET + "\n")
    for found in (
        upstream_credentials(SecretStr(SECRET), None, None, False),
        upstream_credentials(None, tmp_path / "key", None, True),
    ):
        assert found.added == (("Authorization", f"Bearer {SECRET}"),)
        assert found.withheld == CREDENTIAL_HEADERS
        assert SECRET not in repr(found)


@pytest.mark.parametrize(
    ("text", "forward", "complaint"),
    [
        (SECRET, True, "forward_credentials"),
        ("", None, "upstream_api_key_file"),
        (f"{SECRET} {SECRET}", None, "upstream_api_key_file"),
        (f"{SECRET}\n{SECRET}", None, "upstream_api_key_file"),
        (f"{SECRET}é", None, "upstream_api_key_file"),
    ],
)
def test_what_is_no_key_is_told_without_the_key(tmp_path, text, forward, complaint):
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(SettingsError, match=complaint) as e:
        upstream_credentials(None, path, forward, True)
    assert SECRET not in str(e.value)


def test_two_keys_or_a_missing_file_are_refused(tmp_path):
    with pytest.raises(SettingsError, match="give one of them"):
        upstream_credentials(SecretStr(SECRET), tmp_path / "key", None, True)
    with pytest.raises(SettingsError, match="cannot be read"):
        upstream_credentials(None, tmp_path / "key", None, True)
    (tmp_path / "bytes").write_bytes(b"\xff" + SECRET.encode())
    with pytest.raises(SettingsError, match="not bytes") as e:
        upstream_credentials(None, tmp_path / "bytes", None, True)
    assert e.value.__cause__ is None
