"""Recomputation hotspots: which prefixes the tokens that were computed again have in common. Fills the table `prefixes`.

Of each request, the tokens that had been computed before and were computed again are one item, on the last such block of its chain:
causes that nobody can act on (never seen before, the partial block at the end) are left out, and so is a prompt of which nobody knows what
was hit. A trie of bounded size (prefix_trie.py) keeps which prefixes these items share. A prefix is a hotspot if it has at least `SHARE` of
the pool's tokens that were computed again in the window, those of its own hotspots further down left out, in at least two requests.

So each token counts in at most one row, and rows add up to at most what was lost: they are lower bounds. total_tokens is too low by at most
error_tokens; no prefix that is left out has more than SHARE of all plus the greatest error. While a window has fewer different items than
`NODES` all is exact. Prompts that have nothing in common but their kind (a timestamp at the head: every chain is another from its first
block on) meet at the root, which has a row (prefix 0, depth 0) for each model, route, tenant and template.

Memory: 6.5 MB a pool and window at most, and at most `TRIES` of these: when one more is needed, the oldest window is settled, that is,
its rows are kept until it is closed, and its tries go. So a collector that catches up counts each window on its own, however many it
reads at once. Of one window at most `POOLS` pools are told apart; what comes of further ones shares one trie.
Rejected: counting each block of a run on each of its ancestors (2,048 counts a request, and a prompt shared by all would be reported as its
first block); items a run instead of a request (a request would be counted in several rows).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from collector.analytics import prefix_trie
from collector.analytics.attributed import WINDOW_S, Attributed, Rows
from schemas.causes import AVOIDABLE, LOSSES, Cause
from schemas.tables.losses import PREFIXES

COUNTED = frozenset(LOSSES) - {Cause.FIRST_SEEN, Cause.GRANULARITY}
"""Causes of tokens that were computed before, or could have been kept alike, so that somebody may act on them."""
NODES = 2048
"""Prefixes a pool and window that are followed at once."""
LABEL_SPACE = 1 << 19
"""Block names a pool and window that the trie's edges may hold: 256 a node."""
KINDS, STRINGS = 256, 4096
"""Combinations of model, route, tenant and template, and different strings, a pool and window; what comes after is told as NULL."""
POOLS, TRIES, SETTLED_WINDOWS = 16, 48, 288
"""Most at once; what comes beyond a day of settled windows, as of a clock gone wild, counts in the newest open one."""
SHARE = 0.01
ROWS = 200
"""Most rows a window."""
LEAST_REQUESTS = 2
ROOT_PREFIX = 0
_VARIOUS = 0
"""Number of the string, or kind, that stands for too many to tell apart."""
_NONE = 1
_ID_CHARACTERS = 256

Copies = Callable[[int], int | None]


def unknown(_prefix: int) -> None:
    """For a question that nobody answers: NULL."""


