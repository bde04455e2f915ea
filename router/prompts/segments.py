"""Token ids of the parts of a prompt that were seen before, exactly.

An agent sends the same system prompt, tools and history again at every call, and tokenizing is what costs most in a decision (29 ms at 32k
tokens). Added tokens such as `<|im_start|>` that are not normalized are hard split points: `tokenizers` cuts the text there first, and
normalizes, pre-tokenizes and encodes each piece by itself. So

    ids(p0 T1 p1 T2 p2) = ids(p0) [T1] ids(p1) [T2] ids(p2)

holds exactly, and the ids of a piece can be kept by its text. With chat templates a piece is a message.

Only where that equation holds: not when such a token strips or wants word borders, nor when a pre-tokenizer treats the text's start
specially (Metaspace's prepend_scheme `first`). `SegmentCache.of` says None there, and also when a probe text shows otherwise.

Kept pieces are bounded by bytes, least recently used first out. Safe from several threads.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np
from tokenizers import Tokenizer

from router.prompts.words import Words
from schemas.block_hash import U32

DEFAULT_BYTES = 64 << 20
_OVERHEAD_BYTES = 200  # of one entry, in Python's own objects
_PROBES = ("", " a", "a ", "\n\nb", " \t", "Ä é", "x1 2y")


def encoded(tokenizer: Tokenizer, text: str, special: bool) -> U32:
    """Token ids of `text`, u32, shape (n,), while other threads run on.

    `Tokenizer.encode` holds the GIL for as long as it takes (tokenizers 0.23: 0.65 s for 1 MB of text, nothing else moves);
    `encode_batch_fast` lets it go, gives the same ids, and leaves out the offsets that nobody asks for here (0.38 s).
    """
    return np.array(tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids, dtype=np.uint32)


class SegmentCache:
    def __init__(self, tokenizer: Tokenizer, splits: dict[str, int], limit_bytes: int = DEFAULT_BYTES) -> None:
        """splits: token text -> id of the hard split points. Use `of`, which knows when they are. longest: characters of the longest."""
        self._tokenizer = tokenizer
        self._splits = {text: np.array([number], np.uint32) for text, number in splits.items()}
        self.longest = max(map(len, splits))
        self._closed = frozenset(t for t in splits if not any(t in other[:-1] for other in splits if other != t))
        self._pattern = re.compile("(" + _longest_of(splits) + ")")
        self._limit_bytes = limit_bytes
        self._words = Words.of(tokenizer)
        self._kept: OrderedDict[str, U32] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer, limit_bytes: int = DEFAULT_BYTES) -> SegmentCache | None:
        """A cache for this tokenizer, or None when its pieces do not stand alone."""
        hard = {}
        for number, token in tokenizer.get_added_tokens_decoder().items():
            if token.normalized:
                continue  # found inside a piece, later
            if token.lstrip or token.rstrip or token.single_word or not token.content:
                return None
            hard[token.content] = int(number)
        if not hard or '"prepend_scheme":"first"' in tokenizer.to_str().replace(" ", "")[:1_000_000]:
            return None
        cache = cls(tokenizer, hard, limit_bytes)
        probe = "".join(p + t for t in hard for p in _PROBES)
        return cache if np.array_equal(cache.ids(probe), cache.encode(probe)) else None

    def ids(self, text: str) -> U32:
        """Token ids of `text` without the tokenizer's own start and end tokens, u32, shape (n,)."""
        return self._join(self._pattern.split(text))

    def ids_and_borders(
        self, text: str, growing: Sequence[int], new_characters: int | None = None
    ) -> tuple[U32, list[tuple[int, int]]] | None:
        """(ids, (characters, tokens) for each of `growing`): up to that character and token nothing changes while text[:growing[i]] stays
        the beginning of a longer text. None when more than `new_characters` are in pieces not kept.

        The border is the end of a split token that no longer one could swallow, whatever comes behind what stays.
        """
        pieces = self._pattern.split(text)
        if new_characters is not None and len(text) > new_characters and self._new_in(pieces) > new_characters:
            return None
        at = tokens = 0
        parts, ends = [], []
        for i, piece in enumerate(pieces):
            if i & 1:  # a split token, the pattern's one group
                ids = self._splits[piece]
                ends.append((at + len(piece), tokens + 1, 0 if piece in self._closed else self.longest))
            elif piece:
                ids = self._piece(piece)
            else:
                continue
            parts.append(ids)
            at += len(piece)
            tokens += len(ids)
        borders = [next(((at, tokens) for at, tokens, open_ in reversed(ends) if at <= stays - open_), (0, 0)) for stays in growing]
        return (np.concatenate(parts) if parts else np.empty(0, np.uint32)), borders

    def ids_if_seen(self, text: str, new_characters: int) -> U32 | None:
        """The same, or None when more than so many characters are in pieces not kept: then it takes a while."""
        pieces = self._pattern.split(text)
        return None if self._new_in(pieces) > new_characters else self._join(pieces)

    def _new_in(self, pieces: list[str]) -> int:
        """Characters in pieces that are not kept."""
        return sum(len(p) for p in pieces if p not in self._kept and p not in self._splits)

    def _join(self, pieces: list[str]) -> U32:
        parts = []
        for piece in pieces:
            if piece:
                split = self._splits.get(piece)
                parts.append(self._piece(piece) if split is None else split)
        return np.concatenate(parts) if parts else np.empty(0, np.uint32)

    def encode(self, text: str) -> U32:
        """The same without the cache."""
        return encoded(self._tokenizer, text, special=False)

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    def _piece(self, piece: str) -> U32:
        with self._lock:
            found = self._kept.get(piece)
            if found is not None:
                self._kept.move_to_end(piece)
                self.hits += 1
                return found
            self.misses += 1
        ids = None if self._words is None else self._words.ids(piece)
        if ids is None:
            ids = self.encode(piece)
        size = _size(piece, ids)
        if size > self._limit_bytes // 4:
            return ids
        with self._lock:
            if piece not in self._kept:
                self._kept[piece] = ids
                self._kept_bytes += size
                while self._kept_bytes > self._limit_bytes:
                    self._kept_bytes -= _size(*self._kept.popitem(last=False))
        return ids


def _longest_of(words: Collection[str]) -> str:
    """A pattern that matches the longest of these words, as `tokenizers` does. By what they share in front: word by word a
    text of code takes 850 ns a character where a tokenizer has 1,250 special tokens, so 14 ns, and the search holds the GIL."""
    first, last = min(words), max(words)
    beginning = first[: next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]
    rests: dict[str, list[str]] = {}
    for word in words:
        rests.setdefault(word[len(beginning) :][:1], []).append(word[len(beginning) :])
    may_end = rests.pop("", None) is not None
    longer = f"(?:{'|'.join(map(_longest_of, rests.values()))})" if rests else ""
    return re.escape(beginning) + longer + ("?" if longer and may_end else "")


def _size(piece: str, ids: U32) -> int:
    return len(piece) * (1 if piece.isascii() else 4) + ids.nbytes + _OVERHEAD_BYTES
