"""From bodies to prompts: what is exact, what goes by its text, and why."""

import asyncio
import random
import threading

import aiohttp
import numpy as np
import orjson
import pytest

from router.endpoints import ENDPOINTS
from router.policy.cost import Coefficients
from router.pools import Pools, TrustRules
from router.prompts.reader import PoolTokens, PromptReader, pool_tokens
from router.prompts.served import ServedModels
from router.prompts.text import PIECE_TOKENS
from router.prompts.tokens import LocalTokenizer
from schemas.block_hash import HashKey
from schemas.fleet import Fleet, Pool, Worker
from schemas.settings import SettingsError
from tests.router.fake_engine import FakeEngine
from tests.router.prompts.test_known import tokenizer as made_tokenizer
from tests.router.recordings import TOKENIZER

BLOCK = 16
LONG = "read the user file and the function " * 60
USER = {"role": "user", "content": LONG}
CHAT = {"messages": [{"role": "system", "content": LONG}, USER]}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9000}}]}


@pytest.fixture(scope="module")
def tokenizer():
    return LocalTokenizer.from_dir(TOKENIZER)


class Reads:
    """A reader and its pool."""

    def __init__(self, session, tokenizer, url="http://127.0.0.1:9", by="auto", engine="vllm", **bounds):
        fleet = Fleet(pools=(Pool(name="tiny"),), workers=(Worker(pool="tiny", name="w", url=url, engine=engine),))
        tokenizers = {} if tokenizer is None else {"tiny": tokenizer}
        self.pools = Pools(fleet, tokenizers, "cost", Coefficients(), HashKey(7, 9), TrustRules(1e12, 1e12), random.Random(1))
        self.pool = self.pools.by_name["tiny"]
        self.pool.learn_block_size(BLOCK)
        given = {"tokenize_timeout_s": 2.0, "max_prompt_chars": 0, "max_waiting_prompts": 8} | bounds
        self.reader = PromptReader(session, pools=pool_tokens(fleet, by, tokenizers), **given)

    async def __call__(self, body, path="/v1/chat/completions", lora=None, size=None):
        return await self.reader.read(self.pool, body, size or len(str(body)), lora, ENDPOINTS[path].reads)

    def chain(self, ids, lora=None, salt=None):
        return self.pool.chain(np.asarray(ids, np.uint32), lora, salt).tolist()


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as s:
        yield s


async def test_every_endpoints_prompt_is_read_to_the_block(session, tokenizer):
    reads = Reads(session, tokenizer)
    chat_ids = tokenizer.chat(CHAT["messages"])
    for path, body, ids in (
        ("/v1/chat/completions", CHAT, chat_ids),
        ("/v1/messages", {"system": LONG, "messages": [USER]}, chat_ids),
        ("/v1/responses", {"instructions": LONG, "input": LONG}, chat_ids),
        ("/v1/responses", {"instructions": LONG, "input": [{"role": "user", "content": [{"type": "input_text", "text": LONG}]}]}, chat_ids),
        ("/v1/completions", {"prompt": LONG}, tokenizer.text(LONG)),
        ("/v1/completions", {"prompt": [LONG]}, tokenizer.text(LONG)),
        ("/v1/completions", {"prompt": list(range(100))}, range(100)),
        ("/v1/completions", {"prompt": [list(range(100))]}, range(100)),
        ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 40, "truncation_side": "left"}, tokenizer.text(LONG)[-40:]),
        ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 40, "truncation_side": "right"}, tokenizer.text(LONG)[:40]),
        ("/v1/embeddings", {"input": LONG}, tokenizer.text(LONG)),
        ("/v1/embeddings", CHAT, tokenizer.chat(CHAT["messages"], add_generation_prompt=False)),
    ):
        for _ in range(2):  # new and known
            prompt = await reads(body, path)
            assert (prompt.source, prompt.mode, prompt.reason, prompt.tokens) == ("exact", "exact", None, len(ids)), path
            assert prompt.chain.tolist() == reads.chain(ids)
            assert prompt.recorded_chain is prompt.chain


