"""Rotary position embedding: pairs of elements of a head, rotated by angles of their position.

    (y_a, y_b) = (x_a * cos - x_b * sin, x_b * cos + x_a * sin)        x, y (..., T, D), cos, sin (T, R / 2)

The first R <= D elements of a head are R / 2 pairs: (a, b) = (i, i + R / 2), or (2i, 2i + 1) if `interleaved`; the
others are copied. The gradient is the rotation in the opposite direction::

    dx = rotary(dy) with -sin

Moves: forward and backward each read 1 and write 1 tensor, and the tables once for four heads. Saves: its inputs cos
and sin.
Sources: 1. Su et al. 2021, arXiv:2104.09864, section 3.4.2: adjacent pairs. 2. Black et al. 2022,
arXiv:2204.06745, section 2.1.1: halves of a head, and a part of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fds.errors import KernelError
from fds.kernels import arguments
from fds.kernels.choice import runs_triton
from fds.kernels.language import cdiv, jit, next_power_of_2, on, tl
from fds.kernels.operators import Function, operator


def reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return the same in plain torch."""
    half = cos.shape[-1]
    turned = x[..., : 2 * half].unflatten(-1, (half, 2) if interleaved else (2, half))
    a, b = turned.unbind(-1 if interleaved else -2)
    pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1 if interleaved else -2)
    return torch.cat([pairs.flatten(-2).to(x.dtype), x[..., 2 * half :]], dim=-1)


# By bytes per element: each thread loads 16 bytes from either half of a tile's pairs. The HEADS that share one load of
# the tables are in flight together. Derived, not measured.
LAUNCH = {
    2: {"PAIRS": 1024, "COLUMNS": 256, "HEADS": 4, "num_warps": 4},
    4: {"PAIRS": 512, "COLUMNS": 256, "HEADS": 4, "num_warps": 4},
}


STRIDES = [f"{tensor}_{dim}" for tensor in ("x", "y", "cos", "sin") for dim in ("batch", "head", "row")]


@jit(do_not_specialize=["heads", "rows", "halves", "rests", *STRIDES])
def _kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, heads, rows, halves, rests,
    x_batch, x_head, x_row, y_batch, y_head, y_row, cos_batch, cos_head, cos_row, sin_batch, sin_head, sin_row,
    BACK: tl.constexpr, INTERLEAVED: tl.constexpr, SHARED: tl.constexpr, PART: tl.constexpr,
    UNIT: tl.constexpr, TABLE_UNIT: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Rotate ROWS positions by COLUMNS pairs of HEADS heads; with PART, copy as many of the other elements.

    Sizes and strides of x and y come in units of UNIT elements, strides of the tables in units of TABLE_UNIT: the
    compiler sees the greatest vectors that are aligned.
    """
    half, rest = halves * UNIT, rests * UNIT
    across = tl.cdiv(tl.maximum(2 * half, rest), 2 * COLUMNS)
    first = (tl.program_id(0) % across) * COLUMNS
    left = tl.program_id(0) // across
    row = (left % tl.cdiv(rows, ROWS)) * ROWS + tl.arange(0, ROWS)
    left = left // tl.cdiv(rows, ROWS)
    batch = (left // tl.cdiv(heads, HEADS)).to(tl.int64)
    pair, wide = first + tl.arange(0, COLUMNS), 2 * first + tl.arange(0, 2 * COLUMNS)
    here, row_64 = (row < rows)[:, None], row.to(tl.int64)[:, None]
    cos_at = cos_ptr + (batch * cos_batch + row_64 * cos_row) * TABLE_UNIT + pair[None, :]
    sin_at = sin_ptr + (batch * sin_batch + row_64 * sin_row) * TABLE_UNIT + pair[None, :]
    for i in tl.static_range(HEADS):
        head = ((left % tl.cdiv(heads, HEADS)) * HEADS + i).to(tl.int64)
        inside = tl.where(head < heads, here, False)
        turned = inside & (pair < half)[None, :]
        x_at = x_ptr + (batch * x_batch + head * x_head + row_64 * x_row) * UNIT
        y_at = y_ptr + (batch * y_batch + head * y_head + row_64 * y_row) * UNIT
        if i == 0 or not SHARED:
            of_head = here & (pair < half)[None, :] if SHARED else turned
            cos = tl.load(cos_at + head * cos_head * TABLE_UNIT, mask=of_head, other=0.0).to(tl.float32)
            sin = tl.load(sin_at + head * sin_head * TABLE_UNIT, mask=of_head, other=0.0).to(tl.float32)
            if BACK:
                sin = -sin
        if INTERLEAVED:
            both = inside & (wide < 2 * half)[None, :]
            x = tl.load(x_at + wide[None, :], mask=both, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(x, (ROWS, COLUMNS, 2)))
            y = tl.interleave(a * cos - b * sin, b * cos + a * sin)
            tl.store(y_at + wide[None, :], y.to(y_ptr.dtype.element_ty), mask=both)
        else:
            a = tl.load(x_at + pair[None, :], mask=turned, other=0.0).to(tl.float32)
            b = tl.load(x_at + half + pair[None, :], mask=turned, other=0.0).to(tl.float32)
            tl.store(y_at + pair[None, :], (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=turned)
            tl.store(y_at + half + pair[None, :], (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=turned)
        if PART:
            passed = inside & (wide < rest)[None, :]
            same = tl.load(x_at + 2 * half + wide[None, :], mask=passed)
            tl.store(y_at + 2 * half + wide[None, :], same, mask=passed)


def _out(x: Tensor) -> Tensor:
    """Return uninitialised memory for the result: with x's strides if the kernel can address them, else contiguous."""
    y = torch.empty_like(x)
    return y if x.dim() <= 4 and y.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


