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

Source: DeepSpeed 0.19.6, compression/utils.py, runtime/quantize.py; torchao 0.18, quant_primitives.py. Li et al. 2016,
arXiv:1605.04711 (2 bits); Rastegari et al. 2016, arXiv:1603.05279 (1 bit); Bengio et al. 2013, arXiv:1308.3432 (dx).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fds.errors import KernelError, is_int
from fds.kernels import arguments
from fds.kernels.operators import Function

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
    if scheme == "deepspeed":
        return _deepspeed(x, bits, symmetric, noise)
    return _torchao(x, bits, symmetric, dtype)


def _deepspeed(x: Tensor, bits: int | Tensor, symmetric: bool, noise: Tensor | None) -> Integers:
    if symmetric:
        scale, zero = x.abs().amax(-1, keepdim=True) / (1 << (bits - 1)), 0.0
        scale = torch.where(scale == 0, 1, scale)
        q = x / scale
    else:
        least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        scale = (most - least) / (1 << bits)
        zero = torch.where(scale == 0, least, (least / scale).round_() * scale)
        scale = torch.where(scale == 0, 1, scale)
        q = (x - zero).div_(scale)
    return Integers((q if noise is None else q.add_(noise)).round_(), scale, zero)


def _torchao(x: Tensor, bits: int | Tensor, symmetric: bool, dtype: torch.dtype) -> Integers:
    low, high = bounds(bits, "torchao", symmetric)
    smallest = torch.finfo(dtype).smallest_normal
    if symmetric:
        scale = x.abs().amax(-1, keepdim=True).to(dtype) / ((high - low) / 2)
        scale, zero = scale.clamp_(min=smallest).to(x.dtype), 0.0
    else:
        least = x.amin(-1, keepdim=True).clamp_(max=0).to(dtype)
        scale = (x.amax(-1, keepdim=True).clamp_(min=0).to(dtype) - least) / (high - low)
        scale = scale.clamp_(min=smallest)
        zero = (low - (least / scale).round_()).clamp_(low, high).neg_().to(x.dtype)
        scale = scale.to(x.dtype)
    return Integers((x * (1 / scale)).round_().sub_(zero), scale, zero)


def _ternary(x: Tensor) -> Integers:
    size = x.abs()
    is_large = size > 0.7 * (size.sum(-1, keepdim=True) / x.shape[-1])
    scale = (size * is_large).sum(-1, keepdim=True) / is_large.sum(-1, keepdim=True).clamp_(min=1)
    return Integers(x.sign().mul_(is_large), scale, 0.0)


def _binary(x: Tensor) -> Integers:
    scale = x.abs().sum(-1, keepdim=True) / x.shape[-1]
    return Integers((x >= 0).to(x.dtype).mul_(2).sub_(1), scale, 0.0)


def reference(
    x: Tensor,
    bits: int | Tensor,
    scheme: str,
    symmetric: bool,
    noise: Tensor | None,
    kept: Tensor | None,
    reach: tuple[int, int],
) -> tuple[Tensor, Tensor | None]:
    """Return y in plain torch, and where q is within bounds; None where that does not matter for the gradient."""
    y: Tensor | None = None
    inside = None
    if scheme == "torchao" or reach[1] > 2:
        rounded = integers(x, bits, scheme=scheme, symmetric=symmetric, noise=noise)
        low, high = bounds(bits, scheme, symmetric)
        if scheme == "torchao":
            clamped = rounded.q.clamp(low, high)
            inside = clamped == rounded.q
            y = rounded._replace(q=clamped).numbers(scheme)
        else:
            rounded.q.clamp_(low, high)
            y = rounded.numbers(scheme)
    if scheme == "deepspeed":
        for few in (2, 1):
            if reach[0] <= few <= reach[1]:
                z = integers(x, few, scheme=scheme, symmetric=symmetric, low=few).numbers(scheme)
                y = z if y is None else torch.where(torch.as_tensor(bits == few), z, y)
    assert y is not None
    if kept is not None:
        share = kept.to(y.dtype)
        y = torch.where(share == 1, x, share * x + (1 - share) * y)
    return y.to(x.dtype), inside


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
        return reference(x, bits, scheme, symmetric, noise, kept, reach)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        inside, kept = output[1], inputs[5]
        ctx.save_for_backward(*(() if inside is None else (inside,) if kept is None else (inside, kept)))
        if inside is not None:
            ctx.mark_non_differentiable(inside)

    @staticmethod
    def backward(ctx, dy: Tensor, _) -> tuple[Tensor | None, ...]:
        if ctx.saved_tensors:
            inside, *kept = ctx.saved_tensors
            dy = torch.where(inside, dy, kept[0].to(dy.dtype) * dy if kept else 0)
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
        bits: 1 to 16; or a () int64 tensor, so that they may follow time, with `reach`.
        scheme: "deepspeed", or "torchao" for its grid, which reaches the largest number.
        symmetric: whether 0 is the integer 0; "deepspeed" has 2 and 1 bits symmetric alone.
        noise: (G, n), added to what is rounded, as numbers in [-1/2, 1/2) round stochastically; of "deepspeed" alone.
        kept: () floating, the share of x that is mixed in; None for 0.
        reach: the fewest and the most bits that a tensor says.

    Raises `KernelError` for anything else.
    """
    arguments.floating(x=x, noise=noise)
    arguments.shape((None, None), x=x)
    if noise is not None:
        arguments.shape(tuple(x.shape), noise=noise)
    if scheme not in SCHEMES:
        raise KernelError("there is no such scheme", where="scheme", got=repr(scheme), want="'deepspeed' or 'torchao'")
    if isinstance(bits, Tensor) == (reach is None):
        raise KernelError(
            "bits are a number, or a tensor with reach", where="bits", got=f"{bits!r}, {reach=}"[:80], want="8"
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
    return _StraightThrough.apply(x, bits, scheme, symmetric, noise, kept, (fewest, most))[0]
