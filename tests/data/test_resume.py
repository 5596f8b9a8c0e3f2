"""A run with a loader: the saved state says where it was, and any number of ranks goes on with the same rows."""

from itertools import chain

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import fds
from fds.data import Coordinate, CurriculumSampler, DistributedLoader, RepeatingLoader, batches_by_tokens, mixture
from fds.data.orders import permutation
from tests.bits import assert_same_bits
from tests.data.loaders import Noisy, Numbers, as_lists, stream_of

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


CURRICULUM = CurriculumSampler(
    {"a": range(20), "b": range(20, 0, -1)}, {"a": lambda t: 9 + 3 * t, "b": lambda t: 15 + t}
)
ORDERS = {
    "curriculum": {"dataset": DATA, "batch_size": 8, "sampler": CURRICULUM},
    "tokens": {"dataset": DATA, "batch_size": 2, "sampler": batches_by_tokens(range(1, 21), 40)},
    "mixture": {
        "batch_size": 8,
        "dataset": mixture([Subset(DATA, range(9)), Subset(DATA, range(9, 20))], lambda batch: [1, batch], key=2),
    },
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_run_stopped_on_one_rank_goes_on_on_two_bit_for_bit(order, tmp_path):
    """Sums of two ranks and of two microbatches add the same two numbers."""
    loss = fds.Layers([fds.LayerSpec(nn.Linear, 3, 1)], nn.MSELoss())

    def train_on(axis, calls, directory=None):
        way = fds.accumulate(2) if axis is None else fds.shard_optimizer(axis, stage=2)
        step = fds.compose(way, fds.sgd(0.1))(loss)
        state = step.init(loss.init, key=0) if directory is None else fds.load(directory, step, loss.init)[0]
        state = train(step, state, DistributedLoader(axis=axis, **ORDERS[order]), calls)
        if directory is None:
            fds.save(tmp_path, state, step)
        return step.params(state)

    straight = train_on(None, 12)
    train_on(None, 4)
    for params in fds.simulate(lambda: train_on(fds.mesh(dp=-1)["dp"], 8, tmp_path), 2):
        assert_same_bits(params, straight)


WEIGHTED = WeightedRandomSampler([1.0, 5.0, 1.0, 3.0, 2.0, 9.0, 1.0], num_samples=12)


def backwards(epoch, key):
    return [(6 - i + epoch) % 7 for i in range(7)]


@pytest.mark.parametrize(
    "sampler",
    [
        WEIGHTED,
        WeightedRandomSampler([1.0] * 7, 12, generator=torch.Generator()),
        RandomSampler(range(7), num_samples=9),
        SequentialSampler(range(7)),
        backwards,
        lambda epoch, key: permutation(key, 7)[:6],
    ],
)
@pytest.mark.parametrize("last", ["drop", "wrap"])
def test_a_sampler_gives_the_same_rows_from_any_position_and_on_any_number_of_ranks(sampler, last):
    loader = DistributedLoader(Numbers(7), 2, sampler=sampler, last=last, seed=3)
    rows = stream_of(loader, 14)
    torch.manual_seed(5)  # nothing else decides
    assert stream_of(loader.starting(3), 11) == rows[3:] and stream_of(loader, 14) == rows
    shares = [
        stream_of(DistributedLoader(Numbers(7), 2, Coordinate(r, 2), sampler=sampler, last=last, seed=3), 14)
        for r in range(2)
    ]
    assert [one + other for one, other in zip(*shares, strict=True)] == rows
    assert set(chain(*rows)) <= set(range(7))


def test_epochs_of_a_sampler_differ_and_rows_that_come_twice_draw_anew():
    loader = DistributedLoader(Noisy(7), 12, sampler=WEIGHTED, collate=as_lists)
    (first,), (second,) = list(loader), list(loader.next_epoch())
    assert [row[0] for row in first] != [row[0] for row in second]
    assert len({row[1:] for row in first}) == 12 > len({row[0] for row in first})


@pytest.mark.parametrize(
    ("sampler", "what"),
    [
        (DistributedSampler(range(7), 2, 0), "selects a rank's share"),
        (3, "not a sampler"),
        ([1, 2], "not a sampler"),
        (lambda epoch: range(7), "too many positional arguments"),
        (torch.utils.data.RandomSampler, "not a sampler"),
        (BatchSampler(SequentialSampler(range(7)), 3, False), "row numbers"),
        (lambda epoch, key: [], "row numbers"),
        (lambda epoch, key: [0.5], "sequence of row numbers"),
        (lambda epoch, key: [0, 7], "does not have"),
        (lambda epoch, key: [0, -1], "does not have"),
    ],
)
def test_what_is_no_sampler_of_rows_is_refused(sampler, what):
    with pytest.raises(fds.errors.DataError, match=what):
        DistributedLoader(Numbers(7), 1, sampler=sampler)


def test_a_sampler_whose_epochs_have_other_lengths_is_refused():
    loader = DistributedLoader(Numbers(7), 1, sampler=lambda epoch, key: range(3 + epoch))
    with pytest.raises(fds.errors.DataError, match="differ in length"):
        list(loader.next_epoch())
