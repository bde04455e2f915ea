"""What workers probably hold, learned from our own dispatches: for prompts that are cut as text, and engines that publish no events.

    dispatch --learn--> [ (time, slot, chain) ... ] oldest first     and a block table that holds a copy of each block for each of these
                          | older than decay_s, or more blocks than fit
                          +--> its copies are removed

So a block counts until `decay_s` after it was sent to the worker last, and the memory goes to what was sent last: an engine evicts what was
not used for longest, too. What an engine evicted earlier, or never kept, is not seen: a guess, which a decision's record says.

Bounded by `limit_bytes`: a dispatch costs 8 bytes a block here, and a block that is new to its worker some 27 in the table. A call takes
out at most `_AT_ONCE` blocks beyond what it brings, so after a long silence decay may lag by some requests.

Rejected: time stamps by block (each look-up of a hot prefix would write, and eviction would search).
"""

from __future__ import annotations

from collections import deque

import numpy as np

from router.index.table import MAX_SLOTS, BlockTable, Overlaps
from schemas.block_hash import U64

_BYTES_A_BLOCK = 44
_LEAST_BYTES = 1 << 18
_AT_ONCE = 1 << 15


class ApproximateIndex:
    """For one thread at a time; time is an argument (monotonic seconds). Slots are those of PrefixIndex."""

    def __init__(self, limit_bytes: int, decay_s: float, slots: int = 64) -> None:
        self._most_blocks = max(1, limit_bytes // _BYTES_A_BLOCK)
        self._decay_s = decay_s
        self._table = BlockTable(slots, max(_LEAST_BYTES, limit_bytes - 8 * self._most_blocks))
        self._sent: deque[tuple[float, int, U64]] = deque()
        self._blocks = 0
        self._counting = _all(self._table)

    def __len__(self) -> int:
        """Blocks of all dispatches that are remembered."""
        return self._blocks

    @property
    def rows(self) -> int:
        """Distinct blocks."""
        return self._table.rows

    @property
    def size_bytes(self) -> int:
        return self._table.size_bytes + 8 * self._blocks

    def fit(self, slots: int) -> None:
        """`match` answers for so many slots at least."""
        if slots > self._table.slots:
            self._table.fit(min(slots, MAX_SLOTS))
            self._counting = _all(self._table)

    def learn(self, slot: int, chain: U64, now_s: float) -> None:
        """This prompt was sent to the slot's worker. What does not fit in memory by itself is cut at its end."""
        chain = chain[: self._most_blocks].copy()
        if not len(chain):
            return
        self.fit(slot + 1)
        self.expire(now_s, len(chain))
        self._table.store(slot, chain)
        self._sent.append((now_s, slot, chain))
        self._blocks += len(chain)

    def match(self, chain: U64, now_s: float) -> Overlaps:
        """Blocks of the longest prefix that was sent to each slot, shape (slots,) or longer: all of it counts as held on the GPU."""
        self.expire(now_s)
        return self._table.match(chain, self._counting)

    def expire(self, now_s: float, room: int = 0) -> None:
        """Forgets what is too old, and makes room for so many blocks."""
        most = room + _AT_ONCE
        while self._sent:
            sent_s, slot, chain = self._sent[0]
            if self._blocks + room <= self._most_blocks and (sent_s + self._decay_s > now_s or most <= 0):
                return
            self._sent.popleft()
            self._table.remove(slot, chain)
            self._blocks -= len(chain)
            most -= len(chain)

    def forget_slot(self, slot: int) -> None:
        """The worker's cache is gone: it restarted, is down, or left."""
        if slot < self._table.slots:
            self._table.clear(slot)
            self._sent = deque(s for s in self._sent if s[1] != slot)
            self._blocks = sum(len(s[2]) for s in self._sent)


def _all(table: BlockTable) -> U64:
    return np.full((table.lanes + 1, table.words), ~np.uint64(0))