async def test_a_growing_conversation_keeps_exact_names_by_adapter_and_salt(session, tokenizer):
    reads = Reads(session, tokenizer)
    talk = [{"role": "system", "content": LONG}]
    for step in range(6):
        talk.append({"role": "user" if step % 2 == 0 else "assistant", "content": f"step {step} of the file " * 30})
        ids = tokenizer.chat(talk)
        for lora, salt in ((None, None), ("fine", None), (None, "s"), (None, None)):
            prompt = await reads({"messages": [dict(m) for m in talk], "cache_salt": salt}, lora=lora)
            assert prompt.chain.tolist() == reads.chain(ids, lora, salt)
            assert prompt.tokens == len(ids)


async def test_a_new_block_size_gives_new_names(session, tokenizer):
    reads = Reads(session, tokenizer)
    await reads(CHAT)
    reads.pool.block_size = 32
    assert len((await reads(CHAT)).chain) == len(tokenizer.chat(CHAT["messages"])) // 32


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/chat/completions", {"messages": [USER, IMAGE]}, "image_url"),
        ("/v1/chat/completions", {**CHAT, "continue_final_message": True}, "continue_final_message"),
        ("/v1/messages", {"messages": [USER, {"role": "system", "content": "x"}]}, "system"),
        ("/v1/responses", {"input": LONG, "previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/responses", {"input": LONG, "truncation": "auto"}, "truncation"),
        ("/v1/completions", {"prompt": LONG, "suffix": "x"}, "suffix"),
        ("/v1/chat/completions", {"messages": [{**USER, "role": 5}]}, "role"),
    ],
)
async def test_what_cannot_be_exact_goes_by_its_text_with_the_reason(path, body, says, session, tokenizer):
    prompt = await Reads(session, tokenizer)(body, path)
    assert (prompt.source, prompt.mode, prompt.tokens, prompt.block_size) == ("text", "exact", None, PIECE_TOKENS)
    assert says in prompt.reason
    assert len(prompt.chain) >= 4
    assert prompt.recorded_chain is None
    assert prompt.guessed_tokens > 100


def nested(levels, inner="1"):
    return '{"a":' * levels + inner + "}" * levels


@pytest.mark.parametrize("name", ["served", "loop.last"])
@pytest.mark.parametrize(
    "body",
    [
        '{"messages":[{"role":"user","content":[{"type":"image","x":' + nested(900) + "}]}]}",
        '{"messages":[{"role":"user","content":' + '[{"content":' * 480 + '"x"' + "}]" * 480 + "}]}",
        '{"messages":[{"role":"user","content":"x","more":' + nested(900) + "}]}",
        '{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"parameters":' + nested(900) + "}}]}",
        '{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":' + nested(900) + "}",
        '{"messages":[{"role":"user","content":"x"}],"tools":5,"chat_template_kwargs":5}',
        '{"messages":[5]}',
        '{"messages":{"a":1}}',
        '{"messages":[{"role":"assistant","tool_calls":5}],"cache_salt":{}}',
        '{"prompt":[[1],["x"]],"input":[[1],["x"]]}',
        '{"input":[5],"instructions":5,"tools":[5],"reasoning":5}',
        '{"system":[5],"messages":[{"role":"user","content":[5]}]}',
    ],
)
async def test_no_body_is_an_error(body, name, session):
    reads = Reads(session, made_tokenizer(name))
    for path in ENDPOINTS:
        for _ in range(2):
            assert (await reads(orjson.loads(body), path, size=len(body))).source in ("exact", "text", "none")


async def test_truncation_by_the_engine_is_told_in_every_mode(session):
    async with FakeEngine("w", tokens=list(range(50))).serving() as engine:
        prompt = await Reads(session, None, engine.url)({"input": LONG, "truncation": "auto"}, "/v1/responses")
    assert (prompt.source, "truncation" in prompt.reason) == ("text", True)


async def test_ids_that_stand_in_for_the_messages_are_the_engines_matter(session, tokenizer):
    body = {**CHAT, "kv_transfer_params": {"prompt_token_ids": [1, 2]}}
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert "kv_transfer_params" in (await Reads(session, tokenizer)(body, path)).reason


