"""Decisions and outcomes: what a router says of each request. Written so that routers other than ours can write them, too.

A decision is written when the request is dispatched, its outcome when the answer ended or failed; both carry the request id, which is
the stream key. Token ids and text never appear (but for `snippet`, where an operator wants it): a prompt is its chain of block
hashes, and keyed hashes of its content. null means "not known" or "not reported", never 0.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field, model_validator

from schemas.block_hash import U64
from schemas.record import Clock, Count, Counter, Name, Rank, Seconds, StreamModel, Tokens, UnixSeconds
from schemas.workers import Trust


def pack_hashes(hashes: U64) -> str:
    """u64 hashes -> base64 of their little-endian bytes."""
    return binascii.b2a_base64(np.ascontiguousarray(hashes, "<u8").data, newline=False).decode("ascii")


def unpack_hashes(packed: str) -> U64:
    """The inverse of `pack_hashes`. Raises ValueError when the text is no base64 of whole u64."""
    try:
        raw = base64.b64decode(packed, validate=True)
    except binascii.Error as e:
        raise ValueError("hashes must be base64 of little-endian u64") from e
    if len(raw) % 8:
        raise ValueError(f"hashes must be whole u64: {len(raw)} bytes are not a multiple of 8")
    return np.frombuffer(raw, "<u8")


def _packed(value: str) -> str:
    unpack_hashes(value)
    return value


def pack_lengths(lengths: npt.ArrayLike) -> str:
    """Lengths up to 65,535 -> base64 of little-endian u16."""
    return binascii.b2a_base64(np.ascontiguousarray(lengths, "<u2").data, newline=False).decode("ascii")


def unpack_lengths(packed: str) -> npt.NDArray[np.uint16]:
    """The inverse of `pack_lengths`. Raises ValueError when the text is no base64 of whole u16."""
    try:
        raw = base64.b64decode(packed, validate=True)
    except binascii.Error as e:
        raise ValueError("lengths must be base64 of little-endian u16") from e
    if len(raw) % 2:
        raise ValueError(f"lengths must be whole u16: {len(raw)} bytes are not a multiple of 2")
    return np.frombuffer(raw, "<u2")


def _hashes_in(packed: str) -> int:
    """How many there are in what was found to be packed hashes."""
    return (len(packed) // 4 * 3 - packed.count("=", -2)) // 8


def _packed_lengths(value: str) -> str:
    unpack_lengths(value)
    return value


PackedLengths = Annotated[str, AfterValidator(_packed_lengths), Field(description="base64 of little-endian u16 lengths in tokens")]
PackedHashes = Annotated[str, AfterValidator(_packed), Field(description="base64 of little-endian u64 block hashes")]


class Candidate(StreamModel):
    """One worker as the policy saw it. Overlap counts tokens of the longest contiguous prefix held."""

    worker: Name
    rank: Rank | None = Field(None, description="null: the router does not choose ranks")
    overlap_tokens: Tokens | None = Field(
        None,
        description="confirmed by KV events, any tier; with token source text: guessed from what this router sent there; null: the prefix "
        "was unknown, or not looked up",
    )
    overlap_gpu_tokens: Tokens | None = Field(None, description="of these, on the GPU; null: not told apart")
    overlap_cpu_tokens: Tokens | None = Field(None, description="of these, in CPU memory; null: not told apart")
    overlap_disk_tokens: Tokens | None = Field(None, description="of these, on disk; null: not told apart")
    speculative_tokens: Tokens | None = Field(None, description="further tokens expected from requests dispatched but not yet confirmed")
    queue_s: Seconds | None = Field(None, description="predicted wait before this request's prefill")
    prefill_s: Seconds | None = Field(None, description="predicted prefill of the uncached tokens")
    load_s: Seconds | None = Field(None, description="predicted loading of blocks from lower tiers")
    decode_s: Seconds | None = Field(None, description="predicted cost of running beside the decodes there")
    cost_s: float | None = Field(None, description="what the policy minimised; null: the policy has no cost")
    epoch: Clock | None = Field(None, description="clock of the worker's cache that the index had applied")
    seq: Clock | None = None
    trust: Trust
    in_flight: Count | None = Field(None, description="requests on that worker, of all routers as far as this one knew")
    decoding: Count | None = Field(None, description="of these, past their first token")
    draining: bool | None = Field(None, description="it is being emptied and takes no new request")
    allowed: bool | None = Field(None, description="false: it could not be chosen: down, draining, or tried before")


class ShadowPick(StreamModel):
    """The worker that another policy would have taken, had it been asked in earnest."""

    policy: Name
    version: str | None = Field(None, max_length=100)
    worker: Name
    rank: Rank | None = None
    predicted_tokens: Tokens | None = Field(None, description="cached tokens to be expected there; null: the prefix is unknown")
    margin_s: float | None = Field(
        None, description="cost of its pick minus cost of the chosen, both by the cost model; negative: it looked cheaper"
    )


class Attempt(StreamModel):
    """One dispatch of the request to a worker that gave no answer, or none that was passed on."""

    worker: Name
    rank: Rank | None = None
    error: str = Field(max_length=1000)
    after_s: Seconds


class Decision(StreamModel):
    """Where a request was sent, and what was known then."""

    version: Literal[1] = 1
    request_id: Name
    time_s: UnixSeconds = Field(description="unix seconds of the dispatch")
    router: Name = Field(description="which router replica")
    pool: Name
    model: Name
    path: str = Field(max_length=1024, description="HTTP path, such as /v1/chat/completions")
    route: str = Field("default", max_length=1024, description="the caller's name for this kind of traffic")
    tenant: str = Field("default", max_length=1024)
    template: str | None = Field(None, max_length=1024, description="the prompt template that the caller named; null: none")
    session_id: str | None = Field(None, max_length=1024)
    stream: bool | None = None
    policy: Name
    policy_version: str = Field(max_length=100)
    coefficients_version: str | None = Field(None, max_length=100, description="of the cost model; null: not versioned")
    token_source: Literal["exact", "engine", "text", "none"] = Field(
        description="exact: own tokenizer; engine: its /tokenize; text: approximated from characters; none: the prefix is unknown"
    )
    token_reason: str | None = Field(None, max_length=200, description="why it is none or text, or nothing is forecast; null: not said")
    prompt_tokens: Tokens | None = None
    block_size: Tokens | None = Field(None, ge=1)
    lora: str | None = Field(None, max_length=1024)
    key_id: str | None = Field(None, pattern=r"^[0-9a-f]{8}$", description="which hash key the chain is made with; see HashKey.key_id")
    chain: PackedHashes | None = Field(None, description="names of the prompt's full blocks in order; null: unknown")
    namespace: Clock | None = Field(
        None,
        description="keyed digest of LoRA, cache salt and what else starts the chain: the same content under another one has other names",
    )
    content_from: Count | None = Field(
        None, description="first block that `content` and `chunks` describe: blocks of the best overlap anywhere; null: content is not told"
    )
    content: PackedHashes | None = Field(None, description="content fingerprints of the full blocks from content_from on")
    chunks: PackedHashes | None = Field(
        None, description="names of the content-defined chunks (schemas/content.py) of the tokens from content_from * block_size to the end"
    )
    chunk_tokens: PackedLengths | None = Field(None, description="their lengths; they add up to prompt_tokens - content_from * block_size")
    shared_tokens: Tokens | None = Field(
        None,
        description="tokens that it has in common with a recent prompt of the same template or route, the most with any, before the first "
        "that differs; null: there was none, or one without a difference as far as it was kept",
    )
    snippet: str | None = Field(
        None, max_length=400, description="beginning of the prompt's text; null unless an operator switched snippets on in the router"
    )
    worker: Name = Field(description="the worker that the request went to in the end")
    rank: Rank | None = None
    candidates: tuple[Candidate, ...] = Field((), max_length=1024, description="the chosen worker and the best others, by cost")
    workers_considered: Count | None = Field(None, description="that could have been chosen")
    best_overlap_worker: Name | None = None
    best_overlap_rank: Rank | None = None
    best_overlap_tokens: Tokens | None = Field(
        None, description="longest prefix held anywhere in the pool, also by workers that could not be chosen"
    )
    predicted_tokens: Tokens | None = Field(
        None,
        description="cached tokens that the engine is expected to report: confirmed and speculative overlap of the chosen worker, at most "
        "the whole blocks before the last token; null: no forecast, as with an unknown prefix. Left out: the overlap is the forecast",
    )
    runner_up_worker: Name | None = Field(None, description="the cheapest other worker that could have been chosen")
    runner_up_rank: Rank | None = None
    margin_s: float | None = Field(None, description="cost of the runner-up minus cost of the chosen, both by the cost model")
    shadows: tuple[ShadowPick, ...] = Field((), max_length=32, description="what other policies would have done")
    waited_s: Seconds | None = Field(None, description="wait in the router's own queue before the decision")
    index_lag_s: Seconds | None = Field(None, description="age of the newest KV batch applied from the chosen worker")
    index_behind_s: Seconds | None = Field(
        None, description="how far the index was behind the stream: all events that are older were applied; null: not known"
    )
    decide_us: float | None = Field(None, ge=0, description="time that the decision took, tokenizing left out")
    tokenize_us: float | None = Field(None, ge=0)
    attempts: tuple[Attempt, ...] = Field((), max_length=64)

    @model_validator(mode="after")
    def _content_fits(self) -> Decision:
        """Content is described whole or not at all, and as long as the rest of the prompt."""
        told = (self.content_from, self.content, self.chunks, self.chunk_tokens)
        if self.content_from is None or self.content is None or self.chunks is None or self.chunk_tokens is None:
            if any(part is not None for part in told):
                raise ValueError("content_from, content, chunks and chunk_tokens belong together: one of them is null")
            return self
        if self.namespace is None or self.prompt_tokens is None or self.block_size is None:
            raise ValueError("content needs namespace, prompt_tokens and block_size")
        rest = self.prompt_tokens - self.content_from * self.block_size
        if rest < 0:
            raise ValueError(f"content_from: block {self.content_from} lies beyond the prompt's {self.prompt_tokens} tokens")
        if (blocks := _hashes_in(self.content)) != rest // self.block_size:
            raise ValueError(f"content: {blocks} fingerprints for {rest // self.block_size} full blocks")
        if (chunks := _hashes_in(self.chunks)) != len(lengths := unpack_lengths(self.chunk_tokens)):
            raise ValueError(f"chunk_tokens: {len(lengths)} lengths for {chunks} chunks")
        if (tokens := int(lengths.sum(dtype=np.int64))) != rest or not lengths.all():
            raise ValueError(f"chunk_tokens: positive lengths that add up to {rest} are expected; they add up to {tokens}")
        return self


class Outcome(StreamModel):
    """How a request ended. A request that no worker could be chosen for has no decision, so its outcome says itself what it was."""

    version: Literal[1] = 1
    request_id: Name
    time_s: UnixSeconds = Field(description="unix seconds at which the answer ended")
    worker: Name | None = Field(None, description="null: no worker could be tried, and there is no decision")
    rank: Rank | None = None
    status: int | None = Field(None, ge=100, lt=600, description="HTTP status sent to the client; null: the client left first")
    error: str | None = Field(None, max_length=1000, description="null: none. timeout, connect, disconnect, upstream ...")
    ttft_s: Seconds | None = Field(None, description="dispatch to first content byte; null for answers that do not stream")
    e2e_s: Seconds | None = None
    prompt_tokens: Tokens | None = Field(None, description="as the engine reported")
    cached_tokens: Tokens | None = None
    created_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    engine_queue_s: Seconds | None = None
    engine_ttft_s: Seconds | None = None
    request_bytes: Counter | None = None
    response_bytes: Counter | None = None
    retries: Count | None = Field(None, description="how often it was sent again")
    router: Name | None = Field(None, description="this and what follows: as in a decision, where there is none")
    pool: Name | None = None
    model: Name | None = None
    path: str | None = Field(None, max_length=1024)
    route: str | None = Field(None, max_length=1024)
    tenant: str | None = Field(None, max_length=1024)
    session_id: str | None = Field(None, max_length=1024)
    stream: bool | None = None
