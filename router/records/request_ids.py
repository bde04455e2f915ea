"""Ids that records are joined by: one row a request, though clients may send one id with many requests (as tracing ids do).

An id that this replica recorded lately gets an ending, `id~2`, `id~3` and so on, and nobody else's id is ever changed: the client sees and
the worker gets what the client sent. "Lately" is the last `most` ids; an older repetition is recorded under its own id again.

Memory is bounded: what is kept of an id is its 64-bit hash and how often it came. Two ids of one hash cost an ending that was not needed.
"""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict

MOST_CHARACTERS = 1024
"""Of an id in a record (schemas.requests.Name)."""
_LATELY = 100_000


_PROCESS = os.urandom(10).hex()
_numbers = itertools.count(int.from_bytes(os.urandom(5)))


def new_id() -> str:
    """32 hexadecimal digits, new in the fleet: 80 random bits of this process, then a number. (uuid4 asks the kernel each time.)"""
    return f"{_PROCESS}{next(_numbers) & 0xFFFFFFFFFFFF:012x}"


class RecordedIds:
    """For one thread at a time."""

    def __init__(self, most: int = _LATELY) -> None:
        self._most = most
        self._times: OrderedDict[int, int] = OrderedDict()  # hash of an id -> how many requests came with it

    def __len__(self) -> int:
        return len(self._times)

    def take(self, given: str | None) -> str:
        """An id that no request had lately: the client's if it can be, else with an ending; a new one where none was given."""
        if not given:
            return new_id()
        wanted = given[:MOST_CHARACTERS]
        times = self._seen(wanted)
        if times == 1:
            return wanted
        while True:
            ending = f"~{times}"
            found = wanted[: MOST_CHARACTERS - len(ending)] + ending
            if self._seen(found) == 1:
                return found
            times += 1

    def _seen(self, name: str) -> int:
        """Counts one more request with this id; how many there are now."""
        key = hash(name)
        times = self._times.get(key, 0) + 1
        self._times[key] = times
        self._times.move_to_end(key)
        if len(self._times) > self._most:
            self._times.popitem(last=False)
        return times
