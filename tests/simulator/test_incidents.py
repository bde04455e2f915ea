"""The demo's script of incidents: what is done, in which order, and what is noted of it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from simulator.incidents import JOINING, LOST_BATCHES, SHRUNK_SHARE, STAMPED_TEMPLATE, play, script


class Recorded:
    """Notes what it is told to do."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []

    async def restart(self, worker: int) -> None:
        self.done.append(("restart", worker))

    async def stamp(self, template: str, on: bool) -> None:
        self.done.append(("stamp", template, on))

    async def limit_cache(self, worker: int, share: float) -> None:
        self.done.append(("limit", worker, share))

    async def join(self, count: int) -> None:
        self.done.append(("join", count))

    async def follow(self, policy: str) -> None:
        self.done.append(("follow", policy))

    async def lose_events(self, worker: int, batches: int) -> None:
        self.done.append(("lose", worker, batches))


async def test_each_incident_begins_and_ends_in_order_and_is_noted(tmp_path):
    fleet, said = Recorded(), []
    clock = iter(range(100, 200))
    await play(script("cost", "round_robin"), fleet, 0.05, tmp_path / "book.jsonl", said.append, lambda: next(clock))
    assert fleet.done == [
        ("restart", 1), ("stamp", STAMPED_TEMPLATE, True), ("stamp", STAMPED_TEMPLATE, False), ("limit", 2, SHRUNK_SHARE),
        ("limit", 2, 1.0), ("join", JOINING), ("follow", "round_robin"), ("follow", "cost"), ("lose", 0, LOST_BATCHES),
    ]  # fmt: skip
    notes = [orjson.loads(line) for line in (tmp_path / "book.jsonl").read_bytes().splitlines()]
    assert [(n["name"], n["event"]) for n in notes] == [
        ("restart", "begins"), ("timestamp", "begins"), ("timestamp", "ends"), ("shrink", "begins"), ("shrink", "ends"), ("join", "begins"),
        ("policy", "begins"), ("policy", "ends"), ("events", "begins"),
    ]  # fmt: skip
    assert [n["time_s"] for n in notes] == list(range(100, 109))
    assert len(said) == len(notes)


def test_without_another_policy_the_policy_stays():
    assert "policy" not in [i.name for i in script("cost", "")]


@pytest.mark.parametrize("incident", script("cost", "round_robin"), ids=lambda i: i.name)
def test_incidents_fit_into_the_time_and_none_begins_before_the_last_one_ended(incident):
    assert 0.1 < incident.begin < 1
    others = [i for i in script("cost", "round_robin") if i.begin < incident.begin]
    assert all((i.end or i.begin) < incident.begin for i in others)
    assert incident.end is None or incident.begin < incident.end < 1
