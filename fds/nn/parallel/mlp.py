"""A feed-forward layer whose hidden units are divided over a tensor axis.

y = down(f(up(x)))          or, gated, y = down(silu(gate(x)) * up(x)), where gate and up are one matrix
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fds.errors import LossError, did_you_mean
from fds.kernels import swiglu
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
