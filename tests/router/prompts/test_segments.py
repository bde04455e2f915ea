import random
import re
import threading

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from router.prompts.segments import SegmentCache, _longest_of, encoded
from tests.router.recordings import TOKENIZER

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def real():
    return Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))


def made(pre_tokenizer, normalizer=None, **flags):
    vocabulary = {c: i for i, c in enumerate(sorted({*"abcdefgh ▁Ġ<|>_imstarende\n", *pre_tokenizers.ByteLevel.alphabet()}))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, **({"normalized": False} | flags)) for t in SPECIAL])
    return tokenizer


TOKENIZERS = {
    "real": real,
    "byte level with a space": lambda: made(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "byte level, lower case": lambda: made(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Lowercase()),
    "prepending normalizer": lambda: made(pre_tokenizers.Whitespace(), normalizers.Prepend("▁")),
    "metaspace always": lambda: made(pre_tokenizers.Metaspace(prepend_scheme="always")),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_put_together_are_the_whole(name):
    tokenizer = TOKENIZERS[name]()
    cache = SegmentCache.of(tokenizer, limit_bytes=20_000)
    assert cache is not None
    rng = random.Random(name)
    words = [*SPECIAL, *SPECIAL, " ", "\n", "read", " the", "file<", "<|im_", "|>", "Ab", "é", "  ", "<|pad|>", "cd"]
    for _ in range(400):
        text = "".join(rng.choice(words) for _ in range(rng.randrange(1, 40)))
        assert cache.ids(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids, repr(text)
    assert cache.hits > 100
    assert cache.kept_bytes <= 20_000


def test_the_longest_split_token_is_found_first_whatever_they_share():
    rng = random.Random(5)

    def word(letters):
        return "".join(rng.choice("ab<|.") for _ in range(rng.randrange(1, letters)))

    for _ in range(1500):
        words = {word(6) for _ in range(rng.randrange(1, 9))}
        one_by_one = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
        text = word(60)
        assert re.split(f"({_longest_of(words)})", text) == re.split(f"({one_by_one})", text), (words, text)
    re.purge()


@pytest.mark.parametrize(
    "tokenizer",
    [
        made(pre_tokenizers.Metaspace(prepend_scheme="first")),
        made(pre_tokenizers.ByteLevel(add_prefix_space=False), lstrip=True),
        made(pre_tokenizers.ByteLevel(add_prefix_space=False), single_word=True),
        made(pre_tokenizers.ByteLevel(add_prefix_space=False), normalized=True),
    ],
)
def test_where_pieces_do_not_stand_alone_there_is_no_cache(tokenizer):
    assert SegmentCache.of(tokenizer) is None


def test_a_piece_is_encoded_once():
    cache = SegmentCache.of(real())
    misses = cache.misses
    for turn in range(1, 6):
        cache.ids("".join(f"<|im_start|>user message {i}<|im_end|>" for i in range(turn)))
    assert cache.misses - misses == 5


def test_the_bound_holds_and_the_oldest_goes_first():
    cache = SegmentCache.of(real(), limit_bytes=5_000)
    for i in range(100):
        cache.ids(f"<|im_start|>the function number {i} reads the file")
        assert cache.kept_bytes <= 5_000
    misses = cache.misses
    cache.ids("<|im_start|>the function number 99 reads the file")
    assert cache.misses == misses
    cache.ids("<|im_start|>the function number 0 reads the file")
    assert cache.misses == misses + 1


def test_a_long_text_is_encoded_while_other_threads_run_on():
    tokenizer, text, done = real(), "read the user file and the function é 12\n" * 25_000, threading.Event()
    found = []

    def work():
        found.append(encoded(tokenizer, text, special=False))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    ticks = 0
    while not done.wait(0.001):
        ticks += 1
    thread.join()
    assert ticks > 10  # 2 with Tokenizer.encode
    assert found[0].dtype == np.uint32
    assert found[0].tolist() == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("special", [True, False])
def test_a_tokenizers_own_tokens_are_added_as_asked(special):
    tokenizer = made(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 7)])
    assert encoded(tokenizer, "abc", special).tolist() == tokenizer.encode("abc", add_special_tokens=special).ids
    assert len(encoded(tokenizer, "abc", special)) == 3 + special


def test_several_threads_get_the_same_ids():
    cache, tokenizer, wrong = SegmentCache.of(real(), limit_bytes=3_000), real(), []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(200):
            text = "".join(f"<|im_start|>turn {rng.randrange(30)} of the user<|im_end|>" for _ in range(5))
            if not np.array_equal(cache.ids(text), tokenizer.encode(text, add_special_tokens=False).ids):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_what_stands_before_a_border_stays_whatever_is_added():
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<a>", "<a>b", "b<c", "<c", "<end>")])
    cache = SegmentCache.of(tokenizer)
    rng, moved = random.Random(5), 0
    for _ in range(3000):
        stays = "".join(rng.choice(["<a>", "b", "<c", "<end>", "x", "<", "a>"]) for _ in range(rng.randrange(1, 8)))
        more = "".join(rng.choice(["<a>", "b", "<c", "<end>", "x", "<", "a>", "end>"]) for _ in range(rng.randrange(4)))
        earlier = rng.randrange(len(stays) + 1)
        ids, ((border, tokens), (border_before, tokens_before)) = cache.ids_and_borders(stays, (len(stays), earlier))
        assert cache.ids_and_borders(stays[:earlier], (earlier,))[1] == [(border_before, tokens_before)] or not border_before
        other = tokenizer.encode(stays[:earlier] + more, add_special_tokens=False).ids
        assert other[:tokens_before] == ids[:tokens_before].tolist()
        longer = tokenizer.encode(stays + more, add_special_tokens=False).ids
        assert longer[:tokens] == ids[:tokens].tolist()
        assert longer[tokens:] == tokenizer.encode((stays + more)[border:], add_special_tokens=False).ids
        moved += border > 0
    assert moved > 1000
