"""The server to the clients against clients that speak bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest

from router.http.asgi import CLIENT, read_body, respond
from router.http.server import Limits, Server
from tests.router.http.speaking import Peer, client
from tests.router.running import until

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(application, drain_s=1.0, **limits):
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(application, Limits(**limits))
    await server.start(listener)
    try:
        yield server, listener.getsockname()[1]
    finally:
        await server.drain(drain_s)
        assert not server.tasks


async def echo(scope, receive, send):
    """Says what it was asked."""
    body = await read_body(receive, 1 << 30)
    keys = ("method", "path", "query_string", "http_version", "scheme")
    told = {k: v.decode() if isinstance(v := scope[k], bytes) else v for k in keys}
    told |= {"raw": scope["raw_path"].decode(), "headers": [[k.decode(), v.decode()] for k, v in scope["headers"]], "body": body.decode()}
    await respond(send, 200, json.dumps(told).encode(), b"application/json")


async def answers(peer: Peer, many: int = 1) -> list[tuple[int, dict[str, str], bytes]]:
    out = []
    for _ in range(many):
        head = (await peer.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        if "content-length" in headers:
            body = await peer.reader.readexactly(int(headers["content-length"]))
        elif "transfer-encoding" in headers:
            body = b""
            while size := int((await peer.reader.readuntil(b"\r\n")), 16):
                body += await peer.reader.readexactly(size)
                await peer.reader.readexactly(2)
            await peer.reader.readexactly(2)
        else:
            body = await peer.reader.read()
        out.append((int(head[0].split()[1]), headers, body))
    return out


async def asked(*said: bytes, application=echo, many=1, **limits):
    """What the server answers to these bytes, and whether it closes then."""
    async with serving(application, **limits) as (_, port), client(port) as peer:
        await peer.say(*said)
        out = await answers(peer, many)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                return out, await peer.closed()
        return out, False


async def test_a_request_is_told_as_it_came():
    request = b"POST /a%20b%2F?c=%2F&d HTTP/1.1\r\nHost: x\r\nX-Odd:  1 \r\ncontent-length: 5\r\n\r\nhello"
    ((status, _, body),), closed = await asked(request)
    told = json.loads(body)
    assert (status, closed) == (200, False)
    assert told == {
        "method": "POST", "path": "/a b/", "raw": "/a%20b%2F", "query_string": "c=%2F&d", "http_version": "1.1", "scheme": "http",
        "headers": [["host", "x"], ["x-odd", "1"], ["content-length", "5"]], "body": "hello",
    }  # fmt: skip


async def test_a_request_may_come_byte_by_byte_and_in_chunks():
    request = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\nx-trailer: 1\r\n\r\n"
    ((_, _, body),), closed = await asked(*(bytes([b]) for b in request))
    told = json.loads(body)
    assert (told["body"], "x-trailer" in dict(told["headers"]), closed) == ("onetwo", False, False)


@pytest.mark.parametrize(
    ("target", "path"), [(b"http://x/a?b", "/a"), (b"*", "*"), (b"http://x", "/"), (b"/a//b?c?d", "/a//b"), (b"/%zz", "/%zz")]
)
async def test_targets_of_every_form_are_understood(target, path):
    ((status, _, body),), _ = await asked(b"OPTIONS " + target + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (status, json.loads(body)["path"]) == (200, path)


async def test_requests_of_one_connection_are_answered_one_after_the_other_and_in_order():
    running = 0

    async def slow(scope, receive, send):
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0.01 if scope["path"] == "/0" else 0)
        await respond(send, 200, scope["path"].encode(), b"text/plain")
        running -= 1

    requests = b"".join(b"POST /%d HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}" % i for i in range(100))
    out, closed = await asked(requests, application=slow, many=100)
    assert ([body for _, _, body in out], closed) == ([b"/%d" % i for i in range(100)], False)


async def test_old_and_closing_clients_get_their_connection_closed():
    for request in (b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"):
        ((_, headers, _),), closed = await asked(request)
        assert (headers["connection"], closed) == ("close", True)


async def test_an_answer_without_length_is_chunked_and_for_old_clients_ends_with_the_connection():
    async def stream(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"one", b"", b"two"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})

    ((_, headers, body),), closed = await asked(GET, application=stream)
    assert (headers["transfer-encoding"], body, closed) == ("chunked", b"onetwo", False)
    ((_, headers, body),), _ = await asked(b"GET / HTTP/1.0\r\n\r\n", application=stream)
    assert ("transfer-encoding" in headers, body) == (False, b"onetwo")


async def test_answers_to_head_and_bodiless_ones_end_with_their_head():
    async def any_body(scope, receive, send):
        await respond(send, 200, b"hello", b"text/plain")

    async with serving(any_body) as (_, port), client(port) as peer:
        await peer.say(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n" + GET)
        head = await peer.reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 5\r\n" in head
        assert (await answers(peer))[0][2] == b"hello"

    async def nothing(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async with serving(nothing) as (_, port), client(port) as peer:
        await peer.say(GET)
        assert await peer.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 204 No Content\r\n\r\n"


async def test_a_client_that_waits_for_the_word_gets_it_when_its_body_is_wanted():
    async with serving(echo) as (_, port), client(port) as peer:
        await peer.say(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n")
        assert await peer.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await peer.say(b"hello")
        assert json.loads((await answers(peer))[0][2])["body"] == "hello"

    async def unwanted(scope, receive, send):
        await respond(send, 401, b"no", b"text/plain")

    async with serving(unwanted) as (_, port), client(port) as peer:
        await peer.say(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n")
        ((status, headers, _),) = await answers(peer)
        assert (status, headers["connection"]) == (401, "close")


@pytest.mark.parametrize("body", [b"hello", b""])
async def test_an_upgrade_is_not_taken_up_and_its_request_is_served_with_its_body(body):
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    for said in ((head + b"content-length: %d\r\n\r\n" % len(body) + body,), (head + b"content-length: %d\r\n\r\n" % len(body), body)):
        ((status, _, told),), closed = await asked(*said)
        assert (status, json.loads(told)["body"], closed) == (200, body.decode(), True)
    if body:
        ((_, _, told),), _ = await asked(head + b"transfer-encoding: chunked\r\n\r\n5\r\n" + body + b"\r\n0\r\n\r\n")
        assert json.loads(told)["body"] == "hello"


BAD = [
    (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    (b"GET / HTTP/3.0\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
    (b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n", 405),
    (b"GET / HTTP/1.1\r\nhost: x\r\nexpect: the-unexpected\r\n\r\n", 417),
    (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 51 + b"\r\n", 431),
    (b"GET /" + b"x" * 5000, 431),
    (b"GET / HTTP/1.1\r\na: " + b"x" * 5000, 431),
]


@pytest.mark.parametrize(("said", "status"), BAD, ids=range(len(BAD)))
async def test_what_is_no_request_is_refused_in_the_form_of_an_openai_error_and_the_connection_ends(said, status):
    async with serving(echo, max_head_bytes=4096, max_headers=50) as (server, port):
        async with client(port) as peer:
            await peer.say(said)
            ((got, headers, body),) = await answers(peer)
            assert (got, json.loads(body)["error"]["code"], headers["connection"]) == (status, status, "close")
            await peer.say(b"x")
        await until(lambda: not server.connections)


@pytest.mark.parametrize(
    ("head", "status", "kind"),
    [
        (b"a: " + b"x" * 5000, 431, "RequestHeaderFieldsTooLarge"),
        (b"content-length: 9\r\n\r\nhalf", 408, "RequestTimeout"),
    ],
)
async def test_a_refusal_is_told_to_the_server_and_names_its_kind_and_the_id_of_its_request_alone(head, status, kind):
    told = []
    async with serving(echo, max_head_bytes=4096, request_s=0.1) as (server, port), client(port) as peer:
        server.on_refusal = told.append
        await peer.say(b"GET / HTTP/1.1\r\nhost: x\r\nx-request-id: before\r\n\r\n")
        await answers(peer, 1)
        await peer.say(b"POST / HTTP/1.1\r\nx-request-id: this\r\n" + head)
        ((got, headers, body),) = await answers(peer)
        assert (got, headers["x-request-id"], json.loads(body)["error"]["type"]) == (status, "this", kind)
        assert told == [status]
    async with serving(echo) as (_, port), client(port) as peer:
        await peer.say(b"GET / HTTP/1.1\r\nhost: x\r\nx-request-id: before\r\n\r\n")
        await answers(peer, 1)
        await peer.say(b"nonsense\r\n\r\n")
        ((got, headers, _),) = await answers(peer)
        assert (got, "x-request-id" in headers) == (400, False)


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\nx-h: " + b"v" * 70_000, b"GET /" + b"u" * 70_000 + b" HTTP/1.1\r\nhost: x"])
async def test_the_bound_of_a_head_holds_by_default(head):
    ((status, _, _),), _ = await asked(head + b"\r\n\r\n")
    assert status == 431


async def test_headers_within_the_bounds_pass():
    ((status, _, _),), _ = await asked(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 50 + b"\r\n", max_headers=50)
    assert status == 200


async def test_what_comes_before_a_bad_request_is_answered_first():
    gate = asyncio.Event()

    async def slow(scope, receive, send):
        await gate.wait()
        await respond(send, 200, b"first", b"text/plain")

    async with serving(slow) as (_, port), client(port) as peer:
        await peer.say(GET + b"nonsense\r\n\r\n")
        await asyncio.sleep(0.02)
        gate.set()
        assert [status for status, _, _ in await answers(peer, 2)] == [200, 400]


@pytest.mark.parametrize(
    "said", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhalf"]
)
async def test_a_client_that_is_slow_to_ask_is_told_408_or_closed(said):
    async with serving(echo, request_s=0.1, keep_alive_s=0.1) as (server, port), client(port) as peer:
        await peer.say(said)
        if said:
            ((status, _, body),) = await answers(peer)
            assert (status, "client_timeout_s" in json.loads(body)["error"]["message"]) == (408, True)
        else:
            assert await peer.closed()
        await until(lambda: not server.tasks)


async def test_a_client_that_trickles_its_request_is_told_408_all_the_same():
    async with serving(echo, request_s=0.15) as (_, port), client(port) as peer:

        async def trickle():
            with contextlib.suppress(ConnectionError):
                await peer.say(b"GET / HTTP/1.1\r\na: ")
                while True:
                    await peer.say(b"x")
                    await asyncio.sleep(0.01)

        trickling = asyncio.create_task(trickle())
        assert (await answers(peer))[0][0] == 408
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)


async def test_a_slow_answer_is_not_a_slow_request():
    async def slow(scope, receive, send):
        await read_body(receive, 100)
        await asyncio.sleep(0.3)
        await respond(send, 200, b"", b"text/plain")

    ((status, _, _),), _ = await asked(GET, application=slow, request_s=0.05, keep_alive_s=0.05, stall_s=0.05)
    assert status == 200


async def test_an_idle_connection_is_closed_and_a_used_one_is_not():
    async with serving(echo, keep_alive_s=0.2) as (server, port), client(port) as peer:
        for _ in range(6):
            await peer.say(GET)
            assert (await answers(peer))[0][0] == 200
            await asyncio.sleep(0.06)
        assert await peer.closed()
        await until(lambda: not server.connections)


async def test_a_body_that_nobody_wants_does_not_cost_the_client_its_answer():
    async def unwanted(scope, receive, send):
        await respond(send, 413, b"too large", b"text/plain")

    async with serving(unwanted) as (server, port):
        async with client(port) as peer:
            size = 16 << 20
            await peer.say(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
            for _ in range(size >> 16):
                await peer.say(b"x" * (1 << 16))
            ((status, headers, _),) = await answers(peer)
            assert (status, headers["connection"]) == (413, "close")
        await until(lambda: not server.connections)


async def test_a_body_that_nobody_reads_yet_is_not_taken_in():
    gate = asyncio.Event()

    async def late(scope, receive, send):
        await gate.wait()
        body = await read_body(receive, 1 << 30)
        await respond(send, 200, b"%d" % len(body), b"text/plain")

    async with serving(late) as (_, port), client(port) as peer:
        size, sent = 32 << 20, 0
        await peer.say(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)

        async def send_it():
            nonlocal sent
            while sent < size:
                await peer.say(b"x" * (1 << 16))
                sent += 1 << 16

        sending = asyncio.create_task(send_it())
        stood = -1
        while stood != sent:
            stood = sent
            await asyncio.sleep(0.1)
        assert sent < size
        gate.set()
        assert (await answers(peer))[0][2] == b"%d" % size
        await sending


async def test_a_client_that_leaves_cancels_its_request():
    for said in (GET, GET * 3, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhal"):
        started, ended = asyncio.Event(), []

        async def forever(scope, receive, send, started=started, ended=ended):
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(scope[CLIENT].left)

        async with serving(forever) as (server, port):
            async with client(port) as peer:
                await peer.say(said)
                await started.wait()
            await until(lambda ended=ended: ended)
            assert ended == [True]
            await until(lambda server=server: not server.connections and not server.tasks)


async def test_receive_says_disconnect_to_an_application_that_listens_for_it():
    heard = []

    async def listening(scope, receive, send):
        await read_body(receive, 100)
        with contextlib.suppress(asyncio.CancelledError):
            heard.append(await receive())
        heard.append(await receive())

    async with serving(listening) as (server, port):
        async with client(port) as peer:
            await peer.say(GET)
            await until(lambda: server.tasks)
        await until(lambda: heard)
        assert heard[-1] == {"type": "http.disconnect"}


@pytest.mark.parametrize("direct", [True, False])
async def test_a_client_that_takes_nothing_holds_up_its_answer_within_a_bound(direct):
    piece, many = b"x" * (1 << 16), 200
    written, paused = 0, []

    class Source:
        def pause(self):
            paused.append(True)

        def resume(self):
            paused.append(False)
            go_on.set()

    go_on = asyncio.Event()

    async def large(scope, receive, send):
        nonlocal written
        call = scope[CLIENT]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        call.source = Source()
        for _ in range(many):
            if direct:
                if paused and paused[-1]:
                    go_on.clear()
                    await go_on.wait()
                call.write(piece)
            else:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            written += len(piece)
        call.end()

    async with serving(large) as (_, port), client(port, receive_buffer=1 << 16) as peer:
        await peer.say(GET)
        stood = -1
        while stood != written or not written:
            stood = written
            await asyncio.sleep(0.1)
        assert (written < 10 << 20, paused[0]) == (True, True)
        assert len((await answers(peer))[0][2]) == many << 16
        assert False in paused  # what the last piece leaves paused ends so


async def test_a_client_that_takes_nothing_for_too_long_is_cut_off():
    ended = []

    async def large(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * (1 << 16), "more_body": True})
        finally:
            ended.append(scope[CLIENT].left)

    async with serving(large, stall_s=0.2) as (server, port), client(port, receive_buffer=1 << 16) as peer:
        await peer.say(GET)
        await until(lambda: ended)
        assert ended == [True]
        await until(lambda: not server.connections)


async def test_an_error_of_the_application_is_told_without_its_text():
    async def broken(scope, receive, send):
        raise RuntimeError("the secret")

    ((status, headers, body),), closed = await asked(GET, application=broken)
    assert (status, headers["connection"], b"secret" in body, closed) == (500, "close", False, True)
    assert json.loads(body)["error"]["code"] == 500

    async def forgetful(scope, receive, send):
        pass

    ((status, _, _),), _ = await asked(GET, application=forgetful)
    assert status == 500


async def test_a_path_with_a_line_break_makes_no_line_of_the_log(caplog):
    async def broken(scope, receive, send):
        raise RuntimeError

    await asked(b"GET /a%0aforged HTTP/1.1\r\nhost: x\r\n\r\n", application=broken)
    assert [r.getMessage() for r in caplog.records] == ["GET '/a\\nforged' met an error of the router's own"]


@pytest.mark.parametrize("sized", [True, False])
async def test_an_answer_that_is_not_brought_to_its_end_is_cut(sized):
    async def half(scope, receive, send):
        headers = [(b"content-length", b"10")] if sized else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        if sized:
            await send({"type": "http.response.body"})

    async with serving(half) as (_, port), client(port) as peer:
        await peer.say(GET)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await answers(peer)


@pytest.mark.parametrize(
    "header",
    [(b"x", b"a\r\nb: c"), (b"x", b"a\nb"), (b"x", b"a\rb"), (b"x\r\ny", b"a"), (b"connection", b"x"), (b"transfer-encoding", b"x")],
)
async def test_a_header_that_would_break_the_answer_is_an_error_of_the_application(header):
    async def injecting(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [header]})

    ((status, headers, _),), _ = await asked(GET, application=injecting)
    assert (status, "b" in headers) == (500, False)


async def test_draining_ends_idle_connections_lets_requests_end_and_takes_no_more():
    gate = asyncio.Event()

    async def slow(scope, receive, send):
        await gate.wait()
        await respond(send, 200, b"done", b"text/plain")

    async with serving(slow) as (server, port), client(port) as idle, client(port) as busy:
        await busy.say(GET)
        await until(lambda: server.tasks)
        draining = asyncio.create_task(server.drain(5.0))
        assert await idle.closed()
        with pytest.raises(OSError):
            async with client(port):
                pass
        gate.set()
        ((status, headers, _),) = await answers(busy)
        assert (status, headers["connection"], await busy.closed(), await draining) == (200, "close", True, 0)


async def test_what_does_not_end_while_it_drains_is_cancelled_and_told():
    async def forever(scope, receive, send):
        await asyncio.Event().wait()

    async with serving(forever) as (server, port), client(port) as peer:
        await peer.say(GET)
        await until(lambda: server.tasks)
        assert await server.drain(0.05) == 1
        assert (await answers(peer))[0][0] == 503


async def test_draining_can_be_cut_short():
    async def forever(scope, receive, send):
        await asyncio.Event().wait()

    async with serving(forever) as (server, port), client(port) as peer:
        await peer.say(GET)
        await until(lambda: server.tasks)
        draining = asyncio.create_task(server.drain(60.0))
        await asyncio.sleep(0)
        server.cut_off()
        await asyncio.wait_for(draining, 5)
