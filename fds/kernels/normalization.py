"""Layer norm and RMS norm, optionally of a sum: the equations, in plain torch and by kernels.

With x (R, N) the input (the sum, where there is a residual), mu = mean(x) (0 for RMS) and
r = 1 / sqrt(mean((x - mu)^2) + eps)::

    x_hat = (x - mu) * r        y = x_hat * weight + bias        (RMS: without bias)

With dy the gradient of y, g = dy * weight, and ds the gradient of the sum if that is an output::

    dx = r * (g - mean(g) - x_hat * mean(g * x_hat)) + ds        (RMS: without mean(g))
    dweight = sum over rows of dy * x_hat        dbias = sum over rows of dy

With a residual, x + residual takes the place of x, rounded to the dtype of x as by a separate addition. `invertible`
saves y in place of x. Backward recovers x_hat = (y - bias) / weight, clipped to its range, which is
[-sqrt(N), sqrt(N)], and 0 where weight is 0.

Moves: forward reads 1 tensor (2 with a residual) and writes 1 (2 if the sum is returned or saved); backward reads 2 (3
with a gradient of the sum) and writes 1. Rows beyond 8192 columns: see normalization_backward.
Saves: x or the sum, the mean (not for RMS) and r in float32, and the weight. `invertible`: y in place of x or the sum,
no mean, and the bias.

The variance is not computed as E[x^2] - E[x]^2: forward centers short rows in registers before they are squared; long
ones it reads in chunks, of which each lane keeps a running mean and sum of squared distances, merged at the end, and a
second time from the L2 cache.
Source: Ba et al. 2016, arXiv:1607.06450, section 3; Zhang and Sennrich 2019, arXiv:1910.07467, equation 4; Welford
1962, Technometrics 4(3); Chan, Golub and LeVeque 1983, The American Statistician 37(3), equation 2.1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fds.errors import KernelError, is_number
from fds.kernels import arguments, normalization_backward
from fds.kernels.choice import runs_triton
from fds.kernels.language import cdiv, fitting, jit, next_power_of_2, num_processors, on, tl
from fds.kernels.normalization_backward import readable, unit_of
from fds.kernels.operators import Function, first_order, operator


def check(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    """Raise `KernelError` for arguments that cannot be normalised."""
    arguments.floating(x=x, residual=residual, weight=weight, bias=bias)
    arguments.alike(x=x, residual=residual)
    if x.dim() == 0:
        raise KernelError("x has no dimension to normalise over", where="x", got="()", want="(..., N)")
    arguments.shape((x.shape[-1],), weight=weight, bias=bias)
    if not is_number(eps) or not 0 <= eps < math.inf:
        raise KernelError("eps is out of range", where="eps", got=repr(eps), want="a finite number from 0 on")


def unit(x: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """Return x_hat and r (..., 1), in the width of `x`, in plain torch."""
    x = x.to(arguments.width(x))
    x = x - x.mean(-1, keepdim=True) if centered else x
    r = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * r, r


def scaled(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x_hat * weight + bias as `dtype`."""
    y = x_hat if weight is None else x_hat * weight.to(x_hat.dtype)
    y = y if bias is None else y + bias.to(x_hat.dtype)
    # Without `.to` the same dtype, of whose result torch.compile of torch 2.11 computes a gradient of zero
    # (github.com/pytorch/pytorch/issues/180642).
    return y if y.dtype == dtype else y.to(dtype)


