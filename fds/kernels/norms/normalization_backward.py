"""Backward of normalisation: persistent programs loop over rows and sum their part of the weight's gradient.

The equations are in fds.kernels.norms.normalization. dweight and dbias are summed in two steps and in a fixed order,
without atomics: each program sums its rows in float32 and writes the sums once to partials (2, P, N); a small kernel
sums over P. A program holds whole rows of up to 8192 columns; longer ones: see normalization_backward_long.
Moves: reads dy, x and (if the sum has a gradient) ds once, and writes dx.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fds.kernels.language import cdiv, jit, next_power_of_2, num_processors, on, tl
from fds.kernels.norms import normalization_backward_long
from fds.kernels.norms.normalization_forward import readable, unit_of
from fds.kernels.norms.normalization_parts import parameter, row_means, x_hat_of
from fds.kernels.operators import operator
from fds.kernels.shared_memory import fitting

# Derived, not measured. 16 elements per thread take about 128 registers: 32 for sums, 16 each for dy, x and the weight.
# By columns: elements per program, warps, programs per multiprocessor (as many as registers allow), and whether the
# weight is held in registers; where it would spill, it is loaded from cache at each step.
WHOLE = {2048: (2048, 4, 4, True), 4096: (4096, 8, 2, True), 8192: (8192, 16, 1, False)}
UNALIGNED = 4096  # greatest length of whole rows that are not aligned to 16 bytes, which takes more registers
# By columns, KiB of shared memory and bytes per element. With 3, the rows of the next two steps are on their way to
# shared memory while one is computed, 64 KB per multiprocessor in 16 bits; with 2 those of the next are, when the step
# is done; with 1 they are loaded to registers, and nothing is held.
STAGES = {
    2048: {99: {2: 3, 4: 3}}, 4096: {99: {2: 3, 4: 2}},  # a third of float32 takes more than 128 registers
    8192: {227: {2: 3, 4: 2}, 163: {2: 2, 4: 2}, 99: {2: 1, 4: 1}},
}
# The sum over partials, by columns: what one program sums. Short rows have many partials, but few columns to divide.
SUM = {
    4096: {"PROGRAMS": 256, "COLUMNS": 16, "num_warps": 8}, 16384: {"PROGRAMS": 64, "COLUMNS": 64, "num_warps": 8},
    1 << 62: {"PROGRAMS": 16, "COLUMNS": 256, "num_warps": 8},
}


@jit(do_not_specialize=("rows", "units"))
def _backward_kernel(
    dy_ptr, x_ptr, mean_ptr, r_ptr, weight_ptr, bias_ptr, dtotal_ptr, dx_ptr, partial_ptr, rows, units,
    CENTERED: tl.constexpr, INVERTIBLE: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HOLD: tl.constexpr, STAGES: tl.constexpr,
):
    n = units * UNIT
    column = tl.arange(0, COLUMNS)[None, :]
    held_weight = parameter(weight_ptr, column, column < n, 1.0) if HOLD else 1.0
    held_bias = parameter(bias_ptr, column, column < n, 0.0) if HOLD else 0.0
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = step * ROWS + tl.arange(0, ROWS).to(tl.int64)
        at = row[:, None] * n + column
        inside = (row < rows)[:, None] & (column < n)
        dy = tl.load(dy_ptr + at, mask=inside, other=0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)
        r = tl.load(r_ptr + row, mask=row < rows, other=0)[:, None]
        weight = held_weight if HOLD else parameter(weight_ptr, column, column < n, 1.0)
        bias = held_bias if HOLD else (parameter(bias_ptr, column, column < n, 0.0) if INVERTIBLE else 0.0)
        mean = 0.0
        if CENTERED and not INVERTIBLE:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0)[:, None]
        x_hat = x_hat_of(
            x, mean, r, weight, bias, n, CENTERED, INVERTIBLE, weight_ptr is not None, bias_ptr is not None
        )
        if DWEIGHT:
            dweight += dy * x_hat
        if DBIAS:
            dbias += dy
        g = dy * weight if weight_ptr is not None else dy
        first, second = row_means(g, g * x_hat, n, CENTERED)
        dx = r * (g - x_hat * second[:, None] - first[:, None])
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
    outs = [t for t, dtype in ((dweight, dweight_dtype), (dbias, dbias_dtype)) if dtype is not None]
    modes = {
        "CENTERED": centered, "INVERTIBLE": invertible, "DWEIGHT": dweight_dtype is not None,
        "DBIAS": dbias_dtype is not None, "UNIT": unit_of(x.shape[-1]),
    }
    with on(x):
        launch = _whole if _fits(x) else normalization_backward_long.launch
        partial = launch(dy, x, mean, r, weight, bias, dtotal, dx, len(outs), modes)
        if outs:
            _, programs, columns = partial.shape
            meta = SUM[min(most for most in SUM if columns <= most)]
            grid = cdiv(columns, meta["COLUMNS"]), len(outs)
            _sum_kernel[grid](partial, *[*outs, None][:2], programs, columns, **meta)
    return dx, dweight, dbias


def _fits(x: Tensor) -> bool:
    """Return whether a program may hold whole rows of `x`."""
    columns = x.shape[-1]
    return next_power_of_2(columns) <= (max(WHOLE) if unit_of(columns) * x.element_size() >= 16 else UNALIGNED)


def _whole(
    dy: Tensor, x: Tensor, mean: Tensor | None, r: Tensor, weight: Tensor | None, bias: Tensor | None,
    dtotal: Tensor | None, dx: Tensor, num_sums: int, modes: dict[str, Any],
) -> Tensor:
    """Write dx and return partial sums (num_sums, programs, N) of dweight and dbias in float32."""
    rows, columns = r.numel(), x.shape[-1]
    block = next_power_of_2(columns)
    most = min(most for most in WHOLE if block <= most)
    elements, warps, resident, hold = WHOLE[most]
    stages = fitting(STAGES[most], x.device)[x.element_size()]
    size = min(elements // block, 64)
    programs = min(cdiv(rows, size), resident * num_processors(x.device))
    partial = r.new_empty(num_sums, programs, columns)
    _backward_kernel[(programs,)](
        dy, x, mean, r, weight, bias, dtotal, dx, partial, rows, columns // modes["UNIT"], **modes, ROWS=size,
        COLUMNS=block, HOLD=hold, STAGES=stages, num_warps=warps,
    )
    return partial


def _gradients(x: Tensor, dweight_dtype: torch.dtype | None, dbias_dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    params = (x.new_empty(0 if t is None else x.shape[-1], dtype=t or x.dtype) for t in (dweight_dtype, dbias_dtype))
    return torch.empty_like(x, memory_format=torch.contiguous_format), *params


@backward.register_fake
def _(dy, x, mean, r, weight, bias, dtotal, centered, invertible, dweight_dtype, dbias_dtype) -> tuple[Tensor, ...]:
    return _gradients(x, dweight_dtype, dbias_dtype)
