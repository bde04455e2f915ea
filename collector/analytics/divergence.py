"""Which prompt text was seen before, though its blocks were not, and where prompts of one kind stop being alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.content import Content

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]


class Known(IntEnum):
    """Whether a token's content was seen before a dispatch."""

    NOT = 0
    HERE = 1
    """In its own namespace, perhaps in others, too."""
    ELSEWHERE = 2
    """In other namespaces of the pool only."""


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """What was known of a prompt's content. Arrays of runs cover its tokens from first_token to the end, shape (runs,)."""

    first_token: int
    block_size: int
    prompt_tokens: int
    run_known: U8
    """`Known` of each run."""
    run_tokens: U32
    """Their lengths; they add up to prompt_tokens - first_token."""
    chunk_known: U8
    chunk_tokens: U32

    def difference(self, seen_tokens: int, shared_tokens: int | None = None) -> tuple[int, int]:
        """Where the first token lies that differs from all earlier prompts: [from, to), tokens.

        seen_tokens: end of the last block whose name was ever stored before, a multiple of the block size and >= first_token where the
        decision described as much. shared_tokens: the decision's own word, exact.
        """
        raise NotImplementedError


class ContentIndex:
    """Content that decisions described, by pool and namespace, each with the earliest time. Pure, and bounded: see `budget_entries`."""

    def __init__(self, budget_entries: int = 4_000_000) -> None:
        """budget_entries: fingerprints and chunks kept; beyond it the half that was registered longest ago is forgotten."""

    def register(self, time_s: float, pool: str, content: Content) -> None:
        """A decision of this time (unix seconds) had this content. Idempotent; the earliest time is kept, whatever the order."""
        raise NotImplementedError

    def tell(self, before_s: float, pool: str, content: Content) -> Told:
        """What of it was registered with a time < before_s: ask with the time of the request's first decision, and neither its own
        registration nor later ones count. Changes nothing."""
        raise NotImplementedError

    def save(self) -> Mapping[str, npt.NDArray[Any]]:
        raise NotImplementedError

    def load(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        raise NotImplementedError

    def held_bytes(self) -> int:
        raise NotImplementedError
