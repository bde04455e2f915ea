"""A collector that is killed again and again holds in the end what an undisturbed one holds: causes, hotspots, curves and all the rest."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from collector.ingest import JOURNAL_BYTES, Collector
from collector.store.segments import Segment
from schemas.stream import Stream, open_stream
from schemas.tables.losses import LOSS_COLUMNS
from schemas.topics import topic_specs
from simulator.agents import AgentTraffic, Stamp
from simulator.fleet import START_S, Fleet, FleetSpec, Restart, UsePolicy, to_stream
from simulator.virtual_worker import EngineSpec
from tests.collector.analytics.told import told
from tests.collector.driven import ask, drain, settings

LONG: dict[str, Any] = {"recent_hashes": 1 << 20, "recent_events": 1 << 16, "bucket_close_s": 30.0}


@contextlib.contextmanager
def written(folder: Path, sessions: int) -> Iterator[Stream]:
    """A stream that holds some minutes of a fleet with a restart, a prompt that got a timestamp and another policy for a while."""
    s = START_S
    traffic = AgentTraffic(start_s=s, spread_s=60.0, sessions=sessions, think_s=4.0, seed=3, stamps=(Stamp(s + 30, "agent-0"),))
    spec = FleetSpec(workers=3, engine=EngineSpec(block_size=16, capacity_blocks=700), seed=3)
    with open_stream(f"local:{folder / 'stream.sqlite'}?durability=process") as stream:
        stream.ensure_topics(
            [replace(t, retention_s=None) for t in topic_specs("", 4)]
        )  # its time may be long ago; 4: not read in its order
        writer = stream.writer()
        Fleet(spec, to_stream(writer)).run(
            traffic.flows(), [Restart(s + 50, "w1"), UsePolicy(s + 70, "round_robin"), UsePolicy(s + 90, "cost")], until_s=s + 400
        )
        writer.flush(30)
        writer.close(10)
        yield stream


def collected(data_dir: Path, stream: Stream) -> None:
    one = Collector(settings(data_dir, **LONG), stream)
    one.start()
    try:
        drain(one, stream)
    except BaseException:
        one.close()
        raise
    one.stop()


class Died(BaseException):
    """The process was killed here."""


def killed_again_and_again(data_dir: Path, stream: Stream, rng: random.Random) -> int:
    """Lives that each end at a random step, then one that reads the rest. Returns the deaths."""
    deaths = 0
    for _ in range(6):
        left = rng.randint(5, 30)

        def die(step: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Died(step)

        more: dict[str, Any] = {"poll_records": rng.choice([100, 400]), "checkpoint_blocks": rng.choice([200, 4000])}
        victim = Collector(settings(data_dir, **LONG | more), stream, at_step=die)
        try:
            victim.start()
            for _ in range(rng.randint(4, 12)):
                victim.turn()
        except Died:
            deaths += 1
        finally:
            victim.close()
    collected(data_dir, stream)
    return deaths


_TOLD = ", ".join(c[0] for c in LOSS_COLUMNS if not c[0].endswith("_s"))
QUESTIONS = {
    "requests": f"SELECT request_id, {_TOLD} FROM requests ORDER BY ALL",
    "loss_10s": "SELECT bucket, worker, route, cause, sum(tokens), sum(requests) FROM loss_10s GROUP BY ALL ORDER BY ALL",
    "ladder_10s": "SELECT bucket, worker, sum(ideal_tokens), sum(held_tokens), sum(hit_tokens) FROM ladder_10s GROUP BY ALL ORDER BY ALL",
    "prefixes": "SELECT window_start, prefix, route, lost_tokens, total_tokens, requests, top_cause FROM prefixes ORDER BY ALL",
    "divergence": """SELECT window_start, route, depth_from, sum(requests), sum(diverged_tokens), max(all_requests)
                     FROM divergence GROUP BY ALL ORDER BY ALL""",
    "pressure": """SELECT window_start, worker, working_set_blocks, active_sessions, active_blocks, lifetime_p50_s, idle_p50_s,
                          removed_sample, return_p50_s, returned_blocks, growth_p50_tokens FROM pressure ORDER BY ALL""",
    "reuse_curves": """SELECT window_start, worker, kind, scale, capacity_blocks, ttl_s, hit_blocks, prompt_blocks
                       FROM reuse_curves ORDER BY ALL""",
}
"""Seconds are left out: what a prefill costs is learnt on the way, so they depend on what was known when a request was told."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stream, dict[str, list[tuple[Any, ...]]]]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with written(folder, sessions=8) as stream:
        collected(folder / "data", stream)
        yield stream, {name: ask(folder / "data", sql) for name, sql in QUESTIONS.items()}


def test_the_undisturbed_collector_has_something_to_say(undisturbed: tuple[Stream, dict[str, list[tuple[Any, ...]]]]) -> None:
    _, holds = undisturbed
    assert all(holds.values())
    causes = {row[3] for row in holds["loss_10s"]}
    assert causes >= {"hit", "first_seen", "diverged", "cleared", "evicted", "granularity"}


@pytest.mark.parametrize("seed", [1])
def test_after_kill_9_the_analytics_equal_an_uninterrupted_runs(
    undisturbed: tuple[Stream, dict[str, list[tuple[Any, ...]]]], tmp_path: Path, seed: int
) -> None:
    stream, holds = undisturbed
    assert killed_again_and_again(tmp_path, stream, random.Random(seed)) >= 2
    for name, sql in QUESTIONS.items():
        assert ask(tmp_path, sql) == holds[name], name


