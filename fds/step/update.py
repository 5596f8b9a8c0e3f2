"""How complete gradients become the parameters of the next state, and what follows them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import random, tree
from fds.state import State
from fds.step.all_stations import Stations
from fds.step.call import Call, seeded
from fds.step.checks import contracts
from fds.step.checks.draws import tie
from fds.step.checks.state_check import StateTensors
from fds.step.decision import Decision
from fds.step.drafts import may_note
from fds.step.execution import LocalGradients
from fds.step.gradients import Gradients
from fds.step.local_gradients import Setup, local_gradients
from fds.step.new_leaves import NewLeaves, Rule, leaves_apart, new_leaves
from fds.step.ranges import in_range
from fds.step.residency.apart import Apart
from fds.step.residency.contract import Residency
from fds.step.residency.deferred import hear, heard
from fds.step.residency.speculation import Granted, Speculation
from fds.step.residency.visit import Visit
from fds.step.seeds import guesses
from fds.step.totals import Totals


@attrs.define(eq=False)
class Update:
    """The update of one call: some of it in backward, where the step speculates, and the rest once it has decided."""

    step: Stations
    setup: Setup
    ahead: Speculation | None = None
    failed: Tensor | None = None  # whether the step has decided otherwise than was taken for granted, () bool
    skip: Tensor | None = None
    leaves: NewLeaves | None = None  # of the next state, once there is memory for them

    def __attrs_post_init__(self) -> None:
        if self.step.place.speculate:
            self.ahead = _speculation(self.step, self.setup)

    def gradients(self, batch: Any) -> LocalGradients:
        """Return the gradients of a batch; what begins in backward is updated when this returns."""
        return local_gradients(self.step, self.setup, batch, self.ahead)

    def run(self, local: LocalGradients, decision: Decision) -> None:
        """Map the gradients, and update parameters and optimizer state by them."""
        step, setup, structure = self.step, self.setup, self.setup.held.structure
        self.skip, landing = decision.skip, local.landing
        grads = local.for_maps(decision, structure.segments, step.dimensions)
        try:
            versions = [] if self.ahead is None else list(map(tree.version_of, local.leaves))
            grads = _mapped(step, grads, setup.call)
            if self.ahead is not None:
                written = versions != list(map(tree.version_of, local.leaves))
                changed = written or any(x is not y for x, y in zip(grads.leaves, local.leaves, strict=True))
                self.failed = self.ahead.fails(grads.scale, decision.skip, setup.call.device, changed=changed)
            grads = grads.settled()
            if landing is not None:  # what a map changed, or what was divided, is on its way
                landing.settle()
        except BaseException:
            if landing is not None:
                landing.close()
            raise

        ahead = None if self.ahead is None else self.ahead.apart
        self.leaves = next_leaves(step, setup.state, setup.held, setup.residency, ahead)
        self._write(self.leaves, grads)
        step.runtime.pool.weigh_down(grads.leaves, setup.call.device)

    def follow(self, slots: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return parameters and slots of the next state, given what was settled of these: what follows the update."""
        step, setup, leaves, skip = self.step, self.setup, self.leaves, self.skip
        assert leaves is not None
        slots |= leaves.after
        if step.synchronize is not None:  # before averages, which are of what ranks have agreed on
            leaves.synchronize(step.synchronize, skip=skip, call=setup.call)
        params = setup.held.structure.put(setup.held.parts, leaves.trained)
        for i, rule in enumerate(step.followers):
            call = setup.call.after(slots).given_to(rule, "after", i, *step.dimensions.coordinates)
            with seeded(call, [rule]):
                chunks = step.chunks(setup.held.structure)
                slots[rule.slot] = leaves.follow(rule, slots[rule.slot], params, chunks, skip=skip, call=call)
        if setup.residency.kinds:
            hear(setup.residency, step.everyone)
        return params, slots

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

    @in_range("optimizer")
    def _write(self, leaves: NewLeaves, grads: Gradients) -> None:
        """Run the optimizer: from here on the new state's memory is written."""
        step, setup, structure = self.step, self.setup, self.setup.held.structure
        with seeded(setup.call, [step.optimizer], "optimizer", *step.dimensions.coordinates):
            leaves.update(
                setup.state,
                structure.optimizer,
                grads,
                step.chunks(structure),
                step.dimensions,
                skip=self.skip,
                values=setup.values,
                exchange=setup.own_sums.exchange,
                again=None if self.ahead is None or self.failed is None else self.ahead.again(self.failed),
            )


