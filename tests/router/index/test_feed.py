"""The index follows the stream, and says so when it cannot."""

import asyncio
import itertools
import json
import random
from collections import deque

import numpy as np
import pytest

from router.index.feed import FeedSink, News, _age_s
from router.index.prefix_index import BLIND, DEGRADED, EXACT
from router.policy.cost import Coefficients
from router.pools import Pools, TrustRules
from schemas.fleet import Fleet, Pool, Worker
from schemas.kv_events import COMPLETE, EVENT, FIRST, LAST, Kind, KvBatch, WorkerId, encode
from schemas.stream.base import Slice, StoredRecord
from schemas.stream.memory import MemoryHub
from schemas.topics import KV_EVENTS, WORKER_LOAD
from schemas.workers import WorkerLoad
from tests.router.fake_engine import FakeEngine
from tests.router.running import KEY, UrlHub, load_record, running, until

PROMPT = list(range(3, 103))
BODY = {"model": "tiny", "prompt": PROMPT}


async def append(hub, topic, key, value):
    with hub.open("test") as stream:
        writer = stream.writer()
        writer.append(topic, key, value)
        await asyncio.to_thread(writer.flush, 5.0)
        writer.close(1.0)


def trust_of(r, worker="w0"):
    pool = r.router.pools.by_name["tiny"]
    target = next(t.number for t in pool.targets if t.worker == worker)
    return int(r.router.pools.trust(pool, r.router._clock())[target])


async def test_a_fresh_router_is_exact_from_the_start_of_the_log():
    hub = MemoryHub()
    async with FakeEngine("w0").serving() as engine:
        async with running([engine], hub) as first:
            await first.hold("w0", first.chain(PROMPT))
        async with running([engine], hub) as second:
            assert (await second.post(BODY))[1]["x-warmwatch-predicted-cached-tokens"] == "96"
            assert trust_of(second) == EXACT


async def predicted(r, body=BODY):
    return int((await r.post(body))[1]["x-warmwatch-predicted-cached-tokens"])


def forget_the_log(hub, but_for):
    """Retention takes all KV events but for the newest."""
    with hub.open("test") as stream:
        ends = stream.end_offsets(KV_EVENTS)
        stream.delete_before(KV_EVENTS, {p: max(0, end - but_for) for p, end in ends.items()})


@pytest.mark.parametrize(("flags", "trust"), [(COMPLETE, EXACT), (0, DEGRADED)])
async def test_a_fresh_router_takes_from_a_snapshot_what_the_log_no_longer_tells(flags, trust):
    hub = MemoryHub()
    async with FakeEngine("w0").serving() as engine:
        async with running([engine], hub) as first:
            chain = first.chain(PROMPT)
            await first.hold("w0", [*chain, 7, 8])
            await first.tell("w0", (Kind.REMOVED, [7], 0))
            await first.tell("w0", (Kind.SNAPSHOT, chain[:2], flags | FIRST))
            await first.tell("w0", (Kind.SNAPSHOT, [*chain[2:], 8], flags | LAST))
            await first.tell("w0", (Kind.STORED, [9], 0), (Kind.REMOVED, chain[5:], 0))
            assert trust_of(first) == EXACT
            seqs = dict(first.seq)
        forget_the_log(hub, but_for=3)
        async with running([engine], hub) as second:
            second.seq.update(seqs)
            assert (trust_of(second), await predicted(second)) == (trust, 80)
            index = second.router.pools.index
            assert index.match(np.array([9, 8, 7], np.uint64), 0.0).held[0] == 2
            await second.tell("w0", (Kind.REMOVED, chain[1:2], 0))
            assert (await predicted(second), index.unknown_removals) == (16, 0)


async def test_a_restarted_worker_is_empty_and_exact_again_from_its_sequence_0():
    async with FakeEngine("w0").serving() as engine, running([engine]) as r:
        chain = r.chain(PROMPT)
        await r.hold("w0", chain)
        assert await predicted(r) == 96
        start = np.array([(Kind.EPOCH_STARTED, 0, 0, 0, 0, 1.0, 0, 0, COMPLETE), (Kind.STORED, 0, 0, 1, 0, 1.0, 0, 16, 0)], EVENT)
        again = KvBatch(WorkerId("tiny", "w0", 0), 2, 0, 0, 1.0, 1.0, start, np.array(chain[:1], np.uint64))
        await append(r.hub, KV_EVENTS, again.source.key, encode(again))
        await until(lambda: r.router.pools.index.slot(again.source).epoch == 2)
        assert (trust_of(r), await predicted(r)) == (EXACT, 16)


