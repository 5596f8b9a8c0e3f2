"""Dropout of a piece of an activation: every rank draws for the whole, and takes what falls on its piece.

    y_r = x_r * piece_r(dropout(1, p))

So any number of ranks drop what one rank drops, since they draw from one seed. It costs a mask of the whole activation,
of its dtype, for a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fds.errors import LossError
from fds.loss import traced
from fds.nn.parallel import tokens
from fds.nn.parallel.linear import Piece
from fds.nn.parallel.region import Region


class PieceDropout(Piece, nn.Dropout):
    """A copy of an `nn.Dropout` that knows where activations are pieces."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the piece of what one rank would return for the whole."""
        region = self.region
        if region is None or not self.training or not self.p:
            return F.dropout(input, self.p, self.training, self.inplace)
        with torch._C.DisableTorchFunction():  # inside of `DrawsOfAll` too this draws once
            return dropped(input, self.p, region, run=self.run, inplace=self.inplace)


def become_dropout(module: Any, region: Region, *, run: str | None) -> None:
    """Have a copy of an `nn.Dropout` know where activations are pieces."""
    module.__class__ = PieceDropout
    module.region, module.run = region, run


def dropped(x: Tensor, p: float, region: Region, *, run: str | None, inplace: bool = False) -> Tensor:
    """Return dropout of an activation that is a piece, along its heads, features or sequence, or is whole."""
    found = region.piece(x, run=run)
    return tokens.dropped(x, p, None if found is None else tokens.Cut(*found), inplace=inplace)


class DrawsOfAll(TorchFunctionMode):
    """Inside attention over some of the heads, have dropout by functions of torch draw for all heads."""

    def __init__(self, region: Region):
        super().__init__()
        self.region = region

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        other = _OTHERS.get(func)
        if other is None:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():  # private; what this calls is meant as it is
            return other(self.region, *args, **(kwargs or {}))


def _dropout(region: Region, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not (training and p):
        return input
    _check_uncompiled(region)
    return dropped(input, p, region, run=region.run, inplace=inplace)


def attention(
    region: Region,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return `F.scaled_dot_product_attention` over this rank's heads (..., heads, sequence, features)."""
    tokens.check_alone(query, key)
    if not dropout_p:
        options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, **options)
    _check_uncompiled(region)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    before = region.inside, region.heads
    region.inside, region.heads = region.inside or (1,), []
    try:
        weights = dropped(scores.softmax(-1), dropout_p, region, run=None)
    finally:
        region.inside, region.heads = before
    return weights @ value


def _attention(region: Region, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return attention of a function of torch: over this rank's heads, or over all where a plan leaves it whole."""
    if region.split and (args[1:2] or [kwargs.get("dropout_p")])[0]:
        region.piece(query, run=None)  # raises
    if region.heads is None and not region.inside:
        tokens.check_alone(query, key)
        return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    return attention(region, query, key, value, *args, **kwargs)


def _check_uncompiled(region: Region) -> None:
    """Raise `LossError` where a loss is looked at before it is compiled: compiled code has no `DrawsOfAll`."""
    if traced.now.looking is not None:
        raise LossError(
            "compiled functions draw for a piece of an activation, and would draw something else than one rank",
            where=f"tensor_parallel over {region.axis.name!r}",
            got="F.dropout, or dropout_p of F.scaled_dot_product_attention, in a loss that fds.compile compiles",
            want="nn.Dropout of activations, or attention without dropout",
            hint="or no fds.compile",
        )


def is_drawn_for_all(function: Any) -> bool:
    """Say whether `DrawsOfAll` has another function in the place of this one."""
    return function in _OTHERS


_OTHERS: dict[Any, Callable[..., Tensor]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
}
