"""What is measured of layers; of seconds only that they are there, since a test does not time."""

import random

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fds
from fds.errors import LossError, PlanError
from fds.plans.measuring import LayerCosts, measure
from fds.plans.simulator import Costs

FIELDS = ("forward", "backward_input", "backward_weight", "activation_bytes", "message_bytes")


class Split(nn.Module):
    """Returns several tensors, one of them of integers."""

    def forward(self, x):
        return {"halves": [x[:, :2], x[:, 2:]], "where": x.argmax(1)}


class Join(nn.Module):
    def forward(self, parts):
        a, b = parts["halves"]
        return (torch.cat([a, b], 1) * (1 + parts["where"][:, None]),)


def first(x):
    return x[0]


def a_loss(*more) -> fds.Layers:
    spec = fds.LayerSpec
    layers = [spec(nn.Linear, 4, 8), nn.ReLU(inplace=True), spec(nn.Dropout, 0.5), spec(nn.Linear, 8, 4), *more]
    return fds.Layers(layers, nn.functional.mse_loss)


def a_batch(rows=6):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 4, generator=generator)


def test_there_is_a_number_for_every_layer_and_none_is_negative():
    costs = measure(a_loss(Split(), Join(), first), a_batch(), repeats=2)
    assert len(costs) == 7
    for name in FIELDS:
        values = getattr(costs, name)
        assert len(values) == 7 and all(value >= 0 for value in values), name
    assert all(seconds > 0 for seconds in costs.forward)
    assert costs.seconds == tuple(
        f + b + w for f, b, w in zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True)
    )


def test_nothing_is_spent_on_gradients_that_nobody_needs():
    costs = measure(a_loss(), a_batch(), repeats=1)
    assert costs.backward_input[0] == 0 and all(seconds > 0 for seconds in costs.backward_input[1:])
    assert costs.backward_weight[1] == costs.backward_weight[2] == 0
    frozen = nn.Linear(4, 8).requires_grad_(False)
    before_all_training = measure(fds.Layers([frozen, nn.ReLU(), nn.Linear(8, 4)], nn.functional.mse_loss), a_batch())
    assert before_all_training.backward_input == (0, 0, 0)
    assert before_all_training.backward_weight[:2] == (0, 0) and before_all_training.backward_weight[2] > 0


def test_the_backward_to_the_input_alone_leaves_the_products_of_the_weights_out():
    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.products += func is torch.ops.aten.mm.default
            return func(*args, **kwargs or {})

    layers = fds.Layers([nn.Linear(4, 8), nn.Linear(8, 4)], lambda out, _: out.sum())
    with Count() as count:
        measure(layers, a_batch(), repeats=1)
    # twice (once to warm up): the first layer's weight; the second's input; the second's input and weight
    assert count.products == 2 * (1 + 1 + 2)


def test_messages_are_the_bytes_of_all_tensors_of_the_output():
    rows = 6
    costs = measure(a_loss(Split(), Join(), first), a_batch(rows), repeats=1)
    floats = [8, 8, 8, 4, 4, 4, 4]
    assert costs.message_bytes == tuple(rows * (4 * n + 8 * (i == 4)) for i, n in enumerate(floats))


def test_activations_are_what_is_kept_for_backward_without_the_parameters():
    rows = 6
    layers = fds.Layers([nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)], lambda out, _: out.sum())
    costs = measure(layers, a_batch(rows), repeats=1)
    # what they save: the input; the output; the input
    assert costs.activation_bytes == (4 * rows * 4, 4 * rows * 8, 4 * rows * 8)


def test_the_criterion_belongs_to_the_last_layer():
    rows = 6
    layers = [nn.Linear(4, 8), nn.Linear(8, 4)]
    bare = measure(fds.Layers(layers, lambda out, _: out.sum()), a_batch(rows), repeats=1)
    square = measure(fds.Layers(layers, lambda out, target: (out - target).square().sum()), a_batch(rows), repeats=1)
    assert square.activation_bytes[0] == bare.activation_bytes[0]
    assert square.activation_bytes[1] == bare.activation_bytes[1] + 4 * rows * 4


@pytest.mark.parametrize(
    "criterion",
    [
        lambda out, _: fds.Mean(out.sum(), 3),
        lambda out, _: (out.mean(), {"largest": out.max()}),
        lambda out, _: (fds.Mean(out.sum(), 3), {}),
    ],
)
def test_a_criterion_returns_what_a_loss_returns(criterion):
    costs = measure(fds.Layers([nn.Linear(4, 8), nn.Linear(8, 4)], criterion), a_batch(), repeats=1)
    assert costs.backward_input[1] > 0


def test_parameters_may_be_given_and_stay_as_they_are():
    layers = a_loss(fds.LayerSpec(nn.BatchNorm1d, 4))
    params = layers.init(fds.random.key(1))
    before = {name: p.clone() for name, p in params.items()}
    assert len(measure(layers, a_batch(), params=params, repeats=1)) == 5
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in params.items())
    assert not any(p.requires_grad for p in params.values())
    with pytest.raises(LossError, match="parameters are not those"):
        measure(layers, a_batch(), params={"0.weight": before["0.weight"]})


