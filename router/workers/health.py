"""Which targets answer.

A connection that fails marks the worker down at once; a connection that breaks before the first byte does so when it happens twice in a
row. A worker that is down is asked for /health until it answers (`probe`). 4xx and 5xx answers are answers.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from router.policy.cost import I64, Mask
from router.workers.targets import Target

log = logging.getLogger(__name__)

_BREAKS_UNTIL_DOWN = 2


@dataclass(slots=True)
class Health:
    """Which targets answer, as far as requests and probes have shown."""

    targets: tuple[Target, ...]
    up: Mask = field(init=False)
    breaks: I64 = field(init=False)

    def __post_init__(self) -> None:
        self.up = np.ones(len(self.targets), np.bool_)
        self.breaks = np.zeros(len(self.targets), np.int64)

    def answered(self, target: int) -> None:
        self._set(self.targets[target].url, True)

    def refused(self, target: int) -> None:
        """No connection."""
        self._set(self.targets[target].url, False)

    def broke(self, target: int) -> None:
        """The connection ended, or was silent for too long, before the first byte: perhaps an old one that the worker had closed, perhaps
        the worker died or hangs."""
        self.breaks[target] += 1
        if self.breaks[target] >= _BREAKS_UNTIL_DOWN:
            self._set(self.targets[target].url, False)

    def down_urls(self) -> set[str]:
        return {t.url for t in self.targets if not self.up[t.number]}

    def _set(self, url: str, up: bool) -> None:
        """All ranks of one engine process live and die together."""
        for t in self.targets:
            if t.url == url:
                if bool(self.up[t.number]) != up:
                    log.warning("worker %s (%s) is %s", t.worker, t.url, "up again" if up else "down")
                self.up[t.number] = up
                self.breaks[t.number] = 0

    async def probe(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        """Asks every worker that is down for its /health, once."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)

        async def ask(url: str) -> None:
            try:
                async with session.get(f"{url}/health", timeout=timeout) as response:
                    if response.status == 200:
                        self._set(url, True)
            except (TimeoutError, aiohttp.ClientError, OSError):
                pass  # still down

        await asyncio.gather(*(ask(url) for url in sorted(self.down_urls())))
