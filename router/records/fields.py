"""Decisions and outcomes as JSON, in the form of schemas/requests.py.

Written field by field instead of through the pydantic models: the values are our own, so validating them at each request would cost
200 us to learn nothing (30 us this way, at 64 workers). The tests validate what is written here against the models, and that no field is
forgotten.

Everything is bounded: so many candidates, shadows and attempts at most, texts cut. A worker's numbers are those that the decision was made
from (`Situation`, `Terms`), not what holds a moment later.
"""

from __future__ import annotations

import time
from typing import Any

import orjson

from router.exchange import Exchange
from router.index.prefix_index import TRUST_CODES
from router.policy.cost import most_cached_tokens
from router.pools import Decided
from router.prompts.prompt import Prompt
from router.records.candidates import Listed, listed
from schemas.requests import Attempt, pack_hashes

RECORDED_SHADOWS = 32
RECORDED_ATTEMPTS = 64
_TRUST = tuple(t.value for t in TRUST_CODES)


def decision_fields(
    exchange: Exchange, decided: Decided, prompt: Prompt, router: str, index_behind_s: float | None = None
) -> dict[str, Any]:
    """The fields of a Decision but for `attempts`. Reads the index as it is now: call it before the event loop goes on.
    index_behind_s: see `PrefixIndex.lag_s`."""
    pool, target, found = decided.pool, decided.target, listed(decided)
    slot = pool.slots_of(target.number)[0]
    wall_s = time.time()
    chain = prompt.recorded_chain
    known = prompt.chain is not None and prompt.reads_cache
    best = pool.targets[found.longest] if known and found.longest is not None else None
    runner_up = None if found.runner_up is None else pool.targets[found.runner_up]
    return {
        "version": 1,
        "request_id": exchange.request_id,
        "time_s": wall_s,
        **_what_came(exchange, pool.name, router),
        "template": exchange.template,
        "policy": pool.policy.name,
        "policy_version": pool.policy.version,
        "coefficients_version": decided.coefficients_version[:100],
        "token_source": prompt.source,
        "token_reason": None if prompt.reason is None else prompt.reason[:200],
        "prompt_tokens": prompt.tokens,
        "block_size": None if prompt.source == "text" else prompt.block_size,
        "lora": None if prompt.lora is None else prompt.lora[:1024],
        "key_id": pool.key_id,
        "chain": None if chain is None else pack_hashes(chain),
        **_NOT_DESCRIBED,
        "snippet": exchange.snippet,
        "worker": target.worker,
        "rank": target.rank,
        "candidates": _candidates(decided, found, known),
        "workers_considered": found.considered,
        "best_overlap_worker": best and best.worker,
        "best_overlap_rank": best and best.rank,
        "best_overlap_tokens": found.longest_tokens if known else None,
        "predicted_tokens": forecast(decided, prompt),
        "runner_up_worker": runner_up and runner_up.worker,
        "runner_up_rank": runner_up and runner_up.rank,
        "margin_s": found.margin_s,
        "shadows": _shadows(decided, prompt),
        "waited_s": exchange.waited_s,
        "index_lag_s": None if slot.newest_s is None else max(0.0, wall_s - slot.newest_s),
        "index_behind_s": index_behind_s,
        "decide_us": decided.decide_us,
        "tokenize_us": prompt.tokenize_us,
    }


_NOT_DESCRIBED = dict.fromkeys(("namespace", "content_from", "content", "chunks", "chunk_tokens", "shared_tokens"))
"""What records/content.py says of a prompt when it can."""


def forecast(decided: Decided, prompt: Prompt) -> int | None:
    """Cached tokens that the engine should report. None: the prefix is unknown, or there are several prompts and only one is forecast."""
    return decided.cached_tokens if prompt.forecasts else None


