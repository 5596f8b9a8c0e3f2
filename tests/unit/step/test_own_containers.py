"""What a loss, a map or a view puts into its trees is gone after this call: a loss that puts nothing is the law."""

import pytest
import torch
from torch import nn

import fds
from fds import tree
from tests.bits import assert_same_bits, snapshot

PARAMS = {"net": {"w": torch.zeros(3)}, "b": [torch.zeros(())]}
BATCH = {"x": torch.arange(12.0).view(4, 3), "more": fds.whole({"scale": torch.ones(()), "list": [torch.ones(2)]})}


def pure(params, batch):
    w = params["net"]["w"] + 1
    return (batch["x"] * 2 * w).mean() * batch["more"]["scale"] + params["b"][0]


def greedy(params, batch):
    """Compute the same, in the trees that it was given."""
    params["net"]["w"] = params["net"]["w"] + 1
    batch["x"] = batch["x"] * 2
    more = batch.pop("more")
    more["list"].append(more["list"].pop() * 2)
    scale, more["scale"] = more["scale"], None
    return (batch["x"] * params.pop("net")["w"]).mean() * scale + params["b"].pop()


def view(x, leaf, call):
    return x * 1


def greedy_map(batch, call):
    batch["x"] = batch["x"] * 1
    return batch


@fds.step.transform
def greedy_stations():
    return lambda step: fds.step.fill(step, view=view, batch=greedy_map)


def run(loss, *transforms):
    """Return all that a step and its evaluator give."""
    step = fds.compose(*transforms, fds.sgd(0.1))(loss)
    state = step.init(PARAMS)
    batch, before, spec = BATCH, snapshot(tree.leaves(BATCH)), tree.structure(BATCH)
    evaluate = step.evaluator(state)
    found = [*step(state, batch), *(evaluate(batch) for _ in range(3)), *step(state, batch)]
    step.describe(state, batch)
    assert tree.structure(batch) == spec
    assert batch["more"].value.keys() == {"scale", "list"}
    assert_same_bits(tree.leaves(batch)[0], before[0])
    return [tree.leaves(x) for x in found]


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_a_loss_may_fill_its_trees(num_microbatches):
    assert_same_bits(run(greedy, fds.accumulate(num_microbatches)), run(pure, fds.accumulate(num_microbatches)))


def test_views_and_maps_may_fill_theirs():
    assert_same_bits(run(greedy, fds.accumulate(2), greedy_stations()), run(pure, fds.accumulate(2)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loss_may_fill_its_trees_at_every_stage(stage):
    def rank():
        return run(greedy, fds.accumulate(2), fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage))[1:3]

    (found,) = fds.simulate(rank, world_size=1)
    assert_same_bits(found, run(pure, fds.accumulate(2))[1:3])


def test_criteria_and_functions_of_a_pipeline_may_fill_theirs():
    def layer(x):
        x["h"] = x["h"] * 2
        return x

    def criterion(out, targets):
        targets["y"] = targets["y"] * 2
        return (out.pop("h") * targets["y"] * targets["more"].pop("scale")).mean()

    layers = fds.Layers([nn.Linear(3, 3), lambda x: {"h": x}, layer, layer], criterion)
    batch = (BATCH["x"], {"y": torch.ones(4, 3), "more": fds.whole({"scale": torch.ones(())})})
    results = []
    for extra in ([fds.accumulate(2)], [fds.pipeline(fds.plans.gpipe, 2, num_microbatches=2)]):
        step = fds.compose(*extra, fds.sgd(0.1))(layers)
        state = step.init(layers.init)
        results.append([step(state, batch), step(state, batch), step.evaluate(state, batch)])
    assert_same_bits(results[0][:2], results[1][:2])
    torch.testing.assert_close(results[0][2], results[1][2])  # a pipeline evaluates microbatches
