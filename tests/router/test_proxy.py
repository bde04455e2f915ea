"""The router on real sockets before fake engines."""

import asyncio
import contextlib
import json
import threading

import aiohttp
import numpy as np
import pytest
from yarl import URL

from router.http.asgi import forwarded_response_headers
from schemas.block_hash import hash_chain, root_hash, salted_extras
from schemas.content import content_of, described
from schemas.kv_events import Kind
from schemas.requests import Candidate, Decision, Outcome, unpack_hashes
from schemas.topics import DECISIONS, OUTCOMES
from schemas.workers import Trust
from tests.router.fake_engine import FakeEngine, answer_chunks
from tests.router.http.speaking import client
from tests.router.running import BLOCK, KEY, running, until

PROMPT = list(range(3, 3 + 100))  # six whole blocks and a part
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3}
X = {"role": "user", "content": "x"}


@contextlib.asynccontextmanager
async def fleet(n=3, **settings):
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(f"w{i}").serving()) for i in range(n)]
        yield await stack.enter_async_context(running(engines, **settings)), engines


async def test_a_prompt_goes_to_the_worker_that_holds_its_prefix():
    async with fleet() as (r, engines):
        chain = r.chain(PROMPT)
        await r.hold("w1", chain)
        for _ in range(5):
            status, headers, _ = await r.post(BODY)
            assert (status, headers["x-warmwatch-worker"], headers["x-warmwatch-predicted-cached-tokens"]) == (200, "w1", "96")
        assert [len(e.seen) for e in engines] == [0, 5, 0]
        await r.tell("w1", (Kind.REMOVED, chain[2:], 0))
        assert (await r.post({**BODY, "prompt": [*PROMPT[:-1], 7]}))[1]["x-warmwatch-predicted-cached-tokens"] in ("32", "96")


async def test_siblings_follow_the_first_before_any_event_confirms_it():
    async with fleet(expect_ttl_s=60) as (r, engines):
        first = (await r.post(BODY))[1]
        assert first["x-warmwatch-predicted-cached-tokens"] == "0"
        for last in range(5):
            headers = (await r.post({**BODY, "prompt": [*PROMPT, last]}))[1]
            assert (headers["x-warmwatch-worker"], headers["x-warmwatch-predicted-cached-tokens"]) == (first["x-warmwatch-worker"], "96")
        decisions, _ = await r.records(6)
        assert [(d.candidates[0].overlap_tokens, d.candidates[0].speculative_tokens) for d in decisions] == [(0, 0)] + [(0, 96)] * 5
        assert sorted(len(e.seen) for e in engines) == [0, 0, 6]


