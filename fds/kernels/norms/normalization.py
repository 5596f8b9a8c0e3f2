"""Layer norm and RMS norm, optionally of a sum: the equations, in plain torch and by kernels.

With x (R, N) the input (the sum, where there is a residual), mu = mean(x) (0 for RMS) and
r = 1 / sqrt(mean((x - mu)^2) + eps)::

    x_hat = (x - mu) * r        y = x_hat * weight + bias        (RMS: without bias)

With dy the gradient of y, g = dy * weight, and ds the gradient of the sum if that is an output::

    dx = r * (g - mean(g) - x_hat * mean(g * x_hat)) + ds        (RMS: without mean(g))
    dweight = sum over rows of dy * x_hat        dbias = sum over rows of dy

With a residual, x + residual takes the place of x, rounded to the dtype of x as by a separate addition. `invertible`
saves y in place of x. Backward recovers x_hat = (y - bias) / weight, clipped to its range, which is
[-sqrt(N), sqrt(N)], and 0 where weight is 0.

Moves: forward reads 1 tensor (2 with a residual) and writes 1 (2 if the sum is returned or saved); backward reads 2 (3
with a gradient of the sum) and writes 1. Rows beyond 8192 columns: see normalization_backward.
Saves: x or the sum, the mean (not for RMS) and r in float32, and the weight. `invertible`: y in place of x or the sum,
no mean, and the bias.
Source: Ba et al. 2016, arXiv:1607.06450, section 3; Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fds.errors import KernelError, is_number
from fds.kernels import arguments
from fds.kernels.choice import runs_triton
from fds.kernels.norms import normalization_backward, normalization_forward
from fds.kernels.operators import Function, first_order


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


def layer_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return `layer_norm` in plain torch."""
    x = x if residual is None else x + residual
    if all(p is None or p.dtype == x.dtype for p in (weight, bias)):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return scaled(unit(x, eps, True)[0], weight, bias, x.dtype)


def rms_reference(
    x: Tensor, weight: Tensor | None = None, *, residual: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Return `rms_norm` in plain torch."""
    x = x if residual is None else x + residual
    return scaled(unit(x, eps, False)[0], weight, None, x.dtype)


def _normalize(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, *, centered: bool,
    invertible: bool, returns_sum: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the norm of x or of the sum, and that, which has a gradient only with `returns_sum`."""
    check(x, residual, weight, bias, eps)
    if runs_triton("layer_norm", x) if centered else runs_triton("rms_norm", x):
        return NormFunction.apply(x, residual, weight, bias, eps, centered, invertible, returns_sum)[:2]
    total = x if residual is None else x + residual
    has_one_dtype = all(p is None or p.dtype == x.dtype for p in (weight, bias))
    if invertible or not has_one_dtype or not (centered or x.is_cuda):  # torch's RMS norm is fused on a GPU alone
        return Formulas.apply(total, weight, bias, eps, centered, invertible)[0], total
    if centered:
        return F.layer_norm(total, x.shape[-1:], weight, bias, eps), total
    return F.rms_norm(total, x.shape[-1:], weight, eps), total


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: Tensor | None = None,
    eps: float = 1e-5, invertible: bool = False,
) -> Tensor:
    """Return x, or x + residual, normalised over its last dim, times weight, plus bias.

    Args:
        x: (..., N) float32, float16 or bfloat16 (float64 by the reference). The output has its shape and dtype.
        weight: (N,) of any floating dtype; its gradient has that dtype and is summed in float32.
        bias: as weight.
        residual: as x; the sum is not returned (`add_layer_norm` does).
        eps: added to the variance.
        invertible: save the output in place of the input, from which backward recovers the input. This saves
            memory where the next operation saves the output anyway, at a cost in accuracy: x_hat has the rounding of
            y, magnified by |y / weight| where the weight is small beside the bias. Where a weight is 0 its x_hat is
            lost and taken as 0: that weight then has gradient 0, and its column of x's gradient lacks one term;
            other columns are exact.

    Raises `KernelError` for any other dtype, and where shapes or devices do not fit.
    """
    return _normalize(x, residual, weight, bias, eps, centered=True, invertible=invertible)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5,
    invertible: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return `layer_norm(x, weight, bias, residual=residual)` and the sum x + residual.

    Arguments and errors are those of `layer_norm`. The gradient with respect to the sum is added in the same backward
    pass.
    """
    return _normalize(
        x, residual, weight, bias, eps, centered=True, invertible=invertible, returns_sum=True
    )


def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, residual: Tensor | None = None, eps: float = 1e-6,
    invertible: bool = False,
) -> Tensor:
    """Return x, or x + residual, over the root of the mean square of its last dim, times weight.

    Args:
        x: (..., N) float32, float16 or bfloat16 (float64 by the reference). The output has its shape and dtype.
        weight: (N,) of any floating dtype; its gradient has that dtype and is summed in float32.
        residual: as x; the sum is not returned (`add_rms_norm` does).
        eps: added to the mean square.
        invertible: save the output in place of the input, from which backward recovers the input. This saves
            memory where the next operation saves the output anyway, at a cost in accuracy: x_hat has the rounding of
            y. Where a weight is 0 its x_hat is lost and taken as 0: that weight then has gradient 0, and its column
            of x's gradient lacks one term; other columns are exact.

    Raises `KernelError` for any other dtype, and where shapes or devices do not fit.
    """
    return _normalize(x, residual, weight, None, eps, centered=False, invertible=invertible)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, invertible: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm(x, weight, residual=residual)` and the sum x + residual.

    Arguments and errors are those of `rms_norm`. The gradient with respect to the sum is added in the same backward
    pass.
    """
    return _normalize(
        x, residual, weight, None, eps, centered=False, invertible=invertible, returns_sum=True
    )
