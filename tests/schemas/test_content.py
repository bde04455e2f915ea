"""Content-defined chunks: against their plain twin, by vectors that are part of the contract, and that shifted text is found again."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.block_hash import HashKey, content_fingerprints, siphash13
from schemas.content import BORDER_BITS, MAX_TOKENS, MIN_TOKENS, content_chunks, content_of, described, namespace_of
from schemas.requests import Decision, pack_hashes, pack_lengths

KEY = HashKey.from_bytes(bytes(range(16)))
OTHER_KEY = HashKey.from_bytes(bytes(range(1, 17)))
MASK = (1 << 64) - 1

ids_of = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**32 - 1)), max_size=400)


def naive_chunks(key, tokens, first=0):
    """content_chunks again, from its definition: every window computed anew, bytes and the plain SipHash."""
    sub = HashKey(siphash13(key, b"warmwatch/chunk/1/0"), siphash13(key, b"warmwatch/chunk/1/1"))
    seed = siphash13(key, b"warmwatch/chunk/1/seed")

    def border(i):
        rolling = 0
        for k in range(4):
            if i - k >= 0:
                mixed = (tokens[i - k] + seed) * 0x9E3779B97F4A7C15 & MASK
                mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & MASK
                rolling += (mixed >> 3) << 16 * k
        return (rolling & MASK) >> (64 - BORDER_BITS) == 0

    out, start = [], first
    for i in range(first, len(tokens)):
        length = i + 1 - start
        if i + 1 == len(tokens) or length == MAX_TOKENS or (length >= MIN_TOKENS and border(i)):
            out.append((siphash13(sub, b"".join(int(t).to_bytes(4, "little") for t in tokens[start : i + 1])), length))
            start = i + 1
    return out


def chunks(tokens, first=0, key=KEY):
    names, lengths = content_chunks(key, np.array(tokens, np.uint32), first)
    return list(zip(names.tolist(), lengths.tolist(), strict=True))


def words(seed, n, vocabulary=50_000):
    return np.random.default_rng(seed).integers(0, vocabulary, n).tolist()


@settings(deadline=None)  # the first call compiles
@given(ids_of, st.integers(0, 40))
def test_the_kernel_equals_its_plain_twin(tokens, first):
    first = min(first, len(tokens))
    assert chunks(tokens, first) == naive_chunks(KEY, tokens, first)


def test_the_twins_agree_on_long_runs_of_one_token():
    for tokens in ([7] * 500, [0] * 129, [2**32 - 1] * 70):
        assert chunks(tokens) == naive_chunks(KEY, tokens)


def test_vectors():
    """Part of the contract: other routers must come to the same names."""
    assert chunks(range(100)) == [
        (0x1D818909076F2F5D, 14), (0x45A11F3A79FA8CD1, 26), (0xF0BB5348B480E496, 12), (0x00C3CFD821E44BEB, 11), (0x10FFF7872B45083F, 37),
    ]  # fmt: skip
    assert namespace_of(KEY, None, None) == 0x92843459D808EBA8
    assert namespace_of(KEY, "a", "s") == 0x31E9C5A2C06A006F


@settings(deadline=None)  # the first call compiles
@given(ids_of)
def test_chunks_cover_every_token_once_within_their_bounds(tokens):
    lengths = [length for _, length in chunks(tokens)]
    assert sum(lengths) == len(tokens)
    assert all(MIN_TOKENS <= length <= MAX_TOKENS for length in lengths[:-1])
    assert all(1 <= length <= MAX_TOKENS for length in lengths[-1:])


@pytest.mark.parametrize("shift", [1, 3, 16, 61])
def test_text_that_is_shifted_is_found_again_after_a_few_chunks(shift):
    text = words(1, 3000)
    known = {name for name, _ in chunks(text)}
    found = sum(length for name, length in chunks(words(2, shift) + text) if name in known)
    assert found > 0.94 * len(text)


def test_text_is_found_again_wherever_its_description_starts():
    text = words(3, 3000)
    known = {name for name, _ in chunks(text)}
    for first in (16, 160, 1600):
        assert sum(length for name, length in chunks(text, first) if name in known) > 3000 - first - 4 * MAX_TOKENS


def test_one_changed_token_changes_a_few_chunks_only():
    text = words(4, 3000)
    changed = [*text[:1000], text[1000] + 1, *text[1001:]]
    assert len(set(chunks(text)) - set(chunks(changed))) <= 6


def test_neither_names_nor_borders_are_told_without_the_key():
    text = words(5, 3000)
    own, other = chunks(text), chunks(text, key=OTHER_KEY)
    assert not {name for name, _ in own} & {name for name, _ in other}
    assert [length for _, length in own] != [length for _, length in other]


def test_a_chunk_of_a_blocks_tokens_has_another_name_than_the_block():
    tokens = words(6, 16)
    assert content_fingerprints(KEY, tokens, 16).tolist() != [name for name, _ in chunks(tokens)]


def test_namespaces_are_told_apart_whatever_is_in_their_names():
    pairs = [(None, None), ("a", None), (None, "a"), ("", None), ("a", "b"), ("a,b", None), ("a\0b", None), ('a","b', None)]
    assert len({namespace_of(KEY, lora, salt) for lora, salt in pairs}) == len(pairs)
    assert namespace_of(KEY, "a", None) != namespace_of(OTHER_KEY, "a", None)


def test_content_must_begin_within_the_prompt():
    assert chunks([1, 2], first=2) == []
    for first in (-1, 3):
        with pytest.raises(ValueError, match="within the prompt's 2 tokens"):
            content_chunks(KEY, np.array([1, 2], np.uint32), first)


def test_what_a_decision_describes_is_read_back_whole():
    tokens = np.array(words(7, 1000), np.uint32)
    made = described(KEY, tokens, 16, 10, "adapter", "salt")
    record = Decision(
        request_id="r", time_s=1.0, router="a", pool="p", model="m", path="/", policy="cost", policy_version="1", token_source="exact",
        worker="w", prompt_tokens=1000, block_size=16, namespace=made.namespace, content_from=10, content=pack_hashes(made.fingerprints),
        chunks=pack_hashes(made.chunks), chunk_tokens=pack_lengths(made.chunk_tokens),
    )  # fmt: skip
    read = content_of(Decision.model_validate_json(record.model_dump_json()))
    assert read is not None
    assert (read.namespace, read.block_size, read.first_token, read.prompt_tokens) == (namespace_of(KEY, "adapter", "salt"), 16, 160, 1000)
    assert read.fingerprints.tolist() == content_fingerprints(KEY, tokens, 16)[10:].tolist()
    assert list(zip(read.chunks.tolist(), read.chunk_tokens.tolist(), strict=True)) == naive_chunks(KEY, tokens.tolist(), 160)
    assert content_of(record.model_copy(update={"content_from": None})) is None


def test_arrays_of_another_kind_give_the_same_chunks():
    tokens = np.array(words(8, 400), np.uint32)
    frozen = tokens.copy()
    frozen.flags.writeable = False
    for same in (frozen, tokens.astype(np.int64), np.repeat(tokens, 2)[::2], tokens.tolist()):
        names, lengths = content_chunks(KEY, np.asarray(same), 7)
        assert list(zip(names.tolist(), lengths.tolist(), strict=True)) == chunks(tokens.tolist(), 7)
