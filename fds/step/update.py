"""The update: memory of the new state, and the optimizer that writes into it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.optim import Optimizer, returned
from fds.optim.base import Values
from fds.state import State, Token
from fds.step.checks.draws import tie
from fds.step.checks.state_check import Held
from fds.step.donated import Memory, writable
from fds.step.gradients import Gradients
from fds.step.pool import Pool
from fds.step.stations import After, Place
from fds.step.structure import Structure
from fds.step.topology import Dimensions


@attrs.define(eq=False)
class NewLeaves:
    """Leaves of the new state that an update writes: in the old state's memory where that is given up, or a pool's.

    They hold the old values until they are updated.
    """

    structure: Structure
    place: Place
    over: bool  # whether they are the old state's memory
    trained: list[Tensor]
    opt: dict[str, dict[str, Tensor]]
    after: dict[str, Any]  # slot -> what follows an update
    flat: list[Tensor]  # all of them, in this order
    known: Memory | None  # of their memory, where the new state may be given up

    def give_up(self, state: State) -> None:
        """Mark a state that is given up as such, before the first of its tensors is written."""
        if self.place.donate:
            state.token.spent_at = int(state.calls)
            state.token.memory = None
        if self.over:
            # fused kernels do not: a graph that saved these must fail
            torch.autograd.graph.increment_version(self.flat)

    def update(
        self, optimizer: Optimizer, grads: Gradients, dimensions: Dimensions, *, step: Tensor, skip: Tensor | None,
        values: Values,
    ) -> None:  # fmt: skip
        """Update parameters and optimizer state."""
        structure, n = self.structure, len(self.trained)
        flat, flat_opt = self.flat[:n], structure.align(self.flat[n:])
        new, new_opt = returned.update(
            optimizer, grads.leaves, flat_opt, flat, step=step, grad_scale=grads.scale, skip=skip,
            segments=structure.segments, axes=dimensions.split, **optimizer.given(values),
        )  # fmt: skip
        for leaves in (new, *new_opt.values()):
            tie(dimensions.share, optimizer, leaves, structure.segments)
        if new is not flat or new_opt is not flat_opt:  # ours write in place and return what they were given
            self.trained = [x.view(old.shape) for x, old in zip(new, self.trained, strict=True)]
            self.opt, self.known = structure.name_slots(new_opt), None

    def token(self, state: State) -> Token:
        """Return the token of the new state."""
        return Token.after(state, self.known) if self.over else Token(memory=self.known)


def new_leaves(place: Place, pool: Pool, state: State, held: Held, after: Sequence[After]) -> NewLeaves:
    """Return the leaves of the new state, with the old values: the old state's own to write over, or the pool's."""
    structure, over = held.structure, place.donate and not state.token.readers
    averages = {one.slot: tree.flatten(state.slots[one.slot]) for one in after}
    parts = [(state.params, structure.pick(held.parts)), (state.opt, list(held.opt))]  # each in two lists
    parts += [(state.slots[name], list(leaves)) for name, (leaves, _) in averages.items()]
    if over:
        tensors, known = writable(state, parts, structure, lists=2)
        buffers = known.buffers
    else:
        copied = [x for _, some in parts for x in some]
        others = map(tree.device_of, copied[len(held.devices) + len(held.opt) :])
        tensors, buffers = pool.copies(copied, (structure, *held.devices, *others))
        known = Memory.of(tensors, structure, buffers) if place.donate else None
    out = iter(tensors)
    trained = list(islice(out, len(structure.trained)))
    opt = {slot: dict(zip(want.names, out, strict=False)) for slot, want in structure.opt.items()}
    built = {name: build(islice(out, len(leaves))) for name, (leaves, build) in averages.items()}
    return NewLeaves(structure, place, over, trained, opt, built, buffers.flat, known)
