"""What a rank would compute of its part, and one rank of whole rows, is refused in the first call; nothing else is."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fds
from fds.errors import LossError
from fds.nn.parallel import tokens

PART, WIDTH, DTYPE = 8, 8, torch.float64  # rows, tokens of a part and features alike: a shape tells nothing
ROUNDING = torch.finfo(DTYPE).eps * 2**14  # as in test_draws.py
W = torch.randn(WIDTH, WIDTH, dtype=DTYPE, generator=torch.Generator().manual_seed(2))
X = torch.randn(8, 2 * PART, WIDTH, dtype=DTYPE, generator=torch.Generator().manual_seed(0))
TABLE = torch.randn(32, WIDTH, dtype=DTYPE, generator=torch.Generator().manual_seed(1))
KERNEL = torch.ones(WIDTH, 1, 3, dtype=DTYPE)
with torch.random.fork_rng():
    torch.manual_seed(3)
    LSTM = nn.LSTM(WIDTH, WIDTH, batch_first=True, dtype=DTYPE)
    CONVOLUTION, NORM = nn.Conv1d(WIDTH, 1, 3, dtype=DTYPE), nn.LayerNorm(WIDTH, dtype=DTYPE)


def trained(f: Any, n: int, layout: Any = "contiguous", *parts: Any, allowed: bool = False) -> Any:
    """Return the loss and the parameter after a step of a sum of f(hidden, axis), or the error."""
    axis = fds.mesh(sp=n)["sp"]

    def loss(params: Any, x: Tensor) -> Any:
        with fds.nn.allow_mixing() if allowed else contextlib.nullcontext():
            return fds.Mean(f(x @ params["w"], axis).square().sum(), torch.tensor(float(x.numel())))

    step = fds.compose(fds.context_parallel(axis, layout=layout), *parts, fds.sgd(0.1))(loss)
    state = step.init({"w": W})
    try:
        state, metrics = step(state, fds.nn.zigzag(X, axis) if layout == "zigzag" else X.chunk(n, 1)[axis.index])
    except LossError as error:
        return error
    return metrics["loss"], step.params(state)["w"]


def attention(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.mT, -1) @ x


REFUSED = {
    "attention": ("matmul", lambda x, axis: attention(x)),
    "heads": ("matmul", lambda x, axis: attention(x.unflatten(-1, (2, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)),
    "einsum": ("einsum", lambda x, axis: torch.einsum("bsd,btd->bst", x, x).softmax(-1) @ x),
    "distances": ("sub", lambda x, axis: x[:, :, None] - x[:, None]),
    "linear attention": ("matmul", lambda x, axis: x @ (x.mT @ x)),
    "convolution": ("conv1d", lambda x, axis: F.conv1d(x.mT, KERNEL, padding=1, groups=WIDTH).mT),
    "module": ("conv1d", lambda x, axis: CONVOLUTION(x.transpose(1, 2))),
    "pool": ("avg_pool1d", lambda x, axis: F.avg_pool1d(x.mT, 3, 1, 1)),
    "cumsum": ("cumsum", lambda x, axis: x.cumsum(1)),
    "cumsum of rows and tokens": ("cumsum", lambda x, axis: x.flatten(0, 1).cumsum(0)),
    "flip": ("flip", lambda x, axis: x * x.flip(1)),
    "roll": ("roll", lambda x, axis: x * x.roll(1, 1)),
    "pad": ("pad", lambda x, axis: x * F.pad(x, (0, 0, 1, 0))[:, :-1]),
    "shift": ("x[...]", lambda x, axis: x[:, 1:] * x[:, :-1]),
    "shift of features": ("x[...]", lambda x, axis: x.mT[..., :-1]),
    "last": ("x[...]", lambda x, axis: x[:, -1]),
    "first": ("select", lambda x, axis: x.select(1, 0)),
    "first tokens": ("x[...]", lambda x, axis: x[:, :5]),
    "class token": ("cat", lambda x, axis: torch.cat([x.new_ones(8, 1, WIDTH), x], 1)),
    "difference": ("diff", lambda x, axis: x.diff(dim=1)),
    "softmax": ("softmax", lambda x, axis: F.softmax(x, dim=1)),
    "normalize": ("normalize", lambda x, axis: F.normalize(x)),
    "sort": ("sort", lambda x, axis: x * x.sort(1).values),
    "chosen tokens": ("topk", lambda x, axis: x.topk(2, 1).values),
    "fourier": ("fft_fft", lambda x, axis: torch.fft.fft(x, dim=1).real),
    "recurrent": ("lstm", lambda x, axis: LSTM(x)[0]),
    "batch norm": ("batch_norm", lambda x, axis: x.mT * F.batch_norm(x.mT, None, None, training=True)),
    "layer norm": ("layer_norm", lambda x, axis: x * F.layer_norm(x, x.shape[1:])),
    "largest": ("amax", lambda x, axis: x.amax(1)),
    "pooled": ("tanh", lambda x, axis: x.mean(1).tanh()),
    "centred": ("sub", lambda x, axis: x - x.mean(1, keepdim=True)),
    "squeeze and excite": ("sigmoid", lambda x, axis: x * (x.mean(1) @ W).sigmoid()[:, None]),
    "balance": ("mul", lambda x, axis: x.mean((0, 1)) * x.sum((0, 1))),
    "positions": ("mul", lambda x, axis: x * torch.arange(x.shape[1])[:, None]),
    "offset positions": ("add", lambda x, axis: x + TABLE[torch.arange(0, x.shape[1]) + 0]),
    "rotary": ("mul", lambda x, axis: x * (torch.arange(x.shape[1])[:, None] * torch.ones(1, WIDTH)).cos()[None]),
    "a table": ("add", lambda x, axis: x + TABLE[: x.shape[1]]),
    "a table of rows": ("add", lambda x, axis: x + TABLE[None, 0 : x.shape[1]]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_tokens_is_refused_and_would_be_wrong(name):
    function, f = REFUSED[name]
    (whole, _), parts = trained(f, 1), fds.simulate(lambda: trained(f, 2), 2)
    for error in parts:
        assert isinstance(error, LossError) and f"got:   {function} of (" in str(error), error
        assert "test_mixing.py:" in error.where and "allow_mixing" in error.hint
    torch.manual_seed(4)
    for loss, _ in fds.simulate(lambda: trained(f, 2, allowed=True), 2):
        assert not torch.allclose(loss, whole, rtol=1e-6)


def test_a_loss_is_looked_at_before_it_is_compiled():
    for error in fds.simulate(lambda: trained(REFUSED["cumsum"][1], 2, "contiguous", fds.compile()), 2):
        assert "cumsum of (" in str(error)


def by_chunks(x: Tensor, axis: Any) -> Tensor:
    return torch.cat([NORM(x[:, i : i + 3]) for i in range(0, x.shape[1], 3)], 1)


def windows(x: Tensor, axis: Any) -> Tensor:
    return attention(x.unflatten(1, (-1, 4))).flatten(1, 2)


def first(x: Tensor, axis: Any) -> int:
    return axis.index * x.shape[1]


RIGHT = {
    "chunks": by_chunks,
    "splits": lambda x, axis: torch.cat([one.tanh() for one in x.split(3, 1)], 1),
    "windows": windows,
    "pointwise": lambda x, axis: F.conv1d(x.mT, W[..., None]).mT,
    "features": lambda x, axis: x.softmax(-1).cumsum(-1).flip(-1).roll(1, -1)[..., 1:] * x[..., :-1],
    "features first": lambda x, axis: x.mT.softmax(1).cumsum(1)[:, 1:],
    "rows": lambda x, axis: x * torch.arange(8)[:, None, None],
    "arange of features": lambda x, axis: x * torch.arange(WIDTH) + TABLE[0, :WIDTH],
    "norms": lambda x, axis: NORM(x) + F.normalize(x, dim=-1),
    "heads": lambda x, axis: x.unflatten(-1, (2, 4)).transpose(1, 2).softmax(1)[:, 1:],
    "within a token": lambda x, axis: torch.einsum("bshd,bskd->bshk", *(x.unflatten(-1, (2, 4)),) * 2).softmax(-1),
    "products": lambda x, axis: torch.einsum("bsd,de->bse", x, W) + F.linear(x, W) @ W,
    "flat": lambda x, axis: x.flatten(0, 1).softmax(-1)[:, 2:],
    "chosen": lambda x, axis: x.flatten(0, 1)[(x.flatten(0, 1) > 0).any(-1)],
    "gathered": lambda x, axis: x.log_softmax(-1).gather(-1, x.argmax(-1, keepdim=True)),
    "positions": lambda x, axis: x + TABLE[torch.arange(x.shape[1]) + first(x, axis)],
    "positions between": lambda x, axis: x + TABLE[torch.arange(first(x, axis), first(x, axis) + x.shape[1])],
    "a table": lambda x, axis: x + TABLE[first(x, axis) : first(x, axis) + x.shape[1]],
    "a narrow table": lambda x, axis: x + TABLE.narrow(0, first(x, axis), x.shape[1]),
    "whole positions": lambda x, axis: x + TABLE[torch.arange(16).chunk(axis.size)[axis.index]],
    "metrics": lambda x, axis: x * (x.detach().mean(1).exp().sum() > 0),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_treats_every_token_by_itself_is_the_plain_step(name):
    want = trained(RIGHT[name], 1)
    for found in fds.simulate(lambda: trained(RIGHT[name], 2), 2):
        assert not isinstance(found, LossError), found
        for x, y in zip(found, want, strict=True):
            assert torch.allclose(x, y, rtol=ROUNDING, atol=ROUNDING)


def test_positions_of_zigzag_parts_are_right_and_those_of_the_part_are_not():
    right = lambda x, axis: x + TABLE[fds.nn.zigzag_positions(16, axis)]
    for found in fds.simulate(lambda: trained(right, 2, "zigzag"), 2):
        assert torch.allclose(found[1], trained(right, 1)[1], rtol=ROUNDING, atol=ROUNDING)
    for found in fds.simulate(lambda: trained(REFUSED["positions"][1], 2, "zigzag"), 2):
        assert "begin with the same number" in str(found)


LOSSES = {
    "of tokens": lambda x: F.cross_entropy(x.flatten(0, 1), torch.zeros(x.shape[:2], dtype=torch.long).flatten()),
    "of rows": lambda x: (x.square().sum(-1).sum(1) / x.shape[1]).mean(),
    "by weights": lambda x: (x.square().sum(-1) * torch.ones(x.shape[:2])).sum() / torch.ones(x.shape[:2]).sum(),
    "of features": lambda x: x.mean((0, 1)).sum() + x.mean(1)[:, 1:].sum() * 0.5,
    "with metrics": lambda x: (x.mean(), {"ppl": x.mean().exp(), "norms": x.detach().mean(1).norm()}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_over_tokens_may_be_the_loss(name):
    def body(n: int) -> Tensor:
        axis = fds.mesh(sp=n)["sp"]
        step = fds.compose(fds.context_parallel(axis), fds.sgd(0.1))(lambda p, x: LOSSES[name](x @ p["w"]))
        state, _ = step(step.init({"w": W}), X.chunk(n, 1)[axis.index])
        return step.params(state)["w"]

    for found in fds.simulate(lambda: body(2), 2):
        assert torch.allclose(found, body(1), rtol=ROUNDING, atol=ROUNDING)


def test_every_layer_is_looked_at_and_only_once():
    class Layer(nn.Module):
        def __init__(self, mixes: bool):
            super().__init__()
            self.mixes, self.w = mixes, nn.Parameter(torch.ones(WIDTH, dtype=DTYPE))

        def forward(self, x: Tensor) -> Tensor:
            draws = tokens.now()
            looked.append(draws is not None and draws.watch is not None)
            return (x.cumsum(1) if self.mixes else x) * self.w

    def body(mixes: bool, *parts: Any) -> Any:
        axis, layers = fds.mesh(sp=2)["sp"], [fds.LayerSpec(Layer, False), fds.LayerSpec(Layer, mixes)]
        loss = fds.Layers(layers, lambda x, y: (x - y).square().mean())
        step = fds.compose(fds.accumulate(2), fds.context_parallel(axis), *parts, fds.sgd(0.1))(loss)
        part = X.chunk(2, 1)[axis.index]
        state = step.init(loss.init, key=0)
        for _ in range(2):
            state, _ = step(state, (part, part))
        step.evaluate(state, (part, part))

    looked: list[bool] = []
    for parts in ((), (fds.checkpoint_activations(),)):
        with pytest.raises(LossError, match="cumsum"):
            fds.simulate(lambda parts=parts: body(True, *parts), 2)
    looked.clear()
    fds.simulate(lambda: body(False), 2)
    # on each rank two layers, of the first of four microbatches, and of what is evaluated
    assert looked.count(True) == 2 * 2 * 2 and len(looked) == 2 * 2 * 5
