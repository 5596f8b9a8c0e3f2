"""Weights as integers of a few bits with a scale for each group: what a quantized weight is, held in its real size.

`fds.kernels.fake_quantize` has the formulas of the grids. A group is a run of consecutive numbers of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from fds.errors import ComposeError, is_int
from fds.kernels.arguments import FLOATING
from fds.kernels.fake_quantized import SCHEMES, Integers, bounds, integers

Scheme = Literal["deepspeed", "torchao"]
Groups = int | Literal["rows"]


@attrs.frozen(eq=False)
class Packed:
    """A weight as integers with a scale for each group of consecutive numbers.

    Attributes:
        codes: (G, ceil(n w / 8)) uint8, n integers of a group, less the lowest one, of w bits each, w = 1, 2, 4 or 8,
            the first in the low bits; of 9 bits or more (G, n) int16, 2^15 less.
        scales: (G, 1) float32; float64 of such a weight.
        zeros: (G, 1) of the same dtype, what `fds.kernels.fake_quantize` calls z or -k; None in a symmetric grid.
        bits: of an integer.
        group: n, how many consecutive numbers share a scale.
        scheme: "deepspeed" or "torchao".
        shape: of the weight.
        dtype: of the weight.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int
    scheme: Scheme
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The bytes of its tensors."""
        return sum(x.numel() * x.element_size() for x in (self.codes, self.scales, self.zeros) if x is not None)

    @property
    def lowest(self) -> int:
        """The integer that the lowest code stands for."""
        low, _ = bounds(self.bits, self.scheme, self.zeros is None)
        return int(low)

    def integers(self) -> Tensor:
        """Return the integers, of the weight's shape, int32: -1 and 1 of one bit ("deepspeed")."""
        return self._integers(torch.int32).view(self.shape)

    def numbers(self) -> Tensor:
        """Return the weight: what `fds.kernels.fake_quantize` returned, bit for bit."""
        zero = 0.0 if self.zeros is None else self.zeros
        x = Integers(self._integers(self.scales.dtype), self.scales, zero).numbers(self.scheme)
        return x.to(self.dtype).view(self.shape)

    def _integers(self, dtype: torch.dtype) -> Tensor:
        width = _width(self.bits)
        if width == 16:
            codes = self.codes.to(dtype).add_(1 << 15)
        elif width == 8:
            codes = self.codes.to(dtype)
        else:
            places = torch.arange(0, 8, width, dtype=torch.uint8, device=self.codes.device)
            codes = (self.codes[..., None] >> places & (1 << width) - 1).flatten(1)[:, : self.group].to(dtype)
        return codes.mul_(2).sub_(1) if _is_binary(self.scheme, self.bits) else codes.add_(self.lowest)


def pack(
    x: Tensor, bits: int, *, group: int | None = None, scheme: Scheme = "deepspeed", symmetric: bool = True
) -> Packed:
    """Return a weight as integers, rounded to the nearest.

    Args:
        x: of any shape and floating dtype.
        bits: 1 to 16; of "torchao" 8 at the most.
        group: consecutive numbers that share a scale, of which there is a whole number; None for all of them.
        scheme: "deepspeed" or "torchao", as `fds.kernels.fake_quantize` has them.
        symmetric: whether 0 is the integer 0; "deepspeed" has 2 and 1 bits symmetric alone.

    Raises `ComposeError` for anything else, and for groups that are not full.
    """
    _check(x, bits, scheme, symmetric)
    group = x.numel() if group is None else group
    if not is_int(group, 1) or x.numel() % group:
        raise ComposeError("groups are not full", got=f"{x.numel()} numbers, {group=}"[:80], want="a divisor")
    rows = x.detach().reshape(-1, group)
    low = bits if scheme == "deepspeed" and bits <= 2 else 0
    q, scales, zeros = integers(rows, bits, scheme=scheme, symmetric=symmetric, low=low)
    least, most = bounds(bits, scheme, symmetric)
    codes = q.add_(1).div_(2) if _is_binary(scheme, bits) else q.clamp_(least, most).sub_(least)
    width = _width(bits)
    if width == 16:
        codes = codes.sub_(1 << 15).to(torch.int16)
    else:
        codes = _joined(codes.nan_to_num_(0).to(torch.uint8), width)
    return Packed(
        codes, scales, zeros if isinstance(zeros, Tensor) else None, bits, group, scheme, tuple(x.shape), x.dtype
    )


def numbers_per_group(name: str, shape: Sequence[int], groups: Groups, group_size: int | None) -> int:
    """Return how many consecutive numbers of a weight share a scale. Raises `ComposeError` for groups not full.

    Args:
        name: of the weight, for errors.
        shape: of the whole weight; its rows are along dim 0, and one of one dim is one row.
        groups: how many there are in it, or "rows" for one for each row.
        group_size: consecutive numbers of a row; None where `groups` says it.
    """
    numel, rows = math.prod(shape), max(shape[0], 1) if len(shape) > 1 else 1
    if group_size is not None:
        whole, count, words = numel // rows, group_size, f"group_size={group_size}"
        fits = whole % group_size == 0
    else:
        whole, words = numel, f"{groups=}"
        count = numel // (rows if isinstance(groups, str) else groups)
        fits = isinstance(groups, str) or numel % groups == 0
    if not numel or not fits:
        raise ComposeError(
            "a weight cannot be cut into such groups",
            where=name,
            got=f"{words} for shape {tuple(shape)}",
            want="a divisor of the numbers in a row" if group_size is not None else "a divisor of its numbers",
            hint="patterns may leave a weight out, and several quantize_weights may stand in a composition",
        )
    return count


def _check(x: Any, bits: Any, scheme: Any, symmetric: Any) -> None:
    """Raise `ComposeError` for what is not packed."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATING:
        got = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        raise ComposeError("pack makes integers of a weight", where="x", got=got, want="a floating-point tensor")
    fewest, most = 1 if symmetric or scheme == "torchao" else 3, 8 if scheme == "torchao" else 16
    if scheme not in SCHEMES or not isinstance(symmetric, bool) or not is_int(bits, fewest) or bits > most:
        got = f"{scheme=}, {bits=}, {symmetric=}"[:100]
        raise ComposeError("there is no such grid", got=got, want=f"{SCHEMES}, {fewest} to {most} bits, True or False")


def _width(bits: int) -> int:
    return next(width for width in (1, 2, 4, 8, 16) if width >= bits)


def _is_binary(scheme: str, bits: int) -> bool:
    return scheme == "deepspeed" and bits == 1


def _joined(codes: Tensor, width: int) -> Tensor:
    """Return codes (G, n) uint8 with as many in a byte as there is room for, the last one filled up with 0."""
    each = 8 // width
    if each == 1:
        return codes
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each)).unflatten(1, (-1, each))
    joined = codes[..., 0].clone()
    for place in range(1, each):
        joined |= codes[..., place] << place * width
    return joined
