"""Where gradients are added up on many ranks: in flat buckets, each reduced once, as soon as backward has filled it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import autodiff, tree
from fds.collectives import Axis, Work
from fds.collectives.links import Collective
from fds.collectives.traffic import Traffic, counting
from fds.errors import LossError
from fds.step import foreach
from fds.step.checks import contracts
from fds.step.pool import Pool, give_back
from fds.step.ranges import in_range
from fds.step.residency.landing import Landing
from fds.step.sharding.kept import Kept
from fds.step.sharding.order import Order, order_of_reductions
from fds.step.sharding.shard import Shard
from fds.step.sharding.transport import Relay, Transport
from fds.step.structure import Structure
from fds.step.sums import backward_inside


class Bucketed:
    """Gradients by the trained leaves, summed over microbatches and ranks; two buckets at most are on their way.

    Autograd leaves gradients in `.grad`, from where a bucket takes all of them when the last one has come. So that this
    costs no call of Python per leaf, a bucket has a hook on one leaf whose gradient is missing, by preference the first
    in the model; when that one has come it looks for another, and gets a hook there.

    Stages 0 and 1 hold every bucket and reduce it in the last backward, in one fixed order, the last bucket first.
    Stages 2 and 3 reduce every microbatch, hold the sums of their own slices and two buckets, one in `.grad`, one on
    its way, in an `order` that ranks learn: what arrives for a bucket that was reduced already is reduced by itself,
    unless that order is final. A bucket whose turn in a fixed or final order has not come is held until it has.
    """

    def __init__(
        self,
        structure: Structure,
        leaves: Sequence[Tensor],
        shard: Shard,
        transport: Transport,
        pool: Pool,
        *,
        dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        predivide: float,
        order: Order | None,
        kept: Kept | None,
        landing: Landing | None = None,
        tight: bool = False,
    ):
        assert structure.layout is not None
        self.places = structure.places
        self.shard, self.transport, self.pool, self.each = shard, transport, pool, shard.reduces_each_microbatch
        self.buckets = {i: b for i, b in enumerate(structure.layout.buckets) if b.trained}
        self.order = order or Order(shard.axis, order_of_reductions(tuple(sorted(self.buckets, reverse=True))))
        self.all_leaves = list(leaves)  # in the order of the structure's trained names
        self.leaves = {i: [leaves[k] for k in members] for i, members in structure.members.items()}
        self.device = leaves[0].device if leaves else torch.device("cpu")
        self.dtypes = {i: dtype or leaves_[0].dtype for i, leaves_ in self.leaves.items()}  # of the sums
        self.reduce_dtype = reduce_dtype
        self.predivide = predivide
        self.slices_state = shard.slices_state
        self.kept, self.landing, self.tight = kept, landing, tight
        self.index = {i: k for k, i in enumerate(self.buckets)}  # of its slice
        self.members = structure.members
        self.last = False  # whether the last microbatch adds
        self.landed: set[int] = set()  # buckets that did
        self.filling: dict[int, Filling] = {}
        self.flying: dict[int, Flight] = {}
        self.slices: dict[int, Tensor] = {}  # this rank's slices of the sums over ranks
        self.gathering: list[tuple[int, Flight, Work]] = []  # stage 0: the sum that is on its way to everybody
        self.whole: dict[int, list[Tensor]] = {}  # stage 0: the sums
        self.seen: dict[int, set[int]] = {i: set() for i in self.buckets}  # leaves that got a gradient
        self.arrived: dict[int, set[int]] = {}  # and were taken, in this microbatch
        self.awaited = {i: list(range(len(b.leaves))) for i, b in self.buckets.items()}
        self.enough = dict(zip(self.awaited, map(len, self.awaited.values()), strict=True))  # these are taken at once
        self.come: dict[int, int] = {}  # how many of `awaited` have come in this microbatch, as far as was looked
        self.hooked: set[tuple[int, int]] = set()
        self.reduced: dict[int, int] = {}  # how often each bucket was, in this microbatch
        self.regular = self.each and not shard.gathers_on_use  # each one once, with all that it has, in each microbatch
        self.reducing = False
        self.adding = False
        self.in_parts = False
        self.order.joins["reduce"] = self._launch
        memory = self.order.memory
        if memory.used is not None and not memory.final:  # a bucket is full when those have come that came last time
            self.awaited = {i: sorted(memory.used[i]) or all_ for i, all_ in self.awaited.items()}
            self.enough = {i: len(awaited) for i, awaited in self.awaited.items()}

    def add(self, backward: Callable[[list[Tensor]], None], *, last: bool, in_parts: bool = False) -> None:
        """Add the gradients that `backward(leaves)` puts into `.grad`, of one microbatch; reduce what is full.

        `in_parts` says that a leaf's gradient may come in several parts: then each is taken as it comes, and buckets
        are reduced at the end.
        """
        if list(map(tree.grad_of, self.all_leaves)).count(None) < len(self.all_leaves):
            raise backward_inside()
        self.last, self.reducing, self.reduced = last, (last and not in_parts) or self.each, {}
        self.arrived, self.come = {i: set() for i in self.buckets}, dict.fromkeys(self.buckets, 0)
        if in_parts and not self.in_parts:
            self._hook_each()
        for i, seen in self.seen.items() if not self.each else ():
            if 0 < len(seen) < len(self.awaited[i]):  # else these would stay in `.grad`, beside their sums, to the end
                self.awaited[i].sort(key=lambda j, seen=seen: (j not in seen, j))
                self.enough[i] = len(seen)
        for i, awaited in self.awaited.items():
            self._hook(i, awaited[0])
        self.adding = True
        learns = self.regular and not self.order.memory.final
        try:
            if learns:
                elsewhere = _Elsewhere()
                with counting(elsewhere):
                    backward(self.all_leaves)
                self.regular = not in_parts and not elsewhere.counts
            else:
                backward(self.all_leaves)
            for i in self.buckets:
                self._take(i)
        except BaseException:
            for leaf in self.all_leaves:  # no part of any sum
                leaf.grad = None
            raise
        finally:
            self.adding = False
        if self.order.memory.final:
            for i in self.buckets if last or self.each else ():
                if i not in self.reduced:  # asked each time: what one waited for is reduced with it
                    self.order.need(("reduce", i))
        else:
            for i in self.kept.waiting() if last and self.kept is not None else ():
                self._open(i)
            for i in sorted(self.filling, reverse=True):
                if i in self.filling:
                    self.order.need(("reduce", i))
            if learns:
                once = self.reduced == dict.fromkeys(self.buckets, 1)
                whole = all(len(self.arrived[i]) == len(bucket.leaves) for i, bucket in self.buckets.items())
                self.regular &= once and whole
            self.order.regular = self.regular and last
        self.reducing = False

    def used(self) -> list[bool]:
        """Say of every leaf whether a gradient has come for it."""
        if all(len(self.seen[i]) == len(bucket.leaves) for i, bucket in self.buckets.items()):
            return [True] * len(self.places)
        return [j in self.seen[i] for i, j in self.places]

    @in_range("reduce")
    def finish(self) -> list[Tensor]:
        """Return the reduced sums: of whole parameters at stage 0, of this rank's slices from stage 1 on."""
        self._land_all()
        if not self.order.memory.final:
            self.order.memory.used = self.seen
        self.close()
        if not self.slices_state:
            self._spread()
            for i in self.buckets.keys() - self.whole.keys():  # the transport failed, which a pipeline raises later
                zeros = (torch.zeros(x.shape, dtype=self.dtypes[i], device=self.device) for x in self.buckets[i].leaves)
                self.whole[i] = list(zeros)
            return [self.whole[i][j] for i, j in self.places]
        for i in self.buckets:
            if self.landing is None and i in self.slices:
                self._over_replicas(i, self.slices[i])
            elif i not in self.landed:
                self._complete(i)
        return [self.slices[i] for i in self.buckets]

    def close(self) -> None:
        """Let go of the leaves, whose hooks lead here."""
        self.all_leaves, self.leaves = [], {}
        self.order.joins.clear()

    def _hook(self, i: int, j: int) -> None:
        """Have a bucket looked at when the gradient of its leaf `j` comes."""
        if (i, j) not in self.hooked:
            self.hooked.add((i, j))
            autodiff.on_gradient(self.leaves[i][j], lambda _: self._look(i, j))

    def _hook_each(self) -> None:
        """Have the gradient of every leaf taken when it comes, as often as it comes."""
        self.in_parts = True
        for i, leaves in self.leaves.items():
            for j, leaf in enumerate(leaves):
                autodiff.on_gradient(leaf, lambda _, i=i, j=j: self._take(i, [j]))

    def _look(self, i: int, j: int) -> None:
        """Look for a gradient that a bucket still waits for, now that of leaf `j` has come; if all have, launch it."""
        awaited, leaves, arrived, come = self.awaited[i], self.leaves[i], self.arrived[i], self.come[i]
        end = len(awaited)
        if come == end or awaited[come] != j:
            return
        while come < end and (leaves[awaited[come]].grad is not None or awaited[come] in arrived):
            come += 1
        self.come[i] = come
        if come >= self.enough[i]:
            if self.each:  # else three would be in memory: its gradients, the bucket, the one before
                self._land_all()
            self._take(i)
        if come < end:
            self._hook(i, awaited[come])
            return
        if self.reducing:
            self.order.need(("reduce", i))

    def _take(self, i: int, positions: Sequence[int] | None = None) -> None:
        """Move the gradients that have come for a bucket, or for some of its leaves, into it."""
        leaves = self.leaves[i]
        which = range(len(leaves)) if positions is None else positions
        grads_or_none = list(map(tree.grad_of, leaves if positions is None else [leaves[j] for j in positions]))
        has_come = [grad is not None for grad in grads_or_none]
        come = list(itertools.compress(which, has_come))
        if not come:
            return
        if not self.adding:
            raise backward_inside()
        for j in come:
            leaves[j].grad = None
        if self.reducing and self.order.memory.final and i in self.reduced:
            raise LossError(
                "a gradient came twice in one backward, the second time after its bucket was reduced",
                where=self.buckets[i].leaves[min(come)].name,
                got="a backward inside a backward",
                want="one gradient per microbatch",
                hint="torch.utils.checkpoint(..., use_reentrant=False)",
            )
        grads: list[Any] = list(itertools.compress(grads_or_none, has_come))
        del grads_or_none
        self._open(i).add(come, grads)
        if self.tight:
            give_back(grads)
        self.seen[i].update(come)
        self.arrived[i].update(come)

    def _open(self, i: int) -> Filling:
        """Return the bucket that is being filled: new memory, its gaps zero, where there is none."""
        if i not in self.filling:
            bucket = self.buckets[i]
            dtype = (self.each and self.reduce_dtype) or self.dtypes[i]
            flat, views, gaps = self.pool.take_bucket(bucket, dtype, self.device)
            _zero(gaps)
            self.filling[i] = Filling(flat, views)
        return self.filling[i]

    @in_range("reduce")
    def _launch(self, i: int) -> None:
        """Begin to reduce a bucket with what is in it, then let the one before arrive, so that the wire never idles."""
        if i in self.flying:  # of the microbatch before
            self._land(i)
        if self.adding:  # another rank asks for it before it is full
            self._take(i)
        filling, bucket, shard = self._open(i), self.buckets[i], self.shard
        self.reduced[i] = self.reduced.get(i, 0) + 1
        del self.filling[i]
        if len(filling.filled) < len(filling.views):
            _zero([view for j, view in enumerate(filling.views) if j not in filling.filled])
        sent = filling.flat if self.reduce_dtype is None else filling.flat.to(self.reduce_dtype)
        if self.predivide != 1:
            sent.div_(self.predivide)
        out = bucket.slice(shard.axis.index, sent)
        if (landing := self.landing and self._elsewhere(i)) is not None:
            landing.expect(self.index[i])
        elif self.each and i not in self.slices and sent.dtype == self.dtypes[i]:
            out = self.pool.take(bucket.length, sent.dtype, self.device)  # the first sum is where others are added
        way = self.transport.of(bucket, shard.data)
        kept = None if self.kept is None else self._kept(i, way)
        work = contracts.sent(way.reduce(shard.legs["reduce"], sent, out, kept), way, "reduce")
        if self.each and work.__class__ is Relay:
            self.order.departures.relays.append(work)  # pyright: ignore[reportArgumentType]
        self.flying[i] = Flight(filling, sent, out, work)
        while len(self.flying) > 1 or (landing is not None and self.flying and work.done()):
            self._land(next(iter(self.flying)))

    def _land_all(self) -> None:
        """Let every bucket arrive that is on its way, and be written where it lives."""
        while self.flying:
            self._land(next(iter(self.flying)))
        if self.landing is not None:
            self.landing.settle()

    def _land(self, i: int) -> None:
        """Add a bucket that has arrived to the sum of its slice, and give its memory back."""
        flight = self.flying.pop(i)
        flight.work.wait()
        out, sent = flight.out, flight.sent
        if not self.slices_state:
            self._over_replicas(i, out)
            first = self.shard.replicate is None or self.shard.replicate.index == 0
            way = self.transport.of(self.buckets[i], self.shard.data)
            kept = self._kept_slice(i, way) if first else None
            gathered = contracts.sent(way.spread(self.shard.legs["spread"], out, sent, kept), way, "spread")
            self._spread()
            self.gathering.append((i, flight, gathered))
            self.whole[i] = flight.filling.views
        elif not self.each:
            self.slices[i] = self.buckets[i].slice(self.shard.axis.index, flight.filling.flat)
            if out.data_ptr() != self.slices[i].data_ptr():
                self.slices[i].copy_(out)
            if self.landing is not None:
                self._complete(i)
        elif (landing := self.landing and self._elsewhere(i)) is not None:
            total = landing.add(self.index[i], out)
            if self.last and self._lands(i):
                self._complete(i, total)
            else:
                landing.write(self.index[i], total)
        else:
            self._add(i, out, sent)
            if self.landing is not None and self.last and self._lands(i):
                self._complete(i)

    def _add(self, i: int, out: Tensor, sent: Tensor) -> None:
        """Add a bucket that has arrived to the sum of its slice in memory."""
        if i in self.slices:
            self.slices[i].add_(out)
        elif out.untyped_storage().data_ptr() == sent.untyped_storage().data_ptr():
            self.slices[i] = self.pool.take(out.numel(), self.dtypes[i], self.device).copy_(out)
        else:
            self.slices[i] = out

    def _elsewhere(self, i: int) -> Landing | None:
        """Return where the sum of a bucket is written after every microbatch, None where it is in memory."""
        is_there = self.landing is not None and self.each and self.index[i] in self.landing.leaves
        return self.landing if is_there else None

    def _lands(self, i: int) -> bool:
        """Say whether nothing is to be added to a bucket that was reduced in the last microbatch."""
        return self.landing is not None and self.landing.lands(self.index[i]) and self.shard.replicate is None

    def _complete(self, i: int, total: Tensor | None = None) -> None:
        """Add the sum of a slice up over its replicas, and let it land where it can."""
        k, landing = self.index[i], self.landing
        total = self.slices.get(i) if total is None else total
        if landing is not None and total is None and k in landing.stored:
            total = landing.value(k, landing.leaves[k])
        if total is None:  # no rank used it
            total = torch.zeros(self.buckets[i].length, dtype=self.dtypes[i], device=self.device)
        self._over_replicas(i, total)
        self.slices[i] = landing.land(k, total) if landing is not None and landing.lands(k) else total
        self.landed.add(i)

    def _over_replicas(self, i: int, out: Tensor) -> None:
        """Add up a slice over its replicas; outside of `order`, which their ranks do not share."""
        if self.shard.replicate is not None:
            way = self.transport.of(self.buckets[i], self.shard.data)
            work = way.combine(self.shard.legs["combine"], out, self._kept_slice(i, way))
            contracts.sent(work, way, "combine").wait()

    def _kept(self, i: int, way: Transport) -> Tensor | None:
        """Return what is kept of a bucket, (numel,) float32, None where its transport keeps nothing."""
        return self.kept.bucket(i, self.buckets[i]) if self.kept is not None and way.keeps else None

    def _kept_slice(self, i: int, way: Transport) -> Tensor | None:
        """Return what is kept of this rank's slice of a bucket, (length,) float32."""
        kept = self._kept(i, way)
        return None if kept is None else self.buckets[i].slice(self.shard.axis.index, kept)

    def _spread(self) -> None:
        """Let the bucket that is being gathered arrive."""
        while self.gathering:
            i, flight, work = self.gathering.pop()
            work.wait()
            if flight.filling.flat is not flight.sent:
                flight.filling.flat.copy_(flight.sent)
            if (landing := self.landing) is not None:
                sums = zip(self.members[i], flight.filling.views, strict=True)
                self.whole[i] = [landing.land(k, x) if landing.lands(k) else x for k, x in sums]


