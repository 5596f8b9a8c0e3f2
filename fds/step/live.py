"""Stage 3: buckets that are whole only while the loss uses them, in forward and again in backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fds.collectives import Work
from fds.errors import StateError
from fds.handles import handle
from fds.step.order import Order
from fds.step.pool import Pool
from fds.step.structure import Structure

if TYPE_CHECKING:
    from fds.step.gather import Gather


class Live:
    """The buckets that are whole at the moment, never more than `max_live_bytes` of them.

    A bucket is gathered when an operator touches one of its parameters, by way of a handle, and stays until others
    have been used since. To evict it drops our reference: what a user still holds stays as it is.
    """

    def __init__(self, gather: Gather, structure: Structure, parts: list[Tensor], pool: Pool, order: Order):
        layout, shard = structure.layout, gather.shard
        assert layout is not None and shard is not None
        self.gather, self.layout, self.parts, self.pool, self.order = gather, layout, parts, pool, order
        self.trained, self.ahead = set(structure.trained_names), max(1, shard.prefetch)
        self.used: dict[int, Tensor] = {}  # least recently used first
        self.coming: dict[int, tuple[Tensor, Work]] = {}  # under way, or arrived and not used yet
        self.wanted: int | None = None  # what an operator is waiting for
        self.bytes = [b.numel * gather.dtype_of(b.leaves[0].name, b.dtype).itemsize for b in layout.buckets]
        staying = [i for i, b in enumerate(layout.buckets) if gather.persists(b.leaves[0].numel)]
        self.capacity = capacity(shard.max_live_bytes, shard.prefetch, self.bytes)
        started = {i: gather.start(layout.buckets[i], parts[i], pool) for i in staying}
        self.staying = {i: flat for i, (flat, work) in started.items() if work.wait() is None}
        order.joins["gather"] = self.join

    def handles(self, train: bool) -> list[Tensor]:
        """Return a handle for every parameter, in the order of the layout's names; with `train` autograd leaves."""
        views = []
        for i, bucket in enumerate(self.layout.buckets):
            device = self.parts[i].device
            views.append([
                handle(self, i, offset, leaf.shape, self.gather.dtype_of(leaf.name, leaf.dtype), device,
                       name=leaf.name, requires_grad=train and leaf.name in self.trained)
                for leaf, offset in zip(bucket.leaves, bucket.offsets, strict=True)
            ])  # fmt: skip
        return self.layout.collect(views)

    def bucket(self, index: int) -> Tensor:
        """Return the whole bucket (numel,), gathered if it is not whole now."""
        if index in self.staying:
            return self.staying[index]
        if index in self.used:
            self.used[index] = flat = self.used.pop(index)
            return flat
        if index not in self.coming:
            self.wanted = index
            self.order.need(("gather", index))
            self.wanted = None
        flat, work = self.coming.pop(index)
        work.wait()
        self.used[index] = flat
        while sum(self.bytes[i] for i in self.used) > self.capacity and len(self.used) > 1:
            del self.used[next(iter(self.used))]
        self.order.look_ahead()
        return flat

    def join(self, index: int) -> None:
        """Begin to gather a bucket, for this rank or for others."""
        if index in self.coming:
            self._drop(index)
        others = [i for i in self.coming if i != self.wanted]
        for i in others[: max(0, len(others) + 1 - self.ahead)]:
            self._drop(i)
        self.coming[index] = self.gather.start(self.layout.buckets[index], self.parts[index], self.pool)

    def close(self) -> None:
        """Join what other ranks still need, then let go of everything."""
        self.order.finish()
        for index in list(self.coming):
            self._drop(index)
        self.used.clear()
        self.staying.clear()

    def _drop(self, index: int) -> None:
        self.coming.pop(index)[1].wait()
        self.order.wasted = True


def capacity(max_live_bytes: int | None, prefetch: int, num_bytes: list[int]) -> int:
    """Return the bytes of used buckets that may stay whole beside those that are on their way.

    Raises `StateError` where the bound has no room for a single bucket.
    """
    largest = max(num_bytes, default=0)
    coming = prefetch * largest
    if max_live_bytes is None:
        return 2 * largest
    if max_live_bytes < largest + coming:
        raise StateError(
            "shard_optimizer: max_live_bytes has no room for the largest bucket", got=f"{max_live_bytes:,}",
            want=f"at least {largest + coming:,}: one bucket of {largest:,} bytes, and {prefetch} on the way",
            hint="smaller bucket_bytes, or prefetch=0",
        )  # fmt: skip
    return max_live_bytes - coming
