"""Models and runs that the tests of sharding share: a small GPT, and training on the ranks that run."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fds

WORDS = 50


class Attention(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(width, 3 * width), nn.Linear(width, width), dropout

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 4, c // 4).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.drop = Attention(width, dropout), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Embedding and head are tied."""

    def __init__(self, width: int = 64, layers: int = 2, dropout: float = 0.1, words: int = WORDS, length: int = 16):
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(dtype: torch.dtype = torch.float32, **sizes: Any):
    """Return a loss of tokens (B, T + 1) and its parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        apply, params, _ = fds.functional(GPT(**sizes).to(dtype))

    def loss_fn(params, tokens):
        logits = apply(params, tokens[:, :-1])
        return F.cross_entropy(
            logits.flatten(0, 1).float() if dtype is not torch.float64 else logits.flatten(0, 1),
            tokens[:, 1:].flatten(),
        )

    return loss_fn, params


def tokens(rows: int, length: int = 9, words: int = WORDS) -> torch.Tensor:
    return torch.randint(0, words, (rows, length), generator=torch.Generator().manual_seed(rows))


def mine(batch: Any, axis: Any) -> Any:
    """Return this rank's rows."""
    return fds.tree.map(lambda x: x.chunk(axis.size)[axis.index] if isinstance(x, torch.Tensor) else x, batch)


def data_axis():
    return fds.mesh(dp=-1)["dp"]


def train(loss: Any, params: Any, batches: Any, *transforms: Any, key: int = 3, **sharding: Any):
    """Train on the ranks that run, each with its rows; return whole parameters, all metrics, the state and the step."""
    axis = data_axis()
    step = fds.compose(fds.shard_optimizer(axis, **sharding), *transforms)(loss)
    state, told = step.init(params, key=key), []
    for batch in batches:
        state, metrics = step(state, mine(batch, axis))
        told.append(metrics)
    return step.params(state), told, state, step


def largest_difference(got: Any, want: Any) -> float:
    a, b = fds.tree.paths(got), fds.tree.paths(want)
    assert a.keys() == b.keys()
    return max((float((a[k].double() - b[k].double()).abs().max()) for k in a if a[k].numel()), default=0.0)
