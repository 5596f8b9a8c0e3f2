"""Rows of other lengths, padded by microbatch: the same numbers on any number of ranks, dropout included."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import fds
from fds.data import DistributedLoader, per_microbatch
from fds.errors import BatchError, DataError
from tests.bits import assert_same_bits

ROWS = [torch.full((1 + i % 5,), i % 7) for i in range(16)]


def padded(rows):
    return pad_sequence(rows, batch_first=True)


def loss(params, tokens):
    hidden = F.dropout(F.embedding(tokens, params["e"]), 0.5)
    return (hidden @ params["w"]).pow(2).mean()


def trained(ranks, microbatches, stage=1):
    def run():
        axis = fds.mesh(dp=-1)["dp"]
        step = fds.compose(fds.accumulate(microbatches), fds.shard_optimizer(axis, stage=stage), fds.sgd(0.1))(loss)
        collate = per_microbatch(padded, microbatches)
        loader = DistributedLoader(ROWS, 8, axis, seed=1, num_microbatches=microbatches, collate=collate)
        g = torch.Generator().manual_seed(0)
        state = step.init({"e": torch.randn(7, 4, generator=g), "w": torch.randn(4, generator=g)}, key=0)
        losses = []
        for batch in loader:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        return losses, step.params(state)

    return fds.simulate(run, ranks)[0]


def test_padding_by_microbatch_is_the_same_on_any_number_of_ranks_under_dropout():
    losses, params = trained(1, 2)
    others, same = trained(2, 1)  # sums of two numbers, in either order
    assert losses == others and len(set(losses)) == 2
    assert_same_bits(same, params)


def test_each_microbatch_is_padded_to_its_own_longest_row():
    collate = per_microbatch(padded, 4)
    (batch,) = DistributedLoader(ROWS[:8], 8, shuffle=False, collate=collate)
    assert [tuple(part.shape) for part in batch.parts] == [(2, 2), (2, 4), (2, 5), (2, 3)]


def test_what_collate_draws_follows_from_the_first_row_of_the_microbatch():
    collate = lambda n: per_microbatch(lambda rows: float(torch.rand(())), n)
    whole = next(iter(DistributedLoader(ROWS, 8, collate=collate(4)))).parts
    half = lambda rank: DistributedLoader(ROWS, 8, fds.data.Coordinate(rank, 2), collate=collate(2))
    halves = [next(iter(half(rank))).parts for rank in (0, 1)]
    assert whole == halves[0] + halves[1] and len(set(whole)) == 4


def test_parts_are_cast_and_mapped_and_equal_what_a_batch_gives_that_the_step_cuts():
    x = torch.randn(8, 3)
    compose = lambda *more: fds.compose(fds.precision(torch.bfloat16), fds.accumulate(2), fds.adamw(0.1), *more)
    step = compose()(lambda params, batch: (batch @ params["w"]).pow(2).mean())
    state = step.init({"w": torch.ones(3)})
    cut, _ = step(state, fds.Microbatches((x[:4], x[4:])))
    whole, _ = step(state, x)
    assert_same_bits(cut.params, whole.params)
    assert fds.tree.map(lambda leaf: leaf + 1, fds.Microbatches((x,))).parts[0].equal(x + 1)


def test_a_pipeline_takes_parts_of_different_shapes_as_accumulate_does():
    layers = fds.Layers([fds.LayerSpec(nn.Linear, 3, 4), fds.LayerSpec(nn.Linear, 4, 1)], nn.MSELoss())
    x, y = torch.linspace(0, 1, 15).view(5, 3), torch.ones(5, 1)
    cut = fds.Microbatches(((x[:2], y[:2]), (x[2:], y[2:])))

    def loss_of(split):
        step = fds.compose(split, fds.sgd(0.1))(layers)
        state, _ = step(step.init(layers.init, key=0), cut)
        return float(step(state, cut)[1]["loss"])

    def staged():
        plan, axis = fds.plans.one_f_one_b, fds.mesh(pp=2)["pp"]
        return loss_of(fds.pipeline(plan, axis, num_microbatches=2, dynamic_shapes=True))

    assert fds.simulate(staged, 2) == [loss_of(fds.accumulate(2))] * 2


def test_as_many_as_the_step_cuts_and_one_at_a_time_to_evaluate():
    step = fds.compose(fds.accumulate(2), fds.sgd(0.1))(lambda params, batch: (batch * params["w"]).mean())
    state = step.init({"w": torch.ones(())})
    with pytest.raises(BatchError, match="cut already, and not into 2") as error:
        step(state, fds.Microbatches((torch.ones(1),) * 3))
    assert error.value.hint == "accumulate(3)"
    with pytest.raises(BatchError, match="cut already, and not into 1"):
        step.evaluate(state, fds.Microbatches((torch.ones(1),) * 2))
    assert step.evaluate(state, fds.Microbatches((torch.ones(1),)))["loss"] == 1


def test_microbatches_are_a_sequence_of_some():
    assert fds.Microbatches(iter([1, 2])).parts == (1, 2)
    for bad in ([], (), iter(()), 3, None, torch.ones(2, 3), {"x": torch.ones(2)}):
        with pytest.raises(BatchError, match="not a sequence of microbatches") as error:
            fds.Microbatches(bad)  # pyright: ignore[reportArgumentType]
        assert error.value.got and "one or more" in error.value.want


@pytest.mark.parametrize(("collate", "n"), [(3, 2), (len, 0), (len, True)])
def test_what_is_no_collation_is_refused(collate, n):
    with pytest.raises(DataError):
        per_microbatch(collate, n)


def test_a_share_that_does_not_divide_is_refused():
    with pytest.raises(DataError, match="does not divide into 3 microbatches"):
        next(iter(DistributedLoader(ROWS, 8, collate=per_microbatch(len, 3))))
