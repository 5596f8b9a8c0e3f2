"""Grids of integers: what quantizers of DeepSpeed 0.19.6 and torchao 0.18 made of the same weights, bit for bit."""

import json
import math
from pathlib import Path

import pytest
import torch

from fds.compression import pack
from fds.compression.grids import numbers_per_group
from fds.errors import ComposeError, KernelError
from fds.kernels import fake_quantize
from tests.bits import assert_same_bits

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "weight_grids.json").read_text())
WEIGHTS = torch.tensor(GOLDEN["weights"])
INF, NAN = math.inf, math.nan


def case_name(case):
    shifted = "" if case["symmetric"] else "shifted "
    return f"{case['scheme']} {shifted}{case['bits']} by {case['group']} {case['dtype']}"


def grid_of(case):
    return {name: case[name] for name in ("scheme", "symmetric")}


@pytest.mark.parametrize("case", GOLDEN["grids"], ids=case_name)
def test_numbers_gradients_and_integers_are_those_of_the_library(case):
    x = WEIGHTS.to(getattr(torch, case["dtype"])).requires_grad_()
    y = fake_quantize(x.reshape(-1, case["group"]), case["bits"], **grid_of(case)).view(x.shape)
    want = torch.tensor(case["numbers"], dtype=x.dtype)
    sums = case["scheme"] == "deepspeed" and case["bits"] < 3  # in another order
    torch.testing.assert_close(y.detach(), want, rtol=1e-6 if sums else 0, atol=0)
    (ones,) = torch.autograd.grad(y.sum(), x)
    if case["scheme"] == "deepspeed":
        assert torch.equal(ones, torch.ones_like(x))
    elif "ones" in case:
        assert torch.equal(ones, torch.tensor(case["ones"]))
    packed = pack(x, case["bits"], group=case["group"], **grid_of(case))
    assert_same_bits(packed.numbers(), y)
    low, high = -(2 ** (case["bits"] - 1)), 2 ** (case["bits"] - 1) - 1
    integers = packed.integers()
    if case["scheme"] == "deepspeed" and case["bits"] == 1:
        assert set(integers.flatten().tolist()) == {-1, 1}
    elif case["scheme"] == "deepspeed" and not case["symmetric"]:
        assert integers.amin() == 0 and integers.amax() <= high - low
    else:
        assert integers.amin() >= low and integers.amax() <= high


def test_bits_may_follow_time():
    for scheme, symmetric, reach in (
        ("deepspeed", True, (1, 8)),
        ("deepspeed", False, (3, 8)),
        ("torchao", True, (1, 8)),
    ):
        for bits in range(reach[0], 9):
            want = fake_quantize(WEIGHTS, bits, scheme=scheme, symmetric=symmetric)
            got = fake_quantize(WEIGHTS, torch.tensor(bits), scheme=scheme, symmetric=symmetric, reach=reach)
            assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bits", [16, 9, 8, 5, 4, 3, 2, 1])
def test_odd_groups_are_packed_and_take_the_bytes_that_they_should(bits, dtype):
    x = torch.linspace(-1, 1.3, 15, dtype=dtype).view(3, 5).sin()
    for symmetric in (True, False) if bits > 2 else (True,):
        packed = pack(x, bits, group=5, symmetric=symmetric)
        assert_same_bits(packed.numbers(), fake_quantize(x, bits, symmetric=symmetric))
        width = next(w for w in (1, 2, 4, 8, 16) if w >= bits)
        scales = 3 * (8 if dtype is torch.float64 else 4) * (1 if symmetric else 2)
        assert packed.num_bytes == 3 * math.ceil(5 * width / 8) + scales


def test_what_other_libraries_make_nan_of():
    for bits in (8, 4, 3, 2, 1):  # a block that begins as the identity has such weights
        zeros = torch.zeros(2, 4)
        assert torch.equal(fake_quantize(zeros, bits), zeros)
        assert torch.equal(pack(zeros, bits, group=4).numbers(), zeros)
    same = torch.tensor([[0.3, 0.3], [-7.1, -7.1]])
    for scheme in ("deepspeed", "torchao"):
        assert torch.isfinite(fake_quantize(torch.zeros(2, 4), 4, scheme=scheme, symmetric=False)).all()
    assert torch.equal(fake_quantize(same, 4, symmetric=False), same)
    assert torch.equal(pack(same, 4, group=2, symmetric=False).numbers(), same)
    signs = fake_quantize(torch.tensor([[0.0, -0.0, 2.0, -2.0]]), 1)
    assert signs.tolist() == [[1, 1, 1, -1]]  # the sign of 0 is 1


