"""Rows of `requests` and `candidates` from decisions and outcomes, in the contract's column order."""

from __future__ import annotations

from collector.join import Request
from collector.store.columns import micros
from schemas.requests import Decision


def request_row(r: Request, closed: bool) -> tuple[object, ...]:
    """The row as known now. closed: the other half, where missing, did not come in time."""
    d, o = r.decision, r.outcome
    pool, worker = r.worker
    chosen = None if d is None else next((c for c in d.candidates if c.worker == d.worker and (d.rank is None or c.rank == d.rank)), None)
    blocks, head, tail = r.chain_ends or (None, None, None)
    started_s = r.started_s
    return (
        r.request_id,
        d and d.session_id,
        None if started_s is None else micros(started_s),
        o and micros(o.time_s),
        d and d.router,
        pool,
        worker,
        r.rank,
        d and d.model,
        d and d.path,
        d and d.route,
        d and d.tenant,
        d and d.stream,
        d and d.policy,
        d and d.policy_version,
        d and d.token_source,
        r.prompt_tokens,
        o and o.cached_tokens,
        r.event_hit_tokens,
        chosen and chosen.overlap_tokens + chosen.speculative_tokens,
        d and d.best_overlap_tokens,
        d and d.best_overlap_worker,
        o and o.created_tokens,
        o and o.completion_tokens,
        d and d.block_size,
        blocks,
        head,
        tail,
        o and o.ttft_s,
        o and o.e2e_s,
        o and o.engine_queue_s,
        o and o.engine_ttft_s,
        chosen and chosen.queue_s,
        chosen and chosen.prefill_s,
        chosen and chosen.cost_s,
        d and d.margin_s,
        d and d.index_lag_s,
        chosen and chosen.epoch,
        chosen and chosen.seq,
        chosen and str(chosen.trust),
        d and d.workers_considered,
        o and o.status,
        o and o.error,
        None if o is None else min(o.retries, 255),
        d and d.decide_us,
        d and d.tokenize_us,
        o and o.request_bytes,
        o and o.response_bytes,
        closed and d is None,
        closed and o is None,
    )


def candidate_rows(d: Decision) -> list[tuple[object, ...]]:
    return [
        (
            d.request_id, micros(d.time_s), i, c.worker == d.worker and (d.rank is None or c.rank == d.rank), d.pool, c.worker, c.rank,
            c.overlap_tokens, c.overlap_gpu_tokens, c.speculative_tokens, c.queue_s, c.prefill_s, c.decode_s, c.cost_s, c.epoch, c.seq,
            str(c.trust), c.in_flight,
        )
        for i, c in enumerate(d.candidates)
    ]  # fmt: skip
