"""An engine that speaks OpenAI bytes as a test tells it to: real sockets, no model."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

USAGE = {"prompt_tokens": 100, "total_tokens": 103, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 64}}


def sse(content: dict[str, Any] | str) -> bytes:
    return f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode()


def answer_chunks(words: int = 3, usage: bool = True) -> list[bytes]:
    chunks = [sse({"choices": [{"index": 0, "delta": {"content": f"w{i}"}}]}) for i in range(words)]
    if usage:
        chunks.append(sse({"choices": [], "usage": USAGE, "metrics": {"time_to_first_token_ms": 12.5, "queue_time_ms": 1.5}}))
    return [*chunks, sse("[DONE]")]


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    body: bytes


def _headers(request: web.Request) -> dict[str, str]:
    return {k.lower(): v for k, v in request.headers.items()}


@dataclass
class FakeEngine:
    """gate: when set to an Event, the answer waits there before its first byte, or with head_first before a stream's first chunk;
    between: awaited before each further chunk. healthy: what /health says; health_gate: what it waits for. headers: of answers that are not
    200."""

    name: str
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=answer_chunks)
    status: int = 200
    gate: asyncio.Event | None = None
    head_first: bool = False
    healthy: bool = True
    health_gate: asyncio.Event | None = None
    asked_health: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    between: Callable[[int], Any] | None = None
    break_after: int | None = None
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: list[int] | None = None

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append(Seen(request.raw_path, _headers(request), body))
        try:
            if self.gate is not None and not self.head_first:
                await self.gate.wait()
            if self.status != 200:
                return web.json_response({"error": {"message": "no", "code": self.status}}, status=self.status, headers=self.headers)
            if not json.loads(body).get("stream"):
                return web.json_response({"choices": [{"text": "x"}], "usage": USAGE}, headers={"X-Request-Id": "engine"})
            response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8", "x-engine": self.name})
            await response.prepare(request)
            if self.gate is not None and self.head_first:
                await self.gate.wait()
            for i, chunk in enumerate(self.chunks):
                if i and self.between is not None:
                    await self.between(i)
                if i == self.break_after:
                    request.transport.abort()
                    return response
                await response.write(chunk)
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled.set()
            raise
        return response

    async def tokenize(self, request: web.Request) -> web.Response:
        if self.tokens is None:
            return web.Response(status=404)
        self.seen.append(Seen(request.raw_path, _headers(request), await request.read()))
        return web.json_response({"count": len(self.tokens), "tokens": self.tokens})

    async def other(self, request: web.Request) -> web.Response:
        self.seen.append(Seen(request.raw_path, _headers(request), await request.read()))
        return web.Response(text=f"{request.method} by {self.name}", status=418)

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0, block_size: int | None = 16) -> AsyncIterator[FakeEngine]:
        async def metrics(_: web.Request) -> web.Response:
            return web.Response(
                text=f'vllm:cache_config_info{{_block_size_resolved="True",block_size="{block_size}"}} 1.0\n' if block_size else ""
            )

        async def models(_: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 4096}]})

        async def health(_: web.Request) -> web.Response:
            self.asked_health += 1
            if self.health_gate is not None:
                await self.health_gate.wait()
            return web.Response(status=200 if self.healthy else 503)

        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self.completions)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/responses", self.completions)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_get("/v1/models", models)
        app.router.add_get("/health", health)
        app.router.add_get("/metrics", metrics)
        app.router.add_route("*", "/{any:.*}", self.other)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()
