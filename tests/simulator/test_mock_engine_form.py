"""The mock's answers, streams, events, replay and metrics agree with the recorded vLLM 0.32.0 in form, field by field.

The recorded requests themselves are sent, with the recorded model's tokenizer and block size; so where the form allows it
the values are compared as well: token counts, cached tokens, the token ids of events.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from simulator.mock_worker import MockWorker
from simulator.settings import MockEngineSettings
from tests.simulator.kv_client import KvReader, decode
from tests.simulator.recordings import FIXTURES, read_batches, read_jsonl, read_text


def form(value: Any) -> Any:
    """Keys and types, recursively. Whole numbers and fractions are told apart; a list is its distinct element forms."""
    if isinstance(value, dict):
        return {k: form(v) for k, v in value.items()}
    if isinstance(value, list):
        forms: list[Any] = []
        for v in value:
            if form(v) not in forms:
                forms.append(form(v))
        return forms
    return type(value).__name__


def settings(**changes: Any) -> MockEngineSettings:
    recorded = {"port": 0, "block_size": 32, "num_gpu_blocks": 200, "max_model_len": 4096, "max_num_seqs": 8, "instant": True}
    return MockEngineSettings(**(recorded | changes))


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def send(http: aiohttp.ClientSession, worker: MockWorker, recorded: dict[str, Any]) -> tuple[int, Any, Any]:
    """Sends a recorded request. Status, headers, and the JSON answer or the stream's non-empty lines."""
    url = worker.url + recorded["path"]
    async with http.post(url, json=recorded["request"], headers=recorded["request_headers"]) as r:
        content = await r.text()
        if "sse" in recorded:
            return r.status, r.headers, [line for line in content.split("\n") if line]
        return r.status, r.headers, json.loads(content)


def chunks(lines: list[str]) -> list[Any]:
    return [json.loads(line[6:]) if line.startswith("data: {") else line for line in lines]


@pytest.mark.parametrize("folder", ["a-int-hash", "e-per-request-metrics"])
async def test_answers_have_the_recorded_form_and_token_counts(folder: str, http: aiohttp.ClientSession) -> None:
    recorded = [r for r in read_jsonl(f"{folder}/http") if r.get("request")]
    first = recorded[:5] + [r for r in recorded if r["status"] != 200]
    assert [r["note"] for r in first] == [
        "cold",
        "same request again",
        "same request again, streamed",
        "streamed without include_usage",
        "completions api",
        "error: unknown model",
    ]
    async with MockWorker(settings(per_request_metrics=folder.startswith("e"))) as worker:
        for r in first:
            status, headers, content = await send(http, worker, r)
            assert status == r["status"], r["note"]
            for name in ("Content-Type", "X-Request-ID"):
                assert headers[name] == r["response_headers"][name] or (name == "X-Request-ID" and not r["request_headers"])
            if "sse" not in r:
                assert form(content) == form(r["response"]), r["note"]
                assert list(content) == list(r["response"])
                assert content.get("usage") == r["response"].get("usage"), r["note"]
                if r["status"] != 200:
                    assert content == r["response"]
                continue
            mine, theirs = chunks(content), chunks(r["sse"])
            assert [form(c) for c in mine] == [form(c) for c in theirs], r["note"]
            assert [c.get("usage") for c in mine[:-1]] == [c.get("usage") for c in theirs[:-1]]
            assert {c["id"] for c in mine[:-1]} == {c["id"] for c in theirs[:-1]}
            assert [c["choices"][0]["finish_reason"] for c in mine[:-1] if c["choices"]] == [
                c["choices"][0]["finish_reason"] for c in theirs[:-1] if c["choices"]
            ]


