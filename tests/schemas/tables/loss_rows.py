"""Made-up rows of the tables of losses, and a published file of them, made as the collector makes it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from collector.store.publish import SCHEMAS, Publisher
from schemas.tables.published import MAJOR, MINOR, latency_bucket

NOON = dt.datetime(2026, 11, 30, 12)
END = NOON + dt.timedelta(minutes=10)
NOW = END + dt.timedelta(seconds=5)
Row = dict[str, Any]


def publish(publisher: Publisher, tables: Mapping[str, Sequence[Row]], **file: Any) -> None:
    """These rows as live parts; columns that a row does not name are NULL."""
    about = {"published_at": NOW, "watermark": END, "version": f"{MAJOR}.{MINOR}", "collector": "test", "state": "running"}
    flags = dict.fromkeys(("has_events", "has_decisions", "has_outcomes", "has_load"), True)
    rows = {"published": [about | flags | file], **tables}
    publisher.publish([], {name: pa.Table.from_pylist(list(made), schema=SCHEMAS[name]) for name, made in rows.items()})


def loss(cause: str, tokens: int, **more: Any) -> Row:
    """10 s of one worker; a second a thousand tokens."""
    usual: Row = {
        "bucket": NOON, "pool": "coder", "worker": "w1", "rank": 0, "model": "m", "route": "chat", "tenant": "t", "cause": cause,
        "tokens": tokens, "requests": 10, "lost_s": 0.0 if cause == "hit" else tokens / 1000, "seconds_known_tokens": tokens,
    }  # fmt: skip
    return usual | more


def rungs(prompt: int, ideal: int, held: int, selected: int, hit: int, **more: Any) -> Row:
    usual: Row = {
        "bucket": NOON, "pool": "coder", "worker": "w1", "rank": 0, "model": "m", "route": "chat", "tenant": "t", "policy": "cost",
        "requests": 100, "prompt_tokens": prompt, "ideal_tokens": ideal, "held_tokens": held, "selected_tokens": selected,
        "hit_tokens": hit, "regret_tokens": 0, "misrouted_s": 1.5, "bypass_bought_s": 2.5,
    }  # fmt: skip
    return usual | more


def spot(prefix: int, lost: int, **more: Any) -> Row:
    usual: Row = {
        "window_start": NOON, "window_s": 300, "pool": "coder", "prefix": prefix, "parent_prefix": None, "depth_tokens": 1600,
        "model": "m", "route": "chat", "tenant": "t", "template": "v7", "snippet": None, "lost_tokens": lost, "total_tokens": lost,
        "error_tokens": 10, "requests": 20, "avoidable_tokens": lost // 2, "top_cause": "evicted",
        "by_cause": [{"cause": "evicted", "tokens": lost - lost // 4}, {"cause": "load_bypass", "tokens": lost // 4}],
        "lost_s": lost / 1000, "workers": 3, "copies": 2, "gone_p50_s": 61.0, "idle_p50_s": 30.0, "example_request_id": "q1",
    }  # fmt: skip
    return usual | more


def parting(depth_from: int | None, depth_to: int | None, tokens: int, **more: Any) -> Row:
    usual: Row = {
        "window_start": NOON, "window_s": 300, "pool": "coder", "model": "m", "route": "chat", "tenant": "t", "template": "v7",
        "depth_from": depth_from, "depth_to": depth_to, "requests": 30, "diverged_tokens": tokens, "all_requests": 100,
        "all_prompt_tokens": 1_000_000, "lost_s": 3.0, "example_request_id": "q2",
    }  # fmt: skip
    return usual | more


def latency(seconds: float, n: int, **more: Any) -> Row:
    usual: Row = {
        "bucket": NOON, "pool": "coder", "worker": "w1", "rank": 0, "route": "chat", "policy": "cost", "measure": "ttft",
        "log_bucket": latency_bucket(seconds), "n": n,
    }  # fmt: skip
    return usual | more


def counts(worker: str, prompt: int, cached: int, **more: Any) -> Row:
    usual: Row = {
        "bucket": NOON, "pool": "coder", "worker": worker, "rank": 0, "requests": 100, "failed": 1, "prompt_tokens": prompt,
        "reported_requests": 100, "reported_prompt_tokens": prompt, "cached_tokens": cached, "event_requests": 100,
        "event_prompt_tokens": prompt, "event_hit_tokens": cached, "event_mismatches": 0, "lost_batches": 0,
    }  # fmt: skip
    return usual | more


COST_MODEL: Row = {
    "pool": "coder", "model": "m", "hardware": "default", "version": "v3", "source": "fitted", "base_s": 0.02, "a_s_per_token": 1e-4,
    "b_s_per_token2": 1e-9, "observations": 500, "residual_s": 0.002, "gpus": 8.0, "price_per_gpu_hour": 4.5, "currency": "EUR",
    "fitted_at": NOON,
}  # fmt: skip