async def test_an_event_that_was_dropped_makes_its_worker_degraded_and_the_decision_says_so():
    async with FakeEngine("w0").serving() as w0, FakeEngine("w1").serving() as w1, running([w0, w1]) as r:
        chain = r.chain(PROMPT)
        await r.hold("w0", chain)
        await r.hold("w1", [7])
        r.seq["w0"] += 1  # this one never arrives
        await r.tell("w0", (Kind.STORED, [8], 0))
        assert (trust_of(r, "w0"), trust_of(r, "w1")) == (DEGRADED, EXACT)
        await r.post(BODY)
        (d,), _ = await r.records()
        assert {c.worker: c.trust for c in d.candidates} == {"w0": "degraded", "w1": "exact"}
        assert r.router.pools.index.counts.unexplained_gaps == 1
        await r.tell("w0", (Kind.SNAPSHOT, [*chain, 8], FIRST | LAST | COMPLETE))
        assert trust_of(r, "w0") == EXACT


async def test_records_that_come_late_or_twice_change_nothing():
    async with FakeEngine("w0").serving() as engine, running([engine]) as r:
        chain = r.chain(PROMPT)
        await r.hold("w0", chain)
        await r.tell("w0", (Kind.REMOVED, chain[3:], 0))
        index = r.router.pools.index
        values = r.values(KV_EVENTS)
        for value in values * 2:
            await append(r.hub, KV_EVENTS, WorkerId("tiny", "w0", 0).key, value)
        await until(lambda: index.counts.stale_batches + index.counts.repeated_batches == 6)
        assert (index.counts.repeated_batches, index.unknown_removals) == (2, 0)
        assert (trust_of(r), await predicted(r)) == (EXACT, 48)
        await r.tell("w0", (Kind.REMOVED, chain[:1], 0))
        assert await predicted(r) == 0


async def test_the_lag_is_small_while_the_index_follows_and_grows_while_the_stream_is_away():
    async with FakeEngine("w0").serving() as engine, running([engine]) as r:
        index = r.router.pools.index
        await r.hold("w0", r.chain(PROMPT))
        level_s = index.level_s
        await until(lambda: index.fresh_s > level_s + 0.2)  # between two looks at the log's ends
        assert index.lag_s(index.fresh_s + 0.1) == pytest.approx(0.1)
        r.hub.outage("test")
        await until(lambda: r.router.feed.trouble)
        fresh_s = index.fresh_s
        await until(lambda: index.lag_s(r.router._clock()) > 0.3)
        assert index.fresh_s == fresh_s
        r.hub.heal("test")
        await until(lambda: index.fresh_s > fresh_s)


def test_the_lag_of_a_poll_is_the_age_of_the_newest_record_of_the_partition_that_is_farthest_behind():
    def part(number, *ages_s):
        return Slice(KV_EVENTS, number, [StoredRecord(i, int((1000 - age_s) * 1000), None, b"", ()) for i, age_s in enumerate(ages_s)])

    assert [_age_s(slices, 1000.0) for slices in ([], [part(0, 9, 5)], [part(0, 9, 5), part(1, 3)], [part(0, -2)])] == [0, 5, 5, 0]


async def test_routing_goes_on_without_a_stream_and_readiness_says_so():
    hub = MemoryHub()
    hub.outage("test", "the broker is away")
    async with FakeEngine("w0").serving() as w0, FakeEngine("w1").serving() as w1, running([w0, w1], hub, wait=False, warm_up_s=0) as r:
        await until(lambda: r.router.pools.by_name["tiny"].block_size)
        for i in range(4):
            assert (await r.post({**BODY, "prompt": [i, *PROMPT]}))[0] == 200
        async with r.client.get(r.url + "/readyz") as response:
            ready = json.loads(await response.text())
            assert (response.status, ready["index"]) == (200, "away")
            assert any("the broker is away" in why for why in ready["why"])
        assert r.router.recorder.dropped == 0
        hub.heal("test")
        decisions, outcomes = await r.records(4)
        assert {c.trust for d in decisions for c in d.candidates} == {"blind"}
        assert len(decisions) == len(outcomes) == 4
        await until(lambda: r.router.feed.trouble is None)


