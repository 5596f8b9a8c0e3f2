"""A run with a loader: the saved state says where it was, and any number of ranks goes on with the same rows."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import fds
from fds.data import DistributedLoader, RepeatingLoader
from tests.bits import assert_same_bits
from tests.data.loaders import Numbers

POINTS = torch.arange(60.0).view(20, 3).sin()
DATA = TensorDataset(POINTS, POINTS.sum(1, keepdim=True))


def composed(axis=None):
    loss = fds.Layers([fds.LayerSpec(nn.Linear, 3, 4), nn.Dropout(0.2), fds.LayerSpec(nn.Linear, 4, 1)], nn.MSELoss())
    shard = [] if axis is None else [fds.shard_optimizer(axis, stage=2)]
    return fds.compose(fds.accumulate(2), *shard, fds.adamw(0.01))(loss), loss.init


def train(step, state, loader, calls):
    for _, batch in zip(range(calls), RepeatingLoader(loader.starting(state.calls)), strict=False):
        state, _ = step(state, batch)
    return state


def test_the_state_that_was_saved_says_where_to_go_on(tmp_path):
    def uninterrupted_and_resumed():
        axis = fds.mesh(dp=-1)["dp"]
        step, params = composed(axis)
        loader = DistributedLoader(DATA, 8, axis, seed=1, last="wrap", num_microbatches=2)
        first = train(step, step.init(params, key=0), loader, 4)
        fds.save(tmp_path, first, step)
        loaded, _ = fds.load(tmp_path, step, params)
        return step.params(train(step, first, loader, 5)), step.params(train(step, loaded, loader, 5))

    for straight, resumed in fds.simulate(uninterrupted_and_resumed, 2):
        assert_same_bits(resumed, straight)


def test_a_call_that_is_skipped_has_used_its_batch():
    bad = TensorDataset(torch.tensor([[1.0], [float("nan")], [2.0], [3.0]]), torch.ones(4, 1))
    layers = fds.Layers([nn.Linear(1, 1)], nn.MSELoss())
    step = fds.compose(fds.skip_nonfinite(), fds.sgd(0.1))(layers)
    loader = DistributedLoader(bad, 1, shuffle=False)
    state = train(step, step.init(layers.init), loader, 3)
    assert (state.step, state.calls) == (2, 3)
    assert [batch[0].item() for batch in loader.starting(state.calls)] == [3.0]


def test_ranks_that_differ_along_other_axes_get_the_same_rows():
    def rows():
        mesh = fds.mesh(pp=2, dp=2)
        loader = DistributedLoader(Numbers(9), 4, mesh["dp"], seed=2, start=1)
        return [batch.tolist() for batch in loader]

    whole = [batch.tolist() for batch in DistributedLoader(Numbers(9), 4, seed=2, start=1)]
    left, right = [[batch[:2] for batch in whole], [batch[2:] for batch in whole]]
    assert fds.simulate(rows, 4) == [left, right, left, right]


def test_a_step_on_shares_is_that_on_the_whole_batch():
    """Equal bit for bit: sums of two ranks and of two microbatches add the same two numbers."""

    def on_ranks():
        axis = fds.mesh(dp=-1)["dp"]
        step, params = plain(fds.shard_optimizer(axis, stage=2))
        return step.params(train(step, step.init(params, key=0), DistributedLoader(DATA, 4, axis), 6))

    def plain(transform):
        loss = fds.Layers([fds.LayerSpec(nn.Linear, 3, 1)], nn.MSELoss())
        return fds.compose(transform, fds.sgd(0.1))(loss), loss.init

    step, params = plain(fds.accumulate(2))
    alone = train(step, step.init(params, key=0), DistributedLoader(DATA, 4), 6)
    for got in fds.simulate(on_ranks, 2):
        assert_same_bits(got, step.params(alone))
