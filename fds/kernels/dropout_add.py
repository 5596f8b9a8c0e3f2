"""Dropout of a sum with a bias, added to the residual stream, in one pass; the mask is never stored.

    y = residual + keep * (x + bias) / (1 - p)        x, residual, y (..., N), bias (N,)
    keep[r, c] = fds.kernels.philox of (seed, offset, r, c), where r counts the rows of all leading dimensions

With dy the gradient of y::

    dx = keep * dy / (1 - p)        dresidual = dy
    dbias = sum of dx over all but the last dimension, in float32, in a fixed order

Moves: forward reads 2 tensors and writes 1; backward reads 1 and writes 1. Saves: the seed, 8 bytes.
Source: Srivastava et al. 2014, "Dropout", JMLR 15, section 10 (scaled when training); philox for the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fds.kernels import arguments, philox, tiles
from fds.kernels.choice import runs_triton
from fds.kernels.language import cdiv, jit, on, tl
from fds.kernels.operators import Function, first_order, operator


def reference(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float, offset: int
) -> Tensor:
    """Return the same in plain torch, which saves the mask for backward: a byte per element."""
    y = philox.dropout(x if bias is None else x + bias, seed, offset, p)
    return y if residual is None else residual + y


# By bytes per element: a tile holds two vectors of 16 bytes per thread and tensor, one per line. Fewer than in a kernel
# without a mask, whose words take 32 bits per element in registers. Derived, not measured.
LAUNCH = {
    2: {"ELEMENTS": 2048, "COLUMNS": 1024, "num_warps": 4},
    4: {"ELEMENTS": 2048, "COLUMNS": 512, "num_warps": 4},
}


@jit(do_not_specialize=["rows", "offset", "threshold"])
def _forward_kernel(
    x_ptr, bias_ptr, residual_ptr, y_ptr, seed_ptr, offset, threshold, scale, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    across = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = (tl.program_id(0) % across).to(tl.int64) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    at = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    y = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if seed_ptr is not None:
        y = tl.where(philox.keep(tl.load(seed_ptr), offset, row, first, threshold, COLUMNS), y * scale, 0.0)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["rows", "rows_each", "offset", "threshold"])
def _backward_kernel(
    dy_ptr, dx_ptr, sums_ptr, seed_ptr, offset, threshold, scale, rows, columns, rows_each,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Take `rows_each` rows and COLUMNS columns."""
    across = tl.cdiv(columns, COLUMNS)
    group = tl.program_id(0) // across
    first = (tl.program_id(0) % across).to(tl.int64) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    here = column < columns
    seed = tl.load(seed_ptr)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows_each, ROWS):
        row = group.to(tl.int64) * rows_each + start + tl.arange(0, ROWS)
        at = row[:, None] * columns + column[None, :]
        inside = (row < rows)[:, None] & here[None, :]
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dx = tl.where(philox.keep(seed, offset, row, first, threshold, COLUMNS), dy * scale, 0.0)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        sums += dx
    if sums_ptr is not None:
        tl.store(sums_ptr + group.to(tl.int64) * columns + column, tl.sum(sums, axis=0), mask=here)


@operator("bias_dropout_add", lambda x, *_: tiles.like(x))
def _forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float, offset: int
) -> Tensor:
    bias, residual = (None if each is None else each.contiguous() for each in (bias, residual))
    x, y, (rows, columns) = x.contiguous(), tiles.like(x), tiles.extent(x)
    meta = tiles.tile(LAUNCH[x.element_size()], columns)
    with on(x):
        _forward_kernel[tiles.grid(meta, rows, columns)](
            x, bias, residual, y, seed, offset, philox.threshold(p), 1 / (1 - p), rows, columns, **meta
        )
    return y


