"""The update of leaves that live elsewhere: chunk after chunk is read, updated and written back."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from fds import random
from fds.optim import returned
from fds.step.call import Call
from fds.step.checks import contracts
from fds.step.checks.contracts import tie
from fds.step.gradients import Gradients
from fds.step.new_leaves import Apart, NewLeaves, new_leaves
from fds.step.ranges import in_range
from fds.step.residency.chunks import Piece, with_frozen
from fds.step.residency.contract import Deferred, hear, put_off
from fds.step.residency.landing import Landing, Tell
from fds.step.residency.lives import Column, Lives
from fds.step.residency.visit import Chunk, Run, Visit, chunks_of_leaves
from fds.step.stations import After
from fds.step.update import Map, Update


@attrs.define(eq=False)
class InChunks(Update):
    """The update of one call where leaves live elsewhere: complete gradients are written there, and read by chunks."""

    store: Landing | None = None  # of summed gradients, where these live elsewhere
    tells: Tell | None = None  # who is told of each as it is complete
    apart: Apart | None = None  # leaves that are written in backward

    def landing(self, trained: list[Tensor]) -> Landing | None:
        """Return where the sums of gradients by `trained` leaves go as each is final; None where they stay."""
        step, setup, structure = self.step, self.setup, self.setup.tensors.structure
        if "gradients" not in setup.residency.kinds and self.tells is None:
            return None
        device, pool = setup.call.device, step.runtime.gradients
        first = [members[0] for members in structure.members.values()] if structure.sharded else range(len(trained))
        dtypes = [step.sum.dtype or trained[i].dtype for i in first]
        late = [k for k, inside in enumerate(structure.segments) if inside and step.dimensions.is_late(inside[0].name)]
        elsewhere = [False] * len(dtypes)
        with put_off(setup.residency):
            elsewhere = step.lives(structure, setup.state).landed
        self.store = Landing.of(setup.residency, structure, elsewhere, dtypes, device, late, pool, self.tells)
        return self.store

    def complete(self, sums: list[Tensor]) -> list[Tensor]:
        """Return all sums where they live, once they are there."""
        sums = sums if self.store is None else self.store.finish(sums)
        if isinstance(self.setup.residency, Deferred):  # before ranks agree, so that they hear of what fails here
            with put_off(self.setup.residency):
                self.leaves = self.open()
        return sums

    def close(self) -> None:
        """Wait for the gradients that are read and written."""
        if self.store is not None:
            self.store.close()

    def ready(self, grads: Gradients) -> Gradients:
        """Return the gradients that the optimizer gets, where they live."""
        grads = super().ready(grads)
        if self.store is not None:  # what a map changed, or what was divided, is on its way
            self.store.settle()
        return grads

    def map(self, map_: Map, grads: Gradients, unmapped: Gradients, call: Call) -> Gradients:
        """Return what one map makes of gradients: of all leaves at once, or of as many as it `needs`."""
        landing, needs = grads.landing, getattr(map_, "needs", None)
        if landing is None or needs == "norm":
            return super().map(map_, grads, unmapped, call)
        if needs == "slices" and not random.draws(map_) and grads.leaves:
            return self._map_one_at_a_time(map_, grads.measured(), call)
        copies = attrs.evolve(grads, leaves=[landing.value(i, x) for i, x in enumerate(grads.leaves)], landing=None)
        mapped = super().map(map_, copies, copies, call)
        return attrs.evolve(mapped, leaves=[landing.land(i, x) for i, x in enumerate(mapped.leaves)], landing=landing)

    def _map_one_at_a_time(self, map_: Map, grads: Gradients, call: Call) -> Gradients:
        landing, leaves, mapped = grads.landing, list(grads.leaves), grads
        assert landing is not None
        for i, x in enumerate(leaves):
            copy = attrs.evolve(
                grads,
                leaves=[landing.value(i, x)],
                segments=grads.segments[i : i + 1],
                counted=grads.counted[i : i + 1],
                landing=None,
            )
            mapped = super().map(map_, copy, copy, call)
            leaves[i] = landing.land(i, mapped.leaves[0])
        return attrs.evolve(grads, leaves=leaves, scale=mapped.scale, norm=mapped.norm)

    @property
    def lives(self) -> Lives:
        """Where leaves live, in a residency whose failures all ranks hear of."""
        setup = self.setup
        return attrs.evolve(self.step.lives(setup.tensors.structure, setup.state), residency=setup.residency)

    def open(self) -> NewLeaves:
        """Return memory for what the update writes, where that lives."""
        if self.leaves is not None:
            return self.leaves
        step, setup, pool = self.step, self.setup, self.step.runtime.pool
        return new_leaves(step.place, self.lives, pool, setup.state, setup.tensors, step.followers, self.apart)

    @in_range("optimizer")
    def write(self, leaves: NewLeaves, grads: Gradients) -> None:
        """Update chunk after chunk; from the first write on, a state that is given up is marked so."""
        setup, structure, n = self.setup, self.setup.tensors.structure, len(leaves.trained)
        pieces = self.step.chunks(structure)  # on which all ranks agree, those too that visit none
        if not leaves.lives.visited:
            return super().write(leaves, grads)
        new: list[Column] = [list(leaves.flat[:n]), *structure.align(leaves.flat[n:]).values()]
        old: list[Column] = [list(leaves.old[:n]), *structure.align(leaves.old[n:]).values()]
        ahead, others = (chunks_of_leaves(leaves.lives, new, old, pieces, ahead=ahead) for ahead in (True, False))
        chunks, rule = [*self.again(ahead), *others], self.rule(grads.scale, self.skip)
        Visit(chunks, rule, lambda: leaves.give_up(setup.state)).finish(dict(enumerate(grads.leaves)))
        return None

    def rule(self, scale: Tensor | None, skip: Tensor | None, divisor: Tensor | None = None) -> Run:
        """Return what updates pieces of slices on a device, by gradients of this `scale`, () float32, None for 1.

        They are divided by `divisor`, () float64, first.
        """
        setup, structure, dimensions = self.setup, self.setup.tensors.structure, self.step.dimensions
        optimizer, slots = structure.optimizer, list(structure.opt)
        arguments = {"step": setup.state.step, "grad_scale": scale, "skip": skip, "axes": dimensions.split}
        given_on: dict[torch.device, dict[str, Any]] = {}

        def run(pieces: list[Piece], grads: list[Tensor], columns: list[Column], device: torch.device) -> list[Column]:
            if device not in given_on:
                moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
                given_on[device] = moved | optimizer.given(setup.values.to(device))
            if divisor is not None:
                for x in grads:
                    x.div_(divisor.to(device))
            inside = [x.segments for x in pieces]
            opt, params = dict(zip(slots, columns[1:], strict=True)), [x for x in columns[0] if x is not None]
            params, opt = returned.update(optimizer, grads, opt, params, segments=inside, **given_on[device])
            updated: list[Column] = [list(params), *(opt[slot] for slot in slots)]
            for column in updated:
                tie(dimensions.share, optimizer, column, inside)
            return updated

        return run

    def again(self, ahead: list[Chunk]) -> list[Chunk]:
        """Return which of the chunks that are updated in backward are to be updated again: there are none."""
        return ahead

    def follow(self, slots: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return parameters and slots of the next state; raise what failed on the way there, on every rank."""
        followed = super().follow(slots)
        hear(self.setup.residency)
        return followed

    def slot_after(self, rule: After, slot: Any, params: Any, call: Call) -> Any:
        """Return what a slot becomes that follows the update: at once, or in the chunks of that."""
        leaves, structure, skip = self.leaves, self.setup.tensors.structure, self.skip
        assert leaves is not None
        if (lives := leaves.lives.after.get(rule.slot)) is None:
            return super().slot_after(rule, slot, params, call)

        def run(
            pieces: list[Piece], param_pieces: list[Tensor], columns: list[Column], device: torch.device
        ) -> list[Column]:
            skipped = None if skip is None else skip.to(device)
            return [contracts.remembered(rule(columns[0], param_pieces, skipped, call), columns[0], rule)]

        def flat(x: Any) -> list[Tensor]:
            return [leaf.reshape(-1) for leaf in structure.like_parts(x)]

        new = leaves.pieces[rule.slot]
        lives = attrs.evolve(lives, residency=leaves.lives.residency)
        pieces = with_frozen(structure, self.step.chunks(structure))
        chunks = chunks_of_leaves(lives, [[*flat(new)]], [[*flat(slot)]], pieces, ahead=False)
        Visit(chunks, run, lambda: None).finish(dict(enumerate(flat(params))))
        return new
