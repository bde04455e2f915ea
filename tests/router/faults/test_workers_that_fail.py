"""Workers that hang, are slow, restart, say 500 or talk nonsense, before the whole router on real sockets: each is left out while it
fails and let in again when it is well, and nothing of it stays behind."""

import asyncio
import contextlib

import pytest

from tests.router.fake_engine import FakeEngine
from tests.router.running import running, until

BODY = {"model": "tiny", "prompt": [*range(3, 40)], "max_tokens": 3}
QUICK = {"policy": "round_robin", "breaker_open_s": 0.2, "breaker_longest_open_s": 0.4}
SILENT = {"first_byte_timeout_s": 0.2}


@contextlib.asynccontextmanager
async def fleet(n=2, **settings):
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(f"w{i}").serving()) for i in range(n)]
        r = await stack.enter_async_context(running(engines, **QUICK | settings))
        yield r, engines
        await until(r.nothing_in_flight)
        pool = pool_of(r)
        assert (pool.admission.inside, pool.admission.waiting) == (0, 0)


def pool_of(r):
    return r.router.pools.by_name["tiny"]


def state(r, number=0):
    pool = pool_of(r)
    pool.health.up_at(asyncio.get_running_loop().time())
    return pool.health.state(number, asyncio.get_running_loop().time())


async def statuses(r, n, **body):
    return [(await r.post({**BODY, **body}))[0] for _ in range(n)]


async def until_up_again(r, number=0, **body):
    """Requests go on until the breaker has closed; all of them are answered. How many that took."""
    for n in range(1000):
        if state(r, number) == "up":
            return n
        assert await statuses(r, 1, **body) == [200]
        await asyncio.sleep(0.01)
    raise AssertionError(f"it is still {state(r, number)}")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_worker_that_hangs_is_left_out_though_its_health_answers_and_its_breaker_closes_again(stream):
    async with fleet(**SILENT, health_every_s=0.05, breaker_open_s=1.0) as (r, (hung, well)):
        hung.gate = asyncio.Event()
        assert sorted(await statuses(r, 4, stream=stream)) == [200, 200, 504, 504]
        assert state(r) == "open"
        asked = len(hung.seen)
        assert asked == 2
        assert await statuses(r, 3, stream=stream) == [200] * 3
        hung.gate.set()
        await until_up_again(r, stream=stream)
        assert len(hung.seen) == asked + 1  # one trial
        await statuses(r, 4, stream=stream)
        assert len(hung.seen) == asked + 3
        assert (hung.asked_health > 1, well.asked_health > 1) == (True, True)


async def test_a_trial_that_fails_keeps_the_worker_out_and_costs_few_requests():
    async with fleet(**SILENT) as (r, (hung, _)):
        hung.gate = asyncio.Event()
        await statuses(r, 4)
        began_s, answered = asyncio.get_running_loop().time(), []
        while answered.count(504) < 3:
            answered += await statuses(r, 1)
            await asyncio.sleep(0.005)
        assert (answered.count(504), answered.count(200)) == (len(hung.seen) - 2, len(answered) - 3)
        least_s = 0.5 * (0.2 + 0.4 + 0.4) + 3 * SILENT["first_byte_timeout_s"]
        assert asyncio.get_running_loop().time() - began_s > 0.9 * least_s
        hung.gate.set()
        await until_up_again(r)


async def test_a_slow_worker_is_not_a_dead_one():
    async with fleet(health_every_s=0.02, health_timeout_s=0.2) as (r, (slow, _)):
        slow.health_gate, asked = asyncio.Event(), slow.asked_health  # its event loop has no time for that
        while slow.asked_health < asked + 5:  # four were silent: more than a worker may be that answers nothing
            assert await statuses(r, 2) == [200] * 2
        assert not pool_of(r).health.changes
        await until(lambda: state(r) == "unreachable")  # nothing is answered now, so silence counts
        slow.health_gate.set()
        await until(lambda: state(r) == "up")


async def test_a_worker_whose_health_fails_gets_nothing_until_it_answers():
    async with fleet(health_every_s=0.02, unhealthy_after=2) as (r, (sick, _)):
        await statuses(r, 2)
        sick.healthy = False
        await until(lambda: state(r) == "unreachable")
        seen = len(sick.seen)
        assert (await statuses(r, 4), len(sick.seen)) == ([200] * 4, seen)
        sick.healthy = True
        await until(lambda: state(r) == "up")
        await statuses(r, 2)
        assert len(sick.seen) == seen + 1


async def test_a_worker_that_restarts_is_tried_again_when_its_health_answers():
    async with contextlib.AsyncExitStack() as stack:
        well, restarts = await stack.enter_async_context(FakeEngine("w1").serving()), FakeEngine("w0")
        async with restarts.serving():
            port = int(restarts.url.rsplit(":", 1)[1])
            r = await stack.enter_async_context(running([restarts, well], **QUICK))
            assert await statuses(r, 4) == [200] * 4
        for _ in range(3):
            assert await statuses(r, 4) == [200] * 4  # refused ones went to the other
        assert state(r) == "unreachable"
        assert pool_of(r).retries.taken <= 2
        async with restarts.serving(port):
            await until(lambda: state(r) != "unreachable")
            await until_up_again(r)
            seen = len(restarts.seen)
            await statuses(r, 4)
            assert len(restarts.seen) == seen + 2
        assert r.nothing_in_flight()


