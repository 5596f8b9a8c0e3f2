"""Stage 3: buckets that are whole only while the loss uses them, in forward and again in backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fds.collectives import Work
from fds.errors import LossError
from fds.layout import Layout
from fds.step.pool import Pool
from fds.step.ranges import profiled
from fds.step.sharding.gather import Gather
from fds.step.sharding.handles import BucketWindow, handle
from fds.step.sharding.order import Order
from fds.step.sharding.shard import Shard
from fds.step.structure import Structure


class Live:
    """The buckets that are whole at the moment, never more than `max_live_bytes` of them.

    A bucket is gathered when an operator touches one of its parameters, by way of a handle, and stays until others
    have been used since. To evict it drops our reference: what a user still holds stays as it is.
    """

    def __init__(
        self, gather: Gather, shard: Shard, structure: Structure, parts: list[Tensor], pool: Pool, order: Order
    ):
        layout = structure.layout
        assert layout is not None
        self.gather, self.axis, self.layout, self.parts, self.pool = gather, shard.axis, layout, parts, pool
        self.order = order
        self.trained, self.ahead = set(structure.trained_names), max(1, shard.prefetch)
        self.used: dict[int, Tensor] = {}  # least recently used first
        self.coming: dict[int, tuple[Tensor, Work]] = {}  # under way, or arrived and not used yet
        self.wanted: int | None = None  # what an operator is waiting for
        self.viewed: tuple[Any, Tensor] | None = None  # what a view made of a parameter last, and by whom it is read
        self.over = False  # the step has ended
        self.bytes, self.capacity = gather.passing(layout, shard), gather.room(layout, shard)
        self.bound = self.capacity + shard.prefetch * max(self.bytes.values(), default=0)
        staying = [i for i in range(len(layout.buckets)) if i not in self.bytes]
        started = {i: gather.start(layout.buckets[i], parts[i], shard.axis, pool) for i in staying}
        for _, work in started.values():
            work.wait()
        self.staying = {i: flat for i, (flat, _) in started.items()}
        order.joins["gather"] = self.join
        if not structure.windows:
            structure.windows.extend(_windows(gather, layout))
        self.windows = structure.windows

    def handles(self, train: bool) -> list[Tensor]:
        """Return a handle for every parameter, in the order of the layout's names; with `train` autograd leaves."""
        found: list[list[Tensor]] = []
        for i, windows in enumerate(self.windows):
            device = self.parts[i].device
            found.append([handle(self, x, x.meta.dtype, device, train and x.path in self.trained) for x in windows])
        return self.layout.collect(found)

    def bucket(self, index: int) -> Tensor:
        """Return the whole bucket (numel,), gathered if it is not whole now."""
        if index in self.staying:
            return self.staying[index]
        if index in self.used:
            self.used[index] = flat = self.used.pop(index)
            return flat
        if self.over:
            raise LossError(
                "a parameter is read after its step",
                where=self.layout.buckets[index].leaves[0].name,
                got="a parameter, or a view of one, that was kept by the loss or returned by it",
                want="its values",
                hint="keep fds.materialize(p).detach()",
            )
        with profiled("gather"):
            if index not in self.coming:
                self.wanted = index
                self.order.need(("gather", index))
                self.wanted = None
            flat, work = self.coming.pop(index)
            work.wait()
        self._make_room(self.bytes[index], self.capacity)
        self.used[index] = flat
        self.order.look_ahead(len(self.coming))
        return flat

    def join(self, index: int) -> None:
        """Begin to gather a bucket, for this rank or for others."""
        if index in self.coming:
            self._drop(index)
        others = [i for i in self.coming if i != self.wanted]
        for i in others[: max(0, len(others) + 1 - self.ahead)]:
            self._drop(i)
        coming = sum(self.bytes[i] for i in self.coming)
        self._make_room(self.bytes[index] + coming, self.capacity if index == self.wanted else self.bound)
        self.coming[index] = self.gather.start(self.layout.buckets[index], self.parts[index], self.axis, self.pool)

    def _make_room(self, num_bytes: int, bound: int) -> None:
        """Let go of those used least recently, until so many more bytes do not exceed a bound."""
        while self.used and sum(self.bytes[i] for i in self.used) + num_bytes > bound:
            del self.used[next(iter(self.used))]

    def close(self) -> None:
        """Let go of everything."""
        for index in list(self.coming):
            self._drop(index)
        self.over, self.viewed = True, None
        self.used.clear()
        self.staying.clear()

    def _drop(self, index: int) -> None:
        self.coming.pop(index)[1].wait()
        self.order.wasted = True


def _windows(gather: Gather, layout: Layout) -> list[list[BucketWindow]]:
    """Return the windows onto all parameters, by bucket."""
    dtype_of = gather.dtype_of
    return [
        [
            BucketWindow.whole(leaf.name, i, offset, leaf.shape, dtype_of(leaf.name, leaf.dtype))
            for leaf, offset in zip(bucket.leaves, bucket.offsets, strict=True)
        ]
        for i, bucket in enumerate(layout.buckets)
    ]
