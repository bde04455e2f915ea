"""The client to the workers against servers that speak bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess

import pytest

from router.http.upstream import (
    HEAD_BYTES,
    BadAnswer,
    BrokeOff,
    ConnectFailed,
    FirstByteTimeout,
    IdleTimeout,
    Timeouts,
    Upstream,
    UpstreamError,
    client_tls,
)
from schemas.settings import SettingsError
from tests.router.http.speaking import Peer, answer, chunked, worker
from tests.router.running import until

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SOON = Timeouts(connect_s=1.0, first_byte_s=0.15, idle_s=0.15, keep_s=60.0)


@contextlib.asynccontextmanager
async def upstream(timeouts=Timeouts(), **given):  # noqa: B008 - a frozen value
    made = Upstream(timeouts, **given)
    made.start()
    try:
        yield made
    finally:
        made.close()
        await asyncio.sleep(0)


async def ask(up, url, body=b"", method=b"POST", lines=b"", on_wire=None):
    """Status and the pieces of the body."""
    got = await up.request(url, method, b"/v1/x?a=%2F", lines, body, on_wire)
    pieces = []
    await got.relay(pieces.append)
    return got, pieces


def says(*pieces, close=False):
    """A worker that answers every request with these bytes."""

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.say(*pieces)
            if close:
                return

    return script


async def test_a_request_arrives_as_it_was_given():
    seen = []

    async def script(peer: Peer) -> None:
        seen.append(await peer.request())
        await peer.say(answer())

    async with upstream() as up, worker(script) as w:
        wired = []
        got, pieces = await ask(up, w.url + "/base", b"{}", lines=b"content-type: a/b\r\n", on_wire=lambda: wired.append(len(seen)))
        assert (got.status, b"".join(pieces), wired) == (200, b"hello", [0])
        host = w.url.removeprefix("http://").encode()
        assert seen == [b"POST /base/v1/x?a=%2F HTTP/1.1\r\nhost: " + host + b"\r\ncontent-type: a/b\r\ncontent-length: 2\r\n\r\n{}"]


async def test_credentials_of_the_address_are_sent_where_the_request_has_none():
    seen = []

    async def script(peer: Peer) -> None:
        while True:
            seen.append(await peer.request())
            await peer.say(answer())

    async with upstream() as up, worker(script) as w:
        url = w.url.replace("//", "//me:a%20b@")
        await ask(up, url)
        await ask(up, url, lines=b"Authorization: Bearer x\r\n")
    assert [s.lower().count(b"authorization:") for s in seen] == [1, 1]
    assert b"authorization: Basic bWU6YSBi\r\n" in seen[0]
    assert b"Authorization: Bearer x\r\n" in seen[1]


@pytest.mark.parametrize(
    ("said", "body"),
    [
        ((answer(b"hello"),), b"hello"),
        ((answer(b""),), b""),
        ((STREAM, chunked(b"one"), chunked(b"two"), b"0\r\n\r\n"), b"onetwo"),
        ((STREAM + chunked(b"one") + b"0\r\nx-trailer: 1\r\n\r\n",), b"one"),
        ((b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", answer(b"x")), b"x"),
        ((b"HTTP/1.1 204 No Content\r\n\r\n",), b""),
        ((b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n",), b""),
        (tuple(bytes([b]) for b in STREAM + chunked(b"one") + b"0\r\n\r\n"), b"one"),
    ],
)
async def test_bodies_of_every_form_are_whole_and_the_connection_is_kept(said, body):
    async with upstream() as up, worker(says(*said)) as w:
        for _ in range(3):
            got, pieces = await ask(up, w.url)
            assert (b"".join(pieces), got.headers.count((b"link", b"x"))) == (body, 0)
        assert (w.connections, up.idle, up.open) == (1, 1, 1)


async def test_an_answer_to_head_has_no_body_whatever_length_it_tells():
    async with upstream() as up, worker(says(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n")) as w:
        for _ in range(2):
            got, pieces = await ask(up, w.url, method=b"HEAD")
            assert (got.status, pieces) == (200, [])
        assert w.connections == 1


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\n\r\nuntil the end",
        b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 13\r\n\r\nuntil the end",
    ],
)
async def test_what_ends_with_its_connection_is_whole_and_the_connection_is_not_kept(said):
    async with upstream() as up, worker(says(said, close=True)) as w:
        for _ in range(2):
            assert (await ask(up, w.url))[1] == [b"until the end"]
        assert (w.connections, up.idle) == (2, 0)
        await until(lambda: up.open == 0)


async def test_pieces_come_as_the_worker_sends_them():
    gates = [asyncio.Event() for _ in range(3)]

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(STREAM)
        for i, gate in enumerate(gates):
            await gate.wait()
            await peer.say(chunked(b"%d" % i))
        await peer.say(b"0\r\n\r\n")
        await peer.closed()

    async with upstream() as up, worker(script) as w:
        got = await up.request(w.url, b"POST", b"/", b"", b"")
        pieces: list[bytes] = []
        relaying = asyncio.create_task(got.relay(pieces.append))
        for i, gate in enumerate(gates):
            gate.set()
            await until(lambda i=i: len(pieces) == i + 1)
        await relaying
        assert pieces == [b"0", b"1", b"2"]


GARBAGE = [
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"HTTP/1.1 abc OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 40,
    b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 300 + b"\r\n",
    b"HTTP/1.1 200 OK\r\nx: " + b"y" * (HEAD_BYTES + 1000),
    b"HTTP/1.1 200 " + b"y" * (HEAD_BYTES + 1000),
]


@pytest.mark.parametrize("said", GARBAGE, ids=range(len(GARBAGE)))
async def test_garbage_is_a_bad_answer_and_ends_the_connection(said):
    async with upstream() as up, worker(says(said)) as w:
        with pytest.raises(BadAnswer):
            await ask(up, w.url)
        assert (up.open, up.idle) == (0, 0)


async def test_a_bad_chunk_is_a_bad_answer_within_the_body():
    async with upstream() as up, worker(says(STREAM + chunked(b"one"), b"zz\r\n")) as w:
        with pytest.raises(BadAnswer):
            await ask(up, w.url)
        assert up.open == 0


@pytest.mark.parametrize(
    ("said", "pieces"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-le", None),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello", [b"hello"]),
        (STREAM + chunked(b"one"), [b"one"]),
        (STREAM + chunked(b"one") + b"5\r\nha", [b"oneha"]),
    ],
)
async def test_an_answer_that_ends_too_soon_broke_off(said, pieces):
    async with upstream() as up, worker(says(said, close=True)) as w:
        got: list[bytes] = []
        with pytest.raises(BrokeOff):
            await (await up.request(w.url, b"POST", b"/", b"", b"")).relay(got.append)
        assert (b"".join(got), up.open) == (b"".join(pieces or []), 0)


async def test_what_follows_an_answer_does_not_reach_the_next_request():
    async with upstream() as up, worker(says(answer(b"one") + answer(b"stray"))) as w:
        for _ in range(3):
            assert (await ask(up, w.url))[1] == [b"one"]
        assert w.connections == 3


async def test_what_an_idle_connection_says_closes_it():
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(answer(b"one"))
        await peer.say(answer(b"nobody asked"))
        await peer.closed()

    async with upstream() as up, worker(script) as w:
        assert (await ask(up, w.url))[1] == [b"one"]
        await until(lambda: up.idle == 0)
        assert (await ask(up, w.url))[1] == [b"one"]


async def test_an_idle_connection_that_the_worker_has_closed_costs_nothing():
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(answer())
        if w.connections == 1:  # takes the next request and closes, as a server does whose keep-alive ended in that moment
            await peer.request()
            peer.abort()
            return
        await peer.request()
        await peer.say(answer())

    async with upstream() as up, worker(script) as w:
        assert [(await ask(up, w.url))[0].status for _ in range(3)] == [200] * 3
        assert (w.connections, up.stale) == (2, 1)


async def test_a_new_connection_that_is_closed_without_an_answer_broke_off():
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.abort()

    async with upstream() as up, worker(script) as w:
        with pytest.raises(BrokeOff):
            await ask(up, w.url)
        assert (w.connections, up.stale) == (1, 0)


async def test_refused_unknown_and_wrong_addresses_are_failed_connections():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with upstream(SOON) as up:
        for url in (f"http://127.0.0.1:{port}", "http://no.such.host.invalid:1", "gopher://x", "http://[::1"):
            with pytest.raises(ConnectFailed):
                await ask(up, url)


async def test_a_listener_that_accepts_nobody_is_a_failed_connection_in_time():
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        held = [socket.socket() for _ in range(8)]  # fill its backlog
        for s in held:
            s.setblocking(False)
            s.connect_ex(full.getsockname())
        async with upstream(Timeouts(connect_s=0.1)) as up:
            with pytest.raises(ConnectFailed, match=r"within 0\.1 s"):
                await ask(up, f"http://127.0.0.1:{full.getsockname()[1]}")
        for s in held:
            s.close()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nx:", STREAM, b"HTTP/1.1 102 Processing\r\n\r\n"])
async def test_silence_before_the_first_byte_of_a_body_is_told_in_time(said):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(said)
        await peer.closed()

    async with upstream(SOON) as up, worker(script) as w:
        with pytest.raises(FirstByteTimeout):
            await ask(up, w.url)
        assert up.open == 0
        await until(lambda: w.ended)


async def test_silence_within_a_body_is_told_in_time_and_each_piece_starts_it_anew():
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(STREAM)
        for _ in range(5):
            await peer.say(chunked(b"x"))
            await asyncio.sleep(0.06)
        await peer.closed()

    async with upstream(SOON) as up, worker(script) as w:
        got: list[bytes] = []
        with pytest.raises(IdleTimeout):
            await (await up.request(w.url, b"POST", b"/", b"", b"")).relay(got.append)
        assert b"".join(got) == b"xxxxx"
        await until(lambda: w.ended)


@pytest.mark.parametrize("after", [b"", STREAM, STREAM + chunked(b"x")])
async def test_a_cancelled_request_ends_its_connection(after):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(after)
        arrived.set()
        await peer.closed()

    arrived = asyncio.Event()
    async with upstream() as up, worker(script) as w:
        task = asyncio.create_task(ask(up, w.url))
        await arrived.wait()
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert up.open == 0
        await until(lambda: w.ended)


async def test_a_request_cancelled_while_it_connects_leaves_nothing():
    async with upstream() as up, worker(says(answer())) as w:
        for _ in range(20):
            task = asyncio.create_task(ask(up, w.url))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: up.open == 0)


async def test_closing_an_answer_after_its_end_does_not_touch_the_next_request():
    async with upstream() as up, worker(says(answer())) as w:
        first, _ = await ask(up, w.url)
        second = await up.request(w.url, b"POST", b"/", b"", b"")
        first.close()
        first.pause()
        pieces: list[bytes] = []
        await second.relay(pieces.append)
        assert (pieces, w.connections) == ([b"hello"], 1)


async def test_an_answer_that_came_before_it_was_read_is_not_lost_when_the_connection_carries_another():
    async with upstream() as up, worker(says(answer(b"mine"))) as w:
        first = await up.request(w.url, b"POST", b"/", b"", b"")
        await until(lambda: up.idle == 1)
        assert (await ask(up, w.url))[1] == [b"mine"]
        pieces: list[bytes] = []
        await first.relay(pieces.append)
        assert pieces == [b"mine"]


class LongAnswer:
    """A worker's script: an answer of `size` bytes as fast as it is taken."""

    size = 32 << 20

    def __init__(self) -> None:
        self.sent = 0

    async def __call__(self, peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % self.size)
        while self.sent < self.size:
            await peer.say(b"x" * (1 << 16))
            self.sent += 1 << 16

    async def stands(self, look_s: float) -> None:
        """Returns when the sockets' buffers are full."""
        stood = -1
        while stood != self.sent:
            stood = self.sent
            await asyncio.sleep(look_s)


