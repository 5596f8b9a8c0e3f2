"""Backward of normalisation: persistent programs loop over rows and sum their part of the weight's gradient.

The equations are in fds.kernels.norms.normalization. dweight and dbias are summed in two steps and in a fixed order,
without atomics: each program sums its rows in float32, for its columns, and writes the sums once to partials (2, P, N);
a small kernel sums over P.
Moves: up to 8192 columns, reads dy, x and (if the sum has a gradient) ds once, and writes dx; a program holds whole
rows. The sums of longer rows exceed the registers of a multiprocessor, so a first kernel reads dy and x for the row
means, and programs of 1024 columns then read them again: 5 tensors moved instead of 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fds.kernels.language import cdiv, jit, next_power_of_2, num_processors, on, tl
from fds.kernels.norms.normalization_forward import readable, unit_of
from fds.kernels.operators import operator

# Derived, not measured. 16 elements per thread take about 128 registers: 32 for sums, 16 each for dy, x and the weight.
# While a step is computed, the rows of the next are loaded to shared memory (STAGES): 32 KB per multiprocessor in 16
# bits. By columns: elements per program, warps, programs per multiprocessor (as many as registers allow), and whether
# the weight is held in registers; where it would spill, it is loaded from cache at each step.
WHOLE = {2048: (2048, 4, 4, True), 4096: (4096, 8, 2, True), 8192: (8192, 16, 1, False)}
UNALIGNED = 4096  # greatest length of whole rows that are not aligned to 16 bytes, which takes more registers
STAGES = 2
# Longer rows: ROWS x COLUMNS per step, and programs per multiprocessor, enough to balance the last wave.
TILED = {"ROWS": 2, "COLUMNS": 1024, "HOLD": True, "STAGES": STAGES, "num_warps": 4}
TILED_PROGRAMS, TILED_STEPS = 16, 8  # the least number of steps of a program, so that partials are few
MOMENTS = {"CHUNK": 4096, "STAGES": 3, "num_warps": 16}  # as LONG of the forward pass
# The sum over partials, by columns: what one program sums. Short rows have many partials, but few columns to divide.
SUM = {
    4096: {"PROGRAMS": 256, "COLUMNS": 16, "num_warps": 8}, 16384: {"PROGRAMS": 64, "COLUMNS": 64, "num_warps": 8},
    1 << 62: {"PROGRAMS": 16, "COLUMNS": 256, "num_warps": 8},
}


@jit
def _parameter(ptr, column, n, absent):
    """Return columns of a weight or bias in float32, or `absent` where there is none."""
    if ptr is None:
        return absent
    else:  # noqa: RET505  (Triton would compile code after the if)
        return tl.load(ptr + column, mask=column < n, other=0, eviction_policy="evict_last").to(tl.float32)


@jit
def _unscaled(y, weight, bias, n, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    """Recover x_hat from y: 0 where the weight is 0, NaN where y is NaN."""
    x_hat = y - bias if BIAS else y
    if WEIGHT:
        bound = tl.sqrt(n.to(tl.float32))
        x_hat = x_hat / tl.where(weight == 0, 1, weight)
        x_hat = tl.where(x_hat > bound, bound, tl.where(x_hat < -bound, -bound, x_hat))
        x_hat = tl.where(weight == 0, 0, x_hat)
    return x_hat


@jit(do_not_specialize=("units",))
def _moments_kernel(
    dy_ptr, x_ptr, mean_ptr, r_ptr, weight_ptr, bias_ptr, first_ptr, second_ptr, units,
    CENTERED: tl.constexpr, INVERTIBLE: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):
    n = units * UNIT
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    r = tl.load(r_ptr + row)
    mean = tl.load(mean_ptr + row) if CENTERED and not INVERTIBLE else 0.0
    first_sum = tl.zeros([CHUNK], tl.float32)
    second_sum = tl.zeros([CHUNK], tl.float32)
    for start in tl.range(0, n, CHUNK, num_stages=STAGES):
        column = start + lane
        inside = column < n
        g = tl.load(dy_ptr + row * n + column, mask=inside, other=0).to(tl.float32)
        x = tl.load(x_ptr + row * n + column, mask=inside, other=0).to(tl.float32)
        weight = _parameter(weight_ptr, column, n, 1.0)
        if weight_ptr is not None:
            g *= weight
        if INVERTIBLE:
            bias = _parameter(bias_ptr, column, n, 0.0)
            x_hat = _unscaled(x, weight, bias, n, weight_ptr is not None, bias_ptr is not None)
        else:
            x_hat = (x - mean) * r
        first_sum += g
        second_sum += g * x_hat
    if CENTERED:
        tl.store(first_ptr + row, tl.sum(first_sum) / n)
    tl.store(second_ptr + row, tl.sum(second_sum) / n)


@jit(do_not_specialize=("rows", "units"))
def _backward_kernel(
    dy_ptr, x_ptr, mean_ptr, r_ptr, weight_ptr, bias_ptr, dtotal_ptr, first_ptr, second_ptr, dx_ptr, partial_ptr,
    rows, units, CENTERED: tl.constexpr, INVERTIBLE: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HOLD: tl.constexpr, STAGES: tl.constexpr,
):
    n = units * UNIT
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    held_weight = _parameter(weight_ptr, column, n, 1.0) if HOLD else 1.0
    held_bias = _parameter(bias_ptr, column, n, 0.0) if HOLD else 0.0
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = step * ROWS + tl.arange(0, ROWS).to(tl.int64)
        at = row[:, None] * n + column
        inside = (row < rows)[:, None] & (column < n)
        dy = tl.load(dy_ptr + at, mask=inside, other=0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)
        r = tl.load(r_ptr + row, mask=row < rows, other=0)[:, None]
        weight = held_weight if HOLD else _parameter(weight_ptr, column, n, 1.0)
        if INVERTIBLE:
            bias = held_bias if HOLD else _parameter(bias_ptr, column, n, 0.0)
            x_hat = _unscaled(x, weight, bias, n, weight_ptr is not None, bias_ptr is not None)
        else:
            x_hat = x * r
            if CENTERED:
                x_hat = (x - tl.load(mean_ptr + row, mask=row < rows, other=0)[:, None]) * r
        if DWEIGHT:
            dweight += dy * x_hat
        if DBIAS:
            dbias += dy
        g = dy * weight if weight_ptr is not None else dy
        if second_ptr is None:
            second = tl.sum(g * x_hat, axis=1)[:, None] / n
        else:
            second = tl.load(second_ptr + row, mask=row < rows, other=0)[:, None]
        dx = g - x_hat * second
        if CENTERED:
            if second_ptr is None:
                dx -= tl.sum(g, axis=1)[:, None] / n
            else:
                dx -= tl.load(first_ptr + row, mask=row < rows, other=0)[:, None]
        dx *= r
        if dtotal_ptr is not None:
            dx += tl.load(dtotal_ptr + at, mask=inside, other=0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if DWEIGHT or DBIAS:
        mine = partial_ptr + tl.program_id(0).to(tl.int64) * n + column
        if DWEIGHT:
            tl.store(mine, tl.sum(dweight, axis=0)[None, :], mask=column < n)
            mine += tl.num_programs(0).to(tl.int64) * n
        if DBIAS:
            tl.store(mine, tl.sum(dbias, axis=0)[None, :], mask=column < n)


@jit(do_not_specialize=("programs", "columns"))
def _sum_kernel(partial_ptr, out_ptr, second_out_ptr, programs, columns, PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    which = tl.program_id(1)
    mine = partial_ptr + which.to(tl.int64) * programs * columns
    total = tl.zeros([PROGRAMS, COLUMNS], tl.float32)
    for first in range(0, programs, PROGRAMS):
        program = first + tl.arange(0, PROGRAMS)
        at = program[:, None].to(tl.int64) * columns + column[None, :]
        total += tl.load(mine + at, mask=(program < programs)[:, None] & (column < columns)[None, :], other=0)
    out = tl.sum(total, axis=0)
    if second_out_ptr is None:  # noqa: SIM114  (a compile-time condition, unlike the next)
        tl.store(out_ptr + column, out.to(out_ptr.dtype.element_ty), mask=column < columns)
    elif which == 0:
        tl.store(out_ptr + column, out.to(out_ptr.dtype.element_ty), mask=column < columns)
    else:
        tl.store(second_out_ptr + column, out.to(second_out_ptr.dtype.element_ty), mask=column < columns)


@operator("normalize_backward")
def backward(
    dy: Tensor, x: Tensor, mean: Tensor | None, r: Tensor, weight: Tensor | None, bias: Tensor | None,
    dtotal: Tensor | None, centered: bool, invertible: bool, dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dweight and dbias, the last two (0,) where their dtype is None; with `invertible`, `x` is y."""
    dx, dweight, dbias = _gradients(x, dweight_dtype, dbias_dtype)
    if x.numel() == 0:
        return dx, dweight.zero_(), dbias.zero_()
    dy, x = dy.contiguous(), x.contiguous()
    weight, bias, dtotal = (None if t is None else readable(t) for t in (weight, bias, dtotal))
    rows, columns = r.numel(), x.shape[-1]
    unit, block = unit_of(columns), next_power_of_2(columns)
    outs = [t for t, dtype in ((dweight, dweight_dtype), (dbias, dbias_dtype)) if dtype is not None]
    modes = {"CENTERED": centered, "INVERTIBLE": invertible, "UNIT": unit}
    saved = dy, x, mean, r, weight, bias
    first = second = None
    with on(x):
        if block > (max(WHOLE) if unit * x.element_size() >= 16 else UNALIGNED):
            meta = TILED
            grid = _tiled_grid(rows, columns, x.device)
            first, second = (torch.empty_like(r) if needed else None for needed in (centered, True))
            _moments_kernel[(rows,)](*saved, first, second, columns // unit, **modes, **MOMENTS)
        else:
            elements, warps, resident, hold = WHOLE[min(most for most in WHOLE if block <= most)]
            size = min(elements // block, 64)
            meta = {"ROWS": size, "COLUMNS": block, "num_warps": warps, "HOLD": hold, "STAGES": STAGES}
            grid = min(cdiv(rows, size), resident * num_processors(x.device)), 1
        partial = r.new_empty(len(outs), grid[0], columns) if outs else None
        _backward_kernel[grid](
            *saved, dtotal, first, second, dx, partial, rows, columns // unit, DWEIGHT=dweight_dtype is not None,
            DBIAS=dbias_dtype is not None, **modes, **meta,
        )
        if outs:
            meta = SUM[min(most for most in SUM if columns <= most)]
            grid_of_sum = cdiv(columns, meta["COLUMNS"]), len(outs)
            _sum_kernel[grid_of_sum](partial, *[*outs, None][:2], grid[0], columns, **meta)
    return dx, dweight, dbias


def _tiled_grid(rows: int, columns: int, device: torch.device) -> tuple[int, int]:
    tiles = cdiv(columns, TILED["COLUMNS"])
    wanted = cdiv(TILED_PROGRAMS * num_processors(device), tiles)
    return min(wanted, cdiv(rows, TILED["ROWS"] * TILED_STEPS)), tiles


def _gradients(x: Tensor, dweight_dtype: torch.dtype | None, dbias_dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    params = (x.new_empty(0 if t is None else x.shape[-1], dtype=t or x.dtype) for t in (dweight_dtype, dbias_dtype))
    return torch.empty_like(x, memory_format=torch.contiguous_format), *params


@backward.register_fake
def _(dy, x, mean, r, weight, bias, dtotal, centered, invertible, dweight_dtype, dbias_dtype) -> tuple[Tensor, ...]:
    return _gradients(x, dweight_dtype, dbias_dtype)
