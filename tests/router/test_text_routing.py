"""Prompts whose token ids are not to be had: routed by their text, and said so."""

import contextlib

from tests.router.fake_engine import FakeEngine
from tests.router.running import running

SYSTEM = {"role": "system", "content": "read the user file and the function " * 200}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}


@contextlib.asynccontextmanager
async def fleet(**settings):
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(f"w{i}").serving()) for i in range(3)]
        yield await stack.enter_async_context(running(engines, **settings)), engines


def talk(turns, who="x"):
    messages = [SYSTEM, {"role": "user", "content": [{"type": "text", "text": f"I am {who}. " * 200}, IMAGE]}]
    for i in range(turns):
        messages += [{"role": "assistant", "content": f"answer {i} " * 50}, {"role": "user", "content": f"go on {i} " * 50}]
    return {"model": "tiny", "messages": messages}


async def test_a_conversation_in_text_mode_stays_where_it_was_sent():
    async with fleet(tokenizer=False, tokens="text") as (r, engines):
        workers = [(await r.post(talk(turn), "/v1/chat/completions"))[1]["x-warmwatch-worker"] for turn in range(4)]
        assert len(set(workers)) == 1
        assert not [s for e in engines for s in e.seen if s.path == "/tokenize"]
        decisions, _ = await r.records(4)
        assert {(d.token_source, d.token_reason, d.chain, d.block_size, d.predicted_tokens) for d in decisions} == {
            ("text", None, None, None, None)
        }


async def test_a_prompt_with_an_image_goes_back_to_the_worker_that_had_it_before():
    async with fleet() as (r, _):
        workers = [(await r.post(talk(turn), "/v1/chat/completions"))[1] for turn in range(3)]
        assert len({w["x-warmwatch-worker"] for w in workers}) == 1
        assert all("x-warmwatch-predicted-cached-tokens" not in w for w in workers)
        decisions, _ = await r.records(3)
        assert {d.token_source for d in decisions} == {"text"}
        assert all("image_url" in d.token_reason for d in decisions)


async def test_the_mode_is_shown():
    async with fleet(tokens="text") as (r, _):
        assert r.router.readiness()[1]["pools"]["tiny"]["tokens"] == "text"
        assert "tokens text" in r.router.summary()
    async with fleet() as (r, _):
        assert r.router.readiness()[1]["pools"]["tiny"]["tokens"] == "exact"
