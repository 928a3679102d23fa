"""Histogram: counts values by bucket, as Prometheus does."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence as Items
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts[i]` values were above `buckets[i - 1]` and at most `buckets[i]`; the last count is the rest."""

    buckets: tuple[float, ...]
    counts: tuple[int, ...]  # one more than buckets; not cumulative
    sum: float
    count: int


def added(histograms: Items[Histogram]) -> Histogram:
    """Return the values of several histograms with the same buckets in one."""
    buckets = histograms[0].buckets
    assert all(one.buckets == buckets for one in histograms), "the buckets differ"
    counts = tuple(sum(column) for column in zip(*(one.counts for one in histograms), strict=True))
    return Histogram(
        buckets, counts, sum(one.sum for one in histograms), sum(one.count for one in histograms)
    )


class Recorder:
    """Counts values for a histogram."""

    def __init__(self, buckets: Items[float]) -> None:
        assert list(buckets) == sorted(set(buckets)), f"buckets must rise: {buckets}"
        self._buckets = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count the value `count` times."""
        self._counts[bisect_left(self._buckets, value)] += count
        self._sum += value * count

    def histogram(self) -> Histogram:
        return Histogram(self._buckets, tuple(self._counts), self._sum, sum(self._counts))


def one_two_five(largest: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, … up to `largest`."""
    steps = (digit * 10**power for power in range(len(str(largest))) for digit in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= largest)


def at_least(counts: Items[int]) -> tuple[int, ...]:
    """Return, for each n, how many values were n or more; `counts[n]` is how many were exactly n."""
    return tuple(itertools.accumulate(reversed(counts)))[::-1]
