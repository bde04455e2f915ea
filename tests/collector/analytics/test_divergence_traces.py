"""How much of missed text is recognised, and where prompts differ, on public traces. Reference numbers: expected.json beside the traces.

Mini-SWE prompts are read as characters in blocks of 64, as the reference did; chunks are those of schemas/content.py over code points, 23
characters on average, where the reference had about 64. The cache has no end: what is missed was never sent with that beginning.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from collector.analytics.divergence import ContentIndex, Known, Told
from router.records.content import RecentPrompts
from schemas.block_hash import U32, HashKey, hash_chain
from schemas.content import Content, described
from simulator.traces import I32, I64, PARTS, lmcache_agents, ragpulse
from tests.public_traces import expected, trace

pytestmark = pytest.mark.traces

KEY = HashKey(1, 2)


@dataclass
class Recognised:
    """Tokens. blocks, chunks: by fingerprints alone, by chunks alone; either: as the collector does."""

    prompt: int = 0
    missed: int = 0
    blocks: int = 0
    chunks: int = 0
    either: int = 0

    def share(self, part: int) -> float:
        return part / self.missed


def blocks_alone(content: Content) -> Content:
    """With chunks that nobody knows."""
    return replace(content, chunks=np.zeros(1, np.uint64), chunk_tokens=np.array([content.prompt_tokens - content.first_token], np.uint32))


def here(told: Told) -> int:
    return int(told.run_tokens[told.run_known == Known.HERE].sum())


def recognised(prompts: Iterable[U32], block_size: int) -> Recognised:
    """Sends one prompt after the other past a cache without end."""
    out, cached = Recognised(), set[int]()
    by_either, by_blocks, by_chunks = ContentIndex(), ContentIndex(), ContentIndex()
    for number, ids in enumerate(prompts):
        names = hash_chain(KEY, 1, ids, block_size).tolist()
        held = next((i for i, name in enumerate(names) if name not in cached), len(names))
        cached.update(names)
        whole = described(KEY, ids, block_size, held, None, None)
        chunked, blocked = replace(whole, fingerprints=whole.fingerprints[:0]), blocks_alone(whole)
        out.prompt += len(ids)
        out.missed += len(ids) - whole.first_token
        out.either += here(by_either.tell(number, "p", whole))
        out.chunks += here(by_chunks.tell(number, "p", chunked))
        out.blocks += here(by_blocks.tell(number, "p", blocked))
        by_either.register(number, "p", whole)
        by_chunks.register(number, "p", chunked)
        by_blocks.register(number, "p", replace(blocked, chunks=blocked.chunks[:0], chunk_tokens=blocked.chunk_tokens[:0]))
    return out


def characters(text: str) -> U32:
    return np.array(memoryview(text.encode("utf-32-le")).cast("I"), np.uint32)


@pytest.fixture(scope="module")
def miniswe() -> list[tuple[float, str]]:
    requests = lmcache_agents(trace("lmcache-agent-trace/lmcache_agent_trace.tar.xz"), ["miniswe"])["miniswe"]
    assert len(requests) == 402
    return [(r.time_s, r.prompt) for r in requests]


def fixed_head(number: int, at_s: float) -> str:
    return f"Current time: {dt.datetime.fromtimestamp(at_s, dt.UTC):%Y-%m-%d %H:%M:%S.%f}\n"


def variable_head(number: int, at_s: float) -> str:
    return f"Request {number * number * 7919 % 100_003} at {int(at_s * 1e6) % 10 ** (number % 7 + 3)}\n"


def test_untouched_prompts_have_little_that_was_known_after_another_beginning(miniswe: list[tuple[float, str]]) -> None:
    numbers = expected("divergence_text")["miniswe"]
    found = recognised((characters(text) for _, text in miniswe), 64)
    assert 1 - found.missed / found.prompt == pytest.approx(numbers["prefix_hit"], abs=0.001)
    assert found.share(found.blocks) == pytest.approx(numbers["of_missed_chars_seen_before_aligned"], abs=0.01)
    assert found.share(found.chunks) == pytest.approx(numbers["cdc"], abs=0.1)
    assert found.share(found.either) >= found.share(found.chunks) >= numbers["cdc"]


def test_behind_a_time_of_fixed_width_at_the_head_nearly_all_is_recognised(miniswe: list[tuple[float, str]]) -> None:
    numbers = expected("divergence_text")["miniswe_with_fixed_width_timestamp_head"]
    found = recognised((characters(fixed_head(i, at_s) + text) for i, (at_s, text) in enumerate(miniswe)), 64)
    assert found.share(found.blocks) == pytest.approx(numbers["aligned"], abs=0.005)
    assert found.share(found.chunks) >= numbers["cdc"]
    assert found.share(found.either) >= 0.93


def test_behind_a_head_of_variable_width_nearly_all_is_recognised_by_chunks(miniswe: list[tuple[float, str]]) -> None:
    numbers = expected("divergence_text")["miniswe_with_variable_width_head"]
    found = recognised((characters(variable_head(i, at_s) + text) for i, (at_s, text) in enumerate(miniswe)), 64)
    assert found.share(found.chunks) >= numbers["cdc"]
    assert found.share(found.either) >= 0.95
    assert found.share(found.blocks) < 0.7


@pytest.mark.parametrize("block_size", [16, 64, 784])
def test_the_head_is_where_prompts_with_a_time_differ(miniswe: list[tuple[float, str]], block_size: int) -> None:
    """Of every fifth prompt: told exactly by the router's word, and to a chunk or block without."""
    index, recent, cached = ContentIndex(), RecentPrompts(), set[int]()
    before: list[U32] = []
    widths = []
    for i, (at_s, text) in enumerate(miniswe[::5]):
        ids = characters(fixed_head(i, at_s) + text[:5000])
        names = hash_chain(KEY, 1, ids, block_size).tolist()
        held = next((n for n, name in enumerate(names) if name not in cached), len(names))
        cached.update(names)
        content = described(KEY, ids, block_size, held, None, None)
        told = index.tell(i, "p", content)
        index.register(i, "p", content)
        low, high = told.difference(content.first_token)
        shared = recent.shared(("p", "t"), None, ids)
        if before:
            true = max(common(ids, other) for other in before)
            assert low <= true < high
            widths.append(high - low)
            assert shared is not None and shared <= true
            if shared >= content.first_token:
                assert told.difference(content.first_token, shared) == (shared, shared + 1)
        before.append(ids)
    assert max(widths) <= min(block_size, 64)


