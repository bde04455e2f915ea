"""Decisions and outcomes as JSON, in the form of schemas/requests.py.

Written field by field instead of through the pydantic models: the values are our own, so validating them at each request would cost
200 us to learn nothing (20 us this way). The tests validate what is written here against the models, and that no field is forgotten.
"""

from __future__ import annotations

import time
from typing import Any

import orjson

from router.exchange import Exchange
from router.index.prefix_index import TRUST_CODES
from router.pools import Decided
from router.prompts.prompt import Prompt
from schemas.requests import Attempt, pack_hashes

RECORDED_CANDIDATES = 8


def decision_fields(exchange: Exchange, decided: Decided, prompt: Prompt, router: str) -> dict[str, Any]:
    """The fields of a Decision but for `attempts`. Reads the index as it is now: call it before anything is applied or booked."""
    now, target = decided.now, decided.target
    slot = decided.pool.slots_of(target.number)[0]
    wall_s = time.time()
    best = int(now.held.argmax()) if prompt.chain is not None else None
    best_tokens = int(now.held[best]) if best is not None else None
    return {
        "version": 1,
        "request_id": exchange.request_id,
        "time_s": wall_s,
        "router": router,
        "pool": decided.pool.name,
        "model": exchange.model,
        "path": exchange.path[:1024],
        "route": exchange.route,
        "tenant": exchange.tenant,
        "session_id": exchange.session_id,
        "stream": exchange.stream,
        "policy": decided.pool.policy.name,
        "policy_version": decided.pool.policy.version,
        "token_source": prompt.source,
        "prompt_tokens": prompt.tokens,
        "block_size": prompt.block_size,
        "lora": None if prompt.lora is None else prompt.lora[:1024],
        "key_id": decided.pool.key_id,
        "chain": None if prompt.chain is None else pack_hashes(prompt.chain),
        "worker": target.worker,
        "rank": target.rank,
        "candidates": _candidates(decided),
        "workers_considered": int(now.allowed.sum()),
        "best_overlap_worker": decided.pool.targets[best].worker if best is not None and best_tokens else None,
        "best_overlap_tokens": best_tokens,
        "margin_s": decided.margin_s(),
        "index_lag_s": None if slot.newest_s is None else max(0.0, wall_s - slot.newest_s),
        "decide_us": decided.decide_us,
        "tokenize_us": prompt.tokenize_us,
    }


def decision_json(fields: dict[str, Any], attempts: list[Attempt]) -> bytes:
    return orjson.dumps(fields | {"attempts": [a.model_dump() for a in attempts]})


def outcome_json(exchange: Exchange, now_s: float) -> bytes:
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
        }
    )


def _candidates(decided: Decided) -> list[dict[str, Any]]:
    """The chosen worker and the best others."""
    pool, now = decided.pool, decided.now
    order = decided.ranking()[:RECORDED_CANDIDATES]
    has_cost = decided.choice.score is not None
    columns = (
        a[order].tolist()
        for a in (
            now.held,
            now.gpu,
            now.expected,
            now.trust,
            now.in_flight,
            *(getattr(decided.terms, n) for n in ("queue_s", "prefill_s", "decode_s", "cost_s")),
        )
    )
    out = []
    for i, held, gpu, expected, trust, in_flight, queue_s, prefill_s, decode_s, cost_s in zip(order.tolist(), *columns, strict=True):
        target, slot = pool.targets[i], pool.slots_of(i)[0]
        out.append(
            {
                "worker": target.worker,
                "rank": target.rank,
                "overlap_tokens": held,
                "overlap_gpu_tokens": gpu,
                "speculative_tokens": expected - held,
                "queue_s": queue_s,
                "prefill_s": prefill_s,
                "decode_s": decode_s,
                "cost_s": cost_s if has_cost else None,
                "epoch": slot.epoch,
                "seq": slot.seq,
                "trust": TRUST_CODES[trust].value,
                "in_flight": in_flight,
            }
        )
    return out
