"""Worker load and trust: what a bridge says about a worker besides its cache events."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from schemas.record import Clock, Counter, Rank, StreamModel, Tokens, UnixSeconds


class Trust(StrEnum):
    """How far a worker's index can be believed."""

    EXACT = "exact"  # every event since the epoch's start was seen
    DEGRADED = "degraded"  # a gap, or the epoch's start was not seen
    BLIND = "blind"  # nothing is known


class BridgeHealth(StreamModel):
    """The bridge's counters for one worker and rank, cumulative since the bridge started."""

    trust: Trust
    epoch: Clock
    seq: Clock | None = Field(None, description="newest engine sequence seen; null: none yet")
    frames: Counter = Field(0, description="ZMQ messages received, replays included")
    mangled_frames: Counter = Field(0, description="messages that could not be decoded; each cost itself only")
    skipped_events: Counter = Field(0, description="events of unknown type or broken form inside good frames")
    lost_batches: Counter = Field(0, description="engine batches lost for good (gap marks)")
    replayed_batches: Counter = Field(0, description="engine batches recovered through replay")
    restarts: Counter = Field(0, description="sequence steps back seen")
    reported_blocks: Counter = Field(0, description="blocks announced again though nothing was stored")
    unnamed_blocks: Counter = Field(0, description="blocks stored without tokens that could not be named")
    unknown_removals: Counter = Field(0, description="removals of blocks that were not resident")
    resident_blocks: Counter = Field(0, description="physical blocks held now, by reference counts")
    peak_resident_blocks: Counter = 0
    buffered_records: Counter = Field(0, description="records waiting for the stream")
    dropped_records: Counter = Field(0, description="records dropped because the stream was away too long; a gap mark follows")
    key_id: str | None = Field(
        None, pattern=r"^[0-9a-f]{8}$", description="which hash key the bridge names blocks with; see HashKey.key_id; null: unknown"
    )


class WorkerLoad(StreamModel):
    """One reading of an engine's metrics page for one rank. Counters are cumulative since the engine's start. null: not reported."""

    version: Literal[1] = 1
    pool: str = Field(min_length=1, max_length=1024)
    worker: str = Field(min_length=1, max_length=1024)
    rank: Rank
    time_s: UnixSeconds = Field(description="unix seconds of the reading")
    engine: Literal["vllm", "sglang", "other"]
    model: str | None = None
    up: bool = Field(description="the metrics page answered")
    running: float | None = Field(None, ge=0, description="requests running")
    waiting: float | None = Field(None, ge=0, description="requests waiting")
    kv_usage: float | None = Field(None, ge=0, description="share of blocks held by requests, 0 to 1")
    capacity_blocks: Counter | None = Field(None, description="usable KV blocks")
    block_size: Tokens | None = Field(None, ge=1, description="tokens a block")
    prefix_queries_tokens: float | None = Field(None, ge=0)
    prefix_hits_tokens: float | None = Field(None, ge=0)
    prompt_tokens: float | None = Field(None, ge=0)
    generation_tokens: float | None = Field(None, ge=0)
    preemptions: float | None = Field(None, ge=0)
    bridge: BridgeHealth
