"""Memory of the next state: leaves that an update writes, in the old state's memory or in a pool's."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate, compress, islice
from operator import not_
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.state import State, Token
from fds.step.call import Call
from fds.step.checks.state_check import StateTensors
from fds.step.donated import TAKEN, KnownMemory, writable
from fds.step.pool import Buffers, Pool
from fds.step.residency.contract import check_apart
from fds.step.residency.lives import Lives
from fds.step.stations import After, Place, Synchronize
from fds.step.structure import Structure

ALL: Sequence[int] = range(sys.maxsize)  # which leaves some are, where they are all
Parts = list[tuple[Any, list[Tensor]]]  # trees, each with some of its leaves


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
    after: dict[str, Any]  # slot -> what follows an update, all of it at once
    pieces: dict[str, Any]  # slot -> what follows it chunk by chunk: its memory, not what it holds until then
    flat: list[Tensor]  # all of them, in this order
    old: list[Tensor]  # the old values of all of them
    memory: KnownMemory | None  # of their memory, where the new state may be given up

    def replace(self, trained: list[Tensor], opt: dict[str, list[Tensor | None]]) -> None:
        """Take other memory, which an optimizer has returned."""
        self.trained = [x.view(old.shape) for x, old in zip(trained, self.trained, strict=True)]
        self.opt, self.memory = self.structure.name_slots(opt), None

    def synchronize(self, rule: Synchronize, *, skip: Tensor | None, call: Call) -> None:
        """Let ranks with parameters of their own agree on what was updated."""
        opt = self.structure.align(
            [self.opt[slot][name].view(-1) for slot, want in self.structure.opt.items() for name in want.names]
        )
        rule(self.structure, [x.view(-1) for x in self.trained], opt, skip=skip, call=call)

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
        return Token.after(state, self.memory) if self.over else Token(memory=self.memory)


@attrs.frozen(eq=False)
class Apart:
    """Leaves of the new state in memory of their own, which may be written before the step has decided.

    By index among all leaves that an update writes.
    """

    tensors: dict[int, Tensor]
    flat: dict[int, Tensor]
    old: dict[int, Tensor]  # the old values, flat

    def others(self, parts: Parts) -> tuple[list[int], Parts]:
        """Return the indices of all other leaves, and of trees with their leaves those others."""
        index = [i for i in range(sum(len(leaves) for _, leaves in parts)) if i not in self.tensors]
        ends = accumulate((len(leaves) for _, leaves in parts), initial=0)
        mine = self.tensors.keys()
        return index, [
            (tree_, [x for i, x in enumerate(leaves, start) if i not in mine])
            for (tree_, leaves), start in zip(parts, ends, strict=False)
        ]

    def among(self, index: Sequence[int], *others: list[Tensor]) -> tuple[list[Tensor], ...]:
        """Return tensors, flat ones and old values of all leaves, given those of the `others`, of these indices."""
        columns = (
            mine | dict(zip(index, values, strict=True))
            for mine, values in zip((self.tensors, self.flat, self.old), others, strict=True)
        )
        return tuple([leaves[i] for i in sorted(leaves)] for leaves in columns)


def new_leaves(
    place: Place,
    lives: Lives,
    pool: Pool,
    state: State,
    held: StateTensors,
    after: Sequence[After],
    apart: Apart | None = None,
) -> NewLeaves:
    """Return the leaves of the new state, with the old values: the old state's own to write over, or the pool's.

    Those that are `apart` are in memory of their own.
    """
    over = state.token.memory is TAKEN or (place.donate and not state.token.readers)
    if lives.writes_on_host:  # to memory that the device may still copy from
        state.step.to("cpu")
    structure = held.structure
    averages = {filler.slot: tree.flatten(state.slots[filler.slot]) for filler in after}
    parts = [(state.params, structure.pick(held.parts)), (state.opt, list(held.opt))]  # each in two lists
    parts += [(state.slots[name], list(leaves)) for name, (leaves, _) in averages.items()]
    index = ALL
    if apart is not None and apart.tensors:
        index, parts = apart.others(parts)
    if over:
        tensors, memory = writable(state, parts, structure, lists=2, copy=lambda j, x: lives.copy(index[j], x))
        buffers = memory.buffers
        old = buffers.flat
    else:
        old = [x for _, leaves in parts for x in leaves]
        others = () if apart is None else apart.tensors.values()
        tensors, buffers = pooled(lives, pool, index, old, (structure, *map(tree.device_of, old)), others)
        memory = KnownMemory.of(tensors, structure, buffers) if place.donate else None
    flat = buffers.flat
    if apart is not None and apart.tensors:
        tensors, flat, old = apart.among(index, tensors, flat, old)
    out = iter(tensors)
    trained = list(islice(out, len(structure.trained)))
    opt = {slot: dict(zip(want.names, out, strict=False)) for slot, want in structure.opt.items()}
    built = {name: build(islice(out, len(leaves))) for name, (leaves, build) in averages.items()}
    pieces = dict(zip(lives.after, map(built.pop, lives.after), strict=True))
    return NewLeaves(
        structure=structure,
        place=place,
        lives=lives,
        over=over,
        trained=trained,
        opt=opt,
        after=built,
        pieces=pieces,
        flat=flat,
        old=old,
        memory=memory,
    )


def pooled(
    lives: Lives, pool: Pool, index: Sequence[int], old: list[Tensor], kind: tuple[Any, ...], beside: Iterable[Tensor]
) -> tuple[list[Tensor], Buffers]:
    """Return a pool's memory for leaves of these indices, where they live, with the old values in those that want them.

    Raises `ComposeError` where a residency makes memory for them that is that of others, `old` ones or those `beside`.
    """
    if not lives.media:
        return pool.copies(old, kind)
    fresh: list[Tensor] = []

    def make(j: int, x: Tensor) -> Tensor:
        fresh.append(lives.make(index[j], x))
        return fresh[-1]

    tensors, buffers = pool.copies(old, kind, make=make, copied=lambda j: lives.is_copied(index[j]))
    if fresh:
        places = {x.data_ptr() for x in fresh}
        made = [x.data_ptr() in places for x in tensors]
        check_apart(lives.residency, compress(tensors, made), [*compress(tensors, map(not_, made)), *old, *beside])
    return tensors, buffers
