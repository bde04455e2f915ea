"""Which worker made a stored response: the engine keeps it in its own memory, so only that worker can give, cancel or continue it.

The id is read from an answer's first bytes and remembered for the newest `MOST` responses. A response that this router has not seen made
(before a restart, or through another replica) is looked for by load alone, and the engine says 404 where it is not; a load balancer that
sends a session to one router replica (README) avoids that.
"""

from __future__ import annotations

import re
from collections import OrderedDict

MOST = 100_000
_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_.:-]{1,200})"')


class StoredResponses:
    """Response id -> (pool, worker), bounded."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._made_by: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def made(self, head: bytes, pool: str, worker: str) -> None:
        """head: the first bytes of an answer of /v1/responses."""
        found = _ID.search(head)
        if found is not None:
            self._made_by[found[1].decode()] = pool, worker
            if len(self._made_by) > self._most:
                self._made_by.popitem(last=False)

    def worker_of(self, response_id: object) -> tuple[str, str] | None:
        """(pool, worker), or None when it is not known."""
        return self._made_by.get(response_id) if isinstance(response_id, str) else None
