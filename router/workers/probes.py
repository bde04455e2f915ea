"""Active health checks: every worker is asked for its `health_path`, whether or not requests go there.

Workers that are well are asked every `every_s`, each at a moment of its own, so that 500 of them are no burst; workers that are not are
asked every `down_every_s`. A 2xx or 4xx answers (an engine without that path lives too), 5xx does not, and no answer in `timeout_s` does
not unless a request was answered meanwhile (breaker.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from router.workers.health import Health


@dataclass(frozen=True, slots=True)
class ProbeRules:
    """every_s 0: workers that are well are not asked."""

    path: str = "/health"
    every_s: float = 5.0
    down_every_s: float = 1.0
    timeout_s: float = 3.0


class Probes:
    """Of one pool. Call `look` often; what is due is asked beside it."""

    def __init__(
        self, health: Health, session: aiohttp.ClientSession, rules: ProbeRules, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._health, self._session, self._rules, self._clock = health, session, rules, clock
        self._timeout = aiohttp.ClientTimeout(total=rules.timeout_s)
        self._due_s: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._phase = 0

    def look(self) -> None:
        """Sends the checks that are due. A worker has one at a time."""
        now_s, down, urls = self._clock(), self._health.down_urls(), self._health.urls()
        for url in self._due_s.keys() - set(urls):
            del self._due_s[url]
        for url in urls:
            every_s = self._rules.down_every_s if url in down else self._rules.every_s
            if not every_s or url in self._asking:
                continue
            if url not in self._due_s:
                self._due_s[url] = now_s + every_s * self._next_phase()
            due_s = min(self._due_s[url], now_s + every_s)  # it went down while its next check was far off
            if due_s <= now_s:
                due_s = now_s + every_s
                self._asking[url] = asyncio.create_task(self._ask(url))
            self._due_s[url] = due_s

    async def close(self) -> None:
        tasks = tuple(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, url: str) -> None:
        asked_s = self._clock()
        try:
            async with self._session.get(url + self._rules.path, timeout=self._timeout, allow_redirects=False) as response:
                if response.status < 500:
                    self._health.health_answered(url)
                else:
                    self._health.health_failed(url, asked_s, False, f"{self._rules.path} says {response.status}")
        except TimeoutError:
            self._health.health_failed(url, asked_s, True, f"{self._rules.path} is silent for {self._rules.timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as e:
            self._health.health_failed(url, asked_s, False, f"{self._rules.path}: {e or type(e).__name__}")
        finally:
            self._asking.pop(url, None)

    def _next_phase(self) -> float:
        """The golden ratio's multiples: evenly spread however many there are."""
        self._phase += 1
        return self._phase * 0.6180339887 % 1
