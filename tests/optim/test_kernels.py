"""Optimizers on the tensors that kernels take: whole slices, one call for all, the same step as torch's functions."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import fds
from fds import kernels, tree
from fds.kernels import choice, only, prefer_triton
from fds.optim import Optimizer, adagrad, adam, adamw, assembly, by_name, lamb, lion, muon, sgd
from tests.bits import assert_same_bits

SHAPES = [(6, 42), (123,), (), (0,), (3, 1, 5), (431,)]
NUM_STEPS = 5
falling = lambda t: 0.1 / (t + 2)
OPTIMIZERS = {
    "adam": adam(0.01, weight_decay=0.1),
    "adamw": adamw(0.01, bias_correction=False),
    "adamw_schedule": adamw(falling),
    "lamb": lamb(0.1, weight_decay=0.1),
    "lamb_bounded": lamb(0.1, min_coeff=0.3, max_coeff=0.5, bias_correction=False, eps_inside_sqrt=True),
    "lion": lion(0.01, weight_decay=0.1),
    "sgd": sgd(0.1, weight_decay=0.1),
    "sgd_nesterov": sgd(0.1, momentum=0.9, nesterov=True),
    "sgd_dampening": sgd(0.1, momentum=0.9, dampening=0.5),
    "sgd_through_zero": sgd(falling, momentum=lambda t: t * 0.3),
    "by_name": by_name({"p1": adamw(falling), "*": sgd(0.1, momentum=0.9)}),
}
every = pytest.mark.parametrize("name", OPTIMIZERS)
KERNELS = ["adamw", "lamb", "lion", "sgd"]


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels that were called, one after another."""
    called = []
    for name in KERNELS:
        function = getattr(kernels, name)
        spy = lambda *args, _name=name, _function=function, **more: (called.append(_name), _function(*args, **more))[1]
        monkeypatch.setattr(kernels, name, spy)
    return called


def assert_near(ours, theirs, *, num_roundings):
    for a, b in zip(ours, theirs, strict=True):
        bound = num_roundings * torch.finfo(a.dtype).eps * b.abs().clamp(min=1.0)
        assert ((a - b).abs() <= bound).all(), ((a - b).abs() / bound).max()


@every
def test_kernels_update_as_torchs_functions_do(name, train, draw):
    params, batches = draw(SHAPES, num_steps=NUM_STEPS)
    skips = lambda t, _: {"skip": torch.tensor(t == 2), "grad_scale": torch.tensor(4.0)}
    want, want_opt = train(OPTIMIZERS[name], params, batches, edit=skips)
    with only("triton"):
        got, opt = train(OPTIMIZERS[name], params, batches, edit=skips)
    # Per step: three roundings of p at |p| <= 4, and an update of at most 0.1 by some 15 roundings.
    assert_near(got, want, num_roundings=6 * NUM_STEPS)
    for slot in want_opt:
        pairs = [(a, b) for a, b in zip(opt[slot], want_opt[slot], strict=True) if b is not None]
        assert_near(*zip(*pairs, strict=True), num_roundings=6 * NUM_STEPS)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "by_name"])
def test_kernels_give_the_same_bits_wherever_a_parameter_lies(name, train, draw):
    params, batches = draw(SHAPES, num_steps=NUM_STEPS)
    with only("triton"):
        apart, _ = train(OPTIMIZERS[name], params, batches)
        together, opt = train(OPTIMIZERS[name], params, batches, together=True)
    assert_same_bits(together, apart)
    assert all((x[-2:] == 0).all() for tensors in opt.values() for x in tensors)  # padding


