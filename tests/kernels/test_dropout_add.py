"""Dropout, bias and residual in one pass: the mask of the reference, kept nowhere, the same in backward."""

import pytest
import torch
from hypothesis import given, strategies as st

from fds.errors import KernelError
from fds.kernels import philox
from fds.kernels.choice import only
from fds.kernels.dropout_add import bias_dropout_add, dropout, reference
from tests.devices import DEVICE
from tests.kernels.accuracy import DTYPES, assert_near, in_float64, random, strided
from tests.kernels.ways import WAYS, as_handle, kept_bytes, plain, poisoned, traced

SHAPES = [(1, 1), (6, 42), (2, 3, 123), (431,), (8191,), (42, 64), (0, 6), (5, 0)]


def made(shape, dtype, with_bias=True, with_residual=True):
    x = random(*shape, dtype=dtype, requires_grad=True)
    bias = random(shape[-1], dtype=dtype, seed=1, requires_grad=True) if with_bias else None
    residual = random(*shape, dtype=dtype, seed=2, requires_grad=True) if with_residual else None
    return x, bias, residual


def compare(args, *, dy=None, **keywords):
    """Check the kernel and all of its gradients against float64."""
    dy = random(*args[0].shape, dtype=args[0].dtype, seed=3) if dy is None else dy
    args64 = in_float64(*args)
    with only("triton"):
        y = bias_dropout_add(*args, **keywords)
        got = torch.autograd.grad(y, [t for t in args if t is not None], dy)
    seed = philox.as_seed(keywords["seed"], dy.device) if keywords["p"] else None
    y64 = reference(*args64, seed, keywords["p"], keywords.get("offset", 0))
    want = torch.autograd.grad(y64, [t for t in args64 if t is not None], dy.double())
    assert y.dtype == args[0].dtype
    assert_near(y, y64)
    for g, w in zip(got, want, strict=True):
        assert_near(g, w)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("with_bias", "with_residual"), [(True, True), (False, True), (True, False), (False, False)])
def test_it_is_the_residual_and_what_is_kept_and_so_is_every_gradient(dtype, with_bias, with_residual):
    for i, shape in enumerate(SHAPES):
        compare(made(shape, dtype, with_bias, with_residual), p=(0.1, 0.5, 0.0, 0.9)[i % 4], seed=7, offset=i)


def test_it_is_what_torch_does_with_the_same_mask():
    x, bias, residual = made((6, 42), torch.float64)
    keep = philox.reference(torch.tensor(5), 3, 6, 42, 0.25)
    y = bias_dropout_add(x, bias, residual, p=0.25, seed=5, offset=3)
    assert torch.allclose(y, residual + keep * (x + bias) / 0.75, rtol=1e-14)
    assert 0.6 < float(keep.double().mean()) < 0.9


@given(
    shape=st.lists(st.integers(1, 5), max_size=2),
    columns=st.integers(1, 600),
    dtype=st.sampled_from(DTYPES),
    p=st.sampled_from([0.0, 0.1, 0.6]),
    seed=st.integers(-(2**63), 2**63 - 1),
    offset=st.integers(0, 2**33),
    given=st.tuples(st.booleans(), st.booleans()),
)
def test_any_shape(shape, columns, dtype, p, seed, offset, given):
    compare(made((*shape, columns), dtype, *given), p=p, seed=seed, offset=offset)


def test_inputs_and_gradients_may_lie_anyhow_in_memory():
    args = [strided(t.detach()).requires_grad_() for t in made((6, 7, 42), torch.float32)]
    compare(args, dy=strided(random(6, 7, 42)), p=0.1, seed=1)
    compare(args, dy=torch.ones(()).expand(6, 7, 42), p=0.1, seed=1)


def test_many_rows_are_summed_by_many_programs():
    compare(made((123, 24), torch.float32), p=0.3, seed=4)
    compare(made((431, 3), torch.bfloat16), p=0.3, seed=4)


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_backward_drops_what_forward_dropped(kind):
    x = torch.ones(37, 123, requires_grad=True)
    with only(kind):
        y = dropout(x, p=0.3, seed=2, offset=9)
        (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, dx) and torch.equal(y != 0, philox.reference(torch.tensor(2), 9, 37, 123, 0.3))


