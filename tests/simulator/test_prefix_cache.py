"""The prefix cache against a naive twin, and rule by rule."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.kv_wire import AllBlocksCleared, BlockRemoved, BlockStored
from simulator.prefix_cache import BlockTable, PrefixCache

SIZE = 4


def tokens(*blocks: int) -> list[int]:
    """Whole blocks, each of one number."""
    return [b for b in blocks for _ in range(SIZE)]


def hold(cache: PrefixCache, prompt: list[int], **options: object) -> tuple[BlockTable, int]:
    """Admits a whole prompt at once. The table and the hit in tokens."""
    table = cache.open("r", prompt, **options)  # type: ignore[arg-type]
    hit = cache.lookup(table)
    assert cache.admit(table, hit, len(prompt) - len(hit) * cache.block_size)
    return table, len(hit) * cache.block_size


def use(cache: PrefixCache, prompt: list[int], **options: object) -> int:
    """Admits and releases. The hit in tokens."""
    table, hit = hold(cache, prompt, **options)
    cache.release(table)
    return hit


def test_the_last_token_is_always_computed() -> None:
    cache = PrefixCache(100, SIZE)
    use(cache, tokens(1, 2, 3))
    assert use(cache, tokens(1, 2, 3)) == 2 * SIZE
    assert use(cache, [*tokens(1, 2, 3), 9]) == 3 * SIZE


def test_only_full_blocks_are_cached_and_published() -> None:
    cache = PrefixCache(100, SIZE)
    use(cache, [*tokens(1), 5, 5])
    (event,) = cache.take_events()
    assert isinstance(event, BlockStored)
    assert event.token_ids == tokens(1) and len(event.block_hashes) == 1 and event.parent_block_hash is None


def test_equal_blocks_at_different_depths_have_different_hashes() -> None:
    cache = PrefixCache(100, SIZE)
    use(cache, tokens(1, 1, 1))
    (event,) = cache.take_events()
    assert isinstance(event, BlockStored)
    assert len(set(event.block_hashes)) == 3


def test_a_hit_publishes_nothing_and_the_rest_names_its_parent() -> None:
    cache = PrefixCache(100, SIZE)
    use(cache, tokens(1, 2))
    (first,) = cache.take_events()
    use(cache, tokens(1, 2, 3))
    (second,) = cache.take_events()
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[-1] and second.token_ids == tokens(3)


def test_equal_content_computed_twice_is_two_blocks_each_with_its_own_removal() -> None:
    cache = PrefixCache(5, SIZE)
    one, _ = hold(cache, tokens(7))
    two, hit = hold(cache, tokens(7))  # the only block holds the last token, so it is computed again
    assert hit == 0 and list(cache.resident().values()) == [2] and cache.cached_blocks == 2
    cache.release(one)
    cache.release(two)
    cache.take_events()
    other, _ = hold(cache, tokens(1, 2, 3, 4))
    removed = [e for e in cache.take_events() if isinstance(e, BlockRemoved)]
    assert len(removed) == 2 and removed[0] == removed[1]
    assert len(other.blocks) == 4


def test_the_tail_of_a_prefix_is_evicted_before_its_head_and_removals_come_first() -> None:
    cache = PrefixCache(4, SIZE)
    use(cache, tokens(1, 2, 3))
    (stored,) = cache.take_events()
    assert isinstance(stored, BlockStored)
    use(cache, tokens(8, 9))
    events = cache.take_events()
    assert [type(e) for e in events] == [BlockRemoved, BlockRemoved, BlockStored]
    assert [e.block_hashes[0] for e in events[:2]] == [stored.block_hashes[2], stored.block_hashes[1]]  # type: ignore[union-attr]
    assert use(cache, [*tokens(1, 2)]) == SIZE


def test_a_block_without_cached_content_is_taken_before_any_cached_one() -> None:
    cache = PrefixCache(5, SIZE)
    use(cache, tokens(1, 2))
    use(cache, [*tokens(3), 3])  # its second block stays partial
    cache.take_events()
    use(cache, tokens(4))
    assert not [e for e in cache.take_events() if isinstance(e, BlockRemoved)]


def test_a_hit_block_is_not_evicted_for_its_own_request() -> None:
    cache = PrefixCache(5, SIZE)
    use(cache, tokens(1, 2))
    use(cache, tokens(3, 4))
    cache.take_events()
    table, hit = hold(cache, tokens(1, 2, 5))
    assert hit == 2 * SIZE
    assert len([e for e in cache.take_events() if isinstance(e, BlockRemoved)]) == 1
    cache.release(table)


def test_what_does_not_fit_changes_nothing() -> None:
    cache = PrefixCache(4, SIZE)
    first, _ = hold(cache, tokens(1, 2))
    cache.take_events()
    table = cache.open("big", tokens(1, 5, 6))
    assert not cache.admit(table, cache.lookup(table), 2 * SIZE)
    assert cache.held_blocks == 2 and not cache.take_events() and table.blocks == []
    assert not cache.extend(first, 4 * SIZE)
    cache.release(first)
    assert cache.free_blocks == 3


def test_salt_separates_and_shows_in_the_first_blocks_extra_keys() -> None:
    cache = PrefixCache(100, SIZE)
    use(cache, tokens(1, 2, 3))
    assert use(cache, tokens(1, 2, 3), salt="tenant-4") == 0
    assert use(cache, tokens(1, 2, 3), salt="tenant-4") == 2 * SIZE
    event = cache.take_events()[1]
    assert isinstance(event, BlockStored) and event.extra_keys == [["tenant-4"], None, None]


def test_reset_is_refused_while_a_block_is_held_and_published_with_the_next_events() -> None:
    cache = PrefixCache(100, SIZE)
    table, _ = hold(cache, tokens(1, 2))
    cache.take_events()
    assert not cache.reset() and not cache.take_events()
    cache.release(table)
    assert cache.reset() and cache.cached_blocks == 0
    assert use(cache, tokens(1, 2)) == 0
    assert [type(e) for e in cache.take_events()] == [AllBlocksCleared, BlockStored]


def test_full_report_announces_the_hit_prefix_again_ahead_of_the_stores() -> None:
    cache = PrefixCache(100, SIZE)
    use(cache, tokens(1, 2, 3))
    cache.take_events()
    use(cache, tokens(1, 2, 4), full_report=True)
    again, own = cache.take_events()
    assert isinstance(again, BlockStored) and isinstance(own, BlockStored)
    assert again.parent_block_hash is None and again.token_ids == tokens(1, 2)
    assert own.token_ids == tokens(4)
    assert cache.cached_blocks == 4


def test_hashes_are_unsigned_64_bit_or_whole_digests() -> None:
    ints, whole = PrefixCache(100, SIZE), PrefixCache(100, SIZE, int_hashes=False)
    use(ints, tokens(1, 2)), use(whole, tokens(1, 2))
    (a,), (b,) = ints.take_events(), whole.take_events()
    assert isinstance(a, BlockStored) and isinstance(b, BlockStored)
    assert [int.from_bytes(d[-8:], "big") for d in b.block_hashes] == a.block_hashes
    assert all(len(d) == 32 for d in b.block_hashes)


def test_a_smaller_capacity_evicts_at_once_and_takes_held_blocks_when_released() -> None:
    cache = PrefixCache(9, SIZE)
    table, _ = hold(cache, tokens(1, 2, 3))
    use(cache, tokens(5, 6, 7))
    cache.take_events()
    cache.limit_capacity(2)
    assert len(cache.take_events()) == 3 and cache.free_blocks == 0 and cache.held_blocks == 3
    cache.release(table)
    assert cache.free_blocks == 2 and cache.held_blocks == 0 and len(cache.take_events()) == 1
    cache.limit_capacity(8)
    assert cache.free_blocks == 8
    with pytest.raises(ValueError, match="capacity must be 1 to 8"):
        cache.limit_capacity(9)


@dataclass
class NaiveBlock:
    references: int = 0
    content: tuple[int, ...] | None = None  # all tokens up to its end


class NaiveCache:
    """The same rules with lists and whole prefixes: no hashes, no links, quadratic."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [NaiveBlock() for _ in range(blocks - 1)]
        self.queue = list(range(blocks - 1))
        self.cached: list[int] = []  # in the order of caching
        self.events: list[tuple[str, tuple[int, ...]]] = []

    def find(self, prefix: tuple[int, ...]) -> int | None:
        return next((b for b in self.cached if self.blocks[b].content == prefix), None)

    def hit(self, prompt: list[int]) -> list[int]:
        hit = []
        for end in range(SIZE, len(prompt), SIZE):
            block = self.find(tuple(prompt[:end]))
            if block is None:
                break
            hit.append(block)
        return hit

    def admit(self, prompt: list[int]) -> list[int] | None:
        hit = self.hit(prompt)
        need = -(-len(prompt) // SIZE) - len(hit)
        if need > len([b for b in self.queue if b not in hit]):
            return None
        for b in hit:
            self.blocks[b].references += 1
            if b in self.queue:
                self.queue.remove(b)
        return self.grow(list(hit), prompt, len(hit))

    def grow(self, held: list[int], prompt: list[int], done: int) -> list[int] | None:
        need = -(-len(prompt) // SIZE) - len(held)
        if need > len(self.queue):
            return None
        for _ in range(need):
            b = self.queue.pop(0)
            content = self.blocks[b].content
            if content is not None:
                self.cached.remove(b)
                self.events.append(("removed", content))
            self.blocks[b] = NaiveBlock(1)
            held.append(b)
        for n in range(done, len(prompt) // SIZE):
            content = tuple(prompt[: (n + 1) * SIZE])
            self.blocks[held[n]].content = content
            self.cached.append(held[n])
            self.events.append(("stored", content))
        return held

    def release(self, held: list[int]) -> None:
        for b in reversed(held):
            self.blocks[b].references -= 1
            if self.blocks[b].references == 0:
                if self.blocks[b].content is None:
                    self.queue.insert(0, b)
                else:
                    self.queue.append(b)


Operation = st.one_of(
    st.tuples(st.just("admit"), st.lists(st.integers(1, 2), min_size=1, max_size=6), st.integers(0, SIZE - 1)),
    st.tuples(st.just("decode"), st.integers(0, 5), st.integers(1, 2)),
    st.tuples(st.just("release"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("reset"), st.just(0), st.just(0)),
)


@settings(max_examples=120, deadline=None)
@given(st.lists(Operation, max_size=40), st.integers(3, 14))
def test_it_agrees_with_the_naive_twin(operations: list[tuple[str, object, int]], blocks: int) -> None:
    cache, naive = PrefixCache(blocks, SIZE), NaiveCache(blocks)
    live: list[tuple[BlockTable, list[int]]] = []
    names: dict[int, tuple[int, ...]] = {}
    resident: Counter[tuple[int, ...]] = Counter()
    for kind, what, extra in operations:
        if kind == "admit":
            assert isinstance(what, list)
            prompt = [*tokens(*what), *([what[-1]] * extra)]
            table = cache.open("r", array("I", prompt))
            hit = cache.lookup(table)
            held = naive.admit(prompt)
            assert cache.admit(table, hit, len(prompt) - len(hit) * SIZE) is (held is not None)
            if held is not None:
                live.append((table, held))
                assert [b - 1 for b in table.blocks] == held
        elif kind == "decode" and live:
            assert isinstance(what, int)
            table, held = live[what % len(live)]
            done = len(table.tokens) // SIZE
            table.append(extra)
            if naive.grow(held, list(table.tokens), done) is None:
                assert not cache.extend(table, len(table.tokens))
                table.tokens.pop()
            else:
                assert cache.extend(table, len(table.tokens))
        elif kind == "release" and live:
            assert isinstance(what, int)
            table, held = live.pop(what % len(live))
            cache.release(table)
            naive.release(held)
        elif kind == "reset":
            if cache.reset():
                assert not live
                naive.cached.clear()
                for block in naive.blocks:
                    block.content = None
                naive.events.append(("cleared", ()))
            else:
                assert live
        for event in cache.take_events():
            expected = naive.events.pop(0)
            if isinstance(event, AllBlocksCleared):
                assert expected[0] == "cleared"
                resident.clear()
            elif isinstance(event, BlockRemoved):
                content = names[event.block_hashes[0]]
                assert expected == ("removed", content)
                resident[content] -= 1
                assert resident[content] >= 0
            else:
                content = names[event.parent_block_hash] if event.parent_block_hash is not None else ()
                for n, h in enumerate(event.block_hashes):
                    content = (*content, *event.token_ids[n * SIZE : (n + 1) * SIZE])
                    assert names.setdefault(h, content) == content
                    resident[content] += 1
                    assert expected == ("stored", content)
                    if n < len(event.block_hashes) - 1:
                        expected = naive.events.pop(0)
        assert not naive.events
        assert sum(resident.values()) == cache.cached_blocks <= blocks - 1
        assert cache.held_blocks == len({b for t, _ in live for b in t.blocks})
    for table, _ in live:
        cache.release(table)
    assert cache.free_blocks == blocks - 1
