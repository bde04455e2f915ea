"""How much is held, and how much of it more than once, is told from the residency's table."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest

from collector.analytics.census import Held, held_now
from collector.residency import Residency
from schemas.kv_events import COMPLETE, Kind, KvBatch, WorkerId, encode, unpack
from schemas.workers import BridgeHealth, Trust, WorkerLoad
from tests.collector.batches import batch, event, random_batches
from tests.collector.naive import NaiveWorker


def load(who: WorkerId, capacity: int | None) -> WorkerLoad:
    return WorkerLoad(
        pool=who.pool, worker=who.worker, rank=who.rank, time_s=1.0, engine="vllm", up=True, capacity_blocks=capacity,
        bridge=BridgeHealth(trust=Trust.EXACT, epoch=1),
    )  # fmt: skip


def fleet(*workers: WorkerId) -> Residency:
    residency = Residency(recent_events=1 << 10, recent_hashes=1 << 14, slots=1 << 10)
    for _ in workers:
        residency.worker()
    return residency


def apply(residency: Residency, number: int, *batches: KvBatch) -> None:
    residency.apply(unpack([encode(b) for b in batches]), np.full(len(batches), number, np.int32))


def stored(who: WorkerId, blocks: list[int], **more: float) -> tuple[KvBatch, KvBatch]:
    start = batch(who, 1, 0, 1000.0, event(Kind.EPOCH_STARTED, flags=COMPLETE))
    return start, batch(who, 1, 1, 1001.0, event(Kind.STORED, blocks, block_size=16, **more))


A, B, B2, OTHER = WorkerId("p", "a", 0), WorkerId("p", "b", 0), WorkerId("p", "b", 1), WorkerId("q", "a", 0)


def test_copies_count_as_held_and_contents_once() -> None:
    workers = [A, B, B2, OTHER]
    residency = fleet(*workers)
    apply(residency, 0, *stored(A, [1, 2, 3]))
    apply(residency, 1, *stored(B, [2, 3, 4]))
    apply(residency, 2, *stored(B2, [3, 3]))
    apply(residency, 3, *stored(OTHER, [1, 2]))
    loads = {A: load(A, 10), B: load(B, 20), B2: load(B2, 20), OTHER: load(OTHER, None)}
    assert held_now(residency, workers, loads) == {
        ("p", "a"): Held(10, 16, 3, 3),
        ("p", "b"): Held(40, 16, 5, 3),
        ("q", "a"): Held(None, 16, 2, 2),
        ("p", None): Held(50, 16, 8, 4),
        ("q", None): Held(None, 16, 2, 2),
    }
    assert held_now(residency, workers, loads, [True, False, False, False])["p", None] == Held(10, 16, 3, 3)


def test_workers_that_left_or_are_down_are_no_part_of_the_fleet() -> None:
    workers = [A, B, B2, OTHER]
    residency = fleet(*workers)
    for number, who in enumerate(workers):
        apply(residency, number, *stored(who, [1, 2]))
    loads = {A: load(A, 10), B: load(B, 20), B2: load(B2, 30)}
    loads[A] = loads[A].model_copy(update={"time_s": 100.0})
    loads[B2] = loads[B2].model_copy(update={"time_s": 100.0, "up": False})
    assert held_now(residency, workers, loads) == {
        ("p", "a"): Held(10, 16, 2, 2), ("q", "a"): Held(None, 16, 2, 2),
        ("p", None): Held(10, 16, 2, 2), ("q", None): Held(None, 16, 2, 2),
    }  # fmt: skip


def test_other_tiers_former_lives_and_workers_without_events_do_not_count() -> None:
    workers = [A, B, OTHER]
    residency = fleet(*workers)
    apply(residency, 0, *stored(A, [1, 2, 3]), batch(A, 1, 2, 1002.0, event(Kind.CLEARED), event(Kind.STORED, [7])))
    apply(residency, 0, batch(A, 1, 3, 1003.0, event(Kind.STORED, [7, 8], tier=1)))
    found = held_now(residency, workers, {A: load(A, 5)})
    assert found["p", "a"] == Held(5, 16, 1, 1)
    assert found["p", "b"] == Held()
    assert found["p", None] == Held(None, 16, 1, 1)
    assert found["q", None] == Held()
    assert held_now(Residency(), [], {}) == {}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_is_its_naive_twin(seed: int) -> None:
    rng = random.Random(seed)
    workers = [WorkerId(f"p{i % 2}", f"w{i // 2}", 0) for i in range(6)]
    residency, twins = fleet(*workers), [NaiveWorker() for _ in workers]
    for number, who in enumerate(workers):
        for b in random_batches(rng, who, 60, 30):
            apply(residency, number, b)
            twins[number].apply(b)
    gpu: dict[tuple[str, str | None], list[tuple[int, int]]] = defaultdict(list)
    for who, twin in zip(workers, twins, strict=True):
        for (tier, group, block), copies in twin.held.items():
            if tier == 0:
                gpu[who.pool, who.worker] += [(block, group)] * copies
                gpu[who.pool, None] += [(block, group)] * copies
    found = held_now(residency, workers, {})
    assert sum(len(x) for x in gpu.values()) > 50
    for scope, held in found.items():
        assert (held.resident_blocks, held.distinct_blocks) == (len(gpu[scope]), len(set(gpu[scope])))


def test_a_sample_keeps_its_stated_error() -> None:
    rng = np.random.default_rng(7)
    shared = rng.integers(0, 2**63, 20_000).astype(np.uint64)
    workers = [WorkerId("p", f"w{i}", 0) for i in range(4)]
    residency = fleet(*workers)
    for number, who in enumerate(workers):
        own = rng.integers(0, 2**63, 20_000).astype(np.uint64)
        apply(residency, number, *stored(who, np.concatenate([shared, own]).tolist()))
    found = held_now(residency, workers, {}, sample=1 << 13)
    pool = found["p", None]
    assert pool.resident_blocks == 160_000
    assert 0.005 < pool.error < 0.02
    assert pool.distinct_blocks == pytest.approx(100_000, rel=4 * pool.error)
    assert found["p", "w0"].distinct_blocks == pytest.approx(40_000, rel=4 * found["p", "w0"].error)
