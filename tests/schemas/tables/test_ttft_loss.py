"""What share of TTFT lost prefill explains, asked as people ask it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.tables.read import cursor, open_published, reading_only
from tests.schemas.tables.loss_rows import END, NOON, Row


def request(ttft_s: float | None, lost_s: float | None, avoidable_s: float | None, **more: object) -> Row:
    usual: Row = {"request_id": "q", "started_at": NOON, "pool": "coder", "ttft_s": ttft_s, "lost_s": lost_s, "avoidable_s": avoidable_s}
    return usual | more


def test_the_share_of_ttft_is_told_by_pool_of_requests_whose_cost_is_known(tmp_path: Path, published: Callable[..., Path]) -> None:
    rows = [
        request(2.0, 1.0, 0.5), request(1.0, 3.0, 0.0), request(1.0, 0.0, 0.0), request(None, 1.0, 1.0), request(1.0, None, None),
        request(1.0, 1.0, 1.0, started_at=END + dt.timedelta(seconds=1)), request(0.0, 1.0, 1.0), request(4.0, 1.0, 1.0, pool="other"),
    ]  # fmt: skip
    connection = open_published(published(tmp_path, {"requests": rows}))
    at = cursor(connection)
    at.execute(reading_only(at, "FROM ttft_loss(?, ?)"), [NOON, END])
    names = [d[0] for d in at.description]
    coder, other = (dict(zip(names, row, strict=True)) for row in at.fetchall())
    connection.close()
    assert (coder["requests"], coder["ttft_s"], coder["lost_s"]) == (3, 4.0, 2.0)
    assert (coder["lost_share"], coder["avoidable_share"]) == (0.5, 0.125)
    assert coder["lost_share_p50"] == pytest.approx(0.5)
    assert (other["pool"], other["lost_share"]) == ("other", 0.25)
