"""What the collector's parts are told of each other."""

from __future__ import annotations

import pytest

from collector.analytics.census import SILENT_S, held_now, present_now
from collector.core import capacities
from collector.residency import Residency
from schemas.kv_events import WorkerId
from schemas.workers import BridgeHealth, Trust, WorkerLoad

A, B, B2, C = WorkerId("p", "a", 0), WorkerId("p", "b", 0), WorkerId("p", "b", 1), WorkerId("p", "c", 0)
NOW_S = 1001.0
ALL = {("p", "a"): {"GPU": 10}, ("p", "b"): {"GPU": 40}, ("p", "c"): {"GPU": 30}, ("p", None): {"GPU": 80}}


def load(who: WorkerId, capacity: int | None, time_s: float = 1000.0, up: bool = True) -> WorkerLoad:
    return WorkerLoad(
        pool=who.pool, worker=who.worker, rank=who.rank, time_s=time_s, engine="vllm", up=up, capacity_blocks=capacity,
        bridge=BridgeHealth(trust=Trust.EXACT, epoch=1),
    )  # fmt: skip


FLEET = {A: load(A, 10), B: load(B, 20), B2: load(B2, 20), C: load(C, 30)}


def without(*scopes: str | None) -> dict[tuple[str, str | None], dict[str, int]]:
    return {scope: size for scope, size in ALL.items() if scope[1] not in scopes}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ALL),
        ({C: load(C, 30, up=False)}, without("c") | {("p", None): {"GPU": 50}}),
        ({C: load(C, 30, time_s=1000.0 - SILENT_S - 1)}, without("c") | {("p", None): {"GPU": 50}}),
        ({C: load(C, 30, time_s=1000.0 - SILENT_S)}, ALL),
        ({B2: load(B2, 20, up=False)}, ALL | {("p", "b"): {"GPU": 20}, ("p", None): {"GPU": 60}}),
        ({B2: load(B2, None)}, without("b", None)),
        ({C: None}, without("c", None)),
        ({C: load(C, 30, time_s=5000.0)}, ALL),
    ],
    ids=["all", "down", "silent", "late", "rank down", "not said", "no reading", "clock ahead"],
)
def test_capacities_are_of_the_workers_that_are_there_and_the_same_as_the_censuss(
    changed: dict[WorkerId, WorkerLoad | None], expected: dict[tuple[str, str | None], dict[str, int]]
) -> None:
    loads = {who: load for who, load in (FLEET | changed).items() if load is not None}
    workers = list(FLEET)
    assert capacities(workers, loads, NOW_S) == expected
    residency = Residency(recent_events=1 << 10, recent_hashes=1 << 14, slots=1 << 10)
    for _ in workers:
        residency.worker()
    census = held_now(residency, workers, loads, present_now(workers, loads, NOW_S))
    assert {scope: {"GPU": h.capacity_blocks} for scope, h in census.items() if h.capacity_blocks is not None} == expected