@pytest.mark.parametrize("body", [{"prompt": LONG}, {"prompt": [7] * 100}])
@pytest.mark.parametrize("field", ["extra_key", "lora_path"])
async def test_what_sglang_names_blocks_by_besides_is_not_left_out(body, field, session, tokenizer):
    prompt = await Reads(session, tokenizer, engine="sglang")({**body, field: "x"}, "/v1/completions")
    assert (prompt.source, field in prompt.reason) == ("text", True)
    assert (await Reads(session, tokenizer)({**body, field: "x"}, "/v1/completions")).source == "exact"


async def test_texts_are_not_exact_where_the_tokens_added_to_them_are_unsure(session):
    tokenizer = LocalTokenizer.from_dir(TOKENIZER)
    tokenizer.added_are_sure = False
    reads = Reads(session, tokenizer)
    assert (await reads({"prompt": LONG}, "/v1/completions")).source == "text"
    assert (await reads({"prompt": LONG, "add_special_tokens": False}, "/v1/completions")).source == "exact"
    assert (await reads(CHAT)).source == "exact"


@pytest.mark.parametrize("body", [{}, {"messages": []}, {"messages": None}, {"prompt": ""}, {"input": []}])
@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("name", ["served", "loop.last"])
async def test_a_body_without_a_prompt_is_none_of_them_and_no_error(path, body, name, session):
    prompt = await Reads(session, made_tokenizer(name))(body, path)
    if prompt.source != "exact":  # an empty text or chat has ids
        assert (prompt.source, prompt.chain) == ("none", None)
        assert prompt.reason


async def test_truncation_is_exact_where_the_model_is_long_enough(session, tokenizer):
    reads = Reads(session, tokenizer)
    reads.pool.served = ServedModels(frozenset({"tiny"}), frozenset(), 100_000)
    assert (await reads({"input": LONG, "truncation": "auto"}, "/v1/responses")).source == "exact"


async def test_a_batch_goes_by_its_longest_prompt_and_its_chain_is_not_recorded(session, tokenizer):
    reads = Reads(session, tokenizer)
    for body, path in (({"prompt": ["read", LONG]}, "/v1/completions"), ({"input": ["read", LONG]}, "/v1/embeddings")):
        prompt = await reads(body, path)
        assert prompt.chain.tolist() == reads.chain(tokenizer.text(LONG))
        assert prompt.tokens == len(tokenizer.text(LONG)) + len(tokenizer.text("read"))
        assert (prompt.source, prompt.prompts, prompt.recorded_chain) == ("exact", 2, None)
        assert "batch of 2" in prompt.reason


async def test_prompt_log_probabilities_forecast_no_hit(session, tokenizer):
    prompt = await Reads(session, tokenizer)({**CHAT, "prompt_logprobs": 1})
    assert (prompt.source, prompt.reads_cache, prompt.recorded_chain) == ("exact", False, None)
    assert "log probabilities" in prompt.reason


async def test_sglang_is_read_exactly_only_where_it_reads_as_vllm_does(session, tokenizer):
    reads = Reads(session, tokenizer, engine="sglang")
    assert (await reads(CHAT)).source == "exact"
    assert (await reads({"prompt": LONG}, "/v1/completions")).source == "exact"
    prompt = await reads({**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]})
    assert (prompt.source, "SGLang" in prompt.reason) == ("text", True)