async def test_round_robin_takes_turns_whatever_they_hold():
    async with fleet(policy="round_robin") as (r, engines):
        await r.hold("w1", r.chain(PROMPT))
        for _ in range(6):
            await r.post(BODY)
        assert [len(e.seen) for e in engines] == [2, 2, 2]
        decisions, _ = await r.records(6)
        assert {d.policy for d in decisions} == {"round_robin"}
        assert {d.candidates[0].cost_s for d in decisions} == {None}
        assert {d.best_overlap_worker for d in decisions} == {"w1"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_bodies_pass_unchanged_and_headers_are_kept(path):
    async with fleet(1) as (r, engines):
        body = b'{ "model": "tiny",\n "prompt": "read  the file", "messages": [{"role":"user","content":"x"}], "odd": 1.50 }'
        status, headers, _ = await r.post(
            body, path + "?a=%2Fb", content_type="application/json", x_request_id="r-1", x_warmwatch_route="chat"
        )
        seen = engines[0].seen[0]
        assert (status, seen.body, seen.path) == (200, body, path + "?a=%2Fb")
        assert (seen.headers["x-request-id"], headers["x-request-id"]) == ("r-1", "r-1")
        assert "x-warmwatch-route" not in seen.headers
        assert headers["x-warmwatch-worker"] == "w0"


async def test_requests_with_one_id_are_recorded_apart_while_the_client_and_the_worker_see_the_one_id():
    async with fleet(1) as (r, (engine,)):
        answers = [(await r.post(BODY, x_request_id="trace-1"))[1] for _ in range(3)]
        assert [a["x-request-id"] for a in answers] == ["trace-1"] * 3
        assert [a["x-warmwatch-request-id"] for a in answers] == ["trace-1", "trace-1~2", "trace-1~3"]
        assert [s.headers["x-request-id"] for s in engine.seen] == ["trace-1"] * 3
        decisions, outcomes = await r.records(3)
        for records in (decisions, outcomes):
            assert sorted(x.request_id for x in records) == ["trace-1", "trace-1~2", "trace-1~3"]


async def test_a_refused_body_tells_its_ids_too():
    async with fleet(1) as (r, _):
        _, headers, _ = await r.post(b"{", x_request_id="r-1")
        assert (headers["x-request-id"], headers["x-warmwatch-request-id"]) == ("r-1", "r-1")


@pytest.mark.parametrize("given", [b"h\xe9\xff'; drop", "Zürich".encode(), b"i" * 5000])
@pytest.mark.parametrize("body", [b"{", json.dumps({"model": "tiny", "prompt": "x"}).encode()])
async def test_an_id_comes_back_as_it_came_and_the_one_told_beside_it_is_the_records(given, body):
    async with fleet(1) as (r, _), client(URL(r.url).port) as peer:
        await peer.say(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (given, len(body)))
        await peer.say(body)
        head = (await peer.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        assert b"x-request-id: " + given in head
        (told,) = [line.partition(b": ")[2].decode() for line in head if line.startswith(b"x-warmwatch-request-id: ")]
        assert len(told) == min(len(given), 1024) or not given.isascii()
        if body != b"{":
            (d,), (o,) = await r.records()
            assert d.request_id == o.request_id == told


async def test_headers_beyond_ascii_pass_as_they_are_and_are_read_as_utf8():
    async with fleet(1) as (r, (engine,)):
        _, headers, _ = await r.post(BODY, x_request_id="Zürich-1", x_odd="naïve", x_warmwatch_tenant="Zürich")
        assert (engine.seen[0].headers["x-odd"], engine.seen[0].headers["x-request-id"], headers["x-request-id"]) == (
            "naïve", "Zürich-1", "Zürich-1",
        )  # fmt: skip
        (d,), _ = await r.records()
        assert (d.tenant, d.request_id) == ("Zürich", "Zürich-1")


async def test_the_template_is_the_one_named_else_the_routes_else_none():
    async with fleet(1, templates={"review": "review-v7"}) as (r, (engine,)):
        await r.post(BODY, x_warmwatch_template="t" * 3000, x_warmwatch_route="review")
        await r.post(BODY, x_warmwatch_route="review")
        await r.post(BODY)
        decisions, _ = await r.records(3)
        assert [d.template for d in decisions] == ["t" * 1024, "review-v7", None]
        assert "x-warmwatch-template" not in engine.seen[0].headers


async def test_what_no_worker_holds_of_a_prompt_is_recorded_by_its_content():
    async with fleet(1) as (r, _):
        chain = r.chain(PROMPT)
        await r.hold("w0", chain[:1])
        await r.post({**BODY, "cache_salt": "s"})
        await r.post(BODY)
        (salted, plain), _ = await r.records(2)
        ids = np.array(PROMPT, np.uint32)
        assert (salted.content_from, plain.content_from) == (0, 1)
        for decision, salt in ((salted, "s"), (plain, None)):
            made, read = described(KEY, ids, BLOCK, decision.content_from, None, salt), content_of(decision)
            assert (read.namespace, read.first_token, read.prompt_tokens) == (made.namespace, made.first_token, len(ids))
            assert read.fingerprints.tolist() == made.fingerprints.tolist()
            assert read.chunks.tolist() == made.chunks.tolist()
        assert salted.snippet is plain.snippet is None


async def test_an_operator_may_leave_content_out_and_let_snippets_in():
    async with fleet(1, record_content=False, record_snippets=True) as (r, _):
        await r.post({"model": "tiny", "messages": [{"role": "user", "content": "x" * 300}]}, "/v1/chat/completions")
        (d,), _ = await r.records()
        assert (d.namespace, d.content_from, d.content, d.chunks, d.chunk_tokens, d.shared_tokens) == (None,) * 6
        assert d.snippet == "x" * 200


async def test_a_model_name_of_any_length_leaves_a_record_that_can_be_read():
    async with fleet(1) as (r, _):
        await r.post({**BODY, "model": "m" * 3000})
        (d,), _ = await r.records()
        assert (len(d.model), len(d.lora)) == (1024, 1024)


async def test_an_error_of_the_routers_own_is_told_counted_and_leaves_nothing_behind(monkeypatch):
    async with fleet(1) as (r, _):

        def broken(*_):
            raise RuntimeError("a mistake")

        monkeypatch.setattr(r.router.pools, "decide", broken)
        assert (await r.post(BODY))[0] == 500
        assert (await r.post(BODY, "/v1/rerank"))[0] == 500
        _, (o,) = await r.records()
        assert (o.status, o.error) == (500, "internal")
        assert b"warmwatch_router_internal_errors_total 2.0" in r.router.metrics.page()
        assert r.nothing_in_flight()


async def test_a_response_that_is_only_announced_waits_for_its_first_token():
    async with fleet(1) as (r, (engine,)):
        events = ("created", "in_progress", "output_text.delta", "completed")
        engine.chunks = [f'event: response.{e}\ndata: {{"type":"response.{e}"}}\n\n'.encode() for e in events]
        go_on, load = asyncio.Event(), r.router.pools.by_name["tiny"].load

        async def between(i):
            await (go_on.wait() if i == 2 else asyncio.sleep(0))

        engine.between = between
        async with r.client.post(r.url + "/v1/responses", json={"model": "tiny", "input": "x", "stream": True}) as response:
            await asyncio.wait_for(response.content.readexactly(len(engine.chunks[0] + engine.chunks[1])), 5)
            assert (load.in_flight.tolist(), load.decoding.tolist()) == ([1], [0])
            go_on.set()
            await response.read()
        _, (outcome,) = await r.records()
        assert outcome.ttft_s is not None


async def test_streams_are_relayed_byte_for_byte_and_chunk_by_chunk():
    async with fleet(1) as (r, (engine,)):
        steps = [asyncio.Event() for _ in engine.chunks]
        engine.between = lambda i: steps[i].wait()
        async with r.client.post(r.url + "/v1/completions", json={**BODY, "stream": True}) as response:
            assert response.headers["x-engine"] == "w0"
            got = []
            for i, chunk in enumerate(engine.chunks):
                if i:
                    steps[i].set()
                got.append(await asyncio.wait_for(response.content.readexactly(len(chunk)), 5))  # no later chunk was needed for it
            assert got == engine.chunks
            assert await response.content.read() == b""
        _, (outcome,) = await r.records()
        assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.created_tokens, outcome.completion_tokens) == (100, 64, None, 3)
        assert (outcome.engine_ttft_s, outcome.engine_queue_s) == (0.0125, 0.0015)
        assert outcome.response_bytes == sum(map(len, engine.chunks))
        assert 0 < outcome.ttft_s <= outcome.e2e_s


async def test_a_stream_without_usage_has_unknown_usage():
    async with fleet(1) as (r, (engine,)):
        engine.chunks = answer_chunks(usage=False)
        await r.post({**BODY, "stream": True})
        _, (outcome,) = await r.records()
        assert (outcome.status, outcome.prompt_tokens, outcome.cached_tokens) == (200, None, None)


async def test_include_usage_asks_for_it_only_in_streams_that_did_not():
    async with fleet(1, include_usage=True) as (r, (engine,)):
        await r.post({**BODY, "stream": True, "stream_options": {"x": 1}})
        await r.post({**BODY, "stream": True, "stream_options": {"include_usage": False}})
        await r.post(BODY)
        asked = [json.loads(s.body).get("stream_options") for s in engine.seen]
        assert asked == [{"x": 1, "include_usage": True}, {"include_usage": False}, None]


async def test_decision_and_outcome_tell_the_whole_story():
    async with fleet() as (r, _):
        await r.hold("w2", r.chain(PROMPT))
        await r.post(
            {**BODY, "session_id": "s-1"}, x_request_id="r-9", x_warmwatch_route="review", x_warmwatch_tenant="acme", x_session_id="other"
        )
        (d,), (o,) = await r.records()
        assert (d.request_id, d.pool, d.model, d.path, d.route, d.tenant, d.session_id) == (
            "r-9", "tiny", "tiny", "/v1/completions", "review", "acme", "s-1",
        )  # fmt: skip
        assert (d.policy, d.policy_version, d.token_source, d.prompt_tokens, d.block_size, d.worker, d.rank) == (
            "cost",
            r.router.pools.by_name["tiny"].policy.version,
            "exact",
            100,
            16,
            "w2",
            0,
        )
        assert unpack_hashes(d.chain).tolist() == r.chain(PROMPT)
        assert (d.best_overlap_worker, d.best_overlap_tokens, d.workers_considered) == ("w2", 96, 3)
        chosen, *others = d.candidates
        assert (chosen.worker, chosen.overlap_tokens, chosen.overlap_gpu_tokens, chosen.epoch, chosen.seq) == ("w2", 96, 96, 1, 1)
        assert (chosen.trust, {c.trust for c in others}) == (Trust.EXACT, {Trust.BLIND})
        assert all(c.cost_s >= chosen.cost_s for c in others)
        assert d.margin_s == pytest.approx(min(c.cost_s for c in others) - chosen.cost_s)
        assert 0 <= d.index_lag_s < 5
        assert 0 <= d.index_behind_s < 5
        assert d.decide_us > 0
        assert (o.request_id, o.worker, o.status, o.error, o.ttft_s, o.cached_tokens, o.retries) == ("r-9", "w2", 200, None, None, 64, 0)
        assert o.request_bytes > 100
        assert o.e2e_s > 0


async def test_records_name_every_field_of_their_contract():
    async with fleet() as (r, _):
        await r.hold("w2", r.chain(PROMPT))
        await r.post(BODY)
        await r.records()
        (d,), (o,) = (list(map(json.loads, r.values(topic))) for topic in (DECISIONS, OUTCOMES))
        assert (set(d), set(o)) == (set(Decision.model_fields), set(Outcome.model_fields))
        assert {frozenset(c) for c in d["candidates"]} == {frozenset(Candidate.model_fields)}


@pytest.mark.parametrize("given", [{}, {"cache_salt": "s"}, {"model": "an-adapter"}])
async def test_the_chain_is_the_canonical_one(given):
    async with fleet(1) as (r, _):
        await r.post({**BODY, **given})
        (d,), _ = await r.records()
        lora = given.get("model")
        expected = hash_chain(KEY, root_hash(KEY, "tiny", lora), PROMPT, BLOCK, salted_extras(KEY, 6, given.get("cache_salt")))
        assert unpack_hashes(d.chain).tolist() == expected.tolist()
        assert d.lora == lora


async def test_a_worker_that_is_down_is_left_out_and_comes_back():
    async with contextlib.AsyncExitStack() as stack:
        w0 = await stack.enter_async_context(FakeEngine("w0").serving())
        w1 = FakeEngine("w1")
        async with w1.serving():
            port = int(w1.url.rsplit(":", 1)[1])
        r = await stack.enter_async_context(running([w0, w1], expect_ttl_s=0))
        await r.hold("w1", r.chain(PROMPT))
        status, headers, _ = await r.post(BODY)
        assert (status, headers["x-warmwatch-worker"]) == (200, "w0")
        (d,), (o,) = await r.records()
        assert (d.worker, [(a.worker, a.rank) for a in d.attempts], o.worker, o.retries, o.error) == ("w0", [("w1", 0)], "w0", 1, None)
        page = r.router.metrics.page()
        assert b'warmwatch_router_prompts_total{pool="tiny",token_source="exact"} 1.0' in page  # one request, two attempts
        assert b'warmwatch_router_predicted_cached_tokens_total{pool="tiny"} 0.0' in page  # w1 held 96 and gave no answer
        assert d.attempts[0].error.startswith("connect")
        assert r.router.pools.by_name["tiny"].health.up.tolist() == [True, False]
        await r.post({**BODY, "prompt": PROMPT[::-1]})
        assert len((await r.records(2))[0][1].attempts) == 0
        async with w1.serving(port):
            await until(lambda: r.router.pools.by_name["tiny"].health.up.all())
            assert (await r.post(BODY))[1]["x-warmwatch-worker"] == "w1"
        assert r.nothing_in_flight()


async def test_nobody_there_is_a_503_that_clients_understand():
    dead = FakeEngine("w0")
    async with dead.serving():
        pass
    async with running([dead], wait=False) as r:
        status, headers, body = await r.post(BODY)
        error = json.loads(body)["error"]
        assert (status, error["code"], error["type"]) == (503, 503, "ServiceUnavailable")
        assert headers["x-request-id"]
        (d,), (o,) = await r.records()
        assert (d.worker, len(d.attempts), o.status, o.error) == ("w0", 1, 503, "connect")
        assert r.nothing_in_flight()
        async with r.client.get(r.url + "/readyz") as ready:
            assert ready.status == 503
            assert "no worker of tiny answers" in await ready.text()


async def test_a_pool_without_workers_has_an_outcome_without_a_worker():
    async with running([], wait=False) as r:
        assert (await r.post(BODY))[0] == 503
        decisions, (o,) = await r.records()
        assert (decisions, o.worker, o.error) == ([], None, "no worker")


@pytest.mark.parametrize("status", [404, 429, 500])
async def test_an_engines_error_is_an_answer(status):
    async with fleet(2) as (r, engines):
        for e in engines:
            e.status = status
        got, _, body = await r.post(BODY)
        assert (got, json.loads(body)["error"]["code"], sum(len(e.seen) for e in engines)) == (status, status, 1)
        assert r.router.pools.by_name["tiny"].health.up.all()
        _, (o,) = await r.records()
        assert (o.status, o.error, o.cached_tokens) == (status, None, None)
        assert r.router.pools.index.pending_blocks == 0  # it will not leave its blocks there


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after_first_byte", [True, False])
async def test_a_client_that_leaves_cancels_the_engines_work(stream, after_first_byte):
    async with fleet(1) as (r, (engine,)):
        never = asyncio.Event()
        if after_first_byte and stream:
            engine.between = lambda i: never.wait()
        else:
            engine.gate = never

        async def ask():
            async with r.client.post(r.url + "/v1/completions", json={**BODY, "stream": stream}) as response:
                await response.content.readany()
                never_read.set()
                await response.read()

        never_read = asyncio.Event()
        task = asyncio.create_task(ask())
        await until(lambda: never_read.is_set() if after_first_byte and stream else engine.seen)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(engine.cancelled.wait(), 5)
        await until(r.nothing_in_flight)
        (d,), (o,) = await r.records()
        assert (d.worker, o.worker, o.status, o.error) == ("w0", "w0", None, "disconnect")
        assert r.router.pools.index.pending_blocks == 0


async def test_an_engine_that_breaks_off_says_so_in_the_stream_and_is_not_retried(caplog):
    async with fleet(2) as (r, engines):
        for e in engines:
            e.break_after = 1
        status, _, body = await r.post({**BODY, "stream": True})
        assert status == 200
        assert body.startswith(engines[0].chunks[0])
        error = json.loads(body.split(b"data: ")[-1])["error"]
        assert (error["code"], error["message"]) == (502, "the worker broke its answer off")
        assert sum(len(e.seen) for e in engines) == 1
        _, (o,) = await r.records()
        assert (o.status, o.error, o.retries) == (200, "upstream", 0)
        assert r.nothing_in_flight()
        broken = f'warmwatch_router_broken_answers_total{{pool="tiny",reason="upstream",worker="{o.worker}"}} 1.0'
        assert broken in r.router.metrics.page().decode()
        (told,) = [x.getMessage() for x in caplog.records if x.levelname == "WARNING"]
        assert told.startswith(f"request '{o.request_id}': worker {o.worker} did not end its answer: the worker's connection ended")


async def test_an_engine_that_closes_before_the_first_byte_is_retried_elsewhere():
    async with contextlib.AsyncExitStack() as stack:

        async def hang_up(reader, writer):
            await reader.read(10)
            writer.transport.abort()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        stack.push_async_callback(server.wait_closed)
        stack.callback(server.close)
        rude = FakeEngine("rude", url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        kind = await stack.enter_async_context(FakeEngine("kind").serving())
        r = await stack.enter_async_context(running([rude, kind]))
        await r.hold("rude", r.chain(PROMPT))
        assert (await r.post(BODY))[1]["x-warmwatch-worker"] == "kind"
        decisions, (o,) = await r.records()
        assert (decisions[-1].worker, [a.worker for a in decisions[-1].attempts], o.retries) == ("kind", ["rude"], 1)
        assert {(d.content_from, d.shared_tokens, d.chunks is None) for d in decisions} == {(6, None, False)}
        assert r.nothing_in_flight()


async def test_a_silent_engine_times_out_and_is_not_asked_twice():
    async with fleet(2, first_byte_timeout_s=0.2, idle_timeout_s=0.2) as (r, engines):
        for e in engines:
            e.gate = asyncio.Event()
        status, _, _ = await r.post(BODY)
        assert (status, sum(len(e.seen) for e in engines)) == (504, 1)
        _, (o,) = await r.records()
        assert (o.status, o.error) == (504, "timeout")
        assert r.nothing_in_flight()


@pytest.mark.parametrize("head_first", [False, True])
async def test_a_worker_that_stays_silent_is_left_out_until_its_health_answers(head_first):
    async with fleet(2, first_byte_timeout_s=0.2, idle_timeout_s=0.2) as (r, (silent, _)):
        silent.gate, silent.head_first, silent.healthy = asyncio.Event(), head_first, False
        body, health = {**BODY, "stream": True}, r.router.pools.by_name["tiny"].health
        await r.hold("w0", r.chain(PROMPT))
        for downs in ([True, True], [False, True]):
            await r.post(body)
            assert health.up.tolist() == downs
        assert len(silent.seen) == 2
        status, headers, _ = await r.post(body)
        assert (status, headers["x-warmwatch-worker"], len(silent.seen)) == (200, "w1", 2)
        _, outcomes = await r.records(3)
        assert [o.error for o in outcomes] == ["timeout", "timeout", None]
        silent.gate.set()
        silent.healthy = True
        await until(health.up.all)
        assert (await r.post(body))[1]["x-warmwatch-worker"] == "w0"


async def test_a_silence_after_the_first_byte_leaves_the_worker_in():
    async with fleet(1, first_byte_timeout_s=0.2, idle_timeout_s=0.2) as (r, (engine,)):
        never = asyncio.Event()
        engine.healthy, engine.between = False, lambda _: never.wait()
        for _ in range(3):
            assert (await r.post({**BODY, "stream": True}))[0] == 200
        assert r.router.pools.by_name["tiny"].health.up.all()
        _, outcomes = await r.records(3)
        assert [o.error for o in outcomes] == ["timeout"] * 3


async def test_tokens_come_from_the_engine_when_the_pool_has_no_tokenizer():
    async with fleet(1, tokenizer=False) as (r, (engine,)):
        engine.tokens = PROMPT
        await r.post({"model": "tiny", "messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions")
        engine.tokens = None
        await r.post({"model": "tiny", "prompt": "x"})
        (first, second), _ = await r.records(2)
        assert (first.token_source, first.prompt_tokens, unpack_hashes(first.chain).tolist()) == ("engine", 100, r.chain(PROMPT))
        assert (second.token_source, second.prompt_tokens, second.chain) == ("text", None, None)
        assert "/tokenize said 404" in second.token_reason


@pytest.mark.parametrize(
    ("path", "body", "source", "reason"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text", "image_url"),
        ("/v1/chat/completions", {"messages": "no list"}, "text", "list"),
        ("/v1/chat/completions", {"messages": [X], "chat_template": "{{ 1 }}"}, "text", "chat_template"),
        ("/v1/completions", {"prompt": [-1]}, "text", "token ids"),
        ("/v1/completions", {"prompt": 5}, "text", "prompt"),
        ("/v1/chat/completions", {"messages": [X], "chat_template_kwargs": "x"}, "text", "chat_template_kwargs"),
        ("/v1/chat/completions", {"messages": [X], "tools": [5]}, "text", "tool"),
        ("/v1/chat/completions", {}, "none", "messages"),
        ("/v1/completions", {"prompt": ["one", "two"]}, "exact", "batch of 2"),
        ("/v1/completions", {"prompt": "x", "truncate_prompt_tokens": {}}, "text", ""),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [5]}]}, "text", ""),
        ("/v1/chat/completions", {"messages": []}, "none", ""),
    ],
)
async def test_a_prompt_that_cannot_be_told_is_routed_all_the_same_and_the_record_says_why(path, body, source, reason):
    async with fleet(1) as (r, (engine,)):
        assert (await r.post({"model": "tiny", **body}, path))[0] == 200
        (d,), _ = await r.records()
        assert (d.token_source, d.chain, len(engine.seen)) == (source, None, 1)
        assert reason in d.token_reason, d.token_reason
        assert "Error" not in d.token_reason, "a class's name tells a person nothing"


