"""From a request's body to a Prompt: by the pool's own tokenizer, by the engine's /tokenize, by its text, or not at all.

    body --endpoint's reader--> Asked --mode of the pool--> ids --> block names          source exact, engine
               |                  |
               +-- unsupported ---+----> pieces of text, for the approximate index      source text, with the reason
                                  +----> nothing that could be a prompt                 source none, with the reason

What cannot be told exactly is never guessed as token ids. Prompts that come as token ids are exact in every mode.

Tokenizing takes milliseconds for long prompts (29 ms at 32k tokens), so what has not been seen before (over `INLINE_CHARACTERS` of new
text, or many messages to render) runs in a thread: the tokenizer lets go of the GIL there (`segments.encoded`), and the event loop goes on
relaying. What was seen before costs no thread. Parsing JSON stays on the loop: it holds the GIL wherever it runs (0.7 ms a megabyte).

Tokenizing is bounded, for a client decides how much of it there is: a prompt over `max_prompt_chars` (a token takes some 500 bytes while it
is made), and one that comes while `max_waiting_prompts` wait for a thread, goes by its text too, with `Prompt.skipped` saying why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import aiohttp
import numpy as np

from router.frozen import value
from router.pools import PoolState
from router.prompts import openai_bodies
from router.prompts.asked import Asked, Body, refuse
from router.prompts.conversation import UnsupportedPrompt, plain_chat
from router.prompts.engine_tokens import EngineTokens
from router.prompts.known import ChatIds, KnownChats, TooLong
from router.prompts.prompt import Mode, Prompt, SkipReason
from router.prompts.text import PIECE_TOKENS, guessed_tokens, ids_chain, text_chain, text_of
from router.prompts.tokens import LocalTokenizer
from schemas.block_hash import U32, U64
from schemas.fleet import Fleet, TokensBy
from schemas.settings import SettingsError

log = logging.getLogger(__name__)

INLINE_CHARACTERS = 2_000
_THREADS = 2

Reads = Callable[[Body], Asked]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PoolTokens:
    """How a pool's prompts are read. engine: whose rules its chats follow."""

    by: TokensBy = "auto"
    engine: Literal["vllm", "sglang"] = "vllm"

    def mode(self, has_tokenizer: bool) -> Mode:
        if self.by == "auto":
            return "exact" if has_tokenizer else "engine"
        return self.by


def pool_tokens(fleet: Fleet, default: TokensBy, tokenizers: Mapping[str, LocalTokenizer]) -> dict[str, PoolTokens]:
    """By pool: its own word in the fleet file, else the setting `tokens`. Raises SettingsError for `exact` without a tokenizer."""
    out = {}
    for pool in fleet.pools:
        by = pool.tokens or default
        if by == "exact" and pool.name not in tokenizers:
            raise SettingsError(
                f"tokens = exact, but the pool {pool.name!r} names no `tokenizer` in the fleet file: name its folder there, or choose "
                "auto, engine or text"
            )
        engines = {w.engine for w in fleet.workers_of(pool.name)}
        out[pool.name] = PoolTokens(by, "sglang" if "sglang" in engines else "vllm")
    return out


@value()
class _Ids:
    """Token ids of the longest of `prompts` prompts, and how many tokens they have together."""

    longest: U32
    tokens: int
    prompts: int
    chat: ChatIds | None = None  # where `longest` came from, when it may be continued


class _Skipped(Exception):  # noqa: N818 - a value, named for what it is
    """This prompt could be tokenized, and is not."""

    def __init__(self, reason: SkipReason) -> None:
        super().__init__(reason)
        self.reason: SkipReason = reason