async def test_an_outage_later_loses_nothing():
    async with FakeEngine("w0").serving() as engine, running([engine]) as r:
        chain = r.chain(PROMPT)
        await r.hold("w0", chain[:2])
        r.hub.outage("test")
        await until(lambda: r.router.feed.trouble)
        await r.post(BODY)
        r.hub.heal("test")
        await r.tell("w0", (Kind.STORED, chain[2:], 0))
        assert r.router.feed.restarts == 0
        assert trust_of(r) == EXACT
        await r.post(BODY)
        decisions, _ = await r.records(2)
        assert [d.candidates[0].overlap_tokens for d in decisions] == [32, 96]


async def test_a_topic_made_anew_makes_workers_blind_and_is_read_from_its_start():
    async with FakeEngine("w0").serving() as engine, running([engine]) as r:
        chain = r.chain(PROMPT)
        await r.hold("w0", chain)
        r.hub.delete_topic("test", KV_EVENTS)
        await until(lambda: r.router.feed.restarts == 1)
        await until(lambda: trust_of(r) == BLIND)
        r.seq.clear()
        await r.hold("w0", chain[:1])
        assert trust_of(r) == EXACT
        await r.post(BODY)
        (d,), _ = await r.records()
        assert d.candidates[0].overlap_tokens == 16


async def test_bad_records_and_strangers_are_counted_and_change_nothing():
    async with FakeEngine("w0").serving() as engine, running([engine]) as r:
        await append(r.hub, KV_EVENTS, b"k", b"no batch")
        await append(r.hub, WORKER_LOAD, b"k", b"{")
        await append(r.hub, WORKER_LOAD, b"k", load_record("unheard-of").replace(b'"tiny"', b'"other"'))
        await until(lambda: r.router.feed.bad_records == 2)
        await until(lambda: r.router.feed._sink.strangers == 1)
        await r.hold("w0", r.chain(PROMPT))
        assert trust_of(r) == EXACT


async def test_a_batch_that_cannot_be_applied_costs_its_worker_and_not_the_feed(monkeypatch):
    async with FakeEngine("w0").serving() as w0, FakeEngine("w1").serving() as w1, running([w0, w1]) as r:
        chain = r.chain(PROMPT)
        await r.hold("w0", chain)
        await r.hold("w1", chain)
        index = r.router.pools.index
        apply = index.apply

        def broken_once(batch, now_s):
            monkeypatch.setattr(index, "apply", apply)
            raise RuntimeError("a mistake")

        monkeypatch.setattr(index, "apply", broken_once)
        r.seq["w0"] += 1
        with pytest.raises(AssertionError):  # that batch never arrives
            await r.tell("w0", (Kind.STORED, chain, 0), timeout_s=0.5)
        assert (r.router.feed._sink.stumbles, trust_of(r, "w0"), trust_of(r, "w1")) == (1, BLIND, EXACT)
        await r.tell("w0", (Kind.STORED, chain, 0))
        assert trust_of(r, "w0") == DEGRADED


def a_batch(worker, block_size):
    rows = [(Kind.EPOCH_STARTED, 0, 0, 0, 0, 0.0, 0, 0, COMPLETE), (Kind.STORED, 0, 0, 1, 0, 0.0, 0, block_size, 0)]
    return KvBatch(WorkerId("tiny", worker, 0), 1, 0, 0, 0.0, 0.0, np.array(rows, EVENT), np.array([1], np.uint64))


def sink_of_one_worker():
    fleet = Fleet(pools=(Pool(name="tiny"),), workers=(Worker(pool="tiny", name="w0", url="http://w0:1"),))
    pools = Pools(fleet, {}, "cost", Coefficients(), KEY, TrustRules(10.0, 60.0), random.Random(1))
    return pools, FeedSink(pools, lambda: 1.0)


