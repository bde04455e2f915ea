"""Continuous batching: chunks, seats, preemption, and which admission counts."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.kv_wire import BlockStored
from simulator.prefix_cache import PrefixCache
from simulator.scheduler import Scheduler, SimRequest
from simulator.timing import StepCost

SIZE = 4


def scheduler(blocks: int = 100, seats: int = 8, budget: int = 64) -> Scheduler:
    return Scheduler(PrefixCache(blocks, SIZE), seats, budget)


def request(s: Scheduler, prompt: list[int], answer: int) -> SimRequest:
    r = SimRequest(s.cache.open(f"r{len(s.waiting)}", prompt), [9] * answer)
    s.add(r)
    return r


def run(s: Scheduler, until: Callable[[], bool] | None = None, limit: int = 500) -> int:
    """Steps until nothing is left (or `until`). The number of steps."""
    for n in range(limit):
        if not s.has_work or (until is not None and until()):
            return n
        s.complete(s.schedule(), float(n))
    raise AssertionError("did not end")


def test_one_token_a_step_the_first_after_the_prefill() -> None:
    s = scheduler()
    r = request(s, [1] * 10, 5)
    assert run(s) == 5
    assert r.finished and r.produced == 5 and r.first_token_s == 0.0 and r.last_token_s == 4.0
    assert s.cache.held_blocks == 0


def test_the_last_generated_token_is_never_computed_and_so_never_cached() -> None:
    s = scheduler()
    request(s, [1] * 7, 1)
    run(s)
    assert s.cache.cached_blocks == 1
    request(s, [2] * 7, 2)
    run(s)
    assert s.cache.cached_blocks == 3


def test_a_long_prefill_runs_in_chunks_beside_decodes() -> None:
    s = scheduler(budget=8)
    short = request(s, [1] * 4, 10)
    run(s, lambda: short.produced == 1)
    long = request(s, [2] * 20, 1)
    steps = []
    while long.produced == 0:
        step = s.schedule()
        steps.append((step.decodes, [(n, there) for _, n, there in step.prefills]))
        s.complete(step, 0.0)
    assert steps == [(1, [(7, 0)]), (1, [(7, 7)]), (1, [(6, 14)])]
    stored = [len(e.block_hashes) for e in s.cache.take_events() if isinstance(e, BlockStored)]
    assert sum(stored) == s.cache.cached_blocks


def test_requests_admitted_in_one_step_hit_each_others_blocks() -> None:
    s = scheduler()
    first, second = request(s, [3] * 13, 1), request(s, [3] * 13, 1)
    s.complete(s.schedule(), 0.0)
    assert (first.hit_tokens, second.hit_tokens) == (0, 12)
    assert second.created_tokens == 0 and first.created_tokens == 12


def test_seats_are_limited_and_order_is_arrival() -> None:
    s = scheduler(seats=2)
    requests = [request(s, [n] * 5, 2) for n in range(4)]
    step = s.schedule()
    assert step.admitted == requests[:2]
    s.complete(step, 0.0)
    run(s)
    assert all(r.finished for r in requests)


def test_the_youngest_is_preempted_starts_over_and_keeps_its_first_hit() -> None:
    s = scheduler(blocks=9)
    old = request(s, [1] * 12, 16)
    run(s, lambda: old.produced == 1)
    young = request(s, [2] * 12, 16)
    preempted = 0
    while s.has_work:
        step = s.schedule()
        preempted += step.preempted
        assert young.hit_tokens in (None, 0)
        s.complete(step, 0.0)
    assert preempted >= 1 and young.preemptions == preempted and old.preemptions == 0
    assert old.finished and young.finished and young.produced == 16
    assert young.hit_tokens == 0  # though its second admission found its own blocks


def test_an_aborted_request_gives_its_blocks_back() -> None:
    s = scheduler(blocks=9)
    r, waiting = request(s, [1] * 20, 9), request(s, [2] * 20, 9)
    step = s.schedule()
    s.abort(r)
    assert s.complete(step, 0.0) == [] and s.cache.held_blocks == 0
    s.abort(waiting)
    assert not s.has_work


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 30), st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=12),
    st.integers(13, 40),
    st.integers(1, 5),
    st.integers(1, 40),
)
def test_every_request_ends_whatever_the_pressure(work: list[tuple[int, int, int, int]], blocks: int, seats: int, budget: int) -> None:
    s = scheduler(blocks, seats, budget)
    requests = []
    for kind, prompt, answer, wait in work:
        requests.append(request(s, [kind] * prompt, answer))
        for _ in range(wait):
            if s.has_work:
                step = s.schedule()
                assert step.tokens <= budget and len(s.running) <= seats
                s.complete(step, 0.0)
    run(s, limit=5000)
    assert all(r.finished and r.produced == len(r.answer) for r in requests)
    assert s.cache.held_blocks == 0


def test_seconds_follow_the_cost_model() -> None:
    cost = StepCost(prefill_base_s=1, prefill_token_s=0.1, prefill_attention_s=0.01, decode_base_s=2, decode_sequence_s=0.5, speed=2)
    assert cost.prefill_s(10, 20) == (1 + 0.1 * 10 + 0.01 * 10 * (20 + 5)) / 2
    s = scheduler()
    request(s, [1] * 10, 3)
    step = s.schedule()
    assert cost.step_s(step) == cost.prefill_s(10, 0)
    s.complete(step, 0.0)
    assert cost.step_s(s.schedule()) == (2 + 0.5) / 2
    assert StepCost(instant=True).step_s(step) == 0
