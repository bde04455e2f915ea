"""Agent traffic: told by its seed, prefixes that grow, every request accounted for, and routing matters."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from typing import Any

import pytest
from aiohttp import web

from router.prompts.tokens import LocalTokenizer
from schemas.settings import SettingsError, load
from simulator.answers import AnswerWords
from simulator.mock_worker import MockWorker
from simulator.prefix_cache import PrefixCache
from simulator.sessions import AgentSession, sessions, templates
from simulator.settings import TINY_TOKENIZER, MockEngineSettings, TrafficSettings
from simulator.traffic import RequestRecord, Traffic


@pytest.fixture(scope="module")
def tokenizer() -> LocalTokenizer:
    return LocalTokenizer.from_dir(TINY_TOKENIZER)


def settings(**changes: Any) -> TrafficSettings:
    quick = {"sessions": 6, "think_s": (0.0, 0.01), "answer_tokens": (3, 9), "max_requests": 60, "subagent_share": 0.2}
    return TrafficSettings(**(quick | changes))


def play(session: AgentSession) -> list[Any]:
    asked = []
    while not session.over:
        asked += [*session.subagents(), session.ask()]
        session.hear(" the answer", 100)
    return asked


def test_the_same_seed_gives_the_same_sessions_and_another_seed_others() -> None:
    def first(seed: int) -> list[Any]:
        made = sessions(settings(seed=seed))
        return [play(next(made)) for _ in range(5)]

    assert first(1) == first(1) != first(2)


def test_each_prompt_continues_the_one_before_it(tokenizer: LocalTokenizer) -> None:
    words = AnswerWords(tokenizer)
    session = next(sessions(settings(turns=(6, 6))))
    before: list[int] = []
    while not session.over:
        ask = session.ask()
        ids = tokenizer.chat(ask.messages, ask.tools).tolist()
        assert ids[: len(before)] == before
        answer = words.draw(array("I", ids), ask.max_tokens)
        before = ids + answer  # so the answer is found again, token by token
        session.hear(words.text(answer), len(ids))


def test_templates_differ_and_prompts_are_of_the_stated_length(tokenizer: LocalTokenizer) -> None:
    made = templates(TrafficSettings())
    assert len({t.system for t in made}) == len(made) == 6
    lengths = []
    for template in made:
        ask = AgentSession(TrafficSettings(), template, 0).ask()
        lengths.append(len(tokenizer.chat(ask.messages, ask.tools)))
    assert all(600 < n < 1100 for n in lengths)


def test_a_session_ends_when_its_prompt_has_grown_too_long() -> None:
    session = next(sessions(settings(max_prompt_tokens=500)))
    session.ask()
    session.hear("x", 500)
    assert session.over


def test_prefix_aware_routing_hits_far_more_than_round_robin(tokenizer: LocalTokenizer) -> None:
    """The default traffic over four caches of 800 blocks of 16 tokens, one request at a time."""

    def hit_rate(prefix_aware: bool) -> float:
        s, rng = TrafficSettings(), random.Random(3)
        words, source = AnswerWords(tokenizer), sessions(s)
        live = [next(source) for _ in range(s.sessions)]
        caches = [PrefixCache(800, 16) for _ in range(4)]
        sent, hits, prompts = [0] * 4, 0, 0
        for n in range(160):
            seat = rng.randrange(len(live))  # in turn, seats would line up with round robin
            ask = live[seat].ask()
            ids = array("I", tokenizer.chat(ask.messages, ask.tools).tolist())
            found = [len(c.lookup(caches[0].open("", ids[:]))) * 16 for c in caches]
            w = max(range(4), key=lambda k: found[k] - 60 * sent[k]) if prefix_aware else n % 4
            sent[w] += 1
            table = caches[w].open("", ids[:])
            hit = caches[w].lookup(table)
            assert caches[w].admit(table, hit, len(ids) - len(hit) * 16)
            caches[w].release(table)
            if n >= 60:
                hits, prompts = hits + len(hit) * 16, prompts + len(ids)
            live[seat].hear(words.text(words.draw(ids, ask.max_tokens)), len(ids))
            if live[seat].over:
                live[seat] = next(source)
        return hits / prompts

    assert hit_rate(prefix_aware=True) > hit_rate(prefix_aware=False) + 0.15


async def test_every_request_has_one_record_and_the_engine_saw_each() -> None:
    seen: list[RequestRecord] = []
    async with MockWorker(MockEngineSettings(port=0, instant=True)) as worker:
        report = await Traffic(settings(url=worker.url), seen.append).run()
        values = worker.engine.ranks[0].metrics.values
        assert values["request_success", "length"] == report.ok == report.sent == 60
        hits, prompts = values["prefix_cache_hits", ""], values["prefix_cache_queries", ""]
    assert report.failed == 0 and report.records == seen and len({r.request_id for r in seen}) == 60
    assert any(r.subagent for r in seen) and any(not r.subagent for r in seen)
    assert sum(r.cached_tokens or 0 for r in seen) == hits and sum(r.prompt_tokens or 0 for r in seen) == prompts
    assert report.hit_rate() == hits / prompts > 0.5
    assert all((r.ttft_s or 0) > 0 for r in seen if r.ttft_s is not None) and report.ttft_s(0.5) is not None


async def test_failures_are_counted_with_their_reason() -> None:
    async with MockWorker(MockEngineSettings(port=0, instant=True)) as worker:
        report = await Traffic(settings(url=worker.url, model="nope", max_requests=10)).run()
    assert (report.sent, report.ok, report.failed) == (10, 0, 10)
    assert all(r.status == 404 and "does not exist" in (r.error or "") and not r.ok for r in report.records)
    assert report.hit_rate() is None and report.ttft_s(0.5) is None
    gone = await Traffic(settings(url=worker.url, max_requests=3)).run()
    assert gone.failed == 3 and all(r.status is None and r.error for r in gone.records)


async def test_a_broken_stream_is_a_failure() -> None:
    async with MockWorker(MockEngineSettings(port=0)) as worker:
        traffic = Traffic(
            settings(url=worker.url, sessions=2, max_requests=2, answer_tokens=(500, 500), stream_share=1, subagent_share=0),
        )
        running = asyncio.create_task(traffic.run())
        running_requests = worker.engine.ranks[0].scheduler.running
        deadline = time.monotonic() + 10
        while sum(r.produced > 1 for r in running_requests) < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        worker.engine.restart(None, 0.0)
        report = await running
    assert (report.sent, report.failed) == (2, 2) and all(r.status == 200 for r in report.records)


def test_wrong_settings_name_the_key() -> None:
    with pytest.raises(SettingsError, match="think_s must be two numbers, the least first"):
        load(TrafficSettings, ["--think-s", "[3, 1]"])
    with pytest.raises(SettingsError, match="num_gpu_blocks"):
        load(MockEngineSettings, ["--num-gpu-blocks", "1"])
    with pytest.raises(SettingsError, match=r"there is no .*tokenizer\.json"):
        LocalTokenizer.from_dir(load(MockEngineSettings, ["--tokenizer", "nowhere"]).tokenizer)


@pytest.mark.parametrize("body", ["", "{}", "[]", '{"choices": []}', '{"choices": [{"text": "x"}]}', '{"choices": null, "usage": 3}'])
@pytest.mark.parametrize("stream_share", [0.0, 1.0])
async def test_an_answer_of_another_form_costs_its_request_and_not_the_run(body: str, stream_share: float) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=body if stream_share == 0 else f"data: {body}\n\n")

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        report = await Traffic(settings(url=url, max_requests=6, stream_share=stream_share, subagent_share=0)).run()
    finally:
        await runner.cleanup()
    assert (report.sent, report.ok, report.failed, len(report.records)) == (6, 0, 6, 6)


def test_the_api_key_is_not_shown() -> None:
    loaded = load(TrafficSettings, ["--api-key", "sk-hunter2"])
    assert loaded.api_key.get_secret_value() == "sk-hunter2"
    assert "hunter2" not in f"{loaded!r} {loaded.model_dump_json()}"