@pytest.mark.parametrize(("folder", "hashes"), [("a-int-hash", "int"), ("b-bytes-hash", "bytes")])
async def test_events_have_the_recorded_form_and_token_ids(folder: str, hashes: str, http: aiohttp.ClientSession) -> None:
    recorded = [r for r in read_jsonl(f"{folder}/http") if r.get("request")]
    by_note = {r["note"]: r for r in recorded}
    theirs = [(m["frames"], decode(base64.b64decode(m["frames"][2]))) for m in read_jsonl(f"{folder}/frames")]
    kinds: dict[str, list[Any]] = {}
    for _, (_, events, _) in theirs:  # type: ignore[misc]
        for event in events:
            kinds.setdefault(event["type"], [])
            if form(event) not in kinds[event["type"]]:
                kinds[event["type"]].append(form(event))
    async with MockWorker(settings(kv_hashes=hashes, num_gpu_blocks=76)) as worker:
        async with KvReader(worker.event_ports[0], worker.replay_ports[0]) as reader:
            await send(http, worker, by_note["cold"])
            (frames,) = await reader.frames(1)
            topic, sequence, payload = frames
            assert [topic, sequence] == [base64.b64decode(f) for f in theirs[0][0][:2]]
            batch: Any = decode(payload)
            assert form(batch) == form(theirs[0][1])
            (mine,), (their,) = batch[1], theirs[0][1][1]  # type: ignore[index]
            assert {k: v for k, v in mine.items() if k != "block_hashes"} == {k: v for k, v in their.items() if k != "block_hashes"}
            assert list(mine) == list(their) and len(mine["block_hashes"]) == len(their["block_hashes"])

            # Salt, a session id, the full report, evictions and a reset: every form of event that was recorded, and no other.
            for note in ("session 1 turn 0", "session 4 turn 0", "session 5 turn 0", "session 5 turn 3"):
                await send(http, worker, by_note[note])
            async with http.post(worker.url + "/reset_prefix_cache") as r:
                assert await r.json() == {"success": True}
            await send(http, worker, by_note["same request after reset"])
            replies = await reader.replay(0)
        seen: dict[str, list[Any]] = {}
        for reply in replies[:-1]:
            for event in decode(reply[3])[1]:  # type: ignore[attr-defined]
                seen.setdefault(event["type"], [])
                assert form(event) in kinds[event["type"]], event["type"]
                if form(event) not in seen[event["type"]]:
                    seen[event["type"]].append(form(event))
        assert {k: sorted(map(str, v)) for k, v in seen.items()} == {k: sorted(map(str, v)) for k, v in kinds.items()}
        batches: list[Any] = [decode(reply[3])[1] for reply in replies[:-1]]
        (cleared,) = (b for b in batches if {"type": "AllBlocksCleared"} in b)
        assert [e["type"] for e in cleared] == ["AllBlocksCleared", "BlockStored"]  # late: with the next request's stores


async def test_replay_answers_as_recorded(http: aiohttp.ClientSession) -> None:
    cold = read_jsonl("a-int-hash/http")[0]
    theirs = [[base64.b64decode(f) for f in m["frames"]] for m in read_jsonl("a-int-hash/replay_from_20")]
    beyond = [[base64.b64decode(f) for f in m["frames"]] for m in read_jsonl("a-int-hash/replay_from_999999")]
    async with MockWorker(settings(kv_buffer_steps=4)) as worker, KvReader(worker.event_ports[0], worker.replay_ports[0]) as reader:
        for n in range(6):
            await send(http, worker, cold | {"request": cold["request"] | {"cache_salt": str(n), "max_tokens": 1}})
        live = await reader.frames(6)
        assert [int.from_bytes(f[1], "big") for f in live] == list(range(6))
        replies = await reader.replay(4)
        assert [len(r) for r in replies] == [len(theirs[0])] * 3
        assert [r[0] for r in replies] == [theirs[0][0]] * 3 and replies[0][1] == theirs[0][1]
        assert [r[2:] for r in replies[:-1]] == [f[1:] for f in live[4:]]
        assert replies[-1] == theirs[-1]
        assert await reader.replay(999_999) == beyond
        oldest_kept = await reader.replay(0)
        assert [int.from_bytes(r[2], "big") for r in oldest_kept[:-1]] == [2, 3, 4, 5]


def families(page: str) -> dict[str, Any]:
    out = {}
    for family in text_string_to_metric_families(page):
        if family.name.startswith("vllm:") and not family.name.startswith("vllm:kv_block_"):
            samples = {(s.name, tuple(sorted((k, v) for k, v in s.labels.items() if k != "le"))) for s in family.samples}
            edges = sorted({float(s.labels["le"]) for s in family.samples if "le" in s.labels})
            if family.name == "vllm:cache_config_info":
                samples = {(n, tuple(k for k, _ in labels)) for n, labels in samples}  # type: ignore[misc]
            out[family.name] = (family.type, family.documentation, samples, edges)
    return out


