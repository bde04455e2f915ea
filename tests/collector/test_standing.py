"""What is said of workers whose bridge is silent, has another hash key, or whose engine does not answer: rows, checks and hits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from collector.fold import Fold
from collector.health import AGREE_S, Health, checks
from collector.ingest import Collector
from collector.residency import Residency
from collector.standing import AsOf, standings
from schemas.kv_events import COMPLETE, Kind, KvBatch, encode
from schemas.stream import Stream, Writer, open_stream
from schemas.topics import DECISIONS, KV_EVENTS, OUTCOMES, WORKER_LOAD, topic_specs
from schemas.workers import Trust
from tests.collector.batches import batch, event
from tests.collector.driven import ask, drain, settings
from tests.collector.traffic import WORKERS, decision, load, outcome, pack_hashes_of, put

W0, W1 = WORKERS[:2]
AT = 1_790_000_000.0
CHAIN = [11, 12, 13, 14]
PROMPT: dict[str, Any] = {"chain": pack_hashes_of(CHAIN), "block_size": 16, "token_source": "exact", "prompt_tokens": 70}


@dataclass(frozen=True)
class Read:
    """A record of the stream."""

    offset: int
    timestamp: int
    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...] = ()


class Driven:
    """A fold of which everything written is complete until `done_s`."""

    def __init__(self) -> None:
        self.fold = Fold(Residency(1 << 12, 1 << 14), decision_wait_s=15.0)
        self.offset = 0

    def put(self, name: str, value: Any, at_s: float) -> None:
        data = encode(value) if isinstance(value, KvBatch) else value.model_dump_json().encode()
        self.offset += 1
        self.fold.take((name, 0), name, [Read(self.offset, round(at_s * 1000), b"k", data)], at_s)

    def kv(self, seq: int, at_s: float, *events: Any, epoch: int = 1) -> None:
        self.put(KV_EVENTS, batch(W0, epoch, seq, at_s, *events), at_s)

    def load(self, at_s: float, **more: Any) -> None:
        self.put(WORKER_LOAD, load(W0, at_s, **more), at_s)

    def warm(self) -> None:
        """Two of four blocks are there at AT; a request of all four runs from AT + 2 to AT + 3."""
        self.kv(0, AT, event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, CHAIN[:2], parent=5))

    def request(self, request_id: str = "q", **more: Any) -> None:
        self.put(DECISIONS, decision(request_id, AT + 2, **(PROMPT | more)), AT + 2)
        self.put(OUTCOMES, outcome(request_id, AT + 3, prompt_tokens=70, cached_tokens=32), AT + 3)

    def settle(self, done_s: float) -> list[Any]:
        """event_hit_tokens of the requests that are closed by now."""
        self.fold.settle(done_s, done_s, done_s)
        return self.fold.outputs()["requests"]["event_hit_tokens"].to_pylist() if "requests" in self.fold.outputs() else []

    def standing(self, now_s: float, read_until_s: float | None = None) -> tuple[Trust, str]:
        (s,) = standings(self.fold, AsOf(now_s, now_s if read_until_s is None else read_until_s, 10.0, 60.0))
        return s.trust, s.reason

    def checks(self, now_s: float) -> dict[str, tuple[str, str, Any]]:
        stand = standings(self.fold, AsOf(now_s, now_s, 10.0, 60.0))
        return {c.name: (c.status, c.detail, c.value) for c in checks(self.fold, Health(), stand, {}, 0, now_s)}


def test_trust_falls_with_the_silence_of_the_bridge_and_any_word_brings_it_back() -> None:
    d = Driven()
    d.warm()
    assert d.standing(AT + 9) == (Trust.EXACT, "")
    assert d.standing(AT + 12) == (Trust.DEGRADED, "no word from its bridge for 12 s: is the bridge running?")
    assert d.standing(AT + 61) == (Trust.BLIND, "no word from its bridge for 61 s: is the bridge running?")
    d.load(AT + 60)
    assert d.standing(AT + 61) == (Trust.EXACT, "")
    d.kv(1, AT + 80, event(Kind.STORED, [9]))
    assert d.standing(AT + 85) == (Trust.EXACT, "")


def test_a_collector_that_is_behind_does_not_blame_the_bridge() -> None:
    d = Driven()
    d.warm()
    trust, reason = d.standing(AT + 100, read_until_s=AT + 5)
    assert (trust, "is the bridge running" in reason, "the collector is behind" in reason) == (Trust.BLIND, False, True)


def test_silence_and_an_old_reading_are_said_in_data_health() -> None:
    d = Driven()
    d.warm()
    d.load(AT + 1)
    found = d.checks(AT + 2)
    assert (found["trust"][0], found["load_age_s"][:2]) == ("ok", ("ok", "The engine's metrics page answers."))
    found = d.checks(AT + 21)
    assert (found["trust"][0], found["load_age_s"][0]) == ("warn", "warn")
    assert found["trust"][1] == "Trust in its index is degraded: no word from its bridge for 20 s: is the bridge running?"
    assert "20 s old; whether its metrics page answers now is not known" in found["load_age_s"][1]
    found = d.checks(AT + 90)
    assert (found["trust"][0], found["load_age_s"][0]) == ("bad", "bad")


def test_an_engine_that_does_not_answer_is_degraded_at_most() -> None:
    d = Driven()
    d.warm()
    d.load(AT + 1, up=False)
    assert d.standing(AT + 2) == (Trust.DEGRADED, "its metrics page does not answer: what its cache holds is not known")
    d.load(AT + 3)
    assert d.standing(AT + 4) == (Trust.EXACT, "")


def test_a_hit_waits_for_a_word_of_the_bridge_from_after_the_end() -> None:
    for kv in (False, True):
        d = Driven()
        d.warm()
        d.kv(1, AT + 2.5, event(Kind.STORED, CHAIN[2:], parent=12))
        d.request()
        d.load(AT + 3.5)  # too early: what happened just before the end may be on its way
        assert d.settle(AT + 10) == []
        if kv:
            d.kv(2, AT + 10, event(Kind.STORED, [9]))
        else:
            d.load(AT + 10)
        assert d.settle(AT + 11) == [32]
        assert (d.fold.counters["told"], d.fold.counters["untold"]) == (1, 0)


@pytest.mark.parametrize(
    "word",
    [None, {"up": False}, {"epoch": 2}],
    ids=["silent", "the engine does not answer it", "of a new bridge whose first events are not here yet"],
)
def test_while_nobody_watches_a_worker_nothing_is_told_from_what_it_held_before(word: dict[str, Any] | None) -> None:
    d = Driven()
    d.warm()
    d.request()
    for second in range(4, 18):
        if word is not None:
            d.load(AT + second, **word)
        assert d.settle(AT + second) == []
    assert d.settle(AT + 18.5) == [None]
    assert (d.fold.counters["told"], d.fold.counters["untold"], len(d.fold.join.open)) == (0, 1, 0)


def test_a_worker_that_never_had_events_holds_no_request_back() -> None:
    d = Driven()
    d.load(AT, epoch=0)
    d.request()
    assert d.settle(AT + 5) == [None]


@pytest.mark.parametrize(
    ("router", "bridge", "want"),
    [("aaaaaaaa", "aaaaaaaa", "ok"), ("aaaaaaaa", "bbbbbbbb", "bad"), (None, "bbbbbbbb", "ok"), ("aaaaaaaa", None, "ok")],
)
def test_names_of_another_hash_key_are_told_as_bad_and_no_hit_is_told_from_them(router: str | None, bridge: str | None, want: str) -> None:
    d = Driven()
    d.warm()
    d.request(key_id=router)
    d.load(AT + 5, key_id=bridge)
    status, detail, keys = d.checks(AT + 6)["hash_keys"]
    assert (status, keys) == (want, 2 if want == "bad" else 1)
    assert d.settle(AT + 6) == [None if want == "bad" else 32]
    if want == "bad":
        assert d.fold.counters["untold"] == 1
        for part in ("aaaaaaaa: router r", "bbbbbbbb: the bridge of w0", "set the same hash_key for bridges and routers"):
            assert part in detail


def test_bridges_of_one_pool_with_different_keys_are_told_and_an_old_key_is_forgotten() -> None:
    d = Driven()
    d.request(key_id="cccccccc")
    d.load(AT + 400, key_id="aaaaaaaa")
    assert d.checks(AT + 401)["hash_keys"][0] == "ok"
    d.put(WORKER_LOAD, load(W1, AT + 400, key_id="bbbbbbbb"), AT + 400)
    assert d.checks(AT + 401)["hash_keys"][0] == "bad"


@pytest.mark.parametrize(("wrong", "status"), [(0, "ok"), (2, "ok"), (3, "warn"), (10, "warn"), (11, "bad")])
def test_events_and_reports_that_differ_are_told_by_their_share(wrong: int, status: str) -> None:
    d = Driven()
    d.warm()
    for i in range(100):
        d.put(DECISIONS, decision(f"q{i}", AT + 2, **PROMPT), AT + 2)
        d.put(OUTCOMES, outcome(f"q{i}", AT + 3, prompt_tokens=70, cached_tokens=48 if i < wrong else 32), AT + 3)
    d.load(AT + 10)
    assert d.settle(AT + 11) == [32] * 100
    found = d.checks(AT + 12)["events_agree"]
    assert (found[0], found[2]) == (status, wrong / 100)
    assert ("Look at requests where event_hit_tokens <> cached_tokens" in found[1]) == (status != "ok")
    assert d.checks(AT + 12 + AGREE_S)["events_agree"][::2] == ("unknown", None)


def test_lag_is_told_by_topic_and_names_the_partition_that_stalls() -> None:
    fold = Fold(Residency(1 << 12, 1 << 14))
    lag = {("kv-events", 0): 5, ("kv-events", 1): 0, ("kv-events", 2): 7, ("decisions", 0): 0}

    def rows(stream_time_s: dict[tuple[str, int], float]) -> dict[str, tuple[Any, str, str]]:
        found = checks(fold, Health(lag=lag), [], stream_time_s, 0, AT)
        return {c.subject: (c.value, c.status, c.detail) for c in found if c.name == "lag_records"}

    found = rows({("kv-events", 0): AT - 2, ("kv-events", 2): AT - 1})
    assert found["decisions"][:2] == (0, "ok")
    assert found["kv-events"] == (12, "ok", "Records not read yet; the oldest is 2.0 s old at most.")
    found = rows({("kv-events", 0): AT - 2, ("kv-events", 2): AT - 40})
    assert set(found) == {"kv-events", "decisions"}
    assert found["kv-events"][:2] == (12, "warn")
    assert "the oldest is 40.0 s old" in found["kv-events"][2]
    assert "Behind is partition 2 (7 records, 40 s)" in found["kv-events"][2]


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    with open_stream(f"local:{tmp_path / 'stream.sqlite'}?durability=process") as opened:
        opened.ensure_topics(topic_specs("", 2))
        yield opened


def test_a_bridge_that_died_is_published_as_such_within_its_limits(stream: Stream, tmp_path: Path) -> None:
    writer: Writer = stream.writer()
    now = time.time()
    for b in (
        batch(W0, 1, 0, now - 20, event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, CHAIN[:2], parent=5)),
        batch(W1, 1, 0, now - 90, event(Kind.EPOCH_STARTED, flags=COMPLETE)),
    ):
        writer.append(KV_EVENTS, b.source.key, encode(b))
    put(writer, "", decision("q", now - 2, **PROMPT))
    put(writer, "", outcome("q", now - 1, prompt_tokens=70, cached_tokens=64))
    writer.close(10)
    one = Collector(settings(tmp_path / "data", stale_after_s=10.0, blind_after_s=60.0, decision_wait_s=0.5), stream)
    one.start()
    drain(one, stream)
    deadline = time.monotonic() + 10  # until what was read is known to be all that there was
    while min(one.follow.complete(KV_EVENTS), one.follow.complete(WORKER_LOAD)) < now and time.monotonic() < deadline:
        one.turn()
    one.stop()
    found = dict(ask(tmp_path / "data", "SELECT worker, trust || ': ' || regexp_replace(trust_reason, '[0-9]+', 'N') FROM workers"))
    silence = "no word from its bridge for N s: is the bridge running?"
    assert found == {"w0": f"degraded: {silence}", "w1": f"blind: {silence}"}
    assert ask(tmp_path / "data", "SELECT event_hit_tokens FROM requests") == [(None,)]
    assert ask(tmp_path / "data", "SELECT value, status FROM data_health WHERE name = 'hits_untold'") == [(1, "warn")]
