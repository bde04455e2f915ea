"""The words that made-up text is made of: each is one token of `simulator/tokenizer` when a space precedes it, so lengths in
words are lengths in tokens. Other tokenizers work too; the engine then answers with those words that are one token there."""

from __future__ import annotations

import random

_TEXT = """
    the path code function class test error return value list dict string number read open search replace edit
    run build install check fix bug change commit branch merge review user tool call result input request
    response server client cache block prefix token model worker router queue latency memory disk network
    python shell line directory project module import export config option write file command minute hour
    second day first last next previous message question answer summary plan task step default new old same
    different each every which where when what with from then now update delete create remove help show
"""
WORDS = tuple(_TEXT.split())


def text(rng: random.Random, words: int) -> str:
    """`words` words, separated and preceded by a space."""
    return " " + " ".join(rng.choices(WORDS, k=words)) if words > 0 else ""