@pytest.mark.parametrize(("folder", "ranks"), [("a-int-hash", 1), ("d-two-dp-ranks", 2)])
async def test_metrics_have_the_recorded_families_labels_and_buckets(folder: str, ranks: int, http: aiohttp.ClientSession) -> None:
    async with (
        MockWorker(settings(data_parallel_size=ranks)) as worker,
        http.get(worker.url + "/metrics") as r,
    ):
        mine, theirs = families(await r.text()), families(read_text(f"{folder}/metrics_before.prom"))
    assert list(mine) == list(theirs)
    for name, family in theirs.items():
        assert mine[name] == family, name


async def test_metrics_after_the_first_requests_count_what_was_recorded(http: aiohttp.ClientSession) -> None:
    """Run e's first five requests, whose usage is recorded, against the counters of the page."""
    recorded = [r for r in read_jsonl("e-per-request-metrics/http") if r.get("request")][:5]
    async with MockWorker(settings()) as worker:
        for r in recorded:
            await send(http, worker, r)
        async with http.get(worker.url + "/metrics") as response:
            page = await response.text()
    values = {
        (s.name, s.labels.get("source") or s.labels.get("finished_reason")): s.value
        for f in text_string_to_metric_families(page)
        for s in f.samples
        if "le" not in s.labels
    }
    assert values["vllm:prefix_cache_queries_total", None] == 4 * 917 + 100
    assert values["vllm:prefix_cache_hits_total", None] == 3 * 896
    assert values["vllm:prompt_tokens_by_source_total", "local_compute"] == 917 + 3 * 21 + 100
    assert values["vllm:generation_tokens_total", None] == 4 * 16 + 8
    assert values["vllm:request_success_total", "length"] == 5
    assert values["vllm:time_to_first_token_seconds_count", None] == 5
    assert values["vllm:inter_token_latency_seconds_count", None] == 4 * 15 + 7
    assert values["vllm:kv_cache_usage_perc", None] == 0
    assert values["vllm:num_requests_running", None] == 0


async def test_kv_event_sources_have_the_recorded_form(http: aiohttp.ClientSession) -> None:
    recorded = json.loads((FIXTURES / "c-preemption" / "kv_event_sources.json").read_text())
    async with MockWorker(settings(data_parallel_size=2)) as worker, http.get(worker.url + "/kv_event_sources") as r:
        mine = await r.json()
    assert list(mine) == ["0", "1"]
    for source in mine.values():
        assert form(source) == form(recorded["0"]) and list(source) == list(recorded["0"])
    ports = [int(s["endpoint"].rsplit(":", 1)[1]) for s in mine.values()]
    assert ports == worker.event_ports and ports[1] == ports[0] + 1


async def test_tokenize_gives_the_recorded_token_ids(http: aiohttp.ClientSession) -> None:
    expected = {r["index"]: r for r in read_jsonl("expected_requests") if r["folder"] == "a-int-hash"}
    recorded = read_jsonl("a-int-hash/http")
    async with MockWorker(settings()) as worker:
        for index in (0, 4, 5):
            q = recorded[index]["request"]
            body = {k: q[k] for k in ("model", "messages", "tools", "prompt") if k in q}
            async with http.post(worker.url + "/tokenize", json=body) as r:
                answer = await r.json()
            assert answer == {
                "count": len(expected[index]["prompt_token_ids"]),
                "max_model_len": 4096,
                "tokens": expected[index]["prompt_token_ids"],
                "token_strs": None,
            }


async def test_a_rank_of_data_parallel_workers_publishes_its_own_rank(http: aiohttp.ClientSession) -> None:
    recorded = read_batches("d-two-dp-ranks/frames_rank1")[0]
    cold = read_jsonl("d-two-dp-ranks/http")[0]
    async with MockWorker(settings(data_parallel_size=2)) as worker:
        async with KvReader(worker.event_ports[1], worker.replay_ports[1]) as reader:
            request = cold | {"request_headers": {"X-data-parallel-rank": "1"}}
            await send(http, worker, request)
            (frames,) = await reader.frames(1)
            batch: Any = decode(frames[2])
            assert form(batch[:1] + batch[2:]) == form(recorded[:1] + recorded[2:]) and batch[2] == recorded[2] == 1
        status, _, answer = await send(http, worker, cold | {"request_headers": {"X-data-parallel-rank": "2"}})
        assert status == 400 and answer["error"]["code"] == 400
