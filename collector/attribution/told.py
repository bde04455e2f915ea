"""One request that has ended becomes `Attributed`: its hit, the cause of each token that was no hit, the ladder, regret and seconds.

What the engine reported is the hit; what events tell explains the rest. Where they differ, and where they cannot tell, the tokens are
unexplained and the reason is named: it is never folded into another cause. A request whose hit nobody knows has no hit at all (NULL).

    row of `requests` (LOSS_COLUMNS) <--- Loss ---> loss_10s, ladder_10s
                                            +-----> Attributed, for the analyses

Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from collector.analytics.attributed import F32, F64, U8, U32, Attributed
from collector.attribution.causes import IS_RESIDENT, NO_SPANS, WAS_CLEARED, WAS_EVICTED, Causes, Facts, causes_of
from collector.attribution.dispatch import Dispatched
from collector.attribution.history import decode_prior
from collector.attribution.moments import NO_RANK, TOLD, TOO_FAR, UNTRUSTED, Look
from collector.attribution.rivals import Rival
from collector.attribution.times import Uses
from collector.join import Request
from collector.losses import Ladder
from collector.residency import Residency
from schemas.block_hash import U64
from schemas.causes import AVOIDABLE, LOSSES, Cause
from schemas.tables.losses import LOSS_COLUMNS
from schemas.workers import Trust

NOT_REPORTED, ENGINE_LESS, PREEMPTED, NOT_HIT, NO_NAMES = "not_reported", "engine_reports_less", "preempted", "held_not_hit", "no_names"
NO_EVENTS, SILENT, HASH_KEYS, CLOSED_EARLY, NO_DECISION = "no_events", "bridge_silent", "hash_keys", "closed_early", "decision_missing"
FORGOTTEN = "history_forgotten"
REASONS = {TOO_FAR: "ring", UNTRUSTED: "gap", NO_RANK: "rank_unknown"}
_IS_AVOIDABLE = np.array([c in AVOIDABLE for c in Cause])
_NO_CHAIN = np.empty(0, np.uint64)


class Costs(Protocol):
    """See `CostModel`."""

    def run_seconds(self, pool: str, worker: str, model: str, run_causes: U8, run_tokens: U32) -> F64: ...


class NoCosts:
    """Nothing is known of what a prefill costs."""

    def run_seconds(self, pool: str, worker: str, model: str, run_causes: U8, run_tokens: U32) -> F64:
        return np.where(run_causes == Cause.HIT, 0.0, np.nan)


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """What attribution says of one request."""

    hit_tokens: int | None
    causes: Causes
    run_seconds: F64
    prefill_s: float
    gone_s: F32
    idle_s: F32
    chain: U64
    trust: str | None
    reason: str | None
    ideal_tokens: int | None = None
    held_tokens: int | None = None
    held_worker: str | None = None
    selected_tokens: int | None = None
    diverged_at: int | None = None
    regret_tokens: int | None = None
    regret_s: float | None = None
    ladder: Ladder | None = None

    def columns(self) -> tuple[object, ...]:
        """Values of LOSS_COLUMNS."""
        tokens = self.causes.tokens().tolist()
        runs = list(zip(self.causes.run_causes.tolist(), self.causes.run_tokens.tolist(), strict=True))
        first = next(((i, c) for i, (c, _) in enumerate(runs) if c != Cause.HIT), None)
        lost_s = float(self.run_seconds.sum())
        avoidable_s = float(self.run_seconds[_IS_AVOIDABLE[self.causes.run_causes]].sum())
        return (
            self.hit_tokens,
            *(tokens[c] for c in LOSSES),
            self.ideal_tokens,
            self.held_tokens,
            self.held_worker,
            self.selected_tokens,
            None if first is None else sum(n for _, n in runs[: first[0]]),
            None if first is None else Cause(first[1]).label,
            [{"cause": Cause(c).label, "tokens": n} for c, n in runs],
            self.diverged_at,
            self.regret_tokens,
            self.regret_s,
            None if math.isnan(lost_s) else lost_s,
            None if self.hit_tokens is None or math.isnan(avoidable_s) else avoidable_s,
            self.trust,
            self.reason,
        )


NOT_ATTRIBUTED: tuple[object, ...] = (None,) * len(LOSS_COLUMNS)


def attributable(r: Request) -> bool:
    """It had a prefill, as far as is known, and the length of its prompt is known."""
    o = r.outcome
    return o is not None and r.prompt_tokens is not None and has_prefilled(r)


def has_prefilled(r: Request) -> bool:
    """It ended well, or failed after its first byte."""
    o = r.outcome
    if o is None or (o.status is not None and o.status >= 400):
        return False
    return o.ttft_s is not None or (o.error is None and o.status is not None)


def tell_untold(r: Request, reason: str, costs: Costs, trust: str | None = None) -> Loss:
    """Of a request that events do not tell."""
    o, d = r.outcome, r.decision
    assert o is not None and r.prompt_tokens is not None
    prompt, size = r.prompt_tokens, 0 if d is None else d.block_size or 0
    hit = None if o.cached_tokens is None else min(o.cached_tokens, prompt)
    if hit is None and r.running is not None and prompt < size:
        hit = 0  # there is no whole block that could be found
    chain = _NO_CHAIN if r.running is None else r.running.chain
    causes = causes_of(Facts(prompt, 0 if hit is None else size, len(chain), hit or 0))
    chain = chain[: len(causes.blocks)]
    unexplained = Cause.UNEXPLAINED in causes.run_causes
    nothing = np.full(len(chain), np.nan, np.float32)
    return Loss(
        hit, causes, _seconds(r, hit, causes, costs), _prefill_s(r), nothing, nothing, chain, trust,
        (NOT_REPORTED if hit is None else reason) if unexplained else None,
    )  # fmt: skip


def tell_untold_look(r: Request, look: Look, costs: Costs) -> Loss:
    return tell_untold(r, REASONS[look.code], costs, str(Trust.DEGRADED) if look.code == UNTRUSTED else None)


def tell_told(r: Request, look: Look, has_clock: bool, state: Residency, uses: Uses, costs: Costs, preempted: bool) -> Loss:
    """Of a request that events tell. has_clock: its decision names the clock of the index; preempted: its worker preempted somebody while
    it ran."""
    o, d, running = r.outcome, r.decision, r.running
    assert o is not None and d is not None and running is not None and r.prompt_tokens is not None
    assert look.code == TOLD and look.hit.blocks is not None and look.hit.worker is not None and d.block_size is not None
    prompt, size, number = r.prompt_tokens, d.block_size, look.hit.worker
    at = (r.dispatch and r.dispatch.result) or Dispatched()
    most = running.hit_blocks_max
    blocks = min(len(running.chain), prompt // size)
    chain = running.chain[:blocks]
    told_tokens = look.hit.blocks * size
    hit = min(told_tokens if o.cached_tokens is None else o.cached_tokens, prompt)
    fates, gone_s, new = _history(state, number, chain, look)

    rivals = [x for x in at.rivals if x.blocks * size > hit]
    for other, held in at.held.items():
        if other != number and held * size > hit:  # another rank of the same worker: the router has no cost of it
            rivals.append(Rival(d.worker, None, held, True, None))
    flights = [
        (s.start, s.end)
        for s in at.spans
        if not s.flight.failed and s.flight.prefilled_s > d.time_s and (number not in s.flight.numbers or s.flight.ended_s > look.moment_s)
    ]
    facts = Facts(
        prompt, size, blocks, hit, look.hit.blocks, at.ideal, -1 if look.selected is None else look.selected,
        max((x.blocks for x in rivals if x.cheaper), default=0), max((x.blocks for x in rivals), default=0),
        np.array(flights, np.int64) if flights else NO_SPANS, fates, new, at.content, at.shared_tokens,
    )  # fmt: skip
    causes = causes_of(facts)
    tokens = causes.tokens()

    gone_s[: hit // size] = np.nan
    idle_s = np.full(blocks, np.nan)
    evicted = np.flatnonzero((fates == WAS_EVICTED) & ~np.isnan(gone_s))
    if len(evicted):
        used_s = uses.last_s(d.pool, d.worker if o.worker is None else o.worker, r.rank, chain[evicted])
        since_s = look.moment_s - gone_s[evicted] - used_s
        idle_s[evicted] = np.where(since_s >= 0, since_s, np.nan)  # below: another request's copy was used since
    own = at.held.get(number)
    best = None if own is None else max([*at.held.values(), *(x.blocks for x in at.rivals)])
    selected = look.selected if has_clock else own
    regret_tokens = int(tokens[Cause.MISROUTED] + tokens[Cause.LOAD_BYPASS])
    gains = [x.gain_s for x in rivals if x.gain_s is not None]
    ladder = None
    if at.ideal >= 0 and best is not None and selected is not None:
        ladder = Ladder(
            prompt, min(at.ideal, most) * size, min(best, most) * size, min(selected, most) * size, hit, regret_tokens,
            max(gains, default=None),
        )  # fmt: skip
    return Loss(
        hit, causes, _seconds(r, hit, causes, costs), look.moment_s,
        gone_s.astype(np.float32), idle_s.astype(np.float32), chain,
        str(Trust.EXACT), _reason(r, facts, causes, preempted),
        None if at.ideal < 0 else min(at.ideal, most) * size,
        None if best is None else min(best, most) * size,
        _holder(r, at, best),
        None if selected is None else min(selected, most) * size,
        at.shared_tokens if tokens[Cause.DIVERGED] + (tokens[Cause.TOO_SHORT] if blocks else 0) else None,
        regret_tokens, max(gains, default=None), ladder,
    )  # fmt: skip


def _history(state: Residency, number: int, chain: U64, look: Look) -> tuple[U8, F64, npt.NDArray[np.bool_]]:
    """By block: what became of it here as of the moment, for how long it had been gone (s, NaN: not known), and whether it was new."""
    n = len(chain)
    fates, gone_f32, new = decode_prior(look.prior[:n])
    stored_s = look.stored_s[:n]
    gone_s = gone_f32.astype(np.float64) - (stored_s - look.moment_s)
    resident = look.resident[:n] == 1
    silent = np.flatnonzero(np.isnan(stored_s) & ~resident)  # not stored again: what is known of it now
    if len(silent):
        fates[silent], gone_s[silent] = state.fates(number, chain[silent], look.moment_s)
        new[silent] = ~state.evers(chain[silent])
    fates[resident] = IS_RESIDENT
    new[resident] = False
    gone_s[((fates != WAS_EVICTED) & (fates != WAS_CLEARED)) | ~np.isfinite(gone_s)] = np.nan
    return fates, np.maximum(gone_s, 0.0), new


def _holder(r: Request, at: Dispatched, best: int | None) -> str | None:
    if not best:
        return None
    if best == max(at.held.values(), default=-1):
        return r.worker[1]
    return next(x.worker for x in at.rivals if x.blocks == best)


def _reason(r: Request, f: Facts, causes: Causes, preempted: bool) -> str | None:
    if Cause.UNEXPLAINED not in causes.run_causes:
        return None
    if f.hit_tokens < f.event_blocks * f.block_size:
        return PREEMPTED if preempted else ENGINE_LESS
    if f.blocks < f.prompt_tokens // f.block_size:
        return NO_NAMES
    unexplained = np.flatnonzero(causes.blocks == Cause.UNEXPLAINED)
    return NOT_HIT if len(unexplained) and f.fates[unexplained[0]] == IS_RESIDENT else FORGOTTEN


def _prefill_s(r: Request) -> float:
    """First byte, else end (unix seconds)."""
    assert r.outcome is not None
    started_s, ttft_s = r.started_s, r.outcome.ttft_s
    return r.outcome.time_s if started_s is None or ttft_s is None else started_s + ttft_s


def _seconds(r: Request, hit: int | None, causes: Causes, costs: Costs) -> F64:
    """NaN of all, too, when it is not known what was computed."""
    if hit is None:
        return np.full(len(causes.run_causes), np.nan)
    pool, worker = r.worker
    who = r.decision or r.outcome
    return costs.run_seconds(pool or "", worker or "", (who and who.model) or "", causes.run_causes, causes.run_tokens)


def attributed(r: Request, loss: Loss) -> Attributed | None:
    """For the analyses; None: without a decision nothing is known of what was asked."""
    d, o = r.decision, r.outcome
    if d is None or o is None or r.prompt_tokens is None:
        return None
    pool, worker = r.worker
    return Attributed(
        request_id=r.request_id, started_s=d.time_s, prefill_s=loss.prefill_s, ended_s=o.time_s, pool=pool or "", worker=worker or "",
        rank=r.rank, model=d.model, route=d.route, tenant=d.tenant, template=d.template, session_id=d.session_id, policy=d.policy,
        block_size=0 if not len(loss.chain) else d.block_size or 0, prompt_tokens=r.prompt_tokens, completion_tokens=o.completion_tokens,
        hit_tokens=loss.hit_tokens, chain=loss.chain, causes=loss.causes.blocks, gone_s=loss.gone_s, idle_s=loss.idle_s,
        run_causes=loss.causes.run_causes, run_tokens=loss.causes.run_tokens, run_seconds=loss.run_seconds, diverged_at=loss.diverged_at,
        ttft_s=o.ttft_s, engine_queue_s=o.engine_queue_s, engine_ttft_s=o.engine_ttft_s, snippet=d.snippet,
    )  # fmt: skip
