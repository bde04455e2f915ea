"""Attribution of random fleets, through the fold, beside a twin that knows everything."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from collector.analytics.attributed import Attributed
from collector.analytics.content_index import ContentIndex
from collector.fold import Again, Fold
from collector.residency import Residency
from schemas.causes import Cause
from schemas.kv_events import encode
from schemas.stream.base import StoredRecord
from schemas.topics import DECISIONS, KV_EVENTS, OUTCOMES
from tests.collector.attribution.fleets import Fleet
from tests.collector.attribution.naive import Twin, runs_of


def records(fleet: Fleet) -> Iterator[tuple[float, str, bytes]]:
    out = [(b.bridge_time_s, KV_EVENTS, encode(b)) for c in fleet.caches for b in c.batches]
    for a in fleet.asked:
        assert a.outcome is not None
        out.append((a.decision.time_s, DECISIONS, a.decision.model_dump_json().encode()))
        out.append((a.outcome.time_s, OUTCOMES, a.outcome.model_dump_json().encode()))
    return iter(sorted(out, key=lambda r: r[0]))


def small() -> Residency:
    return Residency(1 << 12, 1 << 14, 256, ghosts=1 << 12, seen=1 << 12, filtered=1 << 12)


def told(fleet: Fleet, seed: int, restarts: float = 0.0) -> tuple[dict[str, Attributed], Fold]:
    """Fed in slices of random length, each told as far as time has come, now and then with a restart."""
    rng = random.Random(seed)
    contents = ContentIndex()
    fold = Fold(small(), lateness_s=0.1, contents=contents)
    offset, out, taken = 0, [], []
    todo = list(records(fleet))
    while todo:
        n = rng.randint(1, 40)
        part, todo = todo[:n], todo[n:]
        for time_s, topic, value in part:
            offset += 1
            taken.append((topic, StoredRecord(offset, int(time_s * 1000), b"k", value, ())))
            fold.take((topic, 0), topic, [taken[-1][1]], time_s)
        if rng.random() < 0.7:
            fold.settle(part[-1][0], part[-1][0], part[-1][0])
            out += fold.take_told()
            if rng.random() < restarts:
                fold = restarted(fold, contents, taken)
    for more_s in (1.0, 100.0):
        fold.settle(fleet.end_s + more_s, fleet.end_s + more_s, fleet.end_s + more_s)
    out += fold.take_told()
    return {a.request_id: a for a in out}, fold


def restarted(fold: Fold, contents: ContentIndex, taken: list[tuple[str, StoredRecord]]) -> Fold:
    """The same again, as after a crash just after a commit: small state, cache state, and the records of open requests read again."""
    waiting = fold.join.waiting()
    fresh = Fold(small(), lateness_s=0.1, contents=contents)
    fresh.load(fold.save())
    fresh.restore(fold.counters, [], json.loads(json.dumps(fold.spans())))
    for name in (DECISIONS, OUTCOMES):
        open_ = {x >> 1: bool(x & 1) for x in waiting.get((name, 0), [])}
        before = max((r.offset for topic, r in taken if topic == name), default=0) + 1
        fresh.again[name, 0] = Again(before, open_)
        fresh.take((name, 0), name, [r for topic, r in taken if topic == name and r.offset in open_], 0.0)
        del fresh.again[name, 0]
    return fresh


@pytest.mark.parametrize(("seed", "restarts"), [(i, 0.0) for i in range(6)] + [(i, 0.3) for i in (8, 9, 10)])
def test_the_cause_of_every_token_is_the_one_that_full_knowledge_tells(seed: int, restarts: float) -> None:
    fleet = Fleet(seed)
    found, _ = told(fleet, seed, restarts)
    twin = Twin(fleet)
    for asked in fleet.asked:
        one = found[asked.decision.request_id]
        want = twin.tokens(asked)
        got = [(Cause(c), n) for c, n in zip(one.run_causes.tolist(), one.run_tokens.tolist(), strict=True)]
        if want is None:
            assert (one.hit_tokens, got) == (None, [(Cause.UNEXPLAINED, asked.decision.prompt_tokens)])
            continue
        assert got == runs_of(want), asked
        assert one.hit_tokens == want.count(Cause.HIT)


def test_the_causes_are_the_same_however_the_records_came_in_turns() -> None:
    """In this fleet a cache is cleared behind a prefill, and in the first turns that prefill's store is found before others ask for it."""
    fleet = Fleet(1025)
    one, other = (
        {name: (a.run_causes.tolist(), a.run_tokens.tolist()) for name, a in told(fleet, turns, 0.3)[0].items()} for turns in (1025, 1)
    )
    assert one == other