async def test_long_prompts_are_tokenized_beside_the_loop():
    async with fleet(1) as (r, _):
        text = "read the file " * 20_000
        await r.post({"model": "tiny", "prompt": text})
        (d,), _ = await r.records()
        assert unpack_hashes(d.chain).tolist() == r.chain(text)


async def test_others_are_answered_while_a_megabyte_is_tokenized():
    async with fleet(1) as (r, _):
        prompts, ticks = r.router._prompts, 0
        asked = asyncio.create_task(r.post({"model": "tiny", "prompt": "read the user file and the function 12\n" * 25_000}))
        await until(lambda: prompts._waiting)
        async with r.client.get(r.url + "/healthz") as response:
            assert response.status == 200
        assert prompts._waiting, "the answer came only after the prompt was tokenized"
        while prompts._waiting:
            await asyncio.sleep(0.001)
            ticks += 1
        assert ticks > 10
        assert (await asked)[0] == 200
        (d,), _ = await r.records()
        assert d.token_source == "exact"


async def skipped(r):
    async with r.client.get(r.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return {line.split('reason="')[1].split('"')[0]: float(line.split()[-1]) for line in lines if "prompts_skipped_total{" in line}


async def test_a_prompt_over_the_bound_is_routed_by_load_and_counted():
    async with fleet(1, max_prompt_chars=100) as (r, (engine,)):
        for prompt in ("x" * 100, "x" * 101, [[*range(200)]]):
            assert (await r.post({"model": "tiny", "prompt": prompt}))[0] == 200
        decisions, _ = await r.records(3)
        assert [(d.token_source, d.token_reason) for d in decisions] == [("exact", None), ("text", "too_long"), ("exact", None)]
        assert await skipped(r) == {"too_long": 1}
        assert len(engine.seen) == 3


async def test_the_bound_holds_for_prompts_that_the_engine_would_tokenize():
    async with fleet(1, tokenizer=False, max_prompt_chars=100) as (r, (engine,)):
        engine.tokens = PROMPT
        await r.post({"model": "tiny", "prompt": "x" * 200})
        assert [s.path for s in engine.seen] == ["/v1/completions"]
        assert await skipped(r) == {"too_long": 1}


async def test_without_a_bound_any_length_is_tokenized():
    async with fleet(1, max_prompt_chars=0) as (r, _):
        await r.post({"model": "tiny", "prompt": "x" * 5000})
        (d,), _ = await r.records()
        assert d.token_source == "exact"


async def test_when_too_many_prompts_wait_for_a_tokenizer_thread_the_rest_go_by_load(monkeypatch):
    async with fleet(1, max_waiting_prompts=1) as (r, _):
        go, tokenizer = threading.Event(), r.router.pools.by_name["tiny"].tokenizer
        ids = tokenizer.ids
        monkeypatch.setattr(tokenizer, "ids", lambda text, special: (go.wait(10), ids(text, special))[1])
        long = [{"model": "tiny", "prompt": f"{i} " + "read the file " * 200} for i in range(4)]
        try:
            held = [asyncio.create_task(r.post(body)) for body in long[:3]]  # two in the threads, one waiting
            await until(lambda: r.router._prompts._waiting == 3)
            assert (await r.post(long[3]))[0] == 200
            assert (await r.post({"model": "tiny", "prompt": "short"}))[0] == 200
        finally:
            go.set()
        assert [status for status, _, _ in await asyncio.gather(*held)] == [200] * 3
        decisions, _ = await r.records(5)
        assert sorted(d.token_source for d in decisions) == ["exact"] * 4 + ["text"]
        assert await skipped(r) == {"queue_full": 1}
        assert r.router._prompts._waiting == 0


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [(b"{", 400, "JSON object"), (b"[]", 400, "JSON object"), (b'{"a":"' + b"x" * 2000 + b'"}', 413, "max_body_bytes")],
)
async def test_bad_bodies_are_refused_with_the_reason(body, status, says):
    async with fleet(1, max_body_bytes=1024) as (r, (engine,)):
        got, _, text = await r.post(body)
        assert (got, says in json.loads(text)["error"]["message"], engine.seen) == (status, True, [])
        assert f'warmwatch_router_rejected_total{{reason="body",status="{status}"}} 1.0' in r.router.metrics.page().decode()


