"""Cost and pressure behind attribution: of a fleet in virtual time, and over a restart."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from collector.analytics.analyses import Analyses, entries_after
from collector.analytics.attributed import WINDOW_S, Attributed
from collector.analytics.census import held_now
from collector.analytics.cost import CostModel
from collector.analytics.lives import Lives
from collector.analytics.pressure import Budgets, Pressure
from collector.residency import Tally
from collector.store.columns import from_rows
from collector.store.publish import SCHEMAS
from schemas.kv_events import Kind, KvBatch, Unpacked, WorkerId, encode, unpack
from schemas.tables.losses import PRESSURE
from simulator.agents import AgentTraffic
from simulator.fleet import START_S, Fleet, FleetSpec
from simulator.virtual_worker import EngineSpec
from tests.collector.analytics.told import told
from tests.collector.batches import batch, event, random_batches
from tests.truth.fed import Feeder


class Watched(Feeder):
    """A collector whose KV events are watched for lives, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lives, self.removals = Lives(), 0
        apply = self.fold.residency.apply

        def watched(records: Unpacked, record_worker: np.ndarray, *more: int) -> Tally:
            tally = apply(records, record_worker, *more)
            self.lives.watch(records, record_worker)
            self.removals += int(records.events["count"][records.events["kind"] == Kind.REMOVED].sum())
            return tally

        self.fold.residency.apply = watched  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def played() -> Watched:
    feeder = Watched()
    fleet = Fleet(FleetSpec(workers=3, engine=EngineSpec(block_size=16, capacity_blocks=800), seed=1), feeder)
    fleet.run(AgentTraffic(start_s=START_S, spread_s=90.0, sessions=30, think_s=4.0, seed=1).flows())
    feeder.finish(fleet.now_s)
    return feeder


@pytest.mark.parametrize(("by_engine", "source", "within"), [(True, "fitted", 0.02), (False, "fitted from TTFT", 0.05)])
def test_the_cost_of_a_simulated_fleet_is_found_from_what_its_outcomes_tell(
    played: Watched, by_engine: bool, source: str, within: float
) -> None:
    model = CostModel()
    model.take([r if by_engine else replace(r, engine_ttft_s=None) for r in played.told.values()])
    assert from_rows(SCHEMAS["cost_models"], model.live()["cost_models"])["source"].to_pylist() == [source]
    found, truth = model.coefficients("sim", "w0", "sim"), EngineSpec().cost
    assert found is not None
    assert found.source == source
    assert found.a_s_per_token == pytest.approx(truth.prefill_token_s, rel=within)
    assert found.base_s == pytest.approx(truth.prefill_base_s, abs=0.005)  # TTFT has the network in it
    for r in played.told.values():
        seconds = model.run_seconds(r.pool, r.worker, r.model, r.run_causes, r.run_tokens)
        assert r.hit_tokens is not None
        whole = truth.prefill_s(r.prompt_tokens - r.hit_tokens, r.hit_tokens) - truth.prefill_base_s
        assert seconds.sum() == pytest.approx(whole, rel=within)


def test_pressure_of_a_simulated_fleet_is_that_of_its_prompts_and_events(played: Watched) -> None:
    p = Pressure(played.lives, played.fold.workers)
    p.take(list(played.told.values()))
    p.hold(held_now(played.fold.residency, played.fold.workers, played.fold.loads))
    assert from_rows(SCHEMAS["pressure"], p.live()["pressure"]).num_rows == len(p.live()["pressure"]), "as the contract's types"
    rows = [dict(zip([c.name for c in PRESSURE.columns], row, strict=True)) for row in p.live()["pressure"]]
    pools = [r for r in rows if r["worker"] is None]
    assert sum(r["removed_sample"] for r in pools) == played.removals > 1000
    for r in pools:
        mine = [x for x in played.told.values() if r["window_start"] <= x.prefill_s * 1e6 < r["window_start"] + WINDOW_S * 1e6]
        assert r["working_set_blocks"] == len({b for x in mine for b in x.chain.tolist()})
        assert r["active_sessions"] == len({x.session_id for x in mine})
        assert (r["capacity_blocks"], r["resident_blocks"]) == (2400, played.fold.residency.workers["resident"][:3].sum())
        assert r["pressure"] == r["active_blocks"] / 2400
        assert 0 <= r["idle_p50_s"] <= r["lifetime_p50_s"]
    assert {r["worker"] for r in rows} == {None, "w0", "w1", "w2"}


WORKERS = [WorkerId("p", "a", 0), WorkerId("p", "b", 0)]


def analyses(lives: Lives) -> Analyses:
    budgets = Budgets(pool_blocks=40, worker_blocks=30, active_blocks=60, sessions=5)
    return Analyses({"costs": CostModel(), "pressure": Pressure(lives, WORKERS, budgets)})


def watch(lives: Lives, batches: Sequence[tuple[int, KvBatch]]) -> None:
    lives.watch(unpack([encode(b) for _, b in batches]), np.array([n for n, _ in batches], np.int32))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_after_a_crash_checkpoint_events_and_journal_give_what_an_uninterrupted_run_holds(seed: int) -> None:
    rng = random.Random(seed)
    lives = Lives()
    whole = analyses(lives)
    streams = [(n, b) for n, who in enumerate(WORKERS) for b in random_batches(rng, who, 900, 30)]
    events = sorted(streams, key=lambda s: s[1].bridge_time_s)
    commits = [events[i : i + 60] for i in range(0, len(events), 60)]
    saved: dict[str, dict[str, np.ndarray]] = {}
    journal, unread = [], []
    for number, part in enumerate(commits):
        watch(lives, part)
        now_s = part[-1][1].bridge_time_s
        whole.take([request(rng, now_s - rng.random() * 20) for _ in range(12)])
        whole.close(now_s - 25)
        if number >= 5:
            journal.append(whole.journal(number))
            unread += part
        whole.written()
        if number == 4:
            saved = {"lives": lives.save(), "analyses": whole.save()}
    again_lives = Lives()
    again = analyses(again_lives)
    again_lives.load(saved["lives"])
    again.load(saved["analyses"])
    watch(again_lives, unread)
    for rows in journal:
        again.replay(entries_after(rows, 4))
    assert len(whole.live()["pressure"]) > 2
    assert again.live() == whole.live()
    for name, value in whole.save().items():
        np.testing.assert_array_equal(again.save()[name], value)
    assert any(row[17] for row in whole.live()["pressure"]), "removals are in the open windows"


def request(rng: random.Random, at_s: float) -> Attributed:
    n = rng.randint(1, 12)
    return told(
        n * 16 + 3, 16 * rng.randrange(n), at_s=at_s, ended_s=at_s + rng.random(), started_s=at_s - 0.5, worker=rng.choice("ab"),
        chain=[rng.randrange(30) for _ in range(n)], session_id=rng.choice(["x", "y", "z", "u", "v", "w", None]),
        engine_queue_s=0.0, engine_ttft_s=0.01 + n * 0.001,
    )  # fmt: skip


def test_an_event_of_a_window_that_the_journal_closes_is_dropped_as_it_was_before_the_crash() -> None:
    lives = Lives()
    watch(lives, [(0, batch(WORKERS[0], 1, 1, 1000.0, event(Kind.STORED, [1, 2])))])
    watch(lives, [(0, batch(WORKERS[0], 1, 2, 1100.0, event(Kind.REMOVED, [1])))])
    p = Pressure(lives, WORKERS)
    p.close(1500.0)
    assert p.live() == {"pressure": []}
