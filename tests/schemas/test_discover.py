"""`discover` of a pool: its form, and errors that say what would be right."""

import pytest

from schemas.discover import Discover, parse_discover
from schemas.fleet import load_fleet
from schemas.settings import SettingsError


def test_a_name_and_a_file_with_options():
    assert parse_discover("dns://coder.ns.svc:8000") == Discover("dns", "coder.ns.svc", "", "8000")
    assert parse_discover("dns://[::1]:8000/?engine=sglang&ranks=4") == Discover("dns", "::1", "/", "8000", "sglang", 4)
    assert parse_discover("file:///run/end%20points.json?port=http&scheme=https&hardware=h100") == Discover(
        "file", "", "/run/end points.json", "http", "vllm", 1, "h100", "https"
    )


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("dns://coder", "must be such as"),
        ("dns://coder:port", "must be such as"),
        ("dns://coder:8000/x", "must be such as"),
        ("file://host/x", "must be such as"),
        ("file:x", "must be such as"),
        ("http://coder:8000", "must be such as"),
        ("", "must be such as"),
        (7, "must be such as"),
        ("dns://c:1?port=2", "has the option 'port'; there are engine, ranks, hardware, scheme"),
        ("dns://c:1?rank=2", "has the option 'rank'"),
        ("dns://c:1?ranks", "must be such as"),
        ("dns://c:1?ranks=", "has the option 'ranks'"),
        ("dns://c:1?ranks=0", "has ranks=0; it is a number from 1 to 1024"),
        ("dns://c:1?engine=tgi", "has engine=tgi; it is vllm or sglang"),
        ("file:///x?scheme=ftp", "has scheme=ftp; it is http or https"),
    ],
)
def test_what_is_wrong_is_said(address, says):
    with pytest.raises(ValueError, match=says):
        parse_discover(address)


def test_the_fleet_file_may_name_it_and_a_wrong_one_names_its_key(tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_text('[[pools]]\nname = "coder"\ndiscover = "dns://coder:8000"\n')
    fleet = load_fleet(file)
    assert (fleet.pools[0].discover, fleet.workers) == ("dns://coder:8000", ())
    file.write_text('[[pools]]\nname = "coder"\ndiscover = "coder:8000"\n')
    with pytest.raises(SettingsError, match=r"setting `pools\[0\].discover`: must be such as dns://"):
        load_fleet(file)