def inverted(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x_hat recovered from `y`, in the width of `y`."""
    x_hat = y.to(arguments.width(y))
    x_hat = x_hat if bias is None else x_hat - bias.to(x_hat.dtype)
    if weight is None:
        return x_hat
    weight, bound = weight.to(x_hat.dtype), y.shape[-1] ** 0.5
    is_zero = weight == 0
    return torch.where(is_zero, 0, (x_hat / weight.masked_fill(is_zero, 1)).clamp(-bound, bound))


def _over_rows(x: Tensor) -> Tensor:
    return x.sum(list(range(x.dim() - 1))) if x.dim() > 1 else x


class Formulas(Function):
    """The same in plain torch, saving as little as the kernels; backward is differentiable."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool, invertible: bool
    ) -> tuple[Tensor, Tensor]:
        x_hat, r = unit(x, eps, centered)
        return scaled(x_hat, weight, bias, x.dtype), r

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, ctx.eps, ctx.centered, ctx.invertible = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        if ctx.invertible:
            ctx.save_for_backward(*output, weight, bias)
        else:
            ctx.save_for_backward(x, weight)
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dr: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.invertible:
            y, r, weight, bias = ctx.saved_tensors
            x_hat = inverted(y, weight, bias)
        else:
            x, weight = ctx.saved_tensors
            x_hat, r = unit(x, ctx.eps, ctx.centered)
        dy_wide = dy.to(x_hat.dtype)
        g = dy_wide if weight is None else dy_wide * weight.to(x_hat.dtype)
        dx = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
        dx = r * (dx - g.mean(-1, keepdim=True) if ctx.centered else dx)
        if ctx.invertible:  # second derivatives go through r, then a differentiable output
            dx = dx - dr * r * r * x_hat / max(x_hat.shape[-1], 1)
        dweight = _over_rows(dy_wide * x_hat).to(weight.dtype) if weight is not None else None
        dbias = _over_rows(dy_wide).to(ctx.bias_dtype) if ctx.bias_dtype is not None else None
        return dx.to(dy.dtype), dweight, dbias, None, None, None


