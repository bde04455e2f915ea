"""Simpler rules than the cost model: what other routers do, to choose by or to hold ours against (shadows.py). Pure.

| policy | rule |
|---|---|
| random | anyone |
| round_robin | the next one by number |
| least_loaded | the fewest requests in flight, ties at random |
| session_hash | the highest hash of (key, worker); key: the session, without one the prompt's first block, without one anyone |
| bounded_load_hash | the same order, first worker below ceil(1.25 * (requests in flight + 1) / workers) (consistent hashing with bounded loads); without a key: least loaded |
| cache_aware | SGLang's thresholds: in flight max - min > 64 and max > 1.5 * min: least loaded; else the longest prefix if it is over 0.3 of the prompt; else the worker that was given the fewest new tokens |
| max_prefix | the longest prefix, ties least loaded |

Hashing is by rendezvous, not by a ring: the order of a key's workers changes only by those that come or go, with no virtual nodes to
tune. Prefixes are those of our index (confirmed where it can be trusted, and expected), so a baseline here is better informed than its
original, which guesses from its own decisions: what it does worse is the rule's own doing.
"""  # noqa: E501 - a table row

from __future__ import annotations

import math
import random

import numba
import numpy as np

from router.policy.choice import Choice, least
from router.policy.cost import F64, I64, U64, Situation, Terms, most_cached_tokens


def overlap(now: Situation) -> I64:
    """Valid prefix tokens by worker: confirmed ones unless the index is blind there, and expected ones."""
    out = np.empty(len(now.expected), np.int64)
    most = most_cached_tokens(now.prompt_tokens, now.block_size)
    _overlap(now.gpu, now.cpu, now.disk, now.expected, now.trust, most, out)
    return out


@numba.njit(cache=True)
def _overlap(gpu, cpu, disk, expected, trust, most, out):  # type: ignore[no-untyped-def]
    for w in range(len(out)):
        out[w] = min(expected[w] - (gpu[w] + cpu[w] + disk[w] if trust[w] == 0 else 0), most)


class Random:
    name = "random"
    version = "1"

    def choose(self, now: Situation, terms: Terms, rng: random.Random) -> Choice | None:
        able = np.flatnonzero(now.allowed)
        return Choice(int(able[rng.randrange(len(able))]), None) if len(able) else None


class RoundRobin:
    """One after the other, leaving out who is not allowed."""

    name = "round_robin"
    version = "1"

    def __init__(self) -> None:
        self._next = 0

    def choose(self, now: Situation, terms: Terms, rng: random.Random) -> Choice | None:
        able = np.flatnonzero(now.allowed)
        if not len(able):
            return None
        after = np.searchsorted(able, self._next)
        worker = int(able[after if after < len(able) else 0])
        self._next = worker + 1
        return Choice(worker, None)


class LeastLoaded:
    """The fewest requests in flight, whatever they hold."""

    name = "least_loaded"
    version = "1"

    def choose(self, now: Situation, terms: Terms, rng: random.Random) -> Choice | None:
        return _fewest(now, rng)


class SessionHash:
    """Sticky, without any load in it."""

    name = "session_hash"
    version = "1"

    def choose(self, now: Situation, terms: Terms, rng: random.Random) -> Choice | None:
        key = _key(now)
        if key is None:
            return Random().choose(now, terms, rng)
        worker = _rendezvous(np.uint64(key), now.keys, now.allowed)
        return None if worker < 0 else Choice(worker, None)


class BoundedLoadHash:
    """Sticky until its worker has more than its share of what is in flight."""

    name = "bounded_load_hash"
    version = "1"
    bound = 1.25

    def choose(self, now: Situation, terms: Terms, rng: random.Random) -> Choice | None:
        workers = int(now.allowed.sum())
        key = _key(now)
        if not workers or key is None:
            return _fewest(now, rng)
        most = math.ceil(self.bound * (int(now.in_flight[now.allowed].sum()) + 1) / workers)
        worker = _rendezvous(np.uint64(key), now.keys, now.allowed & (now.in_flight < most))
        return Choice(worker, None)  # somebody is below 1.25 times the mean


class CacheAware:
    """The threshold rule. What was given to a worker is halved for all now and then, so that the past fades and who joins is not flooded
    for ever."""

    name = "cache_aware"
    version = "1"
    balance_abs, balance_rel, match_share = 64, 1.5, 0.3
    fade_every = 1024

    def __init__(self) -> None:
        self._given: F64 = np.zeros(0)
        self._keys: U64 = np.zeros(0, np.uint64)
        self._chosen = 0

    def choose(self, now: Situation, terms: Terms, rng: random.Random) -> Choice | None:
        if not now.allowed.any():
            return None
        self._meet(now.keys)
        tokens = overlap(now)
        choice = self._rule(now, tokens, rng)
        if choice is not None:
            self._given[choice.worker] += max(0, now.prompt_tokens - int(tokens[choice.worker]))
            self._chosen += 1
            if self._chosen % self.fade_every == 0:
                self._given *= 0.5
        return choice

    def _meet(self, keys: U64) -> None:
        """Whoever is new at its number was given nothing."""
        if keys is self._keys:
            return
        given, both = np.zeros(len(keys)), min(len(keys), len(self._keys))
        given[:both] = np.where(keys[:both] == self._keys[:both], self._given[:both], 0.0)
        self._given, self._keys = given, keys

    def _rule(self, now: Situation, tokens: I64, rng: random.Random) -> Choice | None:
        flights = now.in_flight[now.allowed]
        high, low = int(flights.max()), int(flights.min())
        if high - low > self.balance_abs and high > self.balance_rel * low:
            return _fewest(now, rng)
        if int(tokens[now.allowed].max()) > self.match_share * now.prompt_tokens:
            return least(-tokens.astype(np.float64), now.allowed, 0.0, rng)
        return least(self._given.copy(), now.allowed, 0.0, rng)


class MaxPrefix:
    """The longest prefix; among equals the fewest in flight. Without any load in it: a warning, not a recommendation."""

    name = "max_prefix"
    version = "1"

    def choose(self, now: Situation, terms: Terms, rng: random.Random) -> Choice | None:
        return least(now.in_flight / (1.0 + now.in_flight.max(initial=0)) - overlap(now), now.allowed, 0.0, rng)


def _fewest(now: Situation, rng: random.Random) -> Choice | None:
    return least(now.in_flight.astype(np.float64), now.allowed, 0.0, rng)


def _key(now: Situation) -> int | None:
    return now.root if now.session is None else now.session


@numba.njit(cache=True)
def _rendezvous(key, workers, allowed):  # type: ignore[no-untyped-def]
    """The allowed worker with the highest hash of (key, worker), by the finalizer of splitmix64. -1: nobody."""
    best, highest = -1, np.uint64(0)
    for w in range(len(workers)):
        if allowed[w]:
            x = (key ^ workers[w]) + np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x ^= x >> np.uint64(31)
            if best < 0 or x > highest:
                best, highest = w, x
    return best
