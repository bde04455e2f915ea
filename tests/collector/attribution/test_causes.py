"""The rules on the facts of one request: a case for each, and conservation whatever comes in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collector.attribution.causes import IS_RESIDENT, NEVER_HERE, UNKNOWN, WAS_CLEARED, WAS_EVICTED, Causes, Facts, causes_of
from schemas.causes import Cause

HIT, GRANULARITY, TOO_SHORT, NAMESPACE, FIRST_SEEN, DIVERGED = (
    Cause.HIT,
    Cause.GRANULARITY,
    Cause.TOO_SHORT,
    Cause.NAMESPACE,
    Cause.FIRST_SEEN,
    Cause.DIVERGED,
)
IN_FLIGHT, STALE, MISROUTED, BYPASS = Cause.IN_FLIGHT, Cause.STALE_VIEW, Cause.MISROUTED, Cause.LOAD_BYPASS
CLEARED, EVICTED, ELSEWHERE, UNEXPLAINED = Cause.CLEARED, Cause.EVICTED, Cause.EVICTED_ELSEWHERE, Cause.UNEXPLAINED
B = 16


def facts(prompt: int, hit: int, fates: list[int], new: list[bool] | None = None, **more: object) -> Facts:
    n = len(fates)
    spans = {k: np.array(more.pop(k), np.int64).reshape(-1, 2) for k in ("flights", "content") if k in more}
    known = {"event_blocks": hit // B} | more | spans
    return Facts(prompt, B, n, hit, fates=np.array(fates, np.uint8), new=np.array(new or [False] * n), **known)  # type: ignore[arg-type]  # by name


def runs(c: Causes) -> list[tuple[Cause, int]]:
    return [(Cause(x), n) for x, n in zip(c.run_causes.tolist(), c.run_tokens.tolist(), strict=True)]


def told(*args: object, **more: object) -> list[tuple[Cause, int]]:
    return runs(causes_of(facts(*args, **more)))  # type: ignore[arg-type]  # as above


def test_the_rest_behind_the_last_whole_block_is_granularity() -> None:
    assert told(2 * B + 5, B, [IS_RESIDENT, WAS_EVICTED]) == [(HIT, B), (EVICTED, B), (GRANULARITY, 5)]


def test_the_last_block_of_a_wholly_cached_prompt_is_granularity_and_of_another_it_is_not() -> None:
    assert told(2 * B, B, [IS_RESIDENT, IS_RESIDENT]) == [(HIT, B), (GRANULARITY, B)]
    assert told(2 * B, 0, [WAS_EVICTED, WAS_EVICTED]) == [(EVICTED, 2 * B)]


def test_a_prompt_shorter_than_a_block_is_too_short_for_one() -> None:
    assert told(B - 1, 0, []) == [(TOO_SHORT, B - 1)]


def test_what_was_shared_inside_the_first_block_was_too_short_for_one() -> None:
    found = told(2 * B, 0, [NEVER_HERE] * 2, [True] * 2, content=[(4, DIVERGED), (10, FIRST_SEEN), (2 * B, DIVERGED)], shared_tokens=4)
    assert found == [(TOO_SHORT, 4), (FIRST_SEEN, 6), (DIVERGED, 2 * B - 10)]


def test_new_blocks_are_told_by_their_content_in_tokens() -> None:
    content = [(B, FIRST_SEEN), (B + 3, NAMESPACE), (2 * B + 8, DIVERGED), (3 * B + 2, FIRST_SEEN)]
    found = causes_of(facts(3 * B + 2, B, [IS_RESIDENT, NEVER_HERE, NEVER_HERE], ideal=1, content=content))
    assert runs(found) == [(HIT, B), (NAMESPACE, 3), (DIVERGED, B + 5), (FIRST_SEEN, 8), (GRANULARITY, 2)]
    assert found.blocks.tolist() == [HIT, DIVERGED, FIRST_SEEN]  # half and half: the first of the two in the order of causes


def test_new_content_that_no_decision_described_is_first_seen() -> None:
    assert told(2 * B + 1, B, [IS_RESIDENT, NEVER_HERE], ideal=1) == [(HIT, B), (FIRST_SEEN, B), (GRANULARITY, 1)]


def test_what_was_stored_between_the_dispatch_and_the_prefill_was_new_at_the_dispatch() -> None:
    assert told(B + 1, 0, [NEVER_HERE], [False], ideal=0) == [(FIRST_SEEN, B), (GRANULARITY, 1)]
    assert told(B + 1, 0, [NEVER_HERE], [False], ideal=1) == [(ELSEWHERE, B), (GRANULARITY, 1)]


def test_in_flight_is_asked_before_new_and_before_lost() -> None:
    found = told(4 * B + 1, 0, [WAS_EVICTED, WAS_EVICTED, NEVER_HERE, NEVER_HERE], ideal=2, flights=[(1, 3)])
    assert found == [(EVICTED, B), (IN_FLIGHT, 2 * B), (FIRST_SEEN, B), (GRANULARITY, 1)]


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({"selected": 1, "cheaper": 1, "elsewhere": 1}, STALE),
        ({"cheaper": 1, "elsewhere": 1}, MISROUTED),
        ({"elsewhere": 1}, BYPASS),
        ({}, EVICTED),
    ],
)
def test_the_first_rule_that_fits_wins(more: dict[str, int], cause: Cause) -> None:
    assert told(B + 1, 0, [WAS_EVICTED], **more) == [(cause, B), (GRANULARITY, 1)]


@pytest.mark.parametrize(("fate", "cause"), [(WAS_CLEARED, CLEARED), (NEVER_HERE, ELSEWHERE), (UNKNOWN, UNEXPLAINED)])
def test_what_became_of_it_here_tells_the_rest(fate: int, cause: Cause) -> None:
    assert told(B + 1, 0, [fate]) == [(cause, B), (GRANULARITY, 1)]


def test_a_block_that_only_a_lost_one_before_it_kept_from_being_hit_shares_its_cause() -> None:
    assert told(3 * B + 1, 0, [WAS_CLEARED, IS_RESIDENT, IS_RESIDENT]) == [(CLEARED, 3 * B), (GRANULARITY, 1)]


def test_fewer_hits_than_events_tell_are_unexplained_and_what_follows_is_told() -> None:
    found = told(4 * B + 1, B, [IS_RESIDENT, IS_RESIDENT, IS_RESIDENT, WAS_EVICTED], event_blocks=3)
    assert found == [(HIT, B), (UNEXPLAINED, 2 * B), (EVICTED, B), (GRANULARITY, 1)]


def test_more_hits_than_events_tell_are_hits() -> None:
    found = told(4 * B + 1, 3 * B, [IS_RESIDENT, WAS_EVICTED, WAS_EVICTED, WAS_EVICTED], event_blocks=1)
    assert found == [(HIT, 3 * B), (EVICTED, B), (GRANULARITY, 1)]


def test_hits_that_end_inside_a_block_leave_its_rest_to_its_cause() -> None:
    assert told(2 * B, B + 6, [IS_RESIDENT, WAS_EVICTED], event_blocks=1) == [(HIT, B + 6), (GRANULARITY, B - 6)]
    assert told(3 * B, 6, [WAS_EVICTED] * 3, event_blocks=0) == [(HIT, 6), (EVICTED, 3 * B - 6)]


def test_without_events_only_the_end_is_told() -> None:
    assert runs(causes_of(Facts(3 * B + 4, B, 3, B))) == [(HIT, B), (UNEXPLAINED, 2 * B), (GRANULARITY, 4)]
    assert runs(causes_of(Facts(3 * B + 4, 0, 0, B))) == [(HIT, B), (UNEXPLAINED, 2 * B + 4)]


def test_blocks_without_names_are_unexplained() -> None:
    assert told(3 * B + 4, B, [IS_RESIDENT, WAS_EVICTED]) == [(HIT, B), (EVICTED, B), (UNEXPLAINED, B), (GRANULARITY, 4)]


BLOCKS = 12
wild = st.integers(-3, BLOCKS + 3)


@given(
    prompt=st.integers(-5, BLOCKS * 7 + 5), size=st.integers(-1, 7), blocks=wild, hit=st.integers(-9, 99), event_blocks=wild, ideal=wild,
    selected=wild, cheaper=wild, elsewhere=wild, shared=st.integers(-3, 99), seed=st.integers(0, 999), known=st.integers(0, BLOCKS),
    flights=st.lists(st.tuples(wild, wild), max_size=3),
    content=st.lists(st.tuples(st.integers(0, 99), st.sampled_from([3, 4, 5])), max_size=5),
)  # fmt: skip
def test_whatever_comes_in_all_tokens_are_told_once(
    prompt: int, size: int, blocks: int, hit: int, event_blocks: int, ideal: int, selected: int, cheaper: int, elsewhere: int, shared: int,
    seed: int, known: int, flights: list[tuple[int, int]], content: list[tuple[int, int]],
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    found = causes_of(
        Facts(
            prompt, size, blocks, hit, event_blocks, ideal, selected, cheaper, elsewhere,
            np.array(flights, np.int64).reshape(-1, 2), rng.integers(0, 5, known).astype(np.uint8), rng.random(known) < 0.5,
            np.array(sorted(content), np.int64).reshape(-1, 2), shared,
        )
    )  # fmt: skip
    assert int(found.run_tokens.sum()) == max(0, prompt)
    assert found.tokens()[HIT] == min(max(0, hit), max(0, prompt))
    assert (found.run_tokens > 0).all()
    assert (np.diff(found.run_causes.astype(int)) != 0).all()
    assert len(found.blocks) <= max(0, blocks)