class Hotspots:
    """copies: how many workers hold the whole prefix of this hash now; None: not known. A prefix has the snippet of its newest request."""

    tables = (PREFIXES.name,)

    def __init__(self, copies: Copies = unknown, *, nodes: int = NODES, share: float = SHARE) -> None:
        self._copies, self._nodes, self._share = copies, nodes, share
        self._windows: dict[int, dict[str | None, _Pool]] = {}
        self._settled: dict[int, Rows] = {}
        """Rows of windows whose tries are gone, but which are not closed yet."""
        self._closed = 0
        """Windows before this number are closed."""

    def take(self, requests: Sequence[Attributed]) -> None:
        groups: dict[tuple[int, str | None], list[Attributed]] = {}
        for r in requests:
            window = self._window_of(r)
            pools = self._windows.setdefault(window, {})
            pool = r.pool if r.pool in pools or len(pools) < POOLS else None
            if pool not in pools:
                if sum(map(len, self._windows.values())) >= TRIES:
                    self._count(groups)
                    groups = {}
                    self._settle(min(w for w in self._windows if w != window))
                pools[pool] = _Pool(self._nodes)
            groups.setdefault((window, pool), []).append(r)
        self._count(groups)

    def _count(self, groups: Mapping[tuple[int, str | None], Sequence[Attributed]]) -> None:
        for (window, pool), found in groups.items():
            self._windows[window][pool].take(found)

    def _window_of(self, r: Attributed) -> int:
        """The window in which it counts; it may not be open yet."""
        window = max(self._closed, int(r.prefill_s // WINDOW_S))
        if window in self._windows:
            return window
        if not self._windows:
            return window if window not in self._settled else max(self._settled) + 1
        if window in self._settled or (self._settled and window < min(self._windows)):
            return min(self._windows)
        return window if len(self._settled) < SETTLED_WINDOWS else max(self._windows)

    def _settle(self, window: int) -> None:
        self._settled[window] = self._rows(window)
        del self._windows[window]

    def live(self) -> Mapping[str, Rows]:
        return {PREFIXES.name: [row for window in self._held() for row in self._rows(window)]}

    def _held(self) -> list[int]:
        return sorted(self._windows.keys() | self._settled.keys())

    def close(self, before_s: float) -> Mapping[str, Rows]:
        self._closed = max(self._closed, int(before_s // WINDOW_S))
        rows: Rows = []
        for window in [w for w in self._held() if w < self._closed]:
            rows += self._rows(window)
            self._windows.pop(window, None)
            self._settled.pop(window, None)
        return {PREFIXES.name: rows}

    def _rows(self, window: int) -> Rows:
        if window in self._settled:
            return self._settled[window]
        found = [
            (-spot["lost_tokens"], pool or "", spot["prefix"], {"pool": pool, **spot})
            for pool, trie in self._windows[window].items()
            for spot in trie.spots(self._share)
        ]
        rows: Rows = []
        for *_, spot in sorted(found, key=lambda f: f[:3])[:ROWS]:
            prefix = spot["prefix"]
            spot |= {"window_start": window * WINDOW_S * 1_000_000, "window_s": WINDOW_S, "copies": None}
            if prefix == ROOT_PREFIX:
                spot["snippet"] = None
            else:
                spot["copies"] = self._copies(prefix)
            rows.append(tuple(spot[c.name] for c in PREFIXES.columns))
        return rows

    def save(self) -> Mapping[str, npt.NDArray[Any]]:
        out: dict[str, npt.NDArray[Any]] = {}
        names: list[dict[str, Any]] = []
        for window, pools in self._windows.items():
            for pool, trie in pools.items():
                out |= {f"{len(names)}.{key}": array for key, array in trie.arrays().items()}
                names.append({"window": window, "pool": pool, **trie.names()})
        kept = json.dumps({"closed": self._closed, "windows": list(self._windows), "settled": list(self._settled.items()), "pools": names})
        return {**out, "names": np.frombuffer(kept.encode(), np.uint8).copy()}

    def load(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        kept = json.loads(saved["names"].tobytes())
        self._closed = kept["closed"]
        self._windows = {window: {} for window in kept["windows"]}
        self._settled = {window: [tuple(row) for row in rows] for window, rows in kept["settled"]}
        for i, names in enumerate(kept["pools"]):
            pool = self._windows[names["window"]][names["pool"]] = _Pool(self._nodes)
            pool.load({key.partition(".")[2]: array for key, array in saved.items() if key.startswith(f"{i}.")}, names)

    def held_bytes(self) -> int:
        """Room taken, used or not."""
        return sum(array.nbytes for pools in self._windows.values() for pool in pools.values() for array in pool.trie)


class _Pool:
    """The trie of one pool and window, and the strings of its labels."""

    def __init__(self, nodes: int) -> None:
        self.trie = prefix_trie.make(nodes, KINDS, LABEL_SPACE)
        self._strings: dict[str | None, int] = {"\0": _VARIOUS, None: _NONE}
        self._kinds: dict[tuple[int, int, int, int], int] = {(_VARIOUS,) * 4: _VARIOUS}
        self._workers: dict[tuple[str, int | None], int] = {}
        self._serial = 1
        self._ids: dict[int, tuple[str, str | None]] = {}
        self._spots: list[dict[str, Any]] | None = None

    def take(self, requests: Sequence[Attributed]) -> None:
        self._spots = None
        n = len(requests)
        labels = np.empty((n, prefix_trie.LABELS), np.int64)
        workers, block_sizes = np.empty(n, np.int64), np.empty(n, np.int64)
        for i, r in enumerate(requests):
            parts = (self._number(r.model), self._number(r.route), self._number(r.tenant), self._number(r.template))
            kind = self._kinds.get(parts)
            if kind is None:
                kind = self._kinds[parts] = len(self._kinds) if len(self._kinds) < KINDS else _VARIOUS
                if kind == _VARIOUS:
                    del self._kinds[parts]
            labels[i] = (kind, *parts)
            workers[i] = self._worker(r)
            block_sizes[i] = r.block_size
            self._ids[self._serial + i] = r.request_id[:_ID_CHARACTERS], r.snippet
        known = [r if r.hit_tokens is not None else None for r in requests]
        prefix_trie.add(
            self.trie,
            _COUNTED,
            _joined([r.chain for r in requests], np.uint64),
            np.cumsum([len(r.chain) for r in requests]),
            _joined([r.causes for r in requests], np.uint8),
            _joined([r.gone_s for r in requests], np.float32),
            _joined([r.idle_s for r in requests], np.float32),
            _joined([r.run_causes for r in known if r is not None], np.uint8),
            _joined([r.run_tokens for r in known if r is not None], np.uint32),
            _joined([r.run_seconds for r in known if r is not None], np.float64),
            np.cumsum([0 if r is None else len(r.run_causes) for r in known]),
            labels,
            workers,
            block_sizes,
            self._serial,
        )
        self._serial += n
        if len(self._ids) > 4 * len(self.trie.said):
            kept = set(self.trie.said["newest"].tolist())
            self._ids = {serial: said for serial, said in self._ids.items() if serial in kept}

    def _number(self, text: str | None) -> int:
        found = self._strings.get(text)
        if found is None:
            if len(self._strings) >= STRINGS:
                return _VARIOUS
            found = self._strings[text] = len(self._strings)
        return found

    def _worker(self, r: Attributed) -> int:
        """A bit number; the 64th and all further workers share one."""
        key = (r.worker, r.rank)
        found = self._workers.get(key)
        if found is None:
            if len(self._workers) >= 64:
                return 63
            found = self._workers[key] = len(self._workers)
        return found

    def spots(self, share: float) -> list[dict[str, Any]]:
        """Values of `PREFIXES` by column, without those that the window or somebody else knows."""
        if self._spots is None:
            self._spots = self._find(share)
        return [dict(spot) for spot in self._spots]

    def _find(self, share: float) -> list[dict[str, Any]]:
        n = self.trie.n
        threshold = max(1, int(np.ceil(share * int(n[prefix_trie.WEIGHT]))))
        said, heavy, total, mixed = prefix_trie.heavy(self.trie, threshold, LEAST_REQUESTS)
        strings = list(self._strings)
        out = []
        root_error = mixed
        for v in np.flatnonzero(heavy).tolist():
            node = said.node[v]
            above = int(node["parent"])
            while above >= 0 and not heavy[above]:
                above = int(said.node["parent"][above])
            root_error += int(node["error"]) if above < 0 else 0
            out.append(
                {
                    "prefix": int(node["name"]),
                    "parent_prefix": int(said.node["name"][above]) if above >= 0 else None,
                    "depth_tokens": int(node["depth"] * node["block_size"]),
                    "total_tokens": int(total[v]),
                    "error_tokens": int(node["error"]),
                    **self._facts(said, v, strings),
                }
            )
        kinds = list(self._kinds)
        for kind in range(KINDS):
            row = len(said.node) + kind
            lost = int(said.said["tokens"][row].sum())
            if lost < threshold or said.said["requests"][row] < LEAST_REQUESTS:
                continue
            spot = self._facts(said, row, strings)
            spot |= dict(zip(_LABELS, (_label(strings, part) for part in kinds[kind]), strict=True))
            root = {"prefix": ROOT_PREFIX, "parent_prefix": None, "depth_tokens": 0, "total_tokens": lost, "error_tokens": root_error}
            out.append(root | spot)
        return out

    def _facts(self, said: prefix_trie.Trie, row: int, strings: Sequence[str | None]) -> dict[str, Any]:
        of = said.said[row]
        tokens = of["tokens"]
        by_cause = sorted(((int(tokens[c]), c) for c in COUNTED if tokens[c]), key=lambda found: (-found[0], found[1]))
        parts = [int(of["labels"][i]) if of["votes"][i] else _VARIOUS for i in range(1, prefix_trie.LABELS)]
        known = int(of["seconds_tokens"])
        example, snippet = self._ids.get(int(of["newest"]), (None, None))
        return {
            **dict(zip(_LABELS, (_label(strings, part) for part in parts), strict=True)),
            "lost_tokens": int(tokens.sum()),
            "requests": int(of["requests"]),
            "avoidable_tokens": sum(n for n, c in by_cause if c in AVOIDABLE),
            "top_cause": by_cause[0][1].label,
            "by_cause": [{"cause": c.label, "tokens": n} for n, c in by_cause],
            "lost_s": float(of["seconds"]) if known else None,
            "workers": int(of["workers"]).bit_count(),
            "gone_p50_s": _median_s(of["times"][0]),
            "idle_p50_s": _median_s(of["times"][1]),
            "example_request_id": example,
            "snippet": snippet,
        }

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        arrays = {name: getattr(self.trie, name).copy() for name in self.trie._fields}
        return {**arrays, "names": self.trie.names[: self.trie.n[prefix_trie.END]].copy()}

    def names(self) -> dict[str, Any]:
        kept = set(self.trie.said["newest"].tolist())
        return {
            "strings": list(self._strings),
            "kinds": list(self._kinds),
            "workers": list(self._workers),
            "serial": self._serial,
            "ids": [(serial, *said) for serial, said in self._ids.items() if serial in kept],
        }

    def load(self, arrays: Mapping[str, npt.NDArray[Any]], names: Mapping[str, Any]) -> None:
        block_names = np.zeros_like(self.trie.names)
        block_names[: len(arrays["names"])] = arrays["names"]
        self.trie = prefix_trie.Trie(
            **{name: arrays[name].copy() for name in prefix_trie.Trie._fields if name != "names"}, names=block_names
        )
        self._strings = {text: i for i, text in enumerate(names["strings"])}
        self._kinds = {tuple(parts): i for i, parts in enumerate(names["kinds"])}
        self._workers = {(worker, rank): i for i, (worker, rank) in enumerate(names["workers"])}
        self._serial, self._ids = names["serial"], {serial: (request_id, snippet) for serial, request_id, snippet in names["ids"]}


_LABELS = ("model", "route", "tenant", "template")
_COUNTED = np.array([c in COUNTED for c in Cause])


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)


def _label(strings: Sequence[str | None], number: int) -> str | None:
    return None if number == _VARIOUS else strings[number]


def _median_s(histogram: npt.NDArray[Any]) -> float | None:
    upto = np.cumsum(histogram, dtype=np.int64)
    if not upto[-1]:
        return None
    return prefix_trie.bucket_middle_s(int(np.searchsorted(upto, (upto[-1] + 1) // 2)))