@pytest.mark.parametrize("bad", [INF, NAN])
def test_what_is_not_finite_spoils_its_group_alone(bad):
    x = torch.tensor([[1.0, bad, 0.5], [0.1, 0.2, 0.3]])
    for scheme, bits in (("deepspeed", 8), ("deepspeed", 2), ("deepspeed", 1), ("torchao", 4)):
        y = fake_quantize(x, bits, scheme=scheme)
        assert not torch.isfinite(y[0]).all() and torch.isfinite(y[1]).all()


def test_noise_rounds_up_as_often_as_the_remainder_says():
    x = torch.full((1, 20000), 0.3)
    x[0, 0] = 127 / 128  # of 8 bits the scale is then 127 / 128^2
    noise = torch.empty_like(x).uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(0))
    y = fake_quantize(x, 8, noise=noise)[0, 1:]
    scale = 127 / 128**2
    assert len(y.unique()) == 2
    assert abs(float(y.mean()) - 0.3) < 4 * scale / 2 / math.sqrt(len(y))


def test_a_share_of_the_weight_is_mixed_in():
    x = WEIGHTS.clone().requires_grad_()
    for scheme in ("deepspeed", "torchao"):
        y = fake_quantize(x, 4, scheme=scheme, kept=torch.tensor(0.25, dtype=torch.float64))
        whole = fake_quantize(x, 4, scheme=scheme)
        assert torch.equal(y, 0.25 * x + 0.75 * whole)
        (dx,), (dy,) = (torch.autograd.grad(out.sum(), x) for out in (y, whole))
        torch.testing.assert_close(dx, 0.25 + 0.75 * dy)
        assert fake_quantize(x, 4, scheme=scheme, kept=torch.tensor(1.0)).equal(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_mixed_in_is_rounded_with_the_rest_once(dtype):
    x = WEIGHTS.to(dtype)
    for bits in (4, 2):
        y = fake_quantize(x, bits, kept=torch.tensor(0.3, dtype=torch.float64))
        assert_same_bits(y, (0.3 * x.float() + (1 - torch.tensor(0.3)) * fake_quantize(x.float(), bits)).to(dtype))


def test_groups_of_a_weight():
    group = numbers_per_group
    assert [group("w", (6, 8), 4, None), group("w", (6, 8), "rows", None), group("w", (6, 8), 1, 4)] == [12, 8, 4]
    assert group("conv", (6, 2, 3, 3), "rows", None) == 18
    assert group("b", (12,), "rows", None) == 12
    for groups, size in ((5, None), (1, 5), (1, 16)):
        with pytest.raises(ComposeError, match="cannot be cut") as error:
            group("w", (6, 8), groups, size)
        assert error.value.where == "w"


@pytest.mark.parametrize(
    "arguments",
    [
        {"bits": 0},
        {"bits": 17},
        {"bits": 2.0},
        {"bits": True},
        {"bits": torch.tensor(4)},
        {"bits": 4, "reach": (2, 4)},
        {"bits": 2, "symmetric": False},
        {"bits": 1, "noise": torch.zeros_like(WEIGHTS)},
        {"bits": 8, "noise": torch.zeros(2)},
        {"bits": 8, "noise": torch.zeros_like(WEIGHTS), "scheme": "torchao"},
        {"bits": 8, "scheme": "gguf"},
        {"bits": 8, "symmetric": "no"},
        {"bits": 8, "kept": 0.5},
        {"bits": 8, "kept": torch.ones(2)},
        {"bits": torch.tensor(4.0), "reach": (2, 8)},
        {"bits": torch.tensor([4]), "reach": (2, 8)},
        {"bits": torch.tensor(4), "reach": 4},
        {"bits": 8, "x": None},
        {"bits": 8, "x": WEIGHTS[0]},
        {"bits": 8, "x": torch.ones(2, 2, dtype=torch.int64)},
    ],
    ids=lambda arguments: ", ".join(arguments),
)
def test_bad_arguments(arguments):
    with pytest.raises(KernelError):
        fake_quantize(**{"x": WEIGHTS, **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        {"x": None},
        {"x": torch.ones(4, dtype=torch.int64)},
        {"x": torch.ones(0, 4)},
        *({"bits": bits} for bits in (0, 17, "8", 2.5, True)),
        *({"group": group} for group in (5, 0, 2.0, "rows")),
        {"scheme": "gguf"},
        {"scheme": "torchao", "bits": 16},
        {"symmetric": "no"},
        {"symmetric": False, "bits": 1},
    ],
    ids=str,
)
def test_what_is_not_packed(arguments):
    with pytest.raises(ComposeError):
        pack(**{"x": WEIGHTS, "bits": 4, **arguments})


def test_what_is_empty_stays_empty():
    for shape in ((5, 0), (0, 5)):
        assert fake_quantize(torch.ones(shape), 4).shape == shape
    for groups, size in ((1, 4), ("rows", None), (1, None)):
        with pytest.raises(ComposeError, match="cannot be cut"):
            numbers_per_group("w", (0, 4), groups, size)


GRIDS = [
    {"bits": bits, "scheme": scheme, "symmetric": symmetric}
    for bits in (12, 8, 4, 3, 2, 1)
    for scheme in ("deepspeed", "torchao")
    for symmetric in (True, False)
    if not (scheme == "torchao" and bits > 8) and not (scheme == "deepspeed" and bits < 3 and not symmetric)
]


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "-".join(map(str, grid.values())))
def test_a_weight_that_is_cut_is_the_cut_of_the_weight(grid):
    drawn = torch.Generator().manual_seed(0)
    x, rows, columns = torch.randn(9, 16, generator=drawn), torch.arange(9) % 3 == 0, torch.arange(16) % 5 < 2
    first, heads = torch.arange(9) > 3, torch.arange(16) // 4 % 2 == 0
    cuts = {0: rows}, {1: columns}, {0: rows, 1: columns}, {1: heads}, {0: first, 1: heads}, {0: rows & False}
    for group in (144, 72, 36, 16, 8, 4):  # all, four and a half rows, ..., 4 numbers of a row
        packed = pack(x, group=group, **grid)
        for keeps in cuts:
            want, cut = packed.numbers(), packed.cut(keeps)
            for dim, keep in keeps.items():
                want = want[keep] if dim == 0 else want[:, keep]
            assert_same_bits(cut.numbers(), want)
            assert cut.integers().shape == cut.shape == want.shape
            again = cut.cut({0: torch.arange(len(want)) % 2 == 0})
            assert_same_bits(again.numbers(), want[::2])
            assert len(again.scales) <= len(cut.scales) <= len(packed.scales)


