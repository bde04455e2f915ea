"""What the mock engine does over HTTP beyond the recorded forms: leaving clients, errors, preemption, failures on demand."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from schemas.settings import SettingsError
from simulator.mock_worker import MockWorker, start_workers
from simulator.settings import MockEngineSettings
from tests.simulator.kv_client import KvReader, decode


def settings(**changes: Any) -> MockEngineSettings:
    return MockEngineSettings(**({"port": 0, "block_size": 16, "num_gpu_blocks": 100, "instant": True} | changes))


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def engine() -> AsyncIterator[MockWorker]:
    async with MockWorker(settings()) as worker:
        yield worker


def chat(words: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": words}], "max_tokens": 4} | more


async def post(http: aiohttp.ClientSession, worker: MockWorker, path: str, body: Any) -> tuple[int, Any]:
    async with http.post(worker.url + path, json=body) as r:
        return r.status, await r.json(content_type=None)


async def until(condition: Callable[[], bool], timeout_s: float = 5) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


async def test_the_answer_sent_back_as_history_is_found_in_the_cache(http: aiohttp.ClientSession) -> None:
    async with MockWorker(settings()) as worker:
        _, first = await post(http, worker, "/v1/chat/completions", chat(" the path code" * 20, max_tokens=60))
        history = [
            {"role": "user", "content": " the path code" * 20},
            {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
            {"role": "user", "content": " now fix it"},
        ]
        _, second = await post(http, worker, "/v1/chat/completions", chat("", messages=history))
    computed = first["usage"]["total_tokens"] - 1  # the last token was generated, not computed
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // 16 * 16


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/chat/completions", chat("x", model="nope"), 404, "does not exist"),
        ("/v1/chat/completions", {"model": "tiny"}, 400, "messages"),
        ("/v1/chat/completions", chat("x", max_tokens=0), 400, "max_tokens"),
        ("/v1/chat/completions", chat("x", max_tokens=5000), 400, "maximum context length is 1584 tokens"),
        ("/v1/chat/completions", chat("x", n=0), 400, "n must be"),
        ("/v1/chat/completions", chat("x", n=65), 400, "n must be"),
        ("/v1/chat/completions", chat("", messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "image_url"),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_0"}, 404, "resp_0"),
        ("/v1/embeddings", {"input": []}, 400, "prompt"),
        ("/v1/chat/completions", [1], 400, "object"),
        ("/v1/completions", {"prompt": [1, "b"]}, 400, "token ids"),
        ("/v1/completions", {"prompt": ["a"] * 65}, 400, "at most 64"),
        ("/tokenize", {}, 400, "needed"),
        ("/_sim/capacity", {"blocks": 1000}, 400, "capacity"),
        ("/_sim/slow", {"factor": "x"}, 400, "factor"),
    ],
)
async def test_wrong_requests_are_refused_in_the_engines_words(
    path: str, body: Any, status: int, words: str, http: aiohttp.ClientSession
) -> None:
    async with MockWorker(settings()) as worker:
        got, answer = await post(http, worker, path, body)
    assert got == status and words in answer["error"]["message"] and answer["error"]["code"] == status


async def test_streamed_text_completions_end_with_usage(http: aiohttp.ClientSession) -> None:
    body = {"prompt": [5] * 40, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    async with MockWorker(settings()) as worker, http.post(worker.url + "/v1/completions", json=body) as r:
        lines = [line for line in (await r.text()).split("\n") if line]
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert lines[-1] == "data: [DONE]"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, None, "length"]
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_client_that_leaves_frees_its_blocks(http: aiohttp.ClientSession) -> None:
    async with MockWorker(settings(instant=False, speed=1.0)) as worker:
        (rank,) = worker.engine.ranks
        async with http.post(worker.url + "/v1/chat/completions", json=chat("x", max_tokens=1000, stream=True)) as r:
            await r.content.readline()
            assert rank.cache.held_blocks > 0
            r.close()
        await until(lambda: rank.cache.held_blocks == 0)
        assert rank.metrics.values["request_success", "abort"] == 1 and not rank.scheduler.has_work


async def test_time_passes_as_the_cost_model_says_and_slow_makes_it_longer(http: aiohttp.ClientSession) -> None:
    async with MockWorker(settings(instant=False, prefill_base_s=0.05, decode_base_s=0.01, per_request_metrics=True)) as worker:
        _, fast = await post(http, worker, "/v1/chat/completions", chat("a"))
        assert (await post(http, worker, "/_sim/slow", {"factor": 3}))[0] == 200
        _, slow = await post(http, worker, "/v1/chat/completions", chat("b"))
    assert fast["metrics"]["time_to_first_token_ms"] >= 50 and fast["metrics"]["generation_time_ms"] >= 30
    assert slow["metrics"]["time_to_first_token_ms"] >= 150 and slow["metrics"]["generation_time_ms"] >= 90


async def test_too_many_at_once_are_preempted_and_all_answered(http: aiohttp.ClientSession) -> None:
    async with MockWorker(settings(num_gpu_blocks=40)) as worker:
        bodies = [chat(f" {w}" * 100, max_tokens=200) for w in ("path", "code", "test", "error", "list")]
        answers = await asyncio.gather(*(post(http, worker, "/v1/chat/completions", b) for b in bodies))
        values = worker.engine.ranks[0].metrics.values
        assert values["num_preemptions", ""] > 0
    assert [s for s, _ in answers] == [200] * 5
    assert all(a["usage"]["completion_tokens"] == 200 for _, a in answers)
    assert sum(a["usage"]["prompt_tokens_details"]["cached_tokens"] for _, a in answers) == values["prefix_cache_hits", ""]


async def test_events_add_up_to_what_the_cache_holds(http: aiohttp.ClientSession) -> None:
    async with MockWorker(settings(num_gpu_blocks=60)) as worker:
        for n in range(30):
            await post(http, worker, "/v1/chat/completions", chat(" the path code" * (10 + n % 7) + f" {n}", max_tokens=40))
        async with KvReader(worker.event_ports[0], worker.replay_ports[0]) as reader:
            replies = await reader.replay(0)
        counts: dict[int, int] = {}
        for reply in replies[:-1]:
            batch: Any = decode(reply[3])
            for event in batch[1]:
                for h in event["block_hashes"]:
                    counts[h] = counts.get(h, 0) + (1 if event["type"] == "BlockStored" else -1)
        assert {h: n for h, n in counts.items() if n} == worker.engine.ranks[0].cache.resident()


async def test_dropped_batches_leave_a_gap_that_replay_fills(http: aiohttp.ClientSession) -> None:
    async with MockWorker(settings()) as worker, KvReader(worker.event_ports[0], worker.replay_ports[0]) as reader:
        for n in range(4):
            if n == 1:
                await post(http, worker, "/_sim/drop_events", {"batches": 2})
            await post(http, worker, "/v1/chat/completions", chat(f" {n}" + " path" * 20))
        live = await reader.frames(2)
        assert [int.from_bytes(f[1], "big") for f in live] == [0, 3]
        assert [int.from_bytes(r[2], "big") for r in (await reader.replay(1))[:-1]] == [1, 2, 3]


async def test_a_restart_breaks_requests_empties_the_cache_and_starts_the_sequence_again(http: aiohttp.ClientSession) -> None:
    async with (
        MockWorker(settings(instant=False)) as worker,
        KvReader(worker.event_ports[0], worker.replay_ports[0]) as reader,
    ):
        streamed = chat(" path" * 50, max_tokens=1000, stream=True)
        async with http.post(worker.url + "/v1/chat/completions", json=streamed) as stream:
            await stream.content.readline()
            whole = asyncio.create_task(post(http, worker, "/v1/chat/completions", chat(" code" * 50, max_tokens=900)))
            await until(lambda: len(worker.engine.ranks[0].scheduler.running) == 2)
            _, state = await post(http, worker, "/_sim/restart", {"num_gpu_blocks": 50, "down_s": 0.3})
            assert state[0]["cached_blocks"] == 0 and state[0]["capacity_blocks"] == 49
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.read()
        assert (await whole)[0] == 500
        async with http.get(worker.url + "/health") as r:
            assert r.status == 503
        await until(lambda: not worker.engine.is_down)
        _, answer = await post(http, worker, "/v1/chat/completions", chat(" path" * 50))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        sequences = [int.from_bytes((await reader.frames(1))[0][1], "big")]
        while len(sequences) == 1 or sequences[-1] > sequences[-2]:
            sequences.append(int.from_bytes((await reader.frames(1))[0][1], "big"))
        assert sequences[0] == sequences[-1] == 0


async def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match="setting `port`"):
            async with MockWorker(settings(port=port)):
                raise AssertionError("it started")
        with pytest.raises(SettingsError, match="setting `kv_port`"):
            async with MockWorker(settings(kv_port=port)):
                raise AssertionError("it started")


def test_processes_start_on_free_ports_and_stop_on_a_signal() -> None:
    workers = start_workers(2, settings())
    try:
        assert len({p for w in workers for p in (w.http_port, *w.event_ports, *w.replay_ports)}) == 6

        async def ask(url: str) -> int:
            async with aiohttp.ClientSession() as http, http.post(url + "/v1/chat/completions", json=chat("hello")) as r:
                return r.status

        assert [asyncio.run(ask(w.url)) for w in workers] == [200, 200]
        workers[0].process.send_signal(signal.SIGINT)
        assert workers[0].process.wait(10) == 0
    finally:
        statuses = [w.stop() for w in workers]
    assert statuses == [0, 0]


async def test_a_broken_engine_loop_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        async with MockWorker(settings()) as worker:
            monkeypatch.setattr(worker.engine.ranks[0].scheduler, "schedule", lambda: 1 / 0)
            async with aiohttp.ClientSession() as http:
                request = asyncio.create_task(post(http, worker, "/v1/chat/completions", chat("x")))
                await asyncio.wait({worker.running}, timeout=5)
                assert worker.running.done()
                request.cancel()
                await asyncio.wait({request})
    assert raised.group_contains(ZeroDivisionError)


async def test_several_prompts_and_answers_are_choices_of_one_answer(http: aiohttp.ClientSession) -> None:
    async with MockWorker(settings()) as worker:
        body = {"model": "tiny", "prompt": [" the path" * 30, " code"], "n": 2, "max_tokens": 3, "seed": 4}
        _, whole = await post(http, worker, "/v1/completions", body)
        texts = [c["text"] for c in whole["choices"]]
        assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3] and len(set(texts)) == 4
        assert whole["usage"]["prompt_tokens"] == 61 and whole["usage"]["completion_tokens"] == 12
        async with http.post(worker.url + "/v1/completions", json=body | {"stream": True}) as r:
            lines = [json.loads(line[6:]) for line in (await r.read()).split(b"\n\n") if line.startswith(b"data: {")]
        streamed = ["".join(c["text"] for x in lines for c in x["choices"] if c["index"] == i) for i in range(4)]
        assert streamed == texts


async def test_prompt_log_probabilities_are_computed_without_the_cache_but_fill_it(http: aiohttp.ClientSession) -> None:
    async with MockWorker(settings()) as worker:
        body = {"model": "tiny", "prompt": " the path" * 40, "max_tokens": 1, "prompt_logprobs": 1}
        hits = [
            (await post(http, worker, "/v1/completions", b))[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
            for b in (body, body, {**body, "prompt_logprobs": None})
        ]
    assert hits == [0, 0, 64]


async def test_an_adapter_has_blocks_of_its_own_and_is_listed_with_its_parent(http: aiohttp.ClientSession) -> None:
    async with MockWorker(settings(lora=["fine"])) as worker:
        hits = [
            (await post(http, worker, "/v1/chat/completions", chat(" the path" * 40, model=m)))[1]["usage"]["prompt_tokens_details"]
            for m in ("tiny", "fine", "fine")
        ]
        async with http.get(worker.url + "/v1/models") as r:
            cards = (await r.json())["data"]
    assert [h["cached_tokens"] for h in hits] == [0, 0, 80]
    assert [(c["id"], c["parent"]) for c in cards] == [("tiny", None), ("fine", "tiny")]


async def test_failures_come_on_request_and_as_often_as_asked(http: aiohttp.ClientSession) -> None:
    async with MockWorker(settings()) as worker:
        await post(http, worker, "/_sim/fail", {"status": 429, "requests": 2, "retry_after_s": 3})
        async with http.post(worker.url + "/v1/messages", json={"messages": []}) as r:
            assert (r.status, r.headers["retry-after"]) == (429, "3")
            assert (await r.json())["error"]["type"] == "RateLimitError"
        statuses = [(await post(http, worker, "/v1/chat/completions", chat("x")))[0] for _ in range(2)]
    assert statuses == [429, 200]


DEEP = '{"a":' * 500 + "1" + "}" * 500
ONE = '"messages":[{"role":"user","content":"x"}]'


WRONG = [
    ("/v1/chat/completions", '{"messages":[5]}'),
    ("/v1/chat/completions", '{"messages":[{"role":"assistant","content":"x","tool_calls":5}]}'),
    ("/v1/chat/completions", f'{{{ONE},"tools":[{{"type":"function","function":{{"name":"f","parameters":{DEEP}}}}}]}}'),
    ("/v1/chat/completions", f'{{{ONE},"tools":[5],"tool_choice":"required"}}'),
    ("/v1/messages", f'{{{ONE},"max_tokens":2,"tools":[5]}}'),
    ("/v1/messages/count_tokens", '{"messages":5}'),
    ("/v1/responses", '{"input":5}'),
    ("/v1/embeddings", '{"input":[[1],["x"]]}'),
    ("/tokenize", '{"messages":[5]}'),
    ("/detokenize", '{"tokens":["x"]}'),
    ("/detokenize", '{"tokens":[-1]}'),
]


async def test_bodies_of_another_form_are_refused(http: aiohttp.ClientSession, engine: MockWorker) -> None:
    for path, body in WRONG:
        async with http.post(engine.url + path, data=body) as r:
            assert (r.status, "error" in json.loads(await r.read())) == (400, True), (path, body)


async def test_a_response_that_is_not_stored_cannot_be_continued(http: aiohttp.ClientSession, engine: MockWorker) -> None:
    for previous in ("resp_none", [], 5):
        status, body = await post(http, engine, "/v1/responses", {"input": "x", "previous_response_id": previous})
        assert (status, "not found" in body["error"]["message"]) == (404, True)
    _, first = await post(http, engine, "/v1/responses", {"input": "x", "max_output_tokens": 2})
    status, _ = await post(http, engine, "/v1/responses", {"input": 5, "previous_response_id": first["id"]})
    assert status == 400
