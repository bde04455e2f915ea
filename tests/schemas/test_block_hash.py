"""The canonical hash against SipHash's published vectors, its plain twin, and vectors of our own that are part of the contract."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import block_hash
from schemas.block_hash import HashKey, content_fingerprints, extra_digest, hash_chain, root_hash, salted_extras, siphash13

KEY = HashKey.from_bytes(bytes(range(16)))
OTHER_KEY = HashKey.from_bytes(bytes(range(1, 17)))


def naive_chain(key, root, tokens, block_size, extras=None):
    """hash_chain again, from its definition: bytes and the plain SipHash."""
    out, parent = [], root
    for b in range(len(tokens) // block_size):
        message = parent.to_bytes(8, "little") + (extras[b] if extras else 0).to_bytes(8, "little")
        message += b"".join(int(t).to_bytes(4, "little") for t in tokens[b * block_size : (b + 1) * block_size])
        parent = siphash13(key, message)
        out.append(parent)
    return out


def test_siphash_2_4_gives_the_papers_example():
    """Aumasson and Bernstein, "SipHash: a fast short-input PRF", appendix A: key 00..0f, message 00..0e."""
    assert block_hash._siphash(KEY, bytes(range(15)), 2, 4) == 0xA129CA6149BE45E5


@pytest.mark.parametrize(
    ("length", "expected_bytes"),
    [
        # SipHash-1-3 of 00 01 .. (length-1) under key 00..0f, as published with the Rust standard library's SipHasher13 tests.
        (0, "dcc40f055801acab"),
        (1, "93ca577df39bf4c9"),
        (2, "4dd4c74d029bcb82"),
        (3, "fbf7dde7b80af88b"),
    ],
)
def test_siphash_1_3_gives_the_published_vectors(length, expected_bytes):
    assert siphash13(KEY, bytes(range(length))).to_bytes(8, "little").hex() == expected_bytes


def test_our_own_vectors_are_part_of_the_contract():
    """Changing any of these breaks every recorded chain: raise the label's version instead."""
    root = root_hash(KEY, "coder")
    assert root == 0x18348E20AAE278CF
    assert hash_chain(KEY, root, range(8), 4).tolist() == [0x52546857B985923, 0x73A765AB7E69BE3B]
    assert root_hash(KEY, "coder", "adapter") == 0x904F2C53AD519FAB
    assert extra_digest(KEY, ["tenant-4"]) == 0xFF7EDFB1B150A666
    assert content_fingerprints(KEY, range(8), 4).tolist() == [0xC7B16FE159EEBE5E, 0xA9672F5ACFD14A1C]


@pytest.mark.skipif(sys.hash_info.algorithm != "siphash13", reason="this Python hashes bytes with another algorithm")
def test_siphash_1_3_equals_cpythons_own():
    """With PYTHONHASHSEED=0 CPython hashes bytes with SipHash-1-3 under a zero key (empty bytes apart)."""
    messages = [bytes(range(n)) for n in range(1, 40)]
    code = f"print([hash(m) & (1 << 64) - 1 for m in {messages!r}])"
    out = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": "0"}, capture_output=True, check=True, text=True)
    assert json.loads(out.stdout) == [siphash13(HashKey(0, 0), m) for m in messages]


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=200),
    st.integers(1, 40),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=16, max_size=16),
    st.data(),
)
def test_the_kernel_equals_its_plain_twin(tokens, block_size, root, raw_key, data):
    key = HashKey.from_bytes(raw_key)
    blocks = len(tokens) // block_size
    extras = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=blocks, max_size=blocks))
    assert hash_chain(key, root, tokens, block_size, np.array(extras, np.uint64)).tolist() == naive_chain(
        key, root, tokens, block_size, extras
    )
    content = [
        siphash13(key.content_key(), np.array(tokens[b * block_size : (b + 1) * block_size], "<u4").tobytes()) for b in range(blocks)
    ]
    assert content_fingerprints(key, tokens, block_size).tolist() == content


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=96), st.integers(1, 8), st.integers(0, 12))
def test_a_chain_continues_from_its_last_hash(tokens, block_size, cut_blocks):
    whole = hash_chain(KEY, 7, tokens, block_size)
    cut = min(cut_blocks, len(whole))
    rest = hash_chain(KEY, int(whole[cut - 1]) if cut else 7, tokens[cut * block_size :], block_size)
    assert whole[cut:].tolist() == rest.tolist()


def test_an_earlier_token_changes_every_later_name_but_not_the_content_fingerprint():
    tokens = list(range(64))
    changed = [999, *tokens[1:]]
    root = root_hash(KEY, "p")
    assert not set(hash_chain(KEY, root, tokens, 16).tolist()) & set(hash_chain(KEY, root, changed, 16).tolist())
    assert content_fingerprints(KEY, tokens, 16)[1:].tolist() == content_fingerprints(KEY, changed, 16)[1:].tolist()


def test_pool_lora_salt_and_key_separate_names():
    tokens = list(range(32))
    names = [
        hash_chain(key, root_hash(key, pool, lora), tokens, 16, salted_extras(key, 2, salt))[-1]
        for key in (KEY, OTHER_KEY)
        for pool in ("a", "b")
        for lora in (None, "x")
        for salt in (None, "s", "t")
    ]
    assert len(set(names)) == len(names)


def test_extra_digest_tells_values_apart_and_none_from_something():
    values = [["a"], ["a", "b"], ["ab"], [["a", 0]], [["a", 1]], [b"a"], [{"hex": "62"}], [None]]
    digests = [extra_digest(KEY, v) for v in values]
    assert len(set(digests)) == len(digests)
    assert 0 not in digests
    assert extra_digest(KEY, None) == extra_digest(KEY, []) == 0


def test_wrong_arguments_say_what_would_be_right():
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        hash_chain(KEY, 0, [1], 0)
    with pytest.raises(ValueError, match=r"expected shape \(2,\), got \(1,\)"):
        hash_chain(KEY, 0, range(8), 4, np.zeros(1, np.uint64))
    with pytest.raises(ValueError, match="32 hexadecimal digits"):
        HashKey.from_hex("abc")
    for wrong in ([-1] * 4, np.array([-1] * 4), np.array([1 << 32] * 4, np.uint64)):
        with pytest.raises(OverflowError):
            hash_chain(KEY, 0, wrong, 4)


def test_key_ids_tell_keys_apart_and_are_part_of_the_contract():
    assert KEY.key_id != OTHER_KEY.key_id
    assert KEY.key_id == "1d15081e"


def test_a_key_never_shows_itself():
    key = HashKey.from_hex("00112233445566778899aabbccddeeff")
    assert "secret" in repr(key)
    assert str(key.k0) not in f"{key} {key!r}"
    with pytest.raises(ValueError, match="hexadecimal") as e:
        HashKey.from_hex("not-a-key-but-secret")
    assert "secret" not in str(e.value)
