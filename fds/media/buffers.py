"""Aligned memory that leaves are read into and written from: bounded, and used again."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque

from fds.media.mapping import map_memory, unmap
from fds.media.ranges import Ranges
from fds.media.tensors import owned

Slots = list[tuple[memoryview, int]]  # for every size that was asked for, memory and the offset in it


class Buffers:
    """Room for `count` requests of `nbytes` at once, taken from the system as it is first used.

    A request that is larger than `nbytes` makes room for as many of its size.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        self._count = count
        self._slab = _Slab(count * nbytes)
        self._lock = threading.Lock()

    def take(self, sizes: list[int]) -> Slots | None:
        """Return memory of sizes in whole pages, side by side where that fits; None where too much is held."""
        with self._lock:
            if (nbytes := sum(sizes) * self._count) > self._slab.nbytes:
                self._slab = _Slab(nbytes)  # the old one is unmapped with the last that is held of it
            return self._slab.take(sizes)


class _Slab:
    """Memory of which ranges are taken."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._base = map_memory(nbytes)
        self._ranges = Ranges()
        self._ranges.give(0, nbytes)
        self._dropped: deque[tuple[int, int]] = deque()
        weakref.finalize(self, unmap, self._base, nbytes).atexit = False

    def take(self, sizes: list[int]) -> Slots | None:
        while self._dropped:
            self._ranges.give(*self._dropped.popleft())
        if not sizes:
            return []
        if (whole := self._owned(sum(sizes))) is not None:
            return _side_by_side(whole, sizes)
        found = [self._owned(nbytes) for nbytes in sizes]
        return None if None in found else [(owner, 0) for owner in found if owner is not None]

    def _owned(self, nbytes: int) -> memoryview | None:
        start = self._ranges.take(nbytes)
        return None if start is None else owned(self._base + start, nbytes, self._give, start, nbytes)

    def _give(self, start: int, nbytes: int) -> None:
        self._dropped.append((start, nbytes))


def fresh(sizes: list[int]) -> Slots:
    """Return memory of sizes in whole pages that is given back to the system when nobody holds it."""
    nbytes = sum(sizes)
    address = map_memory(nbytes)
    owner = owned(address, nbytes, unmap, address, nbytes)
    return _side_by_side(owner, sizes)


def _side_by_side(owner: memoryview, sizes: list[int]) -> Slots:
    return [(owner, end - nbytes) for end, nbytes in zip(itertools.accumulate(sizes), sizes, strict=True)]
