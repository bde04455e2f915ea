"""How many blocks were found at each stack distance and age: the reuse curve of some requests, exact at every capacity.

Distances come in runs (blocks used together lie side by side), so the histogram is kept as its differences:

    12 blocks at distances 101 .. 112    ->    at 101: +12/12, at 113: -1 a distance        events (distance, change)

Curve(C) = blocks at distances <= C = sum over events at <= C of change * (C - distance + 1): one cumulative sum reads it at any capacities.

Each change has three columns: blocks, tokens, and the variance that sampling adds (0 of exact ones). Ages are counted in bins of fixed
lifetimes.

Memory: 32 bytes an event. After every 65,536 events written, if more than half as many differ, distances are rounded up to multiples of
1/512 of their power of two, and the curve tells within which bounds it lies then. So one histogram holds at most 6 MB plus one request's
events, usually some kB. When it rounds depends on what was counted alone, not on when it was read or saved.

Rejected: fixed bins of distances (never exact at today's capacity, which nobody knows when the request is counted).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

MAX_EVENTS = 1 << 15
WRITTEN = 1 << 16
_DIGITS = 9
TAIL_DIGITS = 11
"""Binary digits that distances beyond the exact ones have (stack_distance.py)."""
ENDLESS = 1 << 40
"""A capacity above all distances."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """At each capacity (or lifetime), shape (points,)."""

    blocks: F64
    tokens: F64
    error_blocks: F64
    """Bound or estimate (two standard errors) of the error of blocks; 0: exact."""
    sampled: npt.NDArray[np.bool_]
    """Beyond what the tracking keeps complete."""
    rounded: npt.NDArray[np.bool_]
    """Distances were rounded."""


class ReuseHistogram:
    """ttl_ticks: ages up to which blocks are counted apart, ascending, shape (bins,)."""

    def __init__(self, ttl_ticks: I64) -> None:
        self.ttl_ticks = ttl_ticks
        self.ttl: I64 = np.zeros((len(ttl_ticks) + 1, 3), np.int64)
        """Blocks, tokens, variance of each age bin; the last is of all older ones."""
        self.repeats: I64 = np.zeros(256, np.int64)
        """Requests that were sampled, by a hash of the first block that was."""
        self._at: I64 = np.empty(64, np.int64)
        self._mass: I64 = np.empty((64, 3), np.int64)
        self._used = 0
        self._merged = 0
        self._written = 0
        self._rounded = False
        self._exact_to = ENDLESS
        self._weight = 1
        self.requests = 0
        self.prompt_tokens = 0
        self.prompt_blocks = 0

    def demand(self, prompt_tokens: int, prompt_blocks: int) -> None:
        """Counts a request's prompt, the denominator."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.prompt_blocks += prompt_blocks

    def add(self, at: I64, mass: I64, exact_to: int | None = None, weight: int = 1) -> None:
        """Counts events: distances, shape (events,), and changes from there on, shape (events, 3).

        exact_to: distances up to this are exact (None: all), and others are of blocks that stand for `weight` blocks.
        """
        if self._written >= WRITTEN:
            self._written = 0
            self._merge()
            if self._used > MAX_EVENTS:
                self._round()
        end = self._used + len(at)
        if end > len(self._at):
            self._merge()
            end = self._used + len(at)
            room = np.empty(1 << (2 * end).bit_length(), np.int64), np.empty((1 << (2 * end).bit_length(), 3), np.int64)
            room[0][: self._used], room[1][: self._used] = self._at[: self._used], self._mass[: self._used]
            self._at, self._mass = room
        self._at[self._used : end], self._mass[self._used : end] = at, mass
        self._used = end
        self._written += len(at)
        if exact_to is not None:
            self._exact_to = min(self._exact_to, exact_to)
            self._weight = max(self._weight, weight)

    def _merge(self) -> None:
        """Sorts the events; those of one distance become one."""
        if self._merged == self._used:
            return
        order = np.argsort(self._at[: self._used], kind="stable")
        at = self._at[order]
        first = np.flatnonzero(np.concatenate(([True], at[1:] != at[:-1])))
        at, mass = at[first], np.add.reduceat(self._mass[order], first, axis=0)
        kept = mass.any(axis=1)
        self._used = self._merged = int(kept.sum())
        self._at[: self._used], self._mass[: self._used] = at[kept], mass[kept]

    def _round(self) -> None:
        """Blocks at distances between two multiples count at the upper one."""
        top = int(self._at[self._used - 1])
        edges = [np.arange(1, 2 << _DIGITS, dtype=np.int64)]
        while edges[-1][-1] < top:
            edges.append(np.arange(1 << _DIGITS, 1 << _DIGITS + 1, dtype=np.int64) << len(edges))
        at = np.concatenate(edges)
        mass = np.diff(self._read(at), axis=0, prepend=np.zeros((1, 3), np.int64))
        kept = mass.any(axis=1)
        at, mass = at[kept], mass[kept]
        self._at, self._mass = np.concatenate((at, at + 1)), np.concatenate((mass, -mass))
        self._used, self._merged, self._rounded = len(self._at), 0, True
        self._merge()

    def _read(self, capacities: I64) -> I64:
        """Blocks, tokens, variance at distances <= each capacity, shape (points, 3)."""
        self._merge()
        at, mass = self._at[: self._used], self._mass[: self._used]
        level = np.vstack((np.zeros((1, 3), np.int64), np.cumsum(mass, axis=0)))
        moment = np.vstack((np.zeros((1, 3), np.int64), np.cumsum(mass * (at[:, None] - 1), axis=0)))
        k = np.searchsorted(at, capacities, side="right")
        return np.asarray(level[k] * capacities[:, None] - moment[k], np.int64)

    def curve(self, capacities: I64) -> Curve:
        """What LRU caches of these sizes (blocks) would have hit."""
        found = self._read(capacities)
        sampled = capacities > self._exact_to
        error = np.zeros(len(capacities))
        if self._rounded:
            above = np.where(capacities < 2 << _DIGITS, capacities, capacities + (capacities >> _DIGITS) + 1)
            error += self._read(above)[:, 0] - found[:, 0]
        if sampled.any():
            # A distance in the tail is a count of n sampled blocks times weight: its standard error is weight * sqrt(n).
            beyond = np.maximum(capacities - self._exact_to, 0)
            shift = np.ceil(2 * np.sqrt(beyond * (self._weight - 1.0))).astype(np.int64) + (capacities >> TAIL_DIGITS - 1)
            near = self._read(np.concatenate((capacities + shift, np.maximum(capacities - shift, self._exact_to))))[:, 0]
            drift = np.abs(near.reshape(2, -1) - found[:, 0]).max(axis=0)
            error += np.where(sampled, drift + self._sampling_error(found[:, 2]), 0)
        return Curve(found[:, 0].astype(float), found[:, 1].astype(float), error, sampled, np.full(len(capacities), self._rounded))

    def ttl_curve(self) -> Curve:
        """What a cache would have hit that forgets blocks so long after their last use, at each of ttl_ticks."""
        found = np.cumsum(self.ttl[:-1], axis=0)
        sampled = np.full(len(found), self._exact_to < ENDLESS)
        error = np.where(sampled, self._sampling_error(found[:, 2]), 0.0)
        return Curve(found[:, 0].astype(float), found[:, 1].astype(float), error, sampled, np.zeros(len(found), np.bool_))

    def _sampling_error(self, variance: I64) -> F64:
        """Two standard errors; one request more than was found counts, so that nothing found is no certainty.

        Requests for the same blocks err together: of r_b requests for block b the variance is r_b**2 times that of one, not r_b times. So
        it is multiplied by sum(r_b**2) / sum(r_b), told from the second moment of the hashed counters (two blocks meet in one of m
        counters by a chance of 1 / m, which is taken off).
        """
        n, m = int(self.repeats.sum()), len(self.repeats)
        squares = (float((self.repeats.astype(float) ** 2).sum()) - n * n / m) / (1 - 1 / m)
        together = max(1.0, squares / n) if n else 1.0
        return np.asarray(2 * np.sqrt(together * variance + self._weight * (self._weight - 1.0)), np.float64)

    def save(self) -> tuple[I64, I64]:
        """Counters, shape (8,), and events, ages and repeats as rows of four."""
        self._merge()
        events = np.column_stack((self._at[: self._used], self._mass[: self._used]))
        ages = np.column_stack((np.zeros(len(self.ttl), np.int64), self.ttl))
        head = [self._used, int(self._rounded), self._written, self._exact_to, self._weight]
        head += [self.requests, self.prompt_tokens, self.prompt_blocks]
        return np.array(head, np.int64), np.concatenate((events, ages, self.repeats.reshape(-1, 4))).astype(np.int64)

    def load(self, head: I64, rows: I64) -> None:
        used = int(head[0])
        self._at, self._mass = rows[:used, 0].copy(), rows[:used, 1:].copy()
        self.ttl = rows[used : used + len(self.ttl), 1:].copy()
        self.repeats = rows[used + len(self.ttl) :].reshape(-1).copy()
        self._used = self._merged = used
        self._rounded = bool(head[1])
        self._written, self._exact_to, self._weight, self.requests, self.prompt_tokens, self.prompt_blocks = (int(x) for x in head[2:])

    def held_bytes(self) -> int:
        return self._at.nbytes + self._mass.nbytes + self.ttl.nbytes
