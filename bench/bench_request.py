"""What one request costs inside our router, without a kernel in between: CPU time and functions.

    python -m bench.bench_request [--kb 8] [--prompts new] [--tokens exact] [--count 2000] [--profile]

The router runs in this process with everything that `warmwatch route` has: tokenizer, index, records to an embedded stream. Its transports
are stand-ins: requests are handed to the server's protocol as bytes, answers (bench/load's form, in two pieces) to the upstream's. So
system calls are left out (some 60 us a request), and what is left is steady enough to judge a change of a few per cent: the least CPU time
of many short rounds is told, all threads included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import gc
import json
import pstats
import random
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import uvloop

from bench.agent_prompts import write_prompts
from bench.bridge_stand_in import BridgeStandIn
from bench.servers import POOL, ROOT, WORKERS, worker_name
from router.app import Router, calm_collector
from router.http import upstream
from router.http.server import Server
from router.http.server import _Connection as ClientConnection
from router.prompts.tokens import LocalTokenizer
from router.settings import RouterSettings
from router.warm_up import warm_up
from schemas.fleet import load_fleet
from schemas.stream import open_stream
from simulator.words import WORDS

CONNECTIONS = 8
CHUNKS = 17


class StandInTransport(asyncio.Transport):
    """Takes what is written, and tells `on_write`."""

    def __init__(self, on_write: Callable[[bytes], None]) -> None:
        super().__init__()
        self._on_write = on_write

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def write(self, data: Any) -> None:
        self._on_write(data)

    def writelines(self, parts: Any) -> None:
        for part in parts:
            self._on_write(part)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


def answer_pieces() -> list[bytes]:
    """A stream as bench/load's mock workers write it, in two pieces."""
    identity = {"id": "chatcmpl-8f14e45fceea4d3ab2c1d5a7c0f6b9e2", "object": "chat.completion.chunk", "created": 1790000000}
    events: list[dict[str, Any]] = []
    for i in range(CHUNKS - 2):
        delta = {"content": " token"} if i else {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None}
        events.append({**identity, "model": "bench-model", "choices": [choice]})
    usage = {"prompt_tokens": 1000, "total_tokens": 1015, "completion_tokens": 15, "prompt_tokens_details": {"cached_tokens": 900}}
    events.append({**identity, "model": "bench-model", "choices": [], "usage": usage})
    texts = [b"data: " + json.dumps(e, separators=(",", ":")).encode() + b"\n\n" for e in events] + [b"data: [DONE]\n\n"]
    head = (
        b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
        b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    chunks = [b"%x\r\n%b\r\n" % (len(t), t) for t in texts]
    return [head + chunks[0], b"".join(chunks[1:]) + b"0\r\n\r\n"]


class Connecting:
    """What Upstream asks of its loop: connections to a worker that answers each request."""

    def __init__(self, up: upstream.Upstream, answer: list[bytes]) -> None:
        self._loop, self._up, self._answer = asyncio.get_running_loop(), up, answer

    async def create_connection(self, make: Callable[[], Any], *_: Any, **__: Any) -> Any:
        connection = make()

        def written(data: bytes) -> None:
            if not data.startswith(b"POST "):
                self._loop.call_soon(connection.data_received, self._answer[0])
                self._loop.call_soon(connection.data_received, self._answer[1])

        transport = StandInTransport(written)
        connection.connection_made(transport)
        return transport, connection

    def time(self) -> float:
        return self._loop.time()

    def call_later(self, *given: Any) -> Any:
        return self._loop.call_later(*given)


class Client:
    """One connection in a closed loop: the next request when the answer has ended."""

    def __init__(self, server: Server, next_request: Callable[[], bytes | None], done: Callable[[], None]) -> None:
        self._next, self._done = next_request, done
        self._connection = ClientConnection(server)
        self._connection.connection_made(StandInTransport(self._written))
        self.loop = asyncio.get_running_loop()

    def send(self) -> None:
        request = self._next()
        if request is None:
            self._done()
        else:
            self._connection.data_received(request)

    def _written(self, data: bytes) -> None:
        if data.endswith(b"0\r\n\r\n"):
            self.loop.call_soon(self.send)


async def say_well(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers a health check."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    writer.close()


class Rig:
    """The router among stand-ins."""

    def __init__(self, folder: Path, kb: int, tokens: str) -> None:
        prompts = folder / "prompts.jsonl"
        write_prompts(prompts, kb * 1024)
        self.bodies = prompts.read_bytes().splitlines()
        self.fresh = random.Random(1)
        self.stream_url, key_file, fleet = f"local:{folder / 'stream.sqlite'}", folder / "hash.key", folder / "fleet.toml"
        lines = ["[[pools]]", f'name = "{POOL}"', 'model = "bench-model"', f'tokenizer = "{ROOT / "simulator" / "tokenizer"}"']
        self.health = [socket.create_server(("127.0.0.1", 0)) for _ in range(WORKERS)]
        for n, listener in enumerate(self.health):
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            lines += ["[[workers]]", f'pool = "{POOL}"', f'name = "{worker_name(n)}"', f'url = "{url}"']
        fleet.write_text("\n".join(lines) + "\n")
        settings = RouterSettings(
            fleet=fleet, stream=self.stream_url, hash_key_file=key_file, port=0, admin_port=0, tokens=cast(Any, tokens)
        )  # fmt: skip
        settings.key()
        loaded = load_fleet(fleet)
        tokenizers = {p.name: LocalTokenizer.from_dir(p.tokenizer) for p in loaded.pools if p.tokenizer is not None}
        self.stream = open_stream(self.stream_url)
        self.router = Router(settings, loaded, tokenizers, self.stream)
        self.bridges = BridgeStandIn(self.stream_url, key_file)
        self.answer = answer_pieces()

    async def start(self) -> None:
        for listener in self.health:
            await asyncio.start_server(say_well, sock=listener)
        await self.router.start()
        await asyncio.sleep(0.5)  # for the feed
        (pool,) = self.router.pools
        pool.learn_block_size(16)
        self.server = self.router.server()
        self.server._look_s = 1.0
        up = self.router._upstream

        up._loop = cast(asyncio.AbstractEventLoop, Connecting(up, self.answer))

    def request(self, number: int, new: bool) -> bytes:
        body = self.bodies[number % len(self.bodies)]
        if new:
            at = body.index(b"~~~")
            end = body.rindex(b"~") + 1
            words = " ".join(self.fresh.choices(WORDS, k=(end - at) // 3 + 1))[: end - at].ljust(end - at, ".")
            body = body[:at] + words.encode() + body[end:]
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        return head % len(body) + body

    async def drive(self, count: int, new: bool, numbers: Callable[[int], int]) -> float:
        """CPU seconds of `count` requests."""
        requests = [self.request(numbers(n), new) for n in range(count)]
        requests.reverse()
        left, all_done = CONNECTIONS, asyncio.Event()

        def done() -> None:
            nonlocal left
            left -= 1
            if not left:
                all_done.set()

        clients = [Client(self.server, lambda: requests.pop() if requests else None, done) for _ in range(CONNECTIONS)]
        began = time.process_time()
        for client in clients:
            client.send()
        await all_done.wait()
        return time.process_time() - began

    async def stop(self) -> None:
        await self.router.stop()
        self.router.close()
        self.bridges.stop()
        self.stream.close()


async def measure(rig: Rig, args: argparse.Namespace) -> None:
    await rig.start()
    await rig.drive(len(rig.bodies), False, lambda n: n)
    await asyncio.to_thread(rig.bridges.announce_prompts, len(rig.bodies))
    await asyncio.sleep(0.7)
    new = args.prompts == "new"
    rng = np.random.default_rng(1)
    a_round = 64
    took = []
    profile = cProfile.Profile() if args.profile else None
    for i in range(max(2, args.count // a_round)):
        gc.collect(0)
        if profile and i:
            profile.enable()
        cpu_s = await rig.drive(a_round, new, lambda _: int(rng.integers(len(rig.bodies))))
        if profile:
            profile.disable()
        if i:
            took.append(cpu_s / a_round * 1e6)
    took.sort()
    low, middle = took[len(took) // 10], took[len(took) // 2]
    print(f"{args.kb} KB {args.prompts} {args.tokens}: least {took[0]:.0f}, 10 % {low:.0f}, median {middle:.0f} us of CPU a request")
    crashes = rig.router.metrics.crashes._value.get()
    if crashes or rig.router.recorder.dropped:
        raise SystemExit(f"{crashes} internal errors, {rig.router.recorder.dropped} records dropped")
    if profile:
        n = a_round * (len(took))
        stats = pstats.Stats(profile)
        rows: list[tuple[float, float, float, str]] = []
        for (file, line, name), (_, calls, own, cumulative, _) in stats.stats.items():  # type: ignore[attr-defined]
            rows.append((cumulative / n * 1e6, own / n * 1e6, calls / n, f"{name} ({'/'.join(file.split('/')[-2:])}:{line})"))
        for key, title in ((0, "with callees"), (1, "own")):
            print(f"-- {title}: cumulative us, own us, calls a request (cProfile makes all dearer)")
            for row in sorted(rows, key=lambda r: r[key], reverse=True)[:90]:
                print(f"{row[0]:8.1f} {row[1]:8.1f} {row[2]:7.2f}  {row[3]}")
    await rig.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kb", type=int, default=8)
    parser.add_argument("--prompts", choices=("new", "same"), default="new")
    parser.add_argument("--tokens", default="exact")
    parser.add_argument("--count", type=int, default=8000)
    parser.add_argument("--profile", action="store_true", help="under cProfile: functions")
    args = parser.parse_args()
    warm_up()
    with tempfile.TemporaryDirectory(prefix="bench-request-") as folder:
        rig = Rig(Path(folder), args.kb, args.tokens)
        calm_collector()
        uvloop.run(measure(rig, args))


if __name__ == "__main__":
    main()
