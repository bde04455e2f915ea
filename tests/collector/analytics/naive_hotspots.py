"""The exact twin of hotspots: every item, every prefix, nothing forgotten."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from collector.analytics.attributed import Attributed
from collector.analytics.hotspots import COUNTED
from schemas.causes import Cause


@dataclass(frozen=True)
class Item:
    """What one request weighs, and the prefix (chain up to the last counted block; empty: the root) that it weighs on."""

    path: tuple[int, ...]
    tokens: dict[Cause, int]
    request: Attributed

    @property
    def weight(self) -> int:
        return sum(self.tokens.values())


def item_of(r: Attributed) -> Item | None:
    tokens: dict[Cause, int] = {}
    for cause, n in zip(r.run_causes.tolist(), r.run_tokens.tolist(), strict=True):
        if Cause(cause) in COUNTED:
            tokens[Cause(cause)] = tokens.get(Cause(cause), 0) + n
    if r.hit_tokens is None or not sum(tokens.values()):
        return None
    last = max((i + 1 for i, c in enumerate(r.causes.tolist()) if Cause(c) in COUNTED), default=0)
    return Item(tuple(r.chain[:last].tolist()), tokens, r)


def items_of(requests: Iterable[Attributed]) -> list[Item]:
    return [item for r in requests if (item := item_of(r)) is not None]


def totals(items: Sequence[Item]) -> dict[int, int]:
    """Weight of all items at or below each prefix, by the name of its last block."""
    out: dict[int, int] = {}
    for item in items:
        for name in item.path:
            out[name] = out.get(name, 0) + item.weight
    return out


def covered(items: Sequence[Item], reported: set[int]) -> dict[int, list[Item]]:
    """Items by the deepest reported prefix on their path; 0: there is none."""
    out: dict[int, list[Item]] = {}
    for item in items:
        where = next((name for name in reversed(item.path) if name in reported), 0)
        out.setdefault(where, []).append(item)
    return out


def hidden(items: Sequence[Item], reported: set[int]) -> dict[int, list[int]]:
    """For each prefix that is not reported: weights of the items at or below it that no reported prefix there covers."""
    out: dict[int, list[int]] = {}
    for item in items:
        for name in reversed(item.path):
            if name in reported:
                break
            out.setdefault(name, []).append(item.weight)
    return out


def chain(*parts: int) -> np.ndarray:
    """Names of a chain whose blocks hold these contents: each names all before it, as the canonical hash does."""
    name, out = 1469598103934665603, []
    for part in parts:
        name = ((name ^ (part + 0x9E3779B97F4A7C15)) * 1099511628211 + 0x1234567) & ((1 << 64) - 1)
        name ^= name >> 31
        out.append(name)
    return np.array(out, np.uint64)
