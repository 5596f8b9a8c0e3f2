"""Traffic: how often each collective was called and how many bytes this rank sent, for whoever asks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import attrs

from fds.collectives import worlds
from fds.collectives.calls import Call
from fds.collectives.reductions import bytes_sent


@attrs.frozen
class Count:
    """Calls of one collective on one axis."""

    calls: int = 0
    bytes_sent: int = 0  # by this rank: `fds.collectives.reductions.bytes_sent`


@attrs.define(eq=False)
class Traffic:
    """What was counted, by (operation, name of the axis)."""

    counts: dict[tuple[str, str], Count] = attrs.field(factory=dict)

    def __getitem__(self, op_and_axis: tuple[str, str]) -> Count:
        """Return the count of an operation on an axis; zeros where there was no call."""
        return self.counts.get(op_and_axis, Count())

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent, in all."""
        return sum(count.bytes_sent for count in self.counts.values())

    def add(self, call: Call, size: int, index: int) -> None:
        """Count one call of a rank with coordinate `index` on an axis of `size` ranks."""
        old = self[call.op, call.axis]
        new = Count(old.calls + 1, old.bytes_sent + bytes_sent(call, size, index))
        self.counts[call.op, call.axis] = new


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Count the collectives that this rank starts in the block, those of backward passes included.

    An axis of one rank starts none. Blocks may nest; each counts all that is inside it.
    """
    traffic, counters = Traffic(), worlds.current().counters
    counters.append(traffic)
    try:
        yield traffic
    finally:
        counters.remove(traffic)
