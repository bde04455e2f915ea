"""The stream (Kafka) is away, at the start or in the middle: routing goes on, records wait, what is dropped is counted."""

import socket

import pytest

from schemas.stream.memory import MemoryHub
from tests.router.fake_engine import FakeEngine
from tests.router.faults.test_workers_that_fail import BODY, statuses
from tests.router.running import UrlHub, running, until


async def test_away_at_the_start_requests_are_routed_and_their_records_come_later():
    hub = MemoryHub()
    hub.outage("test", "away")
    async with FakeEngine("w0").serving() as engine, running([engine], hub=hub, wait=False, warm_up_s=0.0) as r:
        assert await statuses(r, 5) == [200] * 5
        status, content = r.router.readiness()
        assert (status, content["index"]) == (200, "away")
        assert any("the index does not follow the stream" in why for why in content["why"])
        assert r.router.recorder.waiting > 0
        hub.heal("test")
        _, outcomes = await r.records(5)
        assert [o.status for o in outcomes] == [200] * 5
        assert r.router.recorder.dropped == 0
        assert r.nothing_in_flight()


async def test_away_from_the_start_what_is_over_the_bound_is_dropped_and_counted():
    hub = MemoryHub()
    hub.outage("test")
    async with FakeEngine("w0").serving() as engine, running([engine], hub=hub, wait=False, record_buffer=6) as r:
        assert await statuses(r, 10) == [200] * 10
        assert (r.router.recorder.waiting, r.router.recorder.dropped) == (6, 14)  # decisions and outcomes
        page = r.router.metrics.page()
        assert b"warmwatch_router_records_dropped_total 14.0" in page
        assert b"warmwatch_router_records_waiting 6.0" in page
        hub.heal("test")
        await until(lambda: not r.router.recorder.waiting)


async def test_away_in_the_middle_records_wait_and_the_index_keeps_what_it_knew():
    hub = MemoryHub()
    async with FakeEngine("w0").serving() as engine, running([engine], hub=hub) as r:
        await r.hold("w0", r.chain(BODY["prompt"]))
        assert await statuses(r, 2) == [200] * 2
        await r.records(2)
        hub.outage("test")
        await until(lambda: r.router.feed.trouble)
        assert await statuses(r, 10) == [200] * 10
        assert (await r.post(BODY))[1]["x-warmwatch-predicted-cached-tokens"] == "32"
        assert r.router.readiness()[0] == 200
        hub.heal("test")
        _, outcomes = await r.records(13)
        assert (len(outcomes), r.router.recorder.dropped) == (13, 0)
        await until(lambda: r.router.feed.trouble is None)
        assert r.nothing_in_flight()


@pytest.mark.kafka
async def test_a_broker_that_is_not_there_at_all_costs_the_requests_nothing(kafka_may_fail, monkeypatch):
    monkeypatch.setattr("router.app._FLUSH_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with (
        FakeEngine("w0").serving() as engine,
        running([engine], hub=UrlHub(f"kafka://127.0.0.1:{port}"), wait=False, warm_up_s=0.0) as r,
    ):
        assert await statuses(r, 5) == [200] * 5
        status, content = r.router.readiness()
        assert (status, content["index"]) == (200, "away")
        await until(lambda: r.router.recorder.waiting == 10)
        assert r.nothing_in_flight()