@pytest.mark.parametrize(
    ("name", "together", "want"),
    [
        ("adam", True, ["adamw"]),
        ("adamw", False, ["adamw"]),
        ("lion", True, ["lion"]),
        ("sgd", True, ["sgd"]),
        ("lamb", True, ["lamb"]),
        ("sgd_through_zero", True, ["sgd"]),
    ],
)
def test_slices_take_one_call_and_their_gradients_are_not_cast_before(name, together, want, train, draw, launches):
    params, batches = draw(SHAPES, num_steps=1)
    low = [[g.bfloat16() for g in grads] for grads in batches]
    train(OPTIMIZERS[name], params, low, together=together)
    assert not launches  # on the CPU torch's functions run
    with only("triton"):
        got, _ = train(OPTIMIZERS[name], params, low, together=together)
        cast, _ = train(OPTIMIZERS[name], params, [[g.float() for g in grads] for grads in low], together=together)
    assert launches == want * 2
    assert_same_bits(got, cast)


@every
def test_kernels_write_the_low_precision_copy(name, train, draw):
    params, batches = draw(SHAPES, num_steps=1)
    out = [torch.full((p.numel(),), 7.0, dtype=torch.float16) for p in params]
    with only("triton"):
        after, _ = train(OPTIMIZERS[name], params, batches, edit=lambda t, _: {"out": out})
    assert_same_bits(out, [p.half() for p in after])


@pytest.mark.parametrize("given_lr", [True, False])
@pytest.mark.parametrize("rate", [lambda t: 1 / (t + 2), lambda t: torch.ones((), dtype=torch.int64), 0.5])
def test_a_rate_may_be_of_any_dtype_or_a_number(rate, given_lr, train, draw, monkeypatch, launches):
    params, batches = draw([(5,)], num_steps=2)
    with only("triton"):
        want, _ = train(adamw(lambda t: float(assembly.at(rate, t))), params, batches)
        # As on an accelerator: what a schedule returns stays a tensor.
        monkeypatch.setattr(assembly, "_read_on_cpu", lambda value: value)
        got, _ = train(adamw(rate), params, batches, edit=lambda t, _: {} if given_lr else {"lr": None})
    assert launches == ["adamw"] * 4
    assert_near(got, want, num_roundings=4)


def test_a_schedule_of_another_number_on_an_accelerator_takes_the_formula(train, draw, monkeypatch, launches):
    params, batches = draw([(5,)], num_steps=2)
    monkeypatch.setattr(assembly, "_read_on_cpu", lambda value: torch.as_tensor(value, dtype=torch.float64))
    want, _ = train(adamw(betas=(0.9, lambda t: 0.99)), params, batches)
    with only("triton"):
        got, _ = train(adamw(betas=(0.9, lambda t: 0.99)), params, batches)
    assert not launches
    assert_same_bits(got, want)


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("optimizer", "cpu", "gpu", "gpu_by_reference"),
    [
        (adam(falling), "adam: torch's fused functions", "adam: Triton kernel", "adam: torch's fused functions"),
        (adamw(), "adamw: torch's fused functions", "adamw: Triton kernel", "adamw: torch's fused functions"),
        (
            adamw(betas=(0.9, falling)),
            "adamw: torch's fused functions",
            "adamw: torch's formula",
            "adamw: torch's formula",
        ),
        (lamb(), "lamb: torch's formula", "lamb: Triton kernel", "lamb: torch's formula"),
        (lion(), "lion: torch's formula", "lion: Triton kernel", "lion: torch's formula"),
        (sgd(), "sgd: torch's fused functions", "sgd: Triton kernel", "sgd: torch's fused functions"),
        (
            sgd(momentum=0.9, dampening=0.1),
            "sgd: torch's fused functions",
            "sgd: Triton kernel",
            "sgd: torch's formula",
        ),
        (adagrad(), *["adagrad: torch's fused functions"] * 3),
        (muon(), *["muon: torch's formula"] * 3),
        (
            by_name({"a": sgd(), "b": by_name({"c": sgd(0.1), "*": lion()}), "*": muon()}),
            "sgd: torch's fused functions, lion: torch's formula, muon: torch's formula",
            "sgd: Triton kernel, lion: Triton kernel, muon: torch's formula",
            "sgd: torch's fused functions, lion: torch's formula, muon: torch's formula",
        ),
        (Optimizer(lambda *_, **__: {}, lambda *_, **__: ([], {})), *["the optimizer's own"] * 3),
    ],
)
def test_an_optimizer_says_what_runs(optimizer, cpu, gpu, gpu_by_reference):
    assert optimizer.runs(CPU) == cpu and without_reasons(optimizer.runs(GPU)) == gpu_by_reference
    with only("reference"):
        assert optimizer.runs(CPU) == cpu and without_reasons(optimizer.runs(GPU)) == gpu_by_reference
    for scope in (only("triton"), prefer_triton()):
        with scope:
            assert without_reasons(optimizer.runs(GPU)) == gpu


