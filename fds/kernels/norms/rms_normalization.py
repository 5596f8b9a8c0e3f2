"""RMS normalisation, optionally of a sum.

    y = x / sqrt(mean(x^2) + eps) * weight        x, y (..., N), weight (N,)

With a residual, x + residual takes the place of x, rounded to the dtype of x as by a separate addition. Gradients and
kernels: fds.kernels.norms.normalization.

Moves: forward reads 1 tensor (2 with a residual) and writes 1 (2 if the sum is returned or saved);
backward reads 2 (3 with a gradient of the sum) and writes 1. Rows beyond 8192 columns: see
normalization_backward_long.
Saves: x or the sum, 1 / sqrt(mean(x^2) + eps) in float32, and the weight. `invertible`: y in place of x or the sum.
Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fds.kernels.choice import runs_triton
from fds.kernels.norms.normalization import Formulas, NormFunction, check, scaled, unit


def reference(x: Tensor, weight: Tensor | None = None, *, residual: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Return the same in plain torch."""
    x = x if residual is None else x + residual
    return scaled(unit(x, eps, False)[0], weight, None, x.dtype)


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
    check(x, residual, weight, None, eps)
    if runs_triton("rms_norm", x):
        return NormFunction.apply(x, residual, weight, None, eps, False, invertible, False)[0]
    return _by_reference(x if residual is None else x + residual, weight, eps, invertible)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, invertible: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm(x, weight, residual=residual)` and the sum x + residual.

    Arguments and errors are those of `rms_norm`. The gradient with respect to the sum is added in the same backward
    pass.
    """
    check(x, residual, weight, None, eps)
    if runs_triton("rms_norm", x):
        return NormFunction.apply(x, residual, weight, None, eps, False, invertible, True)[:2]
    total = x + residual
    return _by_reference(total, weight, eps, invertible), total


def _by_reference(x: Tensor, weight: Tensor | None, eps: float, invertible: bool) -> Tensor:
    if x.is_cuda and not invertible and (weight is None or weight.dtype == x.dtype):
        return F.rms_norm(x, x.shape[-1:], weight, eps)  # fused on a GPU alone; it saves as little
    return Formulas.apply(x, weight, None, eps, False, invertible)[0]
