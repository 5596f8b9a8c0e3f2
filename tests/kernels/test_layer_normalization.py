"""What only layer_norm has: a mean. (tests/kernels/test_normalization.py holds it near float64.)"""

import pytest
import torch
import torch.nn.functional as F

from fds.kernels import only
from fds.kernels.normalization import add_layer_norm, layer_norm, layer_reference as reference
from tests.kernels.accuracy import assert_near, distance, random

KINDS = ["triton", "reference"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [64, 8208])
def test_a_mean_far_from_zero_costs_no_more_than_its_own_rounding(kind, columns):
    x = (10_000 + random(3, columns)).requires_grad_()
    with only(kind):
        y = layer_norm(x)
        dy = random(*y.shape, seed=3)
        (dx,) = torch.autograd.grad(y, x, dy)
    x64 = x.detach().double().requires_grad_()
    y64 = F.layer_norm(x64, (columns,))
    (dx64,) = torch.autograd.grad(y64, x64, dy.double())
    # The mean is held in float32: half of 2^-23 * 8192, of a deviation of 1. E[x^2] - E[x]^2 would be off by 6.
    assert distance(y, y64) < 1e-3
    assert distance(dx, dx64) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_one_column_is_its_bias(kind):
    x = random(5, 1, requires_grad=True)
    weight, bias = (random(1, seed=seed, requires_grad=True) for seed in (1, 2))
    with only(kind):
        y = layer_norm(x, weight, bias)
        dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), torch.ones(5, 1))
    assert torch.equal(y, bias.expand(5, 1))
    most = 4 * 2**-23 / 1e-5**0.5  # roundings of x over the root of eps, where torch does not subtract x itself
    assert dx.abs().max() <= most
    assert dweight.abs().max() <= 5 * most
    assert torch.equal(dbias, torch.full((1,), 5.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_torchs_layer_norm(dtype):
    x, weight, bias = random(6, 123, dtype=dtype), random(123, seed=1, dtype=dtype), random(123, seed=2, dtype=dtype)
    want = F.layer_norm(x, (123,), weight, bias, 1e-3)
    assert torch.equal(layer_norm(x, weight, bias, eps=1e-3), want)
    assert torch.equal(reference(x, weight, bias, eps=1e-3), want)
    with only("triton"):
        assert_near(layer_norm(x, weight, bias, eps=1e-3), want)


def test_the_sum_is_rounded_as_an_addition_rounds_it():  # float16: the interpreter truncates to bfloat16
    x, residual, weight = random(6, 42, dtype=torch.float16), random(6, 42, dtype=torch.float16, seed=1), random(42)
    with only("triton"):
        y, total = add_layer_norm(x, residual, weight)
        assert torch.equal(total, x + residual)
        assert torch.equal(y, layer_norm(x + residual, weight))
        assert torch.equal(y, layer_norm(x, weight, residual=residual))


def test_weights_of_float32_are_not_rounded_to_the_dtype_of_x():
    x, weight, bias = random(6, 42, dtype=torch.float16), random(42, seed=1), random(42, seed=2)
    want = reference(x.double(), weight.double(), bias.double())
    for kind in KINDS:
        with only(kind):
            y = layer_norm(x, weight, bias)
            assert y.dtype == torch.float16
            assert torch.equal(y, want.to(torch.float16)) or distance(y, want) < 2**-11
    assert_near(reference(x, weight, bias), want)
