"""HTTP/1.1 to the clients: an asyncio protocol that runs one ASGI application.

    bytes --> httptools --> Call (one a request) --> a task of application(scope, call.receive, call.send)
                              ^ the relay writes to it directly: start(), write(), end(), with no await a piece

Why not uvicorn, which this replaces: measured beside it with an application that does nothing but answer 17 chunks, 42 us of CPU a request
instead of 91 at 1 KB; and with httptools uvicorn has no bound on a request's headers nor on the time that a client takes to send them. What
it does that we need is little.

Invariants. Requests of one connection are answered in order, one at a time; while one is answered the next ones wait, unread beyond a
bound. A client that leaves cancels its request's task at once (`Call.left` says so); a half-closed connection counts as left. Every
request has ended, one way or another, when its task has. An answer that cannot be finished as its head promised ends the connection, so
that the client sees it cut. No exception's text goes to a client.

    head over max_head_bytes or max_headers           431      } these end the connection, once the
    not HTTP/1.x, both lengths, a bad chunk            400      } answers before them are sent
    not whole after request_s                          408      }
    nothing taken of an answer for stall_s             cut
    idle for keep_alive_s                              closed
    body not read when the answer ends                 discarded for a moment, then closed

Not here: HTTP/2, WebSockets (an Upgrade is ignored, as a server may), trailers, compression, access logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import unquote

import httptools
import orjson

from router.http.asgi import CLIENT, Message, RawHeaders, Receive, Scope, Send, error_object, header_bytes

log = logging.getLogger(__name__)

Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_UNREAD_BYTES = 256 << 10
"""Of a request's body that nobody has asked for yet: then reading pauses."""
_PIPELINED = 32
"""Requests that may wait on a connection before reading pauses."""
_LINGER_S = 2.0
"""A body that nobody wants is read for so long after the answer, for a client that still writes does not see an answer before a reset."""
_BODILESS = (204, 304)


def _status_line(status: int) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


