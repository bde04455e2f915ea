"""The `openai` package before the router behaves as before the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

from tests.router.sdk.both import SYSTEM, Way, alike, both, outcome, same, settled

MESSAGES: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "fix the test"}]
STATUSES = (400, 401, 404, 422, 429, 500)
CHAT_TOOL: Any = {
    "type": "function",
    "function": {"name": "read", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}
FLAT_TOOL: Any = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}, "strict": False}


def client(way: Way, timeout: float = 20) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False, timeout=timeout)  # loads no certificates: that takes longer than a request
    return openai.AsyncOpenAI(base_url=way.url + "/v1", api_key="none", max_retries=0, timeout=timeout, http_client=http)


async def chat(way: Way) -> Any:
    async with client(way) as c:
        answer = await c.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5, seed=1)
        assert answer.choices[0].message.content
        return same(answer)


async def chat_streamed(way: Way) -> Any:
    async with client(way) as c:
        stream = await c.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"cache_salt": "s"},
        )
        chunks = [same(chunk) async for chunk in stream]
        assert chunks[-1]["usage"]["completion_tokens"] == 5
        return chunks


async def chat_several_answers(way: Way) -> Any:
    async with client(way) as c:
        return same(await c.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, n=3))


async def chat_tool_call(way: Way) -> Any:
    async with client(way) as c:
        answer = await c.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=[CHAT_TOOL], tool_choice={"type": "function", "function": {"name": "read"}}
        )
        (call,) = answer.choices[0].message.tool_calls or ()
        back: Any = [
            *MESSAGES, answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "done"}]},
        ]  # fmt: skip
        after = await c.chat.completions.create(model="tiny", messages=back, tools=[CHAT_TOOL])
        return same(answer), after.usage.prompt_tokens if after.usage else None


async def chat_tool_call_streamed(way: Way) -> Any:
    async with client(way) as c:
        async with c.chat.completions.stream(model="tiny", messages=MESSAGES, tools=[CHAT_TOOL], tool_choice="required") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert final.choices[0].finish_reason == "tool_calls"
        return kinds, same(final)


async def texts(way: Way) -> Any:
    async with client(way) as c:
        return [
            same(await c.completions.create(model="tiny", prompt=prompt, max_tokens=3, **more))
            for prompt, more in (
                ("read the file", {"echo": True}),
                ([5, 6, 7, 8], {"suffix": None}),
                (["read", "the file"], {"n": 2}),
                ([[5, 6], [7, 8, 9]], {"extra_body": {"prompt_logprobs": 0}}),
            )
        ]  # type: ignore[call-overload]


async def text_streamed(way: Way) -> Any:
    async with client(way) as c:
        return [same(x) async for x in await c.completions.create(model="tiny", prompt=["read", "file"], max_tokens=3, stream=True)]


async def embeddings(way: Way) -> Any:
    async with client(way) as c:
        return [same(await c.embeddings.create(model="tiny", input=i)) for i in ("read the file", ["a", "b"], [5, 6, 7], [[5], [6, 7]])]


async def responses(way: Way) -> Any:
    async with client(way) as c:
        first = await c.responses.create(model="tiny", instructions=SYSTEM, input="fix the test", max_output_tokens=5)
        again = await c.responses.retrieve(first.id)
        assert again.output_text == first.output_text != ""
        second = await c.responses.create(model="tiny", input="go on", previous_response_id=first.id, max_output_tokens=4)
        lost = await outcome(c.responses.create(model="tiny", input="go on", previous_response_id="resp_none"))
        return same(first), {**same(second), "previous_response_id": None}, lost


async def responses_streamed(way: Way) -> Any:
    async with client(way) as c:
        stream = await c.responses.create(model="tiny", input="fix the test", max_output_tokens=5, stream=True)
        events = [same(event) async for event in stream]
        assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
        return events


async def responses_tool_call(way: Way) -> Any:
    async with client(way) as c:
        async with c.responses.stream(model="tiny", input="fix it", tools=[FLAT_TOOL], tool_choice="required") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        call = final.output[0]
        assert call.type == "function_call"
        history: Any = [{"role": "user", "content": "fix it"}, call.model_dump(exclude_none=True, exclude={"parsed_arguments"})]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "done"})
        after = await c.responses.create(model="tiny", input=history, tools=[FLAT_TOOL])
        return kinds, same(final), after.usage.input_tokens if after.usage else None


async def models(way: Way) -> Any:
    async with client(way) as c:
        return [(m.id, m.owned_by) async for m in c.models.list()]


SCENARIOS = [
    chat, chat_streamed, chat_several_answers, chat_tool_call, chat_tool_call_streamed, texts, text_streamed, embeddings, responses,
    responses_streamed, responses_tool_call, models,
]  # fmt: skip


async def test_answers_and_streams_are_the_engines() -> None:
    async with both() as ways:
        for scenario in SCENARIOS:
            await alike(ways, scenario)


async def test_every_answer_is_recorded_with_its_path_and_how_its_prompt_was_read() -> None:
    async with both() as (_, through):
        assert through.router is not None
        for scenario in (chat, embeddings, responses_streamed):
            await scenario(through)
        decisions, outcomes = await through.router.records(6)
        assert [(d.path, d.token_source) for d in decisions] == [
            ("/v1/chat/completions", "exact"), *[("/v1/embeddings", "exact")] * 4, ("/v1/responses", "exact")
        ]  # fmt: skip
        assert [(o.status, o.prompt_tokens, o.completion_tokens) for o in outcomes][0::5] == [
            (200, d.prompt_tokens, 5) for d in decisions[0::5]
        ]
        assert [o.prompt_tokens for o in outcomes] == [d.prompt_tokens for d in decisions]


async def test_errors_are_the_engines() -> None:
    async def fails(way: Way) -> Any:
        seen = []
        async with client(way) as c:
            for status in STATUSES:
                for call in (
                    lambda: c.chat.completions.create(model="tiny", messages=MESSAGES),
                    lambda: c.chat.completions.create(model="tiny", messages=MESSAGES, stream=True),
                    lambda: c.responses.create(model="tiny", input="x"),
                    lambda: c.embeddings.create(model="tiny", input="x"),
                ):
                    await way.sim("fail", status=status, retry_after_s=2 if status == 429 else None)
                    seen.append(await outcome(call()))
        return seen

    async with both() as ways:
        for i, (name, code, body, retry_after) in enumerate(await alike(ways, fails)):
            status = STATUSES[i // 4]
            assert (code, retry_after) == (status, "2" if status == 429 else None)
            assert name.endswith("Error")
            assert body["code"] == status


async def test_wrong_requests_are_refused_as_the_engine_refuses_them() -> None:
    async def wrong(way: Way) -> Any:
        async with client(way) as c:
            return [
                await outcome(call)
                for call in (
                    c.chat.completions.create(model="nope", messages=MESSAGES),
                    c.chat.completions.create(model="tiny", messages=[]),
                    c.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10**6),
                    c.completions.create(model="tiny", prompt=[]),
                    c.responses.retrieve("resp_none"),
                    c.get("/nothing/there", cast_to=object),
                )
            ]

    async with both() as ways:
        seen = await alike(ways, wrong)
        assert [s[:2] for s in seen] == [
            ("NotFoundError", 404), ("BadRequestError", 400), ("BadRequestError", 400), ("BadRequestError", 400), ("NotFoundError", 404),
            ("NotFoundError", 404),
        ]  # fmt: skip


async def test_a_client_that_gives_up_waiting_leaves_nothing_running() -> None:
    async def hurried(way: Way) -> Any:
        async with client(way, timeout=0.2) as c:
            return [
                await outcome(c.chat.completions.create(model="tiny", messages=MESSAGES)),
                await outcome(c.responses.create(model="tiny", input="x")),
            ]

    async with both(instant=False, prefill_base_s=2.0) as ways:
        seen = await alike(ways, hurried)
        assert [s[0] for s in seen] == ["APITimeoutError", "APITimeoutError"]


async def test_a_stream_left_halfway_ends_at_the_engine() -> None:
    async def left(way: Way) -> Any:
        async with client(way) as c:
            stream = await c.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2000, stream=True)
            async for _ in stream:
                break
            await stream.close()
        await settled(way)
        return way.engine.engine.ranks[0].metrics.values["request_success", "abort"]

    async with both(instant=False, decode_base_s=0.01) as ways:
        assert await alike(ways, left) == 1


async def test_a_stream_that_breaks_off_is_an_error_and_not_a_short_answer() -> None:
    async def broken(way: Way) -> Any:
        async def read(stream: Any) -> None:
            async for _ in stream:
                started.set()

        seen = []
        async with client(way) as c:
            for make in (
                lambda: c.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2000, stream=True),
                lambda: c.responses.create(model="tiny", input="x", max_output_tokens=2000, stream=True),
            ):
                started = asyncio.Event()
                reading = asyncio.create_task(outcome(read(await make())))
                await started.wait()
                await way.sim("restart")
                seen.append((await reading)[0] != "no error")
        return seen

    async with both(instant=False, decode_base_s=0.01) as ways:
        assert await alike(ways, broken) == [True, True]


async def test_raw_headers_are_the_engines_and_the_routers_own() -> None:
    async def raw(way: Way) -> Any:
        async with client(way) as c:
            answer = await c.chat.completions.with_raw_response.create(
                model="tiny", messages=MESSAGES, max_tokens=2, extra_headers={"X-Request-Id": "mine"}
            )
            names = {k for k in answer.headers if not k.startswith("x-warmwatch-") and k not in ("date", "server", "connection")}
            return sorted(names), answer.headers["content-type"], answer.headers["x-request-id"]

    async with both() as ways:
        await alike(ways, raw)
        async with client(ways[1]) as c:
            answer = await c.chat.completions.with_raw_response.create(model="tiny", messages=MESSAGES, max_tokens=2)
            assert answer.headers["x-warmwatch-worker"] == "w0"
            assert answer.headers["x-warmwatch-request-id"]
