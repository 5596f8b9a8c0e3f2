"""Gradients of a pipeline: hooks, norms and ties, in which order they are gathered, how often they are reduced."""

import itertools

import pytest
import torch
from torch import nn

import fds
from fds import plans
from tests.bits import assert_rounding, assert_same_bits
from tests.pipeline.regression import X, Y, on_ranks, one_process


class Hooked(nn.Module):
    """Triples a gradient by a hook, between two parameters."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda grad: 3 * grad)
        return self.b(torch.tanh(h))


class Two(nn.Module):
    """Two parameters, of which the other use of the layer leaves one out."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4, 4) / 3), nn.Parameter(torch.ones(4) / 5)

    def forward(self, x):
        return x @ self.a + self.b


@pytest.mark.parametrize("schedule", [plans.one_f_one_b, plans.zb_h1])
def test_the_hook_of_a_tensor_acts_once_however_backward_is_cut(schedule):
    layers = [fds.LayerSpec(nn.Linear, 4, 4), fds.LayerSpec(Hooked), fds.LayerSpec(nn.Linear, 4, 4)]
    want, _ = one_process(layers)
    for got, _ in on_ranks(layers, schedule=schedule):
        assert_rounding(got, want, additions=64)


def test_a_norm_measured_again_after_a_map_is_that_of_all_stages():
    layers = [fds.LayerSpec(nn.Linear, 4, 4), torch.tanh, fds.LayerSpec(nn.Linear, 4, 4)]
    clips = fds.clip_by_value(0.01), fds.clip_by_global_norm(0.01)
    want, _ = one_process(layers, *clips)
    for got, _ in on_ranks(layers, *clips):
        assert_rounding(got, want, additions=64)


def test_a_tied_parameter_that_one_stage_leaves_out_adds_up_in_the_dtype_of_the_sums():
    layers = [
        fds.TiedLayerSpec("two", Two),
        torch.tanh,
        fds.TiedLayerSpec("two", Two, forward_fn=lambda m, x: x @ m.a.T),
    ]
    for got, _ in (results := on_ranks(layers, fds.precision(torch.bfloat16), cut=[0, 2, 3])):
        assert_same_bits(got, results[0][0])
        assert all(x.isfinite().all() for x in got.values())


def test_tied_copies_are_alike_also_where_a_constructor_ignores_its_seed():
    numbers = itertools.count()

    class Counted(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            nn.init.constant_(self.weight, next(numbers))

    tied = fds.TiedLayerSpec("x", Counted)

    def run():
        axis = fds.mesh(pp=2)["pp"]
        layers = fds.Layers([tied, torch.tanh, tied], nn.MSELoss())
        cut = fds.pipeline(plans.gpipe, axis, num_microbatches=4, partition=[0, 2, 3])
        return fds.compose(cut, fds.sgd(0.1))(layers).init(layers.init, key=0).params

    first, second = fds.simulate(run, 2)
    assert_same_bits(first, second)


def test_a_learned_order_of_gathers_is_kept():
    def run():
        mesh = fds.mesh(pp=2, dp=2)
        layers = fds.Layers([fds.LayerSpec(nn.Linear, 4, 4) for _ in range(4)], nn.MSELoss())
        cut = fds.pipeline(plans.zb_h1, mesh["pp"], num_microbatches=2)
        shard = fds.shard_optimizer(mesh["dp"], stage=3, bucket_bytes=64)
        step = fds.compose(cut, shard, fds.sgd(0.1))(layers)
        state, learned = step.init(layers.init, key=0), []
        for _ in range(4):
            state, _ = step(state, (X, Y))
            learned.append(all(memory.plan is not None for memory in step.runtime.memories.values()))
        return learned

    assert all(all(learned) for learned in fds.simulate(run, 4))


def test_layers_computed_again_are_reduced_once():
    def run():
        mesh = fds.mesh(pp=2, dp=2)
        layers = fds.Layers([fds.LayerSpec(nn.Linear, 4, 4) for _ in range(8)], nn.MSELoss())
        cut = fds.pipeline(plans.zb_h1, mesh["pp"], num_microbatches=2)
        shard = fds.shard_optimizer(mesh["dp"], stage=2)
        step = fds.compose(cut, shard, fds.checkpoint_activations(), fds.sgd(0.1))(layers)
        state = step.init(layers.init, key=0)
        with fds.collectives.counted() as traffic:
            step(state, (X, Y))
        return traffic["reduce_scatter", "dp"].calls

    assert fds.simulate(run, 4) == [2] * 4
