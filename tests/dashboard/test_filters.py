from __future__ import annotations

from datetime import datetime

import pytest

from dashboard.filters import MOST_BINS, RANGES_S, Filters, bin_of

WATERMARK = datetime(2026, 11, 29, 13, 59, 59, 300_000)


@pytest.mark.parametrize(
    "filters",
    [
        Filters(),
        Filters(range="6h", pool="p", worker="gpu-1:8000"),
        Filters(since=datetime(2026, 11, 29, 13), until=datetime(2026, 11, 29, 13, 30), route='<b> & "é" 🦊'),
    ],
)
def test_a_link_gives_the_same_filters_again(filters: Filters) -> None:
    assert Filters.from_url(filters.to_url()) == filters


@pytest.mark.parametrize(
    "params",
    [
        {"range": "forever"},
        {"from": "yesterday", "to": "now"},
        {"from": "2026-11-29T13:00:00Z"},
        {"from": "2026-11-29T14:00:00Z", "to": "2026-11-29T13:00:00Z"},
        {"from": "9999-12-31T00:00:00-23:00", "to": "2026-11-29T13:00:00Z"},
        {"from": "0001-01-01T00:00:00+14:00", "to": "2026-11-29T13:00:00Z"},
        {"from": "2026-11-29T13:00:00Z", "to": "9999-12-31T23:00:00-14:00"},
        {"worker": ""},
    ],
)
def test_what_is_wrong_in_a_link_falls_back_to_the_default(params: dict[str, str]) -> None:
    assert Filters.from_url(params) == Filters()


def test_times_with_another_offset_are_read_as_utc() -> None:
    filters = Filters.from_url({"from": "2026-11-29T14:00:00+01:00", "to": "2026-11-29T13:30:00"})
    assert filters.since == datetime(2026, 11, 29, 13)


def test_the_window_ends_with_the_watermarks_bucket() -> None:
    window = Filters(range="5m").window(WATERMARK)
    assert (window.since, window.until) == (datetime(2026, 11, 29, 13, 55), datetime(2026, 11, 29, 14))
    assert window.before().until == window.since


@pytest.mark.parametrize("length_s", RANGES_S.values())
def test_no_range_has_more_bins_than_a_chart_can_show(length_s: int) -> None:
    assert 20 <= length_s / bin_of(length_s) <= MOST_BINS


def test_the_longest_range_that_a_link_can_name_has_no_more_bins_than_a_chart_can_show() -> None:
    window = Filters.from_url({"from": "1970-01-01", "to": "2200-01-01"}).window(WATERMARK)
    assert window.length_s / window.bin_s <= MOST_BINS
    assert window.bin_s % 86_400 == 0


def test_a_window_before_the_data_is_cut_but_not_to_nothing() -> None:
    window = Filters().window(WATERMARK)
    assert window.from_data(datetime(2026, 11, 29, 13, 40)).since == datetime(2026, 11, 29, 13, 40)
    assert window.from_data(datetime(2026, 11, 29, 13, 59, 50)).since == datetime(2026, 11, 29, 13, 58)
    assert window.from_data(None) == window
    assert window.from_data(datetime(2026, 11, 1)) == window
