"""Rows of `requests`, `candidates`, `shadows` and `attempts` from decisions and outcomes, in the contract's column order."""

from __future__ import annotations

from collector.attribution.told import NOT_ATTRIBUTED
from collector.join import Request, predicted_tokens, went_to
from collector.store.columns import micros
from schemas.requests import Decision


def request_row(r: Request, closed: bool) -> tuple[object, ...]:
    """The row as known now. closed: the other half, where missing, did not come in time."""
    d, o, chosen = r.decision, r.outcome, r.chosen
    who = d or o  # an outcome says itself what it was where there is no decision
    pool, worker = r.worker
    blocks, head, tail = r.chain_ends or (None, None, None)
    started_s = r.started_s
    return (
        r.request_id,
        who and who.session_id,
        None if started_s is None else micros(started_s),
        o and micros(o.time_s),
        who and who.router,
        pool,
        worker,
        r.rank,
        who and who.model,
        who and who.path,
        who and who.route,
        who and who.tenant,
        d and d.template,
        who and who.stream,
        d and d.policy,
        d and d.policy_version,
        d and d.coefficients_version,
        d and d.token_source,
        d and d.token_reason,
        r.prompt_tokens,
        o and o.cached_tokens,
        r.event_hit_tokens,
        r.predicted_tokens,
        d and d.best_overlap_tokens,
        d and d.best_overlap_worker,
        d and d.best_overlap_rank,
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
        chosen and chosen.load_s,
        chosen and chosen.decode_s,
        chosen and chosen.cost_s,
        d and d.runner_up_worker,
        d and d.runner_up_rank,
        d and d.margin_s,
        d and d.waited_s,
        d and d.index_lag_s,
        d and d.index_behind_s,
        chosen and chosen.epoch,
        chosen and chosen.seq,
        chosen and str(chosen.trust),
        d and d.workers_considered,
        o and o.status,
        o and o.error,
        None if o is None or o.retries is None else min(o.retries, 255),
        d and d.decide_us,
        d and d.tokenize_us,
        o and o.request_bytes,
        o and o.response_bytes,
        closed and d is None and not r.undecided,
        closed and o is None,
        *(NOT_ATTRIBUTED if r.loss is None else r.loss.columns()),
    )


def candidate_rows(d: Decision) -> list[tuple[object, ...]]:
    return [
        (
            d.request_id, micros(d.time_s), i, went_to(d, c.worker, c.rank), d.pool, c.worker, c.rank,
            c.overlap_tokens, c.overlap_gpu_tokens, c.overlap_cpu_tokens, c.overlap_disk_tokens, c.speculative_tokens,
            c.queue_s, c.prefill_s, c.load_s, c.decode_s, c.cost_s, d.coefficients_version, c.epoch, c.seq,
            str(c.trust), c.in_flight, c.decoding, c.draining, c.allowed,
        )
        for i, c in enumerate(d.candidates)
    ]  # fmt: skip


def shadow_rows(d: Decision) -> list[tuple[object, ...]]:
    return [
        (
            d.request_id, micros(d.time_s), s.policy, s.version, d.policy, d.pool, s.worker, s.rank, went_to(d, s.worker, s.rank),
            s.predicted_tokens, None if s.predicted_tokens is None else predicted_tokens(d), s.margin_s,
        )
        for s in d.shadows
    ]  # fmt: skip


def attempt_rows(d: Decision, known: int) -> list[tuple[object, ...]]:
    """Rows of the attempts that an earlier decision of the request has not told of; it told of so many: `known`."""
    return [
        (d.request_id, micros(d.time_s), i, d.pool, a.worker, a.rank, a.error, a.after_s) for i, a in enumerate(d.attempts) if i >= known
    ]
