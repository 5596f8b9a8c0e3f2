"""A curve of bounded length, smoothed, and drawn as a line of blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
MOST = 2048  # points that a curve keeps


class Curve:
    """The running mean of a number, weighted by powers of `decay`, and its history, thinned out as it grows."""

    def __init__(self, *, decay: float = 0.97):
        self.decay = decay
        self.points: list[float] = []
        self._total = self._weight = 0.0
        self._every, self._seen = 1, 0

    @property
    def value(self) -> float:
        """The running mean; NaN before the first finite number."""
        return self._total / self._weight if self._weight else math.nan

    def add(self, number: float) -> float:
        """Add a number, and return the running mean; numbers that are not finite are passed over."""
        if math.isfinite(number):
            self._total = self.decay * self._total + number
            self._weight = self.decay * self._weight + 1
        if self._weight and self._seen % self._every == 0:
            self.points.append(self.value)
            if len(self.points) > MOST:
                self.points, self._every = self.points[::2], 2 * self._every
        self._seen += 1
        return self.value


def smoothed(numbers: Iterable[float], *, decay: float = 0.97) -> list[float]:
    """Return the running means of numbers.

    >>> smoothed([2.0, float("nan"), 2.0])
    [2.0, 2.0, 2.0]
    """
    curve = Curve(decay=decay)
    return [curve.add(number) for number in numbers]


def spark(points: Sequence[float], *, width: int) -> str:
    """Draw points as a line of at most `width` blocks.

    >>> spark([3.0, 2.0, 1.0], width=3)
    '█▅▁'
    """
    picked = [points[i * len(points) // width] for i in range(width)] if len(points) > width else points
    low, high = min(picked, default=0.0), max(picked, default=0.0)
    return "".join(BLOCKS[round(7 * (x - low) / (high - low)) if high > low else 0] for x in picked)
