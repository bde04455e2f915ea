"""Links over real sockets: what one replica tells, the others have, and who is gone or broken costs nobody anything."""

import asyncio
import contextlib
import random
import time

import numpy as np
import pytest
import uvloop
import zmq

from router.policy.cost import Coefficients
from router.pools import Pools, TrustRules
from router.replicas.heard import Heard
from router.replicas.link import Link, link_of
from router.replicas.outbox import Outbox, Sender
from router.settings import RouterSettings
from schemas.block_hash import HashKey
from schemas.fleet import Fleet
from schemas.settings import SettingsError, load

BLOCKS = np.arange(1, 5, dtype=np.uint64)
PLACE = ("p", "w0", 0)
FLEET = Fleet.model_validate({"pools": [{"name": "p"}], "workers": [{"pool": "p", "name": "w0", "url": "http://127.0.0.1:1"}]})


async def until(holds, timeout_s=20.0):
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        await asyncio.sleep(0.005)


class Replica:
    def __init__(self, name, listen, peers=(), secret=None, silence_s=60.0, run=None):
        self.pools = Pools(FLEET, {}, "cost", Coefficients(), HashKey(1, 2), TrustRules(10, 60), random.Random(0))
        run = run or f"run-{name}-{random.random()}"
        self.link = Link(
            Outbox(Sender(name, run, "key")), Heard(self.pools, run, "key", silence_s), listen, peers, secret, flush_s=0.005, state_s=0.1
        )

    def in_flight(self):
        return int(self.pools.by_name["p"].load.in_flight.sum())


@contextlib.asynccontextmanager
async def linked(*replicas):
    for r in replicas:
        await r.link.start()
    try:
        yield
    finally:
        for r in replicas:
            if not r.link._context.closed:
                await r.link.stop()


def addresses(tmp_path, count):
    return [f"ipc://{tmp_path}/{i}" for i in range(count)]


async def hear_each_other(*replicas):
    await until(lambda: all(len(r.link.heard.names) == len(replicas) - 1 for r in replicas))


def die(replica):
    """Without a farewell."""
    for task in replica.link._tasks:
        task.cancel()
    replica.link._close()


async def test_what_one_tells_all_others_have(tmp_path):
    at = addresses(tmp_path, 3)
    a, b, c = replicas = [
        Replica(str(i), at[i], at) for i in range(3)
    ]  # each has its own address among the peers, as with one name for all
    async with linked(*replicas):
        await hear_each_other(*replicas)
        flights = [a.link.reserve(PLACE, 0.1, True, BLOCKS, 60.0) for _ in range(5)]
        await until(lambda: b.in_flight() == c.in_flight() == 5)
        assert a.in_flight() == 0  # its own it books itself
        assert b.pools.index.match(BLOCKS, time.monotonic()).expected[0] == 4
        for flight in flights:
            a.link.first_token(flight)
            a.link.free(flight, True)
        await until(lambda: b.in_flight() == c.in_flight() == 0)
        assert a.link.outbox.flights == 0
        assert a.link.silent == 0
        assert a.link.trouble is None
        assert [r.link.heard.counts.gaps for r in replicas] == [0, 0, 0]


def test_it_works_on_the_loop_that_the_router_runs_on(tmp_path):
    async def told():
        at = addresses(tmp_path, 2)
        a, b = Replica("a", at[0], [at[1]]), Replica("b", at[1], [at[0]])
        async with linked(a, b):
            await hear_each_other(a, b)
            for _ in range(50):
                a.link.free(a.link.reserve(PLACE, 0.1, True, BLOCKS, 60.0), True)
                a.link.flush()
            a.link.reserve(PLACE, 0.1, True, BLOCKS, 60.0)
            await until(lambda: b.in_flight() == 1)

    uvloop.run(told())


async def test_a_farewell_takes_all_along(tmp_path):
    at = addresses(tmp_path, 2)
    a, b = Replica("a", at[0], [at[1]]), Replica("b", at[1], [at[0]])
    async with linked(a, b):
        await hear_each_other(a, b)
        a.link.reserve(PLACE, 0.1, True, BLOCKS, 60.0)
        await until(lambda: b.in_flight() == 1)
        await a.link.stop()
        await until(lambda: b.in_flight() == 0)
        assert b.link.heard.counts.silent == 0
        assert "1 of 1 addresses are silent" in b.link.trouble


async def test_who_dies_is_given_up_and_who_comes_again_is_heard(tmp_path):
    at = addresses(tmp_path, 2)
    a, b = Replica("a", at[0], [at[1]]), Replica("b", at[1], [at[0]], silence_s=0.5)
    async with linked(a, b):
        await hear_each_other(a, b)
        a.link.reserve(PLACE, 0.1, True, BLOCKS, 60.0)
        await until(lambda: b.in_flight() == 1)
        die(a)
        await until(lambda: b.in_flight() == 0)
        assert b.link.heard.counts.silent >= 1
        again = Replica("a", at[0], [at[1]])
        again.link.reserve(PLACE, 0.1, True, BLOCKS, 60.0)
        async with linked(again):
            await until(lambda: b.in_flight() == 1)
        await until(lambda: b.in_flight() == 0)