def test_a_mask_depends_on_rows_and_columns_alone():
    """Not on leading dimensions, the dtype, or which of bias and residual are given."""
    with only("triton"):
        masks = [
            dropout(torch.ones(2, 3, 123, dtype=torch.bfloat16), p=0.5, seed=8).view(6, 123) != 0,
            dropout(torch.ones(6, 123), p=0.5, seed=torch.tensor(8)) != 0,
            bias_dropout_add(torch.zeros(6, 123), torch.ones(123), torch.zeros(6, 123), p=0.5, seed=8) != 0,
        ]
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[1], masks[2])


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_without_a_ratio_it_adds(kind):
    x, bias, residual = made((5, 12), torch.float32)
    with only(kind):
        assert torch.equal(bias_dropout_add(x, bias, residual, p=0), residual + (x + bias))
        y = dropout(x, p=0.0)
        assert torch.equal(y, x) and y is not x
        assert torch.equal(torch.autograd.grad(y, x, residual)[0], residual)


def test_all_is_written_and_nothing_else():
    for shape, dtype in (((5, 123), torch.bfloat16), ((431,), torch.float32), ((37, 1040), torch.float16)):
        for p in (0.0, 0.2):
            x, bias, residual = made(shape, dtype)
            with only("triton"), poisoned():
                bias_dropout_add(x, bias, residual, p=p, seed=1).backward(x.detach())


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_only_the_seed_is_kept(kind):
    x, bias, residual = made((31, 12), torch.float32)
    with only(kind):
        assert kept_bytes(lambda: bias_dropout_add(x * 1, bias, residual, p=0.1, seed=1)) == 8
        assert kept_bytes(lambda: bias_dropout_add(x * 1, bias, residual, p=0)) == 0


def loss(x, bias, residual):
    return (bias_dropout_add(x, bias, residual, p=0.3, seed=6, offset=2).square()).sum()


@pytest.mark.sweep
@traced
@pytest.mark.parametrize("kind", ["triton", "reference"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_agree_in_every_way_that_they_are_taken(way, kind):
    args = made((5, 12), torch.float32)
    want = plain(loss, in_float64(*args))
    with only(kind):
        got = WAYS[way](loss, args)
    for g, w in zip(got, want, strict=True):
        assert_near(g, w)


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_a_seed_may_be_an_input_of_what_is_differentiated(kind):
    x, bias, residual = made((5, 12), torch.float32)
    f = lambda x, seed: bias_dropout_add(x, bias, residual, p=0.3, seed=seed, offset=2).square().sum()
    with only(kind):
        assert_near(torch.func.grad(f)(x, torch.tensor(6)), plain(loss, (x, bias, residual))[0])


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_a_bias_may_be_a_handle(kind):
    x, bias, residual = made((5, 12), torch.float32)
    with only(kind):
        got = plain(loss, (x, as_handle(bias), residual))
    for g, w in zip(got, plain(loss, (x, bias, residual)), strict=True):
        assert_near(g, w)


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_under_autocast_what_is_narrow_is_widened(kind):
    x, bias, residual = made((5, 12), torch.float32)
    with only(kind), torch.autocast(DEVICE.type, torch.bfloat16):
        wide = bias_dropout_add(x.bfloat16(), bias, residual, p=0.1, seed=1)
        narrow = bias_dropout_add(x.bfloat16(), bias, residual.bfloat16(), p=0.1, seed=1)
    assert wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16


def test_a_second_derivative_is_refused_by_kernels_and_right_by_reference():
    f = lambda x, b, r: bias_dropout_add(x, b, r, p=0.3, seed=6)
    assert torch.autograd.gradgradcheck(f, in_float64(*made((3, 5), torch.float32)))
    x, bias, residual = made((5, 12), torch.float32)
    with only("triton"):
        (dx,) = torch.autograd.grad(loss(x, bias, residual), x, create_graph=True)
        with pytest.raises(KernelError, match="second derivative"):
            dx.sum().backward()


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("x", {"x": torch.ones(3, 4, dtype=torch.int64)}),
        ("x", {"x": torch.ones(()), "residual": None}),
        ("bias", {"bias": torch.ones(3)}),
        ("bias", {"bias": torch.ones(4, dtype=torch.float16)}),
        ("bias", {"bias": torch.ones(4, device="meta")}),
        ("residual", {"residual": torch.ones(4)}),
        ("residual", {"residual": torch.ones(3, 4, dtype=torch.float64)}),
        ("p", {"p": 1.0}),
        ("p", {"p": -0.1}),
        ("p", {"p": True}),
        ("p", {"p": torch.tensor(0.1)}),
        ("seed", {"seed": None}),
        ("seed", {"seed": 1.5}),
        ("seed", {"seed": torch.ones(1, dtype=torch.int64)}),
    ],
)
def test_bad_arguments_are_named(where, change):
    args = {"x": torch.ones(3, 4), "bias": torch.ones(4), "residual": torch.ones(3, 4), "p": 0.1, "seed": 1} | change
    with pytest.raises(KernelError) as caught:
        bias_dropout_add(**args)
    assert caught.value.where == where and caught.value.got and caught.value.want
