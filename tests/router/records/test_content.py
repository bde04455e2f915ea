"""What is recorded of a prompt's content, and how much of it recent prompts of its kind share."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from router.prompts.prompt import Prompt
from router.records.content import KEPT_KINDS, KEPT_PROMPTS, KEPT_TOKENS, RecentPrompts, content_fields
from schemas.block_hash import HashKey, hash_chain
from schemas.content import described
from schemas.requests import unpack_hashes, unpack_lengths

KEY = HashKey(1, 2)
KIND = ("p", "t")
IDS = np.random.default_rng(1).integers(0, 50_000, 10_000).astype(np.uint32)


def prompt_of(tokens: int = 1000, **more: Any) -> Prompt:
    ids = IDS[:tokens]
    given: dict[str, Any] = {"source": "exact", "tokens": tokens, "chain": hash_chain(KEY, 1, ids, 16), "block_size": 16, "ids": ids}
    return Prompt(guessed_tokens=tokens, **given | more)


def fields_of(prompt: Prompt, overlap: int | None = 0) -> dict[str, Any]:
    return content_fields(KEY, prompt, overlap, KIND, None, RecentPrompts())


def test_what_some_worker_holds_is_left_out() -> None:
    found = fields_of(prompt_of(lora="l", salt="s"), 320)
    made = described(KEY, IDS[:1000], 16, 20, "l", "s")
    assert found["content_from"] == 20
    assert found["namespace"] == made.namespace
    assert unpack_hashes(found["content"]).tolist() == made.fingerprints.tolist()
    assert unpack_hashes(found["chunks"]).tolist() == made.chunks.tolist()
    assert unpack_lengths(found["chunk_tokens"]).tolist() == made.chunk_tokens.tolist()


def test_a_prompt_that_is_held_whole_is_described_by_its_tail_alone() -> None:
    found = fields_of(prompt_of(), 10_000)
    assert found["content_from"] == 62
    assert unpack_hashes(found["content"]).tolist() == []
    assert unpack_lengths(found["chunk_tokens"]).tolist() == [8]


def test_what_was_not_looked_up_is_described_from_its_beginning() -> None:
    assert fields_of(prompt_of(), None)["content_from"] == 0


@pytest.mark.parametrize(
    "more", [{"source": "text"}, {"chain": None}, {"block_size": None}, {"ids": None}, {"prompts": 2}, {"reads_cache": False}]
)
def test_nothing_is_said_of_what_the_record_does_not_name(more: dict[str, Any]) -> None:
    assert fields_of(prompt_of(**more)) == {}


class NaiveRecent:
    """The same in plain Python: (session, tokens) by place, and places by age."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[str | None, list[int]]] = {}
        self.oldest_first = list(range(KEPT_PROMPTS))

    def shared(self, session: str | None, ids: list[int]) -> int | None:
        common = {place: self.common(ids, other) for place, (_, other) in self.kept.items()}
        most = max(common.values(), default=0)
        differs = any(n == most and n < min(len(self.kept[place][1]), len(ids)) for place, n in common.items())
        same = [place for place, (s, _) in self.kept.items() if session is not None and s == session]
        continued = [place for place, n in common.items() if n == len(self.kept[place][1])]
        if ids:
            place = same[0] if same else max(continued) if continued else self.oldest_first[0]
            self.oldest_first = [p for p in self.oldest_first if p != place] + [place]
            self.kept[place] = session, ids
        return most if differs else None

    @staticmethod
    def common(a: list[int], b: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_it_keeps_and_compares_as_its_plain_twin() -> None:
    for seed in range(60):
        rng, recent, naive = random.Random(seed), RecentPrompts(), NaiveRecent()
        for _ in range(60):
            ids = [rng.randint(0, 1) for _ in range(rng.randint(0, 7))]
            session = rng.choice([None, "a", "b", "c", "d", "e", "f", "g", "h"])
            assert recent.shared(KIND, session, np.array(ids, np.uint32)) == naive.shared(session, ids)


def test_prompts_with_a_time_at_their_head_differ_there_even_in_one_conversation() -> None:
    recent = RecentPrompts()
    text = IDS[:2000].tolist()
    found = []
    for turn in range(8):
        ids = [*text[:37], 60_000 + turn, *text[37 : 500 + 100 * turn]]
        found.append(recent.shared(KIND, f"s{turn % 2}", np.array(ids, np.uint32)))
    assert found == [None] + [37] * 7


def test_a_conversation_that_goes_on_differs_from_nothing_and_keeps_one_place() -> None:
    recent = RecentPrompts()
    assert recent.shared(KIND, "other", np.concatenate([IDS[:800], [1]]).astype(np.uint32)) is None
    assert recent.shared(KIND, "s", IDS[:900]) == 800
    assert [recent.shared(KIND, session, IDS[:n]) for session in ("s", None) for n in range(1000, 9000, 500)] == [None] * 32
    assert recent.shared(KIND, "new", np.concatenate([IDS[:800], [1, 2]]).astype(np.uint32)) is None  # "other" is still kept


def test_what_is_alike_as_far_as_it_is_kept_has_no_known_difference() -> None:
    recent = RecentPrompts()
    recent.shared(KIND, "a", IDS)
    changed = IDS.copy()
    changed[KEPT_TOKENS] += 1
    assert recent.shared(KIND, "b", changed) is None
    changed[KEPT_TOKENS - 1] += 1
    assert recent.shared(KIND, "c", changed) == KEPT_TOKENS - 1


def test_kinds_are_apart_and_the_one_that_was_silent_longest_goes_first() -> None:
    recent = RecentPrompts()
    a, b = np.array([1, 2], np.uint32), np.array([1, 3], np.uint32)
    recent.shared(("p", "first"), None, a)
    for n in range(KEPT_KINDS - 1):
        assert recent.shared(("p", str(n)), None, a) is None
    assert recent.shared(("p", "first"), None, b) == 1
    recent.shared(("q", "first"), None, a)
    assert recent.shared(("p", "0"), None, b) is None
    assert recent.held_bytes() <= KEPT_KINDS * KEPT_PROMPTS * KEPT_TOKENS * 4
