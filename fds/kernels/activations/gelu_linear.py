"""The second half of a feed-forward layer, which does not save the activation between GELU and product.

    y = a @ weight^T + linear_bias        a = gelu(x + bias)        x (..., N), weight (M, N), y (..., M)

With dy the gradient of y, z = x + bias, and sums over all but the last dimension::

    da = dy @ weight        dx = da * gelu'(z)        dbias = sum of dx
    dweight = dy^T @ a, with a recomputed        dlinear_bias = sum of dy

Moves, beside the products: forward reads x and writes a; backward reads x and da, and writes dx and a.
Saves: the inputs x, bias and weight. Saving a as well would take as many bytes again as x.
Source: Chen et al. 2016, arXiv:1604.06174, section 4 (recomputing what is cheap); Hendrycks and Gimpel 2016,
arXiv:1606.08415, section 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fds.kernels import arguments
from fds.kernels.activations import gelu
from fds.kernels.choice import runs_triton
from fds.kernels.first_order import Function, first_order


def reference(
    x: Tensor, bias: Tensor | None, weight: Tensor, linear_bias: Tensor | None, approximate: str = "tanh"
) -> Tensor:
    """Return the same in plain torch, which saves x + bias and the activation."""
    return F.linear(gelu.reference(x, bias, approximate), weight, linear_bias)


class _Linear(Function):
    """Saves its inputs; the products are torch's."""

    @staticmethod
    def forward(
        x: Tensor, bias: Tensor | None, weight: Tensor, linear_bias: Tensor | None, approximate: str
    ) -> Tensor:
        return F.linear(gelu.forward(x, bias, approximate), weight, linear_bias)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, bias, weight, linear_bias, ctx.approximate = inputs
        ctx.save_for_backward(x, bias, weight)
        ctx.has_linear_bias = linear_bias is not None

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, None]:
        x, bias, weight = ctx.saved_tensors
        wants_weight = ctx.needs_input_grad[2]
        dx, dbias, a = first_order(gelu.backward, dy @ weight, x, bias, ctx.approximate, wants_weight)
        dbias = None if bias is None else dbias.to(bias.dtype)
        return dx, dbias, _product(dy, a) if wants_weight else None, _sum(dy) if ctx.has_linear_bias else None, None


class _LinearReference(_Linear):
    """Saves its inputs, and runs in plain torch."""

    @staticmethod
    def forward(
        x: Tensor, bias: Tensor | None, weight: Tensor, linear_bias: Tensor | None, approximate: str
    ) -> Tensor:
        return reference(x, bias, weight, linear_bias, approximate)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, None]:
        x, bias, weight = ctx.saved_tensors
        z = x if bias is None else x + bias
        dx = torch.ops.aten.gelu_backward(dy @ weight, z, approximate=ctx.approximate)
        dweight = _product(dy, F.gelu(z, approximate=ctx.approximate)) if ctx.needs_input_grad[2] else None
        return dx, None if bias is None else _sum(dx), dweight, _sum(dy) if ctx.has_linear_bias else None, None


def _product(dy: Tensor, a: Tensor) -> Tensor:
    """Return dy^T @ a, over all rows: (M, N)."""
    return dy.reshape(-1, dy.shape[-1]).t() @ a.reshape(-1, a.shape[-1])


def _sum(x: Tensor) -> Tensor:
    """Return the sum over all but the last dimension."""
    return x.sum_to_size(x.shape[-1:])


def bias_gelu_linear(
    x: Tensor, bias: Tensor | None, weight: Tensor, linear_bias: Tensor | None = None, *, approximate: str = "tanh"
) -> Tensor:
    """Return linear(gelu(x + bias), weight, linear_bias), and save only the inputs for backward.

    Args:
        x: (..., N) float32, float16 or bfloat16 (float64 by the reference).
        bias: (N,), added before GELU.
        weight: (M, N), as torch.nn.Linear holds it.
        linear_bias: (M,), added to the product.
        approximate: GELU's, "tanh" or "none".

    All of one dtype; under autocast all are cast to autocast's, as torch.nn.functional.linear casts them. Raises
    `KernelError` where dtypes or devices differ, and for any other shape or `approximate`.
    """
    arguments.floating(x=x, bias=bias, weight=weight, linear_bias=linear_bias)
    x, bias, weight, linear_bias = arguments.as_products_cast(x, bias, weight, linear_bias)
    bias = gelu.check(x, bias, approximate)
    arguments.same_dtype(x=x, weight=weight, linear_bias=linear_bias)
    arguments.shape((None, x.shape[-1]), weight=weight)
    arguments.shape((weight.shape[0],), linear_bias=linear_bias)
    function = _Linear if runs_triton("bias_gelu_linear", x) else _LinearReference
    return function.apply(x, bias, weight, linear_bias, approximate)
