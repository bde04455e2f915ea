"""Told requests for tests of analyses: one line says what matters, the rest is filled in."""

from __future__ import annotations

from typing import Any

import numpy as np

from collector.analytics.attributed import Attributed
from schemas.causes import Cause


def told(
    prompt_tokens: int = 100, hit_tokens: int | None = 0, at_s: float = 1000.0, chain: Any = (), causes: Any = None, gone_s: Any = None,
    **more: Any,
) -> Attributed:  # fmt: skip
    """A request whose losses are first_seen. chain: names of its blocks, causes: of each (hits as far as hit_tokens say)."""
    blocks = np.asarray(chain, np.uint64)
    size = more.setdefault("block_size", 16 if len(blocks) else 0)
    if causes is None:
        causes = np.where(np.arange(1, len(blocks) + 1) * size <= (hit_tokens or 0), Cause.HIT, Cause.FIRST_SEEN)
    lost = prompt_tokens - (hit_tokens or 0)
    values: dict[str, Any] = {
        "request_id": "r", "started_s": at_s - 0.1, "prefill_s": at_s, "ended_s": at_s + 1, "pool": "p", "worker": "w", "rank": 0,
        "model": "m", "route": "r", "tenant": "t", "template": None, "session_id": None, "policy": "cost",
        "prompt_tokens": prompt_tokens, "completion_tokens": None, "hit_tokens": hit_tokens, "chain": blocks,
        "causes": np.asarray(causes, np.uint8),
        "gone_s": np.full(len(blocks), np.nan, np.float32) if gone_s is None else np.asarray(gone_s, np.float32),
        "idle_s": np.full(len(blocks), np.nan, np.float32),
        "run_causes": np.array([Cause.HIT, Cause.FIRST_SEEN], np.uint8),
        "run_tokens": np.array([hit_tokens or 0, lost], np.uint32), "run_seconds": np.array([0.0, np.nan]), "diverged_at": None,
        "ttft_s": None, "engine_queue_s": None, "engine_ttft_s": None,
    }  # fmt: skip
    return Attributed(**(values | more))
