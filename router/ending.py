"""How the process ends, from the first signal to the last request.

    SIGTERM --> /readyz says 503, connections are still taken for `delay_s` --> none is taken, what is on its way may end --> exit
    SIGINT, or a second signal: without the delay          a signal after that: what is on its way is cut

Without a delay (the default) the second signal cuts already. What is written last (records) no signal cuts off.

The delay is for a load balancer that finds out by /readyz: it must have stopped sending before connections are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)


class Ending:
    """For one event loop. `leaving`: asked to end. `hurry`: set when nobody is to wait for what is on its way."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self.leaving = False
        self.hurry = asyncio.Event()
        self._over = asyncio.Event()

    async def wait(self) -> None:
        """Until no new connections are to be taken."""
        await self._over.wait()

    def ask(self, at_once: bool = False) -> None:
        """What a signal does."""
        log.info("asked to end" + ("" if not self.leaving else ", again"))
        if self._over.is_set():
            self.hurry.set()
        elif self.leaving or at_once or not self._delay_s:
            self._over.set()
        else:
            asyncio.get_running_loop().call_later(self._delay_s, self._over.set)
        self.leaving = True

    @contextlib.contextmanager
    def signals(self, on_hangup: Callable[[], object]) -> Iterator[None]:
        """Listens to SIGTERM and SIGINT, and to SIGHUP for `on_hangup`."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.ask)
        loop.add_signal_handler(signal.SIGINT, self.ask, True)
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)
