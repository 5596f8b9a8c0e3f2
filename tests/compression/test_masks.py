"""Masks: what DeepSpeed 0.19.6 makes of the same numbers, what a sort by hand says, and what is refused."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fds
from fds.compression import masks
from tests.golden import pruning_masks as golden

CASES = json.loads((Path(golden.__file__).parent / "pruning_masks.json").read_text())["cases"]


def mask_of(kind, method, density, weight, scores):
    if method == "topk":
        return masks.top(scores, density)
    if kind == "row":
        return masks.largest(masks.row_scores(weight), masks.num_kept(density, len(weight)))
    return masks.sparse(weight, density)


def masked(kind, mask, weight, bias):
    """Return weight and bias as DeepSpeed's modules multiply them: biases with rows and channels alone."""
    if kind == "head":
        return weight * mask.flatten().repeat_interleave(weight.shape[1] // golden.HEADS), bias
    if kind in ("row", "channel"):
        return weight * mask.view(-1, *[1] * (weight.dim() - 1)), bias * mask.flatten()
    return weight * mask, bias


@pytest.mark.parametrize(
    "index", range(len(CASES)), ids=[f"{case['kind']}-{case['method']}-{case['density']}" for case in CASES]
)
def test_masks_outputs_and_gradients_are_those_of_deepspeed(index):
    case = CASES[index]
    weight, bias, scores, x = golden.made(index, case["kind"])
    weight.requires_grad_()
    scores.requires_grad_(case["method"] == "topk")
    mask = mask_of(case["kind"], case["method"], case["density"], weight.detach(), scores)
    assert "".join(str(int(m)) for m in mask.flatten()) == case["mask"]
    layer = F.linear if weight.dim() == 2 else F.conv2d
    squares = layer(x, *masked(case["kind"], mask, weight, bias)).square().sum()
    squares.backward()
    assert squares.item() == pytest.approx(case["squares"], rel=1e-6)
    assert weight.grad.square().sum().item() == pytest.approx(case["gradient"], rel=1e-5)
    if case["of_scores"] is not None:
        assert torch.allclose(scores.grad.flatten(), torch.tensor(case["of_scores"]), rtol=1e-4, atol=1e-3)


def test_masks_of_weights_that_are_empty_or_lie_otherwise_or_are_nan():
    w = torch.randn(8, 4).t()
    for block, density in (("2:4", None), ("4x1", 0.5), (None, 0.5)):
        assert masks.sparse(w, density, block=block).equal(masks.sparse(w.contiguous(), density, block=block))
        assert masks.sparse(w[:0], density, block=block).shape == (0, 8)
    assert masks.largest(torch.ones(0), torch.tensor(3)).shape == (0,)
    assert masks.unpack(masks.pack(torch.ones(0, 4, dtype=torch.bool)), 4).shape == (0, 4)
    w = torch.randn(32)
    w[5], w[7] = math.nan, math.inf
    for count in (16, torch.tensor(16)):
        stay = masks.largest(w, count)
        assert stay.sum() == 16 and stay[5] and stay[7]


@pytest.mark.parametrize("count", [0, 1, 13, 47, 48, 60])
def test_of_equal_scores_the_first_stay(count):
    scores = torch.randint(0, 5, (6, 8), generator=torch.Generator().manual_seed(0)).float()
    by_hand = torch.zeros(48, dtype=torch.bool)
    by_hand[scores.flatten().argsort(descending=True, stable=True)[:count]] = True
    assert torch.equal(masks.largest(scores, count), by_hand.view(6, 8))
    assert torch.equal(masks.largest(scores, torch.tensor(count)), by_hand.view(6, 8))


def test_blocks_stay_or_go_together_by_the_sum_of_their_magnitudes():
    weight = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    sums = weight.abs().view(2, 4, 5).sum(1)
    stay = sums.flatten() >= sums.flatten().sort(descending=True).values[3]  # of ten blocks ceil(0.35 * 10) stay
    got = masks.sparse(weight, 0.35, block="4x1")
    assert torch.equal(got, stay.view(2, 1, 5).expand(2, 4, 5).reshape(8, 5))


@pytest.mark.parametrize("shape", [(3, 8), (2, 4, 2, 1)])
def test_two_of_four_are_the_largest_of_each_four_of_a_row(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for numbers, stay in zip(weight.view(-1, 4), masks.sparse(weight, block="2:4").view(-1, 4), strict=True):
        assert {*numbers.abs().topk(2).indices.tolist()} == {*stay.nonzero().flatten().tolist()}


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100])
def test_what_is_packed_is_unpacked(columns):
    mask = torch.rand(7, columns, generator=torch.Generator().manual_seed(columns)) > 0.5
    words = masks.pack(mask)
    assert words.min() >= 0  # what nobody noted is negative
    assert torch.equal(masks.unpack(words, columns).bool(), mask)


@pytest.mark.parametrize("curve", ["cubic", "exponential"])
def test_densities_fall_along_their_curve(curve):
    at = [masks.density_at(torch.tensor(t), 0.2, 3, 11, curve).item() for t in range(15)]
    assert at[:4] == [1.0] * 4 and at[11:] == pytest.approx([0.2] * 4, abs=1e-15)
    middle = 0.2**0.5 if curve == "exponential" else 1 - 0.8 * (1 - 0.5**3)
    assert at[7] == pytest.approx(middle)
    assert at == sorted(at, reverse=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"density": 0},
        {"density": 1.5},
        {"density": "half"},
        {"density": float("nan")},
        {},
        {"block": "4by1", "density": 0.5},
        {"block": "4:2"},
        {"block": 4, "density": 0.5},
        {"block": "2:4", "density": 0.5},
        {"block": "3x1", "density": 0.5},
        {"block": "2:6"},
    ],
)
def test_what_makes_no_mask_is_refused(arguments):
    with pytest.raises(fds.FdsError):
        masks.sparse(torch.randn(8, 8), **arguments)


def test_a_vector_has_no_rows():
    with pytest.raises(fds.FdsError, match="blocks"):
        masks.sparse(torch.randn(8), 0.5)


@pytest.mark.parametrize("density", [0.3, 0.15, 0.05, 0.02, 0.01])
def test_the_last_density_of_a_curve_is_the_density_to_the_bit(density):
    for curve in ("cubic", "exponential"):
        assert masks.density_at(torch.tensor([4, 5]), density, 0, 4, curve).tolist() == [density] * 2