async def test_a_paused_answer_is_not_read_and_does_not_time_out():
    long = LongAnswer()
    async with upstream(SOON) as up, worker(long) as w:
        got = await up.request(w.url, b"GET", b"/", b"", b"")
        received = 0

        def take(piece: bytes) -> None:
            nonlocal received
            if not received:
                got.pause()
            received += len(piece)

        relaying = asyncio.create_task(got.relay(take))
        await until(lambda: received)
        await long.stands(0.25)
        assert (long.sent < long.size, received < 1 << 20, relaying.done()) == (True, True, False)
        got.resume()
        await relaying
        assert received == long.size


async def test_a_body_nobody_reads_yet_waits_within_a_bound():
    long = LongAnswer()
    async with upstream() as up, worker(long) as w:
        got = await up.request(w.url, b"GET", b"/", b"", b"")
        await long.stands(0.1)
        assert long.sent < long.size
        received = 0

        def take(piece: bytes) -> None:
            nonlocal received
            received += len(piece)

        await got.relay(take)
        assert received == long.size


async def test_an_answer_before_the_request_is_sent_is_an_answer_and_the_connection_is_not_kept():
    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.say(answer(b"too large", "413 Content Too Large"))
        await peer.closed()

    async with upstream() as up, worker(script) as w:
        got, pieces = await ask(up, w.url, b"x" * (64 << 20))
        assert (got.status, pieces, up.idle) == (413, [b"too large"], 0)


