"""Names for pieces of a request's text, where its token ids are not to be had: what the approximate index matches.

A request is written down in one way (tools, system, messages or input, in that order, as JSON), so that a longer conversation begins with
the bytes of the shorter one, and cut into pieces of `PIECE_BYTES` from the front; each piece is named by all that stands before it, with
the deployment's key, like blocks. The chain's root is another than that of token chains, so the two never meet; the names say nothing about
an engine's blocks and never leave the router.

Media given in the body (data URLs) stand in it as digests: they are no text, and their length says nothing about tokens.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from schemas.block_hash import U32, U64, HashKey, hash_chain, siphash13

PIECE_BYTES = 256
_WORD_BYTES = 4
PIECE_TOKENS = PIECE_BYTES // _WORD_BYTES
"""Tokens guessed in a piece: one in four bytes."""
MOST_BYTES = 1 << 20
"""Only so much of a request is named: 4096 pieces."""
_MEDIA_CHARACTERS = 512
_ENDS_CHARACTERS = 4096


def text_of(body: Mapping[str, Any]) -> bytes | None:
    """The request as bytes, in the order of its prompt; None when there is nothing that could be one."""
    given = next((body[name] for name in ("messages", "input", "prompt") if body.get(name)), None)
    if given is None:
        return None
    if isinstance(given, list) and all(isinstance(g, str) for g in given):
        given = max(given, key=len)  # of a batch, the longest
    front = [body.get(name) for name in ("tools", "system", "instructions", "previous_response_id")]
    try:
        return orjson.dumps([*front, _without_media(given)])
    except (orjson.JSONEncodeError, RecursionError):  # nested more deeply than can be written
        return None


def beginning_of(body: Mapping[str, Any], characters: int) -> str | None:
    """The first characters of the first text of a prompt: its system text, else its first message; None: there is none."""
    for name in ("system", "instructions", "messages", "input", "prompt"):
        if (found := _first_text(body.get(name), 4)) is not None:
            return found[:characters]
    return None


def _first_text(value: object, depth: int) -> str | None:
    if isinstance(value, str):
        return value or None
    if isinstance(value, dict):
        value = [value.get("content"), value.get("text")]
    if isinstance(value, list) and depth:
        return next((found for v in value[:16] if (found := _first_text(v, depth - 1)) is not None), None)
    return None


def text_chain(key: HashKey, pool: str, lora: str | None, salt: str | None, text: bytes) -> U64:
    """Names of the pieces, u64, shape (len(text) // PIECE_BYTES,), at most MOST_BYTES of it."""
    root = _root(key, b"warmwatch/text/1", pool, lora, salt)
    whole = min(len(text), MOST_BYTES) // PIECE_BYTES * PIECE_BYTES
    return hash_chain(key, root, np.frombuffer(text, "<u4", whole // _WORD_BYTES).copy(), PIECE_TOKENS)


def ids_chain(key: HashKey, pool: str, lora: str | None, salt: str | None, ids: U32) -> U64:
    """The same of token ids, where there are no blocks to match them with."""
    root = _root(key, b"warmwatch/text-ids/1", pool, lora, salt)
    return hash_chain(key, root, ids, PIECE_TOKENS)


def _root(key: HashKey, label: bytes, pool: str, lora: str | None, salt: str | None) -> int:
    return _named(key, label, pool, lora) if not salt else _named.__wrapped__(key, label, pool, lora, salt)


@functools.lru_cache(maxsize=1024)
def _named(key: HashKey, label: bytes, pool: str, lora: str | None, salt: str = "") -> int:
    """By the plain SipHash, a tenth of a millisecond."""
    return siphash13(key, b"\0".join((label, pool.encode(), (lora or "").encode(), salt.encode())))


def guessed_tokens(text: bytes) -> int:
    return max(1, len(text) // _WORD_BYTES)


def _without_media(given: Any) -> Any:
    """The same, with long strings of parts that are no text as digests."""
    if not isinstance(given, list):
        return given
    return [_part(g) if isinstance(g, dict) else g for g in given]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    content = part.get("content")
    if isinstance(content, list):
        part = {**part, "content": _without_media(content)}
    kind = part.get("type")
    if not isinstance(kind, str) or kind.endswith("text") or "role" in part:
        return part
    return {k: _digested(v) for k, v in part.items()}


def _digested(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _digested(v) for k, v in value.items()}
    if isinstance(value, str) and len(value) > _MEDIA_CHARACTERS and (value.startswith("data:") or " " not in value[:_MEDIA_CHARACTERS]):
        ends = f"{len(value)} {value[:_ENDS_CHARACTERS]} {value[-_ENDS_CHARACTERS:]}"  # all of a video would hold up the loop
        return hashlib.blake2b(ends.encode(errors="replace"), digest_size=16).hexdigest()
    return value
