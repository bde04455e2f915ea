"""How full the caches are for what they are asked, exactly up to budgets and with stated errors beyond them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from collector.analytics import pressure as module
from collector.analytics.attributed import WINDOW_S, Attributed
from collector.analytics.census import Held
from collector.analytics.lives import Lives
from collector.analytics.pressure import Budgets, Histogram, Pressure, bucket_middle, log_bucket
from schemas.causes import Cause
from schemas.kv_events import Kind, WorkerId, encode, unpack
from schemas.tables.losses import PRESSURE
from tests.collector.analytics.naive_pressure import NaivePressure
from tests.collector.analytics.told import told
from tests.collector.batches import batch, event

WORKERS = [WorkerId("p", "a", 0), WorkerId("p", "b", 0), WorkerId("p", "b", 1)]


def pressure(budgets: Budgets | None = None) -> Pressure:
    return Pressure(Lives(1 << 10, 1 << 8), WORKERS, budgets)


def rows(found: Any) -> dict[tuple[object, object, object], dict[str, Any]]:
    """By (start of window, pool, worker)."""
    named = [dict(zip([c.name for c in PRESSURE.columns], row, strict=True)) for row in found["pressure"]]
    assert len({(r["window_start"], r["pool"], r["worker"]) for r in named}) == len(named)
    return {(r["window_start"] // 1_000_000, r["pool"], r["worker"]): r for r in named}


def of_session(session: str, chain: range, **more: Any) -> Attributed:
    return told(len(chain) * 16 + 1, 0, chain=chain, session_id=session, **({"at_s": 1000.0} | more))


def random_request(rng: random.Random, at_s: float) -> Attributed:
    session, n = rng.randrange(8), rng.randint(1, 12)
    causes = [rng.choice([Cause.HIT, Cause.EVICTED, Cause.CLEARED, Cause.FIRST_SEEN]) for _ in range(n)]
    gone = [rng.expovariate(0.1) if c in (Cause.EVICTED, Cause.CLEARED) and rng.random() < 0.8 else math.nan for c in causes]
    return told(
        n * 16 + rng.randrange(16), 0, at_s=at_s, chain=range(session // 2 * 8, session // 2 * 8 + n), causes=causes, gone_s=gone,
        pool=rng.choice("pq"), worker=rng.choice("abc"), session_id=rng.choice([f"s{session}", None]), started_s=at_s - rng.random() * 3,
    )  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_is_its_naive_twin_up_to_its_budgets(seed: int) -> None:
    rng = random.Random(seed)
    found, twin, seen = pressure(), NaivePressure(), 0
    for i in range(300):
        r = random_request(rng, 900.0 + i * 5 + rng.random() * 40)
        found.take([r])
        twin.take(r)
        if i % 60 == 59:
            before_s = int((900 + i * 5 - 100) // WINDOW_S) * WINDOW_S
            closed = found.close(before_s)
            seen += compare(closed, twin)
            twin.close(before_s)
        if i % 50 == 49:
            compare(found.live(), twin)
            again = pressure()
            again.load(found.save())
            assert again.live() == found.live()
            for a, b in zip(again.save().values(), found.save().values(), strict=True):
                np.testing.assert_array_equal(a, b)
            found = again
    assert seen > 10


def compare(found: Any, twin: NaivePressure) -> int:
    for (start, pool, worker), row in rows(found).items():
        expected = twin.figures(start, pool, worker)
        for name, value in expected.items():
            close = pytest.approx(value, rel=0.046) if name[-2:] in ("_s", "ns") and value is not None and "0_" in name else value
            assert row[name] == close, (start, pool, worker, name)
    return len(rows(found))


def test_pressure_is_the_blocks_of_active_sessions_over_what_fits() -> None:
    p = pressure()
    p.take(
        [of_session("s", range(100), worker="a"), of_session("t", range(50, 150), worker="b", rank=1), told(999, 0, chain=range(500, 530))]
    )
    before = rows(p.live())[900, "p", None]
    assert (before["pressure"], before["capacity_blocks"], before["resident_blocks"]) == (None, None, None)
    p.hold({("p", None): Held(120, 16, 200, 150), ("p", "a"): Held(None, 16, 80, 80)})
    found = rows(p.live())
    pool, worker = found[900, "p", None], found[900, "p", "b"]
    assert (pool["active_sessions"], pool["active_blocks"], pool["working_set_blocks"]) == (2, 150, 180)
    assert pool["pressure"] == 150 / 120
    assert (pool["duplication"], pool["duplicate_tokens"]) == (200 / 150, 50 * 16)
    assert (worker["active_sessions"], worker["active_blocks"]) == (1, 100)
    assert found[900, "p", "a"]["pressure"] is None
    assert found[900, "p", "a"]["duplicate_tokens"] == 0


def test_only_a_sessions_newest_prompt_must_be_held() -> None:
    p = pressure()
    p.take([of_session("s", range(100), worker="a", started_s=2.0), of_session("s", range(30), worker="b", started_s=3.0)])
    p.take([of_session("s", range(200), worker="a", started_s=1.0)])  # told last, but older
    found = rows(p.live())
    assert found[900, "p", None]["active_blocks"] == 30
    assert (found[900, "p", "a"]["active_sessions"], found[900, "p", "b"]["active_sessions"]) == (0, 1)


def test_without_named_sessions_there_is_no_pressure_to_tell() -> None:
    p = pressure()
    p.hold({("p", None): Held(120, 16, 200, 150)})
    p.take([told(33, 0, chain=range(2))])
    row = rows(p.live())[900, "p", None]
    assert (row["active_sessions"], row["active_blocks"], row["pressure"], row["growth_p50_tokens"]) == (None, None, None, None)
    assert row["working_set_blocks"] == 2


def watch(p: Pressure, number: int, seq: int, at_s: float, kind: Kind, blocks: range) -> None:
    p.lives.watch(unpack([encode(batch(WORKERS[number], 1, seq, at_s, event(kind, blocks)))]), np.array([number], np.int32))


def test_uses_reach_the_lives_of_the_rank_that_served_or_of_all_that_may_have() -> None:
    for rank, expected in ((1, [39.0, 70.0]), (None, [39.0, 39.0])):
        p = pressure()
        for number in (1, 2):
            watch(p, number, 1, 930.0, Kind.STORED, range(4))
        p.take([told(65, 64, at_s=960.0, chain=range(4), worker="b", rank=rank)])
        for number in (1, 2):
            watch(p, number, 2, 1000.0, Kind.REMOVED, range(4))
        found = rows(p.live())
        row = found[900, "p", "b"]
        assert sorted(set(p.lives.removed(0, 1e9).idle_s.tolist())) == sorted(set(expected))
        assert (row["removed_sample"], row["lifetime_p50_s"]) == (8, 70.0)
        assert row["idle_p90_s"] == max(expected)
        assert found[900, "p", None]["removed_sample"] == 8


def test_events_alone_give_rows_whose_requests_are_not_known() -> None:
    p = pressure()
    p.hold({("p", "a"): Held(10, 16, 3, 3)})
    watch(p, 0, 1, 930.0, Kind.STORED, range(4))
    watch(p, 0, 2, 1000.0, Kind.REMOVED, range(2))
    row = rows(p.live())[900, "p", "a"]
    assert (row["working_set_blocks"], row["active_blocks"], row["resident_blocks"], row["removed_sample"]) == (None, None, 3, 2)
    assert (row["lifetime_p50_s"], row["returned_blocks"]) == (70.0, None)
    assert len(p.close(1200.0)["pressure"]) == 2
    assert p.live() == {"pressure": []}
    watch(p, 0, 3, 1001.0, Kind.REMOVED, range(3))
    assert p.lives.late == 1


@pytest.mark.parametrize(("scopes", "expected"), [(8, 0), (2, None)])
def test_a_worker_without_requests_has_none_and_one_there_is_no_room_for_is_not_known(scopes: int, expected: int | None) -> None:
    p = pressure(Budgets(scopes=scopes))
    p.take([told(33, 0, chain=range(2), worker="b")])
    watch(p, 0, 1, 930.0, Kind.STORED, range(4))
    watch(p, 0, 2, 1000.0, Kind.REMOVED, range(2))
    row = rows(p.live())[900, "p", "a"]
    assert (row["working_set_blocks"], row["returned_blocks"], row["removed_sample"]) == (expected, expected, 2)


def test_a_late_request_counts_in_the_oldest_open_window_and_far_off_ones_open_no_more_than_there_is_room_for() -> None:
    p = pressure()
    p.take([told(17, 0, at_s=1000.0, chain=[1])])
    p.close(1200.0)
    p.take([told(17, 0, at_s=1000.0, chain=[2])])
    assert list(rows(p.live())) == [(1200, "p", None), (1200, "p", "w")]
    for k in range(100):
        p.take([told(17, 0, at_s=1200.0 + k * WINDOW_S, chain=[k + 3])])
    found = rows(p.live())
    assert len({start for start, _, _ in found}) == module.MAX_WINDOWS
    assert sum(row["working_set_blocks"] for (_, _, worker), row in found.items() if worker is None) == 101


def test_beyond_their_budgets_figures_are_estimates_near_the_truth() -> None:
    budgets = Budgets(pool_blocks=2000, worker_blocks=1000, active_blocks=4000, sessions=256)
    rng = np.random.default_rng(5)
    off: dict[str, list[float]] = {"working_set_blocks": [], "active_blocks": [], "active_sessions": []}
    for trial in range(6):
        p = pressure(budgets)
        common = rng.integers(0, 2**63, 40).astype(np.uint64)
        for session in range(600):
            own = rng.integers(0, 2**63, 60).astype(np.uint64)
            p.take([replace(of_session(f"{trial} {session}", range(100)), chain=np.concatenate([common, own]))])
        row = rows(p.live())[900, "p", None]
        off["working_set_blocks"].append(row["working_set_blocks"] / (40 + 600 * 60) - 1)
        off["active_blocks"].append(row["active_blocks"] / (40 + 600 * 60) - 1)
        off["active_sessions"].append(row["active_sessions"] / 600 - 1)
    for name, limit in (("working_set_blocks", 0.1), ("active_blocks", 0.25), ("active_sessions", 0.25)):
        assert abs(float(np.mean(off[name]))) < limit / 2, name
        assert 0 < max(map(abs, off[name])) < limit, name


def test_memory_stays_bounded_in_a_simulated_week() -> None:
    budgets = Budgets(pool_blocks=64, worker_blocks=32, active_blocks=128, sessions=16, scopes=4)
    p = pressure(budgets)
    rng = random.Random(6)
    most, before = 0, p.held_bytes()
    for k in range(7 * 48):
        at_s = 1e6 + k * 1800
        requests = [
            of_session(f"s{rng.randrange(10**6)}", range(b := rng.randrange(10**9), b + 40), at_s=at_s + i, worker=f"w{rng.randrange(9)}")
            for i in range(4)
        ]
        p.take(requests)
        watch(p, 0, k, at_s, Kind.STORED, range(k * 20, k * 20 + 20))
        if k > 5:
            watch(p, 0, k, at_s, Kind.REMOVED, range(k * 20 - 100, k * 20 - 80))
        p.close(at_s - WINDOW_S)
        if k % 10 == 0:
            most = max(most, p.held_bytes())
            assert sum(len(a.tobytes()) for a in p.save().values()) < 40_000
    assert most < before + 60_000
    assert p.refused > 0


def test_log_buckets_keep_values_within_their_stated_error() -> None:
    values = [0.0, 1e-9, 0.001, 0.5, 1, 3, 17, 655, 6300, 1e6, -1, -655.5]
    found = Histogram()
    for v in values:
        found.add(v)
        assert bucket_middle(log_bucket(v)) == pytest.approx(v, rel=0.045, abs=0.001)
    assert Histogram().quantile(0.5) is None
    ordered = sorted(values)
    assert [found.quantile(q) for q in (0.01, 0.5, 1.0)] == pytest.approx([ordered[0], ordered[5], ordered[-1]], rel=0.046, abs=0.001)


def test_gaps_of_any_length_have_a_bucket() -> None:
    p = pressure()
    p.take([told(81, 0, chain=range(5), causes=[Cause.EVICTED] * 5, gone_s=[0.0, 1e-4, 1e30, math.nan, math.inf])])
    row = rows(p.live())[900, "p", None]
    assert row["returned_blocks"] == 5
    assert row["return_p50_s"] == 0.0
    assert row["return_p90_s"] > 1e9
