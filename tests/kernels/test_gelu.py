"""GELU, alone and before a product: against float64, in every way gradients are taken, and in bytes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from fds.errors import KernelError
from fds.kernels.choice import only
from fds.kernels.gelu import bias_gelu, bias_gelu_linear
from tests.devices import DEVICE
from tests.kernels.accuracy import DTYPES, assert_near, in_float64, random, strided
from tests.kernels.ways import (
    WAYS,
    as_handle,
    kept_bytes,
    plain,
    poisoned,
    traced,
    without_a_gradient,
    zeros_in_backward,
)

SHAPES = [(1, 1), (6, 42), (2, 3, 123), (431,), (3, 8191), (42, 64), (0, 6), (5, 0)]
# Rounded once more than its inputs: y and dx. The derivative that is kept is rounded too; a sum over rows gathers both.
ROUNDINGS = 2.0


def compare(f, x, bias, dy):
    """Check f(x, bias) and its gradients, by the kernel, against float64."""
    x64, b64, dy64 = in_float64(x, bias, dy)
    inputs, inputs64 = ([t for t in ts if t is not None] for ts in ((x, bias), (x64, b64)))
    with only("triton"):
        y = f(x, bias)
        got = torch.autograd.grad(y, inputs, dy)
    with only("reference"):
        y64 = f(x64, b64)
        want = torch.autograd.grad(y64, inputs64, dy64)
    assert y.dtype == x.dtype and [g.dtype for g in got] == [t.dtype for t in inputs]
    assert_near(y, y64, factor=ROUNDINGS)
    for g, w in zip(got, want, strict=True):
        assert_near(g, w, factor=ROUNDINGS)


def made(shape, dtype, with_bias=True):
    x, dy = random(*shape, dtype=dtype, requires_grad=True), random(*shape, dtype=dtype, seed=1)
    return x, random(shape[-1], dtype=dtype, seed=2, requires_grad=True) if with_bias else None, dy


@pytest.mark.sweep(2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_gelu_of_the_sum_and_so_is_every_gradient(dtype, approximate, recompute):
    f = lambda x, b: bias_gelu(x, b, approximate=approximate, recompute=recompute)
    for i, shape in enumerate(SHAPES):
        compare(f, *made(shape, dtype, with_bias=i % 4 != 1))


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_the_reference_is_torch(approximate):
    x, bias, _ = made((6, 42), torch.float32)
    for recompute in (False, True):
        y = bias_gelu(x, bias, approximate=approximate, recompute=recompute)
        assert torch.equal(y, F.gelu(x + bias, approximate=approximate))


@given(
    shape=st.lists(st.integers(1, 9), max_size=2),
    columns=st.integers(1, 2100),
    dtype=st.sampled_from(DTYPES),
    approximate=st.sampled_from(["tanh", "none"]),
    recompute=st.booleans(),
    with_bias=st.booleans(),
)
def test_any_shape(shape, columns, dtype, approximate, recompute, with_bias):
    f = lambda x, b: bias_gelu(x, b, approximate=approximate, recompute=recompute)
    compare(f, *made((*shape, columns), dtype, with_bias))


def test_many_rows_are_summed_by_many_programs():
    compare(bias_gelu, *made((431, 24), torch.float32))
    compare(lambda x, b: bias_gelu(x, b, recompute=True), *made((1000, 3), torch.bfloat16))


@pytest.mark.parametrize("recompute", [False, True])
def test_inputs_and_gradients_may_lie_anyhow_in_memory(recompute):
    x, bias, dy = made((6, 7, 42), torch.float32)
    x, bias, dy = strided(x.detach()).requires_grad_(), strided(bias.detach()).requires_grad_(), strided(dy)
    compare(lambda x, b: bias_gelu(x, b, recompute=recompute), x, bias, dy)
    compare(lambda x, b: bias_gelu(x, b, recompute=recompute), x, bias, torch.ones(()).expand(x.shape))


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_far_from_zero_it_is_zero_or_the_identity(approximate):
    x = torch.tensor([-1e4, -100.0, -30.0, 30.0, 100.0, 1e4], requires_grad=True)
    for recompute in (False, True):
        with only("triton"):
            y = bias_gelu(x, approximate=approximate, recompute=recompute)
            (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(y, x.relu()) and torch.allclose(dx, (x > 0).float(), rtol=0, atol=1e-20)
        with only("triton"):
            x_nan = torch.full((3,), float("nan"), requires_grad=True)
            assert torch.autograd.grad(bias_gelu(x_nan, recompute=recompute).sum(), x_nan)[0].isnan().all()


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_every_number_is_as_near_as_the_module_says(approximate):
    x = torch.cat([torch.linspace(-15, 15, 60_001), torch.linspace(-1e-3, 1e-3, 101)]).requires_grad_()
    with only("triton"):
        y = bias_gelu(x, approximate=approximate, recompute=True)
        (dx,) = torch.autograd.grad(y.sum(), x)
    z = x.detach().double()
    a, root = z.abs(), (2 / torch.pi) ** 0.5
    if approximate == "tanh":
        exponent = 2 * root * (a + 0.044715 * a**3)
        tail = 1 / (1 + exponent.exp())
        density = tail * (1 - tail) * 2 * root * (1 + 3 * 0.044715 * a**2)
    else:
        exponent = a**2 / 2
        tail, density = torch.special.erfc(a / 2**0.5) / 2, torch.exp(-exponent) * root / 2
    g = tail - a * density
    y64, dx64 = z.clamp(min=0) - a * tail, torch.where(z > 0, 1 - g, g)
    assert torch.allclose(y64, F.gelu(z, approximate=approximate), rtol=1e-12, atol=1e-15)
    unit, least = 2**-24, 1e-37  # float32's rounding, and what a GPU takes for 0
    error = unit * (20 + 3 * exponent)
    assert ((y - y64).abs() <= error * a * tail + unit * y64.abs() + least).all()
    assert ((dx - dx64).abs() <= error * (tail + a * density) + unit * dx64.abs() + least).all()


def test_all_is_written_and_nothing_else():
    for shape, dtype in (((5, 123), torch.bfloat16), ((431,), torch.float32), ((37, 1040), torch.float16)):
        x, bias, dy = made(shape, dtype)
        weight = random(3, shape[-1], dtype=dtype, requires_grad=True)
        for given_bias in (bias, None):
            for f in (
                lambda x, b: bias_gelu(x, b),
                lambda x, b: bias_gelu(x, b, recompute=True),
                lambda x, b, w=weight: bias_gelu_linear(x, b, w).sum() + x,
            ):
                with only("triton"), poisoned():
                    f(x, given_bias).backward(dy)


def test_the_bias_gradient_is_the_same_every_time():
    x, bias, dy = made((300, 42), torch.float32)
    with only("triton"):
        first, second = (torch.autograd.grad(bias_gelu(x, bias), bias, dy)[0] for _ in range(2))
    assert torch.equal(first, second)


LOSSES = {
    "kept": lambda x, b, w, c: bias_gelu_product(x, b, w, c, recompute=False),
    "recomputed": lambda x, b, w, c: bias_gelu_product(x, b, w, c, recompute=True),
    "linear": lambda x, b, w, c: bias_gelu_linear(x, b, w, c).square().sum(),
}


def bias_gelu_product(x, bias, weight, linear_bias, recompute):
    return F.linear(bias_gelu(x, bias, recompute=recompute), weight, linear_bias).square().sum()


def inputs(dtype=torch.float32):
    shapes = [(2, 5, 12), (12,), (7, 12), (7,)]
    return [random(*shape, dtype=dtype, seed=i, requires_grad=True) for i, shape in enumerate(shapes)]


@pytest.mark.sweep(2)
@traced
@pytest.mark.parametrize("kind", ["triton", "reference"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_agree_in_every_way_that_they_are_taken(name, way, kind):
    want = plain(LOSSES["kept"], in_float64(*inputs()))
    with only(kind):
        got = WAYS[way](LOSSES[name], inputs())
    for g, w in zip(got, want, strict=True):
        assert_near(g, w, factor=ROUNDINGS)


@pytest.mark.parametrize("kind", ["triton", "reference"])
@pytest.mark.parametrize("name", LOSSES)
def test_parameters_may_be_handles(name, kind):
    x, *params = inputs()
    want = plain(LOSSES[name], [x, *params])
    handles = [as_handle(p) for p in params]
    with only(kind):
        got = plain(LOSSES[name], [x, *handles])
    for g, w in zip(got, want, strict=True):
        assert_near(g, w, factor=ROUNDINGS)


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_each_keeps_the_bytes_that_it_says(kind):
    x, bias, weight, linear_bias = inputs()
    nbytes = [t.numel() * t.element_size() for t in (x, bias, weight)]
    with only(kind):
        assert kept_bytes(bias_gelu, x, bias) == nbytes[0]
        assert kept_bytes(lambda: bias_gelu(x * 1, bias, recompute=True)) == nbytes[0] + nbytes[1]
        assert kept_bytes(bias_gelu_linear, x, bias, weight, linear_bias) == sum(nbytes)
        with torch.no_grad():
            assert kept_bytes(bias_gelu, x, bias) == 0


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_what_has_no_gradient_costs_no_zeros_and_no_gradient_is_none(kind):
    x, bias, _, _ = inputs()
    with only(kind):
        for recompute in (False, True):
            assert zeros_in_backward(bias_gelu(x, bias, recompute=recompute)) == 0
        without_a_gradient(bias_gelu(x * 1, bias)).sum().backward()


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_linear_layer_after_it_has_every_gradient(dtype, approximate):
    x, bias, weight, linear_bias = inputs(dtype)
    for bias_, linear_bias_ in ((bias, linear_bias), (None, None)):
        args = [t for t in (x, bias_, weight, linear_bias_) if t is not None]
        f = lambda *a: bias_gelu_linear(*a, approximate=approximate)
        dy = random(2, 5, 7, dtype=dtype, seed=9)
        given = iter(in_float64(*args))
        args64 = [None if t is None else next(given) for t in (x, bias_, weight, linear_bias_)]
        with only("triton"):
            y = f(x, bias_, weight, linear_bias_)
            got = torch.autograd.grad(y, args, dy)
        y64 = f(*args64)
        want = torch.autograd.grad(y64, [t for t in args64 if t is not None], dy.double())
        assert_near(y, y64, factor=ROUNDINGS)
        for g, w in zip(got, want, strict=True):
            assert_near(g, w, factor=ROUNDINGS)


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_only_the_gradients_that_are_asked_for_are_computed(kind):
    x, bias, weight, linear_bias = (t.detach() for t in inputs())
    for i in range(4):
        args = [t.clone().requires_grad_(i == j) for j, t in enumerate((x, bias, weight, linear_bias))]
        want = torch.autograd.grad(LOSSES["kept"](*args), args[i])[0]
        with only(kind):
            got = torch.autograd.grad(LOSSES["linear"](*args), args[i])[0]
        assert_near(got, want, factor=ROUNDINGS)


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_under_autocast_it_casts_as_linear_does(kind):
    x, bias, weight, linear_bias = inputs()
    with only(kind), torch.autocast(DEVICE.type, torch.bfloat16):
        y = bias_gelu_linear(x, bias, weight, linear_bias)
        z = bias_gelu(x.bfloat16(), bias)
    assert y.dtype == z.dtype == torch.bfloat16
    got = torch.autograd.grad(y.float().square().sum(), (x, bias, weight, linear_bias))
    want = plain(LOSSES["linear"], in_float64(x, bias, weight, linear_bias))
    assert all(g.dtype == torch.float32 for g in got)
    for g, w in zip(got, want, strict=True):
        assert_near(g, w, torch.bfloat16, factor=3)  # inputs are rounded too


def test_under_autocast_a_handle_is_cast_without_memory_of_its_own():
    x, bias, weight, linear_bias = inputs()
    nbytes = 2 * x.numel() + 2 * bias.numel()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y = bias_gelu_linear(x, bias, as_handle(weight), linear_bias)
    kept = [t for t in y.grad_fn.saved_tensors if type(t) is torch.Tensor]
    assert sum(t.numel() * t.element_size() for t in kept) == nbytes


def test_a_second_derivative_is_refused_by_kernels_and_right_by_reference():
    args = in_float64(*inputs())
    assert torch.autograd.gradgradcheck(lambda x, b: bias_gelu(x, b, recompute=True), args[:2])
    assert torch.autograd.gradgradcheck(bias_gelu_linear, args)
    for loss in LOSSES.values():
        x, *others = inputs()
        with only("triton"):
            (dx,) = torch.autograd.grad(loss(x, *others), x, create_graph=True)
            with pytest.raises(KernelError, match="second derivative"):
                dx.sum().backward()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_second_derivative_is_refused_where_the_first_depends_on_x_alone(recompute):
    x = random(3, 5, requires_grad=True)
    with only("triton"):
        (dx,) = torch.autograd.grad(bias_gelu(x, recompute=recompute).sum(), x, create_graph=True)
        assert dx.requires_grad
        with pytest.raises(KernelError, match="second derivative"):
            dx.sum().backward()
        first = torch.func.grad(lambda x: bias_gelu(x, recompute=recompute).sum())
        with pytest.raises(KernelError, match="second derivative"):
            torch.func.grad(lambda x: first(x).sum())(x.detach())


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("x", {"x": torch.ones(3, 4, dtype=torch.int64)}),
        ("x", {"x": torch.ones(())}),
        ("x", {"x": 1.0}),
        ("bias", {"bias": torch.ones(3)}),
        ("bias", {"bias": torch.ones(4, dtype=torch.float16)}),
        ("bias", {"bias": torch.ones(4, device="meta")}),
        ("approximate", {"approximate": "erf"}),
        ("weight", {"weight": torch.ones(5, 3)}),
        ("weight", {"weight": torch.ones(4)}),
        ("weight", {"weight": torch.ones(5, 4, dtype=torch.float64)}),
        ("linear_bias", {"linear_bias": torch.ones(4)}),
        ("linear_bias", {"linear_bias": torch.ones(5, dtype=torch.bfloat16)}),
    ],
)
def test_bad_arguments_are_named(where, change):
    args = {"x": torch.ones(3, 4), "bias": torch.ones(4), "weight": torch.ones(5, 4), "linear_bias": torch.ones(5)}
    args |= {"approximate": "tanh"} | change
    with pytest.raises(KernelError) as caught:
        bias_gelu_linear(**args)
    assert caught.value.where == where and caught.value.got and caught.value.want
    if not {"weight", "linear_bias"} & change.keys():
        with pytest.raises(KernelError) as caught:
            bias_gelu(args["x"], args["bias"], approximate=args["approximate"])
        assert caught.value.where == where
