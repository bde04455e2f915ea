"""Places on a terminal: what is wide counts twice, what is too long is cut or broken, and figures stay whole."""

from __future__ import annotations

import random

import pytest

from schemas.tables.words import LINE, aligned, cut, fitted, width, wrapped

WORDS = ["a", "figure", "🦊", "プレフィックス", "e\u0301tude", "x" * 40, "", "of"]


@pytest.mark.parametrize(("text", "places"), [("abc", 3), ("🦊", 2), ("日本", 4), ("e\u0301", 1), ("", 0)])
def test_wide_characters_take_two_places_and_combining_ones_none(text: str, places: int) -> None:
    assert width(text) == places


def test_what_is_cut_or_broken_fits_and_nothing_of_what_is_broken_is_lost() -> None:
    rng = random.Random(1)
    for _ in range(300):
        text, places = " ".join(rng.choices(WORDS, k=rng.randint(0, 12))), rng.randint(2, 60)
        assert width(cut(text, places)) <= places
        assert cut(text, places) == text or cut(text, places).endswith("…")
        lines = wrapped(text, places)
        assert max(map(width, lines)) <= places
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_columns_stay_in_line_whatever_is_in_them() -> None:
    lines = aligned(["name", "n"], [["🦊", "1"], ["plain", "22"]], {0})
    assert len({width(line) for line in lines}) == 1


def test_a_table_is_as_narrow_as_it_needs_to_be_and_its_figures_are_whole() -> None:
    rows = [["name " * 20, "1\u00a0000\u00a0000", "what it means " * 20]]
    heads, lines = fitted(["a", "how many tokens", "b"], rows, {0, 2})
    assert max(map(width, [*heads, *lines])) + 2 <= LINE
    assert "1\u00a0000\u00a0000" in lines[0] and len(lines) > 2
    assert fitted(["a", "b"], [["x", "1"]], {0}) == (["a  b"], ["x  1"])
