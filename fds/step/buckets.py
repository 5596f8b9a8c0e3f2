"""Where gradients are added up on many ranks: in flat buckets, each reduced once, as soon as backward has filled it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from fds import autodiff
from fds.collectives import Work
from fds.errors import LossError
from fds.step.order import Order
from fds.step.pool import Pool
from fds.step.shard import Shard
from fds.step.structure import Structure


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
    """Gradients by the trained leaves, summed over microbatches and ranks.

    Stages 0 and 1 hold every bucket and reduce it once, in the last backward; stages 2 and 3 reduce every
    microbatch, hold the sums of their own slices, and two buckets: one filling, one on its way. Up to stage 2 buckets
    are reduced in one fixed order, the last one first; at stage 3 in that of `order`, where gathers have a place too.
    """

    def __init__(
        self, structure: Structure, leaves: Sequence[Tensor], shard: Shard, pool: Pool, *,
        dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, order: Order | None,
    ):  # fmt: skip
        assert structure.layout is not None
        self.names, self.leaves = structure.trained_names, list(leaves)
        self.shard, self.pool, self.order = shard, pool, order
        self.buckets = {i: b for i, b in enumerate(structure.layout.buckets) if b.trained}
        self.device = leaves[0].device if leaves else torch.device("cpu")
        self.dtypes: dict[int, torch.dtype] = {}  # of the sums
        self.reduce_dtype = reduce_dtype
        self.filling: dict[int, Filling] = {}
        self.flying: dict[int, Flight] = {}  # launched, in order
        self.slices: dict[int, Tensor] = {}  # stages 2 and 3: the sums so far
        self.seen: set[str] = set()  # names of leaves that got a gradient
        self.arrived: dict[int, set[int]] = {}  # bucket -> leaves that got one in this microbatch
        self.turn: list[int] = []  # up to stage 2: what is still to be launched, next one last
        self.reducing = False
        places = {leaf.name: (i, j) for i, b in self.buckets.items() for j, leaf in enumerate(b.leaves)}
        for name, leaf in zip(self.names, leaves, strict=True):
            i, j = places[name]
            self.dtypes[i] = dtype or leaf.dtype
            leaf.register_post_accumulate_grad_hook(functools.partial(self._arrive, i, j))
        if order is not None:
            order.joins["reduce"] = self._launch

    def add(self, total: Tensor, seed: Tensor | None, *, last: bool) -> None:
        """Add the gradients of one microbatch's total, times `seed`; reduce what is full."""
        self.reducing = last or self.shard.stage >= 2
        self.turn = sorted(self.buckets)
        self.arrived = {i: set() for i in self.buckets}
        if total.requires_grad:  # the loss of another rank may depend on parameters where this one does not
            autodiff.backward_into(total, seed, self.leaves)
        if self.reducing and self.order is None:
            while self.turn:
                self._launch(self.turn.pop())
        elif self.reducing:
            assert self.order is not None
            for i in sorted(self.filling, reverse=True):
                if i in self.filling:
                    self.order.need(("reduce", i))

    def used(self) -> list[bool]:
        """Say of every leaf whether a gradient has come for it."""
        return [name in self.seen for name in self.names]

    def finish(self) -> list[Tensor]:
        """Return the reduced sums: of whole parameters at stage 0, of this rank's slices from stage 1 on.

        The leaves, whose hooks lead here, are let go.
        """
        self.leaves = []
        if self.shard.stage >= 2:
            while self.flying:
                self._land(next(iter(self.flying)))
            return [self._sum(i) for i in self.buckets]
        sums = {i: self._own(i).to(self.dtypes[i]) for i in self.flying}
        if self.shard.stage == 1:
            return [sums[i] for i in self.buckets]
        return self._whole()

    def _arrive(self, i: int, j: int, leaf: Tensor) -> None:
        """Take a leaf's new gradient into its bucket; launch the bucket once it is full."""
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        bucket = self.buckets[i]
        grad = grad if grad.layout is torch.strided else grad.to_dense()
        if self.reducing and self.order is None and i not in self.turn:
            raise LossError(
                "a gradient came twice in one backward, the second time after its bucket was reduced",
                where=bucket.leaves[j].name, got="torch.utils.checkpoint(..., use_reentrant=True), or a backward "
                "inside the loss", want="one gradient per microbatch", hint="use_reentrant=False",
            )  # fmt: skip
        held = self._open(i)
        if j in held.filled:
            held.views[j].add_(grad)
        else:
            held.views[j].copy_(grad)
            held.filled.add(j)
        self.seen.add(bucket.leaves[j].name)
        self.arrived[i].add(j)
        if not self.reducing or len(self.arrived[i]) < len(bucket.leaves):
            return
        if self.order is not None:
            self.order.need(("reduce", i))
            return
        while self.turn and len(self.arrived[self.turn[-1]]) == len(self.buckets[self.turn[-1]].leaves):
            self._launch(self.turn.pop())

    def _open(self, i: int) -> Filling:
        """Return the bucket that is being filled: new memory, its gaps zero, where there is none."""
        if i not in self.filling:
            bucket = self.buckets[i]
            dtype = self.dtypes[i] if self.shard.stage < 2 else self.reduce_dtype or self.dtypes[i]
            flat = self.pool.take(bucket.numel, dtype, self.device)
            for a, b in bucket.gaps():
                flat[a:b].zero_()
            self.filling[i] = Filling(flat, bucket.views(flat))
        return self.filling[i]

    def _launch(self, i: int) -> None:
        """Begin to reduce a bucket with what is in it; stages 2 and 3 let the one before arrive first."""
        held, bucket, shard = self._open(i), self.buckets[i], self.shard
        for j, view in enumerate(held.views):
            if j not in held.filled:
                view.zero_()
        if shard.predivide != 1:
            held.flat.div_(shard.predivide)
        if shard.stage >= 2:
            while self.flying:
                self._land(next(iter(self.flying)))
            del self.filling[i]
        sent = held.flat if self.reduce_dtype is None else held.flat.to(self.reduce_dtype)
        own = bucket.slice(shard.axis.index, sent)
        if shard.stage >= 2 and i not in self.slices and sent.dtype == self.dtypes[i]:
            own = self.pool.take(bucket.length, sent.dtype, self.device)  # the first sum is where the others are added
        self.flying[i] = Flight(held, sent, own, shard.axis.start_reduce_scatter(own, sent))

    def _own(self, i: int) -> Tensor:
        """Wait for a bucket and return this rank's slice of the sum over all ranks, in the dtype that was sent."""
        flight = self.flying[i]
        flight.work.wait()
        if self.shard.replicate is not None:
            self.shard.replicate.start_all_reduce(flight.own).wait()
        return flight.own

    def _land(self, i: int) -> None:
        """Add a bucket that has arrived to the sum of its slice, and give its memory back."""
        own = self._own(i)
        sent = self.flying.pop(i).sent
        if i in self.slices:
            self.slices[i].add_(own)
        elif own.untyped_storage().data_ptr() == sent.untyped_storage().data_ptr():
            self.slices[i] = self.pool.take(own.numel(), self.dtypes[i], self.device).copy_(own)
        else:
            self.slices[i] = own

    def _sum(self, i: int) -> Tensor:
        if i not in self.slices:  # no rank used it
            return torch.zeros(self.buckets[i].length, dtype=self.dtypes[i], device=self.device)
        return self.slices[i]

    def _whole(self) -> list[Tensor]:
        """Gather the reduced slices of all ranks into the buckets they came from; return the parameters' views."""
        axis, found = self.shard.axis, {}
        works = [axis.start_all_gather(flight.sent, flight.own) for flight in self.flying.values()]
        for (i, flight), work in zip(self.flying.items(), works, strict=True):
            work.wait()
            if flight.held.flat is not flight.sent:
                flight.held.flat.copy_(flight.sent)
            found.update(zip((leaf.name for leaf in self.buckets[i].leaves), flight.held.views, strict=True))
        return [found[name] for name in self.names]
