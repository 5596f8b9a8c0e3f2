"""NF4: the oracle is the definition, a number at a time; a step is the plain one on what the codes mean."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fds
from fds.compression import nf4
from fds.errors import ComposeError
from tests.bits import assert_same_bits

WIDTHS = (16, 64, 66, 130, 16384, 16390)


def rows(c: int) -> torch.Tensor:
    x = torch.randn(3, c, generator=torch.Generator().manual_seed(c))
    x[0, :8] *= 50
    x[1, 64:] = 0
    return x


@pytest.mark.parametrize("c", WIDTHS)
def test_a_number_is_the_nearest_of_16_times_its_scale(c):
    x = rows(c)
    y = nf4.numbers(nf4.pack(x), torch.float32)
    ends, places = nf4._scales(torch.stack([b.abs().amax(1) for b in x.split(64, 1)], 1))
    scales = nf4._scales_of(ends, places)
    for i, block in enumerate(x.split(64, 1)):
        table = torch.tensor(nf4.CODES) * scales[:, i : i + 1]
        near = (block[:, :, None] - table[:, None, :]).abs()
        got = (block - y[:, 64 * i : 64 * i + 64]).abs()
        torch.testing.assert_close(got, near.amin(2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("c", WIDTHS)
def test_no_number_is_off_by_more_than_stated(c):
    x = rows(c)
    y = nf4.numbers(nf4.pack(x), torch.float32)
    whole = x.abs().amax(1, keepdim=True)
    for a, b in zip(x.split(64, 1), y.split(64, 1), strict=True):
        assert ((a - b).abs() <= 0.153 * a.abs().amax(1, keepdim=True) + whole / 200).all()


def test_codes_of_the_largest_numbers_are_those_of_small_ones():
    x = rows(130)
    large = nf4.numbers(nf4.pack(x * 2.0**120), torch.float32)
    assert torch.equal(large, nf4.numbers(nf4.pack(x), torch.float32) * 2.0**120)


def test_bytes_are_the_formula_and_lengths_follow_from_them():
    for c in range(2, 70000, 2):
        assert nf4.length.__wrapped__(nf4.width(c)) == c
        assert c < 96 or nf4.width(c) <= 0.57 * c
    assert [nf4.width(c) for c in (64, 4096, 16384, 16386)] == [37, 2116, 8452, 8458]
    for c in WIDTHS:
        assert nf4.pack(rows(c)).shape == nf4.pack(rows(c).to("meta")).shape == (3, nf4.width(c))


@pytest.mark.parametrize("place", ["alone", 1, 3])
def test_a_step_on_4_bits_is_the_plain_one_on_what_the_codes_mean(place):
    torch.manual_seed(0)
    layers = fds.Layers([nn.Linear(130, 66), nn.Tanh(), nn.Linear(66, 17), nn.Linear(17, 3)], nn.functional.mse_loss)
    given = layers.init(fds.random.key(0))
    batch = torch.linspace(-1, 1, 520).view(4, 130).sin(), torch.linspace(0, 1, 12).view(4, 3)
    mean = {
        n: nf4.numbers(nf4.pack(x), torch.float32) if n in ("0.weight", "2.weight") else x for n, x in given.items()
    }

    def run(params, *four):
        more = [] if place == "alone" else [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=place, persist_below=0)]
        step = fds.compose(*four, *more, fds.lora("(0|2|3).weight", rank=2), fds.adamw(0.1))(layers)
        state = step.init(params)
        held = step.describe(state).num_bytes["params"]
        for _ in range(2):
            state, metrics = step(state, batch)
        return step.params(state), metrics, held

    def both():
        return run(given, fds.quantize_frozen(bits=4)), run(mean)

    for (params, metrics, held), (want, want_metrics, plain) in fds.simulate(both, 1 if place == "alone" else 2):
        assert_same_bits((params, metrics), (want, want_metrics))
        if place == "alone":
            assert plain - held == 66 * (4 * 130 - nf4.width(130)) + 17 * (4 * 66 - nf4.width(66))


@pytest.mark.parametrize("bits", [3, 16, 4.5, "4", None, True])
def test_other_bits_are_refused(bits):
    with pytest.raises(ComposeError, match="bits"):
        fds.quantize_frozen(bits=bits)
