"""What a pipeline refuses: plans, parameters and batches that would go wrong without a word."""

import pytest
from torch import nn

import fds
from fds import plans
from fds.errors import BatchError, PlanError, StateError
from tests.pipeline.regression import X, Y, on_ranks, raised, two_stages


def test_forwards_out_of_order_are_refused_where_layers_have_buffers():
    backwards = lambda ranks, n: [
        [*(f"{r}F{i}" for i in reversed(range(n))), *(f"{r}BW{i}" for i in range(n))] for r in range(ranks)
    ]
    plain = [fds.LayerSpec(nn.Linear, 4, 4), fds.LayerSpec(nn.Linear, 4, 4)]
    on_ranks(plain, schedule=backwards)
    error = raised(lambda: on_ranks([*plain, fds.LayerSpec(nn.BatchNorm1d, 4)], schedule=backwards))
    assert isinstance(error, PlanError) and "buffers" in error.what


def test_a_schedule_that_leaves_a_rank_without_a_stage_is_refused():
    error = raised(
        lambda: on_ranks(
            [fds.LayerSpec(nn.Linear, 4, 4)],
            schedule=lambda p, n: [[f"0{op}{i}" for i in range(n) for op in ("F", "BW")], []],
        )
    )
    assert isinstance(error, PlanError) and "[1]" in error.got


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_that_one_rank_cannot_make_are_refused_on_all(tied):
    class Bad(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            if not self.weight.is_meta:
                raise RuntimeError("no such thing")

    last = fds.TiedLayerSpec("x", nn.Linear, 4, 4) if tied else fds.LayerSpec(nn.Linear, 4, 4)
    first = [last] if tied else []
    layers = [*first, fds.LayerSpec(Bad), last]

    cut = [0, len(layers) - 1, len(layers)]

    def run():
        pipeline = fds.pipeline(plans.gpipe, fds.mesh(pp=2)["pp"], num_microbatches=4, partition=cut)
        step = fds.compose(pipeline, fds.sgd(0.1))(fds.Layers(layers, nn.MSELoss()))
        try:
            step.init(step.loss.init, key=0)
        except (RuntimeError, StateError) as error:
            return str(error)

    for text in fds.simulate(run, 2):
        assert "no such thing" in text


def test_ranks_with_different_batches_are_refused():
    def run():
        axis, step, state = two_stages(plans.gpipe)
        errors = [raised(lambda mine=mine: step(state, mine)) for mine in ((X + axis.index, Y), (X, Y + axis.index))]
        apart = (X, None) if axis.index == 0 else (None, Y)
        step(state, apart)  # each needs its own half alone
        return errors

    for errors in fds.simulate(run, 2):
        for error, part in zip(errors, ("inputs", "targets"), strict=True):
            assert isinstance(error, BatchError) and "different batches" in error.what and part in error.where


def test_an_error_names_the_layer():
    def boom(x):
        raise ValueError("too much")

    layers = [fds.LayerSpec(nn.Linear, 4, 4), boom, fds.LayerSpec(nn.Linear, 4, 4)]
    assert "in layers[1]" in raised(lambda: on_ranks(layers, cut=[0, 2, 3])).got
