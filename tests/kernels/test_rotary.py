"""Rotary embeddings: both pairings, parts of a head, tables and heads laid out anyhow."""

import pytest
import torch
from hypothesis import given, strategies as st

from fds.errors import KernelError
from fds.kernels._rotary import reference, rotary
from fds.kernels.choice import only
from tests.kernels.accuracy import DTYPES, assert_near, in_float64, random, strided
from tests.kernels.ways import WAYS, as_handle, kept_bytes, plain, poisoned, traced


def tables(*shape, dtype=torch.float32, seed=4):
    angles = 3 * random(*shape, seed=seed)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def compare(x, cos, sin, *, dy=None, interleaved=False):
    """Check the kernel and its gradient against float64."""
    dy = random(*x.shape, dtype=x.dtype, seed=5) if dy is None else dy
    x64, cos64, sin64, dy64 = in_float64(x, cos, sin, dy)
    with only("triton"):
        y = rotary(x, cos, sin, interleaved=interleaved)
        (dx,) = torch.autograd.grad(y, x, dy)
    y64 = reference(x64, cos64, sin64, interleaved)
    (want,) = torch.autograd.grad(y64, x64, dy64)
    assert y.dtype == dx.dtype == x.dtype
    assert_near(y, y64)
    assert_near(dx, want)


@pytest.mark.parametrize("interleaved", [False, True])
def test_it_turns_pairs_by_the_angle_of_their_position(interleaved):
    """As a product of complex numbers."""
    x, angles = random(2, 5, 8).double(), random(5, 4, seed=1).double()
    pairs = x.unflatten(-1, (4, 2)) if interleaved else x.unflatten(-1, (2, 4)).transpose(-1, -2)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    want = torch.view_as_real(turned)
    want = want.flatten(-2) if interleaved else want.transpose(-1, -2).flatten(-2)
    assert torch.allclose(rotary(x, angles.cos(), angles.sin(), interleaved=interleaved), want, rtol=1e-12, atol=1e-12)


@pytest.mark.sweep
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_reference_and_so_is_its_gradient(dtype, interleaved):
    shapes = [
        ((1, 2), 1),
        ((2, 3, 42, 64), 32),
        ((123, 6), 2),
        ((1, 2, 3, 48), 24),
        ((7, 9), 3),
        ((42, 42), 21),
        ((1, 1200), 600),
        ((2, 1100), 10),
        ((0, 4, 6), 3),
        ((2, 0, 6), 3),
        ((3, 5, 6), 0),
    ]
    for i, (shape, half) in enumerate(shapes):
        x = random(*shape, dtype=dtype, requires_grad=True)
        cos, sin = tables(shape[-2], half, dtype=dtype if i % 2 else torch.float32)
        compare(x, cos, sin, interleaved=interleaved)


def test_many_positions():
    compare(random(8191, 4, dtype=torch.bfloat16, requires_grad=True), *tables(8191, 2))


