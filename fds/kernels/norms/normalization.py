"""What layer_norm and rms_norm share: the equations, their implementation in plain torch, and that by kernels.

With x (R, N) the input (the sum, where there is a residual), mu = mean(x) (0 for RMS) and
r = 1 / sqrt(mean((x - mu)^2) + eps)::

    x_hat = (x - mu) * r        y = x_hat * weight + bias

With dy the gradient of y, g = dy * weight, and ds the gradient of the sum if that is an output::

    dx = r * (g - mean(g) - x_hat * mean(g * x_hat)) + ds        (RMS: without mean(g))
    dweight = sum over rows of dy * x_hat        dbias = sum over rows of dy

`invertible` saves y in place of x. Backward recovers x_hat = (y - bias) / weight, clipped to its range, which is
[-sqrt(N), sqrt(N)], and 0 where weight is 0.
Source: Ba et al. 2016, arXiv:1607.06450, section 3; Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fds.errors import KernelError, is_number
from fds.kernels import arguments
from fds.kernels.first_order import Function, first_order
from fds.kernels.norms import normalization_backward, normalization_forward


def check(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    """Raise `KernelError` for arguments that cannot be normalised."""
    arguments.floating(x=x, residual=residual, weight=weight, bias=bias)
    arguments.alike(x=x, residual=residual)
    if x.dim() == 0:
        raise KernelError("x has no dimension to normalise over", where="x", got="()", want="(..., N)")
    arguments.shape((x.shape[-1],), weight=weight, bias=bias)
    if not is_number(eps) or not 0 <= eps < math.inf:
        raise KernelError("eps is out of range", where="eps", got=repr(eps), want="a finite number from 0 on")


def unit(x: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """Return x_hat and r (..., 1), in the width of `x`, in plain torch."""
    x = x.to(arguments.width(x))
    x = x - x.mean(-1, keepdim=True) if centered else x
    r = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * r, r


def scaled(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x_hat * weight + bias as `dtype`."""
    y = x_hat if weight is None else x_hat * weight.to(x_hat.dtype)
    y = y if bias is None else y + bias.to(x_hat.dtype)
    # Without `.to` the same dtype, of whose result torch.compile of torch 2.11 computes a gradient of zero
    # (github.com/pytorch/pytorch/issues/180642).
    return y if y.dtype == dtype else y.to(dtype)


def inverted(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x_hat recovered from `y`, in the width of `y`."""
    x_hat = y.to(arguments.width(y))
    x_hat = x_hat if bias is None else x_hat - bias.to(x_hat.dtype)
    if weight is None:
        return x_hat
    weight, bound = weight.to(x_hat.dtype), y.shape[-1] ** 0.5
    is_zero = weight == 0
    return torch.where(is_zero, 0, (x_hat / weight.masked_fill(is_zero, 1)).clamp(-bound, bound))


def _over_rows(x: Tensor) -> Tensor:
    return x.sum(list(range(x.dim() - 1))) if x.dim() > 1 else x


class Formulas(Function):
    """The same in plain torch, saving as little as the kernels; backward is differentiable."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool, invertible: bool
    ) -> tuple[Tensor, Tensor]:
        x_hat, r = unit(x, eps, centered)
        return scaled(x_hat, weight, bias, x.dtype), r

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, ctx.eps, ctx.centered, ctx.invertible = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        if ctx.invertible:
            ctx.save_for_backward(*output, weight, bias)
        else:
            ctx.save_for_backward(x, weight)
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dr: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.invertible:
            y, r, weight, bias = ctx.saved_tensors
            x_hat = inverted(y, weight, bias)
        else:
            x, weight = ctx.saved_tensors
            x_hat, r = unit(x, ctx.eps, ctx.centered)
        dy_wide = dy.to(x_hat.dtype)
        g = dy_wide if weight is None else dy_wide * weight.to(x_hat.dtype)
        dx = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
        dx = r * (dx - g.mean(-1, keepdim=True) if ctx.centered else dx)
        if ctx.invertible:  # second derivatives go through r, then a differentiable output
            dx = dx - dr * r * r * x_hat / max(x_hat.shape[-1], 1)
        dweight = _over_rows(dy_wide * x_hat).to(weight.dtype) if weight is not None else None
        dbias = _over_rows(dy_wide).to(ctx.bias_dtype) if ctx.bias_dtype is not None else None
        return dx.to(dy.dtype), dweight, dbias, None, None, None


class NormFunction(Function):
    """The kernels of normalization_forward and normalization_backward."""

    @staticmethod
    def forward(
        x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool,
        invertible: bool, returns_sum: bool,
    ) -> tuple[Tensor, ...]:
        keeps_sum = residual is not None and (returns_sum or not invertible)
        return normalization_forward.forward(
            x, residual, weight, bias, eps, centered, keeps_sum, centered and not invertible
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, residual, weight, bias, _, ctx.centered, ctx.invertible, ctx.returns_sum = inputs
        y, total, mean, r = output
        ctx.has_residual = residual is not None
        ctx.dtypes = [None if p is None else p.dtype for p in (weight, bias)]
        if ctx.invertible:
            ctx.save_for_backward(y, r, weight, bias)
        elif ctx.centered:
            ctx.save_for_backward(x if residual is None else total, r, weight, mean)
        else:
            ctx.save_for_backward(x if residual is None else total, r, weight)
        # Saved outputs are not marked as non-differentiable, so that `first_order` raises an error for a second
        # derivative that goes through them; it would be 0 otherwise.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        x, r, weight, *rest = ctx.saved_tensors
        bias, mean = (rest[0], None) if ctx.invertible else (None, rest[0] if rest else None)
        dy = torch.zeros_like(x) if dy is None else dy
        dtotal = dtotal if ctx.returns_sum else None  # torch.compile passes zeros where there is no gradient
        wanted = zip(ctx.dtypes, ctx.needs_input_grad[2:4], strict=True)
        dtypes = [dtype if needed else None for dtype, needed in wanted]
        dx, *dparams = first_order(
            normalization_backward.backward, dy, x, mean, r, weight, bias, dtotal, ctx.centered, ctx.invertible, *dtypes
        )
        dparams = [None if dtype is None else p for dtype, p in zip(dtypes, dparams, strict=True)]
        return dx, dx if ctx.has_residual else None, *dparams, None, None, None, None
