"""Where gradients are added up on many ranks: in flat buckets, each reduced once, as soon as backward has filled it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from fds.collectives import Work
from fds.errors import LossError
from fds.step.order import Order
from fds.step.pool import Pool
from fds.step.ranges import in_range
from fds.step.shard import Shard
from fds.step.structure import Structure
from fds.step.sums import backward_inside


@attrs.define(eq=False)
class Filling:
    """A bucket that gradients are being written into, and which of its parameters have some."""

    flat: Tensor
    views: list[Tensor]
    filled: set[int] = attrs.field(factory=set)


@attrs.frozen(eq=False)
class Flight:
    """A bucket that is being reduced: what was sent, and where this rank's slice of the sum arrives."""

    held: Filling
    sent: Tensor
    own: Tensor
    work: Work


class Bucketed:
    """Gradients by the trained leaves, summed over microbatches and ranks; two buckets at most are on their way.

    Stages 0 and 1 hold every bucket and reduce it in the last backward, in one fixed order, the last bucket first.
    Stages 2 and 3 reduce every microbatch, hold the sums of their own slices and two buckets, one filling, one on its
    way, in an `order` that ranks learn: what arrives for a bucket that was reduced already is reduced by itself.
    """

    def __init__(
        self, structure: Structure, leaves: Sequence[Tensor], shard: Shard, pool: Pool, *,
        dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, predivide: float, order: Order | None,
    ):  # fmt: skip
        assert structure.layout is not None
        self.names, self.leaves = structure.trained_names, list(leaves)
        self.shard, self.pool, self.order = shard, pool, order
        self.buckets = {i: b for i, b in enumerate(structure.layout.buckets) if b.trained}
        self.device = leaves[0].device if leaves else torch.device("cpu")
        self.dtypes: dict[int, torch.dtype] = {}  # of the sums
        self.reduce_dtype = reduce_dtype
        self.predivide = predivide
        self.filling: dict[int, Filling] = {}
        self.flying: dict[int, Flight] = {}
        self.slices: dict[int, Tensor] = {}  # this rank's slices of the sums over ranks
        self.gathering: list[tuple[Flight, Work]] = []  # stage 0: the sum that is on its way to everybody
        self.whole: dict[str, Tensor] = {}  # stage 0: the sums
        self.seen: set[tuple[int, int]] = set()  # (bucket, leaf in it) that got a gradient
        self.arrived: dict[int, set[int]] = {i: set() for i in self.buckets}  # in this microbatch
        self.awaited = {i: set(range(len(b.leaves))) for i, b in self.buckets.items()}
        self.turn: list[int] = []  # stages 0 and 1: what is still to be launched, next one last
        self.reducing = False
        self.adding = False
        self.places = {leaf.name: (i, j) for i, b in self.buckets.items() for j, leaf in enumerate(b.leaves)}
        for name, leaf in zip(self.names, leaves, strict=True):
            i, j = self.places[name]
            self.dtypes[i] = dtype or leaf.dtype
            leaf.register_post_accumulate_grad_hook(functools.partial(self._arrive, i, j))
        if order is not None:
            order.joins["reduce"] = self._launch
            if order.memory.used is not None:  # a bucket is full when those have come that came last time
                used = {i: {j for k, j in order.memory.used if k == i} for i in self.buckets}
                self.awaited = {i: used[i] or awaited for i, awaited in self.awaited.items()}

    def add(self, backward: Callable[[list[Tensor]], None], *, last: bool, in_parts: bool = False) -> None:
        """Add the gradients that `backward(leaves)` puts into `.grad`, of one microbatch; reduce what is full.

        `in_parts` says that a leaf's gradient may come in several parts: then buckets are reduced at the end.
        """
        if not (self.reducing and self.order is None):  # else the last backward failed, with some buckets under way
            self.turn = sorted(self.buckets)
        self.reducing = (last and not in_parts) or self.order is not None
        self.arrived = {i: set() for i in self.buckets}
        self.adding = True
        try:
            backward(self.leaves)
        finally:
            self.adding = False
        if self.order is not None:
            for i in sorted(self.filling, reverse=True):
                if i in self.filling:
                    self.order.need(("reduce", i))
        elif last:
            while self.turn:
                self._launch(self.turn.pop())
        self.reducing = False

    def used(self) -> list[bool]:
        """Say of every leaf whether a gradient has come for it."""
        return [self.places[name] in self.seen for name in self.names]

    @in_range("reduce")
    def finish(self) -> list[Tensor]:
        """Return the reduced sums: of whole parameters at stage 0, of this rank's slices from stage 1 on."""
        while self.flying:
            self._land(next(iter(self.flying)))
        if self.order is not None:
            self.order.memory.used = self.seen
        self.close()
        if self.shard.stage == 0:
            self._spread()
            return [self.whole[name] for name in self.names]
        for i in self.buckets:
            if i not in self.slices:  # no rank used it
                self.slices[i] = torch.zeros(self.buckets[i].length, dtype=self.dtypes[i], device=self.device)
            self._over_replicas(self.slices[i])
        return [self.slices[i] for i in self.buckets]

    def close(self) -> None:
        """Let go of the leaves, whose hooks lead here."""
        self.leaves = []

    def _arrive(self, i: int, j: int, leaf: Tensor) -> None:
        """Take a leaf's new gradient into its bucket; launch the bucket once it is full."""
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        if not self.adding:
            raise backward_inside()
        if self.reducing and self.order is None and i not in self.turn:
            raise LossError(
                "a gradient came twice in one backward, the second time after its bucket was reduced",
                where=self.buckets[i].leaves[j].name, got="a backward inside a backward",
                want="one gradient per microbatch", hint="torch.utils.checkpoint(..., use_reentrant=False)",
            )  # fmt: skip
        grad = grad if grad.layout is torch.strided else grad.to_dense()
        held = self._open(i)
        if j in held.filled:
            held.views[j].add_(grad)
        else:
            held.views[j].copy_(grad)
            held.filled.add(j)
        self.seen.add((i, j))
        self.arrived[i].add(j)
        if not self.reducing or not self._is_full(i):
            return
        if self.order is not None:
            self.order.need(("reduce", i))
            return
        while self.turn and self._is_full(self.turn[-1]):
            self._launch(self.turn.pop())

    def _is_full(self, i: int) -> bool:
        return self.arrived[i] >= self.awaited[i]

    def _open(self, i: int) -> Filling:
        """Return the bucket that is being filled: new memory, its gaps zero, where there is none."""
        if i not in self.filling:
            bucket = self.buckets[i]
            dtype = self.dtypes[i] if self.order is None else self.reduce_dtype or self.dtypes[i]
            flat = self.pool.take(bucket.numel, dtype, self.device)
            _zero([flat[a:b] for a, b in bucket.gaps()])
            self.filling[i] = Filling(flat, bucket.views(flat))
        return self.filling[i]

    @in_range("reduce")
    def _launch(self, i: int) -> None:
        """Begin to reduce a bucket with what is in it, then let the one before arrive, so that the wire never idles."""
        if i in self.flying:  # of the microbatch before
            self._land(i)
        held, bucket, shard = self._open(i), self.buckets[i], self.shard
        del self.filling[i]
        _zero([view for j, view in enumerate(held.views) if j not in held.filled])
        sent = held.flat if self.reduce_dtype is None else held.flat.to(self.reduce_dtype)
        if self.predivide != 1:
            sent.div_(self.predivide)
        own = bucket.slice(shard.axis.index, sent)
        if self.order is not None and i not in self.slices and sent.dtype == self.dtypes[i]:
            own = self.pool.take(bucket.length, sent.dtype, self.device)  # the first sum is where others are added
        self.flying[i] = Flight(held, sent, own, shard.axis.start_reduce_scatter(own, sent))
        while len(self.flying) > 1:
            self._land(next(iter(self.flying)))

    def _land(self, i: int) -> None:
        """Add a bucket that has arrived to the sum of its slice, and give its memory back."""
        flight = self.flying.pop(i)
        flight.work.wait()
        own, sent = flight.own, flight.sent
        if self.shard.stage == 0:
            self._over_replicas(own)
            gathered = self.shard.axis.start_all_gather(sent, own)
            self._spread()
            self.gathering.append((flight, gathered))
            self.whole.update(zip((leaf.name for leaf in self.buckets[i].leaves), flight.held.views, strict=True))
        elif self.shard.stage == 1:
            self.slices[i] = self.buckets[i].slice(self.shard.axis.index, flight.held.flat)
            if own.data_ptr() != self.slices[i].data_ptr():
                self.slices[i].copy_(own)
        elif i in self.slices:
            self.slices[i].add_(own)
        elif own.untyped_storage().data_ptr() == sent.untyped_storage().data_ptr():
            self.slices[i] = self.pool.take(own.numel(), self.dtypes[i], self.device).copy_(own)
        else:
            self.slices[i] = own

    def _over_replicas(self, own: Tensor) -> None:
        """Add up a slice over its replicas; outside of `order`, which their ranks do not share."""
        if self.shard.replicate is not None:
            self.shard.replicate.start_all_reduce(own).wait()

    def _spread(self) -> None:
        """Let the bucket that is being gathered arrive."""
        while self.gathering:
            flight, work = self.gathering.pop()
            work.wait()
            if flight.held.flat is not flight.sent:
                flight.held.flat.copy_(flight.sent)


def _zero(views: list[Tensor]) -> None:
    if views:
        torch._foreach_zero_(views)