@operator("bias_dropout_add_backward", lambda dy, *rest: (tiles.like(dy), tiles.empty_sums(dy, rest[-1])))
def _backward(dy: Tensor, seed: Tensor, p: float, offset: int, has_bias: bool) -> tuple[Tensor, Tensor]:
    dy = dy.contiguous()
    dx, (rows, columns) = torch.empty_like(dy), tiles.extent(dy)
    meta = tiles.tile(LAUNCH[dy.element_size()], columns)
    each = tiles.rows_each(meta, dy, rows, columns) if has_bias else meta["ROWS"]
    groups = cdiv(rows, each)
    partial = dy.new_empty(groups, columns, dtype=torch.float32) if has_bias else None
    with on(dy):
        _backward_kernel[(groups * cdiv(columns, meta["COLUMNS"]),)](
            dy, dx, partial, seed, offset, philox.threshold(p), 1 / (1 - p), rows, columns, each, **meta
        )
    return dx, dy.new_empty(0, dtype=torch.float32) if partial is None else partial.sum(0)


class _DropoutAdd(Function):
    """The kernels; saves the seed."""

    @staticmethod
    def forward(
        x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float, offset: int
    ) -> Tensor:
        return _forward(x, bias, residual, seed, p, offset)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, bias, residual, seed, ctx.p, ctx.offset = inputs
        ctx.bias_dtype, ctx.has_residual = None if bias is None else bias.dtype, residual is not None
        ctx.save_for_backward(seed)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        (seed,) = ctx.saved_tensors
        dbias = None
        if seed is None:
            dx = dy
            dbias = None if ctx.bias_dtype is None else dy.sum_to_size(dy.shape[-1:])
        else:
            dx, sums = first_order(_backward, dy, seed, ctx.p, ctx.offset, ctx.bias_dtype is not None)
            dbias = None if ctx.bias_dtype is None else sums.to(ctx.bias_dtype)
        return dx, dbias, dy if ctx.has_residual else None, None, None, None


class _DropoutAddReference(_DropoutAdd):
    """The same in plain torch; saves the seed."""

    @staticmethod
    def forward(
        x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float, offset: int
    ) -> Tensor:
        # autograd would take an input that is returned unchanged for a view
        return reference(x, bias, residual, seed, p, offset) if _any(bias, residual, seed) else x.clone()

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        (seed,) = ctx.saved_tensors
        dx = philox.dropout(dy, seed, ctx.offset, ctx.p)
        dbias = None if ctx.bias_dtype is None else dx.sum_to_size(dx.shape[-1:])
        return dx, dbias, dy if ctx.has_residual else None, None, None, None


def _any(*parts: object) -> bool:
    return any(part is not None for part in parts)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, *,
    p: float, seed: int | Tensor | None = None, offset: int = 0,
) -> Tensor:
    """Return residual + dropout(x + bias), where a kept element is divided by 1 - p.

    Args:
        x: (..., N) float32, float16 or bfloat16 (float64 by the reference).
        bias: (N,) of x's dtype.
        residual: as x.
        p: the probability of dropping an element, in [0, 1).
        seed: int, or () int64 tensor on x's device. The same (seed, offset) drops the same elements of a shape in
            the kernel and in the reference. Not needed where p is 0.
        offset: index of the mask among those of one seed.

    Under autocast x and residual are promoted to one dtype, and bias is cast to it. Raises `KernelError` for any
    other dtype, shape, probability or seed, and where dtypes or devices differ.
    """
    arguments.floating(x=x, bias=bias, residual=residual)
    arguments.has_rows(x=x)
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    x, bias, residual = (arguments.under_autocast(dtype, each) for each in (x, bias, residual))
    arguments.alike(x=x, residual=residual)
    arguments.same_dtype(x=x, bias=bias)
    arguments.shape((x.shape[-1],), bias=bias)
    arguments.ratio("p", p)
    key = philox.as_seed(seed, x.device) if p else None
    function = _DropoutAdd if runs_triton("bias_dropout_add", x) else _DropoutAddReference
    return function.apply(x, bias, residual, key, p, offset)


def dropout(x: Tensor, *, p: float, seed: int | Tensor | None = None, offset: int = 0) -> Tensor:
    """Return x, each element dropped with probability p and the others divided by 1 - p.

    `bias_dropout_add` without bias and residual, with the same arguments and errors.
    """
    return bias_dropout_add(x, None, None, p=p, seed=seed, offset=offset)
