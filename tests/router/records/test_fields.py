"""What is written of a request's decision, against the contract: every field, within bounds, with the numbers that it was decided by."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import orjson
import pytest

from router.exchange import Exchange
from router.policy.cost import Coefficients
from router.policy.rules import PolicyRules
from router.pools import Decided, Pools, TrustRules
from router.prompts.prompt import Prompt
from router.records.candidates import MOST
from router.records.fields import decision_fields, decision_json, outcome_json
from schemas.block_hash import HashKey
from schemas.fleet import Fleet, Pool, Worker
from schemas.kv_events import COMPLETE, EVENT, Kind, KvBatch, Tier, WorkerId
from schemas.requests import Attempt, Decision, Outcome, unpack_hashes

KEY = HashKey(1, 2)
BLOCK = 16


def pools_of(workers: int, **rules: Any) -> Pools:
    fleet = Fleet(pools=(Pool(name="p"),), workers=tuple(Worker(pool="p", name=f"w{i}", url=f"http://w{i}:1") for i in range(workers)))
    made = Pools(fleet, {}, "cost", Coefficients(), KEY, TrustRules(1e12, 1e12), random.Random(1), policy_rules=PolicyRules(**rules))
    made.by_name["p"].learn_block_size(BLOCK)
    return made


def prompt_of(pools: Pools, tokens: int, **more: Any) -> Prompt:
    ids = np.arange(tokens, dtype=np.uint32)
    return Prompt("exact", tokens, tokens, pools.by_name["p"].chain(ids, None, None), BLOCK, **more)


def hold(pools: Pools, worker: str, chain: Any, tier: Tier = Tier.GPU, seq: int = 0) -> None:
    rows = [(Kind.STORED, tier, 0, len(chain), seq, 1.0, 0, BLOCK, 0)]
    if not seq:
        rows.insert(0, (Kind.EPOCH_STARTED, Tier.GPU, 0, 0, seq, 1.0, 0, 0, COMPLETE))
    pools.index.apply(KvBatch(WorkerId("p", worker, 0), 1, seq, seq, 1.0, 1.0, np.array(rows, EVENT), np.array(chain, np.uint64)), 0.0)


def exchange(**more: Any) -> Exchange:
    nobody: Any = None  # the client: records ask nothing of it
    return Exchange("q", [], "/v1/completions", b"/v1/completions", "POST", b"", b"{}", nobody, "m", True, **more)


def decide(pools: Pools, prompt: Prompt, excluded: tuple[int, ...] = ()) -> Decided:
    found = pools.decide(pools.by_name["p"], prompt, set(excluded), 0.0)
    assert found is not None
    return found


def recorded(pools: Pools, prompt: Prompt, attempts: tuple[Attempt, ...] = (), excluded: tuple[int, ...] = (), **more: Any) -> Decision:
    fields = decision_fields(exchange(**more), decide(pools, prompt, excluded), prompt, "r")
    record = decision_json(fields, list(attempts))
    assert set(orjson.loads(record)) == set(Decision.model_fields)
    return Decision.model_validate_json(record)


def test_the_record_says_who_held_what_in_which_tier_and_who_would_have_been_next() -> None:
    pools = pools_of(3)
    prompt = prompt_of(pools, 100)
    assert prompt.chain is not None
    hold(pools, "w1", prompt.chain[:4])
    hold(pools, "w1", prompt.chain[4:5], Tier.CPU, seq=1)
    hold(pools, "w2", prompt.chain[:2])
    d = recorded(pools, prompt, waited_s=0.25)
    w1, w2, w0 = d.candidates
    assert (d.worker, w1.worker, w2.worker, w0.worker) == ("w1", "w1", "w2", "w0")
    assert (w1.overlap_tokens, w1.overlap_gpu_tokens, w1.overlap_cpu_tokens, w1.overlap_disk_tokens) == (80, 64, 16, 0)
    assert w1.load_s is not None
    assert w1.load_s > 0
    assert (w1.epoch, w1.seq, w1.trust, w0.trust) == (1, 1, "exact", "blind")
    assert (d.predicted_tokens, d.best_overlap_worker, d.best_overlap_tokens) == (80, "w1", 80)
    assert (d.runner_up_worker, d.workers_considered, d.waited_s) == ("w2", 3, 0.25)
    assert w2.cost_s is not None
    assert w1.cost_s is not None
    assert d.margin_s == pytest.approx(w2.cost_s - w1.cost_s)
    assert d.coefficients_version
    assert d.chain is not None
    assert unpack_hashes(d.chain).tolist() == prompt.chain.tolist()


def test_the_longest_prefix_is_told_also_of_a_worker_that_could_not_be_chosen() -> None:
    pools = pools_of(3)
    prompt = prompt_of(pools, 100)
    assert prompt.chain is not None
    hold(pools, "w2", prompt.chain)
    d = recorded(pools, prompt, excluded=(2,))
    assert d.worker != "w2"
    assert (d.best_overlap_worker, d.best_overlap_tokens, d.predicted_tokens) == ("w2", 96, 0)
    assert {c.worker: c.allowed for c in d.candidates} == {"w0": True, "w1": True, "w2": False}


def test_shadows_say_where_and_with_what_forecast_they_would_have_sent_it() -> None:
    pools = pools_of(4, shadows=("round_robin", "max_prefix", "cost"))
    prompt = prompt_of(pools, 100)
    assert prompt.chain is not None
    hold(pools, "w3", prompt.chain)
    d = recorded(pools, prompt)
    by_policy = {s.policy: s for s in d.shadows}
    assert set(by_policy) == {"round_robin", "max_prefix", "cost"}
    assert by_policy["max_prefix"].worker == by_policy["cost"].worker == "w3"
    assert (by_policy["max_prefix"].predicted_tokens, by_policy["max_prefix"].margin_s) == (96, 0.0)
    blind = by_policy["round_robin"]
    assert blind.worker != "w3"
    assert blind.predicted_tokens == 0
    assert blind.margin_s is not None
    assert blind.margin_s > 0


@pytest.mark.parametrize(
    ("prompt", "source", "reason"),
    [
        (Prompt.unknown(400, "too_long"), "none", "too_long"),
        (Prompt.unknown(400, reason="x" * 999), "none", "x" * 200),
        (Prompt("text", None, 100, np.arange(6, dtype=np.uint64), BLOCK, reason="no tokenizer"), "text", "no tokenizer"),
    ],
)
def test_why_a_prompt_is_not_known_exactly_is_told_and_its_names_never_are(prompt: Prompt, source: str, reason: str) -> None:
    d = recorded(pools_of(2), prompt)
    assert (d.token_source, d.token_reason, d.chain, d.prompt_tokens, d.predicted_tokens) == (source, reason, None, None, None)


@pytest.mark.parametrize("unknown", ["no tokens", "no block size", "not read"])
def test_an_overlap_that_was_not_looked_up_is_null_and_not_zero(unknown: str) -> None:
    pools = pools_of(2)
    exact = prompt_of(pools, 100, reads_cache=unknown != "not read")
    assert exact.chain is not None
    hold(pools, "w1", exact.chain)
    prompts = {"no tokens": Prompt.unknown(400), "no block size": Prompt("exact", 100, 100, None, None), "not read": exact}
    d = recorded(pools, prompts[unknown])
    assert (d.best_overlap_worker, d.best_overlap_tokens) == (None, None)
    tokens = ("overlap_tokens", "overlap_gpu_tokens", "overlap_cpu_tokens", "overlap_disk_tokens", "speculative_tokens")
    assert {getattr(c, name) for c in d.candidates for name in tokens} == {None}
    assert d.predicted_tokens == (0 if unknown == "not read" else None)  # the engine will say that it found nothing


def test_of_several_prompts_in_one_request_nothing_is_forecast() -> None:
    pools = pools_of(2)
    assert recorded(pools, prompt_of(pools, 100, prompts=3)).predicted_tokens is None


def test_a_record_is_bounded_whatever_the_fleet_and_the_client() -> None:
    pools = pools_of(300)
    prompt = prompt_of(pools, 100, lora="l" * 5000)
    attempts = tuple(Attempt(worker="w", error="e" * 1000, after_s=0.1) for _ in range(100))
    d = recorded(pools, prompt, attempts)
    assert (len(d.candidates), d.workers_considered, len(d.attempts), len(d.lora or "")) == (MOST, 300, 64, 1024)


def test_an_outcome_says_what_a_decision_would_have_said_only_where_there_is_none() -> None:
    refused = Outcome.model_validate_json(outcome_json(exchange(tenant="t", status=429, error="queue full"), "p", "r", 1.0))
    assert (refused.worker, refused.router, refused.pool, refused.model, refused.tenant, refused.stream) == (None, "r", "p", "m", "t", True)
    answered = Outcome.model_validate_json(outcome_json(exchange(tenant="t", status=200, worker="w0"), "p", "r", 1.0))
    assert (answered.worker, answered.router, answered.pool, answered.tenant) == ("w0", None, None, None)
    assert set(orjson.loads(outcome_json(exchange(), "p", "r", 1.0))) == set(Outcome.model_fields)
