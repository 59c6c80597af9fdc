"""Seconds between measured points.

A kernel's time is close to a sum of terms a + b x + c x y + d x y z in its sizes (calls, bytes, products). Between the points of
a grid, interpolation linear in every size is exact for such a sum, so points may lie far apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import product

Sizes = tuple[float, ...]


class Grid:
    """Times over a grid of sizes, each axis in rising order.

    Times never fall along an axis: a point that was measured faster than a smaller one takes that one's time. Points that were
    not measured go on at the rate of their largest smaller neighbour. Beyond the last point of an axis the rate stays what it
    is there; below the first the line through the first two goes on, but no faster than the first point's rate.
    """

    def __init__(self, seconds: Mapping[Sizes, float]) -> None:
        dimensions = len(next(iter(seconds)))
        self.axes = [sorted({sizes[i] for sizes in seconds}) for i in range(dimensions)]
        self.seconds: dict[Sizes, float] = {}
        for sizes in product(*self.axes):
            below = []
            for i, axis in enumerate(self.axes):
                at = bisect_left(axis, sizes[i])
                if at:
                    smaller = (*sizes[:i], axis[at - 1], *sizes[i + 1 :])
                    below.append((self.seconds[smaller], sizes[i] / axis[at - 1]))
            measured = seconds.get(sizes)
            if measured is None:
                assert below, "a grid needs its smallest point"
                measured = max(s * ratio for s, ratio in below)
            self.seconds[sizes] = max([measured, *(s for s, _ in below)])

    def at(self, *sizes: float) -> float:
        """Seconds at these sizes; 0 where one of them is 0."""
        return self._along((), sizes) if all(sizes) else 0.0

    def _along(self, fixed: Sizes, sizes: Sizes) -> float:
        if not sizes:
            return self.seconds[fixed]
        axis, x = self.axes[len(fixed)], sizes[0]
        if x >= axis[-1]:
            return self._along((*fixed, axis[-1]), sizes[1:]) * x / axis[-1]
        if x <= axis[0] and len(axis) == 1:
            return self._along((*fixed, axis[0]), sizes[1:]) * x / axis[0]
        at = max(bisect_left(axis, x), 1)
        low, high = axis[at - 1], axis[at]
        a, b = (self._along((*fixed, edge), sizes[1:]) for edge in (low, high))
        between = a + (b - a) * (x - low) / (high - low)
        return max(between, a * x / low) if x < low else between
