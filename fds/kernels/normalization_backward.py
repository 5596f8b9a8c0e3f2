"""Backward of normalisation: persistent programs loop over rows and sum their part of the weight's gradient.

The equations are in fds.kernels.normalization. dweight and dbias are summed in two steps and in a fixed order,
without atomics: each program sums its rows in float32 and writes the sums once to partials (2, P, N); a small kernel
sums over P. A program holds whole rows of up to 8192 columns.
Moves: reads dy, x and (if the sum has a gradient) ds once, and writes dx.

Beside a longer row no program could hold its part of the weight's gradient. There two kinds of programs share a launch,
and the rows that they read: one takes a row, reads it for its means and again for dx; one takes TILE columns of SLAB
rows and sums their part of dweight and dbias, for which forward's mean and 1 / std suffice. They do not wait for each
other. All that belongs to a slab follows each other in the order of tasks, through which few persistent programs go, so
that whoever comes second finds the slab in the L2 cache.

Moves of longer rows: dy, x and (if the sum has a gradient) ds once, and dx, through memory; dy and x three times
through L2, once of them from L1 where the rows in use fit there (16384 columns in 16 bits); and 16 / SLAB bytes an
element of partial sums. Rows of more than 256 KB of dy and x (65536 columns in 16 bits) are read from memory again in
part: at worst 7 tensors instead of 3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fds.kernels.language import cdiv, fitting, jit, next_power_of_2, num_processors, on, tl
from fds.kernels.operators import operator


@jit
def parameter(ptr, column, inside, absent):
    """Return columns of a weight or bias in float32, or `absent` where there is none."""
    if ptr is None:
        return absent
    else:  # noqa: RET505  (Triton would compile code after the if)
        return tl.load(ptr + column, mask=inside, other=0, eviction_policy="evict_last").to(tl.float32)


@jit
def unscaled(y, weight, bias, n, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    """Recover x_hat from y: 0 where the weight is 0, NaN where y is NaN."""
    x_hat = y - bias if BIAS else y
    if WEIGHT:
        bound = tl.sqrt(n.to(tl.float32))
        x_hat = x_hat / tl.where(weight == 0, 1, weight)
        x_hat = tl.where(x_hat > bound, bound, tl.where(x_hat < -bound, -bound, x_hat))
        x_hat = tl.where(weight == 0, 0, x_hat)
    return x_hat


@jit
def x_hat_of(
    x, mean, r, weight, bias, n,
    CENTERED: tl.constexpr, INVERTIBLE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):
    """Return x_hat, from x or, with INVERTIBLE, from y."""
    if INVERTIBLE:
        return unscaled(x, weight, bias, n, WEIGHT, BIAS)
    elif CENTERED:  # noqa: RET505  (Triton would compile code after the if)
        return (x - mean) * r
    else:
        return x * r


@jit
def row_means(g, product, n, CENTERED: tl.constexpr):
    """Return the means of g (0 unless centered) and of g * x_hat over the last axis, for the barriers of one sum."""
    if CENTERED:
        first, second = tl.split(tl.sum(tl.join(g, product), axis=1) / n)
    else:
        second = tl.sum(product, axis=1) / n
        first = tl.zeros_like(second)
    return first, second


SLAB = 64  # rows: partial sums add 4% to what 16 bits move
# Derived, not measured: elements that a program loads at once, eight per thread, which leave it within 64 registers.
CHUNK = {"CHUNK": 4096, "TILE": 1024, "num_warps": 8}
# By bytes of a row of dy and x together: programs per multiprocessor, so that the rows in use are 25 MB, or 34 MB, of
# the 50 MB of L2.
RESIDENT = {2**16: 3, 2**17: 2, 2**63: 1}


@jit
def _inside(column, n, EVEN: tl.constexpr):
    """Return which columns are in a row; with EVEN all are, and the compiler drops the masks."""
    return tl.full(column.shape, True, tl.int1) if EVEN else column < n


@jit
def _loaded(dy_ptr, x_ptr, mean, weight, bias, n, inside, INVERTIBLE: tl.constexpr, WEIGHT: tl.constexpr,
            BIAS: tl.constexpr):
    """Return dy, and x - mean or, with INVERTIBLE, x_hat."""
    dy = tl.load(dy_ptr, mask=inside, other=0).to(tl.float32)
    x = tl.load(x_ptr, mask=inside, other=0).to(tl.float32)
    return dy, unscaled(x, weight, bias, n, WEIGHT, BIAS) if INVERTIBLE else x - mean


@jit
def _weighted(dy_ptr, x_ptr, weight_ptr, bias_ptr, mean, column, inside, n, INVERTIBLE: tl.constexpr):
    """Return the gradient of x_hat in some columns of a row, and x - mean or, with INVERTIBLE, x_hat."""
    weight = parameter(weight_ptr, column, inside, 1.0)
    bias = parameter(bias_ptr, column, inside, 0.0) if INVERTIBLE else 0.0
    g, x = _loaded(
        dy_ptr + column, x_ptr + column, mean, weight, bias, n, inside, INVERTIBLE, weight_ptr is not None,
        bias_ptr is not None,
    )
    if weight_ptr is not None:
        g *= weight
    return g, x


@jit
def _row(
    dy_ptr, x_ptr, mean_ptr, r_ptr, weight_ptr, bias_ptr, dtotal_ptr, dx_ptr, row, n,
    CENTERED: tl.constexpr, INVERTIBLE: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,
):
    """Write dx of a row."""
    lane = tl.arange(0, CHUNK)
    r = tl.load(r_ptr + row)
    mean = tl.load(mean_ptr + row) if CENTERED and not INVERTIBLE else 0.0
    scale = 1.0 if INVERTIBLE else r  # of what _loaded returns, to x_hat
    dy_ptr, x_ptr, dx_ptr = dy_ptr + row * n, x_ptr + row * n, dx_ptr + row * n
    gs = tl.zeros([CHUNK], tl.float32)
    products = tl.zeros([CHUNK], tl.float32)
    for first in range(0, n, CHUNK):
        column = first + lane
        inside = _inside(column, n, EVEN)
        g, x = _weighted(dy_ptr, x_ptr, weight_ptr, bias_ptr, mean, column, inside, n, INVERTIBLE)
        gs += g
        products += g * x  # beyond the row g is 0
    of_g, of_x = r, -r * scale * scale * (tl.sum(products) / n)
    of_one = -r * (tl.sum(gs) / n) if CENTERED else 0.0
    for first in range(0, n, CHUNK):
        column = first + lane
        inside = _inside(column, n, EVEN)
        g, x = _weighted(dy_ptr, x_ptr, weight_ptr, bias_ptr, mean, column, inside, n, INVERTIBLE)
        dx = of_g * g + (of_x * x + of_one)
        if dtotal_ptr is not None:
            dx += tl.load(dtotal_ptr + row * n + column, mask=inside, other=0).to(tl.float32)
        tl.store(dx_ptr + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@jit
def _columns(
    dy_ptr, x_ptr, mean_ptr, r_ptr, weight_ptr, bias_ptr, partial_ptr, slab, slabs, tile, rows, n,
    CENTERED: tl.constexpr, INVERTIBLE: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, SLAB: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):
    """Write the sums over a slab of rows for TILE columns."""
    column = (tile * TILE + tl.arange(0, TILE))[None, :]
    weight = parameter(weight_ptr, column, column < n, 1.0) if INVERTIBLE else 1.0
    bias = parameter(bias_ptr, column, column < n, 0.0) if INVERTIBLE else 0.0
    start, left = slab * SLAB, rows - slab * SLAB
    dy_ptr, x_ptr, r_ptr = dy_ptr + start * n, x_ptr + start * n, r_ptr + start
    dweight = tl.zeros([ROWS, TILE], tl.float32)
    dbias = tl.zeros([ROWS, TILE], tl.float32)
    for step in range(0, SLAB, ROWS):
        row = step + tl.arange(0, ROWS)
        at = row[:, None] * n + column  # below 2^31
        inside = (row < left)[:, None] & (column < n)
        mean = 0.0
        if CENTERED and not INVERTIBLE:
            mean = tl.load(mean_ptr + start + row, mask=row < left, other=0)[:, None]
        dy, x = _loaded(
            dy_ptr + at, x_ptr + at, mean, weight, bias, n, inside, INVERTIBLE, weight_ptr is not None,
            bias_ptr is not None,
        )
        if DWEIGHT:
            scaled = dy
            if not INVERTIBLE:
                scaled = dy * tl.load(r_ptr + row, mask=row < left, other=0)[:, None]
            dweight += scaled * x
        if DBIAS:
            dbias += dy
    mine = partial_ptr + slab * n + column
    if DWEIGHT:
        tl.store(mine, tl.sum(dweight, axis=0)[None, :], mask=column < n)
        mine += slabs.to(tl.int64) * n
    if DBIAS:
        tl.store(mine, tl.sum(dbias, axis=0)[None, :], mask=column < n)


@jit(do_not_specialize=("rows", "units", "slabs", "tiles"))
def _long_kernel(
    dy_ptr, x_ptr, mean_ptr, r_ptr, weight_ptr, bias_ptr, dtotal_ptr, dx_ptr, partial_ptr, rows, units, slabs, tiles,
    CENTERED: tl.constexpr, INVERTIBLE: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, UNIT: tl.constexpr,
    SLAB: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr,
):
    """Take every so many-th task: of each slab first its rows, then its tiles of columns."""
    n = units * UNIT
    for task in range(tl.program_id(0), slabs * (SLAB + tiles), tl.num_programs(0)):
        slab = (task // (SLAB + tiles)).to(tl.int64)
        part = task % (SLAB + tiles)
        row = slab * SLAB + part
        if part >= SLAB:
            _columns(
                dy_ptr, x_ptr, mean_ptr, r_ptr, weight_ptr, bias_ptr, partial_ptr, slab, slabs, part - SLAB, rows, n,
                CENTERED, INVERTIBLE, DWEIGHT, DBIAS, SLAB, CHUNK // TILE, TILE,
            )
        elif row < rows:
            _row(
                dy_ptr, x_ptr, mean_ptr, r_ptr, weight_ptr, bias_ptr, dtotal_ptr, dx_ptr, row, n, CENTERED, INVERTIBLE,
                CHUNK, EVEN,
            )


def _in_slabs(
    dy: Tensor, x: Tensor, mean: Tensor | None, r: Tensor, weight: Tensor | None, bias: Tensor | None,
    dtotal: Tensor | None, dx: Tensor, num_sums: int, modes: dict[str, Any],
) -> Tensor:
    """Write dx and return partial sums (num_sums, slabs, N) of dweight and dbias in float32."""
    rows, columns = r.numel(), x.shape[-1]
    slabs, tiles = cdiv(rows, SLAB), cdiv(columns, CHUNK["TILE"]) if num_sums else 0
    nbytes = columns * (dy.element_size() + x.element_size())
    resident = RESIDENT[min(most for most in RESIDENT if nbytes <= most)]
    partial = r.new_empty(num_sums, slabs, columns)
    _long_kernel[(min(slabs * (SLAB + tiles), resident * num_processors(x.device)),)](
        dy, x, mean, r, weight, bias, dtotal, dx, partial, rows, columns // modes["UNIT"], slabs, tiles, **modes,
        SLAB=SLAB, EVEN=columns % CHUNK["CHUNK"] == 0, **CHUNK,
    )
    return partial


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


@operator("normalize_backward", lambda dy, x, *rest: _gradients(x, *rest[-2:]))
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
        launch = _whole if _fits(x) else _in_slabs
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


def readable(x: Tensor) -> Tensor:
    """Return a tensor as kernels read it: contiguous, and at most 4 bytes per element."""
    return (x.float() if x.dtype == torch.float64 else x).contiguous()


def unit_of(columns: int) -> int:
    """Return the greatest power of two up to 16 that divides the number of columns: the alignment of rows."""
    return math.gcd(columns, 16)
