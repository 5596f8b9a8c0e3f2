"""A small regression for tests of pipelines: on ranks, and in one process."""

import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import plans
from fds.errors import FdsError

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 4)


def squares(output, targets):
    return F.mse_loss(output.to(targets.dtype), targets)


def trained(step, batch=(X, Y), calls=2):
    state = step.init(step.loss.init, key=0)
    for _ in range(calls):
        state, metrics = step(state, batch)
    return step.params(state), metrics


def two_stages(schedule, loss=squares):
    """Return the axis of this rank, a step of two layers in a pipeline of two ranks, and its first state."""
    axis = fds.mesh(pp=2)["pp"]
    layers = fds.Layers([fds.LayerSpec(nn.Linear, 4, 4), fds.LayerSpec(nn.Linear, 4, 4)], loss)
    step = fds.compose(fds.pipeline(schedule, axis, num_microbatches=4), fds.sgd(0.1))(layers)
    return axis, step, step.init(layers.init, key=0)


def on_ranks(layers, *transforms, schedule=plans.one_f_one_b, cut=None, batch=lambda rank: (X, Y), ranks=2):
    def run():
        axis = fds.mesh(pp=ranks)["pp"]
        pipeline = fds.pipeline(schedule, axis, num_microbatches=4, partition=cut or "uniform")
        step = fds.compose(pipeline, *transforms, fds.sgd(0.1))(fds.Layers(layers, squares))
        return trained(step, batch(axis.index))

    return fds.simulate(run, ranks)


def one_process(layers, *transforms):
    return trained(fds.compose(fds.accumulate(4), *transforms, fds.sgd(0.1))(fds.Layers(layers, squares)))


def raised(f):
    try:
        f()
    except FdsError as error:
        return error
    raise AssertionError("nothing was raised")
