"""The beginning of a call: what the old state and the number of the call decide alone."""

from __future__ import annotations

import attrs
from torch import Tensor

from fds.optim.base import Values
from fds.state import State
from fds.step.all_stations import Stations
from fds.step.call import Call, seeded
from fds.step.checks import contracts
from fds.step.checks.state_check import StateTensors
from fds.step.drafts import Drafts
from fds.step.own_sums import SUMMED, OwnSums
from fds.step.residency.contract import Residency
from fds.step.residency.deferred import deferred


@attrs.frozen(eq=False)
class Setup:
    """What a call works with: what `calls` and the old state decide alone, before anything runs on the device."""

    state: State
    held: StateTensors
    call: Call
    drafts: Drafts
    scale: Tensor | None  # of the loss, () float64; None is 1
    values: Values  # of the optimizer's schedules
    residency: Residency  # where leaves live; what fails there on one rank all ranks hear
    own_sums: OwnSums

    @classmethod
    def of(cls, step: Stations, state: State, held: StateTensors) -> Setup:
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
        sums, phases = SUMMED, step.optimizer.phases
        if phases is not None and phases.local(call.calls):
            sums = OwnSums.of(phases, step.shard, held.structure, state.slots, call, step.runtime.pool)
            drafts.written.append(sums)
        return cls(state, held, call, drafts, scale, values, residency, sums)
