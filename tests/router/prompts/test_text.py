import pytest

from router.prompts.text import PIECE_BYTES, PIECE_TOKENS, beginning_of, guessed_tokens, ids_chain, text_chain, text_of
from schemas.block_hash import HashKey, hash_chain, root_hash

KEY = HashKey(1, 2)
SYSTEM = {"role": "system", "content": "s" * 900}


def chain(body, lora=None, salt=None, pool="p", key=KEY):
    return text_chain(key, pool, lora, salt, text_of(body)).tolist()


@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        ({"messages": [SYSTEM]}, {"messages": [SYSTEM, {"role": "user", "content": "a" * 400}]}),
        ({"input": [SYSTEM]}, {"input": [SYSTEM, {"role": "user", "content": "a" * 400}]}),
        ({"prompt": "p" * 900}, {"prompt": "p" * 900 + "q" * 400}),
        ({"input": "p" * 900}, {"input": "p" * 900 + "q" * 400}),
        ({"system": "s" * 900, "messages": []}, None),
    ],
)
def test_a_longer_conversation_begins_with_the_names_of_the_shorter(shorter, longer):
    if longer is None:
        assert text_of(shorter) is None  # nothing was asked
        return
    first, second = chain(shorter), chain(longer)
    assert len(first) >= 3
    assert second[: len(first) - 1] == first[: len(first) - 1]  # the last piece may hold the end of the list
    assert len(second) > len(first)


def test_names_are_of_their_pool_adapter_salt_and_key_and_are_no_blocks():
    body = {"messages": [SYSTEM]}
    names = {tuple(chain(body, **kw)) for kw in ({}, {"lora": "a"}, {"salt": "a"}, {"pool": "q"}, {"key": HashKey(3, 4)})}
    assert len(names) == 5
    ids = list(range(200))
    assert ids_chain(KEY, "p", None, None, ids).tolist() != hash_chain(KEY, root_hash(KEY, "p"), ids, PIECE_TOKENS).tolist()


def test_tools_stand_in_front():
    body = {"messages": [SYSTEM], "tools": [{"name": "f"}]}
    assert chain(body)[0] != chain({"messages": [SYSTEM]})[0]


def test_media_count_by_their_digest_and_not_by_their_length():
    def body(data):
        parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}, {"type": "text", "text": "t" * 600}]
        return {"messages": [{"role": "user", "content": parts}]}

    assert guessed_tokens(text_of(body("A" * 1_000_000))) < 300
    assert chain(body("A" * 10_000)) == chain(body("A" * 10_000)) != chain(body("B" * 10_000))


def test_of_a_batch_the_longest_text_is_named():
    assert chain({"prompt": ["a", "p" * 900]}) == chain({"prompt": "p" * 900})


@pytest.mark.parametrize("body", [{}, {"messages": None}, {"prompt": ""}, {"messages": [{"content": "\ud800"}]}])
def test_a_body_without_a_prompt_has_no_text(body):
    assert text_of(body) is None


def test_only_whole_pieces_are_named():
    assert [len(chain({"prompt": "p" * n})) for n in (0 + 1, PIECE_BYTES, 2 * PIECE_BYTES)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("body", "beginning"),
    [
        ({"messages": [{"role": "system", "content": "abcdef"}, {"role": "user", "content": "x"}]}, "abcd"),
        ({"system": [{"type": "text", "text": "ab"}], "messages": [{"role": "user", "content": "x"}]}, "ab"),
        ({"instructions": "", "input": "x"}, "x"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "x"}]}]}, "x"),
        ({"prompt": ["abcdef", "x"]}, "abcd"),
        ({"prompt": [1, 2, 3]}, None),
        ({"messages": [None, {"content": {"content": {"content": {"content": {"content": "too deep"}}}}}]}, None),
        ({}, None),
    ],
)
def test_the_beginning_is_the_first_text_of_the_prompt(body, beginning):
    assert beginning_of(body, 4) == beginning