async def test_other_paths_pass_through():
    async with fleet(2) as (r, engines):
        async with r.client.put(URL(r.url + "/some/path%20x?q=%2F1", encoded=True), data=b"abc", headers={"x-odd": "1"}) as response:
            assert response.status == 418
            assert (await response.text()).startswith("PUT by w")
        (seen,) = [s for e in engines for s in e.seen]
        assert (seen.path, seen.body, seen.headers["x-odd"]) == ("/some/path%20x?q=%2F1", b"abc", "1")
        assert r.nothing_in_flight()


async def test_answers_to_other_paths_are_not_read_for_usage(monkeypatch):
    def read(*_):
        raise AssertionError("nobody asks for it")

    monkeypatch.setattr("router.proxy.WholeAnswer", read)
    monkeypatch.setattr("router.proxy.StreamTail", read)
    async with fleet(1) as (r, _):
        async with r.client.get(r.url + "/other") as response:
            assert (response.status, await response.text()) == (418, "GET by w0")
        assert "warmwatch_router_internal_errors_total 0.0" in r.router.metrics.page().decode()


async def test_headers_that_connection_names_stay_on_their_hop():
    async with fleet(1) as (r, (engine,)):
        sent = {"Connection": "keep-alive, X-Hop , content-type", "X-Hop": "1", "X-End": "2"}
        async with r.client.put(r.url + "/other", data=b"abc", headers={**sent, "content-type": "text/odd"}) as response:
            assert response.status == 418
        seen = engine.seen[0].headers
        assert ("x-hop" in seen, seen["x-end"], seen["content-type"], engine.seen[0].body) == (False, "2", "text/odd", b"abc")


