"""Token ids and block names of a chat whose beginning was seen before, for the price of its new messages.

An agent sends its whole history again with every call. Known conversations are found by cheap marks of their messages (role, length, first
and last characters), and taken only when messages, tools and settings are the same, value by value: a look-up can miss, never be wrong.
The same means what the template may write the same: `==` passes over the order of fields, 1 beside true beside 1.0, and who made a tool
call, so what has any of these is compared as JSON (`_written`).

                  kept of an earlier request               this request
    messages      m0 .. mk                                 m0 .. mk, mk+1 .. mn
    text          head p0 .. pk | tail                     head p0 .. pk | pk+1 .. pn tail
    ids           stem, up to the last border before |     stem + ids(rest of pk, pk+1 .. tail)

A border is the end of a split token (segments.py), so ids of both sides stand alone. With a template of the growing form (templates.py)
only m0 and the new messages are rendered. With any other template (and where `developer` messages have to be moved) the whole is rendered,
and what was kept holds if the new text begins with the kept one; then only ids and names are saved. Block names are kept with the stem, by
adapter, salt and block size, and continued.

A conversation is kept without its last message, too (`short`): an agent that puts another last message behind the same history, or asks a
question anew, finds all before it.

Bounded by bytes, least recently used out first: a growing conversation's older steps go before its newest. Counted is all that a client
may have put into what is kept, fields that no template reads too. Safe from several threads.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import orjson

from router.frozen import value
from router.prompts.asked import Chat
from router.prompts.conversation import OrderedCall, UnsupportedPrompt
from router.prompts.segments import SegmentCache
from router.prompts.templates import ChatTemplate
from router.prompts.tokens import LocalTokenizer
from schemas.block_hash import U32, U64

_MARK_CHARACTERS = 24
_WHOLE_CHARACTERS = 1_000
"""Of a text that is hashed whole for its mark: quicker than cutting its ends off."""
_ENTRY_BYTES = 1_000  # of one conversation, in Python's own objects
_FRONT_BYTES = 8  # for a byte of JSON: 5 of tools as Python's objects, and their text
_PLAIN = frozenset((str, type(None)))
_CHAINS = 8  # combinations of adapter, salt and block size that a conversation is kept for
_FIRST_CHARACTERS = 2_000  # a first message of so many is kept by itself, for conversations that share it
_UNSURE_CHARACTERS = 256  # end of a text that other templates than growing ones may write differently the next time
QUICK_MESSAGES = 48
"""More messages than these take over half a millisecond to render."""
QUICK_CHARACTERS = 100_000
_MARKED_MESSAGES = 2_000
"""More messages than these take over a millisecond to be looked up."""

ChainKey = tuple[str | None, str | None, int, bool]


class TooLong(Exception):  # noqa: N818 - a value, named for what it is
    """The prompt's text is over the limit."""


@dataclass(slots=True, eq=False)
class _Front:
    """Tools and settings, which many conversations share. written: as JSON, values: what the template gets. users: conversations kept."""

    written: bytes
    values: Mapping[str, Any]
    users: int = 0

    @property
    def held_bytes(self) -> int:
        return _FRONT_BYTES * len(self.written)