async def test_a_sink_that_fails_ends_the_connection_and_is_told():
    async with upstream() as up, worker(says(answer())) as w:

        def broken(_: bytes) -> None:
            raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            await (await up.request(w.url, b"POST", b"/", b"", b"")).relay(broken)
        with pytest.raises(RuntimeError, match="mine"):

            async def slowly(peer: Peer) -> None:
                await peer.request()
                await peer.say(STREAM)
                await asyncio.sleep(0.02)
                await peer.say(chunked(b"x"))
                await peer.closed()

            async with worker(slowly) as w2:
                await (await up.request(w2.url, b"POST", b"/", b"", b"")).relay(broken)


async def test_idle_connections_are_bounded_expire_and_go_with_their_worker():
    gate = asyncio.Event()

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await gate.wait()
            await peer.say(answer())

    async with upstream(most_idle=2) as up, worker(script) as w:
        tasks = [asyncio.create_task(ask(up, w.url)) for _ in range(5)]
        await until(lambda: up.open == 5)
        gate.set()
        await asyncio.gather(*tasks)
        assert up.idle == 2
        await until(lambda: up.open == 2)
        up.forget_others([w.url])
        assert (up.idle, up.open) == (2, 2)
        up.forget_others([])
        assert (up.idle, up.open) == (0, 0)
    async with upstream(Timeouts(keep_s=0.1)) as up, worker(script) as w:
        await ask(up, w.url)
        assert up.idle == 1
        await until(lambda: up.idle == 0 and up.open == 0)


