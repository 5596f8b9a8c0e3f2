"""The update: memory of the new state, and the optimizer that writes into it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import compress, islice
from operator import not_
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.optim import Optimizer, returned
from fds.optim.base import Values
from fds.optim.exchange import Exchange
from fds.state import State, Token
from fds.step.call import Call
from fds.step.checks import contracts
from fds.step.checks.draws import tie
from fds.step.checks.state_check import StateTensors
from fds.step.donated import TAKEN, KnownMemory, writable
from fds.step.gradients import Gradients
from fds.step.pool import Buffers, Pool
from fds.step.residency.apart import Apart
from fds.step.residency.chunks import Piece, with_frozen
from fds.step.residency.contract import check_apart
from fds.step.residency.lives import Column, Lives
from fds.step.residency.visit import Visit, chunks_of_leaves
from fds.step.stations import After, Place
from fds.step.structure import Structure
from fds.step.synchronizing import Synchronize
from fds.step.topology import Dimensions

ALL: Sequence[int] = range(sys.maxsize)  # which leaves some are, where they are all


@attrs.frozen(eq=False)
class Rule:
    """An optimizer in one call of a step, which updates some slices, or pieces of them, on a device."""

    optimizer: Optimizer
    slots: list[str]
    share: Callable[[str, Tensor], None]
    given: dict[str, Any]  # to all of them
    values: Values
    divisor: Tensor | None = None  # by which gradients are divided first, () float64
    on: dict[torch.device, dict[str, Any]] = tree.new(dict)  # what is given there

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        structure: Structure,
        dimensions: Dimensions,
        state: State,
        values: Values,
        *,
        scale: Tensor | None,
        skip: Tensor | None,
        divisor: Tensor | None = None,
    ) -> Rule:
        """Return the rule of an update with gradients of this `scale`, () float32, None for 1."""
        given = {"step": state.step, "grad_scale": scale, "skip": skip, "axes": dimensions.split}
        return cls(optimizer, list(structure.opt), dimensions.share, given, values, divisor)

    def __call__(
        self, pieces: list[Piece], grads: list[Tensor], columns: list[Column], device: torch.device
    ) -> list[Column]:
        """Return the columns that the optimizer returned."""
        if device not in self.on:
            moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.given.items()}
            self.on[device] = moved | self.optimizer.given(self.values.to(device))
        if self.divisor is not None:
            for x in grads:
                x.div_(self.divisor.to(device))
        inside = [x.segments for x in pieces]
        params, opt = returned.update(
            self.optimizer,
            grads,
            dict(zip(self.slots, columns[1:], strict=True)),
            [x for x in columns[0] if x is not None],
            segments=inside,
            **self.on[device],
        )
        found: list[Column] = [list(params), *(opt[slot] for slot in self.slots)]
        for column in found:
            tie(self.share, self.optimizer, column, inside)
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
    after: dict[str, Any]  # slot -> what follows an update, all of it at once
    pieces: dict[str, Any]  # slot -> what follows it chunk by chunk: its memory, not what it holds until then
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
        exchange: Exchange | None = None,
        again: Collection[int] | None = None,
    ) -> None:
        """Update parameters and optimizer state; from the first write on, a state that is given up is marked so.

        Of what was updated ahead, chunks with these slices are updated `again`; None for all.
        """
        structure, n, segments = self.structure, len(self.trained), self.structure.segments
        flat, flat_opt = self.flat[:n], structure.align(self.flat[n:])
        if self.lives.visited:
            columns: list[Column] = [list(flat), *flat_opt.values()]
            old: list[Column] = [list(self.old[:n]), *structure.align(self.old[n:]).values()]
            find = functools.partial(chunks_of_leaves, self.lives, columns, old, chunks)
            ahead = [one for one in find(ahead=True) if again is None or any(x.index in again for x in one.pieces)]
            rule = Rule.of(optimizer, structure, dimensions, state, values, scale=grads.scale, skip=skip)
            return Visit([*ahead, *find(ahead=False)], rule, lambda: self.give_up(state)).finish(
                dict(enumerate(grads.leaves))
            )
        now: dict[str, Any] = {"step": state.step, "grad_scale": grads.scale, "skip": skip, "axes": dimensions.split}
        now |= optimizer.given(values)
        if exchange is not None:
            now["exchange"] = exchange
        self.give_up(state)
        new, new_opt = returned.update(optimizer, grads.leaves, flat_opt, flat, segments=segments, **now)
        for slices in (new, *new_opt.values()):
            tie(dimensions.share, optimizer, slices, segments)
        if new is not flat or new_opt is not flat_opt:  # ours write in place and return what they were given
            self.trained = [x.view(old.shape) for x, old in zip(new, self.trained, strict=True)]
            self.opt, self.known = structure.name_slots(new_opt), None
        return None

    def synchronize(self, one: Synchronize, *, skip: Tensor | None, call: Call) -> None:
        """Let ranks with parameters of their own agree on what was updated."""
        opt = self.structure.align(
            [self.opt[slot][name].view(-1) for slot, want in self.structure.opt.items() for name in want.names]
        )
        one(self.structure, [x.view(-1) for x in self.trained], opt, skip=skip, call=call)

    def follow(
        self, one: After, slot: Any, params: Any, chunks: list[list[Piece]], *, skip: Tensor | None, call: Call
    ) -> Any:
        """Return what a slot becomes that follows the update to new parameters: at once, or in the chunks of that."""
        lives = self.lives.after.get(one.slot)
        if lives is None:
            return contracts.remembered(one(slot, params, skip, call), self.after[one.slot], one)

        def run(pieces: list[Piece], given: list[Tensor], columns: list[Column], device: torch.device) -> list[Column]:
            skipped = None if skip is None else skip.to(device)
            return [contracts.remembered(one(columns[0], given, skipped, call), columns[0], one)]

        def flat(x: Any) -> list[Tensor]:
            return [leaf.reshape(-1) for leaf in self.structure.like_parts(x)]

        new = self.pieces[one.slot]
        lives = attrs.evolve(lives, residency=self.lives.residency)
        every = with_frozen(self.structure, chunks)
        found = chunks_of_leaves(lives, [[*flat(new)]], [[*flat(slot)]], every, ahead=False)
        Visit(found, run, lambda: None).finish(dict(enumerate(flat(params))))
        return new

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


def leaves_apart(lives: Lives, pool: Pool, held: StateTensors) -> Apart:
    """Return memory for the leaves that are updated ahead: the pool's, with anything in it."""
    every = [*held.structure.pick(held.parts), *held.opt]
    index = [i for i in range(len(every)) if lives.apart and lives.apart[i]]
    old = [every[i] for i in index]
    tensors, buffers = _pooled(lives, pool, index, old, (held.structure, lives.device), every)
    found = (tensors, buffers.flat, [x.reshape(-1) for x in old])
    return Apart(*(dict(zip(index, some, strict=True)) for some in found))


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
    averages = {one.slot: tree.flatten(state.slots[one.slot]) for one in after}
    parts = [(state.params, structure.pick(held.parts)), (state.opt, list(held.opt))]  # each in two lists
    parts += [(state.slots[name], list(leaves)) for name, (leaves, _) in averages.items()]
    index = ALL
    if apart is not None and apart.tensors:
        index, parts = apart.others(parts)
    if over:
        tensors, known = writable(state, parts, structure, lists=2, copy=lambda j, x: lives.copy(index[j], x))
        buffers = known.buffers
        old = buffers.flat
    else:
        old = [x for _, some in parts for x in some]
        others = () if apart is None else apart.tensors.values()
        tensors, buffers = _pooled(lives, pool, index, old, (structure, *map(tree.device_of, old)), others)
        known = KnownMemory.of(tensors, structure, buffers) if place.donate else None
    flat = buffers.flat
    if apart is not None and apart.tensors:
        tensors, flat, old = apart.among(index, tensors, flat, old)
    out = iter(tensors)
    trained = list(islice(out, len(structure.trained)))
    opt = {slot: dict(zip(want.names, out, strict=False)) for slot, want in structure.opt.items()}
    built = {name: build(islice(out, len(leaves))) for name, (leaves, build) in averages.items()}
    pieces = dict(zip(lives.after, map(built.pop, lives.after), strict=True))
    return NewLeaves(structure, place, lives, over, trained, opt, built, pieces, flat, old, known)


def _pooled(
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
