import random

import numpy as np
import pytest

from router.workers.health import Health
from router.workers.load import PoolLoad
from router.workers.targets import targets_of
from schemas.fleet import Pool, Worker


def targets(*ranks, choose_rank=True, engine="vllm"):
    workers = [Worker(pool="p", name=f"w{i}", url=f"http://h{i}:1", ranks=r, engine=engine) for i, r in enumerate(ranks)]
    return targets_of(Pool(name="p"), workers, choose_rank)


def test_each_rank_of_vllm_is_a_target_with_its_header():
    found = targets(1, 2)
    assert [(t.number, t.worker, t.rank, t.headers) for t in found] == [
        (0, "w0", 0, ()),
        (1, "w1", 0, (("X-data-parallel-rank", "0"),)),
        (2, "w1", 1, (("X-data-parallel-rank", "1"),)),
    ]


@pytest.mark.parametrize("given", [{"choose_rank": False}, {"engine": "sglang"}])
def test_ranks_that_cannot_be_chosen_are_one_target(given):
    (only,) = targets(2, **given)
    assert (only.rank, [s.rank for s in only.sources]) == (None, [0, 1])


def test_the_queue_is_the_waiting_prefill_less_what_the_oldest_has_had():
    load = PoolLoad(2)
    first = load.admit(0, 2.0, True, now_s=10.0)
    load.admit(0, 3.0, True, now_s=10.5)
    assert load.queue_s(10.0 + 1.5).tolist() == [3.5, 0.0]
    assert load.queue_s(99.0)[0] == 3.0  # the oldest takes longer than predicted: the next still waits for its own
    load.first_token(first, 12.0)
    assert load.queue_s(12.0)[0] == 3.0
    assert (load.decoding[0], load.in_flight[0]) == (1, 2)


def test_an_answer_that_does_not_stream_leaves_the_queue_by_prediction():
    load = PoolLoad(1)
    load.admit(0, 2.0, False, 0.0)
    load.admit(0, 1.0, False, 0.0)
    assert load.queue_s(1.0)[0] == 2.0
    assert load.queue_s(2.5)[0] == 0.5
    assert load.queue_s(3.5)[0] == 0.0
    assert load.decoding[0] == 2


@pytest.mark.parametrize("seed", range(5))
def test_no_count_leaks_whatever_the_order(seed):
    rng, now_s = random.Random(seed), 0.0
    load = PoolLoad(3)
    flights = []
    for _ in range(500):
        now_s += rng.random()
        action = rng.random()
        if action < 0.45 or not flights:
            flights.append(load.admit(rng.randrange(3), rng.random(), rng.random() < 0.7, now_s))
        elif action < 0.7:
            load.first_token(rng.choice(flights), now_s)
        else:
            flight = flights.pop(rng.randrange(len(flights)))
            load.release(flight, now_s)
            load.release(flight, now_s)
        assert (load.queue_s(now_s) >= 0).all()
        assert load.in_flight.sum() == len(flights)
    for flight in flights:
        load.release(flight, now_s)
    assert not load.in_flight.any()
    assert not load.decoding.any()
    assert not load.queue_s(now_s).any()


def test_a_refused_connection_takes_all_ranks_of_the_worker_down():
    health = Health(targets(1, 2))
    health.refused(1)
    assert health.up.tolist() == [True, False, False]
    assert health.down_urls() == {"http://h1:1"}
    health.answered(2)
    assert health.up.all()


def test_one_broken_connection_is_forgiven():
    health = Health(targets(1, 1))
    health.broke(0)
    assert health.up.all()
    health.answered(0)
    health.broke(0)
    assert health.up.all()
    health.broke(0)
    assert np.array_equal(health.up, [False, True])