async def test_text_mode_names_texts_and_ids_apart_from_blocks(session, tokenizer):
    reads, exact = Reads(session, tokenizer, by="text"), Reads(session, tokenizer)
    prompt = await reads(CHAT)
    assert (prompt.source, prompt.mode, prompt.reason) == ("text", "text", None)
    given = await reads({"prompt": list(range(200))}, "/v1/completions")
    assert (given.source, given.tokens, len(given.chain)) == ("text", 200, 200 // PIECE_TOKENS)
    assert not {*prompt.chain.tolist(), *given.chain.tolist()} & {*exact.chain(range(200)), *(await exact(CHAT)).chain.tolist()}


async def test_the_engine_is_asked_once_for_the_same_prompt(session):
    async with FakeEngine("w", tokens=list(range(50))).serving() as engine:
        reads = Reads(session, None, engine.url)
        for _ in range(3):
            prompt = await reads({**CHAT, "reasoning_effort": "low"})
            assert (prompt.source, prompt.mode, prompt.tokens) == ("engine", "engine", 50)
            assert prompt.chain.tolist() == reads.chain(range(50))
        (seen,) = [s for s in engine.seen if s.path == "/tokenize"]
        assert b'"chat_template_kwargs":{"reasoning_effort":"low","enable_thinking":true}' in seen.body
        assert (await reads({"prompt": [5] * 40}, "/v1/completions")).source == "exact"
        assert (await reads({"messages": [USER, IMAGE]})).source == "text"
        assert (await reads({"prompt": LONG}, "/v1/completions")).source == "engine"


async def test_siblings_that_ask_the_engine_at_once_are_kept_and_counted_once(session):
    async with FakeEngine("w", tokens=list(range(50))).serving() as engine:
        reads = Reads(session, None, engine.url)
        await asyncio.gather(*(reads(CHAT) for _ in range(8)))
        (ids,) = reads.reader._engine._kept.values()
        assert ids.nbytes < reads.reader._engine._kept_bytes < 2 * ids.nbytes + 300


async def test_an_engine_that_cannot_tokenize_is_left_alone_after_a_while_and_prompts_go_by_text(session):
    async with FakeEngine("w").serving() as engine:  # answers 404
        reads = Reads(session, None, engine.url)
        prompts = [await reads({"messages": [{"role": "user", "content": f"{i} {LONG}"}]}) for i in range(6)]
        assert {p.source for p in prompts} == {"text"}
        assert reads.reader.failures == 3
        assert [("said 404" in p.reason, "does not answer" in p.reason) for p in prompts] == [(True, False)] * 3 + [(False, True)] * 3


async def test_a_silent_engine_costs_the_time_out_and_then_nothing(session):
    reads = Reads(session, None, tokenize_timeout_s=0.05)
    reads.pool.health.up[:] = True
    prompt = await reads(CHAT)
    assert (prompt.source, prompt.mode) == ("text", "engine")
    assert "failed" in prompt.reason


async def test_prompts_over_a_bound_go_by_text_and_say_so(session, tokenizer):
    prompt = await Reads(session, tokenizer, max_prompt_chars=100)(CHAT)
    assert (prompt.source, prompt.skipped, prompt.reason) == ("text", "too_long", "too_long")
    reads = Reads(session, LocalTokenizer.from_dir(TOKENIZER), max_waiting_prompts=0)
    go = threading.Event()
    reads.reader._threads.submit(go.wait)
    reads.reader._threads.submit(go.wait)
    waiting = [asyncio.create_task(reads({"prompt": f"{i} {LONG}"}, "/v1/completions")) for i in range(3)]
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    go.set()
    assert [t.result().skipped for t in done] == ["queue_full"]
    assert [(await t).source for t in waiting] == ["exact", "exact", "text"]


async def test_a_long_new_prompt_leaves_the_loop_free(session):
    reads = Reads(session, LocalTokenizer.from_dir(TOKENIZER))
    talk = {"messages": [{"role": "user", "content": f"turn {i} {LONG}"} for i in range(100)]}
    reading = asyncio.create_task(reads(talk))
    ticks = 0
    while not reading.done():
        await asyncio.sleep(0)
        ticks += 1
    assert (await reading).source == "exact"
    assert ticks > 3  # one or two when all is done on the loop
    before = threading.active_count()
    again = await reads(talk)
    assert again.source == "exact"
    assert threading.active_count() == before


def test_exact_needs_a_tokenizer_and_a_pool_has_the_last_word(tokenizer):
    fleet = Fleet(pools=(Pool(name="a", tokens="text"), Pool(name="b")), workers=(Worker(pool="b", url="http://x:1", engine="sglang"),))
    found = pool_tokens(fleet, "engine", {})
    assert found == {"a": PoolTokens("text", "vllm"), "b": PoolTokens("engine", "sglang")}
    with pytest.raises(SettingsError, match=r"'b'.*tokenizer"):
        pool_tokens(fleet, "exact", {"a": tokenizer})
    assert [PoolTokens().mode(True), PoolTokens().mode(False)] == ["exact", "engine"]
