"""Free ranges of a line of bytes: taken, given back, and joined with their neighbours."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import attrs


@attrs.define(eq=False)
class Ranges:
    """Ranges that are free, sorted, no two of them adjacent.

    Attributes:
        nbytes: how many are free in all.
        last: the end of the range that was taken last: what is taken together lies together.
    """

    nbytes: int = 0
    last: int = 0
    _starts: list[int] = attrs.field(factory=list)
    _ends: list[int] = attrs.field(factory=list)

    def take(self, nbytes: int) -> int | None:
        """Take a range and return its start: behind the last one, else of the smallest that is large enough."""
        i = bisect_left(self._starts, self.last)
        if not (i < len(self._starts) and self._starts[i] == self.last and self._ends[i] - self.last >= nbytes):
            found = [(end - start, start) for start, end in zip(self._starts, self._ends, strict=True)]
            best = min((one for one in found if one[0] >= nbytes), default=None)
            if best is None:
                return None
            i = bisect_left(self._starts, best[1])
        start = self._starts[i]
        self._cut(i, start + nbytes)
        self.last = start + nbytes
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Give a range back, or add a new one."""
        i, end = bisect_left(self._starts, start), start + nbytes
        self.nbytes += nbytes
        if i < len(self._starts) and self._starts[i] == end:
            end = self._ends[i]
            del self._starts[i], self._ends[i]
        if i and self._ends[i - 1] == start:
            self._ends[i - 1] = end
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)

    def remove(self, start: int, nbytes: int) -> None:
        """Take a whole range of those that `__iter__` yields."""
        self._cut(bisect_left(self._starts, start), start + nbytes)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the start and the bytes of every range; ranges may be removed meanwhile."""
        return iter([(start, end - start) for start, end in zip(self._starts, self._ends, strict=True)])

    def _cut(self, i: int, start: int) -> None:
        """Let a range begin at `start`, if anything is left of it."""
        self.nbytes -= start - self._starts[i]
        self._starts[i] = start
        if start == self._ends[i]:
            del self._starts[i], self._ends[i]
