"""The `anthropic` package before the router behaves as before the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic

from tests.router.sdk.both import SYSTEM, Way, alike, both, outcome, same, settled

ASK: Any = {"model": "tiny", "max_tokens": 5, "system": SYSTEM, "messages": [{"role": "user", "content": "fix the test"}]}
STATUSES = (400, 401, 404, 429, 500)
TOOL: Any = {"name": "read", "description": "reads", "input_schema": {"type": "object", "properties": {"text": {"type": "string"}}}}


def client(way: Way, timeout: float = 20) -> anthropic.AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(verify=False, timeout=timeout)  # loads no certificates: that takes longer than a request
    return anthropic.AsyncAnthropic(base_url=way.url, api_key="none", max_retries=0, timeout=timeout, http_client=http)


async def message(way: Way) -> Any:
    async with client(way) as c:
        first, second = [await c.messages.create(**ASK) for _ in range(2)]
        assert first.content[0].type == "text"
        assert first.usage.cache_read_input_tokens == 0
        assert (second.usage.cache_read_input_tokens or 0) > 50
        return same(first), same(second)


async def streamed(way: Way) -> Any:
    async with client(way) as c:
        async with c.messages.stream(**ASK) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        assert "".join(b.text for b in final.content if b.type == "text")
        return kinds, same(final)


async def raw_events(way: Way) -> Any:
    async with client(way) as c:
        return [same(event) async for event in await c.messages.create(**ASK, stream=True)]


async def tool_use(way: Way) -> Any:
    async with client(way) as c:
        ask = {**ASK, "tools": [TOOL], "tool_choice": {"type": "any"}}
        answer = await c.messages.create(**ask)
        (block,) = answer.content
        assert block.type == "tool_use"
        back = {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "done"}]}],
        }
        messages = [*ASK["messages"], {"role": "assistant", "content": [block.model_dump(include={"type", "id", "name", "input"})]}, back]
        after = await c.messages.create(**{**ask, "messages": messages, "tool_choice": {"type": "auto"}})
        async with c.messages.stream(**ask) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        assert final.stop_reason == "tool_use"
        return same(answer), same(after.usage), kinds, same(final)


async def counted(way: Way) -> Any:
    async with client(way) as c:
        return (await c.messages.count_tokens(**{k: v for k, v in ASK.items() if k != "max_tokens"})).input_tokens


async def test_answers_and_streams_are_the_engines() -> None:
    async with both() as ways:
        for scenario in (message, streamed, raw_events, tool_use, counted):
            await alike(ways, scenario)


async def test_messages_are_recorded_with_exact_prompts_and_the_engines_tokens() -> None:
    async with both() as (_, through):
        assert through.router is not None
        await message(through)
        await streamed(through)
        decisions, outcomes = await through.router.records(3)
        assert {(d.path, d.token_source) for d in decisions} == {("/v1/messages", "exact")}
        tokens = decisions[0].prompt_tokens
        assert [(o.prompt_tokens, o.completion_tokens) for o in outcomes] == [(tokens, 5)] * 3
        assert outcomes[0].cached_tokens == 0
        assert outcomes[1].cached_tokens == outcomes[2].cached_tokens == ((tokens or 0) - 1) // 16 * 16


async def test_errors_are_the_engines() -> None:
    async def fails(way: Way) -> Any:
        seen = []
        async with client(way) as c:
            for status in STATUSES:
                for stream in (False, True):
                    await way.sim("fail", status=status, retry_after_s=2 if status == 429 else None)
                    seen.append(await outcome(c.messages.create(**ASK, stream=stream)))
        return seen

    async with both() as ways:
        for i, (name, code, body, retry_after) in enumerate(await alike(ways, fails)):
            status = STATUSES[i // 2]
            assert (code, retry_after) == (status, "2" if status == 429 else None)
            assert name.endswith("Error")
            assert (body["type"], "message" in body["error"]) == ("error", True)


async def test_wrong_requests_are_refused_as_the_engine_refuses_them() -> None:
    async def wrong(way: Way) -> Any:
        async with client(way) as c:
            return [
                await outcome(call)
                for call in (
                    c.messages.create(**{**ASK, "model": "nope"}),
                    c.messages.create(**{**ASK, "messages": []}),
                    c.messages.create(**{**ASK, "max_tokens": 10**6}),
                    c.messages.count_tokens(model="nope", messages=ASK["messages"]),
                )
            ]

    async with both() as ways:
        seen = await alike(ways, wrong)
        assert [s[:2] for s in seen] == [("NotFoundError", 404), ("BadRequestError", 400), ("BadRequestError", 400), ("NotFoundError", 404)]


async def test_a_client_that_gives_up_waiting_leaves_nothing_running() -> None:
    async def hurried(way: Way) -> Any:
        async with client(way, timeout=0.2) as c:
            return await outcome(c.messages.create(**ASK))

    async with both(instant=False, prefill_base_s=2.0) as ways:
        assert (await alike(ways, hurried))[0] == "APITimeoutError"


async def test_a_stream_left_halfway_ends_at_the_engine() -> None:
    async def left(way: Way) -> Any:
        async with client(way) as c, c.messages.stream(**{**ASK, "max_tokens": 2000}) as stream:
            async for _ in stream.text_stream:
                break
        await settled(way)
        return way.engine.engine.ranks[0].metrics.values["request_success", "abort"]

    async with both(instant=False, decode_base_s=0.01) as ways:
        assert await alike(ways, left) == 1


async def test_a_stream_that_breaks_off_is_an_error_and_not_a_short_answer() -> None:
    async def broken(way: Way) -> Any:
        started = asyncio.Event()

        async def read(stream: Any) -> None:
            async for _ in stream:
                started.set()

        async with client(way) as c:
            reading = asyncio.create_task(outcome(read(await c.messages.create(**{**ASK, "max_tokens": 2000}, stream=True))))
            await started.wait()
            await way.sim("restart")
            return (await reading)[0] != "no error"

    async with both(instant=False, decode_base_s=0.01) as ways:
        assert await alike(ways, broken)
