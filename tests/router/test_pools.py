import random

import numpy as np
import pytest

from router.index.prefix_index import BLIND, DEGRADED, EXACT
from router.policy.cost import Coefficients
from router.pools import Pools, TrustRules
from router.prompts.prompt import Prompt
from schemas.block_hash import HashKey
from schemas.fleet import Fleet, Pool, Worker
from schemas.kv_events import COMPLETE, EVENT, Kind, KvBatch, WorkerId


def pools_of(workers=2, pools=("p",), **worker):
    fleet = Fleet(
        pools=tuple(Pool(name=p) for p in pools),
        workers=tuple(Worker(pool=p, name=f"w{i}", url=f"http://h{i}:1", **worker) for p in pools for i in range(workers)),
    )
    return Pools(fleet, {}, "cost", Coefficients(), HashKey(1, 2), TrustRules(10.0, 60.0), random.Random(1))


def batch(worker, hashes, epoch=1, block_size=16, rank=0):
    rows = [(Kind.EPOCH_STARTED, 0, 0, 0, 0, 0.0, 0, 0, COMPLETE), (Kind.STORED, 0, 0, len(hashes), 0, 0.0, 0, block_size, 0)]
    return KvBatch(WorkerId("p", worker, rank), epoch, 0, 0, 0.0, 0.0, np.array(rows, EVENT), np.array(hashes, np.uint64))


def tell(pools, *batches):
    pool = pools.by_name["p"]
    for b in batches:
        pools.index.apply(b, 0.0)
        pool.learn_block_size(pools.index.slot(b.source).block_size)
    return pool


def test_a_pool_follows_when_all_its_workers_restart_with_another_block_size():
    pools = pools_of()
    pool = tell(pools, batch("w0", [1]), batch("w1", [1]))
    tell(pools, batch("w0", [2], epoch=2, block_size=32))
    assert (pool.block_size, pool.block_size_conflicts) == (16, 1)
    tell(pools, batch("w1", [2], epoch=2, block_size=32))
    assert (pool.block_size, pool.block_size_conflicts) == (32, 1)


def test_the_model_names_the_pool():
    one, two = pools_of(), pools_of(pools=("p", "q"))
    assert [two.for_model(m) and (two.for_model(m)[0].name, two.for_model(m)[1]) for m in ("q", "p", None, "x")] == [
        ("q", None), ("p", None), ("p", None), None,
    ]  # fmt: skip
    assert one.for_model("adapter")[1] == "adapter"


@pytest.mark.parametrize(("silence_s", "trust"), [(0, EXACT), (10, EXACT), (11, DEGRADED), (61, BLIND)])
def test_trust_is_no_better_than_the_silence_of_the_bridge_allows(silence_s, trust):
    pools = pools_of()
    pool = tell(pools, batch("w0", [1]))
    assert pools.trust(pool, float(silence_s)).tolist() == [trust, BLIND]


@pytest.mark.parametrize(("behind_s", "trust"), [(10, EXACT), (11, DEGRADED), (61, BLIND)])
def test_trust_is_no_better_than_the_lag_of_the_index_allows(behind_s, trust):
    pools = pools_of()
    pool = tell(pools, batch("w0", [1]))
    pools.index.hear(pools.index.slots[0].source, 1000.0)
    pools.index.level_s = 1000.0 - behind_s
    assert pools.trust(pool, 1000.0).tolist() == [trust, BLIND]


def test_ranks_that_the_engine_chooses_count_by_the_best_overlap_and_the_worst_trust():
    pools = pools_of(workers=1, ranks=2, engine="sglang")
    pool = tell(pools, batch("w0", [1, 2], rank=1))
    prompt = Prompt("exact", 100, 100, np.array([1, 2, 3], np.uint64), 16)
    decided = pools.decide(pool, prompt, set(), 0.0)
    assert (decided.target.rank, decided.now.held.tolist(), decided.now.trust.tolist()) == (None, [32], [BLIND])


def test_when_all_are_down_all_are_tried_and_nobody_twice():
    pools = pools_of()
    pool = pools.by_name["p"]
    pool.health.refused(0)
    pool.health.refused(1)
    prompt = Prompt.unknown(100)
    first = pools.decide(pool, prompt, set(), 0.0).target.number
    assert pools.decide(pool, prompt, {first}, 0.0).target.number == 1 - first
    assert pools.decide(pool, prompt, {0, 1}, 0.0) is None