async def test_a_worker_that_dies_takes_its_idle_connections_along():
    async with upstream() as up:
        async with worker(says(answer())) as w:
            await ask(up, w.url)
            assert up.idle == 1
        await until(lambda: up.idle == 0 and up.open == 0)


async def test_requests_in_flight_when_it_closes_are_told():
    async def script(peer: Peer) -> None:
        await peer.closed()

    async with worker(script) as w:
        async with upstream() as up:
            task = asyncio.create_task(ask(up, w.url))
            await until(lambda: up.open == 1)
            await asyncio.sleep(0.02)
        with pytest.raises(UpstreamError):
            await task


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


async def test_https_workers_are_checked_against_the_given_authorities(certificate):
    cert, key = certificate
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(cert, key)
    async with worker(says(answer()), serving, "localhost") as w:
        async with upstream(tls=client_tls(cert, verify=True)) as up:
            assert (await ask(up, w.url, b"x" * 300_000))[1] == [b"hello"]
            assert (await ask(up, w.url))[1] == [b"hello"]
        for given in (None, client_tls(None, verify=True)):
            async with upstream(tls=given) as up:
                with pytest.raises(ConnectFailed, match="certificate"):
                    await ask(up, w.url)
        async with upstream(tls=client_tls(None, verify=False)) as up:
            assert (await ask(up, w.url))[1] == [b"hello"]
            with pytest.raises(ConnectFailed):
                await ask(up, w.url.replace("https://localhost", "http://nobody.invalid"))


async def test_plain_http_where_tls_is_wanted_is_a_failed_connection():
    async with upstream(SOON) as up, worker(lambda peer: peer.say(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as w:
        with pytest.raises(ConnectFailed):
            await ask(up, w.url.replace("http:", "https:"))


def test_a_file_without_certificates_is_named(tmp_path):
    file = tmp_path / "ca.pem"
    file.write_text("nothing")
    for path in (file, tmp_path / "none.pem"):
        with pytest.raises(SettingsError, match="upstream_ca_file"):
            client_tls(path, verify=True)


def test_its_repr_tells_no_address():
    assert repr(Upstream(Timeouts())) == "Upstream(0 connections, 0 idle)"
