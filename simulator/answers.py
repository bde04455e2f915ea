"""What the mock model says: noise, but the same noise for the same prompt, and of tokens that a tokenizer finds again in the
text. So a client that sends the answer back as history sends the tokens that the engine has in its cache, as with real models."""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Sequence

import orjson

from router.prompts.tokens import LocalTokenizer
from simulator.words import WORDS


class AnswerWords:
    """The vocabulary of answers: words that are one token. Lists are parallel: token id -> text -> JSON form of the text."""

    def __init__(self, tokenizer: LocalTokenizer) -> None:
        self.text_of: dict[int, str] = {}
        for word in WORDS:
            ids = tokenizer.text(" " + word, add_special_tokens=False)
            if len(ids) == 1:
                self.text_of[int(ids[0])] = " " + word
        if not self.text_of:  # a tokenizer of other words; any ids will do, their text is then not found again
            self.text_of = {i: tokenizer.decode([i]) for i in range(16, min(116, tokenizer.vocabulary_size))}
        self.ids = list(self.text_of)
        self.json_of = {i: orjson.dumps(t) for i, t in self.text_of.items()}

    def draw(self, prompt: array[int], tokens: int, seed: int = 0) -> list[int]:
        """An answer of `tokens` token ids, told by the prompt and the seed alone."""
        return random.Random(zlib.crc32(prompt) ^ seed).choices(self.ids, k=tokens)

    def vector(self, prompt: array[int], dimensions: int = 8) -> list[float]:
        """An embedding, told by the prompt alone; numbers that a 32-bit float holds."""
        rng = random.Random(zlib.crc32(prompt))
        return [rng.randrange(-1024, 1024) / 1024 for _ in range(dimensions)]

    def text(self, ids: Sequence[int]) -> str:
        return "".join(self.text_of[i] for i in ids)
