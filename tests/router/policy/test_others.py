import random

import numpy as np
import pytest

from router.policy.others import OthersLoad


def test_what_the_engine_runs_beyond_our_flights_is_others():
    others = OthersLoad(3.0)
    others.note(np.array([4, 0]), 10.0)
    others.sent(0, 4, 0.5, 10.0)
    others.hear(0, running=10.0, waiting=2.0, read_s=10.0)
    queue_s, running, total = others.load(2, 10.5)
    assert total.tolist() == [8.0, 0.0]
    assert running[0] == pytest.approx(8 * 10 / 12)
    assert queue_s[0] == pytest.approx(8 * 2 / 12 * 0.5)


def test_a_reading_counts_only_while_it_is_fresh():
    others = OthersLoad(3.0)
    others.hear(1, 6.0, 0.0, 10.0)
    assert others.load(3, 13.0)[2].tolist() == [0.0, 6.0, 0.0]
    assert others.load(3, 13.1) is None
    others.hear(0, 2.0, 0.0, 12.0)
    assert others.load(3, 13.1)[2].tolist() == [2.0, 0.0, 0.0]


def test_an_older_reading_does_not_replace_a_newer_one():
    others = OthersLoad(3.0)
    others.hear(0, 6.0, 0.0, 10.0)
    others.hear(0, 1.0, 0.0, 9.0)
    assert others.load(1, 10.0)[2].tolist() == [6.0]


def test_a_number_that_another_worker_takes_over_starts_with_nothing():
    others = OthersLoad(3.0)
    others.hear(0, 6.0, 0.0, 10.0)
    others.gone(0)
    assert others.load(1, 10.0)[2].tolist() == [0.0]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("skew_s", [-0.2, 0.0, 0.2])
def test_our_own_flights_are_never_counted_twice(seed, skew_s):
    """Flights come and go; the engine's reading is late, and its clock is off by less than the window."""
    rng, others = random.Random(seed), OthersLoad(3.0)
    flights, ends, readings = np.zeros(1, np.int64), [], []
    for step in range(3000):
        now_s = step * 0.01
        flights[0] -= sum(e <= now_s for e in ends)
        ends = [e for e in ends if e > now_s]
        if rng.random() < 0.25:
            others.note(flights, now_s)
            flights[0] += 1
            others.sent(0, int(flights[0]), 0.2, now_s)
            ends.append(now_s + rng.expovariate(0.5))
        if step % 100 == 0:
            readings.append((now_s + 0.7, now_s + skew_s, float(flights[0])))
        while readings and readings[0][0] <= now_s:
            _, read_s, running = readings.pop(0)
            others.hear(0, running, 0.0, read_s)
            found = others.load(1, now_s)
            assert found is None or found[2][0] == 0.0


def test_others_are_found_though_ours_come_and_go():
    rng, others, found = random.Random(4), OthersLoad(3.0), []
    flights, ends = np.zeros(1, np.int64), []
    for step in range(4000):
        now_s = step * 0.01
        flights[0] -= sum(e <= now_s for e in ends)
        ends = [e for e in ends if e > now_s]
        if rng.random() < 0.1:
            others.note(flights, now_s)
            flights[0] += 1
            others.sent(0, int(flights[0]), 0.2, now_s)
            ends.append(now_s + rng.expovariate(1.0))
        if step % 100 == 50:
            others.hear(0, float(flights[0]) + 20.0, 0.0, now_s)
            found.append(float(others.load(1, now_s)[2][0]))
    assert 16 < np.mean(found) <= 20
