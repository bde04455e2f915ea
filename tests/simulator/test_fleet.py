"""The fleet in virtual time: its records are those of real processes, its traffic goes on as people do, its incidents do what they say."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from schemas.kv_events import Kind, WorkerId, decode
from schemas.requests import Decision, Outcome, unpack_hashes
from schemas.topics import DECISIONS, KV_EVENTS, OUTCOMES, WORKER_LOAD
from schemas.workers import Trust, WorkerLoad
from simulator.agents import AgentTraffic, Namespace, Stamp
from simulator.asks import Ask, Flow, Turn, ask_of_ids, ask_of_tokens, claude_code_flows, mooncake_flows, one, ragpulse_flows, text_flows
from simulator.fleet import (
    START_S,
    Capacity,
    Clear,
    Fleet,
    FleetSpec,
    Incident,
    Join,
    Lag,
    Leave,
    LoseFrames,
    Restart,
    Usage,
    UsePolicy,
)
from simulator.traces import AgentSession, MooncakeRequest, RagRequest, TextRequest
from simulator.traces import Turn as RecordedTurn
from simulator.truth import History
from simulator.virtual_worker import EngineSpec
from tests.collector.naive import NaiveWorker

S = START_S
BLOCK = 16


class Records:
    """A sink that keeps everything, parsed."""

    def __init__(self) -> None:
        self.raw: list[tuple[str, bytes, bytes, float]] = []

    def __call__(self, topic: str, key: bytes, value: bytes, time_s: float) -> None:
        self.raw.append((topic, key, value, time_s))

    def of(self, topic: str, parse: Any) -> list[Any]:
        return [parse(value) for name, _, value, _ in self.raw if name == topic]

    @property
    def decisions(self) -> list[Decision]:
        return self.of(DECISIONS, Decision.model_validate_json)

    @property
    def outcomes(self) -> dict[str, Outcome]:
        return {o.request_id: o for o in self.of(OUTCOMES, Outcome.model_validate_json)}

    @property
    def batches(self) -> list[Any]:
        return self.of(KV_EVENTS, decode)


def played(flows: Any, *incidents: Incident, engine: dict[str, Any] | None = None, **spec: Any) -> tuple[Fleet, Records]:
    records = Records()
    fleet = Fleet(FleetSpec(engine=EngineSpec(**{"block_size": BLOCK, "capacity_blocks": 600} | (engine or {})), **spec), records)
    fleet.run(flows, incidents)
    return fleet, records


def agents(**more: Any) -> list[Flow]:
    return AgentTraffic(**{"start_s": S, "sessions": 12, "spread_s": 30.0, "turns": (2, 5), "scale": 0.05} | more).flows()


def prompt(number: int, tokens: int, output: int = 8, shared: int = 0) -> Ask:
    """Of its own content but for the first `shared` blocks."""
    ids = np.arange(1, tokens // BLOCK + 2) + 1000 * (number + 1)
    ids[:shared] = np.arange(1, shared + 1)
    return ask_of_ids(ids, tokens, output, BLOCK, number)


def test_the_same_seed_writes_the_same_records() -> None:
    first, again, other = (played(agents(seed=seed), workers=2)[1].raw for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_every_record_is_valid_and_every_request_has_both_halves() -> None:
    fleet, records = played(agents(), workers=3)
    decisions, outcomes = records.decisions, records.outcomes
    assert len(decisions) == len(outcomes) == fleet.counts["requests"] > 20
    loads = records.of(WORKER_LOAD, WorkerLoad.model_validate_json)
    assert {x.worker for x in loads} == {"w0", "w1", "w2"}
    assert all(x.capacity_blocks == 600 and x.bridge.trust == Trust.EXACT for x in loads)
    times = [d.time_s for d in decisions]
    assert times == sorted(set(times)), "no two decisions at a time"
    for d in decisions:
        o = outcomes[d.request_id]
        assert d.chain is not None and d.prompt_tokens is not None and o.cached_tokens is not None
        assert len(unpack_hashes(d.chain)) == d.prompt_tokens // BLOCK
        assert {c.worker for c in d.candidates} == {"w0", "w1", "w2"}
        assert d.candidates[0].worker == d.worker == o.worker
        assert d.content_from is not None, "the prompt's content is told"
        assert o.status == 200 and o.prompt_tokens == d.prompt_tokens
        assert o.cached_tokens % BLOCK == 0 and o.cached_tokens < d.prompt_tokens
        assert o.time_s > d.time_s + (o.ttft_s or 0.0)


def test_events_tell_what_each_cache_holds() -> None:
    fleet, records = played(agents(sessions=20), Restart(S + 20, "w0"), Clear(S + 25, "w1"), Capacity(S + 30, "w2", 200), workers=3)
    twins: dict[str, NaiveWorker] = {w: NaiveWorker() for w in fleet.workers}
    for batch in records.batches:
        twins[batch.source.worker].apply(batch)
    kinds = Counter(int(k) for b in records.batches for k in b.events["kind"])
    assert kinds[Kind.REMOVED] and kinds[Kind.CLEARED] == 1 and kinds[Kind.EPOCH_STARTED] == 4
    for name, worker in fleet.workers.items():
        held = {h: n for (_, _, h), n in twins[name].held.items() if n}
        assert held == worker.cache.resident()
        assert twins[name].trust == Trust.EXACT


def test_one_worker_without_limits_hits_all_that_was_ever_computed() -> None:
    flows = [one(S + 20.0 * n, prompt(n, 200 + 16 * n, shared=min(n, 5))) for n in range(8)]
    _, records = played(flows, workers=1)
    assert [o.cached_tokens for o in records.outcomes.values()] == [0, 0, *(BLOCK * n for n in range(1, 5)), 5 * BLOCK, 5 * BLOCK]


def test_a_wholly_cached_prompt_computes_its_last_block_again() -> None:
    flows = [one(S, prompt(1, 64)), one(S + 20, prompt(1, 64)), one(S + 40, prompt(1, 65))]
    _, records = played(flows, workers=1)
    assert [o.cached_tokens for o in records.outcomes.values()] == [0, 48, 64]


def test_the_next_turn_waits_for_the_end_of_the_last_and_thinks() -> None:
    turns = iter([Turn(1.0, lambda _: prompt(1, 100, 50)), Turn(7.0, lambda _: prompt(2, 100, 50))])
    _, records = played([Flow(S, turns)], workers=1)
    first, second = records.decisions
    assert first.time_s == S + 1.0
    assert second.time_s == pytest.approx(records.outcomes[first.request_id].time_s + 7.0)


def test_a_long_prompt_is_stored_in_chunks_and_a_batch_shares_its_blocks() -> None:
    flows = [one(S, prompt(1, 320)), one(S + 0.001, prompt(2, 160, shared=4)), one(S + 0.002, prompt(3, 160, shared=4))]
    _, records = played(flows, workers=1, engine={"batch_tokens": 128}, policy="round_robin")
    stored = [e for b in records.batches for e in b.events if e["kind"] == Kind.STORED]
    assert [int(e["count"]) for e in stored[:3]] == [8, 8, 4]
    assert [o.cached_tokens for o in sorted(records.outcomes.values(), key=lambda o: o.request_id)] == [0, 0, 64]


def test_one_at_a_time_is_fifo() -> None:
    for alone in (True, False):
        flows = [one(S + 0.001 * n, prompt(n, 1600 - 200 * n, 1)) for n in range(4)]
        _, records = played(flows, workers=1, engine={"one_at_a_time": alone, "batch_tokens": 100_000})
        ends = [records.outcomes[f"v{n}"].time_s for n in range(4)]
        assert ends == sorted(ends)
        assert (len(set(ends)) == 4) == alone


def test_the_engine_preempts_when_decodes_fill_the_cache_and_keeps_its_first_report() -> None:
    flows = [one(S + 0.5 * n, prompt(n, 160, 200 if n else 1, shared=5)) for n in range(4)]
    fleet, records = played(flows, workers=1, engine={"capacity_blocks": 45})
    assert fleet.workers["w0"].preemptions
    assert [records.outcomes[f"v{n}"].cached_tokens for n in range(4)] == [0, 80, 80, 80]
    assert fleet.counts["failed"] == 0
    twin = NaiveWorker()
    for batch in records.batches:
        twin.apply(batch)
    assert {h: n for (_, _, h), n in twin.held.items() if n} == fleet.workers["w0"].cache.resident()


def test_a_prompt_that_never_fits_fails_alone() -> None:
    _, records = played([one(S, prompt(1, 10_000)), one(S + 1, prompt(2, 100))], workers=1, engine={"capacity_blocks": 100})
    assert [(o.status, o.error) for o in records.outcomes.values()] == [(400, "upstream"), (200, None)]


def test_a_restart_fails_what_runs_and_begins_a_new_epoch() -> None:
    fleet, records = played([one(S, prompt(1, 160, 500)), one(S + 8, prompt(1, 160))], Restart(S + 5, "w0"), workers=1)
    assert [(o.status, o.cached_tokens) for o in records.outcomes.values()] == [(502, None), (200, 0)]
    assert [b.epoch for b in records.batches] == sorted(b.epoch for b in records.batches)
    assert {b.epoch for b in records.batches} == {1, 2}
    assert fleet.counts["failed"] == 1


def test_lost_frames_become_a_gap_mark_and_degrade_the_worker() -> None:
    flows = [one(S + 10 * n, prompt(n, 160)) for n in range(6)]
    fleet, records = played(flows, LoseFrames(S + 15, "w0", 2), workers=1)
    gaps = [(int(e["seq"]), int(e["parent"])) for b in records.batches for e in b.events if e["kind"] == Kind.GAP]
    assert gaps == [(3, 4)]
    assert [b.last_seq for b in records.batches] == [0, 1, 2, 4, 5, 6][: len(records.batches)]
    assert records.of(WORKER_LOAD, WorkerLoad.model_validate_json)[-1].bridge.trust == Trust.DEGRADED
    assert records.decisions[-1].candidates[0].trust == Trust.DEGRADED
    assert fleet.counts["failed"] == 0


def test_workers_join_and_leave_and_the_policy_changes() -> None:
    flows = [one(S + n, prompt(n, 64)) for n in range(60)]
    _, records = played(
        flows, Join(S + 10, "new"), UsePolicy(S + 20, "round_robin"), Leave(S + 40, "w0"), UsePolicy(S + 50, "cost"), workers=2
    )
    by_second = {round(d.time_s - S): d for d in records.decisions}
    assert {by_second[n].worker for n in range(10)} <= {"w0", "w1"}
    assert {by_second[n].worker for n in range(20, 40)} == {"w0", "w1", "new"}
    assert {by_second[n].worker for n in range(41, 60)} == {"w1", "new"}
    assert [by_second[n].policy for n in (19, 21, 51)] == ["cost", "round_robin", "cost"]
    assert by_second[30].candidates[0].cost_s is None
    assert by_second[55].workers_considered == 2


def test_outcomes_say_nothing_while_usage_is_off() -> None:
    _, records = played([one(S + 10 * n, prompt(n, 64)) for n in range(3)], Usage(S + 5, False), Usage(S + 15, True), workers=1)
    assert [o.cached_tokens for o in records.outcomes.values()] == [0, None, 0]
    assert [o.prompt_tokens for o in records.outcomes.values()] == [64, None, 64]


def test_a_lagging_index_promises_what_is_gone() -> None:
    for lag_s, promised in ((0.0, 0), (3.5, 480)):
        flows = [one(S, prompt(1, 480, 1)), *(one(S + 1 + n, prompt(2 + n, 480, 1)) for n in range(2)), one(S + 5, prompt(1, 480, 1))]
        _, records = played(flows, Lag(S - 1, lag_s), workers=1, engine={"capacity_blocks": 60})
        assert records.decisions[-1].candidates[0].overlap_tokens == promised
        assert records.outcomes["v3"].cached_tokens == 0


def test_a_template_with_a_timestamp_and_another_namespace_rename_all_blocks_of_the_same_content() -> None:
    def chains(**more: Any) -> list[tuple[Any, Any]]:
        _, records = played(agents(templates=1, tenants=1, sessions=2, **more), workers=1)
        return [(unpack_hashes(d.chain or ""), d.namespace) for d in records.decisions]

    plain = chains()
    stamped = chains(stamps=(Stamp(S, "agent-0"),))
    other = chains(namespaces=(Namespace(S, "tenant-0", lora="x"),))
    salted = chains(namespaces=(Namespace(S, "tenant-0", salt="x"),))
    assert plain[0][0][0] == plain[1][0][0]
    assert len({c[0] for c, _ in stamped}) == len(stamped)
    assert len({c[0][0][0] for c in (plain, other, salted)}) == 3
    assert len({c[0][1] for c in (plain, other, salted)}) == 3
    assert plain[0][1] == stamped[0][1]


def test_sub_agents_start_beside_their_session() -> None:
    _, records = played(agents(sessions=4, fan_out=1.0), workers=2)
    by_session: dict[str | None, list[float]] = {}
    for d in records.decisions:
        by_session.setdefault(d.session_id, []).append(d.time_s)
    assert any(later - sooner < 0.01 for times in by_session.values() for sooner, later in itertools.pairwise(times))


def test_traces_become_flows() -> None:
    recorded = RecordedTurn(0.0, "m", 200, 5, np.array([[1, 3]]), True, None, 4.0, None)
    sessions = [AgentSession("a", 64, 0, 0, 0, (recorded, recorded), ()), AgentSession("b", 64, 0, 0, 4, (recorded,), ())]
    _, records = played(claude_code_flows(sessions, [S, S + 1]), workers=1, engine={"block_size": 64})
    first, other, second = records.decisions
    assert [d.session_id for d in (first, other, second)] == ["a", "b", "a"]
    assert first.chain == second.chain != other.chain
    assert records.outcomes[second.request_id].cached_tokens == 192
    moon = [MooncakeRequest(1.0, 1100, 3, np.array([5, 6, 7])), MooncakeRequest(9.0, 1024, 3, np.array([5, 6]))]
    _, records = played(mooncake_flows(moon, S), workers=1, engine={"block_size": 512})
    assert [o.cached_tokens for o in records.outcomes.values()] == [0, 512]
    rag = [
        RagRequest(float(n), 0, 3, "s", np.array(ids), np.array([70, 80]), np.array([0, 1]))
        for n, ids in ((1, [8, 9]), (20, [9, 8]), (40, [8, 9]))
    ]
    _, records = played(ragpulse_flows(rag, S, "sim"), workers=1, engine={"block_size": 64})
    assert [o.cached_tokens for o in records.outcomes.values()] == [0, 0, 128]
    texts = [TextRequest(100.0 + n, "s", "one two three four " * 10, "fine") for n in (0, 5)]
    _, records = played(text_flows(texts, S, "sim"), workers=1, engine={"block_size": 32})
    assert [(d.prompt_tokens, d.time_s) for d in records.decisions] == [(80, S), (80, S + 5)]
    assert [o.cached_tokens for o in records.outcomes.values()] == [0, 64]


def test_a_request_without_tokens_is_refused_and_an_empty_text_is_a_space() -> None:
    with pytest.raises(ValueError, match="at least one token each way, not 0 and 8"):
        prompt(1, 0)
    (flow,) = text_flows([TextRequest(1.0, "s", "", "")], S, "sim")
    assert next(flow.turns).make(S).prompt_tokens == 1


def test_an_answer_that_comes_back_in_the_next_prompt_is_a_hit() -> None:
    tokens, answer = np.arange(40, dtype=np.uint32), np.arange(100, 130, dtype=np.uint32)
    first, second = (ask_of_tokens(t, answer, BLOCK, "sim") for t in (tokens, np.concatenate([tokens, answer, tokens])))
    _, records = played([one(S, first), one(S + 20, second)], workers=1)
    assert [o.cached_tokens for o in records.outcomes.values()] == [0, 64]


def test_a_witness_is_told_the_hits_that_outcomes_report() -> None:
    records, history = Records(), History(BLOCK)
    Fleet(FleetSpec(workers=2, engine=EngineSpec(capacity_blocks=300)), records, history).run(agents(sessions=20))
    for request_id, outcome in records.outcomes.items():
        truth = history.truth(request_id)
        assert truth.hit_tokens == outcome.cached_tokens
        assert sum(truth.tokens(BLOCK).values()) == truth.prompt_tokens == outcome.prompt_tokens


def test_a_witness_keeps_what_a_cache_held_at_any_time() -> None:
    history = History(BLOCK)
    Fleet(FleetSpec(workers=1), Records(), history).run([one(S, prompt(1, 64)), one(S + 9, prompt(2, 64))])
    cache = history.caches[WorkerId("sim", "w0", 0)]
    first = history.asked["v0"].chain
    assert cache.prefix(first, cache.end_of(S)) == 0
    assert cache.prefix(first, cache.end_of(S + 5)) == 4