_STATUS_LINES = {status: _status_line(status) for status in range(200, 1000)}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may do."""

    max_head_bytes: int = 64 << 10
    max_headers: int = 128
    request_s: float = 60.0
    keep_alive_s: float = 75.0
    stall_s: float = 60.0


class Source(Protocol):
    """Where the body of an answer comes from: told to wait while the client is slow."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Server:
    """Listens until drain(). The loop's own thread only."""

    def __init__(
        self,
        application: Application,
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
        on_refusal: Callable[[int], None] = lambda status: None,
    ) -> None:
        """on_refusal: told the status of each answer that the application knows nothing of."""
        self.application, self.limits, self._tls, self.on_refusal = application, limits or Limits(), tls, on_refusal
        self.connections: set[_Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.draining = False
        self._listening: list[asyncio.AbstractServer] = []
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()

    async def start(self, *listeners: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for listener in listeners:
            self._listening.append(await loop.create_server(lambda: _Connection(self), sock=listener, ssl=self._tls, backlog=2048))
        self._look_s = min(1.0, max(0.01, min(self.limits.request_s, self.limits.keep_alive_s, self.limits.stall_s) / 8))
        self._timer = loop.call_later(self._look_s, self._look, loop)

    async def drain(self, timeout_s: float) -> int:
        """Takes no new connections and no new requests, lets those on their way end, and cancels what is left after timeout_s.

        Returns how many were cancelled."""
        self.draining = True
        for listening in self._listening:
            listening.close()
        for connection in list(self.connections):
            connection.close_when_idle()
        if self.tasks:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)
        left = [t for t in self.tasks if not t.done()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        for connection in list(self.connections):
            connection.close()
        return len(left)

    def cut_off(self) -> None:
        """Cancels what is on its way; drain() ends then."""
        for task in list(self.tasks):
            task.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = loop.time()
        for connection in list(self.connections):
            connection.look(now_s, self.limits)
        self._timer = loop.call_later(self._look_s, self._look, loop)

    def run(self, call: Call) -> None:
        task = call.task = asyncio.get_running_loop().create_task(self._run(call))
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not self.tasks and self.draining:
            self._idle.set()

    async def _run(self, call: Call) -> None:
        """The top of a request."""
        try:
            await self.application(call.scope, call.receive, call.send)
            if not call.ended and not call.left:
                log.error("%s %r was not answered to its end", call.scope["method"], call.scope["path"])
        except asyncio.CancelledError:
            pass  # the client left, or the server stops
        except Exception:
            log.exception("%s %r met an error of the router's own", call.scope["method"], call.scope["path"])
        call.ensure_end()


class Call:
    """One request and its answer: ASGI's receive and send, and the direct way of the relay.

    left: the client is gone. source: set it while an answer is relayed, so that it waits for a slow client.
    """

    __slots__ = (
        "_begun", "_body_left", "_chunked", "_connection", "_head", "_parts", "_sized", "_told", "_waiter", "body_bytes", "ended",
        "expects_continue", "keeps_alive", "left", "scope", "source", "started", "task", "whole",
    )  # fmt: skip

    def __init__(self, connection: _Connection, scope: Scope, keeps_alive: bool, expects_continue: bool) -> None:
        self._connection, self.scope = connection, scope
        self.keeps_alive, self.expects_continue = keeps_alive, expects_continue
        self.task: asyncio.Task[None] | None = None
        self.source: Source | None = None
        self.left = self.started = self.ended = False
        self.whole = False  # the request's body is
        self.body_bytes = 0
        self._parts: list[bytes] = []
        self._told = self._begun = False  # the application has the whole body, or some of it
        self._waiter: asyncio.Future[None] | None = None
        self._chunked = self._sized = False
        self._head = b""
        self._body_left = 0

    # the answer

    def start(self, status: int, headers: RawHeaders) -> None:
        """Makes the head, which goes out with the first piece of the body. Header names in lower case. Raises ValueError for headers that
        would break the answer's form."""
        self._chunked = self._sized = False
        scope = self.scope
        lines = [_STATUS_LINES[status]]
        for name, value in headers:
            if name == b"content-length":
                self._sized, self._body_left = True, int(value)
            elif name == b"connection" or name == b"transfer-encoding":
                raise ValueError(f"{name!r} is the server's own header")
            lines += (name, b": ", value, b"\r\n")
        if scope["method"] == "HEAD" or status in _BODILESS:
            self._sized, self._body_left = True, 0
        elif not self._sized:
            if scope["http_version"] == "1.1":
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keeps_alive = False
        if self._connection.closes_after(self):
            self.keeps_alive = False
        if not self.keeps_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        head = b"".join(lines)
        if not head.count(b"\n") == head.count(b"\r") == len(headers) + 2 + self._chunked + (not self.keeps_alive):
            raise ValueError("a response header has a line break in it")
        self.started, self._head = True, head

    def write(self, data: bytes) -> None:
        """A piece of the body; with the first one goes the head."""
        if self._chunked:
            if data:
                head, self._head = self._head, b""
                self._connection.write(b"%b%x\r\n%b\r\n" % (head, len(data), data))
            return
        if self._sized:
            if self.scope["method"] == "HEAD":
                return
            self._body_left -= len(data)
            if self._body_left < 0:
                self.abort()
                raise ValueError("the body is longer than its content-length")
        if self._head:
            data, self._head = self._head + data, b""
        self._connection.write(data)

    def end(self) -> None:
        """The answer is whole; when it is shorter than its content-length the client sees it cut."""
        if self.ended:
            return
        if self._sized and self._body_left > 0 and not self.left:
            self.abort()
            return
        if self._chunked or self._head:
            self._connection.write(self._head + b"0\r\n\r\n" if self._chunked else self._head)
        self.ended = True
        self.wake()
        self._connection.answered(self)

    def abort(self) -> None:
        """Ends the connection: the client sees its answer cut."""
        self.ended = True
        self._connection.abort()

    async def drained(self) -> None:
        """Until the client takes more."""
        await self._connection.drained()

    # ASGI

    async def receive(self) -> Message:
        while not self._parts and not (self.whole and not self._told) and not self.left and not self.ended:
            self._connection.wants_body(self)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.left or self.ended:
            return {"type": "http.disconnect"}
        parts, self._parts = self._parts, []
        self.body_bytes = 0
        self._told, self._begun = self.whole, True
        return {"type": "http.request", "body": parts[0] if len(parts) == 1 else b"".join(parts), "more_body": not self.whole}

    async def send(self, message: Message) -> None:
        if self.left:
            return
        if message["type"] == "http.response.start":
            self.start(message["status"], list(message.get("headers", ())))
            return
        data = message.get("body", b"")
        if data:
            self.write(data)
        if not message.get("more_body", False):
            self.end()
        elif self._connection.write_paused_s is not None:
            await self.drained()

    def whole_body(self) -> bytes | None:
        """The request's body, where all of it is here and `receive` has given nothing of it; then receive() has no more."""
        if not self.whole or self._begun or self.left or self.ended:
            return None
        parts, self._parts = self._parts, []
        self.body_bytes = 0
        self._begun = self._told = True
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # for the connection

    def feed(self, data: bytes) -> None:
        self._parts.append(data)
        self.body_bytes += len(data)
        self.wake()

    def body_ended(self) -> None:
        self.whole = True
        self.wake()

    def leave(self) -> None:
        """The client is gone."""
        self.left = True
        self.wake()
        if self.task is not None and not self.ended:
            self.task.cancel()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def ensure_end(self) -> None:
        """The application is through."""
        if self.ended or self.left:
            return
        if self.started:
            self.abort()
            return
        stopping = self._connection.server.draining
        status, text = (503, "the router is stopping") if stopping else (500, "the router met an error of its own")
        self.keeps_alive = False
        self.start(status, _headers_of_error(body := _error_body(status, text)))
        self.write(body)
        self.end()


class _Connection(asyncio.Protocol):
    """One client's connection."""

    __slots__ = (
        "_body_of", "_closing", "_drain_waiters", "_expects", "_head_bytes", "_headers", "_in_head", "_linger_until_s", "_loop", "_parser",
        "_peer", "_queue", "_reading", "_refusal", "_scheme", "_serving", "_since_s", "_transport", "_unparsed_bytes",
        "_url", "server", "write_paused_s",
    )  # fmt: skip

    def __init__(self, server: Server) -> None:
        self.server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpRequestParser | None = None
        self._queue: deque[Call] = deque()
        self._serving: Call | None = None
        self._body_of: Call | None = None  # whose body comes now
        self._refusal: tuple[int, str] | None = None
        self._linger_until_s: float | None = None
        self._drain_waiters: list[asyncio.Future[None]] = []
        self.write_paused_s: float | None = None
        self._since_s = self._loop.time()  # of the request that comes now, or idle
        self._in_head = self._closing = False
        self._headers: RawHeaders = []  # of the request that comes now, as far as they have come
        self._reading = True
        self._head_bytes = self._unparsed_bytes = 0

    # what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass; both set TCP_NODELAY
        self._parser = httptools.HttpRequestParser(self)
        self._scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        peer = transport.get_extra_info("peername")
        self._peer = (peer[0], peer[1]) if isinstance(peer, tuple) else None
        self.server.connections.add(self)
        if self.server.draining:
            self.close()

    def data_received(self, data: bytes) -> None:
        if self._linger_until_s is not None or self._refusal is not None or self._parser is None:
            return  # nobody wants it
        if self._body_of is None:
            self._in_head = True
            self._unparsed_bytes += len(data)
        self._feed(self._parser, data)
        if self._in_head and self._unparsed_bytes > self.server.limits.max_head_bytes:  # one header alone, not at its end yet
            self._refuse(*self._too_large())
        self._mind_reading()

    def _count(self, head_bytes: int) -> None:
        self._head_bytes += head_bytes
        if self._head_bytes > self.server.limits.max_head_bytes:
            raise _Refused(*self._too_large())

    def _too_large(self) -> tuple[int, str]:
        return 431, f"the request's head is over {self.server.limits.max_head_bytes} bytes (setting max_head_bytes)"

    def _feed(self, parser: httptools.HttpRequestParser, data: bytes) -> None:
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as e:
            self._go_on_without_upgrade(data[e.args[0] :])
        except httptools.HttpParserError as e:
            cause = e.__context__
            if isinstance(cause, _Refused):
                self._refuse(*cause.args)
            elif isinstance(e, httptools.HttpParserCallbackError):
                log.error("an HTTP request met an error of the router's own", exc_info=cause)
                self._refuse(500, "the router met an error of its own")
            else:
                self._refuse(400, f"this is no HTTP/1.1 request: {e}")

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """The parser stops at a head that asks to upgrade and forgets its body. The request is served as it is, and is the last here:
        its body is read by a parser of its own, to which a head of the same length is shown first."""
        call = self._body_of
        if call is None:
            return
        call.keeps_alive = False
        lengths = [b"%b: %b\r\n" % pair for pair in self._headers if pair[0] in (b"content-length", b"transfer-encoding")]
        self._parser = body = httptools.HttpRequestParser(_BodyOnly(self))
        self._feed(body, b"POST / HTTP/1.1\r\n" + b"".join(lengths) + b"\r\n")
        if rest:
            self._feed(body, rest)

    def eof_received(self) -> None:
        """The transport closes itself."""

    def connection_lost(self, error: Exception | None) -> None:
        self.server.connections.discard(self)
        self._parser = None
        self._closing = True
        for call in (self._serving, *self._queue):
            if call is not None:
                call.leave()
        self._queue.clear()
        self.resume_writing()

    def pause_writing(self) -> None:
        self.write_paused_s = self._loop.time()
        if self._serving is not None and self._serving.source is not None:
            self._serving.source.pause()

    def resume_writing(self) -> None:
        self.write_paused_s = None
        if self._serving is not None and self._serving.source is not None:
            self._serving.source.resume()
        waiters, self._drain_waiters = self._drain_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # what the parser calls

    def on_message_begin(self) -> None:
        if self._closing:
            raise _Refused(400, "a request after the last one")
        self._url = b""
        self._headers = []
        self._expects = False
        self._head_bytes = 0
        self._since_s = self._loop.time()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._body_of is not None:
            return  # a trailer
        name = name.lower()
        if value.endswith((b" ", b"\t")):  # the parser leaves it
            value = value.rstrip(b" \t")
        self._headers.append((name, value))
        self._count(len(name) + len(value) + 4)
        if len(self._headers) > self.server.limits.max_headers:
            raise _Refused(431, f"the request has over {self.server.limits.max_headers} headers (setting max_headers)")
        if name == b"expect":
            if value.lower() != b"100-continue":
                raise _Refused(417, "only 100-continue can be expected")
            self._expects = True

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        method, version = parser.get_method().decode(), parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise _Refused(505, "HTTP/1.1 is spoken here")
        path, _, query = self._url.partition(b"?")
        if not path.startswith(b"/"):
            path, query = _absolute(self._url, method)
        text = path.decode("latin-1")
        call = Call(
            self,
            {
                "type": "http",
                "asgi": {"version": "3.0", "spec_version": "2.3"},
                "http_version": version,
                "method": method,
                "scheme": self._scheme,
                "path": unquote(text) if "%" in text else text,
                "raw_path": path,
                "query_string": query,
                "root_path": "",
                "headers": self._headers,
                "client": self._peer,
            },
            version == "1.1" and parser.should_keep_alive(),
            self._expects,
        )
        call.scope[CLIENT] = call
        self._in_head, self._body_of = False, call
        if self._serving is None:
            self._serving = call
            self.server.run(call)
        else:
            self._queue.append(call)

    def on_body(self, data: bytes) -> None:
        if self._body_of is not None:
            self._body_of.feed(data)

    def on_message_complete(self) -> None:
        if self._parser is not None and self._parser.should_upgrade():
            return  # see _go_on_without_upgrade
        call, self._body_of = self._body_of, None
        self._unparsed_bytes = 0
        self._in_head = False
        self._headers = []
        if call is not None:
            call.body_ended()
            if not call.keeps_alive:
                self._closing = True

    # what a Call asks

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    async def drained(self) -> None:
        if self.write_paused_s is not None:
            waiter = self._loop.create_future()
            self._drain_waiters.append(waiter)
            await waiter

    def wants_body(self, call: Call) -> None:
        if call.expects_continue and not call.started and call is self._serving:
            call.expects_continue = False
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._mind_reading(wanted=True)

    def closes_after(self, call: Call) -> bool:
        return self.server.draining or not call.whole

    def answered(self, call: Call) -> None:
        """The next one, if there is one."""
        transport = self._transport
        assert transport is not None
        call.source = None
        self._serving = None
        self._since_s = self._loop.time()
        if transport.is_closing():
            return
        if not call.keeps_alive:
            self._close_after_answer(call.whole)
        elif self._queue:
            self._serving = self._queue.popleft()
            self.server.run(self._serving)
            self._mind_reading()
        elif self._refusal is not None:
            self._tell_refusal()
        elif self.server.draining:
            transport.close()
        else:
            self._mind_reading()

    def _close_after_answer(self, whole: bool) -> None:
        assert self._transport is not None
        if whole or self._linger_until_s is not None:
            self._transport.close()
            return
        self._linger_until_s = self._loop.time() + _LINGER_S
        self._mind_reading(wanted=True)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # for the server

    def close_when_idle(self) -> None:
        if self._serving is None:
            self.close()

    def look(self, now_s: float, limits: Limits) -> None:
        """Whether the client takes too long."""
        if self._linger_until_s is not None:
            if now_s > self._linger_until_s:
                self.close()
        elif self.write_paused_s is not None:
            if now_s - self.write_paused_s > limits.stall_s:
                log.warning("a client took nothing of its answer for %g s and was cut off", limits.stall_s)
                self.abort()
        elif self._body_of is not None or self._in_head:
            if now_s - self._since_s > limits.request_s and (self._serving is None or self._serving is self._body_of):
                self._too_slow(limits)
        elif self._serving is None and now_s - self._since_s > limits.keep_alive_s:
            self.close()

    def _too_slow(self, limits: Limits) -> None:
        call, self._body_of, self._in_head = self._body_of, None, False
        if call is not None and call.started:
            self.abort()
            return
        if call is not None:
            self._serving = None
            call.leave()
        self._refuse(408, f"the request was not whole within {limits.request_s:g} s (setting client_timeout_s)")

    def _refuse(self, status: int, text: str) -> None:
        """No more is read; the client is told when the answers before this one are out."""
        if self._refusal is not None:
            return
        self._refusal = (status, text)
        self._in_head = False
        call, self._body_of = self._body_of, None
        if call is not None and not call.whole:  # its own body is wrong
            if call is self._serving:
                if call.started:
                    self.abort()
                    return
                self._serving = None
            elif call in self._queue:
                self._queue.remove(call)
            call.leave()
        if self._serving is None:
            self._tell_refusal()

    def _tell_refusal(self) -> None:
        assert self._refusal is not None
        status, text = self._refusal
        self.server.on_refusal(status)
        body, given = _error_body(status, text), header_bytes(self._headers, b"x-request-id")
        told = _headers_of_error(body) + ([] if given is None else [(b"x-request-id", given)])
        headers = b"".join(b"%b: %b\r\n" % pair for pair in told)
        self.write(_STATUS_LINES[status] + headers + b"connection: close\r\n\r\n" + body)
        self._close_after_answer(whole=False)

    def _mind_reading(self, wanted: bool = False) -> None:
        """Reads on, or not, by how much waits."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        body_of = self._body_of
        much = len(self._queue) >= _PIPELINED or (body_of is not None and body_of.body_bytes > _UNREAD_BYTES)
        reading = self._linger_until_s is not None or wanted or not much
        if reading and not self._reading:
            transport.resume_reading()
        elif not reading and self._reading:
            transport.pause_reading()
        self._reading = reading


class _Refused(Exception):  # noqa: N818 - a value, named for what it is
    """(status, text) for the client."""


class _BodyOnly:
    """A parser's view of a connection that wants no more than a body."""

    def __init__(self, connection: _Connection) -> None:
        self.on_body = connection.on_body
        self._connection = connection

    def on_message_complete(self) -> None:
        self._connection.on_message_complete()


def _absolute(url: bytes, method: str) -> tuple[bytes, bytes]:
    """Path and query of a target that is no path: `http://host/path`, or `*`."""
    if method == "CONNECT":
        raise _Refused(405, "this is no proxy for connections")
    if url == b"*":
        return url, b""
    try:
        parts = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        raise _Refused(400, "the request's target is neither a path nor a URL") from None
    return parts.path or b"/", parts.query or b""


def _error_body(status: int, text: str) -> bytes:
    return orjson.dumps(error_object(status, text))


def _headers_of_error(body: bytes) -> RawHeaders:
    return [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
