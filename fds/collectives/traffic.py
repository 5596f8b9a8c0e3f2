"""Count how often each collective was started, and how many bytes this rank sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import attrs

from fds.collectives import worlds
from fds.collectives.links import Collective, Work
from fds.collectives.reductions import bytes_sent


@attrs.frozen
class Count:
    """The number of collectives of one kind on one axis, and their bytes."""

    calls: int = 0
    bytes_sent: int = 0  # by this rank: `fds.collectives.reductions.bytes_sent`


@attrs.define(eq=False)
class Traffic:
    """Counts by (operation, name of the axis)."""

    counts: dict[tuple[str, str], Count] = attrs.field(factory=dict)

    def __getitem__(self, op_and_axis: tuple[str, str]) -> Count:
        """Return the count of an operation on an axis; zeros if there was none."""
        return self.counts.get(op_and_axis, Count())

    @property
    def bytes_sent(self) -> int:
        """Total number of bytes that this rank sent."""
        return sum(count.bytes_sent for count in self.counts.values())

    def add(self, collective: Collective, size: int, index: int) -> None:
        """Count one collective of the rank with coordinate `index` on an axis of `size` ranks."""
        old = self[collective.op, collective.axis]
        new = Count(old.calls + 1, old.bytes_sent + bytes_sent(collective, size, index))
        self.counts[collective.op, collective.axis] = new

    def watched(self, collective: Collective, work: Work) -> Work:
        """Return what is waited for in the place of a collective that was started: itself."""
        return work


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Count the collectives that this rank starts in the block, including those of backward passes.

    Collectives on an axis of one rank do not count. Blocks may be nested; each counts everything inside it.
    """
    traffic = Traffic()
    with counting(traffic):
        yield traffic


@contextlib.contextmanager
def counting(traffic: Traffic) -> Iterator[None]:
    """Have `traffic` count the collectives that this rank starts in the block, and watch them."""
    counters = worlds.current().counters
    counters.append(traffic)
    try:
        yield
    finally:
        counters.remove(traffic)
