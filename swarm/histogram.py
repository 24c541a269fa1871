"""Counts by size: what a histogram of Prometheus is made of, without its locks. For one thread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

# from the calls of a tiny model on one machine to chunks of a large one on a slow machine
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
POWERS_OF_TWO = tuple(2.0**exponent for exponent in range(11))


class Histogram:
    """``bounds`` rise; each belongs to the bucket below it, and one more bucket takes what is above the last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def __add__(self, other: Histogram) -> Histogram:
        """Of both; their bounds must be the same."""
        assert self.bounds == other.bounds
        both = Histogram(self.bounds)
        both.sum = self.sum + other.sum
        both._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        return both

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """Each bound with how many values were not above it; the last bound is infinite."""
        return list(zip((*self.bounds, float("inf")), accumulate(self._counts), strict=True))
