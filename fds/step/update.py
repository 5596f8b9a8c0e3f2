"""How complete gradients become the parameters of the next state, and what follows them: all of it at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.optim import returned
from fds.optim.base import Values
from fds.state import State
from fds.step.all_stations import Stations
from fds.step.call import Call, seeded
from fds.step.checks import contracts
from fds.step.checks.contracts import tie
from fds.step.checks.state_check import StateTensors
from fds.step.drafts import Drafts, may_note
from fds.step.execution import LocalGradients
from fds.step.gradients import Gradients
from fds.step.new_leaves import NewLeaves, new_leaves
from fds.step.ranges import in_range
from fds.step.residency.contract import Residency, deferred
from fds.step.residency.landing import Landing
from fds.step.stations import After
from fds.step.totals import Decision, Expect

Map = Callable[[Gradients, Call], Gradients]


@attrs.frozen(eq=False)
class Setup:
    """What a call works with: what `calls` and the old state decide alone, before anything runs on the device."""

    state: State
    tensors: StateTensors
    call: Call
    drafts: Drafts
    scale: Tensor | None  # of the loss, () float64; None is 1
    values: Values  # of the optimizer's schedules
    residency: Residency  # where leaves live; what fails there on one rank all ranks hear

    @classmethod
    def of(cls, step: Stations, state: State, tensors: StateTensors) -> Setup:
        """Return that of a call of a step, of a state that was checked."""
        assert step.optimizer is not None
        drafts = Drafts.of(step.following, state, step.condition)
        call, scale = step.call(state, drafts), None
        if step.scale is not None:
            with seeded(call, [step.scale], "scale"):
                scale = contracts.scalar(step.scale.scale(state.slots, state.step.device), step.scale)
        with seeded(call, step.optimizer.schedules(), "schedule"):
            values = step.optimizer.values(state.step)
        step.runtime.pool.sweep()
        residency = deferred(step.place.residency, step.dimensions.everyone)
        return cls(state, tensors, call, drafts, scale, values, residency)


@attrs.define(eq=False)
class Update:
    """The update of one call, of gradients that wait where the step runs: the optimizer is called once, with all."""

    step: Stations
    setup: Setup
    failed: Tensor | None = None  # whether the step has decided otherwise than was taken for granted, () bool
    skip: Tensor | None = None
    leaves: NewLeaves | None = None  # of the next state, once there is memory for them
    expects: Sequence[Expect] = ()  # told before the last backward what it leads to
    arguments: Mapping[str, Any] = tree.new(dict)  # of the optimizer, where gradients stay on their ranks

    def landing(self, trained: list[Tensor]) -> Landing | None:
        """Return where the sums of gradients by `trained` leaves go as each is final; None where they stay."""
        return None

    def complete(self, sums: list[Tensor]) -> list[Tensor]:
        """Return all sums where they live, once they are there, and what was updated in backward too."""
        return sums

    def close(self) -> None:
        """Wait for what is read and written, of a call that failed: nobody may use this memory from here on."""

    def run(self, local: LocalGradients, decision: Decision) -> None:
        """Map the gradients, and update parameters and optimizer state by them."""
        step, call, structure = self.step, self.setup.call, self.setup.tensors.structure
        self.skip = decision.skip
        try:
            grads = self.ready(local.for_maps(decision, structure.segments, step.dimensions))
        except BaseException:
            self.close()
            raise
        self.leaves = self.open()
        with seeded(call, [step.optimizer], "optimizer", *step.dimensions.coordinates):
            self.write(self.leaves, grads)  # from here on the new state's memory is written
        step.runtime.pool.weigh_down(grads.leaves, call.device)

    def ready(self, grads: Gradients) -> Gradients:
        """Return the gradients that the optimizer gets, where they live."""
        return self.mapped(grads).settled()

    def mapped(self, grads: Gradients) -> Gradients:
        """Return what all gradient maps make of gradients."""
        unmapped = grads
        for i, map_ in enumerate(self.step.condition):
            call = self.setup.call.given_to(map_, "condition", i, *self.step.dimensions.coordinates)
            call = call if may_note(map_) else call.silent()
            with seeded(call, [map_]):
                grads = self.map(map_, grads, unmapped, call)
        return grads

    def map(self, map_: Map, grads: Gradients, unmapped: Gradients, call: Call) -> Gradients:
        """Return what one map makes of gradients, which were `unmapped` before all of them."""
        mapped = contracts.gradients(map_(grads, call), unmapped, map_)
        tie(self.step.dimensions.share, map_, mapped.leaves, unmapped.segments)
        return mapped

    def open(self) -> NewLeaves:
        """Return memory for what the update writes."""
        step, state, tensors = self.step, self.setup.state, self.setup.tensors
        lives = step.lives(tensors.structure, state)
        return new_leaves(step.place, lives, step.runtime.pool, state, tensors, step.followers)

    @in_range("optimizer")
    def write(self, leaves: NewLeaves, grads: Gradients) -> None:
        """Run the optimizer; from the first write on, a state that is given up is marked so."""
        setup, structure, dimensions = self.setup, self.setup.tensors.structure, self.step.dimensions
        optimizer, segments, n = structure.optimizer, structure.segments, len(leaves.trained)
        flat, flat_opt = leaves.flat[:n], structure.align(leaves.flat[n:])
        now: dict[str, Any] = {"step": setup.state.step, "grad_scale": grads.scale, "skip": self.skip}
        now |= {"axes": dimensions.split, **optimizer.given(setup.values), **self.arguments}
        leaves.give_up(setup.state)
        new, new_opt = returned.update(optimizer, grads.leaves, flat_opt, flat, segments=segments, **now)
        for slices in (new, *new_opt.values()):
            tie(dimensions.share, optimizer, slices, segments)
        if new is not flat or new_opt is not flat_opt:  # ours write in place and return what they were given
            leaves.replace(new, new_opt)

    def follow(self, slots: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return parameters and slots of the next state, given what was settled of these: what follows the update."""
        step, setup, leaves, skip = self.step, self.setup, self.leaves, self.skip
        assert leaves is not None
        slots |= leaves.after
        if step.synchronize is not None:  # before averages, which are of what ranks have agreed on
            leaves.synchronize(step.synchronize, skip=skip, call=setup.call)
        params = setup.tensors.structure.put(setup.tensors.parts, leaves.trained)
        for i, rule in enumerate(step.followers):
            call = setup.call.after(slots).given_to(rule, "after", i, *step.dimensions.coordinates)
            with seeded(call, [rule]):
                slots[rule.slot] = self.slot_after(rule, slots[rule.slot], params, call)
        return params, slots

    def slot_after(self, rule: After, slot: Any, params: Any, call: Call) -> Any:
        """Return what a slot becomes that follows the update to new parameters."""
        assert self.leaves is not None
        return contracts.remembered(rule(slot, params, self.skip, call), self.leaves.after[rule.slot], rule)

    def state(self, params: Any, slots: dict[str, Any], buffers: dict[str, Tensor]) -> State:
        """Return the next state."""
        old, leaves, skip = self.setup.state, self.leaves, self.skip
        assert leaves is not None
        if skip is not None and buffers:
            buffers = {k: torch.where(skip, old.buffers[k], b) for k, b in buffers.items()}
        return State(
            step=old.step + (1 if skip is None else ~skip),
            calls=old.calls + 1,
            params=params,
            opt=leaves.opt,
            buffers=buffers,
            slots=slots,
            key=old.key,
            token=leaves.token(old),
        )