def test_a_worker_that_belongs_to_no_pool_has_no_word_about_the_pools_block_size():
    pools, sink = sink_of_one_worker()
    pool = pools.by_name["tiny"]
    pool.learn_block_size(16)  # from the engine's metrics: its workers send no events
    sink.apply(a_batch("gone", 64))
    assert (pool.block_size, pool.block_size_conflicts) == (16, 0)
    sink.apply(a_batch("w0", 32))
    assert pool.block_size == 32


def test_a_load_that_cannot_be_applied_does_not_end_the_feed(monkeypatch):
    pools, sink = sink_of_one_worker()

    def breaks(*_):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(pools, "hear_load", breaks)
    done = []
    sink.take(News(loads=deque([WorkerLoad.model_validate_json(load_record("w0"))])), None, lambda: done.append(1))
    assert (done, sink.stumbles) == ([1], 1)


async def test_an_index_behind_the_stream_is_trusted_no_more_than_its_age_allows():
    async with FakeEngine("w0").serving() as engine, running([engine], stale_after_s=1.5, blind_after_s=60) as r:
        await r.hold("w0", r.chain(PROMPT))
        index = r.router.pools.index
        for behind_s, trust in ((0.1, EXACT), (2, DEGRADED), (61, BLIND)):
            index.level_s = r.router._clock() - behind_s
            index.heard_s[index.slots[0].number] = r.router._clock()
            assert trust_of(r) == trust
        await until(lambda: r.router._clock() - index.level_s < 1)  # the next look finds it level again


def test_a_backlog_is_applied_in_slices_so_that_the_loop_serves_between_them():
    now_s = itertools.count(0, 0.0006)
    fleet = Fleet(pools=(Pool(name="tiny"),), workers=(Worker(pool="tiny", name="w0", url="http://127.0.0.1:1"),))
    pools = Pools(fleet, {}, "cost", Coefficients(), KEY, TrustRules(10, 60), random.Random(0))
    sink = FeedSink(pools, lambda: next(now_s))
    batches = [
        KvBatch(WorkerId("tiny", "w0", 0), 1, seq, seq, 1.0, 1.0, np.zeros(0, EVENT), np.zeros(0, np.uint64)) for seq in range(1, 11)
    ]
    loads = [WorkerLoad.model_validate_json(load_record("w0")) for _ in range(10)]
    later, done = [], []

    class Loop:
        def call_soon(self, *call):
            later.append(call)

    heard = []
    pools.hear_load = lambda pool, load, wall_s, now_s: heard.append(load)
    news = News(deque(batches), deque(loads), level_s=5.0)
    sink.take(news, Loop(), lambda: done.append(True))
    slices = [pools.index.counts.batches]
    while later:
        assert (done, sink.caught_up, pools.index.level_s) == ([], False, -np.inf)
        call, *arguments = later.pop()
        call(*arguments)
        slices.append(pools.index.counts.batches + len(heard))
    assert (slices[-1], heard, done, sink.caught_up, pools.index.level_s) == (20, loads, [True], True, 5.0)
    assert max(np.diff(slices)) <= 2  # of 0.6 ms each, in slices of one


async def test_trust_falls_with_the_silence_of_the_bridge_and_its_load_reports_keep_it():
    async with FakeEngine("w0").serving() as engine, running([engine], stale_after_s=10, blind_after_s=60) as r:
        await r.hold("w0", r.chain(PROMPT))
        index = r.router.pools.index
        slot = index.slots[0].number
        for silence_s, trust in ((1, EXACT), (11, DEGRADED), (61, BLIND)):
            index.heard_s[slot] = r.router._clock() - silence_s
            assert trust_of(r) == trust
        await append(r.hub, WORKER_LOAD, b"tiny/w0/0", load_record("w0"))
        await until(lambda: trust_of(r) == EXACT)


@pytest.mark.parametrize("backlog", [3000])
async def test_nothing_is_trusted_before_the_backlog_is_read(backlog):
    hub = MemoryHub()
    async with FakeEngine("w0").serving() as engine:
        async with running([engine], hub) as first:
            await first.hold("w0", first.chain(PROMPT))
            with hub.open("test") as stream:
                reader = stream.reader()
                reader.assign({(KV_EVENTS, p): at for p, at in stream.start_offsets(KV_EVENTS).items()})
                values = [rec.value for _ in range(4) for s in reader.poll(0.0, 10) for rec in s.records]
                writer = stream.writer()
                for _ in range(backlog):
                    writer.append(KV_EVENTS, b"tiny/w0/0", values[-1])
                await asyncio.to_thread(writer.flush, 10.0)
                writer.close(1.0)
                reader.close()
        async with running([engine], hub, wait=False) as second:
            trusts = set()
            while not second.router.feed.caught_up:
                trusts.add(trust_of(second))
                await asyncio.sleep(0)
            assert trusts == {BLIND}  # what it knows is from before
            await until(lambda: trust_of(second) == EXACT)
            assert (await second.post(BODY))[0] == 200
            assert second.router.feed.records >= backlog


