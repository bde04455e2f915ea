"""What one told request says: reasons, ladder, regret, lost blocks, seconds; and the rows that come of it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from collector.analytics.attributed import F64, U8, U32, Attributed
from collector.fold import Fold
from collector.losses import LIVE_COLUMNS
from collector.residency import Residency
from collector.rollups import Rollups
from schemas.causes import LOSSES, Cause
from schemas.kv_events import COMPLETE, ENGINE_RESTARTED, Kind, KvBatch, WorkerId, encode
from schemas.requests import Candidate, Decision, Outcome
from schemas.stream.base import StoredRecord
from schemas.tables.losses import LOSS_COLUMNS
from schemas.topics import DECISIONS, KV_EVENTS, OUTCOMES, WORKER_LOAD
from schemas.workers import Trust, WorkerLoad
from tests.collector.batches import Event, batch, event
from tests.collector.traffic import decision, load, outcome, pack_hashes_of

A, B = WorkerId("p", "w0", 0), WorkerId("p", "w1", 0)
AT = 1_790_000_000.0
SIZE = 16
NAMES = [name for name, _, _ in LOSS_COLUMNS]


class Linear:
    """A millisecond a token."""

    def run_seconds(self, pool: str, worker: str, model: str, run_causes: U8, run_tokens: U32) -> F64:
        return np.where(run_causes == Cause.HIT, 0.0, run_tokens / 1000)


class Told:
    """A fold that is fed by hand."""

    def __init__(self, costs: Any = None) -> None:
        self.fold = Fold(Residency(1 << 8, 1 << 10, 64, ghosts=1 << 12, seen=1 << 12, filtered=1 << 12), lateness_s=0.1, costs=costs)
        self._offset = 0
        self._seq: dict[WorkerId, int] = {}
        for who in (A, B):
            self.kv(who, AT, event(Kind.EPOCH_STARTED, flags=COMPLETE))

    def put(self, topic: str, value: bytes) -> None:
        self._offset += 1
        self.fold.take((topic, 0), topic, [StoredRecord(self._offset, 0, b"", value, ())], AT + 1000)

    def kv(self, who: WorkerId, time_s: float, *events: Event, epoch: int = 1) -> None:
        seq = self._seq[who] = self._seq.get(who, -1) + 1
        b: KvBatch = batch(who, epoch, seq, time_s, *events)
        self.put(KV_EVENTS, encode(b))

    def ask(self, d: Decision, o: Outcome) -> None:
        self.put(DECISIONS, d.model_dump_json().encode())
        self.put(OUTCOMES, o.model_dump_json().encode())

    def load(self, value: WorkerLoad) -> None:
        self.put(WORKER_LOAD, value.model_dump_json().encode())

    def end(self) -> dict[str, Attributed]:
        for who in (A, B):
            self.kv(who, AT + 100)
        self.fold.settle(AT + 200, AT + 200, AT + 200)
        return {a.request_id: a for a in self.fold.take_told()}

    def row(self, request_id: str) -> dict[str, Any]:
        rows = self.fold.outputs()["requests"].to_pylist()
        return next({k: r[k] for k in NAMES} for r in rows if r["request_id"] == request_id)


def asks(name: str, at_s: float, blocks: list[int], worker: str = "w0", tokens: int | None = None, **more: Any) -> Decision:
    prompt = len(blocks) * SIZE + 1 if tokens is None else tokens
    exact = {"chain": pack_hashes_of(blocks), "block_size": SIZE, "token_source": "exact", "prompt_tokens": prompt, "candidates": ()}
    return decision(name, at_s, worker, **(exact | more))


def ends(name: str, at_s: float, tokens: int, cached: int | None, worker: str = "w0", **more: Any) -> Outcome:
    return outcome(name, at_s, worker, prompt_tokens=tokens, cached_tokens=cached, **more)


def stored(hashes: list[int], parent: int = 999) -> Event:
    return event(Kind.STORED, hashes, parent=parent)


def runs(a: Attributed) -> list[tuple[Cause, int]]:
    return [(Cause(c), n) for c, n in zip(a.run_causes.tolist(), a.run_tokens.tolist(), strict=True)]


def test_a_row_has_every_column_and_its_tokens_add_up() -> None:
    t = Told(Linear())
    t.kv(A, AT + 1, stored([1, 2]))
    t.kv(A, AT + 2, event(Kind.REMOVED, [2]))
    t.kv(A, AT + 4, stored([2, 3], parent=1))
    clock = Candidate(worker="w0", rank=0, epoch=1, seq=2, trust=Trust.EXACT)
    t.ask(asks("q", AT + 3, [1, 2, 3], candidates=(clock,)), ends("q", AT + 5, 49, 16))
    t.end()
    row = t.row("q")
    assert row == dict.fromkeys((f"{c.label}_tokens" for c in LOSSES), 0) | {
        "hit_tokens": 16, "evicted_tokens": 16, "first_seen_tokens": 16, "granularity_tokens": 1, "ideal_tokens": 32, "held_tokens": 16,
        "held_worker": "w0", "selected_tokens": 16, "first_miss_token": 16, "first_miss_cause": "evicted",
        "causes": [{"cause": "hit", "tokens": 16}, {"cause": "evicted", "tokens": 16}, {"cause": "first_seen", "tokens": 16},
                   {"cause": "granularity", "tokens": 1}],
        "diverged_at_token": None, "regret_tokens": 0, "regret_s": None, "lost_s": pytest.approx(0.033),
        "avoidable_s": pytest.approx(0.016), "loss_trust": "exact", "unexplained_reason": None,
    }  # fmt: skip


def test_a_lost_block_says_for_how_long_and_how_long_it_had_been_idle() -> None:
    t = Told()
    t.kv(A, AT + 1, stored([1, 2]))
    t.ask(asks("old", AT + 0.5, [1, 2]), ends("old", AT + 3, 33, 0))
    t.kv(A, AT + 3)
    t.fold.settle(AT + 4, AT + 4, AT + 4)
    t.kv(A, AT + 10, event(Kind.REMOVED, [2]))
    t.kv(A, AT + 17, stored([2], parent=1))
    t.ask(asks("q", AT + 16, [1, 2]), ends("q", AT + 18, 33, 16))
    q = t.end()["q"]
    assert runs(q) == [(Cause.HIT, 16), (Cause.EVICTED, 16), (Cause.GRANULARITY, 1)]
    assert q.prefill_s == AT + 17
    assert float(q.gone_s[1]) == pytest.approx(7.0, abs=0.02)
    assert float(q.idle_s[1]) == pytest.approx(7.0, abs=0.02)
    assert np.isnan([q.gone_s[0], q.idle_s[0]]).all()


def test_misrouted_and_bypass_cost_and_bought_seconds() -> None:
    t = Told()
    t.kv(B, AT + 1, stored([1, 2]))
    costs = {"w0": 0.5, "w1": 0.2}
    for n, mine in enumerate(("w0", "w0")):
        listed = tuple(Candidate(worker=w, rank=0, cost_s=c, trust=Trust.EXACT) for w, c in costs.items())
        t.kv(A, AT + 10 * n + 3, stored([1, 2]), event(Kind.REMOVED, [1, 2]))
        t.ask(asks(f"q{n}", AT + 10 * n + 2, [1, 2], mine, candidates=listed), ends(f"q{n}", AT + 10 * n + 5, 33, 0, mine))
        costs = {"w0": 0.1, "w1": 0.2}
    told = t.end()
    assert [runs(told[q])[0] for q in ("q0", "q1")] == [(Cause.MISROUTED, 32), (Cause.LOAD_BYPASS, 32)]
    rows = [t.row("q0"), t.row("q1")]
    assert [(r["regret_tokens"], r["held_worker"], r["held_tokens"]) for r in rows] == [(32, "w1", 32)] * 2
    assert [r["regret_s"] for r in rows] == [pytest.approx(0.3), pytest.approx(-0.1)]
    ladder = t.fold.rollups.rows(int(AT // 10) * 10)["ladder_10s"].to_pylist()
    assert sum(x["misrouted_s"] for x in ladder) == pytest.approx(0.3)


def test_a_restart_is_a_clear_and_a_stale_view_is_the_routers() -> None:
    t = Told()
    t.kv(A, AT + 1, stored([1, 2]))
    t._seq[A] = -1
    t.kv(A, AT + 2, event(Kind.EPOCH_STARTED, flags=COMPLETE | ENGINE_RESTARTED), epoch=2)
    t.kv(A, AT + 4, stored([1, 2]), epoch=2)
    stale = Candidate(worker="w0", rank=0, epoch=1, seq=1, trust=Trust.EXACT)
    fresh = Candidate(worker="w0", rank=0, epoch=2, seq=0, trust=Trust.EXACT)
    t.ask(asks("q", AT + 3, [1, 2], candidates=(stale,)), ends("q", AT + 5, 33, 0))
    t._seq[A] = 1
    t.kv(A, AT + 6, event(Kind.CLEARED), epoch=2)
    t.kv(A, AT + 8, stored([1, 2]), epoch=2)
    t.ask(asks("r", AT + 7, [1, 2], candidates=(fresh,)), ends("r", AT + 9, 33, 0))
    for who, epoch in ((A, 2), (B, 1)):
        t.kv(who, AT + 100, epoch=epoch)
    t.fold.settle(AT + 200, AT + 200, AT + 200)
    told = {a.request_id: a for a in t.fold.take_told()}
    assert [runs(told[q])[0] for q in ("q", "r")] == [(Cause.STALE_VIEW, 32), (Cause.CLEARED, 32)]
    assert [t.row(q)["selected_tokens"] for q in ("q", "r")] == [32, 0]


@pytest.mark.parametrize(("grew", "reason"), [(True, "preempted"), (False, "engine_reports_less")])
def test_an_engine_that_reports_less_was_preempting_or_is_unexplained(grew: bool, reason: str) -> None:
    t = Told()
    t.kv(A, AT + 1, stored([1, 2]))
    t.load(load(A, AT + 2.5, preemptions=1.0))
    t.load(load(A, AT + 4, preemptions=2.0 if grew else 1.0))
    t.kv(A, AT + 4, stored([3], parent=2))
    t.ask(asks("q", AT + 3, [1, 2, 3]), ends("q", AT + 5, 49, 16))
    assert runs(t.end()["q"]) == [(Cause.HIT, 16), (Cause.UNEXPLAINED, 16), (Cause.FIRST_SEEN, 16), (Cause.GRANULARITY, 1)]
    assert t.row("q")["unexplained_reason"] == reason


@pytest.mark.parametrize(
    ("more", "cached", "want", "reason"),
    [
        ({"chain": None, "token_source": "text"}, 16, [(Cause.HIT, 16), (Cause.UNEXPLAINED, 16), (Cause.GRANULARITY, 1)], "no_names"),
        ({"chain": None, "token_source": "text"}, None, [(Cause.UNEXPLAINED, 33)], "not_reported"),
        ({"worker": "w9"}, 16, [(Cause.HIT, 16), (Cause.UNEXPLAINED, 16), (Cause.GRANULARITY, 1)], "no_events"),
        ({"worker": "w9"}, None, [(Cause.UNEXPLAINED, 33)], "not_reported"),
    ],
)
def test_what_events_cannot_tell_is_unexplained_with_its_reason(
    more: dict[str, Any], cached: int | None, want: list[tuple[Cause, int]], reason: str
) -> None:
    t = Told()
    worker = more.pop("worker", "w0")
    t.ask(asks("q", AT + 3, [1, 2], worker, **more), ends("q", AT + 5, 33, cached, worker))
    assert runs(t.end()["q"]) == want
    row = t.row("q")
    assert (row["unexplained_reason"], row["loss_trust"], row["regret_tokens"], row["ideal_tokens"]) == (reason, None, None, None)
    assert row["hit_tokens"] == cached


def test_after_a_gap_nothing_is_told_but_what_the_engine_reports() -> None:
    t = Told()
    t.kv(A, AT + 1, event(Kind.GAP, seq=1, parent=1))
    t.kv(A, AT + 4, stored([1, 2]))
    t.ask(asks("q", AT + 3, [1, 2]), ends("q", AT + 5, 33, 16))
    assert runs(t.end()["q"]) == [(Cause.HIT, 16), (Cause.UNEXPLAINED, 16), (Cause.GRANULARITY, 1)]
    row = t.row("q")
    assert (row["unexplained_reason"], row["loss_trust"]) == ("gap", "degraded")


def test_a_prompt_shorter_than_a_block_hits_nothing_though_nobody_reports_it() -> None:
    t = Told()
    t.ask(asks("q", AT + 3, [], tokens=9), ends("q", AT + 5, 9, None))
    q = t.end()["q"]
    assert (q.hit_tokens, runs(q)) == (0, [(Cause.TOO_SHORT, 9)])


@pytest.mark.parametrize(
    ("more", "attributed"),
    [
        ({"status": 503, "error": "full", "ttft_s": None}, False),
        ({"status": None, "error": "disconnect", "ttft_s": None}, False),
        ({"status": 200, "error": "disconnect", "ttft_s": 0.5}, True),
    ],
)
def test_only_what_had_a_prefill_is_attributed(more: dict[str, Any], attributed: bool) -> None:
    t = Told()
    t.kv(A, AT + 4, stored([1, 2]))
    t.ask(asks("q", AT + 3, [1, 2]), ends("q", AT + 5, 33, None, **more))
    told = t.end()
    row = t.row("q")
    assert (list(told) == ["q"]) == attributed
    assert (row["hit_tokens"], row["first_seen_tokens"]) == ((0, 32) if attributed else (None, None))
    assert attributed or set(row.values()) == {None}


def test_live_rows_of_losses_come_back_as_they_were() -> None:
    t = Told(Linear())
    t.kv(A, AT + 4, stored([1, 2]))
    t.ask(asks("q", AT + 3, [1, 2]), ends("q", AT + 5, 33, 0))
    t.ask(asks("r", AT + 3, [1], "w9"), ends("r", AT + 5, 17, 0, "w9"))
    t.end()
    bucket = int(AT // 10) * 10
    rows = t.fold.rollups.rows(bucket)
    fresh = Rollups()
    fresh.restore(rows)
    again = fresh.rows(bucket)
    for name in LIVE_COLUMNS:
        assert rows[name].num_rows > 0
        assert again[name].to_pylist() == rows[name].to_pylist()
    losses = {(r["worker"], r["cause"]): (r["tokens"], r["requests"], r["lost_s"]) for r in rows["loss_10s"].to_pylist()}
    assert losses == {
        ("w0", "first_seen"): (32, 1, pytest.approx(0.032)), ("w0", "granularity"): (1, 1, pytest.approx(0.001)),
        ("w9", "unexplained"): (16, 1, pytest.approx(0.016)), ("w9", "granularity"): (1, 1, pytest.approx(0.001)),
    }  # fmt: skip
    fresh.drop([bucket])
    assert fresh.rows(bucket)["loss_10s"].num_rows == 0


def test_whatever_routers_and_engines_say_all_tokens_of_a_request_are_told_once() -> None:
    rng = random.Random(11)
    t = Told(Linear())
    prompts: dict[str, int | None] = {}
    for n in range(400):
        at_s, name, worker = AT + 1 + n / 20, f"q{n}", rng.choice(["w0", "w1", "w9"])
        chain = [rng.randrange(1, 6) for _ in range(rng.randint(0, 8))]
        told = rng.choice([None, 0, 1, SIZE, len(chain) * SIZE, rng.randrange(200)])
        reported = rng.choice([None, told, rng.randrange(200)])
        cached = rng.choice([None, 0, SIZE, rng.randrange(300)])
        clock = rng.choice([(None, None), (1, rng.randrange(300)), (rng.randrange(1 << 62), 0)])
        candidate = Candidate(worker=worker, rank=0, epoch=clock[0], seq=clock[1], trust=Trust.EXACT)
        source = rng.choice(["exact", "exact", "engine", "text", "none"])
        size = rng.choice([None, 1, SIZE, SIZE, 4096])
        more: dict[str, Any] = {"candidates": rng.choice([(), (candidate,)]), "token_source": source, "block_size": size}
        d = asks(name, at_s, chain, worker, prompt_tokens=told, **more)
        failed = rng.random() < 0.1
        o = ends(name, at_s + rng.random() * 3, 0, cached, worker).model_copy(update={"prompt_tokens": reported})
        o = o.model_copy(update={"status": 500 if failed else 200, "ttft_s": rng.choice([None, 0.1])})
        prompts[name] = None if failed else told if reported is None else reported
        t.ask(d, o)
        kind = rng.choice([Kind.STORED, Kind.REMOVED])
        who = rng.choice([A, B])
        t.kv(who, at_s, event(kind, [rng.randrange(1, 6) for _ in range(rng.randint(1, 4))], parent=rng.randrange(1, 6)))
        if rng.random() < 0.02:
            t.kv(who, at_s, event(rng.choice([Kind.CLEARED, Kind.GAP])))
    told_of = t.end()
    assert set(told_of) == {name for name, prompt in prompts.items() if prompt is not None}
    for row in t.fold.outputs()["requests"].to_pylist():
        prompt = prompts[row["request_id"]]
        lost = [row[f"{c.label}_tokens"] for c in LOSSES]
        if prompt is None:
            assert {row[name] for name in NAMES if name != "causes"} == {None}
            continue
        assert (row["hit_tokens"] or 0) + sum(lost) == prompt
        assert sum(r["tokens"] for r in row["causes"]) == prompt
        assert (row["unexplained_reason"] is None) == (row["unexplained_tokens"] == 0)
        assert row["first_miss_token"] == (row["hit_tokens"] or 0 if (row["hit_tokens"] or 0) < prompt else None)
