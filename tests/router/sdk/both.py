"""The same requests by a real client library, once to a mock engine itself and once through a router before another one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from simulator.mock_worker import MockWorker
from simulator.settings import MockEngineSettings
from tests.router.running import Running, running

SYSTEM = "read the user file and the function " * 12


@dataclass(frozen=True)
class Way:
    """Where a client sends to, and the engine behind it."""

    url: str
    engine: MockWorker
    router: Running | None

    async def sim(self, what: str, **body: Any) -> None:
        async with aiohttp.ClientSession() as http, http.post(f"{self.engine.url}/_sim/{what}", json=body) as r:
            assert r.status == 200

    def idle(self) -> bool:
        return not any(r.scheduler.has_work for r in self.engine.engine.ranks) and (self.router is None or self.router.nothing_in_flight())


@dataclass
class _Engine:
    """What `running` wants to know of a worker."""

    name: str
    url: str


@contextlib.asynccontextmanager
async def both(**settings: Any) -> AsyncIterator[tuple[Way, Way]]:
    given = {"port": 0, "instant": True, "model": "tiny", "answer_tokens": 8} | settings
    direct, behind = MockWorker(MockEngineSettings(**given)), MockWorker(MockEngineSettings(**given))
    await asyncio.gather(direct.__aenter__(), behind.__aenter__())
    try:
        async with running([_Engine("w0", behind.url)]) as router:  # type: ignore[list-item]
            yield Way(direct.url, direct, None), Way(router.url, behind, router)
    finally:
        await asyncio.gather(direct.__aexit__(None, None, None), behind.__aexit__(None, None, None))


async def alike(ways: tuple[Way, Way], scenario: Callable[[Way], Awaitable[Any]]) -> Any:
    """Runs the scenario both ways; the results must be equal. Returns the router's."""
    direct, through = ways
    expected, got = await scenario(direct), await scenario(through)
    assert got == expected
    await settled(direct)
    await settled(through)
    return got


async def settled(way: Way) -> None:
    """Nothing is on its way any more, there or in the router."""
    deadline = asyncio.get_running_loop().time() + 10
    while not way.idle():
        assert asyncio.get_running_loop().time() < deadline, "a request is still on its way"
        await asyncio.sleep(0.01)


async def outcome(call: Awaitable[Any]) -> tuple[str, Any, Any, Any]:
    """What a client sees of a failing call: the exception's class, status, body and Retry-After."""
    try:
        await call
    except Exception as e:
        response = getattr(e, "response", None)
        retry_after = None if response is None else response.headers.get("retry-after")
        return type(e).__name__, getattr(e, "status_code", None), getattr(e, "body", None), retry_after
    return "no error", None, None, None


_DRAWN = frozenset(("id", "created", "created_at", "item_id", "call_id", "_request_id", "tool_call_id"))


def same(value: Any) -> Any:
    """An SDK's object as plain values, without what is drawn anew for each answer."""
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, dict):
        return {k: same(v) for k, v in value.items() if k not in _DRAWN}
    return [same(v) for v in value] if isinstance(value, (list, tuple)) else value
