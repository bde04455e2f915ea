"""Clients that vanish, dawdle, come in thousands, or send what is no request; before a worker that speaks bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource

import pytest

from tests.router.fake_engine import FakeEngine, answer_chunks
from tests.router.http.speaking import Peer, chunked, client, worker
from tests.router.running import Running, running, until

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = {"model": "tiny", "prompt": [1, 2, 3], "stream": True}


@contextlib.asynccontextmanager
async def before(script, **settings):
    """A router before one worker that runs this script for completions, and answers the router's own questions."""

    async def serve(peer: Peer) -> None:
        while True:
            request = await peer.request()
            if request.startswith(b"POST "):
                await script(peer, request)
            elif request.startswith(b"GET /metrics "):
                page = b'vllm:cache_config_info{block_size="16"} 1.0\n'
                await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(page) + page)
            else:
                await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async with worker(serve) as w, running([FakeEngine("w0", url=w.url)], **settings) as r:
        yield r, w


def request_of(body: dict) -> bytes:
    text = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(text) + text


def port_of(r: Running) -> int:
    return int(r.url.rsplit(":", 1)[1])


def upstream_is_idle(r: Running) -> bool:
    return r.router._upstream.open == r.router._upstream.idle


@pytest.fixture
def many_files():
    """Sockets for thousands of streams, all four ends of which are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 12_000
    if soft < wanted and hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_two_thousand_streams_at_once_are_all_relayed_and_leave_nothing_behind(many_files):
    many, open_, go = 2000, 0, asyncio.Event()
    events = answer_chunks()

    async def script(peer: Peer, _: bytes) -> None:
        nonlocal open_
        await peer.say(STREAM + chunked(events[0]))
        open_ += 1
        await go.wait()
        await peer.say(chunked(*events[1:]) + b"0\r\n\r\n")

    async def one(r: Running) -> bytes:
        async with client(port_of(r)) as peer:
            await peer.say(request_of(BODY))
            return await peer.reader.readuntil(b"\r\n0\r\n\r\n")

    async with before(script, health_every_s=0, connect_timeout_s=60) as (r, _):
        asked = [asyncio.create_task(one(r)) for _ in range(many)]
        await until(lambda: open_ == many, 90)
        assert int(r.router.pools.by_name["tiny"].load.in_flight.sum()) == many
        go.set()
        answers = await asyncio.gather(*asked)
        assert {a.count(b"data: ") for a in answers} == {len(events)}
        assert all(a.startswith(b"HTTP/1.1 200 OK") and b"[DONE]" in a for a in answers)
        await until(r.nothing_in_flight)
        assert (r.router._upstream.idle, upstream_is_idle(r)) == (256, True)
        await r.records(many)


@pytest.mark.parametrize("sent", ["half a request", "before the answer", "within the answer"])
async def test_a_client_that_vanishes_ends_the_workers_stream_at_once(sent):
    asked = asyncio.Event()

    async def script(peer: Peer, _: bytes) -> None:
        asked.set()
        if sent == "within the answer":
            await peer.say(STREAM + chunked(answer_chunks()[0]))
        assert await peer.closed()
        raise ConnectionError

    async with before(script) as (r, w):
        async with client(port_of(r)) as peer:
            request = request_of(BODY)
            await peer.say(request[: -5 if sent == "half a request" else len(request)])
            if sent == "within the answer":
                await peer.reader.readuntil(b"data: ")
            elif sent == "before the answer":
                await asked.wait()
            peer.abort()
        await until(lambda: "left" in w.ended or sent == "half a request")
        await until(lambda: r.nothing_in_flight() and upstream_is_idle(r))
        if sent != "half a request":
            _, (outcome,) = await r.records()
            assert (outcome.status, outcome.error) == (None, "disconnect")


async def test_a_client_that_takes_nothing_stops_the_worker_and_costs_bounded_memory():
    size, sent = 32 << 20, 0

    async def script(peer: Peer, _: bytes) -> None:
        nonlocal sent
        await peer.say(STREAM)
        while sent < size:
            await peer.say(chunked(b"data: " + b"x" * 65_528 + b"\n\n"))
            sent += 1 << 16
        await peer.say(b"0\r\n\r\n")

    async with before(script) as (r, _), client(port_of(r), receive_buffer=1 << 16) as peer:
        await peer.say(request_of(BODY))
        stood = -1
        while stood != sent or not sent:
            stood = sent
            await asyncio.sleep(0.1)
        assert sent < size // 2
        received = 0
        while received < size:
            received += len(await peer.reader.read(1 << 20))
        await until(r.nothing_in_flight)
        _, (outcome,) = await r.records()
        assert (outcome.status, outcome.error, outcome.response_bytes) == (200, None, size)


async def test_a_client_that_takes_nothing_for_too_long_ends_the_workers_stream():
    async def script(peer: Peer, _: bytes) -> None:
        await peer.say(STREAM)
        while True:
            await peer.say(chunked(b"data: " + b"x" * 65_528 + b"\n\n"))

    async with before(script, client_timeout_s=0.3) as (r, w), client(port_of(r), receive_buffer=1 << 16) as peer:
        await peer.say(request_of(BODY))
        await until(lambda: "left" in w.ended)
        await until(r.nothing_in_flight)
        _, (outcome,) = await r.records()
        assert outcome.error == "disconnect"


async def test_a_client_that_does_not_send_its_whole_request_is_told_408():
    async def script(peer: Peer, _: bytes) -> None:
        raise AssertionError("nothing goes to the worker")

    async with before(script, client_timeout_s=0.3) as (r, _), client(port_of(r)) as peer:
        await peer.say(request_of(BODY)[:-5])
        assert (await peer.reader.readline()).startswith(b"HTTP/1.1 408 ")
        assert 'warmwatch_router_rejected_total{reason="http",status="408"} 1.0' in r.router.metrics.page().decode()


async def test_heads_over_the_bounds_are_told_431():
    async with before(lambda *_: asyncio.sleep(0), max_headers=20, max_head_bytes=2048) as (r, _):
        for headers in (b"a: b\r\n" * 21, b"a: " + b"b" * 2048):
            async with client(port_of(r)) as peer:
                await peer.say(b"GET /healthz HTTP/1.1\r\n" + headers + b"\r\n\r\n")
                assert (await peer.reader.readline()).startswith(b"HTTP/1.1 431 ")
        assert 'warmwatch_router_rejected_total{reason="http",status="431"} 2.0' in r.router.metrics.page().decode()


def nested(depth: int) -> bytes:
    return b'{"model":"tiny","prompt":[1,2,3],"x":' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize(
    ("body", "status"),
    [(nested(500), 200), (nested(100_000), 400), (b"{", 400), (b"\xff", 400), (b'{"a": NaN}', 400), (b"", 400), (b"[1]", 400)],
)
async def test_bodies_that_are_no_json_object_or_nested_without_end_are_told_400(body, status):
    async with FakeEngine("w0").serving() as engine, running([engine]) as r:
        got, _, text = await r.post(body)
        assert got == status
        if status == 400:
            assert "must be a JSON object" in json.loads(text)["error"]["message"]
        assert b"warmwatch_router_internal_errors_total 0.0" in r.router.metrics.page()


@pytest.mark.parametrize("field", ["messages", "tools", "chat_template_kwargs", "prompt", "stream_options"])
async def test_deep_nesting_where_the_router_reads_on_costs_no_error_of_its_own(field):
    deep = json.loads("[" * 900 + "]" * 900)
    given = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
    value = {"messages": [{"role": "user", "content": deep}], "tools": [{"type": "function", "function": {"x": deep}}]}.get(field, deep)
    async with FakeEngine("w0").serving() as engine, running([engine], include_usage=True) as r:
        got, _, _ = await r.post({**given, field: value}, "/v1/chat/completions")
        assert got == 200
        assert b"warmwatch_router_internal_errors_total 0.0" in r.router.metrics.page()
        assert r.nothing_in_flight()


@pytest.mark.parametrize(("told", "seen"), [([], set()), (["worker"], {"x-warmwatch-worker"})])
async def test_answers_carry_the_headers_that_the_setting_names(told, seen):
    async with FakeEngine("w0").serving() as engine, running([engine], response_headers=told) as r:
        _, headers, _ = await r.post({"model": "tiny", "prompt": [1, 2, 3]}, x_request_id="mine")
        assert {h for h in headers if h.startswith("x-warmwatch-")} == seen
        assert headers["x-request-id"] == "mine"


@pytest.mark.parametrize("body", [b'{"stream":true,"prompt":[1]}', b' {"prompt":[1] , "stream":true }\n '])
async def test_usage_is_asked_for_without_touching_the_rest_of_the_body(body):
    async with FakeEngine("w0").serving() as engine, running([engine], include_usage=True) as r:
        await r.post(body)
        got = engine.seen[0].body
        assert got.startswith(body.rstrip()[:-1])
        assert json.loads(got) == {**json.loads(body), "stream_options": {"include_usage": True}}
