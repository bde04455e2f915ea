"""The `/metrics` page of vLLM 0.32, as captured: names, help texts, labels, bucket edges, and the `_created` twins.

Written by hand rather than with prometheus_client's metric objects: they cost 2 to 3 microseconds an observation and there
are fifteen a request, which would be a third of the mock's time when it runs instantly. A histogram here is a list of counts.
Left out: families that only exist with other flags (`kv_block_*`), and Python's, the process's and the HTTP framework's own.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.utils import floatToGoString

from simulator.scheduler import SimRequest, Step

TTFT_EDGES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_GAP_EDGES = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_EDGES = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
ITERATION_EDGES = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
PREEMPTION_EDGES = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
N_EDGES = (1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True, slots=True)
class Family:
    name: str  # without the prefix `vllm:` and without `_total`
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str = ""  # one more label beside engine and model_name ...
    values: tuple[str, ...] = ("",)  # ... and its values
    edges: tuple[float, ...] | None = None  # None in a histogram: token counts up to the model's length
    per_engine: bool = True


FAMILIES = (
    Family(
        "estimated_flops_per_gpu",
        "counter",
        "Estimated number of floating point operations per GPU (for Model Flops Utilization calculations).",
    ),
    Family(
        "estimated_read_bytes_per_gpu",
        "counter",
        "Estimated number of bytes read from memory per GPU (for Model Flops Utilization calculations).",
    ),
    Family(
        "estimated_write_bytes_per_gpu",
        "counter",
        "Estimated number of bytes written to memory per GPU (for Model Flops Utilization calculations).",
    ),
    Family("num_requests_running", "gauge", "Number of requests in model execution batches."),
    Family("num_requests_waiting", "gauge", "Number of requests waiting to be processed."),
    Family(
        "num_requests_waiting_by_reason",
        "gauge",
        "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; 'deferred' = deferred by "
        "transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals vllm:num_requests_waiting.",
        "reason",
        ("capacity", "deferred"),
    ),
    Family(
        "engine_sleep_state",
        "gauge",
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; weights_offloaded = 1 means sleep "
        "level 1; discard_all = 1 means sleep level 2.",
        "sleep_state",
        ("awake", "weights_offloaded", "discard_all"),
    ),
    Family("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage."),
    Family("prefix_cache_queries", "counter", "Prefix cache queries, in terms of number of queried tokens."),
    Family("prefix_cache_hits", "counter", "Prefix cache hits, in terms of number of cached tokens."),
    Family(
        "external_prefix_cache_queries",
        "counter",
        "External prefix cache queries from KV connector cross-instance cache sharing, in terms of number of queried tokens.",
    ),
    Family(
        "external_prefix_cache_hits",
        "counter",
        "External prefix cache hits from KV connector cross-instance cache sharing, in terms of number of cached tokens.",
    ),
    Family("mm_cache_queries", "counter", "Multi-modal cache queries, in terms of number of queried items."),
    Family("mm_cache_hits", "counter", "Multi-modal cache hits, in terms of number of cached items."),
    Family("num_preemptions", "counter", "Cumulative number of preemption from the engine."),
    Family("prompt_tokens", "counter", "Number of prefill tokens processed."),
    Family(
        "prompt_tokens_by_source",
        "counter",
        "Number of prompt tokens by source.",
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    Family("prompt_tokens_cached", "counter", "Number of cached prompt tokens (local + external)."),
    Family(
        "prompt_tokens_cached_by_source",
        "counter",
        "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to DRAM), disk, p2p "
        "(transferred from another vLLM instance) or external_unspecified. Counted at admission; sums to vllm:prefix_cache_hits + "
        "vllm:external_prefix_cache_hits.",
        "source",
        ("device", "host", "p2p", "disk", "external_unspecified"),
    ),
    Family("generation_tokens", "counter", "Number of generation tokens processed."),
    Family(
        "request_success",
        "counter",
        "Count of successfully processed requests.",
        "finished_reason",
        ("stop", "length", "abort", "error", "repetition"),
    ),
    Family(
        "admission_rejections",
        "counter",
        "Number of admission attempts rejected by a queue limit, by reason.",
        "reason",
        ("max_num_queued_reqs", "max_num_queued_tokens"),
        per_engine=False,
    ),
    Family("request_prompt_tokens", "histogram", "Number of prefill tokens processed."),
    Family("request_generation_tokens", "histogram", "Number of generation tokens processed."),
    Family("iteration_tokens_total", "histogram", "Histogram of number of tokens per engine_step.", edges=ITERATION_EDGES),
    Family("request_max_num_generation_tokens", "histogram", "Histogram of maximum number of requested generation tokens."),
    Family("request_params_n", "histogram", "Histogram of the n request parameter.", edges=N_EDGES),
    Family("request_params_max_tokens", "histogram", "Histogram of the max_tokens request parameter."),
    Family("time_to_first_token_seconds", "histogram", "Histogram of time to first token in seconds.", edges=TTFT_EDGES),
    Family("inter_token_latency_seconds", "histogram", "Histogram of inter-token latency in seconds.", edges=TOKEN_GAP_EDGES),
    Family(
        "request_time_per_output_token_seconds",
        "histogram",
        "Histogram of time_per_output_token_seconds per request.",
        edges=TOKEN_GAP_EDGES,
    ),
    Family("e2e_request_latency_seconds", "histogram", "Histogram of e2e request latency in seconds.", edges=REQUEST_EDGES),
    Family("request_queue_time_seconds", "histogram", "Histogram of time spent in WAITING phase for request.", edges=REQUEST_EDGES),
    Family("request_inference_time_seconds", "histogram", "Histogram of time spent in RUNNING phase for request.", edges=REQUEST_EDGES),
    Family("request_prefill_time_seconds", "histogram", "Histogram of time spent in PREFILL phase for request.", edges=REQUEST_EDGES),
    Family("request_decode_time_seconds", "histogram", "Histogram of time spent in DECODE phase for request.", edges=REQUEST_EDGES),
    Family("request_num_preemptions", "histogram", "Histogram of the number of times a request was preempted.", edges=PREEMPTION_EDGES),
    Family(
        "request_prefill_kv_computed_tokens",
        "histogram",
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
    ),
)


def go_float(value: float) -> str:
    """A number as Go and Prometheus write it."""
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]  # the library has no types there


class _Histogram:
    __slots__ = ("counts", "edges", "sum")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value


def token_count_edges(longest: int) -> tuple[float, ...]:
    """1, 2, 5 times powers of ten, up to the model's length."""
    edges: list[float] = []
    power = 1
    while power <= longest:
        edges += [float(m * power) for m in (1, 2, 5) if m * power <= longest]
        power *= 10
    return tuple(edges)


