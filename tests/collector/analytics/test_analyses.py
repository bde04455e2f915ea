"""What the analyses hold after a restart is what they would hold without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from collector.analytics.analyses import SCHEMA, Analyses, Closed, entries_after, journal_rows
from collector.analytics.attributed import WINDOW_S, Attributed, Rows
from schemas.causes import Cause


def attributed(number: int, at_s: float = 1000.0, blocks: int = 3) -> Attributed:
    chain = np.arange(number * 100, number * 100 + blocks, dtype=np.uint64)
    return Attributed(
        request_id=f"r{number}", started_s=at_s, prefill_s=at_s + 0.1, ended_s=at_s + 1, pool="p", worker="w", rank=0, model="m", route="r",
        tenant="t", template=None, session_id=None, policy="cost", block_size=16, prompt_tokens=blocks * 16 + 5, completion_tokens=None,
        hit_tokens=16, chain=chain, causes=np.array([Cause.HIT] + [Cause.EVICTED] * (blocks - 1), np.uint8),
        gone_s=np.array([np.nan] + [2.5] * (blocks - 1), np.float32), idle_s=np.full(blocks, np.nan, np.float32),
        run_causes=np.array([Cause.HIT, Cause.EVICTED, Cause.GRANULARITY], np.uint8),
        run_tokens=np.array([16, (blocks - 1) * 16, 5], np.uint32), run_seconds=np.array([0, 0.5, np.nan]), diverged_at=None, ttft_s=0.2,
        engine_queue_s=None, engine_ttft_s=None,
    )  # fmt: skip


class Sums:
    """Tokens by window."""

    tables = ("sums",)

    def __init__(self) -> None:
        self.windows: dict[float, int] = {}

    def take(self, requests: Sequence[Attributed]) -> None:
        for r in requests:
            at = r.prefill_s // WINDOW_S * WINDOW_S
            self.windows[at] = self.windows.get(at, 0) + r.prompt_tokens

    def live(self) -> Mapping[str, Rows]:
        return {"sums": list(self.windows.items())}

    def close(self, before_s: float) -> Mapping[str, Rows]:
        over = [(at, self.windows.pop(at)) for at in sorted(self.windows) if at + WINDOW_S <= before_s]
        return {"sums": over}

    def save(self) -> Mapping[str, npt.NDArray[Any]]:
        return {"windows": np.array([*self.windows.items()], np.float64).reshape(-1, 2)}

    def load(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        self.windows = {at: int(n) for at, n in saved["windows"].tolist()}

    def held_bytes(self) -> int:
        return 100 * len(self.windows)


def same(a: Attributed, b: Attributed) -> bool:
    """Arrays with NaN where both have it."""

    def equal(x: object, y: object) -> bool:
        if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
            return np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
        return x == y

    return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(Attributed))


def test_the_journal_gives_back_requests_and_closings_in_their_order() -> None:
    entries = [
        attributed(1),
        attributed(2, blocks=1),
        Closed(600.0),
        replace(attributed(3), hit_tokens=None, template="x", snippet="y"),
        Closed(900.0),
    ]
    rows = journal_rows(7, entries)
    assert rows.schema == SCHEMA
    found = entries_after(rows, 6)
    assert [type(e) for e in found] == [type(e) for e in entries]
    for a, b in zip(entries, found, strict=True):
        if isinstance(a, Closed):
            assert a == b
        else:
            assert isinstance(b, Attributed)
            assert same(a, b)
    assert entries_after(rows, 7) == []


def test_an_empty_journal_is_no_trouble() -> None:
    assert entries_after(journal_rows(1, []), 0) == []


def test_checkpoint_and_journal_give_the_state_of_an_uninterrupted_run() -> None:
    first, second = Analyses({"sums": Sums()}), Analyses({"sums": Sums()})
    first.take([attributed(1), attributed(2, 1250.0)])
    first.written()
    saved = first.save()
    first.take([attributed(3, 1300.0)])
    first.close(1200.0)
    first.take([attributed(4, 1600.0)])
    journal = first.journal(2)
    second.load(saved)
    second.replay(entries_after(journal, 1))
    assert second.live() == {"sums": [(1200.0, 106), (1500.0, 53)]}
    assert second.outputs() == {}, "the closed window was written before"
    assert second.journal(3).num_rows == 0
    first.written()
    assert first.live() == second.live()
    assert {k: v.tolist() for k, v in first.save().items()} == {k: v.tolist() for k, v in second.save().items()}


def test_rows_of_a_closed_window_wait_until_they_are_written_and_are_published_meanwhile() -> None:
    a = Analyses({"sums": Sums()})
    a.take([attributed(1, 900.0)])
    a.close(1250.0)
    assert a.outputs() == {"sums": [(900.0, 53)]}
    assert a.live() == {"sums": [(900.0, 53)]}
    a.close(1250.0)  # a second time does nothing
    assert a.journal(1)["closed_s"].to_pylist() == [None, 1200.0]
    a.written()
    assert a.live() == {"sums": []}


def test_an_analysis_that_the_checkpoint_does_not_know_begins_empty() -> None:
    old = Analyses({})
    new = Analyses({"sums": Sums()})
    new.load(old.save())
    assert new.live() == {"sums": []}


def test_memory_is_the_sum_of_the_parts() -> None:
    a = Analyses({"one": Sums(), "two": Sums()})
    a.take([attributed(1)])
    assert a.held_bytes() == pytest.approx(200)
