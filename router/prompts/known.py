"""Token ids and block names of a chat whose beginning was seen before, for the price of its new messages.

An agent sends its whole history again with every call. Known conversations are found by cheap marks of their messages (role, length, first
and last characters), and taken only when messages, tools and settings are equal, value by value: a look-up can miss, never be wrong.

                  kept of an earlier request               this request
    messages      m0 .. mk                                 m0 .. mk, mk+1 .. mn
    text          head p0 .. pk | tail                     head p0 .. pk | pk+1 .. pn tail
    ids           stem, up to the last border before |     stem + ids(rest of pk, pk+1 .. tail)

A border is the end of a split token (segments.py), so ids of both sides stand alone. With a template of the growing form (templates.py)
only m0 and the new messages are rendered. With any other template (and where `developer` messages have to be moved) the whole is rendered,
and what was kept holds if the new text begins with the kept one; then only ids and names are saved. Block names are kept with the stem, by
adapter, salt and block size, and continued.

Bounded by bytes, least recently used out first: a growing conversation's older steps go before its newest. Safe from several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from router.prompts.asked import Chat
from router.prompts.segments import SegmentCache
from router.prompts.templates import ChatTemplate
from router.prompts.tokens import LocalTokenizer
from schemas.block_hash import U32, U64

_MARK_CHARACTERS = 24
_ENTRY_BYTES = 1_000  # of one conversation, in Python's own objects
_MESSAGE_BYTES = 400
_CHAINS = 8  # combinations of adapter, salt and block size that a conversation is kept for
_FIRST_CHARACTERS = 2_000  # a first message of so many is kept by itself, for conversations that share it
_UNSURE_CHARACTERS = 256  # end of a text that other templates than growing ones may write differently the next time
QUICK_MESSAGES = 48
"""More messages than these take over half a millisecond to render."""
QUICK_CHARACTERS = 100_000

ChainKey = tuple[str | None, str | None, int, bool]


class TooLong(Exception):  # noqa: N818 - a value, named for what it is
    """The prompt's text is over the limit."""


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A conversation of `len(messages)` messages, its `characters` of text up to the border, and what stays of it in longer ones.

    values: what its template gets. text: up to the border and a little beyond (other templates than growing ones). stem: ids up to the
    border. rest: text behind the border that stays (growing templates). tail: ids behind the border, of this very conversation; None where
    the template asks for the date, or nobody asked for this conversation itself.
    """

    messages: Sequence[Mapping[str, Any]]
    chat: Chat
    values: Mapping[str, Any]
    text: str
    characters: int
    stem: U32
    rest: str
    tail: U32 | None
    held_bytes: int
    chains: dict[ChainKey, U64] = field(default_factory=dict)

    def begins(self, chat: Chat) -> bool:
        n, mine = len(self.messages), self.chat
        return self.messages == chat.messages[:n] and mine.tools == chat.tools and mine.values == chat.values

    def keep_chain(self, key: ChainKey, chain: U64, before: int) -> None:
        """before: tokens of the tokenizer's own in front of the stem."""
        if len(self.chains) < _CHAINS or key in self.chains:
            self.chains[key] = chain[: (before + len(self.stem)) // key[2]]


class ChatIds(NamedTuple):
    """ids: of the whole prompt. base: what they begin with was known from there. made: what is kept of them."""

    ids: U32
    base: Known | None
    made: Known | None


class KnownChats:
    """Chats of one tokenizer whose pieces stand alone."""

    def __init__(self, tokenizer: LocalTokenizer, segments: SegmentCache, limit_bytes: int) -> None:
        self._tokenizer, self._segments, self._limit_bytes = tokenizer, segments, limit_bytes
        self._kept: OrderedDict[int, Known] = OrderedDict()
        self._lock = threading.Lock()
        self.kept_bytes = 0
        self.hits = self.misses = 0

    def read(self, chat: Chat, characters: int, most_characters: int = 0, new_characters: int | None = None) -> ChatIds | None:
        """Token ids without the tokenizer's own additions. characters: about as many are in the chat.

        With new_characters None comes back when it would take a while: more than so many to tokenize anew, or much to render.
        Raises UnsupportedPrompt, and TooLong for a text over most_characters (0: no limit).
        """
        template = self._tokenizer.template(chat)
        marks = _marks(chat)
        known = self._find(chat, marks)
        if known is not None and known.tail is not None and len(known.messages) == len(chat.messages):
            return ChatIds(np.concatenate([known.stem, known.tail]), known, None)
        grows = template.grows and (template.knows_developer or not any(m.get("role") == "developer" for m in chat.messages))
        to_render = len(chat.messages) - (len(known.messages) if known and grows else 0)
        if new_characters is not None and (to_render > QUICK_MESSAGES or (known is None and characters > QUICK_CHARACTERS)):
            return None
        values = self._tokenizer.template_values(chat) if known is None else known.values
        base, begin, stays, behind, text = self._written(chat, template, values, known, grows)
        if most_characters and len(behind) + (0 if base is None else base.characters) > most_characters:
            raise TooLong
        growing_from = len(stays) if grows else len(behind) - _UNSURE_CHARACTERS
        found = self._made(chat, values, base, stays, behind, growing_from, new_characters, template.timeless, text)
        if found is not None and found.made is not None:
            self._keep(marks[-1], found.made)
            if len(begin) >= _FIRST_CHARACTERS and len(chat.messages) > 1:
                self._keep_first(chat, values, begin, marks[0])
        return found

    def _written(
        self, chat: Chat, template: ChatTemplate, values: Mapping[str, Any], known: Known | None, grows: bool
    ) -> tuple[Known | None, str, str, str, str]:
        """(what it begins with, else the text up to the second message, what stays behind the border, all text behind it, the whole text
        where that has to be kept)."""
        messages = chat.messages
        if not grows:
            text = template.render(self._tokenizer.conversation(template, messages), values)
            base = known if known is not None and known.text and text.startswith(known.text) else None
            return base, "", "", text if base is None else text[base.characters :], text
        if known is not None:
            new = [messages[0], *messages[len(known.messages) :]]
            *pieces, tail = template.new_pieces(self._tokenizer.conversation(template, new), values)
            stays = known.rest + "".join(pieces)
            return known, "", stays, stays + tail, ""
        head, first, *pieces, tail = template.pieces(self._tokenizer.conversation(template, messages), values)
        stays = "".join((head, first, *pieces))
        return None, head + first, stays, stays + tail, ""

    def _made(
        self, chat: Chat, values: Mapping[str, Any], base: Known | None, stays: str, behind: str, growing_from: int,
        new_characters: int | None, timeless: bool, text: str,
    ) -> ChatIds | None:  # fmt: skip
        found = self._segments.ids_and_border(behind, growing_from, new_characters)
        if found is None:
            return None
        ids, border, border_tokens = found
        before = 0
        if base is not None:
            ids = np.concatenate([base.stem, ids])
            before = base.characters
            border_tokens += len(base.stem)
        letters = (before + len(behind)) * (2 if text else 1) * (1 if behind.isascii() else 2)
        made = Known(
            chat.messages if base is None else [*base.messages, *chat.messages[len(base.messages) :]],
            chat if base is None else base.chat, values, text[: before + border + self._segments.longest], before + border,
            ids[:border_tokens], stays[border:], ids[border_tokens:] if timeless else None,
            _ENTRY_BYTES + _MESSAGE_BYTES * len(chat.messages) + 2 * ids.nbytes + letters,
        )  # fmt: skip
        return ChatIds(ids, base, made)

    def _keep_first(self, chat: Chat, values: Mapping[str, Any], begin: str, mark: int) -> None:
        """The first message by itself, for other conversations that share it."""
        if mark not in self._kept:
            first = Chat(chat.messages[:1], chat.tools, chat.values)
            found = self._made(first, values, None, begin, begin, len(begin), None, False, "")
            if found is not None and found.made is not None:
                self._keep(mark, found.made)

    def _find(self, chat: Chat, marks: list[int]) -> Known | None:
        """The longest conversation that this one begins with."""
        for mark in reversed(marks):
            known = self._kept.get(mark)
            if known is not None and known.begins(chat):
                with self._lock:
                    if mark in self._kept:
                        self._kept.move_to_end(mark)
                    self.hits += 1
                return known
        self.misses += 1
        return None

    def _keep(self, mark: int, made: Known) -> None:
        if made.held_bytes > self._limit_bytes // 4:
            return
        with self._lock:
            old = self._kept.pop(mark, None)
            self._kept[mark] = made
            self.kept_bytes += made.held_bytes - (old.held_bytes if old is not None else 0)
            while self.kept_bytes > self._limit_bytes:
                self.kept_bytes -= self._kept.popitem(last=False)[1].held_bytes


def _marks(chat: Chat) -> list[int]:
    """A hash for each beginning of the conversation, from little of each message."""
    mark = hash((len(chat.tools or ()), len(chat.values), chat.values.get("add_generation_prompt") is False))
    out = []
    for message in chat.messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and content and isinstance(content[-1], Mapping):
            content = content[-1].get("text")
        if isinstance(content, str):
            mark = hash((mark, len(content), content[:_MARK_CHARACTERS], content[-_MARK_CHARACTERS:]))
        else:
            mark = hash((mark, None))
        out.append(mark)
    return out
