"""The ZeroMQ side of one rank's KV events, as vLLM 0.32 serves it: PUB for live batches, ROUTER for replay.

Live: three frames, `topic | sequence (8 bytes, big-endian, from 0) | msgpack`. Replay: a request `[empty, start]` is answered with
every buffered batch from `start` on as `[empty, topic, sequence, payload]`, then an end marker (empty topic, eight 0xff bytes, empty
payload). A start older than the buffer begins silently at the oldest kept batch. A request of another frame count gets no answer.

Unlike vLLM 0.32 the ROUTER may queue the whole buffer (as 0.33 does), so replay here is lossless.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from schemas.settings import SettingsError
from simulator.kv_wire import KvEvent, encode_batch

END_SEQUENCE = b"\xff" * 8
HWM = 100_000
MAX_QUEUE_SIZE = 100_000


@dataclass(frozen=True, slots=True)
class KvEndpoints:
    """Where one rank publishes and replays."""

    host: str
    port: int
    replay_port: int

    @property
    def address(self) -> str:
        return f"tcp://{_host_name(self.host)}:{self.port}"

    @property
    def replay_address(self) -> str:
        return f"tcp://{_host_name(self.host)}:{self.replay_port}"


def _host_name(host: str) -> str:
    return "*" if host in ("", "0.0.0.0", "::") else host


class KvPublisher:
    """Sends one rank's batches. Owned by one event loop."""

    def __init__(
        self, context: zmq.Context[Any], endpoints: KvEndpoints, rank: int, topic: str = "kv-events", buffer_steps: int = 10_000
    ) -> None:
        self.endpoints = endpoints
        self.rank = rank
        self.topic = topic.encode()
        self.buffer_steps = buffer_steps
        self.sequence = 0
        self.drop_live = 0  # injected failure: that many batches are not sent, though they can be replayed
        self.lose = 0  # injected failure: that many batches are neither sent nor kept for replay
        self.sent = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(HWM)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._replay = zmq.asyncio.Socket(context, zmq.ROUTER)
        self._replay.setsockopt(zmq.SNDHWM, 2 * (buffer_steps + 1))
        self._replay.setsockopt(zmq.LINGER, 0)
        try:
            self._pub.bind(endpoints.address)
            self._replay.bind(endpoints.replay_address)
        except zmq.ZMQError as e:
            self.close()
            raise SettingsError(
                f"setting `kv_port`/`kv_replay_port`: cannot bind {endpoints.address} and {endpoints.replay_address} ({e}); "
                "name free ports, or 0 to have them found"
            ) from e

    def publish(self, ts: float, events: list[KvEvent]) -> None:
        """One batch; nothing when there are no events."""
        if not events:
            return
        if self.lose > 0:
            self.lose -= 1
            self.sequence += 1
            return
        payload = encode_batch(ts, events, self.rank)
        self._buffer.append((self.sequence, payload))
        frames = (self.topic, self.sequence.to_bytes(8, "big"), payload)
        self.sequence += 1
        if self.drop_live > 0:
            self.drop_live -= 1
            return
        self._pub.send_multipart(frames, zmq.NOBLOCK)  # a PUB never blocks: it drops for subscribers that are full
        self.sent += 1

    def restart(self) -> None:
        """As a new process: the sequence starts at 0 and there is nothing to replay."""
        self.sequence = 0
        self.drop_live = self.lose = 0
        self._buffer.clear()

    def source(self) -> dict[str, Any]:
        """This rank's entry in `GET /kv_event_sources`."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoints.address,
            "replay_endpoint": self.endpoints.replay_address,
            "buffer_steps": self.buffer_steps,
            "hwm": HWM,
            "max_queue_size": MAX_QUEUE_SIZE,
            "topic": self.topic.decode(),
        }

    async def serve_replay(self) -> None:
        """Answers replay requests until cancelled."""
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            client, _empty, start = frames
            first = int.from_bytes(start, "big")
            for sequence, payload in [kept for kept in self._buffer if kept[0] >= first]:
                await self._replay.send_multipart((client, b"", self.topic, sequence.to_bytes(8, "big"), payload))
            await self._replay.send_multipart((client, b"", b"", END_SEQUENCE, b""))

    def close(self) -> None:
        self._pub.close(0)
        self._replay.close(0)


def free_endpoints(host: str, ranks: int, port: int, replay_port: int) -> list[KvEndpoints]:
    """Endpoints of all ranks: base + rank, as vLLM numbers them. Port 0 has a free run of ports found."""
    port = port or _free_run(host, ranks)
    replay_port = replay_port or _free_run(host, ranks, avoid=range(port - ranks, port + ranks))
    return [KvEndpoints(host, port + r, replay_port + r) for r in range(ranks)]


def _free_run(host: str, count: int, avoid: range = range(0)) -> int:
    """The first of `count` free ports in a row. They are free now; whoever binds them still has to cope with a loss."""
    context = zmq.Context()
    try:
        for _ in range(200):
            base = random.SystemRandom().randrange(20_000, 32_000)  # below the usual range of outgoing connections
            if base in avoid:
                continue
            sockets = [context.socket(zmq.PUB) for _ in range(count)]
            try:
                for n, socket in enumerate(sockets):
                    socket.bind(f"tcp://{_host_name(host)}:{base + n}")
                return base
            except zmq.ZMQError:
                continue
            finally:
                for socket in sockets:
                    socket.close(0)
    finally:
        context.term()
    raise SettingsError(f"setting `kv_port`: found no {count} free ports in a row on {host}; name one")
