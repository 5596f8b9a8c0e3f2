"""A small causal transformer of which every rank computes its tokens, and batches with few targets on some ranks."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fds
from fds.collectives import Axis

DTYPE = torch.float64
VOCABULARY, WIDTH, HEADS, GROUPS, TOKENS, ROWS = 11, 16, 4, 2, 16, 8


class Embedding(nn.Module):
    """Embeddings of tokens and of their positions in the whole sequence."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, dtype=DTYPE)
        self.positions = nn.Embedding(TOKENS, WIDTH, dtype=DTYPE)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        tokens, positions = inputs
        return self.tokens(tokens) + self.positions(positions)


class Block(nn.Module):
    """Causal attention with fewer heads of keys than of queries, and a feed-forward layer."""

    def __init__(self, axis: Axis | None, more: dict[str, Any]):
        super().__init__()
        self.axis, self.more, d = axis, more, WIDTH // HEADS
        self.norm, self.last = (nn.LayerNorm(WIDTH, dtype=DTYPE) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * d, dtype=DTYPE)
        self.out = nn.Linear(WIDTH, WIDTH, dtype=DTYPE)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, dtype=DTYPE), nn.Linear(2 * WIDTH, WIDTH, dtype=DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        q, k, v = heads.split([HEADS, GROUPS, GROUPS], 1)
        y = fds.nn.attention(q, k, v, axis=self.axis, causal=True, **self.more)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(self.last(x))))


def error(logits: Tensor, targets: Tensor) -> Any:
    """Return the mean over targets that are not ignored, and metrics of both kinds."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=-100)
    count = (targets != -100).sum()
    return fds.Mean(losses.sum(), count), {"targets": count, "square": losses.detach().square().sum() / count}


def model(axis: Axis | None = None, **more: Any) -> fds.Layers:
    """Return a loss of layers, with the same parameters for any axis."""
    block = fds.LayerSpec(Block, axis, more)
    return fds.Layers(
        [fds.LayerSpec(Embedding), block, block, fds.LayerSpec(nn.Linear, WIDTH, VOCABULARY, dtype=DTYPE)], error
    )


@attrs.frozen
class Place:
    """Where a step runs: so many ranks along each axis."""

    sequence: int = 1
    data: int = 1
    stages: int = 1
    zero: int | None = None  # stage of ZeRO over the data ranks; None without
    joint: bool = False  # over the sequence's ranks too
    method: str = "ulysses"
    layout: str = "contiguous"

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.sequence * self.data * self.stages

    def step(self, *parts: Any, microbatches: int = 4) -> fds.Step:
        """Return the step of this rank, whose data ranks sum so many microbatches."""
        mesh = fds.mesh(pp=self.stages, dp=self.data, sp=self.sequence)
        each = microbatches // self.data
        cut = fds.accumulate(each)
        if self.stages > 1:
            cut = fds.pipeline(fds.plans.one_f_one_b, mesh["pp"], num_microbatches=each)
        axis = mesh["dp", "sp"] if self.joint else mesh["dp"]
        shard = [] if self.zero is None else [fds.shard_optimizer(axis, stage=self.zero, bucket_bytes=2000)]
        layout: Any = self.layout
        loss = model(mesh["sp"], method=self.method, layout=layout)
        return fds.compose(cut, *shard, fds.context_parallel(mesh["sp"], layout=layout), *parts)(loss)

    def batch(self, step: fds.Step, call: int) -> Any:
        """Return what this rank passes of the batch of a call: its rows, and of these its tokens."""
        g = torch.Generator().manual_seed(call)
        tokens = torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=g)
        positions = torch.arange(TOKENS).expand(ROWS, -1)
        ignored = torch.rand(ROWS, TOKENS, generator=g) < positions / TOKENS  # early tokens have more targets
        whole = (tokens[:, :-1], positions), tokens[:, 1:].masked_fill(ignored, -100)
        index, count = step.dimensions.share_of_batch
        rows = slice(index * ROWS // count, (index + 1) * ROWS // count)
        return fds.tree.map(lambda x: self.tokens(x[rows]), whole)

    def tokens(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of whole rows (B, S)."""
        axis = fds.mesh(pp=self.stages, dp=self.data, sp=self.sequence)["sp"]
        return fds.nn.zigzag(x, axis) if self.layout == "zigzag" else x.chunk(axis.size, 1)[axis.index]