class RankMetrics:
    """What one rank counts. Counters and gauges are plain numbers by (family, label value)."""

    def __init__(self, rank: int, max_model_len: int) -> None:
        self.rank = rank
        self.created = time.time()
        self.values: defaultdict[tuple[str, str], float] = defaultdict(float)
        token_edges = token_count_edges(max_model_len)
        self.histograms = {f.name: _Histogram(f.edges or token_edges) for f in FAMILIES if f.kind == "histogram"}
        self.values["engine_sleep_state", "awake"] = 1.0

    def step(self, step: Step) -> None:
        """A step was scheduled. Hits are counted at a request's first admission only."""
        v = self.values
        for request in step.admitted:
            hit = request.hit_tokens or 0
            v["prefix_cache_queries", ""] += request.table.prompt_tokens
            v["prefix_cache_hits", ""] += hit
            v["prompt_tokens_cached_by_source", "device"] += hit
        v["num_preemptions", ""] += step.preempted
        self.histograms["iteration_tokens_total"].observe(step.tokens)

    def token(self, request: SimRequest, gap_s: float | None) -> None:
        """A request produced a token, `gap_s` after the one before it (None: its first)."""
        v = self.values
        v["generation_tokens", ""] += 1
        if gap_s is not None:
            self.histograms["inter_token_latency_seconds"].observe(gap_s)
            return
        prompt, hit = request.table.prompt_tokens, request.hit_tokens or 0
        v["prompt_tokens", ""] += prompt
        v["prompt_tokens_cached", ""] += hit
        v["prompt_tokens_by_source", "local_cache_hit"] += hit
        v["prompt_tokens_by_source", "local_compute"] += prompt - hit
        self.histograms["time_to_first_token_seconds"].observe((request.first_token_s or 0.0) - request.arrived_s)

    def finished(self, request: SimRequest) -> None:
        self.values["request_success", request.finish_reason] += 1
        first, last, scheduled = request.first_token_s, request.last_token_s, request.scheduled_s
        if first is None or last is None or scheduled is None:
            return
        h = self.histograms
        prompt, produced = request.table.prompt_tokens, request.produced
        h["request_prompt_tokens"].observe(prompt)
        h["request_generation_tokens"].observe(produced)
        h["request_max_num_generation_tokens"].observe(produced)
        h["request_params_n"].observe(1)
        h["request_params_max_tokens"].observe(len(request.answer))
        h["e2e_request_latency_seconds"].observe(last - request.arrived_s)
        h["request_queue_time_seconds"].observe(scheduled - request.arrived_s)
        h["request_prefill_time_seconds"].observe(first - scheduled)
        h["request_decode_time_seconds"].observe(last - first)
        h["request_inference_time_seconds"].observe(last - scheduled)
        h["request_time_per_output_token_seconds"].observe((last - first) / (produced - 1) if produced > 1 else 0.0)
        h["request_num_preemptions"].observe(request.preemptions)
        h["request_prefill_kv_computed_tokens"].observe(prompt - (request.hit_tokens or 0))

    def aborted(self) -> None:
        self.values["request_success", "abort"] += 1


