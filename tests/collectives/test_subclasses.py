"""Tensors that are not plain ones reach the collectives as they would any operator of torch."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fds import collectives as c
from tests.collectives.cases import CASES, axis


class Wrapper(torch.Tensor):
    """Holds a tensor and has no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        down = lambda x: x.inner if isinstance(x, cls) else x
        up = lambda x: cls(x) if isinstance(x, torch.Tensor) else x
        args, kwargs = pytree.tree_map(down, (args, kwargs or {}))
        return pytree.tree_map(up, func(*args, **kwargs))


class Named(torch.Tensor):
    """Dispatches functions, and stands for the number 3."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            plain = torch.full(args[0].shape, 3.0)
            return func(plain, *args[1:], **(kwargs or {}))


ARGUMENTS = {"all_to_all": (0, 0), "broadcast": (1,)}


@pytest.mark.parametrize("name", CASES)
def test_a_subclass_takes_an_operator_apart(name):
    call = lambda x: CASES[name].function(x, axis(), *ARGUMENTS.get(name, ()))

    def run():
        x = torch.arange(4.0) + axis().index
        out = call(Wrapper(x))
        assert isinstance(out, Wrapper)
        leaf = Wrapper(x).requires_grad_()
        (g,) = torch.autograd.grad(call(leaf), leaf, Wrapper(call(x)))
        return out.inner, call(x), g.inner, torch.autograd.grad(call(y := x.requires_grad_()), y, call(x).detach())[0]

    for out, want, g, want_g in c.simulate(run, 2):
        assert torch.equal(out, want) and torch.equal(g, want_g)


@pytest.mark.parametrize("name", CASES)
def test_a_subclass_that_dispatches_functions_goes_first(name):
    call = lambda x: CASES[name].function(x, axis(), *ARGUMENTS.get(name, ()))

    def run():
        return call(torch.zeros(4).as_subclass(Named)), call(torch.full((4,), 3.0))

    for out, want in c.simulate(run, 2):
        assert torch.equal(out, want)


@pytest.mark.parametrize("name", CASES)
def test_fake_tensors_learn_shapes_and_send_nothing(name):
    call = lambda x: CASES[name].function(x, axis(), *ARGUMENTS.get(name, ()))

    def run():
        want = call(torch.zeros(4, 3))
        with c.counted() as traffic:
            with FakeTensorMode():
                fake = call(torch.zeros(4, 3))
            meta = call(torch.zeros(4, 3, device="meta"))
        assert not traffic.counts
        return fake.shape == meta.shape == want.shape

    assert c.simulate(run, 2) == [True, True]


def test_messages_of_subclasses():
    def run():
        a = axis()
        if a.index == 0:
            return c.send(Wrapper(torch.arange(3.0)), a, 1).inner
        return c.recv(Wrapper(torch.zeros(3)), a, 0).inner

    zero, got = c.simulate(run, 2)
    assert torch.equal(zero, torch.zeros(())) and torch.equal(got, torch.arange(3.0))