def without_reasons(text: str) -> str:
    return re.sub(r" \([^)]*\)", "", text)


def test_an_optimizer_says_why_it_runs(monkeypatch):
    monkeypatch.setattr(choice, "_architecture", lambda device: "")
    monkeypatch.setattr(choice, "_decided", {})
    assert adam().runs(GPU) == "adam: torch's fused functions (torch sees no such GPU)"
    assert adagrad().runs(GPU) == "adagrad: torch's fused functions"  # there is no kernel
    with prefer_triton():
        assert lamb().runs(GPU) == "lamb: Triton kernel (kernels were requested)"


def loss_and_batch():
    layers = fds.Layers([nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 3)], lambda out, y: ((out - y) ** 2).mean())
    g = torch.Generator().manual_seed(3)
    return layers, (torch.randn(8, 5, generator=g), torch.randn(8, 3, generator=g))


@pytest.mark.parametrize("optimizer", [adamw(0.01), lamb(0.01), sgd(0.1, momentum=0.9)], ids=["adamw", "lamb", "sgd"])
def test_a_step_with_kernels_is_the_step_without(optimizer):
    layers, batch = loss_and_batch()
    step = fds.compose(fds.loss_scale(2.0**10), fds.clip_by_global_norm(1.0), optimizer)(layers)

    def train():
        state = step.init(layers.init, key=1)
        for i in range(4):
            state, metrics = step(state, (batch[0] * (float("nan") if i == 1 else 1), batch[1]))
        return state, metrics

    want, told = train()
    with only("triton"):
        got, metrics = train()
    assert int(got.step) == int(want.step) == 3
    # Three updates of 0.1 at most; a gradient's rounding is an update's: some 100 at its magnitude.
    assert_near(tree.leaves(got.params), tree.leaves(want.params), num_roundings=100)
    assert_near([metrics["loss"]], [told["loss"]], num_roundings=100)


@pytest.mark.parametrize(
    "optimizer", [adamw(0.01), lamb(0.01), lion(0.01), sgd(0.1, momentum=0.9)], ids=["adamw", "lamb", "lion", "sgd"]
)
def test_all_stages_give_the_same_bits_under_kernels(optimizer):
    layers, batch = loss_and_batch()  # two ranks cut the first weight

    def run(stage, size):
        def one():
            axis = fds.mesh(dp=-1)["dp"]
            sharded = fds.shard_optimizer(axis, stage=stage, bucket_bytes=size)
            step = fds.compose(sharded, fds.skip_nonfinite(), optimizer)(layers)
            state = step.init(layers.init, key=1)
            for _ in range(2):
                state, _ = step(state, tuple(x.chunk(2)[axis.index] for x in batch))
            return step.params(state)

        return fds.simulate(one, 2)

    want = run(1, 64)[0]
    with only("triton"):
        first, *others = [run(stage, size)[0] for stage, size in ((1, 64), (0, 300), (2, 300), (3, 2**20))]
    for other in others:
        assert_same_bits(other, first)
    assert_near(tree.leaves(first), tree.leaves(want), num_roundings=100)