def test_response_headers_that_connection_names_stay_on_their_hop():
    raw = [
        (b"Connection", b"close, X-Hop"),
        (b"X-Hop", b"1"),
        (b"X-End", b"2"),
        (b"Content-Length", b"3"),
        (b"Connection", b"Content-Length"),
    ]
    assert forwarded_response_headers(raw) == [(b"x-end", b"2"), (b"content-length", b"3")]


async def test_models_health_readiness_and_metrics():
    async with fleet(2) as (r, _):
        await r.hold("w0", r.chain(PROMPT))
        await r.post(BODY)

        async def get(path):
            async with r.client.get(r.url + path) as response:
                return response.status, await response.text()

        status, models = await get("/v1/models")
        assert (status, [m["id"] for m in json.loads(models)["data"]]) == (200, ["tiny"])
        assert (await get("/healthz"))[0] == 200
        status, ready = await get("/readyz")
        assert (status, json.loads(ready)["index"], json.loads(ready)["why"]) == (200, "following", [])
        told = json.loads(ready)["pools"]["tiny"]
        assert (told["targets"], told["up"], told["blind"]) == (2, 2, 1)
        status, page = await get("/metrics")
        assert status == 200
        for line in (
            'warmwatch_router_requests_total{pool="tiny",status="2xx",worker="w0"} 1.0',
            'warmwatch_router_worker_trust{pool="tiny",rank="0",worker="w0"} 1.0',
            'warmwatch_router_worker_trust{pool="tiny",rank="0",worker="w1"} 0.0',
            'warmwatch_router_held_blocks{pool="tiny",rank="0",worker="w0"} 6.0',
            'warmwatch_router_reported_cached_tokens_total{pool="tiny"} 64.0',
            'warmwatch_router_predicted_cached_tokens_total{pool="tiny"} 96.0',
            "warmwatch_router_records_dropped_total 0.0",
        ):
            assert line in page


