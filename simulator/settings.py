"""Settings of `warmwatch mock-engine` and `warmwatch traffic`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, SecretStr, model_validator

from schemas.settings import Settings
from simulator.timing import StepCost

TINY_TOKENIZER = Path(__file__).parent / "tokenizer"


class MockEngineSettings(Settings):
    """A mock vLLM 0.32 server: OpenAI HTTP, /metrics, /tokenize, KV events over ZeroMQ with replay. No GPU, no model; the prefix
    cache behaves as the engine's."""

    command: ClassVar[str] = "mock-engine"

    host: str = Field("127.0.0.1", description="address to listen on, for HTTP and for KV events")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 finds a free one (printed when ready)")
    model: str = Field("tiny", min_length=1, description="the served model's name")
    tokenizer: Path = Field(TINY_TOKENIZER, description="folder with tokenizer.json and a chat template")
    lora: list[str] = Field([], description="names of LoRA adapters that are served beside the model")
    block_size: int = Field(16, ge=1, description="tokens of a KV block")
    num_gpu_blocks: int = Field(1024, ge=2, description="KV blocks of each rank; one of them is a placeholder")
    max_model_len: int = Field(8192, ge=2, description="most tokens of prompt and answer; never more than the blocks hold")
    max_num_seqs: int = Field(64, ge=1, description="most requests running at once on a rank")
    max_num_batched_tokens: int = Field(2048, ge=1, description="most tokens computed in a step; longer prefills run in chunks")
    data_parallel_size: int = Field(1, ge=1, le=64, description="ranks, each with its own cache and KV ports")
    kv_port: int = Field(0, ge=0, le=65535, description="KV event port of rank 0, the next ranks follow; 0 finds free ones")
    kv_replay_port: int = Field(0, ge=0, le=65535, description="replay port of rank 0, the next ranks follow; 0 finds free ones")
    kv_topic: str = Field("kv-events", description="first frame of KV event messages")
    kv_buffer_steps: int = Field(10_000, ge=1, description="batches kept for replay")
    kv_hashes: Literal["int", "bytes"] = Field("int", description="block hashes as unsigned 64-bit integers or as 32 bytes")
    prompt_tokens_details: bool = Field(True, description="say in `usage` how many prompt tokens were cached")
    per_request_metrics: bool = Field(False, description="put `metrics` with times into answers")
    answer_tokens: int = Field(128, ge=1, description="length of an answer when the request names no max_tokens")
    instant: bool = Field(False, description="take no time at all: for benchmarks of what stands before the engine")
    speed: float = Field(1.0, gt=0, description="how many times faster than the cost model")
    prefill_base_s: float = Field(StepCost().prefill_base_s, ge=0, description="seconds of a step with a prefill")
    prefill_token_s: float = Field(StepCost().prefill_token_s, ge=0, description="seconds of each uncached prompt token")
    prefill_attention_s: float = Field(
        StepCost().prefill_attention_s, ge=0, description="seconds of each pair of an uncached token and one before it"
    )
    decode_base_s: float = Field(StepCost().decode_base_s, ge=0, description="seconds of a step with a decode")
    decode_sequence_s: float = Field(StepCost().decode_sequence_s, ge=0, description="seconds more of each decoding request")

    def cost(self) -> StepCost:
        return StepCost(
            prefill_base_s=self.prefill_base_s,
            prefill_token_s=self.prefill_token_s,
            prefill_attention_s=self.prefill_attention_s,
            decode_base_s=self.decode_base_s,
            decode_sequence_s=self.decode_sequence_s,
            speed=self.speed,
            instant=self.instant,
        )


class TrafficSettings(Settings):
    """Agent traffic: sessions that share a system prompt and tools and whose history grows with every turn."""

    command: ClassVar[str] = "traffic"

    url: str = Field("http://127.0.0.1:8000", description="base address of a router or an engine, without /v1")
    model: str = Field("tiny", description="model to ask for")
    api_key: SecretStr = Field(SecretStr(""), description="sent as a bearer token when not empty")
    sessions: int = Field(24, ge=1, description="sessions at the same time; one that ends is followed by a new one")
    templates: int = Field(6, ge=1, description="different agents: each has its own system prompt and tools")
    tenants: int = Field(3, ge=1, description="tenants; a template belongs to one")
    duration_s: float = Field(0, ge=0, description="seconds to run; 0 until stopped")
    max_requests: int = Field(0, ge=0, description="stop after so many requests; 0 for no such limit")
    system_words: int = Field(420, ge=1, description="words of a system prompt (a word is a token)")
    tools: int = Field(4, ge=0, description="tools of a template, about 90 tokens each")
    user_words: tuple[int, int] = Field((20, 90), description="least and most words of a user's message")
    tool_words: tuple[int, int] = Field((60, 260), description="least and most words of a tool's result")
    tool_share: float = Field(0.7, ge=0, le=1, description="share of turns that bring a tool result rather than a user's message")
    answer_tokens: tuple[int, int] = Field((12, 48), description="least and most tokens of an answer")
    turns: tuple[int, int] = Field((5, 14), description="least and most turns of a session")
    think_s: tuple[float, float] = Field((0.3, 2.5), description="least and most seconds between an answer and the next turn")
    subagent_share: float = Field(0.08, ge=0, le=1, description="share of turns that first start sub-agents")
    subagents: int = Field(3, ge=0, description="sub-agents started at once, all on the session's own template")
    max_prompt_tokens: int = Field(4000, ge=1, description="a session whose prompt grew beyond this ends")
    timeout_s: float = Field(120, gt=0, description="seconds after which a request counts as failed")
    stream_share: float = Field(0.9, ge=0, le=1, description="share of streamed requests")
    seed: int = Field(1, description="the same seed gives the same sessions")

    @model_validator(mode="after")
    def _ordered(self) -> TrafficSettings:
        for name in ("user_words", "tool_words", "answer_tokens", "turns", "think_s"):
            low, high = getattr(self, name)
            if not 0 <= low <= high:
                raise ValueError(f"{name} must be two numbers, the least first")
        if self.turns[0] < 1 or self.answer_tokens[0] < 1:
            raise ValueError("turns and answer_tokens must be at least 1")
        return self