@pytest.mark.kafka
async def test_index_and_records_work_over_a_real_broker_and_through_its_absence(own_kafka):
    hub = UrlHub(f"kafka://{own_kafka.bootstrap}")
    async with FakeEngine("w0").serving() as w0, FakeEngine("w1").serving() as w1, running([w0, w1], hub, wait=False) as r:
        await until(lambda: r.router.feed.caught_up and r.router.pools.by_name["tiny"].block_size, 30)
        chain = r.chain(PROMPT)
        await r.hold("w1", chain)
        assert (await r.post(BODY))[1]["x-warmwatch-predicted-cached-tokens"] == "96"
        await r.records(1)
        await asyncio.to_thread(own_kafka.kill)
        for _ in range(3):
            assert (await r.post(BODY))[1]["x-warmwatch-worker"] == "w1"
        await asyncio.to_thread(own_kafka.start)
        await r.tell("w1", (Kind.REMOVED, chain[3:], 0))
        await r.post(BODY)
        decisions, outcomes = await r.records(5)
        assert (len(decisions), len(outcomes), r.router.recorder.dropped) == (5, 5, 0)
        assert [d.candidates[0].overlap_tokens for d in decisions] == [96, 96, 96, 96, 48]


async def test_a_worker_whose_bridge_has_another_hash_key_is_blind_until_it_has_ours(caplog):
    async def page(r, path):
        async with r.client.get(r.url + path) as response:
            return await response.text()

    async with FakeEngine("w0").serving() as w0, FakeEngine("w1").serving() as w1, running([w0, w1]) as r:
        for worker in ("w0", "w1"):
            await r.hold(worker, r.chain(PROMPT))
        pools = r.router.pools
        other = pools.by_name["tiny"]
        for key_id in ("01234567", "01234567", None):
            await append(r.hub, WORKER_LOAD, b"w1", load_record("w1", key_id=key_id))
        await append(r.hub, WORKER_LOAD, b"w0", load_record("w0", key_id=KEY.key_id))
        await until(lambda: len(other.newest_load) == 2 and other.newest_load["w1", 0].bridge.key_id is None)
        assert (trust_of(r, "w0"), trust_of(r, "w1")) == (EXACT, BLIND)
        errors = [m.getMessage() for m in caplog.records if m.levelname == "ERROR"]
        assert len(errors) == 1
        assert "w1" in errors[0]
        assert "set the same hash_key" in errors[0]
        ready = json.loads(await page(r, "/readyz"))
        assert ready["ready"]
        assert ["tiny/w1" in why and "tiny/w0" not in why and "set the same hash_key" in why for why in ready["why"]] == [True]
        metric = 'warmwatch_router_worker_other_key{{pool="tiny",rank="0",worker="{}"}} {}'
        lines = (await page(r, "/metrics")).splitlines()
        assert metric.format("w0", "0.0") in lines
        assert metric.format("w1", "1.0") in lines
        await append(r.hub, WORKER_LOAD, b"w1", load_record("w1", key_id=KEY.key_id))
        await until(lambda: trust_of(r, "w1") == EXACT)
        assert json.loads(await page(r, "/readyz"))["why"] == []


async def test_a_bridge_that_does_not_name_its_key_is_not_judged(caplog):
    async with FakeEngine("w0").serving() as w0, running([w0]) as r:
        await r.hold("w0", r.chain(PROMPT))
        await append(r.hub, WORKER_LOAD, b"w0", load_record("w0"))
        await until(lambda: r.router.pools.by_name["tiny"].newest_load)
        assert trust_of(r) == EXACT
        assert not [m for m in caplog.records if m.levelname == "ERROR"]
