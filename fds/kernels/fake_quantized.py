"""Numbers rounded to a grid of integers, with a scale for each group, and back: fake quantization.

x (G, n) has a group in each row, b are bits, L = 2^(b - 1), u is 0 or noise in [-1/2, 1/2)::

    deepspeed, symmetric   s = max |x| / L               q = clamp(round(x / s + u), -L, L - 1)         y = q s
    deepspeed, asymmetric  s = (max x - min x) / 2^b     q = clamp(round((x - z) / s + u), 0, 2 L - 1)  y = q s + z
                           z = round(min x / s) s
    torchao, symmetric     s = max |x| / (L - 1/2)       q = clamp(round(x (1 / s)), -L, L - 1)         y = q s
    torchao, asymmetric    s = (x+ - x-) / (2 L - 1)     q = clamp(round(x (1 / s)) + k, -L, L - 1)     y = (q - k) s
                           k = clamp(-L - round(x- / s), -L, L - 1)    x+ = max(x, 0), x- = min(x, 0)
    deepspeed, 2 bits      t = 0.7 mean |x|              q = 1 where x > t, -1 where x < -t, else 0     y = q s
                           s = mean of |x| > t
    deepspeed, 1 bit       s = mean |x|                  q = 1 where x >= 0, else -1                    y = q s

round takes ties to even. With dy the gradient of y, dx = dy; of torchao 0 where q was clamped, as it has it. A group of
zeros gives zeros, and one of equal numbers, of which s is 0, these numbers. Numbers of 16 bits are computed in float32,
and y is rounded once; torchao's s is rounded to the dtype of x.

`kept`, () in [0, 1], is the share of x that is mixed in: kept x + (1 - kept) y, and x itself at 1.

The kernel gives the bits of the reference. Groups of up to 8,192 numbers are read once; of larger ones plain torch
finds the scales before. 2 bits and 1 bit of "deepspeed", and what is mixed in, are plain torch.

Moves: reads x and writes y; for larger groups it reads x three times. Saves: of torchao a byte a number, else nothing.

Source: DeepSpeed 0.19.6, compression/utils.py, runtime/quantize.py; torchao 0.18, quant_primitives.py. Li et al. 2016,
arXiv:1605.04711 (2 bits); Rastegari et al. 2016, arXiv:1603.05279 (1 bit); Bengio et al. 2013, arXiv:1308.3432 (dx).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fds.errors import KernelError, is_int
from fds.kernels import arguments
from fds.kernels.choice import runs_triton
from fds.kernels.language import cdiv, jit, next_power_of_2, on, tl
from fds.kernels.operators import Function, operator

SCHEMES = ("deepspeed", "torchao")
MOST_BITS = 16


class Integers(NamedTuple):
    """What a group of numbers is rounded to: y = q s + z ("deepspeed"), or (q + z) s ("torchao").

    Attributes:
        q: (G, n), integers as floating-point numbers, of which those beyond `bounds` are clamped.
        scale: (G, 1), s.
        zero: (G, 1), z, or -k; 0 in a symmetric grid.
    """

    q: Tensor
    scale: Tensor
    zero: Tensor | float

    def numbers(self, scheme: str) -> Tensor:
        """Return y, in the memory of q."""
        if scheme == "deepspeed":
            return self.q.mul_(self.scale).add_(self.zero)  # + 0 makes 0 of -0, which no integer is
        return self.q.add_(self.zero).mul_(self.scale)


def bounds(bits: int | Tensor, scheme: str, symmetric: bool) -> tuple[Any, Any]:
    """Return the lowest and the highest integer: tensors where `bits` is one."""
    highest = (1 << bits) - 1
    if scheme == "deepspeed" and not symmetric:
        return 0, highest
    half = 1 << (bits - 1)
    return -half, highest - half


def integers(
    x: Tensor, bits: int | Tensor, *, scheme: str, symmetric: bool, noise: Tensor | None = None, low: int = 0
) -> Integers:
    """Return the integers, not clamped, and what makes numbers of them.

    Args:
        x: (G, n) float32 or float64, or of 16 bits, which is computed in float32.
        bits: of an integer; a () int64 tensor on the device of x where it follows time.
        scheme: "deepspeed" or "torchao".
        symmetric: whether 0 is the integer 0.
        noise: (G, n), u; None for 0.
        low: 2 or 1 for the formula of so few bits, which "deepspeed" has, whatever `bits` says.
    """
    dtype = x.dtype
    x = x if dtype is torch.float64 else x.float()
    if low:
        return _ternary(x) if low == 2 else _binary(x)
    scale, zero = scales(x, bits, scheme, symmetric, dtype)
    if scheme == "torchao":
        return Integers((x * (1 / scale)).round_().sub_(zero), scale, zero)
    q = x / scale if symmetric else (x - zero).div_(scale)
    return Integers((q if noise is None else q.add_(noise)).round_(), scale, zero)


def scales(
    x: Tensor, bits: int | Tensor, scheme: str, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | float]:
    """Return the scale and the zero of each group; `dtype` is that of the numbers that x (G, n) was made of.

    What divides is a tensor on the device: by a number a GPU multiplies with its rounded inverse.
    """
    low, high = bounds(bits, scheme, symmetric)
    most = (x.abs() if symmetric else x).amax(-1, keepdim=True)
    if scheme == "deepspeed":
        if symmetric:
            scale = most / (1 << (bits - 1))
            return torch.where(scale == 0, 1, scale), 0.0
        least = x.amin(-1, keepdim=True)
        scale = (most - least) / (1 << bits)
        zero = torch.where(scale == 0, least, (least / scale).round_() * scale).add_(0.0)  # 0 for -0
        return torch.where(scale == 0, 1, scale), zero
    smallest = torch.finfo(dtype).smallest_normal
    if symmetric:
        scale = _over(most.to(dtype), (high - low) / 2)
        return scale.clamp_(min=smallest).to(x.dtype), 0.0
    least = x.amin(-1, keepdim=True).clamp_(max=0).to(dtype)
    scale = _over(most.clamp_(min=0).to(dtype) - least, high - low).clamp_(min=smallest)
    zero = (low - (least / scale).round_()).clamp_(low, high).neg_()
    return scale.to(x.dtype), zero.to(x.dtype)


def _over(x: Tensor, number: float | Tensor) -> Tensor:
    return x / (number if isinstance(number, Tensor) else torch.full_like(x, number))


def _ternary(x: Tensor) -> Integers:
    size = x.abs()
    is_large = size > 0.7 * (size.sum(-1, keepdim=True) / x.shape[-1])
    scale = (size * is_large).sum(-1, keepdim=True) / is_large.sum(-1, keepdim=True).clamp_(min=1)
    return Integers(x.sign().mul_(is_large), scale, 0.0)


def _binary(x: Tensor) -> Integers:
    scale = x.abs().sum(-1, keepdim=True) / x.shape[-1]
    return Integers((x >= 0).to(x.dtype).mul_(2).sub_(1), scale, 0.0)


def reference(
    x: Tensor, bits: int | Tensor, scheme: str, symmetric: bool, noise: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return y in plain torch, but for 2 and 1 bits of "deepspeed", and for "torchao" where q is not clamped."""
    rounded = integers(x, bits, scheme=scheme, symmetric=symmetric, noise=noise)
    low, high = bounds(bits, scheme, symmetric)
    if scheme == "deepspeed":
        rounded.q.clamp_(low, high)
        return rounded.numbers(scheme).to(dtype), None
    clamped = rounded.q.clamp(low, high)
    inside = clamped == rounded.q
    return rounded._replace(q=clamped).numbers(scheme).to(dtype), inside


