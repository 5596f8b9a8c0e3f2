"""What an optimizer that adds up over ranks by itself remembers of its messages, and what it asks of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import ComposeError
from fds.optim import Optimizer
from fds.optim.exchange import ERRORS, Exchange, Phases
from fds.step.call import Call
from fds.step.pool import Pool
from fds.step.residency.contract import Residency
from fds.step.sharding.shard import Shard
from fds.step.structure import Structure


@attrs.frozen(eq=False)
class OwnSums:
    """The errors of an optimizer's messages before a call, and the exchange that writes the new ones."""

    before: Mapping[str, Mapping[str, Tensor]]  # slot -> by trained parameter
    new: Mapping[str, Mapping[str, Tensor]]
    exchange: Exchange

    @classmethod
    def of(
        cls, phases: Phases, shard: Shard | None, structure: Structure, slots: Mapping[str, Any], call: Call, pool: Pool
    ) -> OwnSums | None:
        """Return those of a call, given the slots of the state; None for a call in which gradients are summed."""
        if not phases.local(call.calls):
            return None
        before = {slot: slots[slot] for slot in ERRORS}
        new = {
            slot: {name: pool.take(x.numel(), x.dtype, x.device).view(x.shape).copy_(x) for name, x in held.items()}
            for slot, held in before.items()
        }
        names = [inside[0].name for inside in structure.segments]
        errors = {slot: [held[name].view(-1) for name in names] for slot, held in new.items()}
        return cls(before, new, Exchange(call.calls, None if shard is None else shard.data, errors))

    def after(self, skip: Tensor | None) -> dict[str, Mapping[str, Tensor]]:
        """Return the slots after the call; where `skip`, () bool, is true they are what they were."""
        if skip is not None:
            for slot, held in self.new.items():
                for name, x in held.items():
                    torch.where(skip, self.before[slot][name], x, out=x)
        return dict(self.new)


def check_own_sums(
    optimizer: Optimizer, shard: Shard | None, condition: Sequence[object], residency: Residency, synchronize: object
) -> None:
    """Raise `ComposeError` for what needs the whole gradient, with an optimizer that ranks do not sum it for."""
    if optimizer.phases is None:
        return
    if synchronize is not None:
        raise ComposeError(
            "this optimizer sends something else than gradients, and ranks agree on parameters now and then",
            where="station 'synchronize'",
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
    if condition:
        raise ComposeError(
            "a gradient map needs the whole gradient, which ranks do not sum for this optimizer after its warm-up",
            where="station 'condition'",
            got=f"{condition[0]}, {optimizer}",
            want="no clips and no other maps of gradients",
            hint="with clips: shard_optimizer(gradients=fds.transports.onebit()) and adamw",
        )
    if residency.kinds:
        raise ComposeError(
            "this optimizer sends from where the step runs, and leaves live elsewhere",
            where="station 'place'",
            got=f"{residency}, {optimizer}",
            want="no offload",
        )
