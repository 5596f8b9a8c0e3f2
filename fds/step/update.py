"""The update: memory of the new state, and the optimizer that writes into it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import compress, islice
from operator import not_
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.optim import Optimizer, returned
from fds.optim.base import Values
from fds.state import State, Token
from fds.step.checks.draws import tie
from fds.step.checks.state_check import StateTensors
from fds.step.donated import TAKEN, KnownMemory, writable
from fds.step.gradients import Gradients
from fds.step.pool import Pool
from fds.step.residency.chunks import Piece
from fds.step.residency.contract import check_apart
from fds.step.residency.lives import Column, Lives
from fds.step.residency.visit import HOST, visit
from fds.step.stations import After, Place
from fds.step.structure import Structure
from fds.step.topology import Dimensions


def _run(
    optimizer: Optimizer,
    slots: list[str],
    share: Callable[[str, Tensor], None],
    now: dict[torch.device, dict[str, Any]],
    pieces: list[Piece],
    grads: list[Tensor],
    columns: list[Column],
    device: torch.device,
) -> list[Column]:
    """Update some slices, or pieces of them, on a device; return the columns that the optimizer returned."""
    inside = [x.segments for x in pieces]
    params, opt = returned.update(
        optimizer,
        grads,
        dict(zip(slots, columns[1:], strict=True)),
        [x for x in columns[0] if x is not None],
        segments=inside,
        **now[device],
    )
    found: list[Column] = [list(params), *(opt[slot] for slot in slots)]
    for column in found:
        tie(share, optimizer, column, inside)
    return found


@attrs.define(eq=False)
class NewLeaves:
    """Leaves of the new state that an update writes: in the old state's memory where that is given up, or a pool's.

    Until they are updated they hold the old values, unless a residency reads these from `old`.
    """

    structure: Structure
    place: Place
    lives: Lives
    over: bool  # whether they are the old state's memory
    trained: list[Tensor]
    opt: dict[str, dict[str, Tensor]]
    after: dict[str, Any]  # slot -> what follows an update
    flat: list[Tensor]  # all of them, in this order
    old: list[Tensor]  # the old values of all of them
    known: KnownMemory | None  # of their memory, where the new state may be given up

    def update(
        self,
        state: State,
        optimizer: Optimizer,
        grads: Gradients,
        chunks: list[list[Piece]],
        dimensions: Dimensions,
        *,
        skip: Tensor | None,
        values: Values,
    ) -> None:
        """Update parameters and optimizer state; from the first write on, a state that is given up is marked so."""
        structure, n, segments = self.structure, len(self.trained), self.structure.segments
        flat, flat_opt = self.flat[:n], structure.align(self.flat[n:])
        now = {"step": state.step, "grad_scale": grads.scale, "skip": skip, "axes": dimensions.split}
        now |= optimizer.given(values)
        if self.lives.visited:
            columns: list[Column] = [list(flat), *flat_opt.values()]
            old: list[Column] = [list(self.old[:n]), *structure.align(self.old[n:]).values()]
            moved = {state.step.device: now}
            if any(self.lives.on_host):
                scalars = {name: x.to(HOST) if isinstance(x, Tensor) else x for name, x in now.items()}
                moved[HOST] = scalars | optimizer.given(values.to(HOST))
            run = functools.partial(_run, optimizer, list(flat_opt), dimensions.share, moved)
            return visit(self.lives, columns, old, grads.leaves, chunks, run, lambda: self.give_up(state))
        self.give_up(state)
        new, new_opt = returned.update(optimizer, grads.leaves, flat_opt, flat, segments=segments, **now)
        for slices in (new, *new_opt.values()):
            tie(dimensions.share, optimizer, slices, segments)
        if new is not flat or new_opt is not flat_opt:  # ours write in place and return what they were given
            self.trained = [x.view(old.shape) for x, old in zip(new, self.trained, strict=True)]
            self.opt, self.known = structure.name_slots(new_opt), None
        return None

    def give_up(self, state: State) -> None:
        """Mark a state that is given up as such, before the first of its tensors is written."""
        if self.place.donate:
            state.token.spent_at = int(state.calls)
            state.token.memory = None
        if self.over:
            # fused kernels do not: a graph that saved these must fail
            torch.autograd.graph.increment_version(self.flat)

    def token(self, state: State) -> Token:
        """Return the token of the new state."""
        state.token.became = self.place.donate  # if not, whoever gives it up later may fail
        return Token.after(state, self.known) if self.over else Token(memory=self.known)


def new_leaves(
    place: Place, lives: Lives, pool: Pool, state: State, held: StateTensors, after: Sequence[After]
) -> NewLeaves:
    """Return the leaves of the new state, with the old values: the old state's own to write over, or the pool's."""
    over = state.token.memory is TAKEN or (place.donate and not state.token.readers)
    structure = held.structure
    averages = {one.slot: tree.flatten(state.slots[one.slot]) for one in after}
    parts = [(state.params, structure.pick(held.parts)), (state.opt, list(held.opt))]  # each in two lists
    parts += [(state.slots[name], list(leaves)) for name, (leaves, _) in averages.items()]
    if over:
        tensors, known = writable(state, parts, structure, lists=2, copy=lives.copy)
        buffers = known.buffers
        old = buffers.flat
    else:
        old = [x for _, some in parts for x in some]
        others = map(tree.device_of, old[len(held.devices) + len(held.opt) :])
        fresh: list[Tensor] = []

        def make(i: int, x: Tensor) -> Tensor:
            fresh.append(lives.make(i, x))
            return fresh[-1]

        kind = (structure, *held.devices, *others)
        some = (make, lives.is_copied) if lives.media else (None, None)
        tensors, buffers = pool.copies(old, kind, make=some[0], copied=some[1])
        known = KnownMemory.of(tensors, structure, buffers) if place.donate else None
        if fresh:
            places = {x.data_ptr() for x in fresh}
            made = [x.data_ptr() in places for x in tensors]
            check_apart(place.residency, compress(tensors, made), [*compress(tensors, map(not_, made)), *old])
    out = iter(tensors)
    trained = list(islice(out, len(structure.trained)))
    opt = {slot: dict(zip(want.names, out, strict=False)) for slot, want in structure.opt.items()}
    built = {name: build(islice(out, len(leaves))) for name, (leaves, build) in averages.items()}
    return NewLeaves(structure, place, lives, over, trained, opt, built, buffers.flat, old, known)
