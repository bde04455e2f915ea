"""Where prompts of a kind differ: bins of depths, denominators, windows, and what stays over a restart."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from collector.analytics.attributed import WINDOW_S, Attributed
from collector.analytics.divergence import HELD_KINDS, KINDS, OPEN_WINDOWS, Divergence, bin_of
from schemas.causes import Cause
from schemas.tables.losses import DIVERGENCE
from tests.collector.analytics.told import told

COLUMNS = [c.name for c in DIVERGENCE.columns]


def request(depth: int | None = None, diverged: int = 0, seconds: float = 0.5, **more: Any) -> Attributed:
    """200 tokens: diverged ones in two runs, the rest hits and new text."""
    runs = [(Cause.HIT, 50, 0.0), (Cause.DIVERGED, diverged // 2, seconds / 2), (Cause.FIRST_SEEN, 150 - diverged, 1.0)]
    runs.append((Cause.DIVERGED, diverged - diverged // 2, seconds / 2))
    runs = [run for run in runs if run[1]]
    causes, tokens, took = zip(*runs, strict=True)
    arrays = {"run_causes": np.array(causes, np.uint8), "run_tokens": np.array(tokens, np.uint32), "run_seconds": np.array(took)}
    return told(200, 50, diverged_at=depth, **arrays, **more)


def rows_of(found: Any) -> list[dict[str, Any]]:
    return [dict(zip(COLUMNS, row, strict=True)) for row in found["divergence"]]


def live(*requests: Attributed) -> list[dict[str, Any]]:
    analysis = Divergence()
    analysis.take(requests)
    return rows_of(analysis.live())


def test_a_template_that_breaks_at_one_token_says_that_token() -> None:
    (row,) = live(*(request(37, 100, request_id=f"r{i}", template="v7") for i in range(5)))
    assert (row["depth_from"], row["depth_to"], row["requests"], row["diverged_tokens"]) == (37, 38, 5, 500)
    assert (row["pool"], row["model"], row["route"], row["tenant"], row["template"]) == ("p", "m", "r", "t", "v7")
    assert (row["window_start"], row["window_s"], row["example_request_id"], row["lost_s"]) == (900_000_000, 300, "r4", 2.5)


def test_depths_that_differ_a_little_share_a_bin_and_others_have_their_own() -> None:
    rows = live(request(37, 10), request(39, 10), request(36, 10), request(40, 20), request(2000, 30), request(0, 40))
    assert [(r["depth_from"], r["depth_to"], r["requests"], r["diverged_tokens"]) for r in rows] == [
        (0, 1, 1, 40), (36, 40, 3, 30), (40, 41, 1, 20), (2000, 2001, 1, 30),
    ]  # fmt: skip


def test_a_conversation_that_goes_on_with_new_text_counts_in_the_denominators_alone() -> None:
    (row,) = live(request(37, 100), request(), request(150))
    assert (row["requests"], row["all_requests"], row["all_prompt_tokens"]) == (1, 3, 600)


def test_a_kind_without_divergence_has_a_row_of_its_own_for_the_share() -> None:
    quiet, loud = live(request(route="quiet"), request(5, 10, route="loud"))
    assert (quiet["route"], quiet["depth_from"], quiet["depth_to"], quiet["requests"], quiet["diverged_tokens"]) == (
        "quiet",
        None,
        None,
        0,
        0,
    )
    assert (quiet["all_prompt_tokens"], quiet["example_request_id"], loud["requests"]) == (200, None, 1)


def test_an_unknown_depth_and_unknown_seconds_stay_unknown() -> None:
    rows = live(request(None, 10), request(5, 10, seconds=float("nan")), request(5, 10))
    assert [(r["depth_from"], r["requests"], r["lost_s"]) for r in rows] == [(None, 1, 0.5), (5, 2, None)]


@pytest.mark.parametrize("depth", [*range(70), 255, 256, 1000, 2**20 + 1, 2**31 - 1])
def test_a_bin_holds_its_depth_within_an_eighth(depth: int) -> None:
    low, high = bin_of(depth)
    assert low <= depth < high
    assert (high - low) * 8 <= max(low, 8)
    assert bin_of(low) == bin_of(high - 1) == (low, high)
    assert bin_of(high)[0] == high


def test_counts_are_those_of_a_plain_count() -> None:
    rng = random.Random(1)
    requests = [
        request(rng.choice([None, *range(0, 300, 7)]), rng.choice([0, 10, 30]), route=rng.choice("ab"), at_s=rng.choice([910.0, 1210.0]))
        for _ in range(500)
    ]
    analysis = Divergence()
    for at in range(0, 500, 50):
        analysis.take(requests[at : at + 50])
    found = rows_of(analysis.live())
    diverged, every = Counter[Any](), Counter[Any]()
    for r in requests:
        kind, tokens = (int(r.prefill_s // 300), r.route), int(r.run_tokens[r.run_causes == Cause.DIVERGED].sum())
        every[kind] += 1
        if tokens:
            diverged[kind, None if r.diverged_at is None else bin_of(r.diverged_at)] += tokens
    told_tokens = {
        ((r["window_start"] // 300_000_000, r["route"]), None if r["depth_from"] is None else bin_of(r["depth_from"])): r["diverged_tokens"]
        for r in found
    }
    assert told_tokens == dict(diverged)
    assert {((r["window_start"] // 300_000_000, r["route"]), r["all_requests"]) for r in found} == set(every.items())


def test_closed_windows_come_out_once_and_what_is_late_counts_in_the_oldest_open_one() -> None:
    analysis = Divergence()
    analysis.take([request(5, 10, at_s=100.0), request(5, 10, at_s=400.0)])
    (first,) = rows_of(analysis.close(300.0))
    assert (first["window_start"], first["requests"]) == (0, 1)
    analysis.take([request(5, 10, at_s=100.0)])
    (second,) = rows_of(analysis.live())
    assert (second["window_start"], second["requests"]) == (300_000_000, 2)
    assert rows_of(analysis.close(300.0)) == []


def test_a_collector_that_catches_up_counts_each_window_on_its_own() -> None:
    analysis = Divergence()
    analysis.take([request(5, 10, at_s=300.0 * i + 1) for i in range(100) for _ in range(2)])
    rows = rows_of(analysis.close(300.0 * 100))
    assert [(r["window_start"], r["requests"]) for r in rows] == [(300_000_000 * i, 2) for i in range(100)]
    assert rows_of(analysis.live()) == []


def test_kinds_of_all_open_windows_are_bounded_and_closing_makes_room_also_after_a_restart() -> None:
    analysis = Divergence()
    for window in range(4):
        analysis.take([request(5, 10, route=f"r{i}", at_s=300.0 * window + 1) for i in range(KINDS)])
    found = Counter(r["window_start"] // 300_000_000 for r in rows_of(analysis.live()))
    assert found == {0: KINDS, 1: KINDS, 2: KINDS} and sum(found.values()) == HELD_KINDS
    loaded = Divergence()
    loaded.load(analysis.save())
    for one in (analysis, loaded):
        one.close(300.0)
        one.take([request(5, 10, route="new", at_s=901.0)])
        assert (900_000_000, "new") in {(r["window_start"], r["route"]) for r in rows_of(one.live())}


def test_it_is_bounded_whatever_clients_name_and_clocks_say() -> None:
    analysis = Divergence()
    analysis.take([request(i, 10, route=f"r{i}") for i in range(KINDS + 50)])
    analysis.take([request(5, 10, at_s=1e6 * i) for i in range(1, OPEN_WINDOWS + 20)])
    rows = rows_of(analysis.live())
    assert len({r["window_start"] for r in rows}) == OPEN_WINDOWS
    first = [r for r in rows if r["window_start"] == 900_000_000]
    assert len({r["route"] for r in first}) == KINDS + 1
    assert sum(r["requests"] for r in first if r["pool"] is None) == 50
    assert analysis.held_bytes() > 0


def test_a_loaded_one_goes_on_as_the_saved_one() -> None:
    rng = random.Random(2)

    def some() -> list[Attributed]:
        return [
            request(
                rng.choice([None, 5, 36, 37]), 10, rng.choice([0.5, float("nan")]), route=rng.choice(["a", "ö"]), at_s=rng.random() * 600
            )
            for _ in range(30)
        ]

    one = Divergence()
    one.take(some())
    one.close(WINDOW_S)
    one.take(some())
    two = Divergence()
    two.load(one.save())
    assert (rows_of(two.live()), two.held_bytes()) == (rows_of(one.live()), one.held_bytes())
    more = some()
    for analysis in (one, two):
        analysis.take(more)
    assert rows_of(one.close(1e6)) == rows_of(two.close(1e6))
