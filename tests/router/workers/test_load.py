import random

import pytest

from router.workers.load import PoolLoad


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


def test_growing_keeps_what_is_on_its_way():
    load = PoolLoad(1)
    flight = load.admit(0, 2.0, True, 0.0)
    load.grow(3)
    other = load.admit(2, 1.0, True, 0.0)
    assert (load.in_flight.tolist(), load.queue_s(0.5).tolist()) == ([1, 0, 1], [1.5, 0.0, 0.5])
    load.first_token(flight, 1.0)
    for f in (flight, other):
        load.release(f, 2.0)
    assert not (load.in_flight.any() or load.decoding.any() or load.queue_s(2.0).any())
