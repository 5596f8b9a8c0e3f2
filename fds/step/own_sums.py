"""Ranks that agree by themselves: optimizers that send no gradients, and parameters that drift apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives.traffic import Expected
from fds.errors import ComposeError
from fds.layout import Segment
from fds.optim import Optimizer
from fds.optim.exchange import LOCAL_LR, LOCAL_UPDATE, Exchange, Phases, moved, remembered
from fds.step.call import Call
from fds.step.memory import Memory
from fds.step.pool import Pool
from fds.step.residency.contract import Residency
from fds.step.sharding.kept import nothing_kept
from fds.step.sharding.shard import Shard
from fds.step.structure import Structure


@attrs.frozen(eq=False)
class OwnSums:
    """The slots of an optimizer before a call, and the exchange that writes the new ones."""

    before: Mapping[str, Any] = tree.new(dict)  # slot -> by trained parameter; of learning rates by pattern, or one
    new: Mapping[str, Any] = tree.new(dict)
    exchange: Exchange | None = None  # None in a call in which gradients are summed
    are_local: bool = False  # whether every data rank has gradients of its own

    @classmethod
    def of(
        cls, phases: Phases, shard: Shard | None, structure: Structure, slots: Mapping[str, Any], call: Call, pool: Pool
    ) -> OwnSums:
        """Return those of a call in which gradients are not summed, given the slots of the state."""

        def copied(x: Tensor) -> Tensor:
            return pool.take(x.numel(), x.dtype, x.device).view(x.shape).copy_(x)

        names_of_slots = (*remembered(phases), *([LOCAL_LR] if phases.apart else ()))
        before = {slot: slots[slot] for slot in names_of_slots}
        if phases.begins(call.calls):
            before = tree.map(torch.zeros_like, before)
        new = tree.map(copied, before)
        names = [inside[0].name for inside in structure.segments]
        views = {slot: [new[slot][name].view(-1) for name in names] for slot in remembered(phases)}
        axis = None if shard is None else shard.data
        return cls(before, new, Exchange(call.calls, axis, views, new.get(LOCAL_LR)), axis is not None)

    def seen(self, structure: Structure, parts: list[Tensor]) -> list[Tensor]:
        """Return the parameters that this rank's loss sees, given those of the state: what it moved by itself moved."""
        updates = self.before.get(LOCAL_UPDATE)
        if updates is None or self.exchange is None:
            return parts
        params, size = list(parts), self.exchange.size
        for i, inside in zip(structure.trained, structure.segments, strict=True):
            params[i] = moved(parts[i], updates[inside[0].name], size)
        return params

    def after(self, skip: Tensor | None) -> dict[str, Any]:
        """Return the slots after the call; where `skip`, () bool, is true they are what they were."""
        if skip is not None:
            for old, x in zip(tree.leaves(self.before), tree.leaves(self.new), strict=True):
                torch.where(skip, old, x, out=x)
        return dict(self.new)


SUMMED = OwnSums()  # those of a call in which ranks sum gradients


def memories(optimizer: Optimizer) -> Iterator[Memory]:
    """Yield the slots that the step has for an optimizer."""
    if optimizer.phases is None:
        return
    for slot in remembered(optimizer.phases):
        yield Memory(slot, nothing_kept, "partial")
    if optimizer.phases.apart:
        yield Memory(LOCAL_LR, lambda shapes, device: _sums_of_lr(optimizer, device), "replicated")


def _sums_of_lr(optimizer: Optimizer, device: torch.device) -> Any:
    if not optimizer.members:
        return torch.zeros((), dtype=torch.float64, device=device)
    return {pattern: _sums_of_lr(member, device) for pattern, member in optimizer.members.items()}


def check_own_sums(
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


Slots = dict[str, list[Tensor | None]]


class Synchronize(Protocol):
    """An entry of the station `after` that writes parameters: how ranks along an axis of role "local" agree on them.

    It says so by an attribute `writes = "params"`, and is called before all others, which follow what was agreed on.

    What it remembers lies in the state beside the optimizer's own, `state.opt`, a slice for each that is trained.
    """

    def init(self, segments: Sequence[Sequence[Segment]], *, params: list[Tensor]) -> Slots:
        """Return the slots of a first state, as `Optimizer.init` does."""
        ...

    def owns(self, slot: str) -> bool:
        """Say by its name whether a slot is one of these."""
        ...

    def agrees(self, slot: str) -> bool:
        """Say whether a slot is one of these, and the same on all ranks along the axis."""
        ...

    def __call__(
        self, structure: Structure, params: list[Tensor], opt: Slots, *, skip: Tensor | None, call: Call
    ) -> None:
        """Write into the trained slices, 1-D, and into the slots; where `skip` is true nothing may change."""
        ...

    def bytes_sent(self, structure: Structure) -> tuple[float, float]:
        """Return the most bytes that this rank sends in one call, and the mean over many calls."""
        ...

    def messages(self, structure: Structure) -> Iterable[Expected]:
        """Return the messages of the call in which it sends most, for `describe`."""
        ...


def remembering(optimizer: Optimizer | None, synchronize: Synchronize | None) -> Optimizer | None:
    """Return the optimizer with the slots of a filler beside its own, if there is one, which its update leaves alone.

    Its `init` raises `ComposeError` where both have a slot of one name.
    """
    if optimizer is None or synchronize is None:
        return optimizer

    def init(segments: Sequence[Sequence[Segment]], *, params: list[Tensor]) -> Slots:
        slots = optimizer.init(segments, params=params)
        if both := list(filter(synchronize.owns, slots)):
            raise ComposeError(
                "an optimizer has a slot that ranks need to synchronize",
                where="station 'optimizer'",
                got=f"{optimizer}: {', '.join(both)}",
                want="slots of other names",
            )
        return {**slots, **synchronize.init(segments, params=params)}

    def update(grads: list[Tensor], opt: Slots, params: list[Tensor], **now: Any) -> tuple[list[Tensor], Slots]:
        more = {slot: opt.pop(slot) for slot in [*opt] if synchronize.owns(slot)}
        params, slots = optimizer.update(grads, opt, params, **now)
        return params, {**slots, **more}

    def bind(shapes: Mapping[str, tuple[int, ...]]) -> Optimizer:
        bound = remembering(optimizer.bound(shapes), synchronize)
        assert bound is not None
        return bound

    bound = attrs.evolve(optimizer, init=init, update=update)
    return bound if optimizer.bind is None else attrs.evolve(bound, bind=bind)
