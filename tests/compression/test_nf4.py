"""NF4: the oracle is the definition, a number at a time; a step is the plain one on what the codes mean."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fds
from fds.compression import nf4
from fds.errors import ComposeError, StateError
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
    scales = torch.stack([b.abs().amax(1) for b in x.split(64, 1)], 1).to(torch.bfloat16).float()
    for i, block in enumerate(x.split(64, 1)):
        table = torch.tensor(nf4.CODES) * scales[:, i : i + 1]
        near = (block[:, :, None] - table[:, None, :]).abs()
        got = (block - y[:, 64 * i : 64 * i + 64]).abs()
        torch.testing.assert_close(got, near.amin(2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("c", WIDTHS)
def test_no_number_is_off_by_more_than_stated(c):
    x = rows(c)
    y = nf4.numbers(nf4.pack(x), torch.float32)
    for a, b in zip(x.split(64, 1), y.split(64, 1), strict=True):
        assert ((a - b).abs() <= 0.155 * a.abs().amax(1, keepdim=True)).all()


def test_codes_of_the_largest_numbers_are_those_of_small_ones():
    x = rows(130)
    large = nf4.numbers(nf4.pack(x * 2.0**120), torch.float32)
    assert torch.equal(large, nf4.numbers(nf4.pack(x), torch.float32) * 2.0**120)


def test_bytes_are_the_formula_and_lengths_follow_from_them():
    for c in range(2, 70000, 2):
        assert nf4.length.__wrapped__(nf4.width(c)) == c
        assert c < 96 or nf4.width(c) <= 0.57 * c
    assert [nf4.width(c) for c in (64, 66, 4096, 16386)] == [34, 37, 2176, 8707]
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


def block():
    return nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))


def layers():
    torch.manual_seed(0)
    return fds.Layers([block(), block(), nn.Linear(256, 16)], nn.functional.mse_loss)


LAYERS = layers()
GIVEN = LAYERS.init(fds.random.fold_in(fds.random.key(1), "params"))
ROWS = torch.linspace(-1, 1, 1024).view(4, 256).sin(), torch.linspace(0, 1, 64).view(4, 16)
TENSOR = {"*.0": "column", "*.2": "row"}
PIECES = {"*.0": fds.nn.column(parts=2), "*.2": fds.nn.row(parts=2), "2": fds.nn.column(gather=True)}
tensor = lambda mesh, plan=TENSOR: fds.tensor_parallel(mesh["tp"], plan)
stages = lambda mesh: fds.pipeline(fds.plans.one_f_one_b, mesh["pp"], num_microbatches=2)
PLACES = {
    "stages": ({"pp": 2}, lambda mesh: [stages(mesh)]),
    "pieces": ({"tp": 2}, lambda mesh: [tensor(mesh)]),
    "pieces of parts": ({"tp": 2}, lambda mesh: [tensor(mesh, PIECES)]),
    "slices": (
        {"tp": 2, "dp": 2},
        lambda mesh: [tensor(mesh), fds.shard_optimizer(mesh["dp"], stage=3, persist_below=0)],
    ),
    "all": ({"pp": 2, "tp": 2}, lambda mesh: [tensor(mesh), stages(mesh)]),
}


@pytest.mark.parametrize(("place", "bits"), [*((place, 4) for place in PLACES), ("pieces", 8), ("all", 8)])
def test_ranks_hold_the_codes_of_one_rank_and_saves_go_both_ways(place, bits, tmp_path):
    axes, more = PLACES[place]
    parts = fds.quantize_frozen(bits=bits), fds.lora("(0|1).*.weight", rank=2)
    alone = fds.compose(*parts, fds.sgd(0.1))(LAYERS)
    first = state = alone.init(GIVEN, key=1)
    losses = []
    for _ in range(2):
        state, metrics = alone(state, ROWS)
        losses.append(float(metrics["loss"]))
    fds.save(tmp_path / "one", state, alone)

    def run():
        step = fds.compose(*parts, *more(fds.mesh(**axes)), fds.sgd(0.1))(LAYERS)
        begun = trained = step.init(LAYERS.init, key=1)
        got = []
        for _ in range(2):
            trained, metrics = step(trained, ROWS)
            got.append(float(metrics["loss"]))
        loaded, _ = fds.load(tmp_path / "one", step, LAYERS.init)
        fds.save(tmp_path / "ranks", loaded, step)
        streamed = dict(step.weights(loaded))
        return got, step.params(begun), step.params(loaded), streamed, step.describe(begun).num_bytes["params"]

    for got, begun, loaded, streamed, num_bytes in fds.simulate(run, math.prod(axes.values())):
        torch.testing.assert_close(got, losses, rtol=1e-5, atol=1e-6)
        assert_same_bits(begun, alone.params(first))
        assert_same_bits(loaded, alone.params(state))
        assert_same_bits({n: streamed[n] for n in loaded}, loaded)
        assert num_bytes < 0.7 * alone.describe(first).num_bytes["params"]
    again, _ = fds.load(tmp_path / "ranks", alone, GIVEN)
    assert_same_bits(again.params, state.params)


@pytest.mark.parametrize("bits", [4, 8])
def test_ranks_encode_what_they_read_of_their_pieces(bits, tmp_path):
    """A file in floating point, of which each rank encodes rows of its pieces, a block at a time."""
    plain = fds.compose(fds.sgd(0.1))(LAYERS)
    fds.export_weights(plain.init(GIVEN), tmp_path / "plain", None)
    parts = fds.quantize_frozen(bits=bits), fds.freeze("0.*", "1.*")
    want = fds.compose(*parts, fds.sgd(0.1))(LAYERS)

    def run():
        step = fds.compose(*parts, tensor(fds.mesh(tp=2)), fds.sgd(0.1))(LAYERS)
        return step.params(fds.import_weights(tmp_path / "plain", step, LAYERS.init))

    for got in fds.simulate(run, 2):
        assert_same_bits(got, want.params(want.init(GIVEN)))


def test_a_cut_inside_of_a_block_is_refused_by_name():
    narrow = fds.Layers([nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))], nn.functional.mse_loss)

    def run():
        plan = {"0.0": "column", "0.1": "row"}
        step = fds.compose(
            fds.quantize_frozen(bits=4), fds.freeze("*.weight"), tensor(fds.mesh(tp=2), plan), fds.sgd(0.1)
        )(narrow)
        return step.init(narrow.init)

    with pytest.raises(StateError, match=r"encoded together[\s\S]*0\.1\.weight[\s\S]*96 along dim 1, over 2 ranks"):
        fds.simulate(run, 2)


@pytest.mark.parametrize("bits", [3, 16, 4.5, "4", None, True])
def test_other_bits_are_refused(bits):
    with pytest.raises(ComposeError, match="bits"):
        fds.quantize_frozen(bits=bits)
