"""Layer normalisation, optionally of a sum.

    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias        x, y (..., N), weight, bias (N,)

With a residual, x + residual takes the place of x, rounded to the dtype of x as by a separate addition. Gradients and
kernels: fds.kernels.norms.normalization.

Moves: forward reads 1 tensor (2 with a residual) and writes 1 (2 if the sum is returned or saved);
backward reads 2 (3 with a gradient of the sum) and writes 1. Rows beyond 8192 columns: see
normalization_backward_long.
Saves: x or the sum, the mean and 1 / sqrt(var + eps) in float32, and the weight. `invertible`: y in place of x or the
sum, no mean, and the bias.
Source: Ba et al. 2016, arXiv:1607.06450, section 3.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fds.kernels.choice import runs_triton
from fds.kernels.norms.normalization import Formulas, NormFunction, check, scaled, unit


def reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return the same in plain torch."""
    x = x if residual is None else x + residual
    if all(p is None or p.dtype == x.dtype for p in (weight, bias)):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return scaled(unit(x, eps, True)[0], weight, bias, x.dtype)


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
    check(x, residual, weight, bias, eps)
    if runs_triton("layer_norm", x):
        return NormFunction.apply(x, residual, weight, bias, eps, True, invertible, False)[0]
    total = x if residual is None else x + residual
    return _by_reference(total, weight, bias, eps, invertible)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5,
    invertible: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return `layer_norm(x, weight, bias, residual=residual)` and the sum x + residual.

    Arguments and errors are those of `layer_norm`. The gradient with respect to the sum is added in the same backward
    pass.
    """
    check(x, residual, weight, bias, eps)
    if runs_triton("layer_norm", x):
        return NormFunction.apply(x, residual, weight, bias, eps, True, invertible, True)[:2]
    total = x + residual
    return _by_reference(total, weight, bias, eps, invertible), total


def _by_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, invertible: bool) -> Tensor:
    if invertible or any(p is not None and p.dtype != x.dtype for p in (weight, bias)):
        return Formulas.apply(x, weight, bias, eps, True, invertible)[0]
    return reference(x, weight, bias, eps=eps)