def _mapped(step: Stations, grads: Gradients, call: Call) -> Gradients:
    """Return what all gradient maps make of gradients."""
    unmapped = grads
    for i, map_ in enumerate(step.condition):
        keyed = call.given_to(map_, "condition", i, *step.dimensions.coordinates)
        keyed = keyed if may_note(map_) else keyed.silent()
        with seeded(keyed, [map_]):
            grads = _map(map_, grads, unmapped, keyed, step.dimensions.share)
    return grads


def _speculation(step: Stations, setup: Setup) -> Speculation:
    """Return the part of an update that begins in backward, by what is decided where the norm is 0."""
    structure, device, call = setup.held.structure, setup.call.device, setup.call.keeping()
    lives = attrs.evolve(step.lives(structure, setup.state), residency=setup.residency)
    chunks = step.chunks(structure)
    with heard(setup.residency, step.everyone):
        apart = leaves_apart(lives, step.runtime.ahead, setup.held)

    def grant(totals: Totals, own: Totals, predivide: float, wide: bool) -> Granted:
        norm = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)
        decides = step.skips or guesses(own)
        decision = Decision.of(totals, norm, setup.scale, predivide, device, decides=decides)
        grads = _mapped(step, Gradients([], decision.scale, decision.norm), call)
        return Granted(grads.scale, decision.skip, wide)

    def visits(granted: Granted) -> Visit:
        rule = Rule.of(
            structure.optimizer,
            structure,
            step.dimensions,
            setup.state,
            setup.values,
            scale=granted.grad_scale,
            skip=granted.skip,
            divisor=granted.divisor,
        )
        return apart.visit(structure, lives, chunks, rule)

    return Speculation(apart, grant, visits, step.everyone)


def next_leaves(
    step: Stations, state: State, held: StateTensors, residency: Residency | None = None, apart: Apart | None = None
) -> NewLeaves:
    """Return memory for what an update of a state writes, with the old values; some may be `apart` already.

    A `residency` stands in for that of the step, and all ranks hear of what fails there.
    """
    lives = step.lives(held.structure, state)
    make = functools.partial(
        new_leaves, step.place, pool=step.runtime.pool, state=state, held=held, after=step.followers
    )
    if residency is None or not residency.kinds:
        return make(lives, apart=apart)
    with heard(residency, step.everyone):
        return make(attrs.evolve(lives, residency=residency), apart=apart)


Map = Callable[[Gradients, Call], Gradients]
Share = Callable[[str, Tensor], None]


def _map(map_: Map, grads: Gradients, unmapped: Gradients, call: Call, share: Share) -> Gradients:
    """Return what a gradient map makes of gradients: all leaves at once, or as many as it `needs`.

    `unmapped` are those before all maps; `share` gives a leaf the values that it has on the first rank that holds it.
    """
    needs = getattr(map_, "needs", None)
    if grads.landing is None or needs == "norm":
        mapped = contracts.gradients(map_(grads, call), unmapped, map_)
        tie(share, map_, mapped.leaves, unmapped.segments)
        return mapped
    if needs == "slices" and not random.draws(map_) and grads.leaves:
        return _map_one_at_a_time(map_, grads.measured(), call, share)
    landing = grads.landing
    copies = attrs.evolve(grads, leaves=[landing.value(i, x) for i, x in enumerate(grads.leaves)], landing=None)
    mapped = _map(map_, copies, copies, call, share)
    return attrs.evolve(mapped, leaves=[landing.land(i, x) for i, x in enumerate(mapped.leaves)], landing=landing)


def _map_one_at_a_time(map_: Map, grads: Gradients, call: Call, share: Share) -> Gradients:
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
        mapped = _map(map_, copy, copy, call, share)
        leaves[i] = landing.land(i, mapped.leaves[0])
    return attrs.evolve(grads, leaves=leaves, scale=mapped.scale, norm=mapped.norm)
