"""Weights as integers of a few bits with a scale for each group: what a quantized weight is, held in its real size.

`fds.kernels.fake_quantize` has the formulas of the grids. A group is a run of consecutive numbers of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
            the first in the low bits; of 9 bits or more (G, n) int16, 2^15 less. With `sizes` one row has all of them.
        scales: (G, 1) float32; float64 of such a weight.
        zeros: (G, 1) of the same dtype, what `fds.kernels.fake_quantize` calls z or -k; None in a symmetric grid.
        bits: of an integer.
        group: n, how many consecutive numbers share a scale; with `sizes` those of a row of codes.
        scheme: "deepspeed" or "torchao".
        shape: of the weight.
        dtype: of the weight.
        sizes: (G,) int32, how many numbers each group has where a cut left more of some than of others; else None.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int
    scheme: Scheme
    shape: tuple[int, ...]
    dtype: torch.dtype
    sizes: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What it holds, by name."""
        tensors = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros, "sizes": self.sizes}
        return {name: x for name, x in tensors.items() if x is not None}

    @property
    def num_bytes(self) -> int:
        """The bytes of its tensors."""
        return sum(x.nbytes for x in self.tensors.values())

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
        zero = 0.0 if self.zeros is None else self._of_numbers(self.zeros)
        x = Integers(self._integers(self.scales.dtype), self._of_numbers(self.scales), zero).numbers(self.scheme)
        return x.to(self.dtype).view(self.shape)

    def cut(self, keeps: Mapping[int, Tensor]) -> Packed:
        """Return the weight of which some indices along dims are left out: integers and scales of the others stay.

        Args:
            keeps: by dim, (its length,) bool, True where an index stays.
        """
        device = self.codes.device
        stays = torch.ones(self.shape, dtype=torch.bool, device=device)
        for dim, keep in keeps.items():
            stays &= keep.to(device).view(-1, *[1] * (stays.dim() - dim - 1))
        shape = tuple(int(keeps[dim].sum()) if dim in keeps else n for dim, n in enumerate(self.shape))
        group = torch.arange(len(self.scales), device=device)
        group = group.repeat_interleave(self.group if self.sizes is None else self.sizes).view(self.shape)
        groups, sizes = group[stays].unique_consecutive(return_counts=True)  # groups of which nothing stays are gone
        alike = len(sizes) > 0 and bool((sizes == sizes[0]).all())
        codes = self._codes().reshape(self.shape)[stays].view(len(sizes) if alike else 1, -1)
        return attrs.evolve(
            self,
            codes=_joined(codes, _width(self.bits)),
            scales=self.scales[groups],
            zeros=None if self.zeros is None else self.zeros[groups],
            sizes=None if alike else sizes.to(torch.int32),
            group=codes.shape[1],
            shape=shape,
        )

    def zeroed(self, where: Tensor) -> Packed:
        """Return the weight with the integer of 0 in places, bool (its shape); 1 bit of "deepspeed" has none."""
        integer = torch.zeros_like(self.scales) if self.zeros is None else -self.zeros
        if self.zeros is not None and self.scheme == "deepspeed":
            integer = (integer / self.scales).round()
        codes = self._codes()
        code = (self._of_numbers(integer) - self.lowest).clamp(0, 2**self.bits - 1)
        code = (code - _offset(self.bits)).to(codes.dtype)
        return attrs.evolve(
            self, codes=_joined(torch.where(where.reshape(codes.shape), code, codes), _width(self.bits))
        )

    def _of_numbers(self, x: Tensor) -> Tensor:
        """Return what each group has (G, 1) as integers are multiplied by it."""
        if self.sizes is None:
            return x
        return x.flatten().repeat_interleave(self.sizes, output_size=self.group).view(1, -1)

    def _codes(self) -> Tensor:
        """Return what is stored of each integer, as many in a row as have a scale, uint8 or int16."""
        width = _width(self.bits)
        if width >= 8:
            return self.codes
        places = torch.arange(0, 8, width, dtype=torch.uint8, device=self.codes.device)
        return (self.codes[..., None] >> places & (1 << width) - 1).flatten(1)[:, : self.group]

    def _integers(self, dtype: torch.dtype) -> Tensor:
        codes = self._codes().to(dtype)
        if _is_binary(self.scheme, self.bits):
            return codes.mul_(2).sub_(1)
        return codes.add_(self.lowest + _offset(self.bits))


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
    codes = codes.sub_(_offset(bits)).nan_to_num_(0).to(torch.int16 if bits > 8 else torch.uint8)
    zeros = zeros if isinstance(zeros, Tensor) else None
    return Packed(_joined(codes, _width(bits)), scales, zeros, bits, group, scheme, tuple(x.shape), x.dtype)


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


def _offset(bits: int) -> int:
    """Return by how much less than a code is stored: int16 has a sign."""
    return 1 << 15 if bits > 8 else 0


def _is_binary(scheme: str, bits: int) -> bool:
    return scheme == "deepspeed" and bits == 1


def _joined(codes: Tensor, width: int) -> Tensor:
    """Return codes (G, n) with as many in a byte as there is room for, the last one filled up with 0."""
    each = 8 // width
    if each <= 1:
        return codes
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each)).unflatten(1, (-1, each))
    joined = codes[..., 0].clone()
    for place in range(1, each):
        joined |= codes[..., place] << place * width
    return joined
