"""Law 11 where updates run on the host and the step on a GPU that is not there: bits are those of the CPU."""

import contextlib

import pytest
import torch

import fds
from fds import tree
from tests.bits import assert_same_bits
from tests.devices import DefaultDevice
from tests.laws.mapped import Mapped, mapped
from tests.pretending import DEVICE, pretended

OPTIMIZERS = {
    "adamw": lambda: fds.adamw(lambda t: 0.01 / (t + 1)),
    "lamb": lambda: fds.lamb(0.01),
    "groups": lambda: fds.by_name({"*.bias": fds.sgd(0.1, momentum=0.9), "*": fds.lion(0.01)}),
}


class Hosted(Mapped):
    """Keep leaves in files, or in memory of the host, and have them updated there."""

    updates_on = "host"

    def __init__(self, folder, where, **options):
        super().__init__(folder, **options)
        self.where = where

    def medium(self, leaf):
        return self.where

    def read(self, old, device):
        assert device.type == "cpu" and (self.where != "host" or all(x.is_cuda for x in old))
        return super().read(old, device)


def loss(params, batch):
    hidden = torch.tanh(batch @ params["0.weight"] + params["0.bias"])
    return ((hidden @ params["1.weight"]) ** 2).mean()


def problem():
    draw = torch.Generator(device="cpu").manual_seed(3)
    sizes = {"0.weight": (4, 130), "0.bias": (130,), "1.weight": (130, 2)}
    params = {name: torch.randn(*size, generator=draw) for name, size in sizes.items()}
    return params, torch.randn(8, 4, generator=draw)


@contextlib.contextmanager
def a_gpu():
    """Pretend that there is a GPU, the default device, for this test."""
    with pretended(), DefaultDevice(DEVICE):
        yield


def on_cpu(value):
    return tree.map(lambda x: x.to("cpu", copy=True), value)


def trained(parts, optimizer, batches, donated):
    """Return the states and metrics of a run, as tensors of the CPU."""
    params, batch = problem()
    here = torch.empty(0).device
    step = fds.compose(*parts, *[fds.donate()] * donated, optimizer)(loss)
    state, found = step.init(tree.map(lambda x: x.to(here), params), key=1), []
    for factor in batches:
        state, metrics = step(state, batch.to(here) * factor)
        found.append(on_cpu((state, metrics["loss"], metrics["skipped"])))
    return state, found


@pytest.mark.sweep(2)
@pytest.mark.parametrize("donated", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("where", ["files", "host"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_on_the_host_has_the_bits_of_the_cpu(tmp_path, optimizer, where, donated):
    parts = [fds.skip_nonfinite(), fds.ema(0.9)]
    batches = [1.0, torch.inf, 2.0]
    _, want = trained(parts, OPTIMIZERS[optimizer](), batches, donated)
    some = lambda leaf: "0.bias" not in leaf.names  # which is updated on the GPU, with its chunk
    with a_gpu():
        residency = Hosted(tmp_path, where, size=2, some=some)
        state, got = trained([mapped(residency), *parts], OPTIMIZERS[optimizer](), batches, donated)
        assert all(x.device.type == "cuda" for x in state.params.values())
        assert {x.device.type for x in tree.leaves(state.opt)} == {"cpu", "cuda"}
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)
