import random
import re
import threading

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from router.prompts import words as room
from router.prompts.words import MOST_CHARACTERS, Words, translated
from tests.router.recordings import TOKENIZER

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def served():
    return Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))


def cut_by(expression, **split):
    tokenizer = served()
    steps = [
        pre_tokenizers.Split(Regex(expression), **{"behavior": "isolated", **split}),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def texts(rng, n):
    words = [
        "read",
        " the",
        " file's",
        "\n",
        "\r\n",
        "  ",
        "\t",
        " I'LL",
        "don't",
        "12345",
        " 1",
        "...",
        ' {"a": [1]}',
        "\x1c",
        "\x0b",
        "_x",
        "/",
    ]
    for _ in range(n):
        yield "".join(rng.choice(words) if rng.random() < 0.7 else chr(rng.randrange(128)) for _ in range(rng.randrange(40)))


@pytest.mark.parametrize("expression", [None, QWEN, LLAMA, GPT4O])
def test_ids_are_those_of_the_tokenizer(expression):
    tokenizer = served() if expression is None else cut_by(expression)
    words = Words.of(tokenizer)
    assert words is not None
    told = 0
    for text in texts(random.Random(3), 1000):
        found = words.ids(text)
        assert found is None or found.tolist() == tokenizer.encode(text, add_special_tokens=False).ids, text
        told += found is not None
    assert told > 700


def test_what_is_not_ascii_or_long_goes_to_the_tokenizer():
    words = Words.of(served())
    assert words.ids("é") is None
    assert words.ids("a " * MOST_CHARACTERS) is None
    assert words.ids("").tolist() == []


@pytest.mark.parametrize(
    "expression", [r"(a)|b", r"^a|b", r"\p{Greek}", r"a&&b", r"\d{2}+", r"(?<=a)b", r"\w+", r"[a[b]]", r"é", r"[\p{Lo}]", r"\P{L}", r"a."]
)
def test_what_may_mean_something_else_is_not_translated(expression):
    assert translated(expression) is None


@pytest.mark.parametrize("expression", [None, QWEN, LLAMA, GPT4O])
def test_translated_expressions_know_what_is_left(expression):
    found = translated(room._GPT2 if expression is None else expression)
    assert isinstance(found, re.Pattern)
    assert found.groups == 0


def lower(tokenizer):
    tokenizer.normalizer = normalizers.Lowercase()


def prefix(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def added(tokenizer):
    tokenizer.add_tokens([AddedToken("file", normalized=True)])


def by_spaces(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()


def removed(tokenizer):
    tokenizer.pre_tokenizer = cut_by(QWEN, behavior="removed").pre_tokenizer


@pytest.mark.parametrize("change", [lower, prefix, added, by_spaces, removed])
def test_other_tokenizers_have_no_words(change):
    tokenizer = served()
    change(tokenizer)
    assert Words.of(tokenizer) is None


def test_a_model_of_another_kind_has_no_words():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "u": 1}, unk_token="u"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert Words.of(tokenizer) is None


def test_an_expression_that_leaves_characters_out_tells_nothing():
    tokenizer = cut_by(r"\p{L}+|\s+")
    words = Words.of(tokenizer)
    assert words is None or words.ids("a1b") is None


def test_words_are_bounded(monkeypatch):
    monkeypatch.setattr(room, "MOST_WORDS", 100)
    tokenizer = served()
    words = Words.of(tokenizer)
    rng = random.Random(1)
    for _ in range(100):
        text = " ".join(str(rng.randrange(10_000)) for _ in range(3))
        found = words.ids(text)
        assert found is None or found.tolist() == tokenizer.encode(text, add_special_tokens=False).ids
        assert len(words) <= 100


def test_several_threads_learn_words():
    tokenizer = served()
    words, wrong = Words.of(tokenizer), []

    def run(seed):
        for text in texts(random.Random(seed), 80):
            found = words.ids(text)
            if found is not None and found.tolist() != tokenizer.encode(text, add_special_tokens=False).ids:
                wrong.append(text)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
