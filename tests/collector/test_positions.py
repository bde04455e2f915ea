"""Where reading starts, and what is said when the log is not what it was."""

from __future__ import annotations

import pytest

from collector.pacing import too_far_ahead
from collector.positions import where_to_start

P = ("t", 3)


@pytest.mark.parametrize(
    ("stored", "again", "start", "end", "identity", "read_from", "before", "says", "lost", "incomplete"),
    [
        (None, None, 5, 9, "a", 5, 5, None, None, False),
        (7, None, 5, 9, "a", 7, 7, None, None, False),
        (7, 6, 5, 9, "a", 6, 7, None, None, False),
        (7, 7, 5, 9, "a", 7, 7, None, None, False),
        (7, 2, 5, 9, "a", 5, 7, None, None, True),
        (3, None, 5, 9, "a", 5, 5, "retention deleted 2 records of t/3 (offsets 3 to 4)", 2, True),
        (12, None, 5, 9, "a", 9, 9, "ends at 9, before the stored offset 12", None, False),
        (7, None, 0, 9, "b", 0, 0, "topic t was made anew", None, False),
        (7, None, 5, 9, None, 7, 7, None, None, False),
        (7, None, 7, 7, "a", 7, 7, None, None, False),
    ],
)  # fmt: skip
def test_where_to_start(stored, again, start, end, identity, read_from, before, says, lost, incomplete) -> None:  # type: ignore[no-untyped-def]
    found = where_to_start(P, stored, again, start, end, identity, "a")
    assert (found.read_from, found.before, found.lost_records, found.incomplete) == (read_from, before, lost, incomplete)
    assert (found.event is None) == (says is None)
    assert says is None or says in str(found.event)


def test_partitions_far_ahead_of_the_slowest_wait_and_those_caught_up_never_do() -> None:
    a, b, c = ("kv", 0), ("kv", 1), ("d", 0)
    assert too_far_ahead({a: 100.0, b: 50.0, c: 10.0}, 30.0) == {a, b}
    assert too_far_ahead({a: 100.0, b: 80.0}, 30.0) == set()
    assert too_far_ahead({}, 30.0) == set()
