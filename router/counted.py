"""Counters and histograms that requests touch: plain numbers in dicts, turned into Prometheus' form when somebody asks for them.

prometheus_client's own take a lock, look up a child and check it each time, 2 to 4 us a number, some ten numbers a request. Here it is a
third of a microsecond. For the event loop's thread alone, which also answers /metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Labels = tuple[str, ...]


class Counted(Collector):
    """A counter with labels: by their values."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, labels: Sequence[str]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self.by: defaultdict[Labels, float] = defaultdict(float)
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in self.by.items():
            family.add_metric(labels, value)
        yield family


class Measured(Collector):
    """A histogram with or without labels; without any it is there from the start. buckets: upper bounds, in order."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, tuple(map(float, buckets))
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        if not labels:
            self._begin(())
        registry.register(self)

    def observe(self, value: float, labels: Labels = ()) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._begin(labels)
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def _begin(self, labels: Labels) -> list[int]:
        counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
        self._sums[labels] = 0.0
        return counts

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, counts in self._counts.items():
            total, buckets = 0, []
            for bound, count in zip((*map(str, self._bounds), "+Inf"), counts, strict=True):
                total += count
                buckets.append((bound, float(total)))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family
