"""SwiGLU: against float64, on awkward shapes and strides, in every way gradients are taken."""

import pytest
import torch
from hypothesis import given, strategies as st

from fds.errors import KernelError
from fds.kernels._swiglu import reference, swiglu
from fds.kernels.choice import only
from tests.kernels.accuracy import AWKWARD, DTYPES, assert_near, in_float64, random, strided
from tests.kernels.ways import WAYS, as_handle, kept_bytes, plain, poisoned, traced


def made(shape, dtype=torch.float32):
    return [random(*shape, dtype=dtype, seed=i, requires_grad=True) for i in range(2)]


def compare(gate, up, dy=None):
    """Check the kernel and both gradients against float64."""
    dy = random(*gate.shape, dtype=gate.dtype, seed=2) if dy is None else dy
    gate64, up64 = in_float64(gate, up)
    with only("triton"):
        y = swiglu(gate, up)
        got = torch.autograd.grad(y, (gate, up), dy)
    y64 = reference(gate64, up64)
    want = torch.autograd.grad(y64, (gate64, up64), dy.double())
    assert y.dtype == gate.dtype
    assert_near(y, y64)
    for g, w in zip(got, want, strict=True):
        assert_near(g, w)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_reference_and_so_are_both_gradients(dtype):
    for n in AWKWARD:
        compare(*made((3, n), dtype))
    for shape in ((), (0,), (5, 0), (2, 3, 4, 5)):
        compare(*made(shape, dtype))


@given(shape=st.lists(st.integers(1, 40), max_size=3), dtype=st.sampled_from(DTYPES))
def test_any_shape(shape, dtype):
    compare(*made(shape, dtype))


def test_inputs_and_gradients_may_lie_anyhow_in_memory():
    both = random(6, 2 * 42, requires_grad=True)
    compare(*(half.detach().requires_grad_() for half in both.chunk(2, dim=-1)))  # two halves of one projection
    gate, up = (strided(t.detach()).requires_grad_() for t in made((6, 7, 42)))
    compare(gate, up, strided(random(6, 7, 42)))
    compare(*(t.detach().t().requires_grad_() for t in made((123, 6))), torch.ones(()).expand(6, 123))


def test_far_from_zero_it_is_zero_or_the_product():
    gate = torch.tensor([-1e4, -200.0, 200.0, 1e4], requires_grad=True)
    with only("triton"):
        y = swiglu(gate, torch.full((4,), 3.0))
        (dgate,) = torch.autograd.grad(y.sum(), gate)
    assert torch.equal(y, 3 * gate.relu()) and torch.equal(dgate, 3.0 * (gate > 0))


def test_all_is_written_and_nothing_else():
    for shape, dtype in (((5, 123), torch.bfloat16), ((431,), torch.float32), ((3, 2048), torch.float16)):
        gate, up = made(shape, dtype)
        with only("triton"), poisoned():
            swiglu(gate, up).backward(gate.detach())


def loss(gate, up):
    return swiglu(gate, up).square().sum()


@traced
@pytest.mark.parametrize("kind", ["triton", "reference"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_agree_in_every_way_that_they_are_taken(way, kind):
    args = made((5, 12))
    with only(kind):
        got = WAYS[way](loss, args)
    for g, w in zip(got, plain(loss, in_float64(*args)), strict=True):
        assert_near(g, w, factor=2)  # of the square, twice


def test_its_inputs_are_kept_and_may_be_handles():
    gate, up = made((5, 12))
    with only("triton"):
        assert kept_bytes(swiglu, gate, up) == 2 * 5 * 12 * 4
        got = plain(loss, (as_handle(gate), as_handle(up)))
    for g, w in zip(got, plain(loss, (gate, up)), strict=True):
        assert_near(g, w)


def test_a_second_derivative_is_refused_by_kernels():
    gate, up = made((5, 12))
    with only("triton"):
        (dgate,) = torch.autograd.grad(loss(gate, up), gate, create_graph=True)
        with pytest.raises(KernelError, match="second derivative"):
            dgate.sum().backward()


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("gate", {"gate": torch.ones(4, dtype=torch.int64)}),
        ("up", {"up": torch.ones(5)}),
        ("up", {"up": torch.ones(4, dtype=torch.float16)}),
        ("up", {"up": torch.ones(4, device="meta")}),
    ],
)
def test_bad_arguments_are_named(where, change):
    with pytest.raises(KernelError) as caught:
        swiglu(**{"gate": torch.ones(4), "up": torch.ones(4)} | change)
    assert caught.value.where == where and caught.value.got and caught.value.want
