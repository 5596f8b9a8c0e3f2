"""Products of matrices in float8: y = x W^T, its gradients by x and by W, each of two operands cast to 8 bits.

A tensor t is cast with a scale s = max(dtype) / max |t|: q = clamp(t s) in e4m3 (3 bits of mantissa, up to 448) or e5m2
(2 bits, up to 57344), and stands for q / s. Of the three products

    y  = x  W^T        (T, N) = (T, K) (K, N)
    dx = dy W          (T, K) = (T, N) (N, K)
    dW = dy^T x        (N, K) = (N, T) (T, K)

`tensorwise` has one scale a tensor, and dy in e5m2; `rowwise` a power of two for each row of the left and each column
of the right operand, and all in e4m3. Where no GPU multiplies 8 bits, operands are cast back and multiplied in float32.

Source: Micikevicius et al. 2022, arXiv:2209.05433; torchao 0.18's `torchao.float8` with `emulate=True`, whose bits
these are on a CPU.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Recipe = Literal["tensorwise", "rowwise"]
RECIPES: tuple[Recipe, ...] = get_args(Recipe)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-12  # of a largest number, below which a scale would be no float32
MULTIPLE = 16  # of the sizes that a GPU multiplies


def linear(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    """Return x W^T in the dtype of x, x (..., K), W (N, K), products of float8 here and in backward.

    Under autocast x is cast as it would be for `torch.nn.functional.linear`.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    if not x.numel():
        return F.linear(x, weight.to(x.dtype))
    rows: Any = _Linear.apply(x, weight, recipe)
    return rows


class _Linear(torch.autograd.Function):
    """The three products; kept for backward are x and W as they came."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        left, right = cast(x, E4M3, recipe, -1), cast(weight.t(), E4M3, recipe, 0)
        left = (left[0].reshape(-1, x.shape[-1]), left[1] if recipe == "tensorwise" else left[1].reshape(-1, 1))
        return product(left, right, x.dtype, fast=True).reshape(*x.shape[:-1], -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Recipe], output: Tensor) -> None:
        x, weight, ctx.recipe = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        recipe, by_x, by_weight = ctx.recipe, None, None
        rows, dtype = grad.reshape(-1, grad.shape[-1]), E5M2 if ctx.recipe == "tensorwise" else E4M3
        if ctx.needs_input_grad[0]:
            q, scale = cast(weight.t(), E4M3, recipe, -1)
            by_x = product(cast(rows, dtype, recipe, -1), (q.t(), _turned(scale)), grad.dtype).reshape(x.shape)
        if ctx.needs_input_grad[1]:
            q, scale = cast(rows, dtype, recipe, 0)
            right = cast(x.reshape(-1, x.shape[-1]), E4M3, recipe, 0)
            by_weight = product((q.t(), _turned(scale)), right, grad.dtype)
        return by_x, by_weight, None


def cast(x: Tensor, dtype: torch.dtype, recipe: Recipe, dim: int) -> tuple[Tensor, Tensor]:
    """Return x in float8, and its scale, float32: () of a tensor, or along `dim`, which is 1 in it."""
    largest = x.abs().max() if recipe == "tensorwise" else x.abs().amax(dim, keepdim=True)
    most = torch.finfo(dtype).max
    scale = (most / largest.to(torch.float64).clamp(min=LEAST)).to(torch.float32)
    if recipe == "rowwise":
        scale = scale.log2().floor().exp2()
    return (x.to(torch.float32) * scale).clamp(-most, most).to(dtype), scale


def _turned(scale: Tensor) -> Tensor:
    return scale.t() if scale.dim() else scale


def product(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """Return the product of two cast matrices, each with its scale, in a dtype; `fast` where a GPU may sum in less."""
    (a, a_scale), (b, b_scale) = left, right
    if a.is_cuda and torch.cuda.get_device_capability(a.device) >= (8, 9):
        return multiplied(left, right, dtype, fast=fast)
    if torch.is_autocast_enabled(a.device.type):
        with torch.autocast(a.device.type, enabled=False):
            return product(left, right, dtype)
    return torch.mm(a.float() / a_scale, b.float() / b_scale).to(dtype)


def multiplied(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """Return the product by `torch._scaled_mm`, sizes that are no multiples of 16 filled up with zeros.

    Scales of rows are multiplied by afterwards unless it is `fast`, since the kernel that takes them is slow then.
    """
    (a, a_scale), (b, b_scale) = left, right
    (m, k), n = a.shape, b.shape[1]
    more_k, more_n = -k % MULTIPLE, -n % MULTIPLE
    a = _filled(a, 0, more_k)
    b = _filled(b.t(), more_n, more_k).t()  # its columns one after another
    scales, after = (a_scale.reciprocal(), b_scale.reciprocal()), None
    rowwise = a_scale.dim() > 0
    if rowwise and fast:
        scales = scales[0].contiguous(), F.pad(scales[1], (0, more_n), value=1.0).contiguous()
    elif rowwise:
        after, unit = scales[0] * scales[1], torch.ones((), device=a.device)
        scales = unit, unit
    low = torch.bfloat16 if rowwise and fast and dtype is not torch.bfloat16 else dtype  # all that it returns then
    out = torch._scaled_mm(a, b, scale_a=scales[0], scale_b=scales[1], out_dtype=low, use_fast_accum=fast)  # pyright: ignore[reportPrivateUsage]
    out = out[:m, :n].to(dtype)
    return out if after is None else (out * after).to(dtype)


def _filled(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return a contiguous matrix with more rows and columns of zeros; through bytes, since float8 has no padding."""
    return (
        F.pad(x.contiguous().view(torch.uint8), (0, columns, 0, rows)).view(x.dtype)
        if rows or columns
        else x.contiguous()
    )
