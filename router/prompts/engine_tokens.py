"""Token ids by asking a worker's /tokenize: for pools without a tokenizer of their own here.

The workers' answer is exact by definition. It costs a round trip in front of every new prompt, so answers are kept by a digest of what was
asked, within `KEPT_BYTES`. A worker that does not answer costs `tokenize_timeout_s` once: after `FAILURES` in a row the pool is not asked
for `PAUSE_S`, and requests go on with the approximate index.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import aiohttp
import numpy as np
import orjson

from router.pools import PoolState
from router.prompts.asked import Asked, ids_of
from router.prompts.conversation import OrderedCall, UnsupportedPrompt, conversation
from schemas.block_hash import U32

log = logging.getLogger(__name__)

KEPT_BYTES = 32 << 20
FAILURES = 3
PAUSE_S = 5.0
_ENTRY_BYTES = 300


class EngineTokens:
    """Asks for all pools. failures: how often a worker was asked and gave no token ids."""

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._kept: OrderedDict[bytes, U32] = OrderedDict()
        self._kept_bytes = 0
        self._in_a_row: dict[str, int] = {}
        self._not_before_s: dict[str, float] = {}
        self.failures = 0

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    async def ids(self, pool: PoolState, asked: Asked, model: object) -> tuple[U32, ...]:
        """Token ids of each prompt. Raises UnsupportedPrompt that says why there are none."""
        if asked.chat is not None:
            return (await self._one(pool, _chat_question(asked, model)),)
        questions = [{"model": model, "prompt": text, "add_special_tokens": asked.special} for text in asked.texts]
        return tuple([await self._one(pool, question) for question in questions])

    async def _one(self, pool: PoolState, question: Mapping[str, Any]) -> U32:
        data = orjson.dumps({k: v for k, v in question.items() if v is not None})
        digest = hashlib.blake2b(pool.name.encode() + b"\0" + data, digest_size=16).digest()
        found = self._kept.get(digest)
        if found is not None:
            self._kept.move_to_end(digest)
            return found
        if time.monotonic() < self._not_before_s.get(pool.name, 0.0):
            raise UnsupportedPrompt("the workers' /tokenize does not answer")
        ids = await self._asked(pool, data)
        if digest not in self._kept:  # another request may have asked the same meanwhile
            self._kept[digest] = ids
            self._kept_bytes += ids.nbytes + _ENTRY_BYTES
        while self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes + _ENTRY_BYTES
        return ids

    async def _asked(self, pool: PoolState, data: bytes) -> U32:
        """Of the least loaded worker that is up."""
        able = np.flatnonzero(pool.health.up)
        if not len(able):
            raise UnsupportedPrompt("no worker is up that could tokenize")
        target = pool.targets[int(able[np.argmin(pool.load.in_flight[able])])]
        try:
            async with self._session.post(
                f"{target.url}/tokenize", data=data, headers={"content-type": "application/json"}, timeout=self._timeout
            ) as response:
                answer = await response.read()
                if response.status == 200:
                    self._in_a_row.pop(pool.name, None)
                    return ids_of(orjson.loads(answer)["tokens"])
                why = f"the worker's /tokenize said {response.status}"
                if response.status < 500 and response.status not in (404, 405, 501):  # it answers, but not this
                    self.failures += 1
                    raise UnsupportedPrompt(why)
        except UnsupportedPrompt:
            raise
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, OverflowError) as e:
            why = f"the worker's /tokenize failed: {type(e).__name__}"
        self._failed(pool, target.worker, why)
        raise UnsupportedPrompt(why)

    def _failed(self, pool: PoolState, worker: str, why: str) -> None:
        self.failures += 1
        row = self._in_a_row[pool.name] = self._in_a_row.get(pool.name, 0) + 1
        if row % FAILURES == 0:
            self._not_before_s[pool.name] = time.monotonic() + PAUSE_S
            log.warning("pool %s: %s (%s), %d times in a row; not asked for %.0f s", pool.name, why, worker, row, PAUSE_S)


def _chat_question(asked: Asked, model: object) -> dict[str, Any]:
    chat = asked.chat
    assert chat is not None
    conversation(chat.messages, wrap_parts=False)  # refuses media: their tokens alone are not what the engine looks up
    if any(isinstance(c, OrderedCall) for m in chat.messages for c in m.get("tool_calls") or ()):
        raise UnsupportedPrompt("tool calls of /v1/responses, which /tokenize may write in another order")
    values = dict(chat.values)
    return {
        "model": model,
        "messages": chat.messages,
        "tools": chat.tools,
        "add_generation_prompt": values.pop("add_generation_prompt", True),
        "add_special_tokens": asked.special,
        "chat_template_kwargs": values or None,
    }