def decision_json(fields: dict[str, Any], attempts: list[Attempt]) -> bytes:
    told = [{"worker": a.worker, "rank": a.rank, "error": a.error, "after_s": a.after_s} for a in attempts[:RECORDED_ATTEMPTS]]
    return orjson.dumps({**fields, "attempts": told})


def outcome_json(exchange: Exchange, pool: str, router: str, now_s: float) -> bytes:
    """now_s: monotonic seconds at which the answer ended."""
    usage, failed = exchange.usage, len(exchange.attempts)
    return orjson.dumps(
        {
            "version": 1,
            "request_id": exchange.request_id,
            "time_s": time.time(),
            "worker": exchange.worker,
            "rank": exchange.rank,
            "status": exchange.status,
            "error": exchange.error,
            "ttft_s": exchange.ttft_s,
            "e2e_s": None if exchange.dispatched_s is None else now_s - exchange.dispatched_s,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "created_tokens": usage.created_tokens,
            "completion_tokens": usage.completion_tokens,
            "engine_queue_s": usage.engine_queue_s,
            "engine_ttft_s": usage.engine_ttft_s,
            "request_bytes": len(exchange.body),
            "response_bytes": exchange.response_bytes,
            "retries": failed if exchange.answering else max(0, failed - 1),
            **(_what_came(exchange, pool, router) if exchange.worker is None else _DECIDED),
        }
    )


def _what_came(exchange: Exchange, pool: str, router: str) -> dict[str, Any]:
    """What a decision says of its request, or the outcome of a request that no decision was made for."""
    return {
        "router": router,
        "pool": pool,
        "model": exchange.model,
        "path": exchange.path[:1024],
        "route": exchange.route,
        "tenant": exchange.tenant,
        "session_id": exchange.session_id,
        "stream": exchange.stream,
    }


_DECIDED = dict.fromkeys(("router", "pool", "model", "path", "route", "tenant", "session_id", "stream"))


def _candidates(decided: Decided, found: Listed, known: bool) -> list[dict[str, Any]]:
    """known: overlap was looked up."""
    pool, has_cost, out = decided.pool, decided.choice.score is not None, []
    for number, ints, floats in zip(found.numbers, found.ints, found.floats, strict=True):
        target, slot = pool.targets[number], pool.slots_of(number)[0]
        held, gpu, cpu, disk, expected, trust, in_flight, decoding, allowed, draining = ints
        queue_s, prefill_s, load_s, decode_s, cost_s = floats
        out.append(
            {
                "worker": target.worker,
                "rank": target.rank,
                "overlap_tokens": held if known else None,
                "overlap_gpu_tokens": gpu if known else None,
                "overlap_cpu_tokens": cpu if known else None,
                "overlap_disk_tokens": disk if known else None,
                "speculative_tokens": expected - held if known else None,
                "queue_s": queue_s,
                "prefill_s": prefill_s,
                "load_s": load_s,
                "decode_s": decode_s,
                "cost_s": cost_s if has_cost else None,
                "epoch": slot.epoch,
                "seq": slot.seq,
                "trust": _TRUST[trust],
                "in_flight": in_flight,
                "decoding": decoding,
                "draining": draining == 1,
                "allowed": allowed == 1,
            }
        )
    return out


def _shadows(decided: Decided, prompt: Prompt) -> list[dict[str, Any]]:
    """Of shadows that would have chosen somebody."""
    if not decided.shadows:
        return []
    now, cost_s, targets = decided.now, decided.terms.cost_s, decided.pool.targets
    known = prompt.forecasts
    most, chosen_s = most_cached_tokens(now.prompt_tokens, now.block_size), cost_s[decided.target.number]
    return [
        {
            "policy": pick.policy,
            "version": pick.version,
            "worker": targets[number].worker,
            "rank": targets[number].rank,
            "predicted_tokens": min(int(now.expected[number]), most) if known else None,
            "margin_s": float(cost_s[number] - chosen_s),
        }
        for pick in decided.shadows[:RECORDED_SHADOWS]
        if (number := pick.target_number) is not None
    ]