@value()
class Known:
    """A conversation of `len(messages)` messages, its `characters` of text up to the border, and what stays of it in longer ones.

    odd: what `==` passes over of the messages. text: up to the border and a little beyond (other templates than growing ones). stem: ids up
    to the border. rest: text behind the border that stays, and end: what the template writes behind all messages (growing templates; it
    depends on the first message and the front alone). tail: ids behind the border, of this very conversation; None where the template asks
    for the date, or nobody asked for this conversation itself. short: the same without its last message, whose arrays are parts of these.
    """

    messages: Sequence[Mapping[str, Any]]
    messages_bytes: int
    odd: bytes
    front: _Front
    text: str
    characters: int
    stem: U32
    rest: str
    end: str | None
    tail: U32 | None
    held_bytes: int
    short: tuple[int, Known] | None = None  # by its mark
    chains: dict[ChainKey, U64] = field(default_factory=dict)

    def begins(self, messages: Sequence[Mapping[str, Any]], front: bytes) -> bool:
        beginning = messages[: len(self.messages)]
        if self.front.written != front or self.messages != beginning:
            return False
        return not self.odd or self.odd == _odd(beginning)  # what equals texts is texts: nothing odd is passed over there

    def keep_chain(self, key: ChainKey, chain: U64, before: int) -> None:
        """before: tokens of the tokenizer's own in front of the stem."""
        if len(self.chains) < _CHAINS or key in self.chains:
            self.chains[key] = chain[: (before + len(self.stem)) // key[2]]
            if self.short is not None:
                self.short[1].keep_chain(key, chain, before)


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
        self._short: dict[int, tuple[int, Known]] = {}  # by their own marks; with the marks of those that they are a part of
        self._fronts: dict[bytes, _Front] = {}
        self._lock = threading.Lock()
        self.kept_bytes = 0
        self.hits = self.misses = 0
        """Chats told, with and without something known of them."""

    def read(self, chat: Chat, characters: int, most_characters: int = 0, new_characters: int | None = None) -> ChatIds | None:
        """Token ids without the tokenizer's own additions. characters: about as many are in the chat.

        With new_characters None comes back when it would take a while: more than so many to tokenize anew, or much to render.
        Raises UnsupportedPrompt, and TooLong for a text over most_characters (0: no limit).
        """
        template = self._tokenizer.template(chat)
        if not chat.messages:
            raise UnsupportedPrompt("a chat without messages")
        if new_characters is not None and len(chat.messages) > _MARKED_MESSAGES:
            return None
        written = _written([chat.tools, chat.values])
        marks = _marks(written, chat.messages)
        known = self._find(chat, written, marks)
        if known is not None and known.tail is not None and len(known.messages) == len(chat.messages):
            self._told(hit=True)
            return ChatIds(np.concatenate([known.stem, known.tail]), known, None)
        grows = template.grows and (template.knows_developer or not any(m.get("role") == "developer" for m in chat.messages))
        to_render = len(chat.messages) - (len(known.messages) if known and grows else 0)
        new = characters - (0 if known is None else known.characters)
        if new_characters is not None and (to_render > QUICK_MESSAGES or new > QUICK_CHARACTERS):
            return None
        front = known.front if known is not None else self._fronts.get(written) or _Front(written, self._tokenizer.template_values(chat))
        base, begin, stays, last, behind, text = self._texts(chat, template, front.values, known, grows)
        if new_characters is not None and len(behind) > QUICK_CHARACTERS:
            return None
        if most_characters and len(behind) + (0 if base is None else base.characters) > most_characters:
            raise TooLong
        growing_from = len(stays) if grows else len(behind) - _UNSURE_CHARACTERS
        end = behind[len(stays) :] if grows else None
        found = self._made(
            chat.messages, marks, front, base, stays, last, end, behind, growing_from, new_characters, template.timeless, text
        )  # fmt: skip
        if found is not None and found.made is not None:
            self._told(hit=base is not None)
            self._keep(marks[-1], found.made)
            if len(begin) >= _FIRST_CHARACTERS and len(chat.messages) > 1:
                self._keep_first(chat.messages[:1], front, begin, end, marks[0])
        return found

    def _texts(
        self, chat: Chat, template: ChatTemplate, values: Mapping[str, Any], known: Known | None, grows: bool
    ) -> tuple[Known | None, str, str, int, str, str]:
        """(what it begins with, else the text up to the second message, what stays behind the border, how much of that is the last
        message's where it is new, all text behind it, the whole text where that has to be kept)."""
        messages = chat.messages
        if not grows:
            text = template.render(self._tokenizer.conversation(template, messages), values)
            base = known if known is not None and known.text and text.startswith(known.text) else None
            return base, "", "", 0, text if base is None else text[base.characters :], text
        if known is not None:
            plain = None if template.verbatim is None or known.end is None else template.verbatim.pieces(messages[len(known.messages) :])
            if plain is not None and known.end is not None:
                stays = known.rest + "".join(plain)
                return known, "", stays, len(plain[-1]) if len(plain) > 1 else 0, stays + known.end, ""
            new = [messages[0], *messages[len(known.messages) :]]
            *pieces, tail = template.new_pieces(self._tokenizer.conversation(template, new), values)
            stays = known.rest + "".join(pieces)
            return known, "", stays, len(pieces[-1]) if len(pieces) > 1 else 0, stays + tail, ""
        head, first, *pieces, tail = template.pieces(self._tokenizer.conversation(template, messages), values)
        stays = "".join((head, first, *pieces))
        return None, head + first, stays, len(pieces[-1]) if pieces else 0, stays + tail, ""

    def _made(
        self, messages: Sequence[Mapping[str, Any]], marks: list[int], front: _Front, base: Known | None, stays: str, last: int,
        end: str | None, behind: str, growing_from: int, new_characters: int | None, timeless: bool, text: str,
    ) -> ChatIds | None:  # fmt: skip
        found = self._segments.ids_and_borders(behind, (growing_from, len(stays) - last), new_characters)
        if found is None:
            return None
        ids, ((border, border_tokens), (short_border, short_tokens)) = found
        new = messages if base is None else messages[len(base.messages) :]
        before, messages_bytes, odd = 0, sum(map(_bytes_of, new)), _odd(new)
        if base is not None:
            ids = np.concatenate([base.stem, ids])
            border_tokens += len(base.stem)
            messages, before = [*base.messages, *new], base.characters
            messages_bytes, odd = base.messages_bytes + messages_bytes, base.odd + odd
        begun, rest = text[: before + border + self._segments.longest], stays[border:]
        held_bytes = _ENTRY_BYTES + messages_bytes + 2 * ids.nbytes + sum(map(sys.getsizeof, (messages, odd, begun, rest, end)))
        short = None
        if last and short_border:  # else nothing new is known of it
            stem = ids[: short_tokens + (0 if base is None else len(base.stem))]
            all_but_one = messages[:-1]
            short_rest, short_odd = stays[short_border : len(stays) - last], _odd(all_but_one) if odd else b""
            held_bytes += _ENTRY_BYTES + sum(map(sys.getsizeof, (all_but_one, short_rest, short_odd)))
            short = marks[-2], Known(
                all_but_one, messages_bytes - _bytes_of(messages[-1]), short_odd, front, "", before + short_border, stem, short_rest,
                end, None, 0,
            )  # fmt: skip
        made = Known(
            messages, messages_bytes, odd, front, begun, before + border, ids[:border_tokens], rest, end,
            ids[border_tokens:] if timeless else None, held_bytes, short,
        )  # fmt: skip
        return ChatIds(ids, base, made)

    def _keep_first(self, first: Sequence[Mapping[str, Any]], front: _Front, begin: str, end: str | None, mark: int) -> None:
        """The first message by itself, for other conversations that share it."""
        if mark not in self._kept:
            found = self._made(first, [mark], front, None, begin, 0, end, begin, len(begin), None, False, "")
            if found is not None and found.made is not None:
                self._keep(mark, found.made)

    def _find(self, chat: Chat, front: bytes, marks: list[int]) -> Known | None:
        """The longest conversation that this one begins with."""
        for mark in reversed(marks):
            known = self._kept.get(mark)
            if known is None:
                mark, known = self._short.get(mark, (0, None))
            if known is not None and known.begins(chat.messages, front):
                with self._lock:
                    if mark in self._kept:
                        self._kept.move_to_end(mark)
                return known
        return None

    def _told(self, hit: bool) -> None:
        with self._lock:
            self.hits += hit
            self.misses += not hit

    def _keep(self, mark: int, made: Known) -> None:
        if made.held_bytes + made.front.held_bytes > self._limit_bytes // 4:
            return
        with self._lock:
            old = self._kept.pop(mark, None)
            self._kept[mark] = made
            self._count(made, 1)
            if old is not None:
                self._leave(old)
            if made.short is not None:
                self._short[made.short[0]] = mark, made.short[1]
            while self.kept_bytes > self._limit_bytes:
                self._leave(self._kept.popitem(last=False)[1])

    def _leave(self, known: Known) -> None:
        self._count(known, -1)
        if known.short is not None and self._short.get(known.short[0], (0, None))[1] is known.short[1]:
            del self._short[known.short[0]]

    def _count(self, known: Known, one: int) -> None:
        """one: 1 comes, -1 goes. Tools and settings count once, while anyone has them."""
        front = known.front
        self.kept_bytes += one * known.held_bytes
        if front.users == 0 and one > 0:
            self._fronts[front.written] = front
            self.kept_bytes += front.held_bytes
        front.users += one
        if front.users == 0:
            self.kept_bytes -= front.held_bytes
            if self._fronts.get(front.written) is front:
                del self._fronts[front.written]


def _marks(front: bytes, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """A hash for each beginning of the conversation, from its tools and settings and little of each message."""
    mark = hash(front)
    out = []
    for message in messages:
        content = message.get("content") if type(message) is dict or isinstance(message, Mapping) else None
        if type(content) is not str and isinstance(content, list) and content and isinstance(content[-1], Mapping):
            content = content[-1].get("text")
        if type(content) is not str:
            mark = hash((mark, None))
        elif len(content) <= _WHOLE_CHARACTERS:
            mark = hash((mark, content))
        else:
            mark = hash((mark, len(content), content[:_MARK_CHARACTERS], content[-_MARK_CHARACTERS:]))
        out.append(mark)
    return out


def _odd(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """Those messages as JSON that have more than texts: of texts alone `==` tells all, since the order of a message's own fields is not
    the template's (conversation.py)."""
    return b"".join([_written(m) for m in messages if not _PLAIN.issuperset(map(type, m.values()))])


def _written(value: object) -> bytes:
    """JSON in the given order, with numbers as they are and calls of /v1/responses apart. Raises UnsupportedPrompt."""
    try:
        return orjson.dumps(value, _call_apart, orjson.OPT_PASSTHROUGH_SUBCLASS)
    except orjson.JSONEncodeError as e:
        raise UnsupportedPrompt("tools, settings or messages that are nested too deeply to be compared") from e


def _call_apart(value: object) -> object:
    if isinstance(value, OrderedCall):
        return ["ordered", dict(value)]
    raise TypeError(type(value).__name__)


def _bytes_of(value: object) -> int:
    """Memory of a JSON value, but for its keys."""
    if isinstance(value, dict):
        return sys.getsizeof(value) + sum(map(_bytes_of, value.values()))
    return sys.getsizeof(value) + (sum(map(_bytes_of, value)) if isinstance(value, list) else 0)