def test_tied_layers_are_measured_at_both_of_their_places():
    tied = lambda forward_fn=None: fds.TiedLayerSpec("both", nn.Linear, 4, 4, forward_fn=forward_fn)
    layers = fds.Layers([tied(), nn.Tanh(), tied(lambda m, x: x @ m.weight)], nn.functional.mse_loss)
    costs = measure(layers, a_batch(), repeats=1)
    assert costs.message_bytes == (96, 96, 96) and costs.backward_weight[0] > 0


@pytest.mark.parametrize("guard", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_generators_and_grad_mode_are_left_as_they_were(guard):
    class Noise(nn.Module):
        def forward(self, x):
            return x * random.random() + torch.randn_like(x)

    with guard():
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        states = torch.get_rng_state(), random.getstate()
        costs = measure(a_loss(Noise()), a_batch(), repeats=1)
        assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
        assert modes == (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    assert costs.backward_input[4] > 0


def test_generators_and_grad_mode_are_left_as_they_were_by_a_failure():
    def fails(_x):
        torch.rand(1)
        raise RuntimeError("no such luck")

    state = torch.get_rng_state()
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="no such luck") as caught:
            measure(a_loss(fails), a_batch())
        assert not torch.is_grad_enabled()
    assert caught.value.__notes__ == ["while layers[4] was measured"]
    assert torch.equal(state, torch.get_rng_state())


def test_one_rank_measures_and_all_have_its_value():
    measured = []

    def watched(x):
        measured.append(fds.mesh(dp=-1)["dp"].index)
        return x

    def rank():
        axis = fds.mesh(dp=-1)["dp"]
        return measure(a_loss(watched), a_batch() if axis.index == 0 else None, axis=axis, repeats=1)

    costs = fds.simulate(rank, world_size=3)
    assert costs[0] == costs[1] == costs[2] and len(costs[0]) == 5
    assert set(measured) == {0}


def test_a_failure_reaches_every_rank():
    def fails(_x):
        raise RuntimeError("no such luck")

    def rank():
        axis = fds.mesh(dp=-1)["dp"]
        try:
            measure(a_loss(fails), a_batch(), axis=axis)
        except Exception as error:
            return error, axis.exchange("still here")
        return None

    (own, after), *others = fds.simulate(rank, world_size=3)
    assert type(own) is RuntimeError and after == ["still here"] * 3
    for error, _ in others:
        assert isinstance(error, PlanError)
        assert "no such luck" in error.got and "layers[4]" in error.got


def test_costs_come_back_from_json_as_they_were():
    costs = LayerCosts([0.1, 1e-9], [0, 1 / 3], [0.2, 0.3], [16, 2**60], [4, 0])
    assert LayerCosts.from_json(costs.to_json()) == costs


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("[]", "not layer costs"),
        ('{"forward": [1]}', "not layer costs"),
        (LayerCosts((), (), (), (), ()).to_json().replace("[]", "1"), "not layer costs"),
    ],
)
def test_another_text_is_refused(text, says):
    with pytest.raises(PlanError, match=says):
        LayerCosts.from_json(text)


def test_stages_sum_their_layers_and_send_what_the_last_puts_out():
    costs = LayerCosts([1, 2, 4], [0, 2, 4], [1, 1, 3], [8, 16, 32], [5, 6, 7])
    assert costs.by_stage((0, 2, 3)) == Costs((3, 4), (2, 4), (2, 3), (24, 32), (6, 7))
    assert costs.by_stage([0, 3]) == Costs((7,), (6,), (5,), (56,), (7,))


@pytest.mark.parametrize("boundaries", [[], [0], [0, 2], [1, 3], [0, 2, 2, 3], [0, 4]])
def test_boundaries_of_other_layers_are_refused(boundaries):
    with pytest.raises(PlanError, match="not boundaries"):
        LayerCosts([1, 2, 4], [0, 2, 4], [1, 1, 3], [8, 16, 32], [5, 6, 7]).by_stage(boundaries)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (([1, -1], [0, 0], [0, 0], [0, 0], [0, 0]), r"forward\[1\]"),
        (([1, 1], [0, float("nan")], [0, 0], [0, 0], [0, 0]), r"backward_input\[1\]"),
        (([1, 1], [0, 0], [0, 0], ["8", 0], [0, 0]), r"activation_bytes\[0\]"),
        (([1, 1], [0, 0], [0], [0, 0], [0, 0]), "different lengths"),
    ],
)
def test_costs_that_cannot_be_are_refused(values, says):
    with pytest.raises(PlanError, match=says):
        LayerCosts(*values)


def test_there_is_something_to_measure_and_it_is_measured_at_least_once():
    with pytest.raises(PlanError, match="repeats"):
        measure(a_loss(), a_batch(), repeats=0)
    with pytest.raises(PlanError, match="no layer"):
        measure(fds.Layers([], nn.functional.mse_loss), a_batch())
