"""What is known of a request's prompt when it is routed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from router.frozen import value
from schemas.block_hash import U32, U64

_BYTES_A_TOKEN = 4
"""To guess a prompt's length from its body when nobody tokenizes it."""


SkipReason = Literal["too_long", "queue_full"]
"""Why a prompt that could be tokenized was not: settings max_prompt_chars, max_waiting_prompts."""

Mode = Literal["exact", "engine", "text"]
"""How a pool's prompts are read when they can be: own tokenizer, the engine's /tokenize, pieces of text."""


@value()
class Prompt:
    """What is known of a request's prompt. tokens None: not tokenized, `guessed_tokens` stands in. chain None: no names.

    source `text`: the chain names pieces of text instead of blocks, `block_size` tokens each by guess; it means nothing outside of the
    router's own approximate index and never leaves it.
    reads_cache False: the engine computes this prompt whole, whatever it holds (prompt_logprobs), but keeps its blocks.
    reason: why it is not read as `mode` says.
    """

    source: str  # exact, engine, text, none (schemas.requests.Decision.token_source)
    tokens: int | None
    guessed_tokens: int
    chain: U64 | None
    block_size: int | None
    lora: str | None = None
    tokenize_us: float | None = None
    skipped: SkipReason | None = None
    reason: str | None = None
    mode: Mode = "exact"
    reads_cache: bool = True
    prompts: int = 1  # of a batch the chain is the longest one's, the tokens are all
    others: Mapping[int, U64] = field(default_factory=dict)  # the chain by other block sizes (PoolState.other_chains)
    ids: U32 | None = field(default=None, repr=False)  # of the prompt that the chain names, where they are the model's own
    salt: str | None = field(default=None, repr=False)

    @classmethod
    def unknown(cls, body_bytes: int, skipped: SkipReason | None = None, reason: str | None = None, mode: Mode = "exact") -> Prompt:
        return cls("none", None, max(1, body_bytes // _BYTES_A_TOKEN), None, None, skipped=skipped, reason=reason or skipped, mode=mode)

    @property
    def forecasts(self) -> bool:
        """Whether the decision tells the tokens that the engine will report as cached: of one prompt, by its blocks."""
        return self.chain is not None and self.source != "text" and self.prompts == 1

    @property
    def recorded_chain(self) -> U64 | None:
        """The chain where it names what the engine will look up for this request, and that is one prompt."""
        return self.chain if self.forecasts and self.reads_cache else None