def test_a_weight_without_half_of_its_columns_takes_half_of_its_bytes():
    x, heads = torch.randn(64, 128), torch.arange(128) // 32 % 2 == 0
    rows, by_32 = pack(x, 4, group=128).cut({1: heads}), pack(x, 4, group=32).cut({1: heads})
    assert (rows.num_bytes, rows.sizes) == (64 * 64 // 2 + 64 * 4, None)
    assert (by_32.num_bytes, by_32.sizes) == (64 * 64 // 2 + 64 * 4 * 2, None)
    few = pack(x, 4, group=32).cut({1: torch.arange(128) % 5 == 0})  # 6 or 7 of each group
    assert few.sizes is not None and few.num_bytes == 64 * 26 // 2 + 64 * 4 * (4 + 4) < 64 * 26 * 4 / 2


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "-".join(map(str, grid.values())))
def test_zeros_that_a_mask_makes_are_integers_where_a_grid_has_0(grid):
    x, mask = torch.randn(6, 16).clamp(-1, 1), torch.rand(6, 16) < 0.5
    x[:, ::8], x[:, 1::8] = -1, 1  # 0 is on a shifted grid of "deepspeed" where it is amid the numbers
    packed = pack(x, group=8, **grid)
    zeroed, want = packed.zeroed(~mask), packed.numbers() * mask + 0.0
    has_zero = grid["scheme"] == "torchao" or grid["bits"] > 1
    assert torch.equal(zeroed.numbers(), want) == has_zero
    assert_same_bits(zeroed.numbers()[mask], want[mask])
