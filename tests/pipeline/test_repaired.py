"""What reviewers found wrong once, in the order of how quietly it went wrong."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import plans
from fds.errors import BatchError, FdsError, PlanError, StateError
from tests.bits import assert_rounding, assert_same_bits

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 4)


def squares(output, targets):
    return F.mse_loss(output.to(targets.dtype), targets)


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


def trained(step, batch=(X, Y), calls=2):
    state = step.init(step.loss.init, key=0)
    for _ in range(calls):
        state, metrics = step(state, batch)
    return step.params(state), metrics


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


def test_forwards_out_of_order_are_refused_where_layers_have_buffers():
    backwards = lambda ranks, n: [
        [*(f"{r}F{i}" for i in reversed(range(n))), *(f"{r}BW{i}" for i in range(n))] for r in range(ranks)
    ]
    plain = [fds.LayerSpec(nn.Linear, 4, 4), fds.LayerSpec(nn.Linear, 4, 4)]
    on_ranks(plain, schedule=backwards)
    error = raised(lambda: on_ranks([*plain, fds.LayerSpec(nn.BatchNorm1d, 4)], schedule=backwards))
    assert isinstance(error, PlanError) and "buffers" in error.what


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


def test_ranks_with_different_batches_are_refused():
    def run():
        axis = fds.mesh(pp=2)["pp"]
        layers = fds.Layers([fds.LayerSpec(nn.Linear, 4, 4), fds.LayerSpec(nn.Linear, 4, 4)], nn.MSELoss())
        step = fds.compose(fds.pipeline(plans.gpipe, axis, num_microbatches=4), fds.sgd(0.1))(layers)
        state = step.init(layers.init, key=0)
        mine = (X + axis.index, Y)
        error = raised(lambda: step(state, mine))
        apart = (X, None) if axis.index == 0 else (None, Y)
        step(state, apart)  # each needs its own half alone
        return error

    for error in fds.simulate(run, 2):
        assert isinstance(error, BatchError) and "different batches" in error.what and "inputs" in error.got


def test_an_error_names_the_layer():
    def boom(x):
        raise ValueError("too much")

    layers = [fds.LayerSpec(nn.Linear, 4, 4), boom, fds.LayerSpec(nn.Linear, 4, 4)]
    assert "in layers[1]" in raised(lambda: on_ranks(layers, cut=[0, 2, 3])).got


def test_a_recording_does_not_count_waiting_as_work():
    """Simulated ranks take turns, so no work of one lies inside work of another."""

    def run():
        axis = fds.mesh(pp=2)["pp"]
        layers = fds.Layers([fds.LayerSpec(nn.Linear, 4, 4), fds.LayerSpec(nn.Linear, 4, 4)], nn.MSELoss())
        step = fds.compose(fds.pipeline(plans.one_f_one_b, axis, num_microbatches=4), fds.sgd(0.1))(layers)
        state = step.init(layers.init, key=0)
        with plans.record() as recording:
            step(state, (X, Y))
        return recording.rows

    first, second = fds.simulate(run, 2)
    inside = lambda one, other: one[1] < (other[1] + other[2]) / 2 < one[2]
    assert not any(inside(mine, theirs) for mine in first for theirs in second if theirs[0].op is plans.Op.FORWARD)


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


def test_evaluation_keeps_no_memory_of_every_shape():
    def run():
        axis = fds.mesh(pp=2)["pp"]
        layers = fds.Layers([fds.LayerSpec(nn.Linear, 4, 4), fds.LayerSpec(nn.Linear, 4, 4)], nn.MSELoss())
        step = fds.compose(fds.pipeline(plans.gpipe, axis, num_microbatches=4), fds.sgd(0.1))(layers)
        state = step.init(layers.init, key=0)
        for rows in range(1, 9):
            step.evaluate(state, (X[:rows], Y[:rows]))
        return sum(len(held) for held in step.runtime.pool.scratch.values())

    assert fds.simulate(run, 2) == [0, 0]


def test_a_schedule_that_leaves_a_rank_without_a_stage_is_refused():
    error = raised(
        lambda: on_ranks(
            [fds.LayerSpec(nn.Linear, 4, 4)],
            schedule=lambda p, n: [[f"0{op}{i}" for i in range(n) for op in ("F", "BW")], []],
        )
    )
    assert isinstance(error, PlanError) and "[1]" in error.got


def test_losses_of_a_plain_mean_are_the_same_function_in_evaluation():
    layers = [fds.LayerSpec(nn.Linear, 4, 4), fds.LayerSpec(nn.Linear, 4, 4)]

    def run():
        axis = fds.mesh(pp=2)["pp"]
        loss = fds.Layers(layers, lambda out, y: fds.Mean(F.mse_loss(out, y, reduction="sum"), y.numel()))
        step = fds.compose(fds.pipeline(plans.gpipe, axis, num_microbatches=4), fds.sgd(0.1))(loss)
        state = step.init(loss.init, key=0)
        return step.evaluate(state, (X, Y))["loss"], step.evaluate(state, (X[:7], Y[:7]))["loss"], step.params(state)

    for whole, seven, params in fds.simulate(run, 2):
        hidden = F.linear(X, params["0.weight"], params["0.bias"])
        errors = (F.linear(hidden, params["1.weight"], params["1.bias"]) - Y).square()
        assert_rounding({"8": whole, "7": seven}, {"8": errors.mean(), "7": errors[:7].mean()}, additions=64)