async def test_a_worker_that_says_500_is_passed_on_then_left_out_and_comes_back():
    async with fleet() as (r, (bad, _)):
        bad.status = 500
        got = []
        while state(r) == "up":
            got += await statuses(r, 1)
        assert (got.count(500), set(got)) == (5, {200, 500})
        bad.status = 200
        await until_up_again(r)
        changes = pool_of(r).health.changes
        assert changes["w0", "open"] == changes["w0", "half_open"] == changes["w0", "up"] == 1


@pytest.mark.parametrize("status", [502, 503])
async def test_what_says_that_nothing_was_computed_goes_to_the_next_worker(status):
    async with fleet() as (r, (bad, well)):
        bad.status = status
        assert await statuses(r, 8) == [200] * 8
        decisions, outcomes = await r.records(8)
        assert {o.retries for o in outcomes} == {0, 1}
        assert {a.error for d in decisions for a in d.attempts} == {f"status: the worker said {status}"}
        well.status = status
        got, _, body = await r.post(BODY)
        assert (got, b'"no"' in body) == (status, True)  # the last one's answer is passed on
        bad.status = well.status = 200
        await until_up_again(r)


@pytest.mark.parametrize("status", [400, 404, 429, 500, 501, 504])
async def test_other_statuses_are_the_clients_affair(status):
    async with fleet() as (r, engines):
        for e in engines:
            e.status = status
        assert (await statuses(r, 1), sum(len(e.seen) for e in engines)) == ([status], 1)


async def test_a_worker_that_dies_while_it_computes_leaves_its_streams_to_another_before_their_first_byte():
    async with contextlib.AsyncExitStack() as stack:
        dies, well = FakeEngine("w0"), await stack.enter_async_context(FakeEngine("w1").serving())
        async with dies.serving():
            dies.gate, dies.head_first = asyncio.Event(), True
            r = await stack.enter_async_context(running([dies, well], **QUICK))
            asked = [asyncio.create_task(r.post({**BODY, "stream": True})) for _ in range(6)]
            await until(lambda: len(dies.seen) == len(well.seen) == 3)
        for status, headers, body in await asyncio.gather(*asked):
            assert (status, headers["x-warmwatch-worker"], body) == (200, "w1", b"".join(well.chunks))
        _, outcomes = await r.records(6)
        assert sorted(o.retries for o in outcomes) == [0, 0, 0, 1, 1, 1]
        assert {o.status for o in outcomes} == {200}
        assert r.nothing_in_flight()


async def test_a_worker_that_asks_for_time_gets_it():
    async with fleet(retry_statuses=[]) as (r, (busy, well)):
        busy.status, busy.headers = 503, {"Retry-After": "60"}
        got = await statuses(r, 6)
        assert (got.count(503), len(busy.seen), len(well.seen), state(r)) == (1, 1, 5, "backing_off")
        assert not pool_of(r).health.down_urls()


async def test_a_worker_that_talks_nonsense_is_left_out_and_comes_back():
    async def nonsense(reader, writer):
        await reader.read(100)
        writer.write(b"\x00\x01 this is no HTTP\r\n\r\n")
        await writer.drain()
        writer.close()

    async with contextlib.AsyncExitStack() as stack:
        server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        odd = FakeEngine("w0", url=f"http://127.0.0.1:{port}")
        well = await stack.enter_async_context(FakeEngine("w1").serving())
        r = await stack.enter_async_context(running([odd, well], **QUICK))
        assert await statuses(r, 6) == [200] * 6
        await until(lambda: state(r) != "up")
        server.close()
        await server.wait_closed()
        async with odd.serving(port):
            await until_up_again(r)
        assert r.nothing_in_flight()


async def test_when_nobody_is_left_everybody_is_tried_and_who_answers_is_in_again():
    async with fleet() as (r, engines):
        for e in engines:
            e.status = 500
        await statuses(r, 10)
        assert "up" not in {state(r, i) for i in range(2)}
        assert await statuses(r, 2) == [500] * 2
        for e in engines:
            e.status = 200
        assert await statuses(r, 1) == [200]
        for i in range(2):
            await until_up_again(r, i)


async def test_retries_end_with_their_budget_and_the_breakers_open_meanwhile():
    dead = [FakeEngine(f"w{i}") for i in range(3)]
    for d in dead:
        async with d.serving():
            pass
    async with running(dead, wait=False, retry_ratio=0.0, retry_burst=2.0, **QUICK) as r:
        assert await statuses(r, 3) == [503] * 3
        _, outcomes = await r.records(3)
        assert sum(o.retries for o in outcomes) == 2
        retries = pool_of(r).retries
        assert (retries.taken, retries.refused) == (2, 2)
        page = r.router.metrics.page()
        assert b'warmwatch_router_retries_total{budget="refused",pool="tiny"} 2.0' in page
        assert b'warmwatch_router_workers{pool="tiny",state="unreachable"} 3.0' in page
        assert r.nothing_in_flight()
