"""Looks at the fleet file and at the pools' `discover`, and tells Membership what changed there.

A file that is broken, or whose pools are others than at the start (pools are built once), changes nothing: `trouble` says so, and the log
once. A file is read when its time or size changed and stayed for one look, so that one that is being written is not read in the middle;
on SIGHUP it is read at once, and once more for however many signals came meanwhile. DNS names are asked at each look. The fleet file is
read by the second look in any case: it may have changed while the router started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from router.pools import TooManyWorkers
from router.workers.discovery import NotFound, find
from router.workers.membership import Membership
from schemas.discover import Discover, parse_discover
from schemas.fleet import Fleet, load_fleet
from schemas.settings import SettingsError

log = logging.getLogger(__name__)

Stamp = tuple[int, int, int] | None


class Watch:
    """Over one fleet file. file None: workers are not read from a file. For one event loop."""

    def __init__(
        self, fleet: Fleet, file: Path | None, membership: Membership, every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file, self._membership, self._every_s, self._clock = file, membership, every_s, clock
        self._pools = fleet.pools
        self._discovers = {p.name: parse_discover(p.discover) for p in fleet.pools if p.discover is not None}
        self._read: dict[Path, Stamp] = {}
        self._seen: dict[Path, Stamp] = {}
        self._lock = asyncio.Lock()
        self._asked = asyncio.Event()
        self.trouble: dict[str, str] = {}
        """By source ("fleet file", "discover of POOL"): why its last word was not understood. What it said before holds."""
        self.sources = tuple(["fleet file"] * (file is not None) + [f"discover of {pool}" for pool in self._discovers])
        self.loads = 0
        self.failures = 0

    async def run(self) -> None:
        """Until cancelled. Discovery is asked once even when nothing is watched."""
        at_once, file = True, False
        while True:
            try:
                await self.look(at_once, file)
            except Exception:  # the top of this task's loop
                self.failures += 1
                log.exception("looking for workers failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s or None):
                    await self._asked.wait()
            at_once, file = self._asked.is_set(), True
            self._asked.clear()

    def read_anew(self) -> None:
        """What SIGHUP does: `run` looks at once."""
        self._asked.set()

    async def look(self, at_once: bool = False, file: bool = True) -> None:
        """at_once: files are read though they did not change (SIGHUP)."""
        async with self._lock:
            if self._file is not None and file and self._is_due(self._file, at_once):
                await self._load(self._file)
            await asyncio.gather(*(self._find(pool, d, at_once) for pool, d in self._discovers.items()))

    async def _load(self, file: Path) -> None:
        try:
            fleet = await asyncio.to_thread(load_fleet, file)
            if fleet.pools != self._pools:
                raise SettingsError(f"fleet file {file}: its pools are others than at the start: restart the router to change pools")
            self._membership.from_file(fleet, self._clock())
        except (SettingsError, TooManyWorkers) as e:
            self._complain("fleet file", f"{e} (the fleet stays as it was)")
            return
        self._fine("fleet file")

    async def _find(self, pool: str, discover: Discover, at_once: bool) -> None:
        if discover.kind == "file" and not self._is_due(Path(discover.path), at_once):
            return
        try:
            found = await find(pool, discover)
            self._membership.found(pool, found.workers, found.draining, self._clock())
        except (NotFound, TooManyWorkers) as e:
            self._complain(f"discover of {pool}", f"{e} (the workers stay as they were)")
            return
        self._fine(f"discover of {pool}")

    def _is_due(self, file: Path, at_once: bool) -> bool:
        now = _stamp(file)
        settled = now == self._seen.get(file, ())
        self._seen[file] = now
        if at_once or (settled and now != self._read.get(file, ())):
            self._read[file] = now
            return True
        return False

    def _complain(self, source: str, text: str) -> None:
        self.failures += 1
        if self.trouble.get(source) != text:
            log.error("%s: %s", source, text)
        self.trouble[source] = text

    def _fine(self, source: str) -> None:
        self.loads += 1
        if self.trouble.pop(source, None) is not None:
            log.info("%s: is fine again", source)


def _stamp(file: Path) -> Stamp:
    """None: it is not there."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
