"""Layers made of columns and rows: self-attention by heads, and a feed-forward layer by hidden units.

    q, k, v = qkv(x)        y = out(softmax(q k^T / sqrt(d)) v)        by heads of d = width / num_heads
    y = down(f(up(x)))      or, gated, y = down(silu(gate(x)) * up(x)), where gate and up are one matrix

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; grouped queries: Ainslie et al. 2023, arXiv:2305.13245.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fds.errors import LossError, did_you_mean, is_number
from fds.kernels import rotary, swiglu
from fds.nn.parallel import checking
from fds.nn.parallel.linear import ColumnLinear, RowLinear

_FUNCTIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
ACTIVATIONS = (*_FUNCTIONS, "swiglu")


class MLP(nn.Module):
    """A feed-forward layer, divided over the axis of `fds.tensor_parallel` where there is one.

    Args:
        width: of its input and output.
        hidden: how many hidden units; their matrices are `up` (hidden, width) and `down` (width, hidden).
        activation: "gelu", "relu", "silu", or "swiglu", for which `up` is (2 * hidden, width): gate, then up.
        bias: whether both have biases.
        dropout: probability with which hidden units are dropped.

    Raises `LossError` for another activation, and for what is not a size, a flag or a probability.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        **factory: Any,
    ):
        checking.sizes("MLP", width=width, hidden=hidden)
        checking.flags("MLP", LossError, bias=bias)
        checking.rate("MLP", dropout)
        super().__init__()
        if not isinstance(activation, str) or activation not in ACTIVATIONS:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LossError(
                "there is no such activation",
                where="MLP",
                got=repr(activation),
                want=", ".join(map(repr, ACTIVATIONS)),
                hint=did_you_mean(str(activation), list(ACTIVATIONS)),
            )
        parts = 2 if activation == "swiglu" else 1
        self.up = ColumnLinear(width, parts * hidden, bias, parts=parts, **factory)
        self.down = RowLinear(hidden, width, bias, **factory)
        self.dropout, self.activation = nn.Dropout(dropout), activation

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output (..., width), given (..., width)."""
        y = self.up(x)
        y = swiglu(*y.chunk(2, -1)) if self.activation == "swiglu" else _FUNCTIONS[self.activation](y)
        return self.down(self.dropout(y))


class SelfAttention(nn.Module):
    """Attention of a sequence to itself, divided by heads over the axis of `fds.tensor_parallel` where there is one.

    Args:
        width: of its input and output.
        num_heads: of queries.
        num_kv_heads: of keys and values, by which the heads of queries are grouped; as many as those if None.
        causal: whether a token sees those after it.
        bias: whether the projections `qkv` ((heads + 2 * groups) * d, width) and `out` (width, width) have biases.
        dropout: probability with which weights of attention are dropped.
        theta: base of rotary positions (10000.0); None for none.

    Raises `LossError` for heads that do not divide the width, groups that do not divide the heads, heads of odd width
    that are to be turned, and for what is not a size, a flag or a probability.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        causal: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
        theta: float | None = None,
        **factory: Any,
    ):
        checking.flags("SelfAttention", LossError, causal=causal, bias=bias)
        checking.rate("SelfAttention", dropout)
        super().__init__()
        groups, d = check_heads("SelfAttention", width, num_heads, num_kv_heads, theta)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, groups, d
        self.causal, self.dropout, self.theta = causal, dropout, theta
        self.qkv = ColumnLinear(
            width, (num_heads + 2 * groups) * d, bias, parts=(width, groups * d, groups * d), **factory
        )
        self.out = RowLinear(width, width, bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return what each token attends to (batch, sequence, width), given (batch, sequence, width)."""
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split(counts, 1)
        if self.theta is not None:
            q, k = turned(q, self.theta), turned(k, self.theta)
        grouped = self.num_heads != self.num_kv_heads
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal, enable_gqa=grouped)
        return self.out(y.transpose(1, 2).flatten(2))


def check_heads(where: str, width: int, num_heads: int, num_kv_heads: int | None, theta: Any) -> tuple[int, int]:
    """Return the groups of heads, and the features of a head.

    Raises `LossError` for heads that do not divide the width, groups that do not divide the heads, and positions that
    cannot turn them.
    """
    checking.sizes(where, width=width, num_heads=num_heads)
    if num_kv_heads is not None:
        checking.sizes(where, num_kv_heads=num_kv_heads)
    groups = num_heads if num_kv_heads is None else num_kv_heads
    if width % num_heads or num_heads % groups:
        raise LossError(
            "the heads do not divide the width, or the groups the heads",
            where=where,
            got=f"width={width}, num_heads={num_heads}, num_kv_heads={groups}",
            want="width a multiple of num_heads, and that of num_kv_heads",
        )
    d = width // num_heads
    if theta is not None and (not is_number(theta) or not 0 < theta < math.inf or d % 2):
        raise LossError(
            "positions cannot turn heads so",
            where=f"{where}: theta",
            got=f"theta={theta!r:.40}, heads of {d} features",
            want="a number > 0, and an even number of features; or None",
        )
    return groups, d


def turned(x: Tensor, theta: float) -> Tensor:
    """Return heads (batch, heads, sequence, d), turned by their positions."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    half = torch.arange(0, x.shape[3], 2, device=x.device, dtype=wide)
    angles = torch.arange(x.shape[2], device=x.device, dtype=wide)[:, None] * theta ** -(half / x.shape[3])
    return rotary(x, angles.cos(), angles.sin())
