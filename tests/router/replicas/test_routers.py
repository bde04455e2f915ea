"""Whole routers that are replicas: what one sends to a worker the others see in their load, and in the end nothing is left anywhere."""

import asyncio
import contextlib

from tests.router.fake_engine import FakeEngine
from tests.router.running import running, until

BODY = {"model": "tiny", "prompt": "a prompt of some length, so that there are blocks of it to be expected " * 4, "stream": True}


@contextlib.asynccontextmanager
async def routers(count, folder, engines, **settings):
    at = tuple(f"ipc://{folder}/r{i}" for i in range(count))
    async with contextlib.AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(running(engines, router_name=f"r{i}", replica_listen=at[i], replica_peers=at, **settings))
            for i in range(count)
        ]
        await until(lambda: all(len(r.router.replicas.heard.names) == count - 1 for r in found))
        yield found


def in_flight(r):
    return int(r.router.pools.by_name["tiny"].load.in_flight.sum())


def decoding(r):
    return int(r.router.pools.by_name["tiny"].load.decoding.sum())


async def test_four_routers_share_their_load(tmp_path):
    async with FakeEngine("w0").serving() as w0, FakeEngine("w1").serving() as w1, routers(4, tmp_path, (w0, w1)) as four:
        w0.gate = w1.gate = asyncio.Event()
        asks = [asyncio.create_task(four[i % 4].post(BODY)) for i in range(8)]
        await until(lambda: all(in_flight(r) == 8 for r in four))
        page = four[0].router.metrics.page().decode()
        for name, many in (("in_flight", 2), ("replicas_in_flight", 6)):
            lines = [line for line in page.splitlines() if line.startswith(f"warmwatch_router_{name}{{")]
            assert sum(float(line.split()[-1]) for line in lines) == many
        chain = four[0].chain(BODY["prompt"])
        index = four[3].router.pools.index
        assert index.pending_blocks >= len(chain) > 2
        between = asyncio.Event()
        w0.between = w1.between = lambda _: between.wait()
        w0.gate.set()
        await until(lambda: all(decoding(r) == 8 for r in four))
        between.set()
        assert [status for status, *_ in await asyncio.gather(*asks)] == [200] * 8
        await until(lambda: all(r.nothing_in_flight() for r in four))
        async with four[0].client.get(four[0].url + "/readyz") as response:
            told = await response.json()
        assert told["replicas"] == ["r1", "r2", "r3"]
        assert not [why for why in told["why"] if "replicas" in why]
        async with four[0].client.get(four[0].url + "/metrics") as response:
            assert "warmwatch_router_replicas_heard 3.0" in await response.text()


async def test_a_request_follows_what_another_router_has_just_sent(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(f"w{i}").serving()) for i in range(4)]
        one, other = await stack.enter_async_context(routers(2, tmp_path, engines, prefill_a=0.01))  # dear enough to be followed
        for engine in engines:
            engine.gate = asyncio.Event()
        first = asyncio.create_task(one.post(BODY))
        await until(lambda: in_flight(other) == 1)
        second = asyncio.create_task(other.post(BODY))
        await until(lambda: in_flight(one) == 2)
        for engine in engines:
            engine.gate.set()
        (_, a, _), (_, b, _) = await asyncio.gather(first, second)
        assert a["x-warmwatch-worker"] == b["x-warmwatch-worker"]
        assert int(b["x-warmwatch-predicted-cached-tokens"]) > 0


async def test_a_router_whose_replicas_are_away_is_ready_and_says_so(tmp_path):
    async with FakeEngine("w0").serving() as w0, running((w0,), replica_peers=(f"ipc://{tmp_path}/nobody",)) as r:
        async with r.client.get(r.url + "/readyz") as response:
            told = await response.json()
            assert response.status == 200
        assert told["replicas"] == []
        assert "replicas: 1 of 1 addresses are silent" in told["why"]
        assert (await r.post(BODY))[0] == 200
