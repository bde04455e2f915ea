"""A plain reader of KV events for tests: raw frames, with deadlines."""

from __future__ import annotations

import asyncio
from types import TracebackType

import msgspec
import zmq
import zmq.asyncio

Frames = list[bytes]


class KvReader:
    """A SUB socket on live events; `replay` asks a ROUTER."""

    def __init__(self, port: int, replay_port: int) -> None:
        self._port, self._replay_port = port, replay_port

    async def __aenter__(self) -> KvReader:
        self._context = zmq.asyncio.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(b"")
        self._sub.connect(f"tcp://127.0.0.1:{self._port}")
        monitor = self._sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            await asyncio.wait_for(monitor.recv_multipart(), 5)
        finally:
            self._sub.disable_monitor()
            monitor.close(0)
        # The handshake is done, but the subscription travels behind it; the publisher applies it before its next sends.
        await asyncio.sleep(0.1)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._sub.close(0)
        self._context.destroy(linger=0)

    async def frames(self, count: int, timeout_s: float = 10) -> list[Frames]:
        return [await asyncio.wait_for(self._sub.recv_multipart(), timeout_s) for _ in range(count)]

    async def nothing_comes(self, wait_s: float = 0.2) -> bool:
        return await self._sub.poll(int(wait_s * 1000)) == 0

    async def replay(self, start: int, timeout_s: float = 10) -> list[Frames]:
        """All replies up to and including the end marker."""
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.connect(f"tcp://127.0.0.1:{self._replay_port}")
            await dealer.send_multipart([b"", start.to_bytes(8, "big")])
            replies: list[Frames] = []
            while not replies or replies[-1][2] != b"\xff" * 8:
                replies.append(await asyncio.wait_for(dealer.recv_multipart(), timeout_s))
            return replies
        finally:
            dealer.close(0)


def decode(payload: bytes) -> list[object]:
    return msgspec.msgpack.decode(payload)  # type: ignore[no-any-return]
