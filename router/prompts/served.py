"""What a pool's workers serve, by their own /v1/models: names of the base model, LoRA adapters, and the longest prompt.

An adapter's name is part of every block's name, an alias of the base model is not; a guess would give wrong chains. vLLM tells them apart:
an adapter's card has a `parent`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ServedModels:
    """names: of the base model, all aliases. max_model_len None: they do not say."""

    names: frozenset[str]
    adapters: frozenset[str]
    max_model_len: int | None

    @classmethod
    def of(cls, cards: Sequence[dict[str, Any]]) -> ServedModels | None:
        """None: there is nothing in the list that could be told apart."""
        named = [(c["id"], c.get("parent")) for c in cards if isinstance(c.get("id"), str)]
        if not named:
            return None
        lengths = [n for c in cards if isinstance(n := c.get("max_model_len"), int) and n > 0]
        return cls(frozenset(n for n, p in named if p is None), frozenset(n for n, p in named if p is not None), min(lengths, default=None))
