"""The station `reduce`: how gradients are summed over ranks, and in which calls they stay where they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives import Axis
from fds.errors import ComposeError, LossError
from fds.layout import Leaf
from fds.optim import Optimizer
from fds.optim.exchange import LOCAL_LR, LOCAL_UPDATE, Exchange, Phases, add_update
from fds.step.call import Call
from fds.step.checks.state_check import StateTensors
from fds.step.drafts import Drafts
from fds.step.memory import Memory
from fds.step.pool import Pool
from fds.step.residency.contract import Residency
from fds.step.residency.landing import Landing
from fds.step.seeds import Seeds
from fds.step.sharding.buckets import Bucketed
from fds.step.sharding.kept import SLOT, Kept, nothing_kept
from fds.step.sharding.order import Order
from fds.step.sharding.shard import Shard
from fds.step.sharding.transport import LOSSLESS, Transport
from fds.step.structure import Structure
from fds.step.sums import InPlace
from fds.step.totals import Totals


@attrs.frozen
class Reduce:
    """The dtype in which gradients travel, None for that of their sum, and by which transport."""

    always_sums: ClassVar[bool] = True  # gradients, in every call
    is_summed: ClassVar[bool] = True  # in a call that is opened
    arguments: ClassVar[Mapping[str, Any]] = {}  # of the update in that call, besides its own

    dtype: torch.dtype | None = None
    transport: Transport = LOSSLESS
    # in which calls gradients are not summed: in none
    phases: Phases | None = attrs.field(default=None, init=False, repr=False)

    def open(
        self, call: Call, drafts: Drafts, tensors: StateTensors, shard: Shard | None, pool: Pool
    ) -> tuple[Reduce | NoSync, list[Tensor]]:
        """Return how the gradients of a call go, and what is held of the parameters as the loss sees it on this rank.

        The call alone decides, so that all ranks do the same.
        """
        if self.phases is not None and self.phases.local(call.calls):
            return NoSync.opened(self.phases, call, drafts, tensors, shard, pool)
        if not self.transport.draws:
            return self, tensors.parts
        return attrs.evolve(self, transport=self.transport.seeded(call.at("reduce").key)), tensors.parts

    def sums(
        self,
        structure: Structure,
        shard: Shard | None,
        leaves: list[Tensor],
        dtype: torch.dtype | None,
        pool: Pool,
        order: Order | None,
        kinds: Iterable[torch.dtype | None],
        seeds: Seeds,
        slots: Mapping[str, Any],
        landing: Landing | None = None,
        tight: bool = False,
    ) -> InPlace | Bucketed:
        """Prepare to sum the gradients by the trained leaves, in `dtype` or their own, on every rank of `kinds`.

        They begin at `seeds`, `slots` have what was kept of earlier ones, and each that is final goes to `landing`.
        Where memory is `tight` that of gradients goes back to the system as soon as a bucket has their values.
        """
        if shard is None:
            return InPlace.over(leaves, dtype, landing)
        predivide = shard.divisor([self.dtype or dtype or kind for kind in kinds])
        kept = Kept(slots[SLOT], seeds.scale, predivide, pool) if self.transport.keeps else None
        return Bucketed(
            structure,
            leaves,
            shard,
            self.transport,
            pool,
            dtype=dtype,
            reduce_dtype=self.dtype,
            predivide=predivide,
            order=order,
            kept=kept,
            landing=landing,
            tight=tight,
        )

    def sums_after(self, calls: Tensor) -> bool:
        """Say whether gradients are summed in the call after so many; of `meta` they are."""
        return self.phases is None or calls.is_meta or not self.phases.local(int(calls))

    def held_bytes(self, trained: Sequence[Leaf]) -> dict[str, int]:
        """Return part -> bytes that are held in a call in which gradients are not summed: see `footprint`."""
        if self.phases is None:
            return {}
        kept = {"kept": 4 * len(self.phases.slots) * sum(leaf.numel for leaf in trained)}
        if not self.phases.apart:
            return kept
        return {**kept, "whole": sum(leaf.numel * leaf.dtype.itemsize for leaf in trained)}

    def sent_bytes(self, trained: Sequence[Leaf], size: int) -> dict[str, int]:
        """Return station -> bytes that each of `size` ranks sends in such a call."""
        if self.phases is None:
            return {}
        return {"optimizer": self.phases.bytes_sent([leaf.numel for leaf in trained], size)}


@attrs.frozen
class WhileWarm(Reduce):
    """The same where an optimizer has gradients stay on their ranks in some calls: those after its warm-up."""

    always_sums: ClassVar[bool] = False

    phases: Phases = attrs.field(kw_only=True)

    @classmethod
    def of(cls, reduce: Reduce, optimizer: Optimizer | None) -> Reduce:
        """Return a station with an optimizer: the same if that always gets sums."""
        if optimizer is None or optimizer.phases is None:
            return reduce
        return cls(reduce.dtype, reduce.transport, phases=optimizer.phases)


@attrs.frozen(eq=False)
class NoSync:
    """A call in which gradients stay on their ranks: the optimizer exchanges something else, and writes over slots."""

    is_summed: bool  # whether this rank has the whole gradient, being alone
    arguments: Mapping[str, Any]  # of the update, besides its own
    before: Mapping[str, Any]  # slot -> by trained parameter; of learning rates by pattern, or one
    new: Mapping[str, Any]  # the same in other memory, which the update writes

    @classmethod
    def opened(
        cls, phases: Phases, call: Call, drafts: Drafts, tensors: StateTensors, shard: Shard | None, pool: Pool
    ) -> tuple[NoSync, list[Tensor]]:
        """Open it; return with it what is held of the parameters, moved to where this rank has moved them."""
        before = {slot: call.own_slots[slot] for slot in (*phases.slots, *[LOCAL_LR] * phases.apart)}
        if phases.begins(call.calls):
            before = tree.map(torch.zeros_like, before)
        new = tree.map(lambda x: pool.take(x.numel(), x.dtype, x.device).view(x.shape).copy_(x), before)
        structure, axis = tensors.structure, None if shard is None else shard.data
        names = [inside[0].name for inside in structure.segments]
        views = {slot: [new[slot][name].view(-1) for name in names] for slot in phases.slots}
        exchange = Exchange(call.calls, axis, views, new.get(LOCAL_LR))
        made = cls(axis is None, {"exchange": exchange}, before, new)
        drafts.written.append(made)
        params = list(tensors.parts)
        for i, name in zip(structure.trained, names, strict=True) if phases.apart else ():
            params[i] = add_update(params[i], before[LOCAL_UPDATE][name], exchange.size)
        return made, params

    def sums(self, structure: Structure, shard: Shard | None, *others: Any) -> InPlace | Bucketed:
        """Prepare to sum gradients over microbatches alone."""
        return Reduce().sums(structure, None, *others)

    def after(self, skip: Tensor | None) -> dict[str, Any]:
        """Return the slots after the call; where `skip`, () bool, is true they are what they were."""
        if skip is not None:
            for old, x in zip(tree.leaves(self.before), tree.leaves(self.new), strict=True):
                torch.where(skip, old, x, out=x)
        return dict(self.new)


def memories(optimizer: Optimizer) -> Iterator[Memory]:
    """Yield the slots that the step has for an optimizer that leaves `reduce` out in some calls."""
    if optimizer.phases is None:
        return
    for slot in optimizer.phases.slots:
        yield Memory(slot, nothing_kept, "partial")
    if optimizer.phases.apart:
        yield Memory(LOCAL_LR, lambda shapes, device: _sums_of_lr(optimizer, device), "replicated")


def _sums_of_lr(optimizer: Optimizer, device: torch.device) -> Any:
    if not optimizer.members:
        return torch.zeros((), dtype=torch.float64, device=device)
    return {pattern: _sums_of_lr(member, device) for pattern, member in optimizer.members.items()}


def check_no_sync(
    optimizer: Optimizer, shard: Shard | None, condition: Sequence[object], residency: Residency, synchronize: object
) -> None:
    """Raise `ComposeError` for what needs the whole gradient, with an optimizer that ranks do not sum it for."""
    if optimizer.phases is None:
        return
    if synchronize is not None:
        raise ComposeError(
            "this optimizer sends something else than gradients, and ranks agree on parameters now and then",
            where="station 'after'",
            got=f"{synchronize}, {optimizer}",
            want="one of the two: fds.local_updates(...) with adamw, or this optimizer",
        )
    if shard is None:
        return
    if shard.slices_state:
        raise ComposeError(
            "this optimizer needs whole parameters and gradients, and each rank has slices of them",
            got=f"shard_optimizer(stage={shard.stage}), {optimizer}",
            want="shard_optimizer(stage=0)",
            hint="with slices: shard_optimizer(stage=1, gradients=fds.transports.onebit()) and adamw",
        )
    for map_ in condition:
        if getattr(map_, "needs", None) != "norm":
            raise ComposeError(
                "a gradient map needs the whole gradient, which ranks do not sum for this optimizer after its warm-up",
                where="station 'condition'",
                got=f"{map_}, {optimizer}",
                want="maps of the norm, as fds.clip_by_global_norm(1.0): after the warm-up of each rank's own gradient",
                hint="with others: shard_optimizer(gradients=fds.transports.onebit()) and adamw",
            )
    if residency.kinds:
        raise ComposeError(
            "this optimizer sends from where the step runs, and leaves live elsewhere",
            where="station 'place'",
            got=f"{residency}, {optimizer}",
            want="no offload",
        )


def same_metrics(totals: Totals, everyone: Axis | None, what: str, asked: dict[str, list[str]]) -> None:
    """Raise `LossError` where the metrics are not those of every other rank, and of every other call.

    Ranks ask each other in the first call; whoever changes them later learns it before anything is sent.
    """
    if everyone is None:
        return
    kinds = [f"{name}: {'mean' if x.is_floating_point() else 'sum'}" for name, x in sorted(totals.metrics.items())]
    if what not in asked:
        replies = everyone.exchange(kinds, what)
        for rank, theirs in enumerate(replies):
            if theirs != replies[0]:
                raise LossError(
                    "ranks return different metrics",
                    where=f"rank {rank} of {everyone.name}",
                    got=str(theirs),
                    want=f"{replies[0]}, as rank 0",
                )
        asked[what] = kinds
    if asked[what] != kinds:
        raise LossError(
            "the metrics change from call to call, and ranks could not add them up",
            got=str(kinds),
            want=str(asked[what]),
            hint="return them in every call",
        )