async def test_a_body_too_deep_to_be_written_anew_goes_on_as_it_is():
    async with fleet(1, include_usage=True) as (r, (engine,)):
        body = b'{"prompt":"x","stream":true,"stream_options":{},"more":' + b'{"a":' * 400 + b"1" + b"}" * 401
        assert (await r.post(body))[0] == 200
        assert engine.seen[-1].body == body


async def test_the_page_tells_how_many_chats_were_known_and_what_keeping_them_takes():
    async with fleet(1) as (r, _):
        talk = [{"role": "user", "content": "read the file"}]
        for more in range(3):
            await r.post({"messages": talk}, "/v1/chat/completions")
            talk = [*talk, {"role": "user", "content": f"and {more}"}]
        page = r.router.metrics.page().decode()
        assert 'warmwatch_router_chats_read_total{known="yes",pool="tiny"} 2.0' in page
        assert 'warmwatch_router_chats_read_total{known="no",pool="tiny"} 1.0' in page
        assert "warmwatch_router_tokenize_failures_total 0.0" in page
        for name in ("chats", "pieces"):
            (line,) = (x for x in page.splitlines() if x.startswith(f'warmwatch_router_known_{name}_bytes{{pool="tiny"}}'))
            assert float(line.split()[-1]) > 500


async def test_expected_blocks_are_gone_from_the_page_when_their_time_is_over_though_nobody_asks():
    async with fleet(1, expect_ttl_s=0.05) as (r, _):
        await r.post(BODY)
        assert r.router.pools.index.pending_blocks == 6

        def gone():
            return b"warmwatch_router_index_expected_blocks 0.0" in r.router.metrics.page()

        await until(gone)


async def test_many_clients_at_once_leave_nothing_behind():
    async with fleet(3) as (r, engines):

        async def one(i):
            try:
                async with asyncio.timeout(0.002 if i % 5 == 0 else 20):
                    return (await r.post({**BODY, "prompt": [i, *PROMPT], "stream": i % 2 == 0}))[0]
            except (TimeoutError, aiohttp.ClientError):
                return None

        statuses = await asyncio.gather(*(one(i) for i in range(200)))
        assert statuses.count(200) >= 160
        await until(r.nothing_in_flight)
        assert statuses.count(200) <= sum(len(e.seen) for e in engines) <= 200
