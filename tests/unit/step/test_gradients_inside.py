"""Gradients inside a loss: exact where a graph is asked for, refused where the step would lose or double them."""

import attrs
import pytest
import torch
from torch import nn

import fds
from fds.autodiff import value_and_grad, vjp
from fds.errors import FdsError, LossError
from tests.bits import assert_same_bits

NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
APPLY, PARAMS, _ = fds.functional(NET)
X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def penalty(params, x):
    """Return the squared slope of the network at every row, by fds."""
    slopes = value_and_grad(lambda x: APPLY(params, x).sum(), create_graph=True)(x)[1]
    return APPLY(params, x).mean() + 3 * slopes.square().sum(1).mean()


def adapted(params, x):
    """Return the loss after a step of gradient descent, as MAML does."""
    inner = lambda p: APPLY(p, x).square().mean()
    _, grads = value_and_grad(inner, create_graph=True)(params)
    return inner({name: p - 0.1 * grads[name] for name, p in params.items()})


def by_rows(params, x):
    """Return a loss on the product of the Jacobian of the network and a vector, by two `vjp`."""
    out, pull = vjp(lambda x: APPLY(params, x), x, create_graph=True)
    return pull(torch.ones_like(out))[0].sin().mean() + out.square().mean()


def by_torch_func(loss):
    """Return the gradients of a loss in which torch.func differentiates, over plain parameters."""
    return torch.func.grad(loss)(PARAMS, X)


def gradients(loss, *transforms):
    """Return what a step of gradient descent of rate 1 subtracts."""
    step = fds.compose(*transforms, fds.sgd(1.0))(loss)
    state, _ = step(step.init(PARAMS), X)
    new = step.params(state)
    return {name: PARAMS[name] - new[name] for name in PARAMS}


@pytest.mark.parametrize("loss", [penalty, adapted, by_rows])
@pytest.mark.parametrize("transforms", [[], [fds.checkpoint_activations()]], ids=["plain", "checkpointed"])
def test_second_order_losses_train(loss, transforms):
    torch.testing.assert_close(gradients(loss, *transforms), by_torch_func(loss))


@pytest.mark.parametrize("loss", [penalty, by_rows])
def test_second_order_losses_are_accumulated(loss):
    torch.testing.assert_close(gradients(loss, fds.accumulate(4)), by_torch_func(loss))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("loss", [penalty, adapted])
def test_second_order_losses_are_sharded(stage, loss):
    def rank():
        return gradients(loss, fds.checkpoint_activations(), fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage))

    for found in fds.simulate(rank, world_size=2):
        torch.testing.assert_close(found, by_torch_func(loss))


def test_a_layer_of_a_pipeline_differentiates():
    def sloped(x):
        return value_and_grad(lambda x: (x**3).sum(), create_graph=True)(x)[1]

    layers = fds.Layers([nn.Linear(3, 4).double(), sloped, nn.Linear(4, 1).double()], lambda out, _: out.mean())
    batch, found = (X, X), []
    for extra in ([fds.accumulate(2)], [fds.pipeline(fds.plans.zb_h1, 2, num_microbatches=2)]):
        step = fds.compose(*extra, fds.sgd(1.0))(layers)
        found.append(step.params(step(step.init(layers.init), batch)[0]))
    assert_same_bits(*found)


@pytest.mark.parametrize("stage", [None, 0, 3])
def test_a_gradient_without_a_graph_is_refused_inside_a_loss(stage):
    def loss(params, x):
        return value_and_grad(lambda x: APPLY(params, x).sum())(x)[1].square().mean()

    def rank():
        extra = [] if stage is None else [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)]
        step = fds.compose(*extra, fds.sgd(0.1))(loss)
        state = step.init(PARAMS)
        assert step.evaluate(state, X)["loss"] > 0  # nothing is differentiated there
        with pytest.raises(LossError, match="create_graph=True"):
            step(state, X)

    fds.simulate(rank, world_size=1)


def by_loss(params, x):
    loss = APPLY(params, x).square().mean()
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_backward_pass_of_the_losss_own_is_refused(stage, num_microbatches):
    def rank():
        extra = [] if stage is None else [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)]
        step = fds.compose(fds.accumulate(num_microbatches), *extra, fds.sgd(0.1))(by_loss)
        with pytest.raises(LossError, match="a backward pass of its own"):
            step(step.init(PARAMS), X)

    fds.simulate(rank, world_size=1)


def test_a_step_on_what_is_differentiated_is_refused():
    step = fds.compose(fds.sgd(0.1))(lambda params, x: APPLY(params, x).mean())
    state = step.init(PARAMS)
    after = lambda params, x: step(attrs.evolve(state, params=params), x)[1]["loss"]
    with pytest.raises(FdsError, match="no gradient flows through a step"):
        value_and_grad(lambda x: after(PARAMS, x))(X)
    unrolled = fds.compose(fds.sgd(0.1))(after)
    with pytest.raises(FdsError, match="no gradient flows through a step"):
        unrolled(state, X)

    def constant(x):
        with torch.no_grad():
            inner = after(PARAMS, x)
        return (x * inner).sum()

    assert_same_bits(value_and_grad(constant)(X)[1], torch.full_like(X, after(PARAMS, X).item()))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's forward mode does
def test_torch_func_cannot_transform_a_step():
    step = fds.compose(fds.sgd(0.1))(lambda params, x: APPLY(params, x).mean())
    state = step.init(PARAMS)
    for transformed in (
        lambda: torch.func.grad(lambda x: step(state, x)[1]["loss"])(X),
        lambda: torch.vmap(lambda x: step(state, x)[1]["loss"])(X[:, None]),
        lambda: torch.vmap(lambda x: step.evaluate(state, x)["loss"])(X[:, None]),
        lambda: torch.func.jvp(lambda x: step(state, x)[1]["loss"], (X,), (X,)),
    ):
        with pytest.raises(FdsError, match=r"torch\.func cannot transform a step"):
            transformed()


@pytest.mark.parametrize("more", [(), (fds.precision(torch.bfloat16),)], ids=["in place", "wide"])
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("leaf", ["a", "b"])
def test_a_backward_inside_any_microbatch_is_refused(which, leaf, more):
    def loss(params, x):
        if x[0, 0] == which:
            params[leaf].square().sum().backward()
        return (params["a"] * x).sum()

    step = fds.compose(fds.accumulate(3), *more, fds.sgd())(loss)
    state = step.init({"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(LossError, match="a backward pass of its own"):
        step(state, torch.arange(3.0)[:, None])
