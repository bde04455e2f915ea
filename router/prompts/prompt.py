"""What is known of a request's prompt when it is routed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schemas.block_hash import U64

_BYTES_A_TOKEN = 4
"""To guess a prompt's length from its body when nobody tokenizes it."""


SkipReason = Literal["too_long", "queue_full"]
"""Why a prompt that could be tokenized was not: settings max_prompt_chars, max_waiting_prompts."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What is known of a request's prompt. tokens None: not tokenized, `guessed_tokens` stands in. chain None: no block names."""

    source: str  # exact, engine, none (schemas.requests.Decision.token_source)
    tokens: int | None
    guessed_tokens: int
    chain: U64 | None
    block_size: int | None
    lora: str | None = None
    tokenize_us: float | None = None
    skipped: SkipReason | None = None

    @classmethod
    def unknown(cls, body_bytes: int, skipped: SkipReason | None = None) -> Prompt:
        return cls("none", None, max(1, body_bytes // _BYTES_A_TOKEN), None, None, skipped=skipped)