def test_without_its_checkpoint_closed_windows_stay_as_they_were_and_what_is_missing_is_said(
    undisturbed: tuple[Stream, dict[str, list[tuple[Any, ...]]]], tmp_path: Path
) -> None:
    stream, _ = undisturbed
    collected(tmp_path, stream)
    closed = "SELECT * FROM {} WHERE window_start < (SELECT max(window_start) FROM pressure) ORDER BY ALL"
    tables = ("pressure", "prefixes", "divergence", "reuse_curves")
    before = [ask(tmp_path, closed.format(t)) for t in tables]
    assert all(before)
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1000])
    collected(tmp_path, stream)
    assert [ask(tmp_path, closed.format(t)) for t in tables] == before
    ((text,),) = ask(tmp_path, "SELECT text FROM changes WHERE text LIKE '%checkpoint%'")
    assert f"checkpoint {checkpoint.name} cannot be read" in text
    assert f"after commit {int(checkpoint.stem)}" in text


@pytest.fixture
def idle(tmp_path: Path) -> Iterator[Collector]:
    """Has read an empty stream."""
    with open_stream(f"local:{tmp_path / 'stream.sqlite'}") as stream:
        one = Collector(settings(tmp_path), stream)
        one.start()
        drain(one, stream)
        yield one
        one.close()


def test_the_last_file_says_all_that_was_told_and_the_journal_goes_with_the_last_checkpoint(tmp_path: Path, idle: Collector) -> None:
    idle.core.analyses.take([told(33, 0, at_s=time.time(), chain=[1, 2])])
    idle.turn()
    idle.core.analyses.take([told(33, 0, at_s=time.time(), chain=[3])])
    idle.stop()
    assert ask(tmp_path, "SELECT sum(working_set_blocks), count(*) FROM pressure WHERE worker IS NULL") == [(3, 1)]
    assert [s for s in idle.manifest if s.table.startswith("journal")] == []
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert idle._checkpoint["file"] == checkpoint.name


def test_a_journal_makes_a_checkpoint_due_when_both_are_as_large(idle: Collector) -> None:
    now_s = time.time()
    idle._saved_at_s = now_s
    idle.manifest = [Segment("journal", 1, 1, 1, JOURNAL_BYTES - 1, 0, 0)]
    assert not idle._wants_checkpoint(now_s)
    idle.manifest.append(Segment("journal_contents", 1, 1, 1, 1, 0, 0))
    assert idle._wants_checkpoint(now_s)
    idle._saved_bytes = 2 * JOURNAL_BYTES
    assert not idle._wants_checkpoint(now_s)
    idle.manifest *= 2
    assert idle._wants_checkpoint(now_s)


def test_a_journal_that_cannot_be_read_is_said_and_no_window_counts_twice(
    undisturbed: tuple[Stream, dict[str, list[tuple[Any, ...]]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, _ = undisturbed
    victim = Collector(settings(tmp_path, **LONG), stream)
    monkeypatch.setattr(victim, "_wants_checkpoint", lambda _now_s: False)
    victim.start()
    drain(victim, stream)
    victim.close()
    damaged = sorted(tmp_path.glob("segments/journal*/*.parquet"))
    assert {p.parent.name for p in damaged} == {"journal", "journal_contents"}
    for path in damaged:
        path.write_bytes(path.read_bytes()[:100])
    collected(tmp_path, stream)
    said = {text for (text,) in ask(tmp_path, "SELECT text FROM changes")}
    assert all(any(f"{p.parent.name}/{p.name} cannot be read" in text for text in said) for p in damaged)
    assert [row for row in ask(tmp_path, COUNTS) if row[-1] > 1] == [], "windows that were written are not written again"


COUNTS = """SELECT 'pressure', window_start, pool, worker, count(*) FROM pressure GROUP BY ALL
            UNION ALL SELECT 'reuse', window_start, pool, worker, count(*) FROM reuse_curves WHERE kind = 'ideal' GROUP BY ALL"""


def test_no_published_file_counts_a_window_twice_when_it_closes_or_after_kill_9(
    undisturbed: tuple[Stream, dict[str, list[tuple[Any, ...]]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, holds = undisturbed
    found: list[list[tuple[Any, ...]]] = []

    def look(step: str) -> None:
        if step == "published":
            found.append(ask(tmp_path, COUNTS))

    victim = Collector(settings(tmp_path, **LONG, poll_records=400), stream, at_step=look)

    def once(_now_s: float) -> bool:
        return not victim._checkpoint and bool(victim.core.analyses.live()["pressure"])

    monkeypatch.setattr(victim, "_wants_checkpoint", once)  # with the first window open, and never again
    victim.start()
    drain(victim, stream)
    closed = [s for s in victim.manifest if s.table == "pressure"]
    assert victim._checkpoint and closed[0].lo > victim._checkpoint["number"], "a window closed after the checkpoint"
    victim.close()
    heir = Collector(settings(tmp_path, **LONG), stream, at_step=look)
    heir.start()
    drain(heir, stream)
    heir.stop()
    assert sum(map(bool, found)) > 3 and len({row[1] for rows in found for row in rows}) > 1
    assert [row for rows in found for row in rows if row[-1] > 1] == []
    assert ask(tmp_path, QUESTIONS["pressure"]) == holds["pressure"]
