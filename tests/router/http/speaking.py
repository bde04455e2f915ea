"""Servers and clients that say the bytes a test tells them to, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

Script = Callable[["Peer"], Awaitable[None]]


class Peer:
    """One connection as the other side sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def request(self) -> bytes:
        """One request with its body, which must tell its length."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
        return head + await self.reader.readexactly(length)

    async def say(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    def abort(self) -> None:
        self.writer.transport.abort()

    async def closed(self) -> bool:
        """Waits until the other side has closed."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(1 << 16):
                pass
        return True


@dataclass
class Worker:
    """Runs a script for each connection. connections: how many there were."""

    url: str = ""
    connections: int = 0
    ended: list[str] = field(default_factory=list)


@contextlib.asynccontextmanager
async def worker(script: Script, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> AsyncIterator[Worker]:
    made = Worker()
    tasks: set[asyncio.Task[None]] = set()
    transports: list[asyncio.WriteTransport] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.connections += 1
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        transports.append(writer.transport)
        try:
            await script(Peer(reader, writer))
            made.ended.append("script")
        except (asyncio.IncompleteReadError, ConnectionError):
            made.ended.append("left")
        except asyncio.CancelledError:  # below; asyncio's server minds a task that ends so
            made.ended.append("stopped")
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, host, 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    made.url = f"http{'s' if tls else ''}://{host}:{port}"
    try:
        yield made
    finally:
        await asyncio.sleep(0.01)  # asyncio's server loses a connection that it accepts while it closes
        server.close()
        for _ in range(5):  # what was just accepted starts, what was closed ends
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for transport in transports:
                transport.abort()
            await asyncio.sleep(0.001)


def answer(body: bytes = b"hello", status: str = "200 OK", *headers: str) -> bytes:
    lines = "".join(f"{h}\r\n" for h in headers)
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{lines}\r\n".encode() + body


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces)


@contextlib.asynccontextmanager
async def client(port: int, receive_buffer: int | None = None) -> AsyncIterator[Peer]:
    sock = socket.socket()
    sock.setblocking(False)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    except BaseException:
        sock.close()
        raise
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 16)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
