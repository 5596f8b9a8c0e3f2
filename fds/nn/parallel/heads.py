"""Dropout of a piece of an activation, and attention over some of the heads: ranks drop what one rank drops.

    y_r = x_r * piece_r(dropout(1, p))

Every rank draws for the whole, from one seed, and takes what falls on its piece. It costs a mask of the whole
activation, of its dtype, for a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fds.collectives.functional import copy_in, join, sum_out
from fds.errors import LossError
from fds.loss.compiled import is_trial_run
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
            return drop(input, self.p, region, run=self.run, inplace=self.inplace)


def become_dropout(module: Any, region: Region, *, run: str | None) -> None:
    """Have a copy of an `nn.Dropout` know where activations are pieces."""
    module.__class__ = PieceDropout
    module.region, module.run = region, run


def drop(x: Tensor, p: float, region: Region, *, run: str | None, inplace: bool = False) -> Tensor:
    """Return dropout of an activation that is a piece, along its heads, features or sequence, or is whole."""
    cut = region.piece(x, run=run)
    return tokens.drop(x, p, None if cut is None else tokens.Cut(*cut), inplace=inplace)


class DrawsOfAll(TorchFunctionMode):
    """Inside attention over some of the heads, have dropout by functions of torch draw for all heads."""

    def __init__(self, region: Region):
        super().__init__()
        self.region = region

    def __enter__(self) -> Self:
        self.region.drawing = True
        return super().__enter__()

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
    region.draws = True
    return drop(input, p, region, run=region.run, inplace=inplace)


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
        weights = drop(scores.softmax(-1), dropout_p, region, run=None)
    finally:
        region.inside, region.heads = before
    return weights @ value


def _attention(region: Region, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return attention of a function of torch: over this rank's heads, or over all where a plan leaves it whole."""
    p = (args[1:2] or [kwargs.get("dropout_p")])[0]
    if region.split and p:
        region.piece(query, run=None)  # raises
    if region.heads is None and not region.inside:
        tokens.check_alone(query, key)
        return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    region.draws = region.draws or bool(p)
    return attention(region, query, key, value, *args, **kwargs)


def _check_uncompiled(region: Region) -> None:
    """Raise `LossError` where a loss is looked at before it is compiled: compiled code has no `DrawsOfAll`."""
    if is_trial_run():
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


class PartAttention(Piece, nn.MultiheadAttention):
    """A copy of an `nn.MultiheadAttention` of this rank's heads; arguments and results are those of torch."""

    cross: bool = False  # whether keys and values are whole where queries are parts of sequences

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention over all heads, and, with `need_weights`, the weights of all of them, or their mean."""
        region = self.region
        assert region is not None
        batched = query.dim() == 3
        inputs = (query, key, value)
        q, k, v = self._project(inputs)
        if not batched:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        elif not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        mask = self._mask(key_padding_mask, attn_mask, q)
        causal = is_causal and key_padding_mask is None and not need_weights
        p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            out, weights = self._with_weights(q, k, v, mask, p, average=average_attn_weights)
        else:
            out = attention(region, q, k, v, None if causal else mask, p, causal)
        out = out.permute(2, 0, 1, 3).flatten(2)  # (sequence, batch, features), as torch has it
        out = region.leave(F.linear(out, self.out_proj.weight), run=self.run, dim=-3)
        if self.out_proj.bias is not None:
            out = out + self.out_proj.bias
        if not batched:
            out = out.squeeze(1)
        elif self.batch_first:
            out = out.transpose(0, 1)
        return out, weights if weights is None or batched else weights.squeeze(0)

    def _project(self, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        """Return queries, keys and values of this rank's heads."""
        region, run = self.region, self.run
        assert region is not None
        bias = self.in_proj_bias
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif inputs[0] is inputs[1] is inputs[2]:
            entered = region.enter(inputs[0], run=run)
            return [*F.linear(entered, self.in_proj_weight, bias).chunk(3, -1)]
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        runs = {id(x): None if self.cross else run for x in inputs} | {id(inputs[0]): run}
        entered = {id(x): region.enter(x, run=runs[id(x)]) for x in inputs}
        return [F.linear(entered[id(x)], w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]

    def _mask(self, padding: Tensor | None, mask: Tensor | None, q: Tensor) -> Tensor | None:
        """Return both masks as one that is added, for this rank's heads."""
        assert self.region is not None
        both, axis = None, self.region.axis  # learned ones have a term of their gradient on every rank
        if mask is not None:
            mask = copy_in(mask, axis) if mask.requires_grad else mask
            both = _as_added(mask, q)
            if both.dim() == 3:  # of every head of every sequence
                per = both.unflatten(0, (q.shape[0], -1))
                both = per if per.shape[1] == q.shape[1] else per.narrow(1, axis.index * q.shape[1], q.shape[1])
        if padding is not None:
            padding = copy_in(padding, axis) if padding.requires_grad else padding
            padding = _as_added(padding, q)
            padding = padding[None] if padding.dim() == 1 else padding
            both = padding[:, None, None, :] if both is None else both + padding[:, None, None, :]
        return both

    def _with_weights(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, *, average: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the result, and the weights of all ranks' heads, after dropout as torch's are."""
        region = self.region
        assert region is not None
        identity = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device).expand(*k.shape[:2], -1, -1)
        weights = attention(region, q, k, identity, mask, p)
        if average:
            all_weights = sum_out(weights.sum(1), region.axis) / (weights.shape[1] * region.axis.size)
        else:
            all_weights = join(weights, region.axis, 1)
        return weights @ v, all_weights


def _as_added(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask, of which True stands for what is not attended to, as what is added to scores."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -torch.inf)