class NormFunction(Function):
    """The kernels of forward below, and of normalization_backward."""

    @staticmethod
    def forward(
        x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool,
        invertible: bool, returns_sum: bool,
    ) -> tuple[Tensor, ...]:
        keeps_sum = residual is not None and (returns_sum or not invertible)
        return _launch_forward(
            x, residual, weight, bias, eps, centered, keeps_sum, centered and not invertible
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, residual, weight, bias, _, ctx.centered, ctx.invertible, ctx.returns_sum = inputs
        y, total, mean, r = output
        ctx.has_residual = residual is not None
        ctx.dtypes = [None if p is None else p.dtype for p in (weight, bias)]
        if ctx.invertible:
            ctx.save_for_backward(y, r, weight, bias)
        elif ctx.centered:
            ctx.save_for_backward(x if residual is None else total, r, weight, mean)
        else:
            ctx.save_for_backward(x if residual is None else total, r, weight)
        # Saved outputs are not marked as non-differentiable, so that `first_order` raises an error for a second
        # derivative that goes through them; it would be 0 otherwise.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        x, r, weight, *rest = ctx.saved_tensors
        bias, mean = (rest[0], None) if ctx.invertible else (None, rest[0] if rest else None)
        dy = torch.zeros_like(x) if dy is None else dy
        dtotal = dtotal if ctx.returns_sum else None  # torch.compile passes zeros where there is no gradient
        wanted = zip(ctx.dtypes, ctx.needs_input_grad[2:4], strict=True)
        dtypes = [dtype if needed else None for dtype, needed in wanted]
        dx, *dparams = first_order(
            normalization_backward.backward, dy, x, mean, r, weight, bias, dtotal, ctx.centered, ctx.invertible, *dtypes
        )
        dparams = [None if dtype is None else p for dtype, p in zip(dtypes, dparams, strict=True)]
        return dx, dx if ctx.has_residual else None, *dparams, None, None, None, None


def layer_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return `layer_norm` in plain torch."""
    x = x if residual is None else x + residual
    if all(p is None or p.dtype == x.dtype for p in (weight, bias)):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return scaled(unit(x, eps, True)[0], weight, bias, x.dtype)


def rms_reference(
    x: Tensor, weight: Tensor | None = None, *, residual: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Return `rms_norm` in plain torch."""
    x = x if residual is None else x + residual
    return scaled(unit(x, eps, False)[0], weight, None, x.dtype)


def _normalize(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, *, centered: bool,
    invertible: bool, returns_sum: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the norm of x or of the sum, and that, which has a gradient only with `returns_sum`."""
    check(x, residual, weight, bias, eps)
    if runs_triton("layer_norm", x) if centered else runs_triton("rms_norm", x):
        return NormFunction.apply(x, residual, weight, bias, eps, centered, invertible, returns_sum)[:2]
    total = x if residual is None else x + residual
    has_one_dtype = all(p is None or p.dtype == x.dtype for p in (weight, bias))
    if invertible or not has_one_dtype or not (centered or x.is_cuda):  # torch's RMS norm is fused on a GPU alone
        return Formulas.apply(total, weight, bias, eps, centered, invertible)[0], total
    if centered:
        return F.layer_norm(total, x.shape[-1:], weight, bias, eps), total
    return F.rms_norm(total, x.shape[-1:], weight, eps), total


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: Tensor | None = None,
    eps: float = 1e-5, invertible: bool = False,
) -> Tensor:
    """Return x, or x + residual, normalised over its last dim, times weight, plus bias.

    Args:
        x: (..., N) float32, float16 or bfloat16 (float64 by the reference). The output has its shape and dtype.
        weight: (N,) of any floating dtype; its gradient has that dtype and is summed in float32.
        bias: as weight.
        residual: as x; the sum is not returned (`add_layer_norm` does).
        eps: added to the variance.
        invertible: save the output in place of the input, from which backward recovers the input. This saves
            memory where the next operation saves the output anyway, at a cost in accuracy: x_hat has the rounding of
            y, magnified by |y / weight| where the weight is small beside the bias. Where a weight is 0 its x_hat is
            lost and taken as 0: that weight then has gradient 0, and its column of x's gradient lacks one term;
            other columns are exact.

    Raises `KernelError` for any other dtype, and where shapes or devices do not fit.
    """
    return _normalize(x, residual, weight, bias, eps, centered=True, invertible=invertible)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5,
    invertible: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return `layer_norm(x, weight, bias, residual=residual)` and the sum x + residual.

    Arguments and errors are those of `layer_norm`. The gradient with respect to the sum is added in the same backward
    pass.
    """
    return _normalize(
        x, residual, weight, bias, eps, centered=True, invertible=invertible, returns_sum=True
    )


def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, residual: Tensor | None = None, eps: float = 1e-6,
    invertible: bool = False,
) -> Tensor:
    """Return x, or x + residual, over the root of the mean square of its last dim, times weight.

    Args:
        x: (..., N) float32, float16 or bfloat16 (float64 by the reference). The output has its shape and dtype.
        weight: (N,) of any floating dtype; its gradient has that dtype and is summed in float32.
        residual: as x; the sum is not returned (`add_rms_norm` does).
        eps: added to the mean square.
        invertible: save the output in place of the input, from which backward recovers the input. This saves
            memory where the next operation saves the output anyway, at a cost in accuracy: x_hat has the rounding of
            y. Where a weight is 0 its x_hat is lost and taken as 0: that weight then has gradient 0, and its column
            of x's gradient lacks one term; other columns are exact.

    Raises `KernelError` for any other dtype, and where shapes or devices do not fit.
    """
    return _normalize(x, residual, weight, None, eps, centered=False, invertible=invertible)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, invertible: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm(x, weight, residual=residual)` and the sum x + residual.

    Arguments and errors are those of `rms_norm`. The gradient with respect to the sum is added in the same backward
    pass.
    """
    return _normalize(
        x, residual, weight, None, eps, centered=False, invertible=invertible, returns_sum=True
    )


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


@operator("normalize", lambda x, *rest: _outputs(x, *rest[-2:]))
def _launch_forward(
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
