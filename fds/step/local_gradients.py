"""The first half of a call: what it works with, and the gradients of its batch, summed over the ranks that add up."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.optim.base import Values
from fds.state import State
from fds.step.all_stations import Stations
from fds.step.call import Call, seeded
from fds.step.checks import contracts
from fds.step.checks.state_check import StateTensors
from fds.step.drafts import Drafts
from fds.step.execution import LocalGradients, Pass, PassResult, training
from fds.step.own_sums import SUMMED, OwnSums
from fds.step.parameters import open_parameters
from fds.step.residency.contract import Residency
from fds.step.residency.deferred import deferred, heard
from fds.step.residency.landing import Landing
from fds.step.residency.speculation import Speculation
from fds.step.seeds import Seeds, dtype_of
from fds.step.sharding.buckets import Bucketed
from fds.step.sums import InPlace


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


def local_gradients(step: Stations, setup: Setup, batch: Any, ahead: Speculation | None = None) -> LocalGradients:
    """Return the gradients of a batch, times the loss scale / divisor, summed over microbatches and ranks.

    Those of an optimizer that ranks do not sum them for are each rank's own. What is updated `ahead` is updated when
    this returns.
    """
    structure, local = setup.held.structure, setup.own_sums.are_local
    landing, everyone = None, step.dimensions.everyone
    try:
        ran, sums = _run(step, setup, batch, ahead)
        landing = sums.landing
        used, leaves = sums.used(), sums.finish()
        wide = everyone is not None and torch.float64 in set(map(tree.dtype_of, leaves))
        totals, wide = step.execute.agree(ran, everyone, step.runtime, wide=wide)
        counted = step.dimensions.add_up(leaves, structure.segments, summed=not local)
        if landing is not None:
            leaves = landing.finish(leaves)
        if ahead is not None:
            ahead.settle()
    except BaseException:
        for opened in filter(None, (landing, ahead)):
            opened.close()
        raise
    apart = step.dimensions.data if local else None
    setup.drafts.written += filter(None, [sums.kept])
    return LocalGradients(totals, leaves, used, counted, ran.buffers, sums.predivide, wide, landing, apart)


def _run(step: Stations, setup: Setup, batch: Any, ahead: Speculation | None) -> tuple[PassResult, InPlace | Bucketed]:
    """Run every microbatch forward and backward, and sum gradients over the ranks.

    What only this needs (whole or low-precision parameters, microbatches, graphs) is gone when it returns.
    """
    state, structure, call, residency = setup.state, setup.held.structure, setup.call, setup.residency
    dimensions, pool, asked = step.dimensions, step.runtime.pool, step.runtime.asked
    microbatches, order = step.split_batch(call, batch), step.order("step", structure)
    settings = step.settings(call, state.buffers, microbatches.count)
    masters = step.masters(structure, setup.own_sums.seen(structure, setup.held.parts), call.device, residency)
    params = open_parameters(step.gather, step.shard, structure, masters, pool, train=True, order=order)
    kinds = step.execute.dtypes(params.trained, step.gather.dtype, dimensions.everyone, asked)
    seeds = Seeds.of(
        setup.scale,
        microbatches.count,
        kinds,
        step.sum.dtype,
        (step.reduce.dtype, *map(dtype_of, step.context)),
        data=dimensions.data,
        asked=asked,
        order=None if step.execute.together else order,
    )
    landing = None
    if "gradients" in residency.kinds or ahead is not None:
        with heard(residency, step.everyone):
            landing = _landing(step, setup, params.trained, ahead)
    shard = None if setup.own_sums.are_local else step.shard
    where = order, kinds, seeds, state.slots, landing, bool(masters.elsewhere)
    reduce = step.reduce.drawing(call) if step.reduce.transport.draws else step.reduce
    sums = reduce.sums(structure, shard, params.trained, step.sum.dtype, pool, *where)
    run = Pass(
        step.loss,
        microbatches,
        settings,
        params,
        structure.trained_names,
        state.buffers,
        step.microbatch(step.loss, structure),
        order,
        dimensions.everyone,
        step.runtime,
        sums,
        seeds,
        ahead,
    )
    with training(settings[0], params, sums, order):
        return step.execute.train(run), sums


def _landing(step: Stations, setup: Setup, trained: list[Tensor], ahead: Speculation | None) -> Landing:
    """Return where the sums of gradients go as each is final."""
    structure, device = setup.held.structure, setup.call.device
    elsewhere = step.lives(structure, setup.state).landed
    first = [members[0] for members in structure.members.values()] if structure.sharded else range(len(trained))
    dtypes = [step.sum.dtype or trained[i].dtype for i in first]
    late = [k for k, inside in enumerate(structure.segments) if inside and step.dimensions.is_late(inside[0].name)]
    tell = None if ahead is None else ahead.tell
    return Landing.of(setup.residency, structure, elsewhere, dtypes, device, late, step.runtime.gradients, tell)