@operator("rotary", lambda x, *_: _out(x))
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    y = _out(x)
    if not x.numel():
        return y
    half, rest = cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]
    x_, y_, cos_, sin_ = (_four(each, x.shape[:-1]) for each in (x, y, cos, sin))
    if cos_.stride(1) and not cos_.stride(2):  # (..., T, heads, D): the tables vary along dimension -3, not -2
        x_, y_, cos_, sin_ = (each.transpose(1, 2) for each in (x_, y_, cos_, sin_))
    batch, heads, rows, _ = x_.shape
    row = LAUNCH[x.element_size()]
    wide = min(row["COLUMNS"], max(next_power_of_2(max(half, cdiv(rest, 2))), 16))
    meta = {"HEADS": min(row["HEADS"], heads), "ROWS": row["PAIRS"] // wide, "COLUMNS": wide}
    across = cdiv(max(2 * half, rest), 2 * wide)
    unit, strides = _in_units(x_, y_, also=(half, rest))
    table_unit, table_strides = _in_units(cos_, sin_, also=())
    with on(x):
        _kernel[(across * cdiv(rows, meta["ROWS"]) * cdiv(heads, meta["HEADS"]) * batch,)](
            x_, y_, cos_, sin_, heads, rows, half // unit, rest // unit, *strides, *table_strides,
            BACK=back, INTERLEAVED=interleaved, SHARED=not (cos_.stride(1) or sin_.stride(1)), PART=rest > 0,
            UNIT=unit, TABLE_UNIT=table_unit, num_warps=row["num_warps"], **meta,
        )
    return y


def _in_units(*tensors: Tensor, also: tuple[int, ...]) -> tuple[int, list[int]]:
    """Return the greatest power of two up to 16 that divides all first three strides, and `also`; strides over it."""
    strides = [n if size > 1 else 0 for x in tensors for size, n in zip(x.shape[:3], x.stride()[:3], strict=True)]
    unit = math.gcd(16, *strides, *also)
    return unit, [n // unit for n in strides]


def _four(x: Tensor, leading: torch.Size) -> Tensor:
    """Return a tensor, expanded over the leading dimensions, with four dimensions, of which the last is contiguous."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    x = x.expand(*leading, x.shape[-1])
    return x.reshape(-1, *x.shape[-3:]) if x.dim() > 4 else x[(None,) * (4 - x.dim())]


class _Rotary(Function):
    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
        return _rotate(x, cos, sin, interleaved, back)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, cos, sin, ctx.interleaved, ctx.back = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _Rotary.apply(dy, *ctx.saved_tensors, ctx.interleaved, not ctx.back), None, None, None, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Return x with the first elements of each head rotated by the angles of its position.

    Args:
        x: (..., T, D) float32, float16 or bfloat16 (float64 by the reference), of any strides.
        cos: (T, R / 2), or what broadcasts to x's leading dimensions and R / 2; R <= D. Of any floating-point dtype:
            the rotation is computed in float32 and rounded once.
        sin: as cos.
        interleaved: pairs are adjacent, (0, 1), (2, 3), ...; otherwise (0, R / 2), (1, R / 2 + 1), ...

    For x (B, heads, T, D) and Hugging Face's tables (B, T, R), whose two halves are equal, pass
    `cos[:, None, :, : R // 2]`. The tables have no gradient.

    Raises `KernelError` for any other dtype or shape, where devices differ, and for tables that require a gradient.
    """
    arguments.floating(x=x, cos=cos, sin=sin)
    _check_tables(x, cos, sin)
    if runs_triton("rotary", x):
        return _Rotary.apply(x, cos, sin, interleaved, False)
    return reference(x, cos, sin, interleaved)


def _check_tables(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    arguments.same_dtype(cos=cos, sin=sin)
    arguments.shape(tuple(cos.shape), sin=sin)
    if x.dim() < 2:
        raise KernelError("x has no positions", where="x", got=str(tuple(x.shape)), want="(..., T, D)")
    want = (*x.shape[:-1], x.shape[-1] // 2)
    fits = 0 < cos.dim() <= x.dim() and cos.shape[-1] <= want[-1]
    if not fits or any(n not in (1, m) for n, m in zip(cos.shape[-2::-1], want[-2::-1], strict=False)):
        raise KernelError(
            "the tables do not broadcast to x", where="cos", got=str(tuple(cos.shape)), want=f"{want} or less",
            hint="tables of the whole head, whose halves are equal: cos[..., : cos.shape[-1] // 2]",
        )
    for name, table in (("cos", cos), ("sin", sin)):
        if table.requires_grad:
            raise KernelError(
                f"{name} gets no gradient", where=name, got="requires_grad=True", want="a constant",
                hint=f"{name}.detach()",
            )
