"""Evaluation over many batches: the mean of all of them, whatever their sizes and on whichever rank they are."""

import pytest
import torch
from torch import nn

import fds
from fds import plans
from fds.errors import BatchError, LossError, StateError
from tests.bits import assert_same_bits

ROWS = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(12.0).double()
SIZES = [4, 4, 3, 1]
LAYERS = fds.Layers(
    [nn.Linear(3, 1).double(), nn.Dropout(0.5)],
    lambda out, y: (fds.Mean((out.squeeze(1) - y).square().sum(), len(y)), {"most": y.max() * 1.0, "rows": len(y)}),
)


def batches():
    return list(zip(ROWS[0].split(SIZES), ROWS[1].split(SIZES), strict=True))


def make(*transforms):
    return fds.compose(*transforms, fds.sgd(0.1))(LAYERS)


def test_many_batches_are_one():
    step = make()
    state = step.init(LAYERS.init)
    many, one = fds.evaluate(step, state, iter(batches())), step.evaluate(state, ROWS)
    torch.testing.assert_close(many["loss"], one["loss"], rtol=1e-14, atol=0)
    assert many["rows"] == one["rows"] == many["weight"] == 12
    assert many["loss"].dtype == one["loss"].dtype and many["weight"].dtype == torch.float64
    assert set(many) == {*one, "weight"}


def test_metrics_are_added_by_name_whatever_their_order():
    def loss(p, x):
        found = {"sum": x.sum(), "most": x.max()}
        return (p * x).sum(), found if len(x) == 2 else dict(reversed(found.items()))

    step = fds.compose(fds.sgd(0.1))(loss)
    metrics = fds.evaluate(step, step.init(torch.ones(1)), [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 7.0, 0.0])])
    assert (metrics["sum"], metrics["most"]) == (5.5, 4.5)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("shares", [[[0, 1], [2, 3]], [[0], [1, 2, 3]], [[0, 1, 2, 3], []]], ids=str)
def test_ranks_may_have_different_numbers_of_batches(stage, shares):
    plain = make()
    want = fds.evaluate(plain, plain.init(LAYERS.init), batches())

    def evaluate():
        axis = fds.mesh(dp=-1)["dp"]
        step = make(fds.shard_optimizer(axis, stage=stage))
        state = step.init(LAYERS.init)
        mine = [batches()[i] for i in shares[axis.index]]
        return fds.evaluate(step, state, mine), fds.evaluate(step, state, mine), step.evaluate(state, ROWS)

    for first, second, one in fds.simulate(evaluate, 2):
        assert_same_bits(first, second)
        torch.testing.assert_close(first["loss"], want["loss"], rtol=1e-14, atol=0)
        assert (first["weight"], first["rows"], one["rows"]) == (12, 12, 24)


def test_a_pipeline_evaluates_many_batches_and_refuses_different_numbers():
    plain = make()
    want = fds.evaluate(plain, plain.init(LAYERS.init), batches())

    def evaluate(number):
        axis = fds.mesh(pp=-1)["pp"]
        step = make(fds.pipeline(plans.gpipe, axis, num_microbatches=2))
        return fds.evaluate(step, step.init(LAYERS.init), batches()[: number(axis.index)])

    for found in fds.simulate(lambda: evaluate(lambda rank: 4), 2):
        torch.testing.assert_close(found["loss"], want["loss"], rtol=1e-14, atol=0)

    def refused():
        with pytest.raises(BatchError, match="different numbers") as caught:
            evaluate(lambda rank: 2 + rank)
        return str(caught.value)

    first, second = fds.simulate(refused, 2)
    assert first == second


def test_what_one_rank_cannot_read_is_raised_on_all():
    def failing():
        yield batches()[0]
        raise KeyError("gone")

    def evaluate():
        axis = fds.mesh(dp=-1)["dp"]
        step = make(fds.shard_optimizer(axis, stage=0))
        with pytest.raises((KeyError, BatchError), match="gone"):
            fds.evaluate(step, step.init(LAYERS.init), failing() if axis.index else batches())

    fds.simulate(evaluate, 2)


def test_no_batches_and_one_in_the_place_of_many_are_refused():
    step = make()
    state = step.init(LAYERS.init)
    for wrong in ([], ROWS, ROWS[0], {"x": ROWS[0]}, None):
        with pytest.raises(BatchError, match="batches"):
            fds.evaluate(step, state, wrong)
    with pytest.raises(StateError, match="changed places"):
        fds.evaluate(state, step, batches())
    changing = fds.compose(fds.sgd(0.1))(lambda p, b: (p.sum(), {"even": 1.0} if len(b) % 2 == 0 else {}))
    with pytest.raises(LossError, match="different metrics"):
        fds.evaluate(changing, changing.init(torch.ones(2)), [torch.ones(2), torch.ones(3)])


def test_outputs_are_asked_for_where_the_evaluator_is_made_or_called():
    step = make()
    state = step.init(LAYERS.init)
    assert step.evaluator(state, outputs=True)(ROWS)["outputs"].shape == (12, 1)
    assert "outputs" not in step.evaluator(state, outputs=True)(ROWS, outputs=False)
    assert "outputs" not in step.evaluator(state)(ROWS)
