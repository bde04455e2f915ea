"""Which content was known when, against a plain dictionary of all that was registered; forgetting; where two prompts differ."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collector.analytics.content_index import ContentIndex, Known, Told
from schemas.block_hash import HashKey
from schemas.content import Content, described

KEY = HashKey(1, 2)
BLOCK = 4


class NaiveIndex:
    """Everything that was registered, by pool, piece and namespace."""

    def __init__(self) -> None:
        self.times: dict[tuple[str, int], dict[int, float]] = {}

    def register(self, time_s: float, pool: str, content: Content) -> None:
        for name in [*content.fingerprints.tolist(), *content.chunks.tolist()]:
            by_namespace = self.times.setdefault((pool, name), {})
            by_namespace[content.namespace] = min(time_s, by_namespace.get(content.namespace, time_s))

    def piece(self, before_s: float, pool: str, name: int, namespace: int) -> Known:
        by_namespace = self.times.get((pool, name), {})
        if by_namespace.get(namespace, np.inf) < before_s:
            return Known.HERE
        return Known.ELSEWHERE if any(t < before_s for t in by_namespace.values()) else Known.NOT

    def tokens(self, before_s: float, pool: str, content: Content) -> list[Known]:
        """Of each token from first_token on, its block and its chunk asked one by one."""
        chunk_of = np.repeat(content.chunks, content.chunk_tokens).tolist()
        out = []
        for i, chunk in enumerate(chunk_of):
            found = {self.piece(before_s, pool, chunk, content.namespace)}
            if i // content.block_size < len(content.fingerprints):
                found.add(self.piece(before_s, pool, int(content.fingerprints[i // content.block_size]), content.namespace))
            out.append(Known.HERE if Known.HERE in found else Known.ELSEWHERE if Known.ELSEWHERE in found else Known.NOT)
        return out


def content(fingerprints: list[int], chunks: list[int], lengths: list[int], namespace: int = 0, first: int = 0) -> Content:
    return Content(
        namespace, BLOCK, first, first + sum(lengths), np.array(fingerprints, np.uint64), np.array(chunks, np.uint64),
        np.array(lengths, np.uint16),
    )  # fmt: skip


def by_token(told: Told) -> list[Known]:
    return [Known(k) for k in np.repeat(told.run_known, told.run_tokens).tolist()]


def drawn(rng: random.Random) -> Content:
    lengths = [rng.randint(1, 6) for _ in range(rng.randint(0, 6))]
    blocks = sum(lengths) // BLOCK
    names = [0, 2**64 - 1, *range(1, 14)]
    return content(rng.choices(names, k=blocks), rng.choices(names, k=len(lengths)), lengths, rng.choice([7, 2**64 - 1, 3]), 4)


@settings(deadline=None)  # the first call compiles
@given(st.integers(0, 2**32))
def test_it_answers_as_a_plain_dictionary_whatever_the_order_of_registering(seed: int) -> None:
    rng = random.Random(seed)
    index, naive = ContentIndex(), NaiveIndex()
    for _ in range(rng.randint(0, 25)):
        time_s, pool, what = float(rng.randint(1, 9)), rng.choice("pq"), drawn(rng)
        for _ in range(rng.randint(1, 2)):
            index.register(time_s, pool, what)
        naive.register(time_s, pool, what)
    for _ in range(10):
        before_s, pool, what = rng.randint(1, 9) + rng.choice([0.0, 0.5]), rng.choice("pq"), drawn(rng)
        told = index.tell(before_s, pool, what)
        assert by_token(told) == naive.tokens(before_s, pool, what)
        assert (told.run_tokens > 0).all()
        assert (np.diff(told.run_known.astype(int)) != 0).all()


def test_ones_own_registration_and_later_ones_do_not_count() -> None:
    index = ContentIndex()
    what = content([1], [2, 3], [3, 2])
    index.register(5.0, "p", what)
    assert by_token(index.tell(5.0, "p", what)) == [Known.NOT] * 5
    assert by_token(index.tell(5.1, "p", what)) == [Known.HERE] * 5
    index.register(9.0, "p", what)
    assert by_token(index.tell(6.0, "p", what)) == [Known.HERE] * 5
    index.register(2.0, "p", what)
    assert by_token(index.tell(3.0, "p", what)) == [Known.HERE] * 5


def test_a_token_is_known_by_its_block_or_by_its_chunk() -> None:
    index = ContentIndex()
    index.register(1.0, "p", content([10], [20], [4]))
    told = index.tell(2.0, "p", content([10, 11], [98, 20, 99], [5, 2, 3]))
    assert (told.run_known.tolist(), told.run_tokens.tolist()) == ([Known.HERE, Known.NOT, Known.HERE, Known.NOT], [4, 1, 2, 3])


def test_pools_are_worlds_of_their_own_and_namespaces_are_told_apart() -> None:
    index = ContentIndex()
    index.register(1.0, "p", content([10], [20], [4], namespace=1))
    assert by_token(index.tell(2.0, "q", content([10], [20], [4], namespace=1))) == [Known.NOT] * 4
    assert by_token(index.tell(2.0, "p", content([10], [20], [4], namespace=2))) == [Known.ELSEWHERE] * 4
    index.register(3.0, "p", content([10], [20], [4], namespace=2))
    assert by_token(index.tell(4.0, "p", content([10], [20], [4], namespace=2))) == [Known.HERE] * 4
    assert by_token(index.tell(2.5, "p", content([10], [20], [4], namespace=2))) == [Known.ELSEWHERE] * 4


def pieces(start: int, n: int) -> Content:
    return content([], list(range(start, start + n)), [1] * n)


def known(index: ContentIndex, what: Content) -> int:
    return by_token(index.tell(1e9, "p", what)).count(Known.HERE)


def test_what_was_registered_longest_ago_is_forgotten_first_and_never_more_than_half() -> None:
    index = ContentIndex(2000)
    for t in range(50):
        index.register(float(t), "p", pieces(1000 * t, 100))
        index.register(float(t), "p", pieces(10**6, 50))
        assert index.entries <= 2000
        assert known(index, pieces(10**6, 50)) == 50
        if t >= 7:
            assert sum(known(index, pieces(1000 * (t - k), 100)) for k in range(8)) == 800
    assert known(index, pieces(0, 100)) == 0
    assert index.forgotten > 3000
    assert index.held_bytes() == 24 * 2 * 4096
    assert by_token(index.tell(0.5, "p", pieces(10**6, 1))) == [Known.HERE]  # the earliest time came along


def test_a_prompt_with_more_pieces_than_there_is_room_for_is_taken_all_the_same() -> None:
    index = ContentIndex(1000)
    index.register(1.0, "p", pieces(0, 5000))
    assert index.entries <= 1000
    assert known(index, pieces(4600, 400)) == 400


def test_a_loaded_index_goes_on_exactly_as_the_saved_one() -> None:
    rng = random.Random(3)
    one, two = ContentIndex(1000), ContentIndex(1000)
    for t in range(300):
        if t == 150:
            two.load({k: v.copy() for k, v in one.save().items()})
        what = content([], [rng.randint(0, 2000) for _ in range(20)], [1] * 20, namespace=rng.randint(0, 2))
        one.register(float(t), "p", what)
        if t >= 150:
            two.register(float(t), "p", what)
            assert by_token(one.tell(float(t), "p", what)) == by_token(two.tell(float(t), "p", what))
            assert (one.entries, one.forgotten) == (two.entries, two.forgotten)


def test_too_small_a_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1,000"):
        ContentIndex(10)


TEXT = np.random.default_rng(5).integers(0, 50_000, 4000).astype(np.uint32)


def prompt(*parts: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.concatenate([np.asarray(p, np.uint32) for p in parts])


def told_after(earlier: Any, later: Any, block: int, first_block: int = 0) -> Told:
    index = ContentIndex()
    index.register(1.0, "p", described(KEY, earlier, block, 0, None, None))
    return index.tell(2.0, "p", described(KEY, later, block, first_block, None, None))


@pytest.mark.parametrize("differs_at", [0, 5, 37, 300, 783])
def test_where_prompts_differ_within_a_long_block_is_told_to_a_chunk(differs_at: int) -> None:
    a, b = prompt(TEXT[:differs_at], [60_001] * 4, TEXT[differs_at:]), prompt(TEXT[:differs_at], [60_002] * 5, TEXT[differs_at:])
    low, high = told_after(a, b, 784).difference(0)
    assert low <= differs_at < high
    assert high - low <= 64


def test_where_prompts_differ_is_never_told_outside_of_the_block_whose_name_is_new() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        at, block = rng.randint(0, 500), rng.choice([1, 16, 64])
        a, b = prompt(TEXT[:at], [60_001], TEXT[at:600]), prompt(TEXT[:at], [60_002], TEXT[at:600])
        first = at // block
        low, high = told_after(a, b, block, rng.randint(0, first)).difference(first * block)
        assert first * block <= low <= at < high <= (first + 1) * block


def test_the_decisions_own_word_is_exact_unless_the_names_say_that_more_was_shared() -> None:
    told = told_after(TEXT[:100], TEXT[50:150], 16)
    assert told.difference(32, 37) == (37, 38)
    assert told.difference(32, 80) == (80, 81)
    low, high = told.difference(48, 37)
    assert 48 <= low < high <= 64
    assert told.difference(96)[1] <= 100


def test_most_of_a_prompt_behind_a_changed_head_is_known() -> None:
    told = told_after(prompt([1, 2, 3], TEXT), prompt([4, 5, 6, 7, 8], TEXT), 16)
    assert by_token(told).count(Known.HERE) > 0.97 * len(TEXT)
