from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from collector.bridge.discovery import Endpoints, from_fleet, from_sglang, from_vllm
from schemas.fleet import Worker

RECORDED = Path(__file__).parents[2] / "fixtures" / "vllm-0.32.0" / "c-preemption" / "kv_event_sources.json"


def worker(**more: Any) -> Worker:
    return Worker.model_validate({"pool": "p", "url": "http://gpu-3:8000", **more})


def test_ranks_follow_the_port_of_rank_0() -> None:
    found = from_fleet(worker(events="tcp://gpu-3:5557", replay="tcp://gpu-3:5657", ranks=3))
    assert found[0] == Endpoints("tcp://gpu-3:5557", "tcp://gpu-3:5657")
    assert found[2] == Endpoints("tcp://gpu-3:5559", "tcp://gpu-3:5659")
    assert from_fleet(worker(events="ipc:///run/kv", ranks=2))[1] == Endpoints("ipc:///run/kv_dp1", None)
    assert from_fleet(worker()) == {}


def test_the_recorded_vllm_answer_names_the_workers_own_host() -> None:
    found = from_vllm(json.loads(RECORDED.read_text()), worker())
    assert list(found) == [0]
    assert found[0].events.startswith("tcp://gpu-3:")
    assert found[0].replay is not None
    assert found[0].replay.startswith("tcp://gpu-3:")


def test_vllm_ranks_are_told_apart_and_concrete_hosts_stay() -> None:
    answer = {str(r): {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://10.0.0.7:{5557 + r}"} for r in range(2)}
    assert from_vllm(answer, worker(ranks=2)) == {0: Endpoints("tcp://10.0.0.7:5557"), 1: Endpoints("tcp://10.0.0.7:5558")}
    assert from_vllm({"3": answer["1"]}, worker()) == {0: Endpoints("tcp://10.0.0.7:5558")}
    assert from_vllm({"0": {**answer["0"], "enable_kv_cache_events": False}}, worker()) == {}
    assert from_vllm({"0": {**answer["0"], "endpoint": "tcp://[::]:5557"}}, worker(url="http://[fd00::1]:8000")) == {
        0: Endpoints("tcp://[fd00::1]:5557")
    }


@pytest.mark.parametrize("answer", [[], "x", {"a": {}}, {"0": 3}])
def test_another_answer_is_refused(answer: Any) -> None:
    with pytest.raises(ValueError, match="rank"):
        from_vllm(answer, worker())


def test_sglang_names_bases_and_a_wildcard_host() -> None:
    events = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "", "block_size": 64, "dp_size": 2}
    assert from_sglang({"kv_events": events}, worker(ranks=2))[1] == Endpoints("tcp://gpu-3:5558")
    both = {**events, "replay_endpoint_port_base": 6557, "endpoint_host": "10.0.0.9"}
    assert from_sglang({"kv_events": both}, worker(ranks=2))[1] == Endpoints("tcp://10.0.0.9:5558", "tcp://10.0.0.9:6558")
    assert from_sglang({"kv_events": None}, worker()) == {}
    assert from_sglang({"kv_events": {**events, "publisher": "null"}}, worker()) == {}
    with pytest.raises(ValueError, match="endpoint_port_base"):
        from_sglang({"kv_events": {"publisher": "zmq"}}, worker())