class PromptReader:
    """Reads prompts for all pools. Close it after use. max_prompt_chars 0: no limit. known_bytes: for each pool with a tokenizer."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        tokenize_timeout_s: float,
        max_prompt_chars: int,
        max_waiting_prompts: int,
        pools: Mapping[str, PoolTokens] | None = None,
        known_bytes: int = 64 << 20,
    ) -> None:
        self._engine = EngineTokens(session, tokenize_timeout_s)
        self._max_chars, self._max_waiting = max_prompt_chars, max_waiting_prompts
        self._pools, self._known_bytes = pools or {}, known_bytes
        self._known: dict[str, KnownChats | None] = {}
        self._waiting = 0  # prompts in the threads or before them
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    @property
    def failures(self) -> int:
        """How often an engine gave no token ids."""
        return self._engine.failures

    @property
    def answers_bytes(self) -> int:
        """Memory of the engines' answers."""
        return self._engine.kept_bytes

    @property
    def known_chats(self) -> Mapping[str, KnownChats | None]:
        """By pool that has read chats; None: its tokenizer's pieces do not stand alone."""
        return self._known

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def mode(self, pool: PoolState) -> Mode:
        return self._pools.get(pool.name, PoolTokens()).mode(pool.tokenizer is not None)

    async def read(self, pool: PoolState, body: Body, body_bytes: int, lora: str | None, reads: Reads | None = None) -> Prompt:
        """reads: how its endpoint's bodies are read; None: as a chat or text completion, by what is in it.
        Never raises for what a client sent: an unreadable prompt is an unknown one."""
        started = time.perf_counter()
        mode = self.mode(pool)
        skipped: SkipReason | None = None
        reason: str | None = None
        asked = None
        try:
            asked = (reads or _by_content)(body)
            if mode != "text" or asked.ids:
                found = await self._ids(pool, mode, asked, body, body_bytes)
                return self._prompt(pool, mode, asked, found, body, lora, started)
        except _Skipped as e:
            skipped = e.reason
            reason = str(e)
        except UnsupportedPrompt as e:
            reason = str(e)
        except (
            ValueError,
            TypeError,
            AttributeError,
            LookupError,
            RecursionError,
        ) as e:  # fields of a wrong type, for the engine to refuse
            reason = "the body is not of the endpoint's form"
            log.debug("prompt not read: %s", e)
        return self._by_text(pool, mode, asked, body, body_bytes, lora, reason, skipped, started)

    def _prompt(
        self, pool: PoolState, mode: Mode, asked: Asked, found: _Ids, body: Body, lora: str | None, started: float
    ) -> Prompt:  # fmt: skip
        salt = _salt(body)
        source = "engine" if mode == "engine" and not asked.ids else "exact"
        reason = None
        if mode == "text":
            chain: U64 | None = ids_chain(pool.key, pool.name, lora, salt, found.longest)
            size: int | None = PIECE_TOKENS
            source = "text"
        else:
            chain, size = self._chain(pool, asked, found, lora, salt), pool.block_size
            if chain is None:
                reason = "the block size is not known yet"
        if found.prompts > 1:
            reason = f"a batch of {found.prompts} prompts, routed by the longest"
        elif not asked.reads_cache:
            reason = "prompt log probabilities: the engine does not read its cache"
        return Prompt(
            source, found.tokens, found.tokens, chain, size, lora, (time.perf_counter() - started) * 1e6, reason=reason, mode=mode,
            reads_cache=asked.reads_cache, prompts=found.prompts,
            others={} if chain is None or source == "text" else pool.other_chains(found.longest, lora, salt),
            ids=None if chain is None or source == "text" else found.longest, salt=salt,
        )  # fmt: skip

    def _by_text(
        self, pool: PoolState, mode: Mode, asked: Asked | None, body: Body, body_bytes: int, lora: str | None, reason: str | None,
        skipped: SkipReason | None, started: float,
    ) -> Prompt:  # fmt: skip
        text = text_of(body)
        if text is None:
            return Prompt.unknown(body_bytes, skipped, reason or "there is no prompt in the body", mode)
        chain = text_chain(pool.key, pool.name, lora, _salt(body), text)
        return Prompt(
            "text", None, guessed_tokens(text), chain, PIECE_TOKENS, lora, (time.perf_counter() - started) * 1e6, skipped, reason, mode,
            True if asked is None else asked.reads_cache,
        )  # fmt: skip

    def _chain(self, pool: PoolState, asked: Asked, found: _Ids, lora: str | None, salt: str | None) -> U64 | None:
        """Block names, continued from what is known of the conversation."""
        if found.chat is None or pool.block_size is None:
            return pool.chain(found.longest, lora, salt)
        base, made = found.chat.base, found.chat.made
        key = (lora, salt, pool.block_size, asked.special)
        before = pool.tokenizer.added_before if asked.special and pool.tokenizer is not None else 0
        names = pool.chain(found.longest, lora, salt, None if base is None else base.chains.get(key))
        for known in (made, base if base is not None and key not in base.chains else None):
            if known is not None and names is not None:
                known.keep_chain(key, names, before)
        return names

    async def _ids(self, pool: PoolState, mode: Mode, asked: Asked, body: Body, body_bytes: int) -> _Ids:
        """Raises UnsupportedPrompt, _Skipped."""
        if self._pools.get(pool.name, PoolTokens()).engine == "sglang":
            refuse(body, "extra_key", "lora_path")  # both are part of its blocks' names
        if asked.cuts_to_model:
            most = pool.served.max_model_len if pool.served is not None else None
            if most is None or body_bytes >= most:  # a token has at least a byte
                raise UnsupportedPrompt("truncation: the engine may cut the prompt")
        if asked.ids:
            return _of_ids(asked, [np.asarray(i) for i in asked.ids])
        if mode == "exact":
            if pool.tokenizer is None:
                raise UnsupportedPrompt("the pool has no tokenizer")
            return await self._local_ids(pool, pool.tokenizer, asked, body, body_bytes)
        self._check_length(body_bytes)  # what its template makes of it is not known here
        return _of_ids(asked, list(await self._engine.ids(pool, asked, body.get("model"))))

    async def _local_ids(self, pool: PoolState, tokenizer: LocalTokenizer, asked: Asked, body: Body, body_bytes: int) -> _Ids:
        if tokenizer.lower_case:
            raise UnsupportedPrompt("the engine lowers the text first")
        if asked.special and not tokenizer.added_are_sure:
            raise UnsupportedPrompt("tokenizer.json and tokenizer_config.json differ in the tokens added to a text")
        if asked.chat is not None:
            if self._pools.get(pool.name, PoolTokens()).engine == "sglang":
                plain_chat(asked.chat.messages, asked.chat.tools, asked.chat.values)
            return await self._chat_ids(pool, tokenizer, asked, body_bytes)
        self._check_length(sum(map(len, asked.texts)))
        quick = [tokenizer.ids_if_quick(t, asked.special, INLINE_CHARACTERS) for t in asked.texts] if len(asked.texts) < 8 else [None]
        if all(ids is not None for ids in quick):
            return _of_ids(asked, [ids for ids in quick if ids is not None])
        return _of_ids(asked, await self._in_thread(lambda: [tokenizer.ids(t, asked.special) for t in asked.texts]))

    async def _chat_ids(self, pool: PoolState, tokenizer: LocalTokenizer, asked: Asked, body_bytes: int) -> _Ids:
        chat = asked.chat
        assert chat is not None
        known = self._known_chats(pool, tokenizer)
        if known is None or (asked.special and not tokenizer.added_are_fixed):
            if body_bytes > INLINE_CHARACTERS:
                text = await self._in_thread(partial(tokenizer.rendered, chat))
            else:
                text = tokenizer.rendered(chat)
            self._check_length(len(text))
            return _of_ids(asked, [await self._in_thread(partial(tokenizer.ids, text, asked.special))])
        try:
            found = known.read(chat, body_bytes, self._max_chars, INLINE_CHARACTERS)
            if found is None:
                found = await self._in_thread(partial(known.read, chat, body_bytes, self._max_chars))
        except TooLong as e:
            raise _Skipped("too_long") from e
        assert found is not None
        ids = tokenizer.with_added(found.ids, asked.special) if asked.special else found.ids
        return _of_ids(asked, [ids]) if asked.keep is not None else _Ids(ids, len(ids), 1, found)

    def _known_chats(self, pool: PoolState, tokenizer: LocalTokenizer) -> KnownChats | None:
        if pool.name not in self._known:
            segments = tokenizer.segments
            self._known[pool.name] = None if segments is None else KnownChats(tokenizer, segments, self._known_bytes)
        return self._known[pool.name]

    def _check_length(self, characters: int) -> None:
        if self._max_chars and characters > self._max_chars:
            raise _Skipped("too_long")

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        if self._waiting >= self._max_waiting + _THREADS:
            raise _Skipped("queue_full")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1


def _of_ids(asked: Asked, all_ids: list[U32]) -> _Ids:
    if asked.keep is not None:
        all_ids = [ids[-asked.keep :] if asked.keep > 0 else ids[: -asked.keep] for ids in all_ids]
    return _Ids(max(all_ids, key=len), sum(map(len, all_ids)), len(all_ids))


def _salt(body: Body) -> str | None:
    salt = body.get("cache_salt")
    return salt if isinstance(salt, str) else None


def _by_content(body: Body) -> Asked:
    return openai_bodies.chat(body) if "messages" in body else openai_bodies.completion(body)


def local_ids(tokenizer: LocalTokenizer, body: Mapping[str, Any]) -> U32:
    """Token ids of a chat or text completion as the engine computes them. Raises UnsupportedPrompt."""
    asked = _by_content(body)
    if asked.ids:
        return asked.ids[0]
    return tokenizer.ids(tokenizer.rendered(asked.chat) if asked.chat is not None else asked.texts[0], asked.special)