# A program has 2048 numbers, 16 for each thread, or one group that is larger. Derived, not measured.
LAUNCH = {"ELEMENTS": 2048, "MOST": 8192, "num_warps": 4, "warps_of_a_large_group": 8}


@jit(do_not_specialize=["groups", "bits", "smallest"])
def _kernel(
    x_ptr, y_ptr, inside_ptr, noise_ptr, bits_ptr, scale_ptr, zero_ptr, groups, n, bits, smallest,
    TORCHAO: tl.constexpr, SYMMETRIC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Take ROWS groups and COLUMNS of their numbers: all of them, unless the scales are given."""
    across = tl.cdiv(n, COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    at = row[:, None] * n + column[None, :]
    stored = (row < groups)[:, None] & (column < n)[None, :]
    x = tl.load(x_ptr + at, mask=stored, other=0.0).to(tl.float32)
    if bits_ptr is not None:
        bits = tl.load(bits_ptr).to(tl.int32)
    half = (1 << (bits - 1)).to(tl.float32)
    low, high = -half, half - 1
    if not TORCHAO and not SYMMETRIC:
        low, high = half * 0.0, 2 * half - 1

    zero = tl.zeros([ROWS], tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + row, mask=row < groups, other=1.0)
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + row, mask=row < groups, other=0.0)
    else:
        size = tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf"))  # NaN too
        largest = tl.max(tl.where(stored, size, 0.0), 1)
        if SYMMETRIC:
            difference, count = largest, (half if not TORCHAO else half - 0.5)
            least = zero
        else:
            least = tl.min(tl.where(stored, x, float("inf")), 1)
            most = tl.max(tl.where(stored, x, float("-inf")), 1)
            count = 2 * half
            if TORCHAO:
                least, most, count = tl.minimum(least, 0.0), tl.maximum(most, 0.0), 2 * half - 1
            difference = most - least
            if TORCHAO:
                difference = difference.to(x_ptr.dtype.element_ty).to(tl.float32)
        scale = tl.div_rn(difference, tl.zeros([ROWS], tl.float32) + count)
        if TORCHAO:
            scale = tl.maximum(scale.to(x_ptr.dtype.element_ty).to(tl.float32), smallest)
            if not SYMMETRIC:
                ratio = tl.div_rn(least, scale).to(x_ptr.dtype.element_ty).to(tl.float32)
                ratio = (ratio + 12582912.0) - 12582912.0
                zero = -tl.minimum(tl.maximum(low - ratio, low), high)
        else:
            is_flat = scale == 0
            scale = tl.where(is_flat, 1.0, scale)
            if not SYMMETRIC:
                ratio = (tl.div_rn(least, scale) + 12582912.0) - 12582912.0
                zero = tl.where(is_flat, least, ratio * scale) + 0.0
        scale = tl.where(largest < float("inf"), scale, float("nan"))

    wide = tl.zeros([ROWS, COLUMNS], tl.float32) + scale[:, None]
    if TORCHAO:
        q = x * tl.div_rn(1.0, wide)
    else:
        q = tl.div_rn(x - zero[:, None], wide)
        if noise_ptr is not None:
            q += tl.load(noise_ptr + at, mask=stored, other=0.0).to(tl.float32)
    q = (q + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest integer, of two the even one, and 0 for -0
    if TORCHAO:
        q -= zero[:, None]
        if inside_ptr is not None:
            tl.store(inside_ptr + at, ((q >= low) & (q <= high)).to(tl.int8), mask=stored)
    q = tl.minimum(tl.maximum(q, low), high)
    y = (q + zero[:, None]) * wide if TORCHAO else q * wide + zero[:, None]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=stored)


def _fake(
    x: Tensor, bits: int, level: Tensor | None, scheme: str, symmetric: bool, noise: Tensor | None, wide: bool
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=torch.float32 if wide else x.dtype)
    return y, x.new_empty(x.shape if scheme == "torchao" else 0, dtype=torch.bool)


@operator("fake_quantize", _fake)
def _launched(
    x: Tensor, bits: int, level: Tensor | None, scheme: str, symmetric: bool, noise: Tensor | None, wide: bool
) -> tuple[Tensor, Tensor]:
    """Return what `reference` does by the kernel, of `bits`, or of those that `level` () says; `wide` in float32."""
    x, noise = x.contiguous(), None if noise is None else noise.contiguous()
    y, inside = _fake(x, bits, level, scheme, symmetric, noise, wide)
    groups, n = x.shape
    if not x.numel():
        return y, inside
    scale = zero = None
    columns = next_power_of_2(n)
    if columns > LAUNCH["MOST"]:
        columns = LAUNCH["ELEMENTS"]
        now = bits if level is None else level
        scale, zero = scales(x.float(), now, scheme, symmetric, x.dtype)
    rows = max(1, LAUNCH["ELEMENTS"] // columns)
    warps = LAUNCH["num_warps" if columns <= LAUNCH["ELEMENTS"] else "warps_of_a_large_group"]
    with on(x):
        _kernel[(cdiv(groups, rows) * cdiv(n, columns),)](
            x, y, inside.view(torch.int8) if scheme == "torchao" else None, noise, level,
            scale, zero if isinstance(zero, Tensor) else None, groups, n, bits, torch.finfo(x.dtype).smallest_normal,
            TORCHAO=scheme == "torchao", SYMMETRIC=symmetric, ROWS=rows, COLUMNS=columns, num_warps=warps,
            enable_fp_fusion=False,
        )
    return y, inside


def _rounded(
    x: Tensor,
    bits: int | Tensor,
    scheme: str,
    symmetric: bool,
    noise: Tensor | None,
    kept: Tensor | None,
    reach: tuple[int, int],
) -> tuple[Tensor, Tensor | None]:
    """Return y, and where q is not clamped; None where that does not matter for the gradient."""
    y: Tensor | None = None
    inside = None
    dtype = x.dtype if kept is None else arguments.width(x)  # what is mixed in is rounded with it, once
    if scheme == "torchao" or reach[1] > 2:
        if runs_triton("fake_quantize", x):
            number, level = (0, bits) if isinstance(bits, Tensor) else (bits, None)
            y, kept_inside = _launched(x, number, level, scheme, symmetric, noise, dtype is not x.dtype)
            inside = kept_inside if scheme == "torchao" else None
        else:
            y, inside = reference(x, bits, scheme, symmetric, noise, dtype)
    if scheme == "deepspeed":
        for few in (2, 1):
            if reach[0] <= few <= reach[1]:
                z = integers(x, few, scheme=scheme, symmetric=symmetric, low=few).numbers(scheme).to(dtype)
                y = z if y is None else torch.where(torch.as_tensor(bits == few), z, y)
    assert y is not None
    if kept is not None:
        share, wide = kept.to(dtype), x.to(dtype)
        y = torch.where(share == 1, wide, share * wide + (1 - share) * y).to(x.dtype)
    return y, inside


class _StraightThrough(Function):
    """Rounds, and passes gradients on as if it did not."""

    @staticmethod
    def forward(
        x: Tensor,
        bits: int | Tensor,
        scheme: str,
        symmetric: bool,
        noise: Tensor | None,
        kept: Tensor | None,
        reach: tuple[int, int],
    ) -> tuple[Tensor, Tensor | None]:
        return _rounded(x, bits, scheme, symmetric, noise, kept, reach)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        inside, kept = output[1], inputs[5]
        ctx.save_for_backward(*(() if inside is None else (inside,) if kept is None else (inside, kept)))
        if inside is not None:
            ctx.mark_non_differentiable(inside)

    @staticmethod
    def backward(ctx, dy: Tensor, _) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: a checkpoint computes them
        if saved:
            inside, *kept = saved
            wide = arguments.width(dy)
            dy = torch.where(inside, dy, (kept[0].to(wide) * dy.to(wide)).to(dy.dtype) if kept else 0)
        return dy, None, None, None, None, None, None


def fake_quantize(
    x: Tensor,
    bits: int | Tensor,
    *,
    scheme: str = "deepspeed",
    symmetric: bool = True,
    noise: Tensor | None = None,
    kept: Tensor | None = None,
    reach: tuple[int, int] | None = None,
) -> Tensor:
    """Return x rounded to integers with a scale for each row, as numbers; gradients pass through.

    Args:
        x: (G, n) of any floating dtype; a row is a group of numbers that share a scale.
        bits: 1 to 16; or a () int64 tensor with `reach`, so that they may follow time. The host does not read it: fewer
            than the fewest bits are these, and more than the most those.
        scheme: "deepspeed", or "torchao" for its grid, which reaches the largest number.
        symmetric: whether 0 is the integer 0; "deepspeed" has 2 and 1 bits symmetric alone.
        noise: (G, n), added to what is rounded, as numbers in [-1/2, 1/2) round stochastically; of "deepspeed" alone.
        kept: () floating, the share of x that is mixed in; None for 0.
        reach: the fewest and the most bits that a tensor says.

    Raises `KernelError` for anything else.
    """
    arguments.required(x=x)
    arguments.floating(x=x, noise=noise)
    arguments.floating(kept=kept)  # which may lie on the host
    arguments.shape((None, None), x=x)
    arguments.shape((), kept=kept)
    if noise is not None:
        arguments.shape(tuple(x.shape), noise=noise)
    if scheme not in SCHEMES:
        raise KernelError("there is no such scheme", where="scheme", got=repr(scheme), want="'deepspeed' or 'torchao'")
    if isinstance(bits, Tensor) == (reach is None):
        raise KernelError(
            "bits are a number, or a tensor with reach", where="bits", got=f"{bits!r}, {reach=}"[:80], want="8"
        )
    if isinstance(bits, Tensor) and (bits.dtype is not torch.int64 or bits.dim()):
        raise KernelError(
            "bits are no integer", where="bits", got=f"{tuple(bits.shape)} {bits.dtype}", want="() torch.int64"
        )
    if not isinstance(symmetric, bool) or not (reach is None or (isinstance(reach, tuple) and len(reach) == 2)):
        raise KernelError(
            "there is no such grid", where="symmetric, reach", got=f"{symmetric!r}, {reach!r}"[:80],
            want="True or False, and (fewest bits, most) or None",
        )
    fewest, most = reach or (bits, bits)
    if not (is_int(fewest, 1) and is_int(most, fewest)) or most > MOST_BITS:
        raise KernelError("there are no such bits", where="bits", got=f"{fewest!r} to {most!r}", want="1 to 16")
    if (noise is not None and scheme == "torchao") or (
        scheme == "deepspeed" and fewest < 3 and (noise is not None or not symmetric)
    ):
        raise KernelError(
            "this grid is symmetric, and numbers are rounded to the nearest", where=f"{scheme}, {fewest} bits",
            got=f"symmetric={symmetric}" if noise is None else "noise", want="symmetric=True, noise=None",
        )
    if not x.numel():
        return x
    bits = bits.clamp(fewest, most) if isinstance(bits, Tensor) else bits
    return _StraightThrough.apply(x, bits, scheme, symmetric, noise, kept, (fewest, most))[0]
