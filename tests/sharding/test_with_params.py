"""`step.with_params`: whole parameters, or a slot of the optimizer, in the place of those of a state."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import nn

import fds
from fds.errors import StateError

apply, PARAMS, _ = fds.functional(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
STAGES = pytest.mark.parametrize("stage", range(4))
LR, BETA = 0.1, 0.9


def made(stage, optimizer=None, *more):
    dp = fds.mesh(dp=-1)["dp"]
    optimizer = fds.adamw(0.1) if optimizer is None else optimizer
    step = fds.compose(fds.shard_optimizer(dp, stage=stage), *more, optimizer)(lambda p, x: apply(p, x).square().mean())
    return step, step.init(PARAMS), X.chunk(dp.size)[dp.index]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@STAGES
@pytest.mark.parametrize(
    "more", [(), (fds.freeze("0.*"),), (fds.offload(moments="host"),)], ids=["", "frozen", "moved"]
)
def test_it_is_the_inverse_of_params_and_leaves_all_else(stage, more):
    def run():
        step, state, batch = made(stage, None, *more)
        old, _ = step(state, batch)
        others = {name: x + 1 for name, x in step.params(old).items()}
        new = step.with_params(old, others)
        assert same(step.params(new), others) and not same(step.params(old), others)
        assert same(step.params(step.with_params(new, step.params(old))), step.params(old))
        assert new.opt is old.opt and new.slots is old.slots and new.calls is old.calls
        direct = fds.adamw(0.1)
        whole = fds.compose(direct)(lambda p, x: apply(p, x).square().mean())
        loss = whole.evaluate(whole.init(others), X)["loss"]
        return torch.allclose(step.evaluate(new, batch)["loss"], loss) and bool(step(new, batch)[1]["loss"].isfinite())

    assert all(fds.simulate(run, 2))


@STAGES
def test_the_state_dict_of_a_module_is_taken(stage):
    def run():
        step, state, _ = made(stage)
        module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        others = {name: torch.full_like(x, 2.0) for name, x in PARAMS.items()}
        module.load_state_dict(others)
        return same(step.params(step.with_params(state, module.state_dict())), others)

    assert all(fds.simulate(run, 2))


def schedule_free(lr, beta):
    """Schedule-Free SGD (Defazio et al. 2024, arXiv:2405.15682): gradients at y, evaluation at x."""

    def init(segments, *, params):
        return {"x": [p.clone() for p in params], "z": [p.clone() for p in params]}

    def update(grads, opt, params, *, step, grad_scale, **rest):
        weight = 1 / (step + 1).to(torch.float32)
        for g, y, x, z in zip(grads, params, opt["x"], opt["z"], strict=True):
            z.sub_(lr * (g if grad_scale is None else g / grad_scale))
            x.lerp_(z, weight)
            y.copy_(z.lerp(x, beta))
        return params, opt

    return fds.Optimizer(init, update, lr=lr, draws=False, separate=True, elementwise=True)


@STAGES
def test_schedule_free_is_evaluated_where_its_average_is(stage):
    x, y, z = ({name: p.detach().clone() for name, p in PARAMS.items()} for _ in range(3))
    for t in range(3):
        leaves = {name: p.requires_grad_() for name, p in y.items()}
        grads = dict(zip(y, torch.autograd.grad(apply(leaves, X).square().mean(), list(leaves.values())), strict=True))
        z = {name: p - LR * grads[name] for name, p in z.items()}
        x = {name: p.lerp(z[name], 1 / (t + 1)) for name, p in x.items()}
        y = {name: z[name].lerp(p, BETA).detach() for name, p in x.items()}

    def run():
        step, state, batch = made(stage, schedule_free(LR, BETA))
        for _ in range(3):
            state, _ = step(state, batch)
        average = step.with_params(state, state.opt["x"])
        return step.params(average), step.params(state), step.evaluate(average, batch)["loss"]

    for average, params, loss in fds.simulate(run, 2):
        torch.testing.assert_close(average, x)
        torch.testing.assert_close(params, y)
        torch.testing.assert_close(loss, apply(x, X).square().mean())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("doing", ["evaluate", "params", "into", "step", "describe"])
@pytest.mark.parametrize("what", ["opt", "whole"])
def test_other_parameters_in_a_state_of_slices_are_refused(stage, doing, what):
    def run():
        step, state, batch = made(stage)
        given = step.params(state) if what == "whole" else state.opt["exp_avg"]
        wrong = attrs.evolve(state, params=given)
        use = {"into": lambda: step.into(nn.Linear(1, 1), wrong), "step": lambda: step(wrong, batch)}
        use |= {"params": lambda: step.params(wrong), "evaluate": lambda: step.evaluate(wrong, batch)}
        with pytest.raises(StateError, match="with_params"):
            use.get(doing, lambda: step.describe(wrong))()
        return bool(step(state, batch)[1]["loss"].isfinite())  # the ranks are as they were

    assert all(fds.simulate(run, 2))


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: {**p, "0.bias": torch.ones(2)}, ["0.bias", "(2,)", "(3,)"]),
        (lambda p: {name: x for name, x in p.items() if name != "2.bias"}, ["2.bias", "nothing"]),
        (lambda p: {name: x.double() for name, x in p.items()}, ["float64", "float32"]),
        (lambda p: {name: x * float("nan") for name, x in p.items()}, ["not finite"]),
        (lambda p: nn.Linear(2, 2), ["a module is not a tree"]),
    ],
)
def test_what_are_not_the_parameters_of_the_state_are_refused(stage, change, words):
    def run():
        step, state, batch = made(stage)
        with pytest.raises(StateError) as error:
            step.with_params(state, change(step.params(state)))
        assert all(word in str(error.value) for word in words) or fds.mesh(dp=-1).rank, str(error.value)
        return bool(step(state, batch)[1]["loss"].isfinite())

    assert all(fds.simulate(run, 2))
