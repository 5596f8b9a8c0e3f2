"""Count how often each collective was started, and how many bytes this rank sent; say so beforehand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import attrs
import torch

from fds.collectives import worlds
from fds.collectives.axis import Axis
from fds.collectives.links import Collective, Work, bytes_sent


@attrs.frozen(order=True)
class MessageKind:
    """What messages have in common that are counted together.

    Attributes:
        what: what they are for: "gather", "reduce", "scalars" and so on; what an `exchange` was asked for, or a channel
            is called; empty for collectives on a plain axis, such as those of a loss.
        op: the operation: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "recv",
            "barrier", or "exchange", of texts on the host.
        axis: the name of the axis.
        ranks: how many it has.
        num_bytes: of the tensor that is sent; of the whole one in all_gather and reduce_scatter. 0 for texts.
    """

    what: str
    op: str
    axis: str
    ranks: int
    num_bytes: int

    @classmethod
    def of(cls, collective: Collective, size: int) -> MessageKind:
        """Return the kind of a collective between `size` ranks."""
        whole = size if collective.op in ("all_gather", "reduce_scatter") else 1
        num_bytes = 0 if collective.op == "exchange" else whole * collective.num_bytes
        return cls(collective.what, collective.op, collective.axis, size, num_bytes)


@attrs.frozen
class Expected:
    """Collectives that this rank is known to start, before it does."""

    axis: Axis
    collective: Collective
    count: int = 1
    bucket: int | None = None  # which flat bucket they carry
    at_most: bool = False  # whether there may be fewer

    @classmethod
    def of(
        cls,
        axis: Axis,
        op: str,
        numel: int = 0,
        dtype: torch.dtype = torch.uint8,
        *,
        count: int = 1,
        what: str = "",
        peer: int = -1,
        bucket: int | None = None,
        at_most: bool = False,
    ) -> Expected:
        """Expect so many collectives of flat tensors (numel,); see `Collective` for their shape."""
        collective = Collective(op, axis.name, (numel,), dtype, peer=peer, what=what or axis.purpose)
        return cls(axis, collective, count, bucket, at_most)

    @property
    def kind(self) -> MessageKind:
        """What they are counted as."""
        return MessageKind.of(self.collective, self.axis.size)

    @property
    def bytes_sent(self) -> int:
        """Total number of bytes that this rank sends; that of texts is not known before, and 0."""
        if self.collective.op == "exchange":
            return 0
        return self.count * bytes_sent(self.collective, self.axis.size, self.axis.index)


@attrs.frozen
class Count:
    """The number of collectives of one kind on one axis, and their bytes."""

    calls: int = 0
    bytes_sent: int = 0  # by this rank: `fds.collectives.links.bytes_sent`


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

    def add(self, collective: Collective, axis: Axis) -> None:
        """Count one collective that is about to start on an axis."""
        old = self[collective.op, collective.axis]
        new = Count(old.calls + 1, old.bytes_sent + bytes_sent(collective, axis.size, axis.index))
        self.counts[collective.op, collective.axis] = new

    def watched(self, collective: Collective, work: Work) -> Work:
        """Return what is waited for in the place of a collective that was added and started: itself."""
        return work

    def rehearsed(self, collective: Collective, axis: Axis, work: Work) -> Work:
        """Return what is waited for in the place of a collective that was rehearsed and does not count: itself."""
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
