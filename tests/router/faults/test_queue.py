"""Requests that wait for a place at the workers, before the whole router on real sockets."""

import asyncio

import orjson

from tests.router.faults.test_workers_that_fail import BODY, fleet, pool_of, statuses
from tests.router.running import until


def ask(r, **body):
    return asyncio.create_task(r.post({**BODY, **body}))


async def test_over_the_limit_requests_wait_and_over_that_they_are_told_429_and_when_to_come_again():
    async with fleet(max_in_flight=1, max_queue=2) as (r, engines):
        gate = asyncio.Event()
        for e in engines:
            e.gate = gate
        pool = pool_of(r)
        first = [ask(r) for _ in range(2)]
        await until(lambda: [len(e.seen) for e in engines] == [1, 1])
        waiting = [ask(r) for _ in range(2)]
        await until(lambda: pool.admission.waiting == 2)
        status, headers, body = await r.post(BODY)
        assert (status, headers["retry-after"], orjson.loads(body)["error"]["code"]) == (429, "1", 429)
        assert "x-warmwatch-request-id" in headers
        assert [len(e.seen) for e in engines] == [1, 1]
        gate.set()
        assert [s for s, _, _ in await asyncio.gather(*first, *waiting)] == [200] * 4
        assert (pool.admission.waited, pool.admission.refused_full) == (2, 1)
        _, outcomes = await r.records(5)
        assert [o.error for o in outcomes if o.status == 429] == ["queue full"]
        page = r.router.metrics.page()
        assert b'warmwatch_router_queue_refused_total{pool="tiny",reason="full"} 1.0' in page
        assert b'warmwatch_router_queue_waited_total{pool="tiny"} 2.0' in page


async def test_who_waits_too_long_is_told_429():
    async with fleet(1, max_in_flight=1, max_queue_wait_s=0.05) as (r, (engine,)):
        engine.gate = asyncio.Event()
        first = ask(r)
        await until(lambda: engine.seen)
        assert await statuses(r, 1) == [429]
        engine.gate.set()
        assert (await first)[0] == 200


async def test_a_client_that_leaves_frees_its_place_in_the_queue():
    async with fleet(1, max_in_flight=1) as (r, (engine,)):
        engine.gate = asyncio.Event()
        first, leaves = ask(r), None
        await until(lambda: engine.seen)
        leaves = ask(r)
        await until(lambda: pool_of(r).admission.waiting == 1)
        stays = ask(r)
        await until(lambda: pool_of(r).admission.waiting == 2)
        leaves.cancel()
        await until(lambda: pool_of(r).admission.waiting == 1)
        engine.gate.set()
        assert [(await t)[0] for t in (first, stays)] == [200] * 2
        assert len(engine.seen) == 2


async def test_a_worker_at_its_limit_gets_nothing_more_though_it_holds_the_prefix():
    async with fleet(max_in_flight=1, policy="cost") as (r, engines):
        await r.hold("w0", r.chain(BODY["prompt"]))
        gate = engines[0].gate = asyncio.Event()
        first = ask(r)
        await until(lambda: engines[0].seen)
        assert (await r.post(BODY))[1]["x-warmwatch-worker"] == "w1"
        gate.set()
        await first


async def test_a_worker_that_joins_brings_places_for_those_who_wait():
    async with fleet(2, max_in_flight=1) as (r, engines):
        pool = pool_of(r)
        r.router.membership.remove("tiny", "w1", 0.0)
        engines[0].gate = asyncio.Event()
        first = ask(r)
        await until(lambda: engines[0].seen)
        second = ask(r)
        await until(lambda: pool.admission.waiting == 1)
        r.router.membership.undrain("tiny", "w1", 1.0)
        assert (await second)[0] == 200
        engines[0].gate.set()
        await first


async def test_many_clients_that_come_and_go_leave_no_place_taken():
    async with fleet(2, max_in_flight=3, max_queue=20, max_queue_wait_s=0.1) as (r, engines):
        gate = asyncio.Event()
        for e in engines:
            e.gate, e.between = gate, lambda _: asyncio.sleep(0.002)

        async def one(i):
            try:
                async with asyncio.timeout(0.03 if i % 4 == 0 else 20):
                    return (await r.post({**BODY, "stream": True}))[0]
            except TimeoutError:
                return None

        asked = [asyncio.create_task(one(i)) for i in range(150)]
        admission = pool_of(r).admission
        await until(lambda: admission.refused_full > 10 and admission.refused_waited > 0)
        gate.set()
        got = await asyncio.gather(*asked)
        assert 0 < got.count(429) <= admission.refused_full + admission.refused_waited  # some clients left before they were told
        assert {*got} <= {200, 429, None}
        assert await statuses(r, 6) == [200] * 6