class _Elsewhere(Traffic):
    """Counts the collectives of a backward that are not the step's: in them other ranks wait for this one."""

    def add(self, collective: Collective, axis: Axis) -> None:
        if collective.what not in ("reduce", "spread", "combine", "step"):
            super().add(collective, axis)


def _zero(views: list[Tensor]) -> None:
    if views:
        foreach.zero_(views)


@attrs.define(eq=False)
class Filling:
    """A bucket that gradients are being written into, and which of its parameters have some."""

    flat: Tensor
    views: list[Tensor]
    filled: set[int] = tree.new(set)

    def add(self, which: Sequence[int], grads: list[Tensor]) -> None:
        """Write the gradients of these parameters, or add them to what is there."""
        if set(map(tree.layout_of, grads)) != {torch.strided}:
            grads = [x if x.layout is torch.strided else x.to_dense() for x in grads]
        if not self.filled and len(which) == len(self.views):  # in order, all of them
            foreach.copy_(self.views, grads)
            self.filled.update(which)
            return
        views, more = [self.views[j] for j in which], [j in self.filled for j in which]
        for write, chosen in ((foreach.copy_, [not is_more for is_more in more]), (foreach.add_, more)):
            if any(chosen):
                write(list(compress(views, chosen)), list(compress(grads, chosen)))
        self.filled.update(which)


@attrs.frozen(eq=False)
class Flight:
    """A bucket that is being reduced: what was sent, and where this rank's slice of the sum arrives."""

    filling: Filling
    sent: Tensor
    out: Tensor
    work: Work
