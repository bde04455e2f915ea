import socket

import pytest

from router.replicas.addresses import checked_address, host_and_port, resolved, system_lookup


@pytest.mark.parametrize("address", ["tcp://routers:5570", "tcp://10.0.0.1:1", "tcp://[::1]:5570", "ipc:///tmp/x"])
def test_addresses_that_are_right(address):
    assert checked_address(address) == checked_address(address, listens=True) == address


@pytest.mark.parametrize("address", ["", "ipc://", "tcp://x", "tcp://:5", "udp://x:1", "x:1", "tcp://x:99999", "tcp://x:1/y", "inproc://x"])
def test_addresses_that_are_wrong(address):
    with pytest.raises(ValueError, match="must be a ZeroMQ address"):
        checked_address(address)


def test_only_who_listens_may_leave_host_or_port_open():
    for address in ("tcp://*:5570", "tcp://127.0.0.1:0"):
        assert checked_address(address, listens=True) == address
        with pytest.raises(ValueError, match="must be"):
            checked_address(address)


def test_only_names_are_looked_up():
    assert host_and_port("tcp://routers:5570") == ("routers", 5570)
    assert [host_and_port(a) for a in ("tcp://10.0.0.1:1", "tcp://[::1]:1", "ipc:///x")] == [None] * 3


async def test_a_name_leads_to_all_its_addresses_and_a_failed_lookup_changes_nothing():
    known = {"routers": ["10.0.0.1", "10.0.0.2", "::1", "10.0.0.1"]}

    async def lookup(host, port):
        if host not in known:
            raise socket.gaierror("away")
        return known[host]

    asked = ["ipc:///x", "tcp://routers:5570"]
    found = await resolved(asked, (), lookup)
    assert found == ("ipc:///x", "tcp://10.0.0.1:5570", "tcp://10.0.0.2:5570", "tcp://[::1]:5570")
    known["routers"] = ["10.0.0.2"]
    assert await resolved(asked, found, lookup) == ("ipc:///x", "tcp://10.0.0.2:5570")
    known.clear()
    assert await resolved(asked, found, lookup) == found
    assert await resolved(["tcp://routers:5570"], (), lookup) == ()


async def test_what_can_be_no_name_leads_nowhere():
    assert await resolved([f"tcp://{'a' * 64}:5570"], (), system_lookup) == ()


async def test_the_systems_lookup_knows_loopback():
    assert "127.0.0.1" in await system_lookup("127.0.0.1", 5570)
