"""Workers that join, drain and leave while requests run, before the whole router on real sockets."""

import asyncio
import contextlib

from schemas.changes import Change
from schemas.fleet import Worker
from schemas.topics import CHANGES
from tests.router.fake_engine import FakeEngine
from tests.router.faults.test_workers_that_fail import BODY, fleet, pool_of, statuses
from tests.router.running import until


async def test_a_worker_joins_takes_requests_and_leaves_while_one_of_them_runs_to_its_end():
    async with fleet(1) as (r, (old,)), FakeEngine("new").serving() as new:
        membership = r.router.membership
        membership.add("tiny", Worker(pool="tiny", name="new", url=new.url), 1.0)
        await statuses(r, 4)
        assert (len(old.seen), len(new.seen)) == (2, 2)
        new.gate = old.gate = asyncio.Event()
        running = [asyncio.create_task(r.post({**BODY, "stream": True})) for _ in range(2)]
        await until(lambda: len(new.seen) + len(old.seen) == 6)
        membership.remove("tiny", "new", 2.0)
        new.gate.set()
        assert [body for _, _, body in await asyncio.gather(*running)] == [b"".join(new.chunks)] * 2
        await statuses(r, 3)
        assert (len(old.seen), len(new.seen)) == (6, 3)
        found = await until(lambda: len(told := [Change.model_validate_json(v) for v in r.values(CHANGES)]) == 2 and told)
        assert [(c.kind, c.worker) for c in found] == [("scale", "new")] * 2


async def test_a_draining_worker_ends_what_it_has_and_is_taken_out():
    async with fleet(2) as (r, (goes, stays)):
        goes.gate = stays.gate = asyncio.Event()
        first = [asyncio.create_task(r.post(BODY)) for _ in range(2)]
        await until(lambda: goes.seen and stays.seen)
        r.router.membership.drain("tiny", "w0", asyncio.get_running_loop().time())
        page = r.router.metrics.page()
        assert b'warmwatch_router_workers{pool="tiny",state="draining"} 1.0' in page
        goes.gate.set()
        assert [s for s, _, _ in await asyncio.gather(*first)] == [200] * 2
        await until(lambda: [t.worker for t in pool_of(r).here()] == ["w1"])
        await statuses(r, 3)
        assert (len(goes.seen), len(stays.seen)) == (1, 4)


async def test_when_the_last_worker_is_taken_out_requests_are_told_so_and_readiness_falls():
    async with fleet(1) as (r, _):
        r.router.membership.remove("tiny", "w0", 1.0)
        assert await statuses(r, 1) == [503]
        status, content = r.router.readiness()
        assert (status, content["why"]) == (503, ["no pool has a worker"])
        r.router.membership.undrain("tiny", "w0", 2.0)
        assert (await statuses(r, 1), r.router.readiness()[0]) == ([200], 200)


async def test_workers_that_come_and_go_under_load_cost_no_request():
    async with contextlib.AsyncExitStack() as stack:
        r, _ = await stack.enter_async_context(fleet(2))
        more = [await stack.enter_async_context(FakeEngine(f"m{i}").serving()) for i in range(3)]
        stop, got = asyncio.Event(), []

        async def client():
            while not stop.is_set():
                got.extend(await statuses(r, 1, stream=True))

        clients = [asyncio.create_task(client()) for _ in range(6)]
        membership = r.router.membership
        i = 0
        while i < 30 or len(got) < 60:
            membership.found("tiny", [Worker(pool="tiny", name=e.name, url=e.url) for e in more[: i % 4]], frozenset(), float(i))
            i += 1
            await asyncio.sleep(0.01)
        stop.set()
        await asyncio.gather(*clients)
        assert set(got) == {200}
        assert len(pool_of(r).targets) <= 2 + 3 + 6
        assert sum(len(e.seen) for e in more) > 0
