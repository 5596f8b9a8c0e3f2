"""Modules that checkpoint themselves, by torch and in Hugging Face's ways; the module itself is the oracle."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fds
from fds.autodiff import value_and_grad, vjp
from fds.errors import LossError
from tests.bits import assert_same_bits

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.inner, self.again = nn.Linear(3, 3), again

    def forward(self, x):
        return self.again(self.inner.__call__, x).tanh()


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.again = functools.partial(checkpoint, **options) if options else lambda f, x: f(x)
        self.first = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(Block(self.again) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.again(lambda x: self.first(x).sin(), x)  # parameters that were used before


KINDS = {"non-reentrant": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}


def loss_of(**options):
    apply, params, _ = fds.functional(Net(**options))
    return lambda p, x: apply(p, x).square().mean(), params


@pytest.mark.parametrize("kind", KINDS)
def test_direct_calls_are_differentiated(kind):
    loss, params = loss_of(**KINDS[kind])
    plain, _ = loss_of()
    for _ in range(2):
        assert_same_bits(value_and_grad(loss)(params, X), value_and_grad(plain)(params, X))


def test_calls_whose_graphs_live_together_keep_their_parameters():
    loss, params = loss_of(use_reentrant=False)
    trees = [{n: (p * k).requires_grad_() for n, p in params.items()} for k in (1.0, 2.0)]
    values = [loss(p, X) for p in trees]
    found = [torch.autograd.grad(value, list(p.values())) for value, p in zip(values, trees, strict=True)]
    plain, _ = loss_of()
    assert_same_bits(found, [torch.autograd.grad(plain(p, X), list(p.values())) for p in trees])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_steps_train_alike(kind, stage):
    def rank():
        shard = [] if stage is None else [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage, bucket_bytes=64)]
        found = []
        for options in (KINDS[kind], {}):
            loss, params = loss_of(**options)
            step = fds.compose(*shard, fds.accumulate(2), fds.sgd(1.0))(loss)
            state = step.init(params)
            for _ in range(2):
                state, _ = step(state, X)
            found.append(step.params(state))
        torch.testing.assert_close(*found)

    fds.simulate(rank, world_size=1 if stage is None else 2)


def test_a_reentrant_checkpoint_touches_no_other_gradient():
    other, x = torch.ones(3, requires_grad=True), X.clone().requires_grad_()
    other.grad = torch.full((3,), 7.0)
    inner, params = loss_of(use_reentrant=True)
    loss = lambda p, x: inner(p, x * other)
    step = fds.compose(fds.sgd(1.0))(loss)
    step(step.init(params), x)
    value_and_grad(loss)(params, x)
    assert x.grad is None
    assert_same_bits(other.grad, torch.full((3,), 7.0))


def test_what_a_reentrant_checkpoint_cannot_give_is_refused():
    loss, params = loss_of(use_reentrant=True)
    with pytest.raises(LossError, match="use_reentrant=False"):
        value_and_grad(loss, create_graph=True)(params, X)
    value, pull = vjp(lambda p: loss(p, X), params)
    with pytest.raises(LossError, match="use_reentrant=False"):
        pull(torch.ones_like(value))
    block = Block(functools.partial(checkpoint, use_reentrant=True))
    layers = fds.Layers([nn.Linear(3, 3), block], lambda y, _: y.sum())
    step = fds.compose(fds.pipeline(fds.plans.gpipe, 2, num_microbatches=2), fds.sgd(0.1))(layers)
    state = step.init(layers.init)
    with pytest.raises(LossError, match="use_reentrant=False"):
        step(state, (X, X))


def test_a_step_that_checkpoints_reentrantly_only_later_says_so():
    inner, params = loss_of(use_reentrant=True)
    plain, _ = loss_of()
    step = fds.compose(fds.sgd(0.1))(lambda p, x: (inner if x.shape[0] == 4 else plain)(p, x))
    state, _ = step(step.init(params), X[:2])
    with pytest.raises(LossError, match="not in the first call"):
        step(state, X)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 1)
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, x):
        return self.out(x + self.table)


def test_float32_buffers_under_precision_say_what_to_write():
    module = Positions()
    for as_told in (False, True):
        if as_told:
            module.table = module.table.bfloat16()
        apply, params, _ = fds.functional(module)
        step = fds.compose(fds.precision(torch.bfloat16), fds.sgd(0.1))(lambda p, x: apply(p, x).float().mean())  # noqa: B023
        state = step.init(params)
        if as_told:
            step(state, X)
            continue
        with pytest.raises(LossError, match=r"module\.table = module\.table\.bfloat16\(\)") as caught:
            step(state, X)
        assert caught.value.where == "table"
