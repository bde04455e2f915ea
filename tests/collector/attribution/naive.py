"""The plain twin of attribution: with full knowledge of all records, and of each request's own first store. Dictionaries, no cleverness."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from schemas.causes import Cause
from schemas.kv_events import Kind, KvBatch, WorkerId
from tests.collector.attribution.fleets import Asked, B, Fleet


@dataclass
class State:
    """One worker after some of its events."""

    held: Counter[int]
    fate: dict[int, Cause]
    exact: bool

    def copy(self) -> State:
        return State(self.held.copy(), dict(self.fate), self.exact)

    def prefix(self, chain: list[int]) -> int:
        return next((i for i, h in enumerate(chain) if self.held[h] <= 0), len(chain))

    def apply(self, kind: int, hashes: list[int]) -> None:
        if kind == Kind.STORED:
            self.held.update(hashes)
        elif kind == Kind.REMOVED:
            for h in hashes:
                self.held[h] -= 1
                if self.held[h] == 0:
                    self.fate[h] = Cause.EVICTED
        elif kind in (Kind.CLEARED, Kind.EPOCH_STARTED):
            for h, n in self.held.items():
                if n > 0:
                    self.fate[h] = Cause.CLEARED
            self.held = Counter()
            self.exact = True
        elif kind == Kind.GAP:
            self.exact = False


def state_of(
    batches: list[KvBatch], *, until_s: float = float("inf"), clock: tuple[int, int] | None = None, own: tuple[int, int] | None = None
) -> State:
    """After the events up to a time; or those that a clock has applied; or those before an own store (batch, event)."""
    state = State(Counter(), {}, False)
    for n, b in enumerate(batches):
        if clock is not None and (b.epoch, b.last_seq) > clock:
            break
        for k, (e, hashes) in enumerate(b):
            if own == (n, k):
                return state
            if float(e["time_s"]) > until_s:
                return state
            state.apply(int(e["kind"]), hashes.tolist())
    return state


def runs_of(tokens: list[Cause]) -> list[tuple[Cause, int]]:
    out: list[tuple[Cause, int]] = []
    for cause in tokens:
        if out and out[-1][0] == cause:
            out[-1] = cause, out[-1][1] + 1
        else:
            out.append((cause, 1))
    return out


class Twin:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.batches: dict[WorkerId, list[KvBatch]] = {c.who: c.batches for c in fleet.caches}

    def ideal(self, asked: Asked) -> int:
        ever = {
            int(h)
            for batches in self.batches.values()
            for b in batches
            for e, hashes in b
            if e["kind"] == Kind.STORED and e["time_s"] <= asked.decision.time_s
            for h in hashes
        }
        return next((i for i, h in enumerate(asked.chain) if h not in ever), len(asked.chain))

    def held(self, asked: Asked) -> dict[WorkerId, int]:
        return {who: state_of(b, until_s=asked.decision.time_s).prefix(asked.chain) for who, b in self.batches.items()}

    def in_flight(self, asked: Asked, i: int, held: dict[WorkerId, int], moment_s: float) -> bool:
        d = asked.decision
        for q in self.fleet.asked:
            if q is asked or q.outcome is None or (q.decision.time_s, q.decision.request_id) >= (d.time_s, d.request_id):
                continue
            if q.outcome.time_s <= d.time_s or i >= len(q.chain) or q.chain[i] != asked.chain[i]:
                continue
            if q.own is not None and self.stored_s(q) <= d.time_s:  # its cache lost it since
                continue
            where = WorkerId("p", q.decision.worker, 0)
            if held[where] <= i and (q.decision.worker != d.worker or q.outcome.time_s > moment_s):
                return True
        return False

    def stored_s(self, q: Asked) -> float:
        assert q.own is not None
        who, batch_number, event_number = q.own
        return float(self.batches[who][batch_number].events["time_s"][event_number])

    def known(self, asked: Asked, i: int) -> Cause:
        spaces = {
            q.content.namespace
            for q in self.fleet.asked
            if q.decision.time_s < asked.decision.time_s and asked.content.fingerprints[i] in q.content.fingerprints
        }
        if asked.content.namespace in spaces:
            return Cause.DIVERGED
        return Cause.NAMESPACE if spaces else Cause.FIRST_SEEN

    def cheaper(self, asked: Asked, other: str) -> bool:
        by_name = {c.worker: c for c in asked.decision.candidates}
        if other not in by_name:
            return True
        mine, theirs = by_name[asked.decision.worker], by_name[other]
        if theirs.allowed is False:
            return False
        if mine.cost_s is not None and theirs.cost_s is not None:
            return theirs.cost_s < mine.cost_s
        assert mine.queue_s is not None and mine.prefill_s is not None and theirs.queue_s is not None and theirs.prefill_s is not None
        return 0.5 * theirs.queue_s + theirs.prefill_s < 0.5 * mine.queue_s + mine.prefill_s

    def tokens(self, asked: Asked) -> list[Cause] | None:
        """The cause of each token; None: nobody knows the hit."""
        d, o = asked.decision, asked.outcome
        assert o is not None
        assert d.prompt_tokens is not None
        who = WorkerId("p", d.worker, 0)
        if asked.own is not None:
            moment = state_of(self.batches[who], own=asked.own[1:])
            moment_s = self.stored_s(asked)
        else:
            moment_s = d.time_s + (o.ttft_s or 0.0)
            moment = state_of(self.batches[who], until_s=moment_s)
        most = (d.prompt_tokens - 1) // B
        event_hit = min(moment.prefix(asked.chain), most) if moment.exact else None
        if event_hit is None and o.cached_tokens is None:
            return None
        k = (event_hit or 0) * B if o.cached_tokens is None else o.cached_tokens
        n = len(asked.chain)
        out = [Cause.HIT] * k
        held, ideal = self.held(asked), self.ideal(asked)
        candidate = next(c for c in d.candidates if c.worker == d.worker)
        selected = 0
        if candidate.epoch is not None and candidate.seq is not None:
            at_clock = state_of(self.batches[who], clock=(candidate.epoch, candidate.seq))
            selected = at_clock.prefix(asked.chain) if at_clock.exact else 0
        before = Cause.UNEXPLAINED
        for i in range(k // B, n):
            h = asked.chain[i]
            others = [w for w in held if w != who and held[w] > i]
            if i == n - 1 and d.prompt_tokens % B == 0 and k == i * B:
                cause = Cause.GRANULARITY
            elif event_hit is None or i < event_hit:
                cause = Cause.UNEXPLAINED
            elif self.in_flight(asked, i, held, moment_s):
                cause = Cause.IN_FLIGHT
            elif i >= ideal:
                cause = self.known(asked, i)
                if i == 0 and d.shared_tokens is not None:
                    out += [Cause.TOO_SHORT] * d.shared_tokens
                    cause_tokens = B - d.shared_tokens
                    out += [cause] * cause_tokens
                    before = cause
                    continue
            elif moment.held[h] > 0:
                cause = before
            elif i < selected:
                cause = Cause.STALE_VIEW
            elif any(self.cheaper(asked, w.worker) for w in others):
                cause = Cause.MISROUTED
            elif others:
                cause = Cause.LOAD_BYPASS
            else:
                cause = moment.fate.get(h, Cause.EVICTED_ELSEWHERE)
            out += [cause] * B
            before = cause
        return out + [Cause.GRANULARITY] * (d.prompt_tokens - n * B)
