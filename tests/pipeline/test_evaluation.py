"""Evaluation by a pipeline: any number of rows on any rank, the same function, and no memory kept."""

import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import plans
from tests.bits import assert_rounding
from tests.pipeline.regression import X, Y, two_stages


def test_ranks_with_other_numbers_of_rows_evaluate_together():
    def run(stage):
        mesh = fds.mesh(pp=2, dp=2)
        rows = 8 - mesh["dp"].index
        cut = fds.pipeline(plans.one_f_one_b, mesh["pp"], num_microbatches=4)
        layers = fds.Layers([fds.LayerSpec(nn.Linear, 4, 4), fds.LayerSpec(nn.Linear, 4, 4)], nn.MSELoss())
        step = fds.compose(cut, fds.shard_optimizer(mesh["dp"], stage=stage), fds.sgd(0.1))(layers)
        return step.evaluate(step.init(layers.init, key=0), (X[:rows], Y[:rows]))["loss"]

    for stage in (1, 3):
        losses = fds.simulate(lambda stage=stage: run(stage), 4)
        assert all(torch.equal(loss, losses[0]) for loss in losses)


def test_evaluation_keeps_no_memory_of_every_shape():
    def run():
        _, step, state = two_stages(plans.gpipe)
        for rows in range(1, 9):
            step.evaluate(state, (X[:rows], Y[:rows]))
        return sum(len(held) for held in step.runtime.pool.scratch.values())

    assert fds.simulate(run, 2) == [0, 0]


def test_losses_of_a_plain_mean_are_the_same_function_in_evaluation():
    def run():
        mean = lambda out, y: fds.Mean(F.mse_loss(out, y, reduction="sum"), y.numel())
        _, step, state = two_stages(plans.gpipe, mean)
        return step.evaluate(state, (X, Y))["loss"], step.evaluate(state, (X[:7], Y[:7]))["loss"], step.params(state)

    for whole, seven, params in fds.simulate(run, 2):
        hidden = F.linear(X, params["0.weight"], params["0.bias"])
        errors = (F.linear(hidden, params["1.weight"], params["1.bias"]) - Y).square()
        assert_rounding({"8": whole, "7": seven}, {"8": errors.mean(), "7": errors[:7].mean()}, additions=64)
