"""What a request asks to have computed: the step between a body of any endpoint and token ids.

Each endpoint's module makes an `Asked` of its body; `reader.py` makes ids of it, or text. What an engine may read in a way that is not
known here raises UnsupportedPrompt with the reason.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from router.frozen import value
from router.prompts.conversation import Message, UnsupportedPrompt
from schemas.block_hash import U32

Body = Mapping[str, Any]


@value()
class Chat:
    """Messages as in the OpenAI chat body, tools likewise, and what else the template gets (add_generation_prompt, documents ...)."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    values: Mapping[str, Any] = field(default_factory=lambda: {"add_generation_prompt": True})


@value()
class Asked:
    """One of chat, texts, ids. special: the tokenizer adds its own beginning and end tokens (never to ids).
    keep: of the ids only the last so many count (negative: the first). max_tokens: longer prompts would be cut by the engine."""

    chat: Chat | None = None
    texts: tuple[str, ...] = ()
    ids: tuple[U32, ...] = ()
    special: bool = True
    keep: int | None = None
    cuts_to_model: bool = False
    reads_cache: bool = True


def ids_of(numbers: Sequence[int]) -> U32:
    """u32 array of a JSON list (four times as fast as NumPy's own). Raises UnsupportedPrompt."""
    try:
        return np.frombuffer(array("I", numbers), np.uint32)
    except (TypeError, OverflowError) as e:
        raise UnsupportedPrompt("token ids must be integers from 0 to 2^32 - 1") from e


def prompts_of(given: object) -> tuple[tuple[str, ...], tuple[U32, ...]]:
    """A text, a list of texts, a list of token ids, or a list of such lists: (texts, ids), one of them empty. Raises UnsupportedPrompt."""
    if isinstance(given, str):
        return (given,), ()
    if isinstance(given, list) and given:
        if isinstance(given[0], str) and all(isinstance(g, str) for g in given):
            return tuple(given), ()
        if isinstance(given[0], int):
            return (), (ids_of(given),)
        if all(isinstance(g, list) and g for g in given):
            return (), tuple(ids_of(g) for g in given)
    raise UnsupportedPrompt("a prompt must be a text, token ids, or a list of either")


def kept(body: Body) -> int | None:
    """`truncate_prompt_tokens` as Asked.keep. Raises UnsupportedPrompt: without a side the engine's tokenizer has its own way."""
    count, side = body.get("truncate_prompt_tokens"), body.get("truncation_side")
    if count is None:
        return None
    if not isinstance(count, int) or count < 1 or side not in ("left", "right"):
        raise UnsupportedPrompt("truncate_prompt_tokens without a count and a truncation_side")
    return count if side == "left" else -count


def refuse(body: Body, *fields: str) -> None:
    """Raises UnsupportedPrompt when one of the fields is set."""
    for name in fields:
        if body.get(name):
            raise UnsupportedPrompt(f"{name} changes the prompt in a way that only the engine knows")
