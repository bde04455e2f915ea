"""The compiled cache on names behaves as the engine's model on tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from simulator.kv_wire import BlockRemoved
from simulator.name_cache import Held, NameCache
from simulator.prefix_cache import BlockTable, PrefixCache

BLOCK = 4


def names(digests: list[bytes]) -> np.ndarray:
    return np.array([int.from_bytes(d[-8:], "big") for d in digests], np.uint64)


class Both:
    """One request in both caches."""

    def __init__(self, model: PrefixCache, cache: NameCache, tokens: list[int], number: int) -> None:
        self.model, self.cache = model, cache
        self.table: BlockTable = model.open(str(number), tokens)
        self.held: Held | None = None
        self.computed = 0

    def admit(self, whole: bool) -> bool:
        model, cache, table = self.model, self.cache, self.table
        prompt = len(table.tokens)
        hit = model.lookup(table)
        chain = names(table.digests)
        assert cache.lookup(chain, (prompt - 1) // BLOCK) == len(hit)
        new = prompt - len(hit) * BLOCK
        new = new if whole else max(1, new // 2)
        reserve = prompt if whole else 0
        there = len(hit) * BLOCK + new
        went = model.admit(table, hit, new, reserve)
        self.held = cache.admit(chain, len(hit), there // BLOCK, -(-there // BLOCK), -(-reserve // BLOCK))
        assert (self.held is not None) == went
        self.computed = there
        return went

    def grow(self, more: int) -> bool:
        assert self.held is not None
        to = self.computed + more
        while len(self.table.tokens) < to:
            self.table.append(random.Random(to).randrange(3))
        chain = names(self.table.digests_to(to // BLOCK))
        went = self.model.extend(self.table, to)
        assert self.cache.extend(self.held, chain, to // BLOCK, -(-to // BLOCK)) == went
        self.computed = to if went else self.computed
        return went

    def release(self) -> None:
        assert self.held is not None
        self.model.release(self.table)
        self.cache.release(self.held)


def agree(model: PrefixCache, cache: NameCache) -> None:
    removed = [h for e in model.take_events() if isinstance(e, BlockRemoved) for h in e.block_hashes]
    assert cache.take_removed().tolist() == removed
    assert cache.resident() == model.resident()
    assert (cache.free_blocks, cache.held_blocks, cache.cached_blocks) == (model.free_blocks, model.held_blocks, model.cached_blocks)
    assert cache.capacity_blocks == model.capacity_blocks


@pytest.mark.parametrize("seed", range(30))
def test_random_work_has_the_same_hits_removals_and_residents(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(3, 40)
    model, cache = PrefixCache(size + 1, BLOCK), NameCache(size)
    running: list[Both] = []
    counts = dict.fromkeys(("hit", "full", "grown", "cleared"), 0)
    for n in range(300):
        dice = rng.random()
        if dice < 0.5:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 4))] * rng.randint(1, 6)  # few contents: hits and duplicates
            one = Both(model, cache, prompt, n)
            if one.admit(rng.random() < 0.7):
                counts["hit"] += model.lookup(one.table) != []
                running.append(one)
            else:
                counts["full"] += 1
        elif dice < 0.65 and running:
            counts["grown"] += rng.choice(running).grow(rng.randint(1, 2 * BLOCK))
        elif dice < 0.93 and running:
            running.pop(rng.randrange(len(running))).release()
        elif dice < 0.95:
            cleared = model.reset()
            assert cache.clear() == cleared
            counts["cleared"] += cleared
        elif dice < 0.98:
            blocks = rng.randint(1, size)
            model.limit_capacity(blocks)
            cache.limit_capacity(blocks)
        agree(model, cache)
    assert counts["hit"]
    assert counts["full"]
    assert counts["grown"]


def test_a_capacity_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        NameCache(0)
    with pytest.raises(ValueError, match="1 to 4 blocks, got 5"):
        NameCache(4).limit_capacity(5)
