"""From a request body to a Prompt: token ids by the pool's own tokenizer, by the engine's /tokenize, or not at all.

Tokenizing takes milliseconds for long prompts (29 ms at 32k tokens), so when more than `INLINE_CHARACTERS` have not been seen before
it runs in a thread: the tokenizer lets go of the GIL there (`segments.encoded`), and the event loop goes on relaying. What was seen before
costs no thread. What cannot be told exactly (images, a template of the client's own, several prompts in one request, truncation) is source
`none`: the request is routed by load alone, and its decision says so.

Tokenizing is bounded, for a client decides how much of it there is: a prompt over `max_prompt_chars` (a token takes some 500 bytes while it
is made), and one that comes while `max_waiting_prompts` wait for a thread, is source `none` too, with `Prompt.skipped` saying why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import numpy as np
import orjson

from router.pools import PoolState
from router.prompts.prompt import Prompt, SkipReason
from router.prompts.tokens import LocalTokenizer, UnsupportedPrompt
from schemas.block_hash import U32

log = logging.getLogger(__name__)

INLINE_CHARACTERS = 2_000
_THREADS = 2
_OWN_TOKENS = ("chat_template", "continue_final_message", "truncate_prompt_tokens", "prompt_embeds", "mm_processor_kwargs")
"""Body fields that change the prompt in ways that only the engine knows."""

Body = Mapping[str, Any]


class _Skipped(Exception):  # noqa: N818 - a value, named for what it is
    """This prompt could be tokenized, and is not."""

    def __init__(self, reason: SkipReason) -> None:
        super().__init__(reason)
        self.reason: SkipReason = reason


class PromptReader:
    """Reads prompts for all pools. Close it after use. max_prompt_chars 0: no limit."""

    def __init__(self, session: aiohttp.ClientSession, tokenize_timeout_s: float, max_prompt_chars: int, max_waiting_prompts: int) -> None:
        self._session = session
        self._max_chars, self._max_waiting = max_prompt_chars, max_waiting_prompts
        self._waiting = 0  # prompts in the threads or before them
        self._timeout = aiohttp.ClientTimeout(total=tokenize_timeout_s)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")
        self.failures = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, pool: PoolState, body: Body, body_bytes: int, lora: str | None) -> Prompt:
        """Never raises for what a client sent: an unreadable prompt is an unknown one."""
        started = time.perf_counter()
        try:
            found = await self._ids(pool, body, body_bytes)
        except _Skipped as e:
            return Prompt.unknown(body_bytes, e.reason)
        except (ValueError, TypeError, AttributeError) as e:  # UnsupportedPrompt, or fields of a wrong type, for the engine to refuse
            log.debug("prompt not tokenized: %s", e)
            found = None
        if found is None:
            return Prompt.unknown(body_bytes)
        source, ids = found
        salt = body.get("cache_salt")
        tokenize_us = (time.perf_counter() - started) * 1e6
        chain = pool.chain(ids, lora, salt if isinstance(salt, str) else None)
        return Prompt(source, len(ids), len(ids), chain, pool.block_size, lora, tokenize_us)

    async def _ids(self, pool: PoolState, body: Body, body_bytes: int) -> tuple[str, U32] | None:
        given = _given_ids(body.get("prompt"))
        if given is not None:
            return "exact", given
        if any(body.get(field) for field in _OWN_TOKENS) or _has_media(body) or isinstance(body.get("prompt"), list):
            return None
        if pool.tokenizer is None:
            self._check_length(body_bytes)  # what its template makes of it is not known here
            ids = await self._engine_ids(pool, body)
            return None if ids is None else ("engine", ids)
        text, special = local_text(pool.tokenizer, body)
        self._check_length(len(text))
        ids = pool.tokenizer.ids_if_quick(text, special, INLINE_CHARACTERS)
        return "exact", await self._in_thread(pool.tokenizer, text, special) if ids is None else ids

    def _check_length(self, characters: int) -> None:
        if self._max_chars and characters > self._max_chars:
            raise _Skipped("too_long")

    async def _in_thread(self, tokenizer: LocalTokenizer, text: str, special: bool) -> U32:
        if self._waiting >= self._max_waiting + _THREADS:
            raise _Skipped("queue_full")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, tokenizer.ids, text, special)
        finally:
            self._waiting -= 1

    async def _engine_ids(self, pool: PoolState, body: Body) -> U32 | None:
        """vLLM's /tokenize of the least loaded worker that is up."""
        able = np.flatnonzero(pool.health.up)
        if not len(able):
            return None
        target = pool.targets[int(able[np.argmin(pool.load.in_flight[able])])]
        wanted = ("model", "messages", "tools", "prompt", "add_generation_prompt", "add_special_tokens", "chat_template_kwargs")
        ask = {k: body[k] for k in wanted if body.get(k) is not None}
        try:
            async with self._session.post(
                f"{target.url}/tokenize", data=orjson.dumps(ask), headers={"content-type": "application/json"}, timeout=self._timeout
            ) as response:
                if response.status != 200:
                    self.failures += 1
                    return None
                return np.array(orjson.loads(await response.read())["tokens"], np.uint32)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, OverflowError) as e:
            self.failures += 1
            log.warning("worker %s did not tokenize: %s: %s", target.worker, type(e).__name__, e)
            return None


def local_text(tokenizer: LocalTokenizer, body: Body) -> tuple[str, bool]:
    """The final text of a chat or text request, and whether the tokenizer adds its own tokens. Raises UnsupportedPrompt."""
    if "messages" in body:
        if body.get("add_special_tokens"):
            raise UnsupportedPrompt("add_special_tokens with a chat template")
        extra = dict(body.get("chat_template_kwargs") or {})
        for field in ("documents", "reasoning_effort"):
            if body.get(field) is not None:
                extra.setdefault(field, body[field])
        return tokenizer.render(body["messages"], body.get("tools"), body.get("add_generation_prompt", True) is not False, **extra), False
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise UnsupportedPrompt("neither messages nor a prompt")
    return prompt, body.get("add_special_tokens", True) is not False


def local_ids(tokenizer: LocalTokenizer, body: Body) -> U32:
    """Token ids of a chat or text request as the engine computes them. Raises UnsupportedPrompt."""
    return tokenizer.ids(*local_text(tokenizer, body))


def _given_ids(prompt: object) -> U32 | None:
    """A prompt that comes as token ids already (also as a list of one such list)."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        try:
            return np.array(prompt, np.uint32)
        except (ValueError, TypeError, OverflowError) as e:
            raise UnsupportedPrompt("token ids must be integers below 2^32") from e
    return None


def _has_media(body: Body) -> bool:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return False
    return any(
        isinstance(part, dict) and part.get("type", "text") not in ("text", "input_text", "output_text", "refusal")
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )
