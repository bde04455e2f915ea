"""HTTP/1.1 to the workers: requests go out whole, answers come in as they come.

    request() --> Origin (one a worker address) --> idle connection, or a new one --> head of the answer --> Answer
    Answer.relay(sink) : every piece of the body is handed to `sink` in the loop's own callback, with no task or future a piece

Invariants. A connection carries one request at a time. It goes back to its origin only when an answer has ended as its head said, the
request has left our buffer, and the worker lets it be kept; in every other case, a cancelled request among them, it is closed, and that
is how an engine learns to stop. Nothing is decompressed, followed or retried, but for one case: an idle connection that the worker closed
before a byte of an answer says nothing of the worker, so the request goes out once more at once, on a new connection.

Time-outs are looked at by one timer for all connections, so that a chunk costs none. "First byte" means of the body, for engines send the
head of a stream before they compute: until then `first_byte_s` counts from the request, afterwards `idle_s` counts from the last piece.
While the reader has paused the answer neither counts.

    UpstreamError
     +-- ConnectFailed      no connection: refused, unreachable, name unknown, TLS, or not within connect_s
     +-- FirstByteTimeout   the worker was silent from the start
     +-- IdleTimeout        the worker fell silent within its answer
     +-- BrokeOff           the connection ended before the answer did
     +-- BadAnswer          not HTTP/1.x, or over the limits of a head

Rejected: aiohttp's client (with its tracing, its timer a read and its headers as text some 60 us of CPU a request more; it stays for
the control plane); a timer a connection (arming one costs more than the look at it); HTTP/2 (no engine speaks it).
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

import httptools

from schemas.settings import SettingsError

RawHeaders = list[tuple[bytes, bytes]]
Sink = Callable[[bytes], None]

HEAD_BYTES = 64 << 10
"""Of an answer's status line and headers; vLLM's are under 1 KB."""
HEAD_FIELDS = 200
_INTERIM_ANSWERS = 16
_EARLY_BYTES = 256 << 10
"""Of a body that comes before anybody asked for it: then reading pauses."""
_BODILESS = (204, 304)
_LENGTHS = (b"content-length", b"transfer-encoding")
_STALE_S = 1.0
"""A kept connection that ends later than this after it got a request ended because of what the worker did with it."""


class UpstreamError(Exception):
    """Root of all that a worker's connection can do to a request."""


class ConnectFailed(UpstreamError):  # noqa: N818 the tree's root says that they are errors
    """There is no connection to the worker."""


class FirstByteTimeout(UpstreamError):  # noqa: N818 the tree's root says that they are errors
    """Not a byte of a body within first_byte_s."""


class IdleTimeout(UpstreamError):  # noqa: N818 the tree's root says that they are errors
    """Nothing for idle_s within a body."""


class BrokeOff(UpstreamError):  # noqa: N818 the tree's root says that they are errors
    """The connection ended too soon."""


class BadAnswer(UpstreamError):  # noqa: N818 the tree's root says that they are errors
    """What came is no HTTP answer that we accept."""


class _Stale(Exception):  # noqa: N818 - a value, named for what it is
    """An idle connection was closed by the worker before it answered anything."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. keep_s: how long an idle connection is kept; less than servers do (uvicorn, and so vLLM and SGLang: 5 s)."""

    connect_s: float = 2.0
    first_byte_s: float = 600.0
    idle_s: float = 300.0
    keep_s: float = 4.0


class Answer:
    """The head of an answer, and the way to its body. Names of headers as the worker wrote them.

    waiting for its head -> relay() -> ended. `_connection` is None from the end on: then the connection may carry another request.
    """

    __slots__ = (
        "_at_end", "_connection", "_early", "_early_bytes", "_error", "_sink", "_waiter", "body_started", "complete", "headers", "method",
        "status",
    )  # fmt: skip

    def __init__(self, method: bytes, connection: _Connection) -> None:
        self.method = method
        self.status = 0
        self.headers: RawHeaders = []
        self.complete = self.body_started = False
        self._connection: _Connection | None = connection
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._error: Exception | None = None
        self._sink: Sink | None = None
        self._at_end: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def relay(self, sink: Sink, at_end: Callable[[], None] | None = None) -> None:
        """Hands over the body piece by piece and returns at its end. Neither sink nor at_end may block; what the sink raises ends the
        connection and is raised here. at_end: called when the body is whole, in the same moment as the sink got its last piece (this
        coroutine goes on a little later). Raises FirstByteTimeout, IdleTimeout, BrokeOff, BadAnswer."""
        early, self._early = self._early, []
        if self._early_bytes > _EARLY_BYTES:
            self.resume()  # first: the sink may pause it again
        if early:
            try:
                sink(early[0] if len(early) == 1 else b"".join(early))
            except Exception:
                self.close()
                raise
        if self.complete:
            if at_end is not None:
                at_end()
            return
        if self._error is not None:
            raise self._error
        self._sink, self._at_end = sink, at_end
        await self._wait()

    def hand_to(self, sink: Sink) -> None:
        """From the next piece on it is another one that takes them."""
        if self._sink is not None:
            self._sink = sink

    def pause(self) -> None:
        """The reader is slow: take no more from the worker."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def close(self) -> None:
        """The rest is not wanted. Harmless after the end."""
        if self._connection is not None:
            self._connection.give_up()

    # for Upstream and _Connection

    async def _wait(self) -> None:
        """Until the head has come, or the end. A request that is cancelled here ends its connection."""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._waiter = None

    async def wait_for_head(self) -> Answer:
        await self._wait()
        return self

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            if self._error is not None:
                waiter.set_exception(self._error)
            else:
                waiter.set_result(None)

    def head_came(self) -> None:
        if self._sink is None:
            self.wake()

    def take(self, piece: bytes) -> None:
        if self._sink is not None:
            self._sink(piece)
            return
        self._early.append(piece)
        self._early_bytes += len(piece)
        if self._early_bytes > _EARLY_BYTES:
            self.pause()

    def ended(self, error: Exception | None) -> None:
        """Nothing more comes. error None: the answer is whole."""
        self._connection = self._sink = None
        self.complete, self._error = error is None, error
        if self._at_end is not None and error is None:
            self._at_end()
        self._at_end = None
        self.wake()


class Upstream:
    """Connections to all workers. start() and close() on the loop."""

    def __init__(self, timeouts: Timeouts, tls: ssl.SSLContext | None = None, most_idle: int = 256) -> None:
        """tls: for https workers. most_idle: connections kept for each worker."""
        self.timeouts, self._tls, self._most_idle = timeouts, tls, most_idle
        self._origins: dict[str, _Origin] = {}
        self._open: set[_Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.connects = 0
        self.stale = 0  # idle connections that were found closed

    def __repr__(self) -> str:
        return f"Upstream({len(self._open)} connections, {self.idle} idle)"

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def idle(self) -> int:
        return sum(len(o.idle) for o in self._origins.values())

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        t = self.timeouts
        self._look_s = min(1.0, max(0.01, min(t.first_byte_s, t.idle_s, t.keep_s) / 8))
        self._timer = self._loop.call_later(self._look_s, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in list(self._open):
            connection.give_up()

    def forget_others(self, urls: Collection[str]) -> None:
        """Workers at other addresses are gone: their idle connections are closed. Requests on their way to them go on."""
        for url in [u for u in self._origins if u not in urls]:
            for connection in list(self._origins.pop(url).idle):
                connection.give_up()

    async def request(
        self, url: str, method: bytes, target: bytes, header_lines: bytes, body: bytes, on_wire: Callable[[], None] | None = None,
        on_connect: Callable[[], None] | None = None,
    ) -> Answer:  # fmt: skip
        """Sends a request and waits for the head of its answer.

        url: the worker's base address; target: path and query as they go out; header_lines: `name: value\\r\\n` each, without host,
        content-length and hop-by-hop headers. on_wire: called when a connection stands and the request is on it (again when an idle
        connection turned out to be closed). on_connect: called before a new connection is waited for. Raises ConnectFailed,
        FirstByteTimeout, BrokeOff, BadAnswer.
        """
        origin = self._origins.get(url)
        if origin is None:
            try:
                origin = self._origins[url] = _Origin(url)
            except ValueError as e:
                raise ConnectFailed(f"the worker's address is none: {e}") from e
        head = origin.head(method, target, header_lines, body)
        if origin.idle:
            connection = origin.idle.pop()
            try:
                return await connection.ask(method, head, body, on_wire).wait_for_head()
            except _Stale:
                self.stale += 1
        if on_connect is not None:
            on_connect()
        connection = await self._connect(origin)
        try:
            return await connection.ask(method, head, body, on_wire).wait_for_head()
        except _Stale as e:
            raise BrokeOff("the worker closed the connection without an answer") from e

    async def _connect(self, origin: _Origin) -> _Connection:
        tls = self._tls if origin.tls else None
        if origin.tls and tls is None:
            tls = self._tls = ssl.create_default_context()
        self.connects += 1
        try:
            async with asyncio.timeout(self.timeouts.connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self, origin), origin.host, origin.port, ssl=tls, server_hostname=origin.host if tls else None
                )
        except TimeoutError as e:
            raise ConnectFailed(f"no connection to {origin} within {self.timeouts.connect_s:g} s") from e
        except OSError as e:  # ssl.SSLError and socket.gaierror are such
            raise ConnectFailed(f"no connection to {origin}: {e.strerror or e}") from e
        return connection

    def _look(self) -> None:
        now_s = self._loop.time()
        for connection in list(self._open):
            connection.look(now_s)
        self._timer = self._loop.call_later(self._look_s, self._look)

    # for _Connection

    def opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection.answer is None and connection in connection.origin.idle:
            connection.origin.idle.remove(connection)

    def keeps(self, connection: _Connection) -> bool:
        """Takes back a connection that is free again; False: there are enough."""
        origin = connection.origin
        if len(origin.idle) >= self._most_idle or self._timer is None or self._origins.get(origin.url) is not origin:
            return False
        origin.idle.append(connection)
        return True


def client_tls(ca_file: Path | None, verify: bool) -> ssl.SSLContext | None:
    """For https workers; None: the system's authorities. Raises SettingsError for a file that is not to be used."""
    if not verify:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    if ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as e:  # ssl.SSLError is one
        raise SettingsError(f"setting `upstream_ca_file`: {ca_file} must be a PEM file of certificates: {e.strerror or e}") from e


class _Origin:
    """One worker's address, and its idle connections, the last used at the right."""

    __slots__ = ("_authorization", "_host_line", "_prefix", "host", "idle", "port", "tls", "url")

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{parts.scheme}://{parts.hostname} is neither http:// nor https:// with a host")
        self.url, self.tls, self.host = url, parts.scheme == "https", parts.hostname
        self.port = parts.port or (443 if self.tls else 80)
        self.idle: deque[_Connection] = deque()
        self._prefix = parts.path.rstrip("/").encode()
        self._host_line = b"host: " + parts.netloc.rpartition("@")[2].encode("idna" if not parts.netloc.isascii() else "ascii") + b"\r\n"
        self._authorization = b""
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._authorization = b"authorization: Basic " + base64.b64encode(pair) + b"\r\n"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def head(self, method: bytes, target: bytes, header_lines: bytes, body: bytes) -> bytes:
        length = b"content-length: %d\r\n\r\n" % len(body) if body or method in (b"POST", b"PUT", b"PATCH") else b"\r\n"
        if self._authorization and b"\r\nauthorization:" not in b"\r\n" + header_lines.lower():
            header_lines += self._authorization
        return b"".join((method, b" ", self._prefix, target, b" HTTP/1.1\r\n", self._host_line, header_lines, length))


class _Connection(asyncio.Protocol):
    """One connection. answer: to the request that it carries; None: it is free."""

    __slots__ = (
        "_asked_s", "_complete", "_head_bytes", "_heard_s", "_interim", "_keep", "_loop", "_parser", "_paused", "_pieces", "_reads_to_end",
        "_transport", "_upstream", "answer", "closed", "origin",
    )  # fmt: skip

    def __init__(self, upstream: Upstream, origin: _Origin) -> None:
        self._upstream, self.origin = upstream, origin
        self._loop = asyncio.get_running_loop()
        self._parser: httptools.HttpResponseParser | None = None
        self._transport: asyncio.Transport | None = None
        self.answer: Answer | None = None
        self._pieces: list[bytes] = []
        self._heard_s = self._asked_s = self._loop.time()
        self._paused = self.closed = False

    def ask(self, method: bytes, head: bytes, body: bytes, on_wire: Callable[[], None] | None) -> Answer:
        transport = self._transport
        if transport is None or self.closed:
            raise _Stale
        answer = self.answer = Answer(method, self)
        self._head_bytes = self._interim = 0
        self._keep = self._reads_to_end = self._complete = False
        self._heard_s = self._asked_s = self._loop.time()
        transport.writelines((head, body) if body else (head,))
        if on_wire is not None:
            on_wire()
        return answer

    def pause(self) -> None:
        if not self._paused and not self.closed and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self.closed and self._transport is not None:
            self._paused = False
            self._heard_s = self._loop.time()
            self._transport.resume_reading()

    # what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass; both set TCP_NODELAY
        self._transport.set_write_buffer_limits(high=0)  # uvloop then writes at once, else at the end of the loop's turn
        self._parser = httptools.HttpResponseParser(self)
        self._upstream.opened(self)

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        if answer is None or self._parser is None:  # nobody asked
            self.give_up()
            return
        self._heard_s = self._loop.time()
        if not answer.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(BadAnswer("the worker switches protocols, which nobody asked for"))
            return
        except httptools.HttpParserError as e:
            if not self._complete:
                cause = e.__context__
                self._fail(cause if isinstance(cause, BadAnswer) else BadAnswer(f"the worker's answer is not HTTP: {e}"))
                return
            self._keep = False  # what follows a whole answer is none of the request's
        if not answer.status:
            if self._head_bytes > HEAD_BYTES:
                self._fail(BadAnswer(f"the head of the worker's answer is over {HEAD_BYTES} bytes"))
            return
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            try:
                answer.take(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            except Exception as e:  # the reader's own: it is told where it waits
                self._fail(e)
                return
        if self._complete:
            self._finish()
        else:
            answer.head_came()

    def eof_received(self) -> None:
        """The transport closes itself; connection_lost says what it means."""

    def connection_lost(self, error: Exception | None) -> None:
        answer = self.answer
        if answer is None or self.closed:
            self._end(None)
        elif self._reads_to_end and error is None:
            self._finish()
        elif not self._head_bytes and self._loop.time() - self._asked_s < _STALE_S:
            self._end(_Stale())
        else:
            missing = "its answer ended" if answer.status else "the head of its answer was whole"
            self._end(BrokeOff(f"the worker's connection ended before {missing}" + (f": {error}" if error else "")))

    # ends

    def look(self, now_s: float) -> None:
        """Whether it has been silent for too long."""
        t = self._upstream.timeouts
        silent_s = now_s - self._heard_s
        if self.answer is None:
            if silent_s > t.keep_s:
                self.give_up()
        elif self._paused:
            pass
        elif not self.answer.body_started:
            if now_s - self._asked_s > t.first_byte_s:
                self._fail(FirstByteTimeout(f"the worker was silent for {t.first_byte_s:g} s"))
        elif silent_s > t.idle_s:
            self._fail(IdleTimeout(f"the worker was silent for {t.idle_s:g} s within its answer"))

    def give_up(self) -> None:
        """Closes at once: what is still in our buffer is not sent."""
        self._fail(BrokeOff("the request was given up"))

    def _fail(self, error: Exception) -> None:
        self._end(error)
        if self._transport is not None:
            self._transport.abort()

    def _finish(self) -> None:
        """The answer is whole."""
        answer, transport = self.answer, self._transport
        assert answer is not None and transport is not None
        if self._keep and not self._reads_to_end and not transport.get_write_buffer_size() and not transport.is_closing():
            self.resume()
            self.answer = None
            if not self._upstream.keeps(self):
                self._end(None)
                transport.close()
            answer.ended(None)
            return
        self.answer = None
        self._end(None)
        transport.close()
        answer.ended(None)

    def _end(self, error: Exception | None) -> None:
        if self.closed:
            return
        self.closed = True
        self._upstream.lost(self)
        answer, self.answer = self.answer, None
        if answer is not None:
            answer.ended(error)
        self._parser = None  # it holds our methods

    # what the parser calls

    def on_message_begin(self) -> None:
        if self._complete:
            raise BadAnswer("two answers to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self.answer is not None
        headers = self.answer.headers
        headers.append((name, value.rstrip(b" \t") if value.endswith((b" ", b"\t")) else value))
        if len(headers) > HEAD_FIELDS:
            raise BadAnswer(f"the head of the worker's answer has over {HEAD_FIELDS} headers")

    def on_headers_complete(self) -> None:
        answer, parser = self.answer, self._parser
        assert answer is not None and parser is not None
        status = parser.get_status_code()
        if status < 200:
            return
        answer.status = status
        self._keep = parser.should_keep_alive()
        if answer.method == b"HEAD":  # whatever length its head tells, there is no body, which the parser cannot know
            self._complete = True
            self._parser = httptools.HttpResponseParser(self)
        elif status not in _BODILESS:
            self._reads_to_end = not any(name.lower() in _LENGTHS for name, _ in answer.headers)

    def on_body(self, data: bytes) -> None:
        if self._complete:  # of an answer to HEAD that has one all the same
            self._keep = False
            return
        assert self.answer is not None
        self.answer.body_started = True
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        answer = self.answer
        assert answer is not None
        if answer.status:
            self._complete = True
            return
        self._interim += 1
        answer.headers.clear()
        if self._interim > _INTERIM_ANSWERS:
            raise BadAnswer(f"over {_INTERIM_ANSWERS} interim answers")
