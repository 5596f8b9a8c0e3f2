"""A module in eval mode that is trained: a warning where it makes a difference, and only there."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.errors import LossWarning

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(F.dropout(x, 0.5, self.training))


def net():
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3))


def run(loss, params, *transforms, steps=1):
    """Return the warnings of some steps."""
    step = fds.compose(*transforms, fds.sgd(0.1))(loss)
    state = step.init(params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.evaluate(state, X)
        for _ in range(steps):
            state, _ = step(state, X)
    return [str(w.message) for w in caught if w.category is LossWarning]


def of(module, *transforms, **kwargs):
    apply, params, _ = fds.functional(module)
    return run(lambda p, x: apply(p, x).square().mean(), params, *transforms, **kwargs)


@pytest.mark.parametrize("make", [net, Custom, lambda: nn.TransformerEncoderLayer(3, 1, 4)])
def test_an_eval_mode_module_that_is_trained_is_told_once(make):
    (said,) = of(make().eval(), fds.accumulate(2), steps=3)
    assert "module.train()" in said
    assert "eval mode" in said


def test_it_is_told_by_initialize_and_layers_too():
    config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    step, state, _, _ = fds.initialize(net().eval(), lambda m, x: m(x).square().mean(), config=config)
    with pytest.warns(LossWarning, match="Dropout"):
        step(state, X)
    layers = fds.Layers(net().eval(), F.mse_loss)
    step = fds.compose(fds.sgd(0.1))(layers)
    with pytest.warns(LossWarning, match="Dropout"):
        step(step.init(layers.init), (X, X))


def partly():
    module = net()
    module[1].eval()
    return module


@pytest.mark.parametrize(
    "module",
    [
        net(),
        partly(),
        nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).eval(),
        nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)).eval(),
    ],
    ids=["training", "a part on purpose", "no difference", "dropout of nothing"],
)
def test_nothing_is_said_where_it_is_meant_or_makes_no_difference(module):
    assert of(module) == []


def test_nothing_is_said_of_what_is_not_trained():
    student, params, _ = fds.functional(net())
    teacher, fixed, _ = fds.functional(net().eval())
    distil = lambda p, x: F.mse_loss(student(p, x), teacher(fixed, x))
    assert run(distil, params) == []
    both = {"student": params, "teacher": fixed}
    joint = lambda p, x: F.mse_loss(student(p["student"], x), teacher(p["teacher"], x))
    assert run(joint, both, fds.freeze("teacher.*")) == []
    assert len(run(joint, both)) == 1


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_told_of(register):
    module = net()
    getattr(module[2].weight, register)(lambda g: None)
    with pytest.warns(LossWarning, match="first '2.weight'"):
        fds.functional(module)


def test_nothing_is_said_of_hooks_on_modules():
    module = net()
    module[2].register_full_backward_hook(lambda m, given, got: None)
    assert of(module) == []
