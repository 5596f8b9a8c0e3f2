"""The parameters of one step, as the loss sees them: whole tensors, or handles that gather buckets when used."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import attrs
from torch import Tensor

from fds.collectives import Work
from fds.errors import LossError
from fds.layout import Layout
from fds.step.pool import Pool
from fds.step.ranges import in_range, profiled
from fds.step.residency.lives import Masters
from fds.step.sharding.gather import Coming, Gather, Memory
from fds.step.sharding.handles import BucketWindow, handle
from fds.step.sharding.order import Order
from fds.step.sharding.shard import Shard
from fds.step.structure import Structure


@attrs.frozen(eq=False)
class Parameters:
    """The parameters that a loss sees for the length of a step: whole tensors, or handles that gather when used."""

    trained: list[Tensor]
    tree: Any
    live: Live | None = None  # at stage 3: the buckets that are whole just now

    def close(self) -> None:
        """Let go of what is whole."""
        if self.live is not None:
            self.live.close()


@in_range("gather")
def open_parameters(
    gather: Gather,
    shard: Shard | None,
    structure: Structure,
    masters: Masters,
    pool: Pool,
    *,
    train: bool,
    order: Order | None,
) -> Parameters:
    """Return what the loss sees, read and cast once a step; with `train` the trained leaves require gradients."""
    live = None
    if not structure.sharded:
        whole = masters.seen(structure.casts) if masters.elsewhere or structure.casts else masters.parts
    elif shard is not None and order is not None and _gathers_on_use(gather, shard, structure):
        live = Live(gather, shard, structure, masters, pool, order)
        whole = live.handles(train)
    else:
        assert shard is not None and structure.layout is not None
        whole = gather.all_at_once(structure.layout, masters, shard.legs["gather"], pool)
    if live is None:
        whole = _as_leaves(whole, structure.is_trained, train=train, keep=not structure.sharded)
    trained = whole if all(structure.is_trained) else list(compress(whole, structure.is_trained))
    return Parameters(trained, structure.build_whole(whole), live)


def _gathers_on_use(gather: Gather, shard: Shard, structure: Structure) -> bool:
    """Say whether any parameter is gathered when it is used."""
    return shard.gathers_on_use and structure.layout is not None and bool(gather.passing(structure.layout, shard))


def _as_leaves(whole: list[Tensor], is_trained: Sequence[bool], *, train: bool, keep: bool) -> list[Tensor]:
    """Return the same parameters; with `train` those that are trained as leaves that autograd records.

    Without `keep` all of them are new tensors, so that what the loss does to them is gone with them.
    """
    if train and all(is_trained):
        return list(map(Tensor.requires_grad_, map(Tensor.detach, whole)))
    leaves = whole if keep else list(map(Tensor.detach, whole))
    if not train:
        return leaves
    return [x.detach().requires_grad_() if trains else x for x, trains in zip(leaves, is_trained, strict=True)]


class Live:
    """The buckets that are whole at the moment, never more than `max_live_bytes` of them.

    A bucket is gathered when an operator touches one of its parameters, by way of a handle, and stays until others
    have been used since. To evict it drops our reference: what a user still holds stays as it is.
    """

    def __init__(self, gather: Gather, shard: Shard, structure: Structure, masters: Masters, pool: Pool, order: Order):
        layout = structure.layout
        assert layout is not None
        self.gather, self.layout, self.masters, self.pool = gather, layout, masters, pool
        self.axis, self.secondary, self.order = shard.legs["gather"], shard.secondary, order
        self.second: dict[int, Tensor] | None = None  # of buckets that were gathered, this rank's slice inside its node
        self.trained, self.ahead = set(structure.trained_names), max(1, shard.prefetch)
        self.used: dict[int, Tensor] = {}  # least recently used first
        self.coming: dict[int, Coming] = {}  # under way, or arrived and not used yet
        self.wanted: int | None = None  # what an operator is waiting for
        self.viewed: tuple[Any, Tensor] | None = None  # what a view made of a parameter last, and by whom it is read
        self.over = False  # the step has ended
        self.bytes = gather.passing(layout, shard)
        self.capacity = gather.room(layout, shard, self.bytes)
        self.bound = self.capacity + shard.prefetch * max(self.bytes.values(), default=0)
        staying = [i for i in range(len(layout.buckets)) if i not in self.bytes]
        self.staying = gather.some(staying, layout, masters, self.axis, self._pooled)
        order.joins["gather"] = self.join
        if not structure.windows:
            structure.windows.extend(_windows(gather, layout))
        self.windows = structure.windows

    def handles(self, train: bool) -> list[Tensor]:
        """Return a handle for every parameter, in the order of the layout's names; with `train` autograd leaves.

        With `train` a bucket is gathered from all ranks once; again, from those of a `secondary` axis.
        """
        self.second = {} if train and self.secondary is not None else None
        handles: list[list[Tensor]] = []
        for i, windows in enumerate(self.windows):
            device = self.masters.device_of(i)
            handles.append([handle(self, x, x.meta.dtype, device, train and x.path in self.trained) for x in windows])
        return self.layout.collect(handles)

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
            flat = self._arrive(index)
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
        self.coming[index] = arrival = self._start(index)
        self.order.departures.add(arrival)

    def _start(self, index: int) -> Coming:
        """Begin to gather a bucket, from its second slices where there are some."""
        if self.second is None or index not in self.second:
            return self.gather.start(self.layout.buckets[index], index, self.masters, self.axis, self._memory(index))
        axis, make = self.secondary, self._pooled(index)
        assert axis is not None

        def begin(part: Tensor) -> tuple[Tensor, Work]:
            flat = make(part)
            return flat, axis.start_all_gather(flat, part)

        return Coming(self.second[index], None, begin)

    def _arrive(self, index: int) -> Tensor:
        """Return a bucket that was coming (numel,), once it has arrived; keep a second slice of it."""
        flat = self.order.departures.arrive(self.coming.pop(index))
        if self.second is not None and index not in self.second:
            assert self.secondary is not None
            kept_slice = flat.view(self.secondary.size, -1)[self.secondary.index]
            self.second[index] = self.pool.take(kept_slice.numel(), kept_slice.dtype, kept_slice.device).copy_(
                kept_slice
            )
        return flat

    def _make_room(self, num_bytes: int, bound: int) -> None:
        """Let go of those used least recently, until so many more bytes do not exceed a bound."""
        while self.used and sum(self.bytes[i] for i in self.used) + num_bytes > bound:
            del self.used[next(iter(self.used))]

    def close(self) -> None:
        """Let go of everything."""
        for coming in self.coming.values():
            coming.give_up()
        self.coming.clear()
        self.over, self.viewed, self.second = True, None, None
        self.used.clear()
        self.staying.clear()

    def _drop(self, index: int) -> None:
        self._arrive(index)
        self.order.wasted = True

    def _pooled(self, index: int) -> Memory:
        """Return what makes memory of the pool for a bucket."""
        return self.gather.memory(self.layout.buckets[index], self.masters.device_of(index), self.pool)

    def _memory(self, index: int) -> Memory:
        """Return what makes memory for a bucket: what a rank alone has read is the whole bucket, where it can be."""
        make, bucket, dtype_of = self._pooled(index), self.layout.buckets[index], self.gather.dtype_of_bucket
        if self.axis.size > 1 or index not in self.masters.elsewhere:
            return make
        return lambda part: part if part.dtype == dtype_of(bucket, part.dtype) and _is_bucket(part) else make(part)


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


def _is_bucket(x: Tensor) -> bool:
    """Say whether memory lies as that of a bucket does: see `fds.layout.ALIGN`."""
    return x.is_contiguous() and not x.storage_offset() and not x.data_ptr() % 64
