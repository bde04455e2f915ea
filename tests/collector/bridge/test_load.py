from __future__ import annotations

import gzip
import time
from pathlib import Path

import pytest

from collector.bridge.load import LoadReading, read_page

RUNS = Path(__file__).parents[2] / "fixtures" / "vllm-0.32.0"


def page(folder: str, name: str = "metrics_after") -> str:
    with gzip.open(RUNS / folder / f"{name}.prom.gz", "rt") as text:
        return text.read()


def test_the_recorded_vllm_page() -> None:
    assert read_page(page("a-int-hash"), 1) == {
        0: LoadReading(
            engine="vllm", model="tiny", running=0, waiting=0, kv_usage=0, capacity_blocks=199, block_size=32,
            prefix_queries_tokens=52856, prefix_hits_tokens=45920, prompt_tokens=52856, generation_tokens=1844, preemptions=0,
        )
    }  # fmt: skip


def test_preemptions_of_the_recorded_run_that_had_two() -> None:
    reading = read_page(page("c-preemption"), 1)[0]
    assert (reading.preemptions, reading.capacity_blocks) == (2, 131)


def test_two_ranks_on_one_recorded_page() -> None:
    ranks = read_page(page("d-two-dp-ranks"), 2)
    assert {r: (x.prefix_queries_tokens, x.prefix_hits_tokens, x.generation_tokens) for r, x in ranks.items()} == {
        0: (8110, 5600, 516), 1: (8144, 5568, 248),
    }  # fmt: skip
    assert {x.capacity_blocks for x in ranks.values()} == {131}
    assert read_page(page("d-two-dp-ranks"), 1) == {0: ranks[0]}


def test_a_page_is_read_in_under_five_milliseconds() -> None:
    text = page("a-int-hash")
    read_page(text, 1)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        read_page(text, 1)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.005


def test_names_of_vllm_before_0_12_and_counters_without_total() -> None:
    text = """\
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:gpu_prefix_cache_queries{model_name="m"} 100
vllm:gpu_prefix_cache_hits_total{model_name="m"} 40
vllm:num_requests_running{model_name="m"} 3
vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0
"""
    assert read_page(text, 1) == {
        0: LoadReading(engine="vllm", model="m", running=3, kv_usage=0.25, block_size=16, prefix_queries_tokens=100, prefix_hits_tokens=40)
    }


def test_a_single_rank_takes_the_only_engine_of_its_page_whatever_its_number() -> None:
    text = 'vllm:num_requests_running{engine="5",model_name="m"} 2\n'
    assert read_page(text, 1)[0].running == 2
    assert read_page(text, 2) == {}


def test_a_sum_over_engines_is_no_capacity() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{e}"}} 1\nvllm:cache_config_info{{engine="{e}",block_size="16",num_gpu_blocks="200"}} 1\n'
        for e in (0, 1)
    )
    assert [x.capacity_blocks for x in read_page(text, 2).values()] == [None, None]


SGLANG = """\
sglang:num_running_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 4.0
sglang:num_running_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="1"} 4.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 1.0
sglang:token_usage{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.5
sglang:max_total_num_tokens{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 6400
sglang:page_size{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 64
sglang:prompt_tokens_total{engine_type="unified",model_name="m",is_streaming="true"} 100
sglang:prompt_tokens_total{engine_type="unified",model_name="m",is_streaming="false"} 20
sglang:generation_tokens_total{engine_type="unified",model_name="m",is_streaming="true"} 7
sglang:cached_tokens_total{cache_source="device",engine_type="unified",model_name="m"} 60
sglang:cached_tokens_total{cache_source="host",engine_type="unified",model_name="m"} 10
"""


def test_an_sglang_page_is_read_from_one_tensor_rank() -> None:
    assert read_page(SGLANG, 1) == {
        0: LoadReading(
            engine="sglang", model="m", running=4, waiting=1, kv_usage=0.5, capacity_blocks=100, block_size=64,
            prefix_queries_tokens=120, prefix_hits_tokens=70, prompt_tokens=120, generation_tokens=7,
        )
    }  # fmt: skip
    total = SGLANG + 'sglang:cached_tokens_total{cache_source="total",engine_type="unified",model_name="m"} 75\n'
    assert read_page(total, 1)[0].prefix_hits_tokens == 75


def test_sglang_ranks_are_told_apart_and_what_names_no_rank_stays_unknown() -> None:
    text = "".join(
        f'sglang:num_running_reqs{{dp_rank="{r}",model_name="m",tp_rank="{t}"}} {r + 1}\n' for r in (0, 1) for t in (2 * r, 2 * r + 1)
    ) + 'sglang:prompt_tokens_total{model_name="m"} 9\n'  # fmt: skip
    ranks = read_page(text, 2)
    assert {r: (x.running, x.prompt_tokens) for r, x in ranks.items()} == {0: (1, None), 1: (2, None)}


def test_pages_of_something_else_and_broken_ones() -> None:
    assert read_page("", 1) == {}
    assert read_page("go_goroutines 3\n", 1) == {}
    assert read_page('vllm:num_requests_running{engine="0"} NaN\nvllm:num_requests_waiting{engine="0"} 1\n', 1)[0].running is None
    with pytest.raises(ValueError, match=r"."):
        read_page("vllm:num_requests_running{engine= 3\n", 1)
