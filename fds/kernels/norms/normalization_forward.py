"""Forward of normalisation: short rows in registers, long ones in chunks that are read twice.

The equations are in fds.kernels.norms.normalization. The variance is not computed as E[x^2] - E[x]^2: a row in
registers is centered before it is squared; for a long row each lane keeps a running mean and sum of squared distances,
merged at the end.
Moves: each tensor once; x of a long row is read a second time from the L2 cache.
Source: Welford 1962, Technometrics 4(3); Chan, Golub and LeVeque 1983, The American Statistician 37(3), equation 2.1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fds.kernels.language import cdiv, fitting, jit, next_power_of_2, num_processors, on, tl
from fds.kernels.operators import operator

# Derived, not measured. Rows that fit are held in registers, 32 elements per thread, with all loads of a program in
# flight at once; 61 to 95 registers per thread allow 16 to 32 warps per multiprocessor, of which some load while others
# store. By columns: elements per program, warps.
SHORT = {4096: (4096, 4), 8192: (8192, 8)}
# Longer rows are read twice. Persistent programs bound how many rows are in use, so that the second read finds its row
# in cache: 264 of 128 KB, or 132 of 256 KB, are 35 MB of the 50 MB L2. (Beyond 256 KB some are read from memory again:
# at worst 3 tensors are moved instead of 2.) By KiB of shared memory and bytes of a row: programs per multiprocessor,
# warps.
LONG = {163: {2**17: (2, 16), 2**63: (1, 32)}, 99: {2**63: (1, 16)}}
PER_WARP = 256  # elements of a chunk: 8 per thread, a load of 16 bytes in 16 bits; 16 per thread spill
# By bytes per element: chunks in flight to shared memory, 32 KB per multiprocessor. A third chunk of float32 would need
# 256 KB where a residual is added twice.
STAGES = {2: 3, 4: 2}


@jit(do_not_specialize=("rows", "units"))
def _short_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, mean_ptr, r_ptr, rows, units, eps,
    CENTERED: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    n = units * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at = row[:, None] * n + column[None, :]
    inside = (row < rows)[:, None] & (column < n)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + at, mask=inside, other=0).to(tl.float32)
        rounded = x.to(x_ptr.dtype.element_ty)
        if total_ptr is not None:
            tl.store(total_ptr + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if CENTERED:
        mean = tl.sum(x, axis=1) / n
        x = tl.where((column < n)[None, :], x - mean[:, None], 0)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean, mask=row < rows)
    r = 1 / tl.sqrt(tl.sum(x * x, axis=1) / n + eps)
    tl.store(r_ptr + row, r, mask=row < rows)
    y = x * r[:, None]
    if weight_ptr is not None:
        y *= tl.load(
            weight_ptr + column[None, :], mask=(column < n)[None, :], other=0, eviction_policy="evict_last"
        ).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(
            bias_ptr + column[None, :], mask=(column < n)[None, :], other=0, eviction_policy="evict_last"
        ).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@jit(do_not_specialize=("rows", "units"))
def _long_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, mean_ptr, r_ptr, rows, units, eps,
    CENTERED: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):
    n = units * UNIT
    lane = tl.arange(0, CHUNK)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        start = row * n
        mean = tl.zeros([CHUNK], tl.float32)
        squares = tl.zeros([CHUNK], tl.float32)
        for first in tl.range(0, n, CHUNK, num_stages=STAGES):
            column = first + lane
            inside = column < n
            x = tl.load(x_ptr + start + column, mask=inside, other=0, eviction_policy="evict_last").to(tl.float32)
            if residual_ptr is not None:
                residual = tl.load(residual_ptr + start + column, mask=inside, other=0, eviction_policy="evict_last")
                x += residual.to(tl.float32)
                rounded = x.to(x_ptr.dtype.element_ty)
                if total_ptr is not None:
                    tl.store(total_ptr + start + column, rounded, mask=inside, eviction_policy="evict_last")
                x = rounded.to(tl.float32)
            if CENTERED:
                distance = tl.where(inside, x - mean, 0)
                mean += distance * (1.0 / (first // CHUNK + 1))
                squares += distance * (x - mean)
            else:
                squares += x * x
        if CENTERED:
            count = ((n - lane + CHUNK - 1) // CHUNK).to(tl.float32)
            of_row = tl.sum(mean * count) / n
            distance = mean - of_row
            squares += count * distance * distance
            if mean_ptr is not None:
                tl.store(mean_ptr + row, of_row)
        else:
            of_row = 0.0
        r = 1 / tl.sqrt(tl.sum(squares) / n + eps)
        tl.store(r_ptr + row, r)
        tl.debug_barrier()  # the sum is read again, possibly by other threads than wrote it
        for first in tl.range(0, n, CHUNK, num_stages=STAGES):
            column = first + lane
            inside = column < n
            if total_ptr is not None:
                x = tl.load(total_ptr + start + column, mask=inside, other=0, eviction_policy="evict_first")
            else:
                x = tl.load(x_ptr + start + column, mask=inside, other=0, eviction_policy="evict_first")
                if residual_ptr is not None:
                    add = tl.load(residual_ptr + start + column, mask=inside, other=0, eviction_policy="evict_first")
                    x = (x.to(tl.float32) + add.to(tl.float32)).to(x_ptr.dtype.element_ty)
            y = (x.to(tl.float32) - of_row) * r
            if weight_ptr is not None:
                y *= tl.load(weight_ptr + column, mask=inside, other=0, eviction_policy="evict_last").to(tl.float32)
            if bias_ptr is not None:
                y += tl.load(bias_ptr + column, mask=inside, other=0, eviction_policy="evict_last").to(tl.float32)
            tl.store(y_ptr + start + column, y.to(y_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")


def readable(x: Tensor) -> Tensor:
    """Return a tensor as kernels read it: contiguous, and at most 4 bytes per element."""
    return (x.float() if x.dtype == torch.float64 else x).contiguous()


def unit_of(columns: int) -> int:
    """Return the greatest power of two up to 16 that divides the number of columns: the alignment of rows."""
    return math.gcd(columns, 16)


@operator("normalize", lambda x, *rest: _outputs(x, *rest[-2:]))
def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool,
    keeps_sum: bool, keeps_mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, the sum, the mean and r (rows,) in float32; (0,) where the sum or the mean is not kept."""
    x, columns = x.contiguous(), x.shape[-1]
    y, total, mean, r = _outputs(x, keeps_sum, keeps_mean)
    if x.numel() == 0:
        return y, total, mean, r
    residual, weight, bias = (None if t is None else readable(t) for t in (residual, weight, bias))
    tensors = x, residual, weight, bias, y, total if keeps_sum else None, mean if keeps_mean else None, r
    rows, unit, block, size = r.numel(), unit_of(columns), next_power_of_2(columns), x.element_size()
    modes = {"CENTERED": centered, "UNIT": unit}
    with on(x):
        if block <= max(SHORT):
            elements, warps = SHORT[min(most for most in SHORT if block <= most)]
            modes |= {"ROWS": min(elements // block, 64), "COLUMNS": block, "num_warps": warps}
            _short_kernel[(cdiv(rows, modes["ROWS"]),)](*tensors, rows, columns // unit, eps, **modes)
        else:
            table = fitting(LONG, x.device)
            resident, warps = table[min(most for most in table if columns * size <= most)]
            modes |= {"CHUNK": warps * PER_WARP, "STAGES": STAGES[size], "num_warps": warps}
            grid = (min(rows, resident * num_processors(x.device)),)
            _long_kernel[grid](*tensors, rows, columns // unit, eps, **modes)
    return y, total, mean, r


def _outputs(x: Tensor, keeps_sum: bool, keeps_mean: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1] if x.shape[-1] else x.shape[:-1].numel()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(y) if keeps_sum else y.new_empty(0)
    mean, r = (x.new_empty(size, dtype=torch.float32) for size in (rows if keeps_mean else 0, rows))
    return y, total, mean, r
