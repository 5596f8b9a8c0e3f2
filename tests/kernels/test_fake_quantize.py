"""Fake quantization: the kernel gives the bits of the reference, and gradients pass through however they are taken."""

import pytest
import torch

from fds.kernels import fake_quantize, only
from tests.bits import assert_same_bits
from tests.kernels.accuracy import DTYPES, random
from tests.kernels.ways import WAYS, traced

# NumPy, which interprets, warns where inf meets inf, and cannot tell that this is meant
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning")
AWKWARD = [0.0, -0.0, 1e-45, -1e-40, 127.0, 2.5, -3e38, torch.nan, torch.inf, -torch.inf]
GRIDS = [("deepspeed", True), ("deepspeed", False), ("torchao", True), ("torchao", False)]


def assert_same_numbers(got, want):
    """Check all bits, but for those of NaN."""
    assert torch.equal(got.isnan(), want.isnan())
    assert_same_bits(got.nan_to_num(nan=0), want.nan_to_num(nan=0))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(
    ("groups", "numbers", "bits", "dtype"),
    [(5, 70, 8, torch.float32), (3, 33, 3, torch.float16), (2, 1, 5, torch.float32), (4, 64, 4, torch.float32)],
    ids=str,
)
def test_the_kernel_gives_the_bits_of_the_reference(groups, numbers, bits, grid, dtype):
    scheme, symmetric = grid
    x = random(groups, numbers, seed=bits) * torch.tensor([1e-3, 1.0, 1e3, 0.0, 7.0])[:groups, None]
    for i, number in enumerate(AWKWARD if numbers > 60 else ()):
        x[i % groups, 7 * i % numbers] = number
    x = x.to(dtype)
    draws = torch.Generator().manual_seed(bits)
    noise = torch.rand(groups, numbers, generator=draws) - 0.5 if scheme == "deepspeed" and bits > 4 else None
    more = {"scheme": scheme, "symmetric": symmetric, "noise": noise}
    want = fake_quantize(x, bits, **more)
    with only("triton"):
        got = fake_quantize(x, bits, **more)
        in_time = fake_quantize(x, torch.tensor(bits), reach=(3, 8), **more)
    assert_same_numbers(got, want)
    assert_same_numbers(in_time, want)


@pytest.mark.parametrize(("bits", "reach", "is_as"), [(9, (4, 8), 8), (2, (3, 8), 3), (0, (1, 4), 1), (-5, (2, 2), 2)])
def test_bits_out_of_reach_are_its_nearest_end(bits, reach, is_as):
    x = random(4, 16, seed=1)
    assert_same_bits(fake_quantize(x, torch.tensor(bits), reach=reach), fake_quantize(x, is_as))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_rounded_once(dtype):
    """In float32 they are the same; Triton's interpreter truncates to bfloat16 where a GPU rounds."""
    x = random(4, 40, seed=3).to(dtype)
    for bits in (4, 8):
        want = fake_quantize(x.float(), bits)
        with only("triton"):
            got = fake_quantize(x, bits)
        assert got.dtype == dtype
        rtol = 0 if dtype is torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(got.float(), want, rtol=rtol, atol=0)
        mixed = fake_quantize(x, bits, kept=torch.tensor(0.3))
        with only("triton"):
            assert_same_bits(fake_quantize(x, bits, kept=torch.tensor(0.3)), mixed)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("numbers", [8192, 8193])
def test_large_groups_whose_scales_are_found_before(grid, numbers):
    x = random(2, numbers, seed=1).requires_grad_()
    more = dict(zip(("scheme", "symmetric"), grid, strict=True))
    want = fake_quantize(x, 5, **more)
    with only("triton"):
        got = fake_quantize(x, 5, **more)
    assert_same_bits(got, want)
    weights = random(2, numbers, seed=2)
    (dx,), (dy,) = (torch.autograd.grad((y * weights).sum(), x) for y in (got, want))
    assert_same_bits(dx, dy)


@pytest.mark.sweep(2)
@traced
@pytest.mark.parametrize("kind", ["triton", "reference"])
@pytest.mark.parametrize("scheme", ["deepspeed", "torchao"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_gradients_pass_through_whichever_way_they_are_taken(way, scheme, kind):
    x, weights = random(3, 10, seed=0).requires_grad_(), random(3, 10, seed=1)
    with only(kind):
        (got,) = way(lambda x: (fake_quantize(x, 4, scheme=scheme) * weights).sum(), [x])
    top = x.detach().abs().amax(1, keepdim=True) / 7.5
    clamped = (x.detach() / top).round() > 7 if scheme == "torchao" else torch.zeros_like(x, dtype=torch.bool)
    assert_same_bits(got, weights.masked_fill(clamped, 0))
