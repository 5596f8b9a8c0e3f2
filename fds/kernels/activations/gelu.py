"""GELU of a sum with a bias, in one pass.

    y = gelu(z)        z = x + bias        x, z, y (..., N), bias (N,)
    "tanh":  gelu(z) = z * sigmoid(2 * u)        u = sqrt(2 / pi) * (z + 0.044715 * z^3)
    "none":  gelu(z) = z * (1 + erf(z / sqrt(2))) / 2

With s = sigmoid(2 * u), P the standard normal distribution function, dy the gradient of y::

    dx = dy * gelu'(z)        dbias = sum of dx over all but the last dimension, in float32, in a fixed order
    "tanh":  gelu'(z) = s + z * s * (1 - s) * 2 * sqrt(2 / pi) * (1 + 3 * 0.044715 * z^2)
    "none":  gelu'(z) = P(z) + z * exp(-z^2 / 2) / sqrt(2 * pi)

Moves: forward reads 1 tensor and writes 2 (y and the derivative), or 1 with `recompute`; backward reads 2, writes 1.
Saves: the derivative, as large as x, in place of x; with `recompute` the inputs x and bias.
Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fds.errors import KernelError
from fds.kernels import arguments, tiles
from fds.kernels.activations import gelu_tail
from fds.kernels.choice import runs_triton
from fds.kernels.first_order import Function, first_order
from fds.kernels.language import cdiv, jit, on, tl
from fds.kernels.operators import operator

APPROXIMATE = ("tanh", "none")  # as in torch.nn.functional.gelu


def reference(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    """Return the same in plain torch, which saves one tensor for backward: x + bias."""
    return F.gelu(x if bias is None else x + bias, approximate=approximate)


# By bytes per element: each thread has two to four vectors of 16 bytes per tensor in flight, one per line, so that it
# holds whole columns of its tile and sums them in registers. 16 elements take 32 to 64 registers, so that a
# multiprocessor holds 1024 to 2048 threads; 32 took up to 166. Derived from the compiled kernels, not measured.
LAUNCH = {
    2: {"ELEMENTS": 2048, "COLUMNS": 1024, "num_warps": 4},
    4: {"ELEMENTS": 2048, "COLUMNS": 512, "num_warps": 4},
}


@jit(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr, bias_ptr, y_ptr, derivative_ptr, rows, columns, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    across = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    at = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    z = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    a, probability, density = gelu_tail.tail(z, TANH)
    tl.store(y_ptr + at, gelu_tail.gelu(z, a, probability).to(y_ptr.dtype.element_ty), mask=inside)
    if derivative_ptr is not None:
        slope = gelu_tail.derivative(z, a, probability, density)
        tl.store(derivative_ptr + at, slope.to(derivative_ptr.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["rows", "rows_each"])
def _backward_kernel(
    dy_ptr, x_ptr, bias_ptr, derivative_ptr, dx_ptr, y_ptr, sums_ptr, rows, columns, rows_each,
    TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Take `rows_each` rows and COLUMNS columns. Either x or the derivative is given; y and sums are optional."""
    across = tl.cdiv(columns, COLUMNS)
    group = tl.program_id(0) // across
    column = (tl.program_id(0) % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < columns
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=here, other=0.0).to(tl.float32)[None, :]
    for first in range(0, rows_each, ROWS):
        row = group.to(tl.int64) * rows_each + first + tl.arange(0, ROWS)
        at = row[:, None] * columns + column[None, :]
        inside = (row < rows)[:, None] & here[None, :]
        dx = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if derivative_ptr is not None:
            dx *= tl.load(derivative_ptr + at, mask=inside, other=0.0).to(tl.float32)
        else:
            z = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
            if bias_ptr is not None:
                z += bias
            a, probability, density = gelu_tail.tail(z, TANH)
            dx *= gelu_tail.derivative(z, a, probability, density)
            if y_ptr is not None:
                tl.store(y_ptr + at, gelu_tail.gelu(z, a, probability).to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        sums += dx
    if sums_ptr is not None:
        tl.store(sums_ptr + group.to(tl.int64) * columns + column, tl.sum(sums, axis=0), mask=here)


def _launch_forward(x: Tensor, bias: Tensor | None, approximate: str, derivative: Tensor | None) -> Tensor:
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    y, (meta, rows, columns) = torch.empty_like(x), _cut(x, bias is not None)
    with on(x):
        _forward_kernel[tiles.grid(meta, rows, columns)](
            x, bias, y, derivative, rows, columns, TANH=approximate == "tanh", **meta
        )
    return y


def _launch_backward(
    dy: Tensor, x: Tensor | None, bias: Tensor | None, derivative: Tensor | None, approximate: str, *,
    sums: bool, y: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return dx and its sums over rows in float32, (N,), or (0,) without `sums`."""
    dy = dy.contiguous()
    dx, (meta, rows, columns) = torch.empty_like(dy), _cut(dy, sums)
    each = tiles.rows_each(meta, dy, rows, columns) if sums else meta["ROWS"]
    groups = cdiv(rows, each)
    partial = dy.new_empty(groups, columns, dtype=torch.float32) if sums else None
    with on(dy):
        _backward_kernel[(groups * cdiv(columns, meta["COLUMNS"]),)](
            dy, x, bias, derivative, dx, y, partial, rows, columns, each, TANH=approximate == "tanh", **meta
        )
    return dx, dy.new_empty(0, dtype=torch.float32) if partial is None else partial.sum(0)


def _cut(x: Tensor, has_bias: bool) -> tuple[dict[str, int], int, int]:
    """Return a tile, and the number of rows and columns; without a bias x is one long row."""
    row = LAUNCH[x.element_size()]
    if has_bias:
        rows, columns = tiles.extent(x)
        return tiles.tile(row, columns), rows, columns
    return {"ROWS": 1, "COLUMNS": row["ELEMENTS"], "num_warps": row["num_warps"]}, 1, x.numel()


@operator("bias_gelu")
def forward(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Return gelu(x + bias) alone."""
    return _launch_forward(x, bias, approximate, None)


@operator("bias_gelu_and_derivative")
def _forward_and_derivative(x: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    derivative = tiles.like(x)
    return _launch_forward(x, bias, approximate, derivative), derivative


@operator("bias_gelu_multiply")
def _multiply(dy: Tensor, derivative: Tensor, has_bias: bool) -> tuple[Tensor, Tensor]:
    return _launch_backward(dy, None, None, derivative.contiguous(), "tanh", sums=has_bias, y=None)


@operator("bias_gelu_backward")
def backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, approximate: str, with_y: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dbias in float32 and y, the last two (0,) without a bias and without `with_y`."""
    y = tiles.like(x) if with_y else None
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    dx, dbias = _launch_backward(dy, x, bias, None, approximate, sums=bias is not None, y=y)
    return dx, dbias, x.new_empty(0) if y is None else y


@forward.register_fake
def _(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    return tiles.like(x)


@_forward_and_derivative.register_fake
def _(x: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    return tiles.like(x), tiles.like(x)


@_multiply.register_fake
def _(dy: Tensor, derivative: Tensor, has_bias: bool) -> tuple[Tensor, Tensor]:
    sums = dy.new_empty(dy.shape[-1] if has_bias else 0, dtype=torch.float32)
    return tiles.like(dy), sums


@backward.register_fake
def _(dy: Tensor, x: Tensor, bias: Tensor | None, approximate: str, with_y: bool) -> tuple[Tensor, Tensor, Tensor]:
    sums = dy.new_empty(0 if bias is None else dy.shape[-1], dtype=torch.float32)
    return tiles.like(dy), sums, tiles.like(x) if with_y else x.new_empty(0)


class _Keep(Function):
    """Saves the derivative."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
        return _forward_and_derivative(x, bias, approximate)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(output[1])  # not marked non-differentiable: see first_order
        ctx.set_materialize_grads(False)  # or zeros as large as the derivative would be made
        ctx.bias_dtype = None if inputs[1] is None else inputs[1].dtype

    @staticmethod
    def backward(ctx, dy: Tensor | None, _) -> tuple[Tensor | None, Tensor | None, None]:
        if dy is None:
            return None, None, None
        dx, dbias = first_order(_multiply, dy, *ctx.saved_tensors, ctx.bias_dtype is not None)
        return dx, None if ctx.bias_dtype is None else dbias.to(ctx.bias_dtype), None


class _Recompute(Function):
    """Saves its inputs."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
        return forward(x, bias, approximate)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, bias, ctx.approximate = inputs
        ctx.save_for_backward(x, bias)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, bias = ctx.saved_tensors
        dx, dbias, _ = first_order(backward, dy, x, bias, ctx.approximate, False)
        return dx, None if bias is None else dbias.to(bias.dtype), None


class _RecomputeReference(_Recompute):
    """Saves its inputs, and runs in plain torch."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
        return reference(x, bias, approximate)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, bias = ctx.saved_tensors
        dx = torch.ops.aten.gelu_backward(dy, x if bias is None else x + bias, approximate=ctx.approximate)
        return dx, None if bias is None else dx.sum_to_size(bias.shape), None


def bias_gelu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh", recompute: bool = False) -> Tensor:
    """Return gelu(x + bias).

    Args:
        x: (..., N) float32, float16 or bfloat16 (float64 by the reference).
        bias: (N,) of x's dtype; under autocast it is cast to that.
        approximate: "tanh", or "none" for the exact function.
        recompute: save x and bias for backward, and not a further tensor as large as x in their place.

    Raises `KernelError` for any other dtype, shape or `approximate`, and where x and bias differ in dtype or device.
    """
    bias = check(x, bias, approximate)
    if not runs_triton("bias_gelu", x):
        return (_RecomputeReference.apply if recompute else reference)(x, bias, approximate)
    if recompute or not torch.is_grad_enabled():
        return _Recompute.apply(x, bias, approximate)
    return _Keep.apply(x, bias, approximate)[0]


def check(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor | None:
    """Return the bias, under autocast in the dtype of x. Raises `KernelError` for arguments that do not fit."""
    arguments.floating(x=x, bias=bias)
    arguments.has_rows(x=x)
    bias = arguments.under_autocast(x.dtype, bias)
    arguments.same_dtype(x=x, bias=bias)
    arguments.shape((x.shape[-1],), bias=bias)
    if approximate not in APPROXIMATE:
        raise KernelError("there is no such GELU", where="approximate", got=repr(approximate), want="'tanh' or 'none'")
    return bias
