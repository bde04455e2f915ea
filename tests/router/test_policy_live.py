"""Shadows, others' load and fitted coefficients on the whole router, on real sockets."""

import asyncio
import time

from router.policy.book import CONFIGURED
from schemas.topics import WORKER_LOAD
from schemas.workers import BridgeHealth, WorkerLoad
from tests.router.fake_engine import FakeEngine, sse
from tests.router.running import running, until


async def test_shadows_look_at_live_requests_and_are_counted():
    shadows = {"policy": "round_robin", "shadow_policies": ["session_hash", "least_loaded"]}
    async with FakeEngine("w0").serving() as a, FakeEngine("w1").serving() as b, running([a, b], **shadows) as r:
        for _ in range(6):
            status, _, _ = await r.post({"prompt": "one two three", "model": "tiny", "session_id": "s"})
            assert status == 200
        assert (len(a.seen), len(b.seen)) == (3, 3), "the live policy decides"
        by_name = {s.policy.name: s for s in r.router.pools.by_name["tiny"].shadows}
        assert (by_name["session_hash"].decisions, by_name["session_hash"].agreed) == (6, 3)
        page = r.router.metrics.page().decode()
        assert 'warmwatch_router_shadow_decisions_total{policy="session_hash",pool="tiny"} 6.0' in page
        assert 'warmwatch_router_shadow_agreed_total{policy="session_hash",pool="tiny"} 3.0' in page


async def test_what_others_send_is_told_by_the_engines_load_and_routed_around():
    async with FakeEngine("w0").serving() as a, FakeEngine("w1").serving() as b, running([a, b], engine_load_fresh_s=600.0) as r:
        record = WorkerLoad(
            pool="tiny", worker="w0", rank=0, time_s=time.time(), engine="vllm", up=True, running=40.0, waiting=3.0,
            bridge=BridgeHealth(trust="exact", epoch=1),
        )  # fmt: skip
        with r.hub.open("test") as stream:
            writer = stream.writer()
            writer.append(WORKER_LOAD, b"tiny/w0/0", record.model_dump_json().encode())
            await asyncio.to_thread(writer.flush, 5.0)
            writer.close(1.0)
        pool = r.router.pools.by_name["tiny"]
        await until(lambda: pool.others.load(2, r.router._clock()) is not None)
        for _ in range(5):
            await r.post({"prompt": "one two three", "model": "tiny"})
        assert (len(a.seen), len(b.seen)) == (0, 5)
        assert 'warmwatch_router_others_requests{pool="tiny",rank="0",worker="w0"} 43.0' in r.router.metrics.page().decode()


async def test_outcomes_become_coefficients_that_are_shown_and_not_used():
    def answer(uncached, cached, seconds):
        usage = {"prompt_tokens": uncached + cached, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}
        times = {"time_to_first_token_ms": 1000 * seconds + 50, "queue_time_ms": 50.0}
        return [sse({"choices": [{"text": "a"}]}), sse({"choices": [], "usage": usage, "metrics": times}), sse("[DONE]")]

    async with FakeEngine("w0").serving() as engine, running([engine], fit_every_s=0.05) as r:
        book = r.router.pools.book
        for i in range(120):
            uncached = 200 * (i % 17 + 1)
            engine.chunks = answer(uncached, 16 * i, 0.02 + 3e-4 * uncached)
            status, _, _ = await r.post({"prompt": "one two three", "model": "tiny", "stream": True})
            assert status == 200
        entry = book.entry("tiny", None)
        await until(lambda: len(entry.versions) > 1)
        fit = entry.versions[-1].fit
        assert fit is not None
        assert 2.8e-4 < fit.a < 3.2e-4
        assert book.in_use("tiny", None).name == CONFIGURED
        page = r.router.metrics.page().decode()
        assert 'warmwatch_router_prefill_fit_in_use{hardware="none",pool="tiny"} 0.0' in page
        assert 'warmwatch_router_prefill_outcomes_total{hardware="none",pool="tiny",use="used"} 120.0' in page