def common(a: U32, b: U32) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def rag_tokens(segments: I64, lengths: I32) -> U32:
    """Each content id as tokens of its own."""
    which = np.repeat(segments, lengths).astype(np.uint64)
    place = np.arange(len(which), dtype=np.uint64) - np.repeat(np.cumsum(lengths) - lengths, lengths).astype(np.uint64)
    mixed = (which * np.uint64(1 << 20) + place) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(47)).astype(np.uint32)


def test_ragpulse_prompts_differ_first_within_their_system_prompt() -> None:
    numbers = expected("ragpulse")
    index, cached = ContentIndex(), set[int]()
    within = tokens = missed = known = 0
    requests = ragpulse(trace("ragpulse"))
    for number, r in enumerate(requests):
        ids = rag_tokens(r.segment_ids, r.segment_tokens)
        names = hash_chain(KEY, 1, ids, 16).tolist()
        held = next((i for i, name in enumerate(names) if name not in cached), len(names))
        cached.update(names)
        content = described(KEY, ids, 16, held, None, None)
        told = index.tell(number, "p", content)
        index.register(number, "p", content)
        tokens += len(ids)
        missed += len(ids) - content.first_token
        known += here(told)
        system_tokens = int(r.segment_tokens[r.segment_parts == PARTS.index("sys_prompt")].sum())
        within += held < len(names) and told.difference(content.first_token)[1] <= system_tokens
    assert (len(requests), tokens) == (numbers["requests"], numbers["segment_tokens"])
    assert within == numbers["first_divergence_in_sys_prompt_requests"]
    assert 1 - missed / tokens == pytest.approx(numbers["ideal_prefix_hit_segments"], abs=0.001)
    whole_segments = numbers["missed_tokens_whose_content_was_seen_before"]
    assert 0.9 * whole_segments < known / missed < whole_segments + 0.01  # the chunk at a segment's border is lost with its neighbour
