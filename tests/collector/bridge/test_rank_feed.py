from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest

from collector.bridge.rank_feed import RankFeed
from schemas.kv_events import COMPLETE, ENGINE_RESTARTED, Kind, decode
from schemas.workers import Trust
from tests.collector.bridge.wire import KEY, SOURCE, cleared, message, one_block, payload, removed, stored

LAYOUTS = (Path(__file__).parents[2] / "fixtures" / "layouts.jsonl").read_text().splitlines()


def feed(can_replay: bool = False) -> RankFeed:
    return RankFeed(KEY, SOURCE, can_replay=can_replay, snapshot_interval_s=60)


def rows(f: RankFeed) -> list[tuple[Kind, int, int, float]]:
    """(kind, seq, flags, time) of all that waits."""
    records = [decode(r.value) for r in f.take(9.0)]
    return [(Kind(int(e["kind"])), int(e["seq"]), int(e["flags"]), float(e["time_s"])) for b in records for e in b.events]


def test_trust_is_blind_then_exact_then_degraded_by_a_gap_and_healed_by_a_clear() -> None:
    f = feed()
    assert f.health().trust is Trust.BLIND
    f.on_live(message(0, one_block(0)), 5.0)
    assert f.health().trust is Trust.EXACT
    f.on_live(message(4, one_block(4)), 5.0)
    assert f.health().trust is Trust.DEGRADED
    assert f.lost_batches == 3
    f.on_live(message(5, payload(cleared(), stored([9], [1, 2, 3, 4]))), 6.0)
    assert f.health().trust is Trust.EXACT
    assert f.snapshot_due(6.0)
    f.snapshot(6.0)
    assert rows(f)[-1][:2] == (Kind.SNAPSHOT, 5)
    assert not f.snapshot_due(6.1)
    assert f.snapshot_due(66.1)


def test_an_incomplete_start_is_degraded_and_its_snapshots_claim_nothing() -> None:
    f = feed()
    f.on_live(message(7, one_block(7)), 5.0)
    f.snapshot(5.0)
    told = rows(f)
    assert told[0][:3] == (Kind.EPOCH_STARTED, 7, 0)
    assert told[-1][0] is Kind.SNAPSHOT
    assert told[-1][2] & COMPLETE == 0
    assert f.health().trust is Trust.DEGRADED


def test_epochs_grow_even_when_the_clock_stands_still_or_goes_back() -> None:
    f = feed()
    epochs = []
    for life, now_s in enumerate((1000.0, 1000.0, 900.0)):
        f.on_live(message(0, one_block(0, life)), now_s)
        epochs.append(f.epoch)
    assert epochs == [1_000_000, 1_000_001, 1_000_002]


def test_a_restart_begins_a_record_of_its_own_with_an_empty_cache() -> None:
    f = feed()
    f.on_live(message(0, one_block(0)), 1.0)
    f.on_live(message(1, one_block(1)), 1.0)
    f.on_live(message(0, one_block(0, 1)), 2.0)
    records = [decode(r.value) for r in f.take(3.0)]
    assert [(b.epoch, b.first_seq, b.last_seq) for b in records] == [(1000, 0, 1), (2000, 0, 0)]
    assert int(records[1].events[0]["kind"]) == Kind.EPOCH_STARTED
    assert [int(b.events[0]["flags"]) for b in records] == [COMPLETE, COMPLETE | ENGINE_RESTARTED]
    assert f.health().resident_blocks == 1
    assert f.health().restarts == 1


def test_events_have_the_engines_time_and_else_the_time_of_receipt() -> None:
    f = feed()
    f.on_live(message(0, payload(stored([1], [1, 2, 3, 4]), ts=1234.5)), 2000.0)
    f.on_live(message(1, payload(removed([1]), ts=-1.0)), 2001.0)
    assert [r[3] for r in rows(f)] == [2000.0, 1234.5, 2001.0]


def test_a_batch_that_names_another_rank_is_noticed() -> None:
    f = feed()
    f.on_live(message(0, payload(stored([1], [1, 2, 3, 4]), rank=3)), 1.0)
    assert f.odd_ranks == 1


@pytest.mark.parametrize(
    ("odd", "trust"),
    [
        ({"type": "BlockTouched", "block_hashes": [1]}, Trust.EXACT),
        ({"type": "BlockRemoved"}, Trust.DEGRADED),
        (stored([2], [1, 2, 3, 4], extra_keys=[[{"a": 1}]]), Trust.DEGRADED),
    ],
)
def test_an_event_that_cannot_be_read_is_a_gap_and_one_of_an_unknown_kind_is_not(odd: dict[str, Any], trust: Trust) -> None:
    f = feed()
    f.on_live(message(0, payload(odd, stored([1], [1, 2, 3, 4]))), 1.0)
    f.on_live(message(1, one_block(9)), 1.0)
    kinds = [Kind(k) for r in f.take(1.0) for k in decode(r.value).events["kind"]]
    assert (f.trust, Kind.GAP in kinds, kinds.count(Kind.STORED)) == (trust, trust is Trust.DEGRADED, 2)
    health = f.health()
    assert (health.skipped_events, health.lost_batches) == (1, int(trust is Trust.DEGRADED))


def test_what_breaks_half_way_leaves_a_gap_for_all_that_was_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    f = feed(can_replay=True)
    f.on_live(message(0, one_block(0)), 1.0)
    for seq in (2, 3):
        f.on_live(message(seq, one_block(seq)), 1.0)
    monkeypatch.setattr(f.state, "apply", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        f.on_replay(message(1, one_block(1)), 1.0)
    f.broke(1.0)
    monkeypatch.undo()
    f.on_live(message(4, one_block(4)), 1.0)
    rows = [(Kind(e["kind"]), int(e["seq"]), int(e["parent"])) for r in f.take(1.0) for e in decode(r.value).events]
    assert [row for row in rows if row[0] is Kind.GAP] == [(Kind.GAP, 1, 3)]
    assert rows[-1][:2] == (Kind.STORED, 4)
    assert (f.trust, f.lost_batches) == (Trust.DEGRADED, 3)


def test_nothing_that_arrives_can_break_a_feed_and_all_of_it_is_counted() -> None:
    rng = random.Random(3)
    good = [base64.b64decode(json.loads(line)["frames"][2]) for line in LAYOUTS] + [one_block(i) for i in range(20)]
    f = feed(can_replay=True)
    seen = 0
    for i in range(3000):
        body = bytearray(rng.choice(good))
        if rng.random() < 0.5:
            at = rng.randrange(len(body))
            body[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        frames = message(rng.choice([i, i, i, 0, rng.getrandbits(64)]), bytes(body))
        if rng.random() < 0.1:
            frames = [rng.randbytes(rng.randint(0, 9)) for _ in range(rng.randint(0, 5))]
        if rng.random() < 0.7:
            f.on_live(frames, float(i))
        else:
            f.on_replay(frames, float(i))
        seen += 1
        if i % 50 == 0:
            f.replay_began()
            f.replay_ended(rng.random() < 0.5, float(i))
            for record in f.take(float(i)):
                decode(record.value)
    health = f.health()
    assert health.frames == seen
    assert health.mangled_frames > 100
    assert health.restarts > 10
