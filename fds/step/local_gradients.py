"""The gradients of a batch, summed over microbatches and over the ranks that add up."""

from __future__ import annotations

from typing import Any

import torch

from fds import tree
from fds.step.execution import LocalGradients, Pass, PassResult, training
from fds.step.parameters import open_parameters
from fds.step.seeds import Seeds, dtype_of
from fds.step.sharding.buckets import Bucketed
from fds.step.sums import InPlace
from fds.step.update import Update


def local_gradients(update: Update, batch: Any) -> LocalGradients:
    """Return the gradients of a batch, times the loss scale / divisor, summed over microbatches and ranks.

    They are each rank's own in a call in which they stay there. What of the `update` begins in backward is done when
    this returns.
    """
    step, setup = update.step, update.setup
    structure, everyone = setup.tensors.structure, step.dimensions.everyone
    try:
        ran, sums, summed = _run(update, batch)
        used, leaves = sums.used(), sums.finish()
        wide = everyone is not None and torch.float64 in set(map(tree.dtype_of, leaves))
        totals, wide = step.execute.agree(ran, everyone, step.runtime, wide=wide)
        counted = step.dimensions.add_up(leaves, structure.segments, summed=summed)
        leaves = update.complete(leaves)
    except BaseException:
        update.close()
        raise
    setup.drafts.written += filter(None, [sums.kept])
    return LocalGradients(
        totals=totals,
        leaves=leaves,
        used=used,
        counted=counted,
        buffers=ran.buffers,
        predivide=sums.predivide,
        wide=wide,
        landing=sums.landing,
        apart=None if summed else step.dimensions.data,
    )


def _run(update: Update, batch: Any) -> tuple[PassResult, InPlace | Bucketed, bool]:
    """Run every microbatch forward and backward, and sum gradients over the ranks; say whether they were.

    What only this needs (whole or low-precision parameters, microbatches, graphs) is gone when it returns.
    """
    step, setup = update.step, update.setup
    state, structure, call, residency = setup.state, setup.tensors.structure, setup.call, setup.residency
    dimensions, pool, asked = step.dimensions, step.runtime.pool, step.runtime.asked
    microbatches, order = step.split_batch(call, batch), step.order("step", structure)
    settings = step.settings(call, state.buffers, microbatches.count)
    reduce, parts = step.reduction.open(call, setup.drafts, setup.tensors, step.shard, pool)
    update.arguments = reduce.arguments
    masters = step.masters(structure, parts, call.device, residency)
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
    landing = update.landing(params.trained)
    where = order, kinds, seeds, state.slots, landing, bool(masters.elsewhere)
    sums = reduce.sums(structure, step.shard, params.trained, step.sum.dtype, pool, *where)
    expects = update.expects if sums.kept is None else [*update.expects, sums.kept.expect]
    run = Pass(
        loss=step.loss,
        batch=microbatches,
        settings=settings,
        params=params,
        trained=structure.trained_names,
        buffers=state.buffers,
        each=step.microbatch(step.loss, structure),
        order=order,
        everyone=dimensions.everyone,
        runtime=step.runtime,
        sums=sums,
        seeds=seeds,
        expects=expects,
    )
    with training(settings[0], params, sums, order):
        return step.execute.train(run), sums, reduce.is_summed