@given(
    shape=st.lists(st.integers(1, 3), max_size=3),
    positions=st.integers(1, 20),
    half=st.integers(0, 40),
    rest=st.integers(0, 70),
    dtype=st.sampled_from(DTYPES),
    interleaved=st.booleans(),
    data=st.data(),
)
def test_any_shape_and_any_tables(shape, positions, half, rest, dtype, interleaved, data):
    size = max(2 * half + rest, 1)
    x = random(*shape, positions, size, dtype=dtype, requires_grad=True)
    leading = [data.draw(st.sampled_from([1, n])) for n in (*shape, positions)]
    start = data.draw(st.integers(0, len(leading)))
    compare(x, *tables(*leading[start:], half), interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_and_gradients_may_lie_anyhow_in_memory(interleaved):
    cos, sin = tables(6, 8)
    x = random(2, 6, 3, 20)
    seen = x.transpose(1, 2)  # (B, heads, T, D), as a projection leaves it
    for held in (seen, strided(seen), seen[..., 1:], seen[:, 1:, ::2, :], seen[:1].expand(3, 3, 6, 20)):
        leaf = held.detach().requires_grad_()
        positions = held.shape[2]
        for dy in (None, strided(random(*held.shape, seed=5)), torch.ones(()).expand(held.shape)):
            compare(leaf, cos[:positions], strided(sin[:positions]), dy=dy, interleaved=interleaved)
    with only("triton"):
        assert rotary(seen, cos, sin).stride() == seen.stride()


def test_tables_may_differ_by_batch_and_heads_come_before_or_after_positions():
    x = random(2, 3, 6, 16, requires_grad=True)
    compare(x, *tables(2, 1, 6, 8))  # (B, T, D) of Hugging Face
    compare(x, *tables(3, 6, 8))  # of each head
    compare(x, *tables(3, 1, 8))  # (B, T, heads, D)
    compare(x, *tables(2, 3, 1, 4))
    compare(x, *tables(1, 8))
    compare(x, *tables(8))
    compare(random(2, 2, 3, 5, 8, requires_grad=True), *tables(2, 1, 1, 5, 3))


def test_turning_back_undoes_it():
    x = random(2, 3, 42, 32)
    cos, sin = tables(42, 16)
    with only("triton"):
        assert torch.allclose(rotary(rotary(x, cos, sin), cos, -sin), x, atol=1e-5)


def test_all_is_written_and_nothing_else():
    for shape, half in (((2, 3, 5, 20), 7), ((33, 64), 32), ((3, 1100), 300)):
        for interleaved in (False, True):
            x = random(*shape, dtype=torch.bfloat16, requires_grad=True)
            cos, sin = tables(shape[-2], half)
            with only("triton"), poisoned():
                rotary(x, cos, sin, interleaved=interleaved).backward(x.detach())


@pytest.mark.sweep
@traced
@pytest.mark.parametrize("kind", ["triton", "reference"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_agree_in_every_way_that_they_are_taken(way, kind):
    cos, sin = tables(5, 3)
    loss = lambda x: (rotary(x, cos, sin) * rotary(x, cos, sin, interleaved=True)[..., :1]).sum()
    x = random(2, 5, 8, requires_grad=True)
    want = plain(loss, in_float64(x))
    with only(kind):
        (got,) = WAYS[way](loss, [x])
    assert_near(got, want[0])


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_only_the_tables_are_kept_and_a_handle_is_read(kind):
    x = random(2, 5, 8, requires_grad=True)
    cos, sin = tables(5, 3)
    loss = lambda x: rotary(x, cos, sin).square().sum()
    with only(kind):
        assert kept_bytes(lambda: rotary(x * 1, cos, sin)) == 2 * cos.numel() * 4
        assert_near(plain(loss, [as_handle(x)])[0], plain(loss, [x])[0])


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_it_has_a_second_derivative(kind):
    x = random(2, 5, 8, requires_grad=True)
    cos, sin = tables(5, 4)
    with only(kind):
        (dx,) = torch.autograd.grad((rotary(x, cos, sin) ** 3).sum() / 6, x, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.sum(), x)
    turned = reference(x.detach(), cos, sin)
    ones = reference(torch.ones_like(x), cos, sin)
    assert_near(ddx, reference(turned * ones, cos, -sin), factor=2)


def both(*shape):
    return {"cos": torch.ones(shape), "sin": torch.ones(shape)}


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("x", {"x": torch.ones(2, 6, 8, dtype=torch.int32)}),
        ("x", {"x": torch.ones(8)}),
        ("cos", both(6, 8)),
        ("cos", both(5, 4)),
        ("cos", both(3, 6, 4)),
        ("cos", both()),
        ("cos", both(1, 1, 6, 4)),
        ("sin", {"sin": torch.ones(6, 3)}),
        ("sin", {"sin": torch.ones(6, 4, dtype=torch.float64)}),
        ("sin", {"sin": torch.ones(6, 4, device="meta")}),
        ("cos", {"cos": torch.ones(6, 4, requires_grad=True)}),
        ("sin", {"sin": torch.ones(6, 4, requires_grad=True)}),
    ],
)
def test_bad_arguments_are_named(where, change):
    args = {"x": torch.ones(2, 6, 8), "cos": torch.ones(6, 4), "sin": torch.ones(6, 4)} | change
    with pytest.raises(KernelError) as caught:
        rotary(**args)
    assert caught.value.where == where and caught.value.got and caught.value.want
