from __future__ import annotations

import pytest

from dashboard import units


def plain(text: str | None) -> str | None:
    return None if text is None else text.replace("\u202f", " ")


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (units.share(0.8312), "83.1 %"),
        (units.share(0.0), "0.0 %"),
        (units.share(None), "not reported"),
        (units.points(-0.013), "-1.3 pp"),
        (units.points(None), None),
        (units.count(0), "0"),
        (units.count(None), "not reported"),
        (units.count(float("nan")), "not reported"),
        (units.count(9999), "9999"),
        (units.count(12_345), "12.3 k"),
        (units.count(999_999), "1.00 M"),
        (units.count(30_648_384, "B"), "30.6 MB"),
        (units.rate(1.607), "1.61 /s"),
        (units.seconds(0.00005), "50.0 µs"),
        (units.seconds(0.1823), "182 ms"),
        (units.seconds(0.9999), "1.00 s"),
        (units.seconds(75), "75 s"),
        (units.seconds(200), "3 min 20 s"),
        (units.seconds(7200), "2 h"),
        (units.age(0.84), "0.8 s"),
        (units.age(21.4), "21 s"),
        (units.window_text(3600), "1 h"),
        (units.window_text(30), "30 s"),
    ],
)
def test_numbers_look_the_same_everywhere(shown: str | None, text: str | None) -> None:
    assert plain(shown) == text