def render(ranks: Sequence[RankMetrics], model: str, cache_config: Sequence[dict[str, str]]) -> bytes:
    """The page, in Prometheus' text format. `cache_config`: the labels of `vllm:cache_config_info`, one for each rank."""
    lines: list[str] = []
    for family in FAMILIES:
        lines += _family(family, ranks, model)
    lines += _head("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", "gauge")
    lines += [f"vllm:cache_config_info{_labels(labels)} 1.0" for labels in cache_config]
    return ("\n".join(lines) + "\n").encode()


def _head(name: str, help_: str, kind: str) -> list[str]:
    return [f"# HELP {name} {help_}", f"# TYPE {name} {kind}"]


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{k}="{v}"' for k, v in sorted(labels.items())) + "}"


def _family(family: Family, ranks: Sequence[RankMetrics], model: str) -> Iterator[str]:
    name = f"vllm:{family.name}"
    rows = []
    for metrics in ranks if family.per_engine else ranks[:1]:
        for value in family.values:
            labels = {"model_name": model}
            if family.per_engine:
                labels["engine"] = str(metrics.rank)
            if family.label:
                labels[family.label] = value
            rows.append((metrics, value, labels))
    sample = f"{name}_total" if family.kind == "counter" else name
    yield from _head(sample, family.help, family.kind)
    for metrics, value, labels in rows:
        if family.kind != "histogram":
            yield f"{sample}{_labels(labels)} {go_float(metrics.values[family.name, value])}"
            continue
        histogram = metrics.histograms[family.name]
        below = 0
        for edge, count in zip((*histogram.edges, float("inf")), histogram.counts, strict=True):
            below += count
            yield f"{name}_bucket{_labels(labels | {'le': go_float(edge)})} {float(below)}"
        yield f"{name}_count{_labels(labels)} {float(below)}"
        yield f"{name}_sum{_labels(labels)} {go_float(histogram.sum)}"
    if family.kind != "gauge":
        yield from _head(f"{name}_created", family.help, "gauge")
        for metrics, _, labels in rows:
            yield f"{name}_created{_labels(labels)} {go_float(metrics.created)}"
