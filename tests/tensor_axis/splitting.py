"""A transform for tests alone: pairs of linear layers split over a `tensor` axis, by columns, then by rows.

Some have several parts fused in one matrix, of lengths that ranks do not divide.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fds
from fds.collectives import Axis, functional
from fds.step import Dimension, Placement, Replicated, SplitDim, fill, transform

ROWS = 8
DTYPE = torch.float64
PARTS = (4, 2, 5)  # of the fused hidden width
PIECES = {
    "up.weight": SplitDim(0),
    "up.bias": SplitDim(0),
    "down.weight": SplitDim(1),
    "inner": Replicated("sum"),
    "seen": SplitDim(0),
    "wide": SplitDim(0, PARTS),
    "narrow": SplitDim(1, PARTS),
    "odd": SplitDim(0, (3,)),
}


class Copied(torch.autograd.Function):
    """The same input for the pieces of all ranks; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return functional.all_reduce(grads[0].contiguous(), ctx.axis), None


class Summed(torch.autograd.Function):
    """The sum of what all ranks computed; every rank has its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return functional.all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class Pair(nn.Module):
    """Residual: up to the hidden width, split by columns, and down again, split by rows.

    `inner` is whole on every rank, and each sees only what its own columns make of it. The buffer `seen` is split, too.
    So are, beside it, a second pair whose hidden width is of several parts, and `odd`, of which four ranks have three
    elements.
    """

    def __init__(self, axis: Axis | None, width: int = 6, hidden: int = 16):
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=DTYPE)
        self.up, self.down = nn.Linear(width, hidden, dtype=DTYPE), nn.Linear(hidden, width, dtype=DTYPE)
        self.inner = nn.Parameter(torch.ones(width, dtype=DTYPE))
        self.wide = nn.Parameter(torch.randn(sum(PARTS), width, dtype=DTYPE))
        self.narrow = nn.Parameter(torch.randn(width, sum(PARTS), dtype=DTYPE))
        self.odd = nn.Parameter(torch.randn(3, dtype=DTYPE))
        self.register_buffer("seen", torch.zeros(hidden, dtype=DTYPE))
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = y if self.axis is None else Copied.apply(y, self.axis)
        hidden, odd = torch.tanh(self.up(y * self.inner)), torch.tanh(y.sum(-1, keepdim=True) * self.odd)
        if self.training:
            self.seen += hidden.detach().sum(0)
        y = F.linear(hidden, self.down.weight) + F.linear(torch.tanh(F.linear(y, self.wide)), self.narrow)
        y = y + odd.sum(-1, keepdim=True)
        y = y if self.axis is None else Summed.apply(y, self.axis)
        return x + y + self.down.bias


@attrs.frozen(eq=False, repr=False)
class Columns(Placement):
    """Which parameters of the pairs are split, and along which dim."""

    axis: Axis

    def lies(self, name: str) -> SplitDim | Replicated:
        """Say it by the end of the name."""
        return next((lies for end, lies in PIECES.items() if name.endswith(end)), Replicated())


@transform
def split_pairs(axis: Axis):
    """Split the pairs of the loss over an axis."""
    own = axis.channel("tensor")
    return lambda step: fill(step, topology=Dimension(own, "tensor", Columns(own))) if own.size > 1 else step


def error(out: Tensor, y: Tensor) -> Any:
    """Return the squared error, and metrics of both kinds."""
    loss = (out - y).square().mean()
    return loss, {"rows": torch.tensor(len(y)), "size": out.detach().abs().mean()}


def model(axis: Axis | None) -> fds.Layers:
    """Return a loss of layers; its parameters have the same names and whole shapes with any axis."""
    return fds.Layers(
        [
            fds.LayerSpec(nn.Linear, 5, 6, dtype=DTYPE),
            fds.LayerSpec(Pair, axis),
            nn.Tanh(),
            fds.LayerSpec(Pair, axis),
            fds.LayerSpec(nn.Linear, 6, 3, dtype=DTYPE),
        ],
        error,
    )


def batch(call: int, index: int = 0, count: int = 1) -> tuple[Tensor, Tensor]:
    """Return this data rank's rows of the batch of a call."""
    g = torch.Generator().manual_seed(call)
    x, y = torch.randn(ROWS, 5, generator=g, dtype=DTYPE), torch.randn(ROWS, 3, generator=g, dtype=DTYPE)
    n = ROWS // count
    return x[index * n : (index + 1) * n], y[index * n : (index + 1) * n]


@attrs.frozen
class Place:
    """Where a step runs: so many ranks along each axis."""

    tensor: int = 1
    data: int = 1
    stages: int = 1
    zero: int = 0  # stage of ZeRO
    replicas: int = 1

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.tensor * self.data * self.stages * self.replicas

    def step(self, *parts: Any, optimizer: Any, alone: bool = False) -> fds.Step:
        """Return the step of this rank, which sums `ROWS` rows over four microbatches on all ranks."""
        mesh = fds.mesh(copies=self.replicas, pp=self.stages, dp=self.data, tp=self.tensor)
        each = 4 // (self.data * self.replicas)
        cut = fds.accumulate(each)
        if self.stages > 1:
            cut = fds.pipeline(fds.plans.one_f_one_b, mesh["pp"], num_microbatches=each)
        shard = fds.shard_optimizer(
            mesh["dp"], stage=self.zero, bucket_bytes=300, replicate=mesh["copies"] if self.replicas > 1 else None
        )
        axis = mesh["tp"] if self.tensor > 1 else None
        return fds.compose(cut, shard, split_pairs(mesh["tp"]), *parts, optimizer)(model(axis))


def share(step: fds.Step, call: int) -> tuple[Tensor, Tensor]:
    """Return this rank's rows."""
    return batch(call, *step.dimensions.share_of_batch)
