"""GELU of a sum with a bias, in one pass, and the linear layer after it, which does not save the activation.

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

`bias_gelu_linear`, the second half of a feed-forward layer::

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

from fds.errors import KernelError
from fds.kernels import arguments, tiles
from fds.kernels.choice import runs_triton
from fds.kernels.language import cdiv, jit, on, tl
from fds.kernels.operators import Function, first_order, operator

# The tail of a distribution is small and positive on both sides: GELU and its derivative from it do not cancel.
# With a = |z|, T(a) the probability beyond a, and t(a) = -T'(a) the density there::
#
#     gelu(z) = max(z, 0) - a * T(a)        gelu'(z) = g where z <= 0, 1 - g elsewhere        g = T(a) - a * t(a)
#     "tanh":  T(a) = e / (1 + e)        e = exp(-2 * u(a))        t(a) = T(a) * (1 - T(a)) * 2 * u'(a)
#     "none":  T(a) = exp(-a^2 / 2) * R(a)        t(a) = exp(-a^2 / 2) / sqrt(2 * pi)
#
# R(a) = erfcx(a / sqrt(2)) / 2 falls from 1/2 as 1 / a does, and so does s = (1 + 0.7 * a + 0.16 * a^2)^(-1/2): a
# polynomial of degree 7 in s, without a constant, is R to 1.5e-7 of it everywhere (equal ripples: Remez's exchange on
# [0, 14], beyond which T is 0 in float32; 0.7 and 0.16 are the best of a grid). No cancellation: a negative z keeps its
# digits, where 1 + erf(z / sqrt(2)) loses them.
# With v = 2^-24 and x the exponent, a^2 / 2 or 2 * u(a), T is right to (20 + 3 * x) * v of it: 2.5 by the fit, 4 by the
# square root and 4 by exp2 as a GPU has them, 3 * x by x itself, whose rounding e^-x magnifies, the rest by products.
# On a GPU exp2 and 1 / sqrt take one instruction each, exp five, a division eight, erf about 25.
# Source: Abramowitz and Stegun 1964, section 7.1.26, where s is 1 / (1 + 0.33 * a) and 5 terms leave 1.5e-7 of 1.


@jit
def _end(z, END: tl.constexpr):
    """Return |z| up to END, beyond which T is 0; NaN where z is."""
    return tl.minimum(tl.abs(z), END, tl.PropagateNan.ALL)


@jit
def _tail(z, TANH: tl.constexpr):
    """Return a, T(a) and t(a) of float32."""
    if TANH:
        a = _end(z, 12.0)
        square = a * a
        e = tl.exp2(-a * (2.302208198 + 0.1029432397 * square))  # 2 * sqrt(2 / pi) * log2(e), and 0.044715 of it
        root = tl.rsqrt(1 + e)
        probability = e * root * root
        density = probability * (1 - probability) * (1.5957691216057308 + 0.2140644489 * square)
    else:
        a = _end(z, 16.0)
        e = tl.exp2(-0.7213475204444817 * a * a)
        s = tl.rsqrt(1 + a * (0.7 + 0.16 * a))
        r = 0.05440109196 + s * (-0.06331123225 + s * 0.02883656577)
        r = 0.1595799035 + s * (0.1395250395 + s * (0.1166688719 + s * (0.06429978876 + s * r)))
        probability = e * (s * r)
        density = e * 0.3989422804014327
    return a, probability, density


@jit
def _gelu(z, a, probability):
    """Return the GELU of z, given two results of `tail`."""
    return tl.maximum(z, 0.0) - a * probability


@jit
def _derivative(z, a, probability, density):
    g = probability - a * density
    return tl.where(z > 0, 1 - g, g)


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
    a, probability, density = _tail(z, TANH)
    tl.store(y_ptr + at, _gelu(z, a, probability).to(y_ptr.dtype.element_ty), mask=inside)
    if derivative_ptr is not None:
        slope = _derivative(z, a, probability, density)
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
            a, probability, density = _tail(z, TANH)
            dx *= _derivative(z, a, probability, density)
            if y_ptr is not None:
                tl.store(y_ptr + at, _gelu(z, a, probability).to(y_ptr.dtype.element_ty), mask=inside)
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


@operator("bias_gelu", lambda x, *_: tiles.like(x))
def forward(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Return gelu(x + bias) alone."""
    return _launch_forward(x, bias, approximate, None)


@operator("bias_gelu_and_derivative", lambda x, *_: (tiles.like(x), tiles.like(x)))
def _forward_and_derivative(x: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    derivative = tiles.like(x)
    return _launch_forward(x, bias, approximate, derivative), derivative


@operator("bias_gelu_multiply", lambda dy, derivative, has_bias: (tiles.like(dy), tiles.empty_sums(dy, has_bias)))
def _multiply(dy: Tensor, derivative: Tensor, has_bias: bool) -> tuple[Tensor, Tensor]:
    return _launch_backward(dy, None, None, derivative.contiguous(), "tanh", sums=has_bias, y=None)


@operator(
    "bias_gelu_backward",
    lambda dy, x, bias, approximate, with_y: (
        tiles.like(dy), tiles.empty_sums(dy, bias is not None), tiles.like(x) if with_y else x.new_empty(0)
    ),
)
def backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, approximate: str, with_y: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dbias in float32 and y, the last two (0,) without a bias and without `with_y`."""
    y = tiles.like(x) if with_y else None
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    dx, dbias = _launch_backward(dy, x, bias, None, approximate, sums=bias is not None, y=y)
    return dx, dbias, x.new_empty(0) if y is None else y


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


def linear_reference(
    x: Tensor, bias: Tensor | None, weight: Tensor, linear_bias: Tensor | None, approximate: str = "tanh"
) -> Tensor:
    """Return the same in plain torch, which saves x + bias and the activation."""
    return F.linear(reference(x, bias, approximate), weight, linear_bias)


class _Linear(Function):
    """Saves its inputs; the products are torch's."""

    @staticmethod
    def forward(
        x: Tensor, bias: Tensor | None, weight: Tensor, linear_bias: Tensor | None, approximate: str
    ) -> Tensor:
        return F.linear(forward(x, bias, approximate), weight, linear_bias)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, bias, weight, linear_bias, ctx.approximate = inputs
        ctx.save_for_backward(x, bias, weight)
        ctx.has_linear_bias = linear_bias is not None

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, None]:
        x, bias, weight = ctx.saved_tensors
        wants_weight = ctx.needs_input_grad[2]
        dx, dbias, a = first_order(backward, dy @ weight, x, bias, ctx.approximate, wants_weight)
        dbias = None if bias is None else dbias.to(bias.dtype)
        return dx, dbias, _product(dy, a) if wants_weight else None, _sum(dy) if ctx.has_linear_bias else None, None


class _LinearReference(_Linear):
    """Saves its inputs, and runs in plain torch."""

    @staticmethod
    def forward(
        x: Tensor, bias: Tensor | None, weight: Tensor, linear_bias: Tensor | None, approximate: str
    ) -> Tensor:
        return linear_reference(x, bias, weight, linear_bias, approximate)

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
    bias = check(x, bias, approximate)
    arguments.same_dtype(x=x, weight=weight, linear_bias=linear_bias)
    arguments.shape((None, x.shape[-1]), weight=weight)
    arguments.shape((weight.shape[0],), linear_bias=linear_bias)
    function = _Linear if runs_triton("bias_gelu_linear", x) else _LinearReference
    return function.apply(x, bias, weight, linear_bias, approximate)
