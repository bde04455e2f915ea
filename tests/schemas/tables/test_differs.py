from __future__ import annotations

from typing import Any

import pytest

from schemas.tables.differs import differs

ROW: dict[str, Any] = {
    "route": "review", "template": None, "depth_from": 37, "depth_to": 38, "depth_share": 0.97, "diverged_tokens": 24_000_000,
    "share": 0.41,
}  # fmt: skip


def test_it_says_which_prompts_differ_where_and_what_that_costs() -> None:
    assert differs(ROW, 7200.0) == (
        "The prompts of route review differ at token 37; 12 M tokens an hour (41 % of their prompt tokens) are computed again for it."
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"template": "review"}, "of route review differ"),
        ({"template": "v7"}, "of template v7 (route review) differ"),
        ({"route": None}, "of kinds too many to tell apart differ"),
        ({"depth_from": 32, "depth_to": 36}, "differ between tokens 32 and 35;"),
        ({"depth_share": 0.2}, "differ at many depths, most often at token 37;"),
        ({"depth_from": None, "depth_to": None}, "differ, at a depth that is not known;"),
        ({"share": None}, "M tokens an hour are computed"),
        ({"share": 0.004}, "(under 1 % of their"),
        ({"diverged_tokens": 1998}, "; 999 tokens an hour"),
        ({"diverged_tokens": 1999.9}, "; 1.0 k tokens an hour"),
        ({"diverged_tokens": 2_468_000}, "; 1.2 M tokens an hour"),
        ({"diverged_tokens": 19_920_000}, "; 10 M tokens an hour"),
    ],
)
def test_what_is_not_known_or_scattered_is_said_so(change: dict[str, Any], says: str) -> None:
    assert says in differs(ROW | change, 7200.0)
