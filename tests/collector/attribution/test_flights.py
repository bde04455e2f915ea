"""Who was computing the same blocks: hand-made cases, and a fuzz against lists."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from collector.attribution.flights import MOST_SPANS, Flight, Flights


def begin(flights: Flights, name: str, at_s: float, chain: Sequence[int], number: int = 0, pool: int = 0) -> Flight:
    return flights.begin(name, at_s, pool, (number,), np.array(chain, np.uint64))


def spans(flights: Flights, mine: Flight, chain: Sequence[int], held: Sequence[int]) -> list[tuple[int, int, str]]:
    found = flights.computing(mine, np.array(chain, np.uint64), np.array(held, np.int64))
    return sorted((s.start, s.end, s.flight.request_id) for s in found)


def test_another_computes_what_its_worker_does_not_hold_up_to_where_the_prompts_part() -> None:
    flights = Flights()
    begin(flights, "q", 1.0, [1, 2, 3, 4, 5])
    mine = begin(flights, "r", 2.0, [1, 2, 3, 9], 1)
    assert spans(flights, mine, [1, 2, 3, 9], [1, 0]) == [(1, 3, "q")]
    assert spans(flights, mine, [1, 2, 3, 9], [3, 0]) == []


def test_later_ones_ended_ones_and_those_of_other_pools_are_not_computing() -> None:
    flights = Flights()
    mine = begin(flights, "r", 2.0, [1, 2], 1)
    begin(flights, "later", 3.0, [1, 2])
    begin(flights, "pool", 1.0, [1, 2], pool=1)
    flights.end(begin(flights, "ended", 1.0, [1, 2]), 2.0, failed=False)
    flights.end(begin(flights, "failed", 1.0, [1, 2]), 9.0, failed=True)
    assert spans(flights, mine, [1, 2], [0, 0]) == []


def test_of_two_at_one_time_the_one_told_of_first_is_the_earlier_one() -> None:
    flights = Flights()
    first, second = begin(flights, "a", 1.0, [1]), begin(flights, "b", 1.0, [1])
    assert (spans(flights, first, [1], [0]), spans(flights, second, [1], [0])) == ([], [(0, 1, "a")])


def test_a_worker_of_which_nothing_is_known_is_not_said_to_compute() -> None:
    flights = Flights()
    begin(flights, "q", 1.0, [1], number=5)
    mine = begin(flights, "r", 2.0, [1])
    assert spans(flights, mine, [1], [0]) == []
    assert spans(flights, mine, [1], [0, 0, 0, 0, 0, -1]) == []


def test_a_rank_that_is_not_known_is_the_one_that_held_most() -> None:
    flights = Flights()
    flights.begin("q", 1.0, 0, (0, 1), np.array([1, 2, 3], np.uint64))
    mine = begin(flights, "r", 2.0, [1, 2, 3], 2)
    assert spans(flights, mine, [1, 2, 3], [0, 2, 0]) == [(2, 3, "q")]


def test_of_very_many_those_that_reach_farthest_are_kept() -> None:
    flights = Flights()
    for i in range(2 * MOST_SPANS):
        begin(flights, f"q{i}", 1.0, range(1, i + 2))
    mine = begin(flights, "r", 2.0, range(1, 100), 1)
    found = spans(flights, mine, range(1, 100), [0, 0])
    assert [end for _, end, _ in found] == list(range(MOST_SPANS + 1, 2 * MOST_SPANS + 1))


def test_agrees_with_lists_while_requests_come_and_go() -> None:
    rng = random.Random(4)
    flights = Flights()
    known: list[tuple[Flight, list[int]]] = []
    for n in range(600):
        now_s = float(n)
        stem = rng.choice([[1, 2, 3], [1, 2, 7], [5]])
        chain = stem + [100 * stem[-1] + i for i in range(rng.randint(0, 60))]
        chain = chain[: rng.randint(1, len(chain))] + ([10_000 + n] if rng.random() < 0.5 else [])
        mine = begin(flights, str(n), now_s, chain, rng.randrange(3))
        held = [rng.randint(-1, 6) for _ in range(3)]
        want = []
        for q, other in known:
            common = next((i for i, (a, b) in enumerate(zip(other, chain, strict=False)) if a != b), min(len(other), len(chain)))
            start = held[q.numbers[0]]
            if q.ended_s > now_s and not q.failed and 0 <= start < common:
                want.append((start, common, q.request_id))
        farthest = sorted((e for _, e, _ in want), reverse=True)[:MOST_SPANS]
        found = spans(flights, mine, chain, held)
        assert set(found) <= set(want)
        assert sorted((e for _, e, _ in found), reverse=True) == farthest
        known.append((mine, chain))
        for q, _ in rng.sample(known, min(2, len(known))):
            flights.end(q, now_s, failed=rng.random() < 0.2)
        flights.forget(now_s - 5)
        assert len(flights) >= sum(q.ended_s == np.inf for q, _ in known)
    assert flights.held_bytes() < 1 << 20
