"""Engine messages for the tests, as bytes, and a fake engine that publishes and replays them over real ZeroMQ sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from schemas.block_hash import HashKey
from schemas.kv_events import WorkerId

KEY = HashKey(0x0706050403020100, 0x0F0E0D0C0B0A0908)
SOURCE = WorkerId("pool", "worker", 0)
SIZE = 4


def stored(
    hashes: Sequence[Any], tokens: Sequence[Any] | None, parent: int | bytes | None = None, size: int = SIZE, **more: Any
) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": tokens, "block_size": size,
        "lora_id": None, "medium": "GPU", "lora_name": None, **more,
    }  # fmt: skip


def removed(hashes: Sequence[Any], **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **more}


def cleared() -> dict[str, Any]:
    return {"type": "AllBlocksCleared"}


def payload(*events: Any, ts: float = 1_700_000_000.0, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), rank])


def message(seq: int, body: bytes, topic: bytes = b"kv") -> list[bytes]:
    return [topic, seq.to_bytes(8, "big"), body]


def one_block(seq: int, salt: int = 0) -> bytes:
    """A batch that stores one new block at the root."""
    return payload(stored([1 + seq + salt * 1_000_003], [salt, seq, 0, 1]), ts=1_700_000_000.0 + seq + salt / 7)


class FakeEngine:
    """A PUB socket, and a ROUTER that answers replays from `kept`.

    topic_frame: answers have four frames as from vLLM 0.26 and SGLang 0.5.22, else three. lose: (round, seq) -> drop this answer.
    marker: whether the end marker is sent.
    """

    def __init__(
        self,
        *,
        topic_frame: bool = True,
        lose: Callable[[int, int], bool] = lambda r, s: False,
        marker: bool = True,
        replay: bool = True,
        ports: tuple[int, int] = (0, 0),
    ) -> None:
        self.kept: dict[int, bytes] = {}
        self.rounds = 0
        self.asked: list[int] = []
        self._topic_frame = topic_frame
        self._lose = lose
        self._marker = marker
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)  # a PUB that tells of its subscribers
        self._pub.set_hwm(0)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set_hwm(0)
        for socket, port in ((self._pub, ports[0]), (self._router, ports[1])):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.events: str = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        if replay:
            self._thread.start()

    @property
    def ports(self) -> tuple[int, int]:
        return int(self.events.rsplit(":", 1)[1]), int(self.replay.rsplit(":", 1)[1])

    def publish(self, seq: int, body: bytes, *, live: bool = True, keep: bool = True) -> None:
        if keep:
            self.kept[seq] = body
        if live:
            self._pub.send_multipart(message(seq, body))

    def until_followed(self) -> None:
        """A PUB drops what it sends before its subscriber has joined."""
        assert self._pub.poll(10_000), "nobody subscribes"
        self._pub.recv()

    def publish_raw(self, frames: list[bytes]) -> None:
        self._pub.send_multipart(frames)

    def _answer(self) -> None:
        while not self._stop.is_set():
            if not self._router.poll(10):
                continue
            client, empty, start_bytes = self._router.recv_multipart()
            assert empty == b""
            start = int.from_bytes(start_bytes, "big")
            self.rounds += 1
            self.asked.append(start)
            middle = [b"kv"] if self._topic_frame else []
            for seq, body in sorted(self.kept.items()):
                if seq >= start and not self._lose(self.rounds, seq):
                    self._router.send_multipart([client, b"", *middle, seq.to_bytes(8, "big"), body])
            if self._marker:
                self._router.send_multipart([client, b"", *([b""] if self._topic_frame else []), b"\xff" * 8, b""])

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5)
        self._context.destroy(linger=0)
