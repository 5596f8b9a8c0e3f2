"""Ranks of a tensor axis compute one loss: where they found others, every rank says which."""

import pytest
import torch
from torch import nn

import fds
from fds.errors import LossError
from fds.step.agreement import Agreement
from fds.step.totals import Totals


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(self.up(x))


def composed(loss, *parts, dp=1):
    torch.manual_seed(0)
    mesh = fds.mesh(dp=dp, tp=2)
    apply, params, _ = fds.functional(Pair())
    tp = fds.tensor_parallel(mesh["tp"], {"up": "column", "down": "row"})
    sharded = [fds.shard_optimizer(mesh["dp"], stage=1)] if dp > 1 else []
    loss_fn = lambda params, x: loss(apply(params, x), mesh["tp"].index)
    step = fds.compose(tp, *parts, *sharded, fds.sgd(0.1))(loss_fn)
    return step, step.init(params)


LOSSES = {
    "plain": lambda y, index: y.square().mean() + 0.01 * index,
    "mean": lambda y, index: fds.Mean(y.square().sum(), y.numel() + index),
    "nan": lambda y, index: y.square().mean() * (torch.nan if index else 1.0),
}
SAID = "(?s)found different losses.*ranks 0 and 1.*got: .* and .*"


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("parts", [(), (fds.accumulate(2),)])
def test_a_loss_that_reads_the_number_of_a_rank_is_refused_on_all_ranks(loss, parts):
    def job():
        step, state = composed(LOSSES[loss], *parts)
        with pytest.raises(LossError, match=SAID):
            step(state, torch.ones(4, 8))
        return True

    assert all(fds.simulate(job, 2))


def test_one_that_differs_in_a_later_call_is_refused_there():
    def job():
        turns = []
        step, state = composed(lambda y, index: y.square().mean() + (len(turns) == 3) * index)
        for _ in range(3):
            state, _ = step(state, torch.ones(4, 8))
            turns.append(0)
        with pytest.raises(LossError, match=SAID):
            step(state, torch.ones(4, 8))
        turns.append(0)
        step(state, torch.ones(4, 8))  # the state is as it was

    fds.simulate(job, 2)


def test_ranks_are_named_where_there_are_others_with_other_batches():
    def job():
        rank = fds.mesh(all=-1).rank
        step, state = composed(lambda y, index: y.square().mean() + (rank == 3), dp=2)
        with pytest.raises(LossError, match="ranks 2 and 3"):
            step(state, torch.full((4, 8), 1.0 + (rank > 1)))

    fds.simulate(job, 4)


def test_an_evaluation_is_refused_too():
    def job():
        step, state = composed(LOSSES["plain"])
        with pytest.raises(LossError, match=SAID):
            step.evaluate(state, torch.ones(4, 8))
        with pytest.raises(LossError, match=SAID):
            fds.evaluate(step, state, [torch.ones(4, 8)] * 2)

    fds.simulate(job, 2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, 1e-30])
def test_losses_that_are_not_numbers_alike_are_not_refused(value):
    def job():
        step, state = composed(lambda y, _: y.square().mean() * value, fds.skip_nonfinite())
        _, metrics = step(state, torch.ones(4, 8))
        return metrics["loss"]

    for loss in fds.simulate(job, 2):
        assert torch.allclose(loss, torch.tensor(value), equal_nan=True)


@pytest.mark.parametrize(
    ("other", "dtype", "refused"),
    [
        (1 + 2.0**-20, torch.float32, False),
        (1 + 2.0**-10, torch.float32, True),
        (1 + 2.0**-10, torch.float16, False),  # the next number
        (1 + 2.0**-7, torch.bfloat16, False),  # the next number
        (1 + 2.0**-5, torch.bfloat16, True),
    ],
)
def test_losses_may_differ_by_rounding(other, dtype, refused):
    def job():
        axis = fds.mesh(tp=2)["tp"]
        totals = Totals(torch.tensor(1.0 if axis.index == 0 else other, dtype=dtype), 1, count=1)
        agreement = Agreement(axis, 0)
        counted = totals.put(agreement, repeats=(axis.index, 2))
        agreement.count()
        if refused:
            with pytest.raises(LossError, match=SAID):
                counted()
        else:
            assert float(counted().loss) == 1.0

    fds.simulate(job, 2)
