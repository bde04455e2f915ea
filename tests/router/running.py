"""A whole router on real sockets in the test's own loop, over a stream in memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import numpy as np
from yarl import URL

from router.app import Router, listen
from router.prompts.tokens import LocalTokenizer
from router.settings import RouterSettings
from schemas.block_hash import HashKey
from schemas.fleet import Fleet, Pool, Worker
from schemas.kv_events import COMPLETE, EVENT, Kind, KvBatch, Tier, WorkerId, encode
from schemas.requests import Decision, Outcome
from schemas.stream import Stream, open_stream
from schemas.stream.memory import MemoryHub
from schemas.topics import DECISIONS, KV_EVENTS, OUTCOMES, topic_specs
from schemas.workers import BridgeHealth, Trust, WorkerLoad
from tests.router.fake_engine import FakeEngine
from tests.router.recordings import TOKENIZER

KEY_HEX = "000102030405060708090a0b0c0d0e0f"
KEY = HashKey.from_hex(KEY_HEX)
BLOCK = 16


async def until(holds: Callable[[], Any], timeout_s: float = 15.0) -> Any:
    """Polls until the condition holds; its value."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := holds()):
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        await asyncio.sleep(0.005)
    return value


class Hub(Protocol):
    """Opens the stream that all of a test share."""

    def open(self, name: str) -> Stream: ...


@dataclass(frozen=True)
class UrlHub:
    """A Hub over an address."""

    url: str

    def open(self, name: str) -> Stream:
        return open_stream(self.url)


@dataclass
class Running:
    router: Router
    url: str
    hub: Hub
    client: aiohttp.ClientSession
    seq: dict[str, int] = field(default_factory=dict)

    async def post(self, body: dict[str, Any] | bytes, path: str = "/v1/completions", **headers: str) -> tuple[int, dict[str, str], bytes]:
        kind = {"data": body} if isinstance(body, bytes) else {"json": body}
        names = {k.replace("_", "-"): v for k, v in headers.items()}
        async with self.client.post(URL(self.url + path, encoded=True), headers=names, **kind) as response:  # type: ignore[arg-type]
            return response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read()

    async def tell(self, worker: str, *events: tuple[Kind, Sequence[int], int], timeout_s: float = 15.0) -> None:
        """Publishes a KV batch of the worker as its bridge would, and waits until the index has it."""
        seq = self.seq[worker] = self.seq.get(worker, -1) + 1
        rows = [(kind, Tier.GPU, 0, len(hashes), seq, 1.0, 0, BLOCK, flags) for kind, hashes, flags in events]
        hashes = np.array([h for _, hs, _ in events for h in hs], np.uint64)
        batch = KvBatch(WorkerId("tiny", worker, 0), 1, seq, seq, 1.0, time.time(), np.array(rows, EVENT), hashes)
        with self.hub.open("test") as stream:
            writer = stream.writer()
            writer.append(KV_EVENTS, batch.source.key, encode(batch))
            await asyncio.to_thread(writer.flush, 5.0)
            writer.close(1.0)
        slot = self.router.pools.index.slot(batch.source)
        await until(lambda: slot.seq is not None and slot.seq >= seq, timeout_s)

    async def hold(self, worker: str, chain: Sequence[int]) -> None:
        """The worker's cache holds these blocks and the index knows it exactly."""
        if worker not in self.seq:
            await self.tell(worker, (Kind.EPOCH_STARTED, [], COMPLETE))
        await self.tell(worker, (Kind.STORED, chain, 0))

    def chain(self, prompt: str | Sequence[int], salt: str | None = None, lora: str | None = None) -> list[int]:
        pool = self.router.pools.by_name["tiny"]
        ids = LocalTokenizer.from_dir(TOKENIZER).text(prompt) if isinstance(prompt, str) else np.array(prompt, np.uint32)
        found = pool.chain(ids, lora, salt)
        assert found is not None
        return [int(h) for h in found]

    async def records(self, outcomes: int = 1) -> tuple[list[Decision], list[Outcome]]:
        """All decisions and outcomes on the stream, validated, once there are so many outcomes."""

        def read() -> tuple[list[Decision], list[Outcome]] | None:
            found = [Outcome.model_validate_json(v) for v in self.values(OUTCOMES)]
            if len(found) < outcomes:
                return None
            return [Decision.model_validate_json(v) for v in self.values(DECISIONS)], found

        result: tuple[list[Decision], list[Outcome]] = await until(read)
        return result

    def values(self, topic: str) -> list[bytes]:
        with self.hub.open("test") as stream:
            stream.ensure_topics(topic_specs())
            ends = stream.end_offsets(topic)
            reader = stream.reader()
            reader.assign({(topic, p): at for p, at in stream.start_offsets(topic).items()})
            out: list[tuple[int, bytes]] = []
            deadline_s = time.monotonic() + 5.0
            while any(reader.position((topic, p)) < end for p, end in ends.items()) and time.monotonic() < deadline_s:
                out += [(r.timestamp, r.value or b"") for s in reader.poll(0.05, 1000) for r in s.records]
            reader.close()
        return [v for _, v in sorted(out, key=lambda x: x[0])]

    def nothing_in_flight(self) -> bool:
        return not any(p.load.in_flight.any() or p.load.decoding.any() for p in self.router.pools)


@contextlib.asynccontextmanager
async def running(
    engines: Sequence[FakeEngine], hub: Hub | None = None, tokenizer: bool = True, wait: bool = True, **settings: Any
) -> AsyncIterator[Running]:
    hub = hub or MemoryHub()
    fleet = Fleet(pools=(Pool(name="tiny"),), workers=tuple(Worker(pool="tiny", name=e.name, url=e.url) for e in engines))
    given = RouterSettings(hash_key=KEY_HEX, seed=1, port=0, probe_every_s=0.05, drain_s=2, **settings)
    tokenizers = {"tiny": LocalTokenizer.from_dir(TOKENIZER)} if tokenizer else {}
    with hub.open("test") as stream, listen("127.0.0.1", 0, "port") as listener:
        router = Router(given, fleet, tokenizers, stream)
        await router.start()
        server = router.server()
        await server.start(listener)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as client:
            try:
                if wait:
                    await until(lambda: router.feed.caught_up)
                    if engines:
                        await until(lambda: all(p.block_size for p in router.pools))
                yield Running(router, f"http://127.0.0.1:{listener.getsockname()[1]}", hub, client)
            finally:
                await server.drain(given.drain_s)
                await router.stop()
                await asyncio.to_thread(router.close)


def load_record(worker: str, trust: Trust = Trust.EXACT, key_id: str | None = None) -> bytes:
    health = BridgeHealth(trust=trust, epoch=1, key_id=key_id)
    return (
        WorkerLoad(pool="tiny", worker=worker, rank=0, time_s=time.time(), engine="vllm", up=True, bridge=health).model_dump_json().encode()
    )