async def test_lost_messages_heal(tmp_path):
    at = addresses(tmp_path, 2)
    a, b = Replica("a", at[0], [at[1]]), Replica("b", at[1], [at[0]])
    async with linked(a, b):
        await hear_each_other(a, b)
        first = a.link.reserve(PLACE, 0.1, True, BLOCKS, 60.0)
        a.link.outbox.news()  # nobody hears of it
        await until(lambda: b.in_flight() == 1)
        a.link.free(first, True)
        a.link.outbox.news()
        await until(lambda: b.in_flight() == 0)
        assert b.link.heard.counts.gaps >= 2
        assert b.link.heard.counts.healed >= 2


async def test_what_is_no_message_is_counted_and_costs_nothing(tmp_path, caplog):
    at = addresses(tmp_path, 2)
    b = Replica("b", at[1], [at[0]])
    context = zmq.Context()
    other = context.socket(zmq.PUB)
    other.bind(at[0])
    try:
        async with linked(b):

            def shout():
                other.send_multipart([b"anything"])
                other.send(b"at all")
                return b.link.bad_messages >= 4

            await until(shout)
            assert b.link.heard.names == ()
            assert sum("no message of a replica" in r.message for r in caplog.records) == 1
    finally:
        context.destroy(linger=0)


async def test_with_a_secret_only_who_knows_it_is_heard_and_hears(tmp_path):
    at = addresses(tmp_path, 4)
    secret, wrong = bytes(range(32)), bytes(32)
    a, b = Replica("a", at[0], at, secret), Replica("b", at[1], at, secret)
    c, d = Replica("c", at[2], at, wrong), Replica("d", at[3], at)
    async with linked(a, b, c, d):
        await until(lambda: a.link.heard.names == ("b",) and b.link.heard.names == ("a",))
        a.link.reserve(PLACE, 0.1, True, BLOCKS, 60.0)
        await until(lambda: b.in_flight() == 1)
        await asyncio.sleep(0.3)  # several states: time enough for what must not happen
        assert [r.link.heard.names for r in (a, b, c, d)] == [("b",), ("a",), (), ()]


def settings(**given):
    return RouterSettings(hash_key="00" * 16, **given)


def test_addresses_are_given_with_commas_or_one_by_one(monkeypatch, tmp_path):
    both = ("tcp://a:1", "tcp://b:2")
    assert load(RouterSettings, ["--replica-peers", "tcp://a:1,tcp://b:2"]).replica_peers == both
    assert load(RouterSettings, ["--replica-peers", "tcp://a:1", "--replica-peers", "tcp://b:2"]).replica_peers == both
    (tmp_path / "file.toml").write_text('[route]\nreplica_peers = ["tcp://a:1", "tcp://b:2"]\n')
    assert load(RouterSettings, ["--config", str(tmp_path / "file.toml")]).replica_peers == both
    monkeypatch.setenv("WARMWATCH_REPLICA_PEERS", "tcp://a:1, tcp://b:2")
    assert load(RouterSettings, []).replica_peers == both


def test_without_addresses_there_is_no_link():
    assert link_of(settings(), None, time.monotonic) is None


async def test_an_address_in_use_names_the_setting(tmp_path):
    a = Replica("a", "tcp://127.0.0.1:0")
    assert a.link.address.startswith("tcp://127.0.0.1:")
    async with linked(a):
        with pytest.raises(SettingsError, match="`replica_listen`"):
            Replica("b", a.link.address)


async def test_an_address_that_can_be_none_stops_the_start_and_leaves_the_others_connected(tmp_path):
    good, too_long = f"ipc://{tmp_path}/good", f"ipc://{tmp_path}/{'x' * 200}"
    a = Replica("a", None, [good, too_long])
    for _ in range(2):
        with pytest.raises(SettingsError, match="`replica_peers`"):
            await a.link.start()
        assert a.link.connected == (good,)
    await a.link.stop()


async def test_a_secret_file_is_checked_and_never_told(tmp_path):
    path = tmp_path / "secret"
    for text, good in (("ab" * 32 + "\n", True), ("ab" * 31, False), ("not hexadecimal", False), ("", False)):
        path.write_text(text)
        given = settings(replica_listen="tcp://127.0.0.1:0", replica_secret_file=path)
        if good:
            link = link_of(given, None, time.monotonic)
            assert link.trouble is None
            await link.stop()
        else:
            with pytest.raises(SettingsError, match="`replica_secret_file`") as e:
                link_of(given, None, time.monotonic)
            assert not text or text not in str(e.value)
    with pytest.raises(SettingsError, match="cannot be read"):
        link_of(settings(replica_listen="tcp://127.0.0.1:0", replica_secret_file=tmp_path / "none"), None, time.monotonic)


@pytest.mark.parametrize("given", [{"replica_listen": "x"}, {"replica_peers": ("tcp://*:1",)}])
def test_a_wrong_address_names_its_setting(given):
    with pytest.raises(ValueError, match="must be a ZeroMQ address"):
        settings(**given)
