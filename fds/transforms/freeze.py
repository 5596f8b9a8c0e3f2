"""Leave parameters as they are: no gradient, no gradient bytes, no optimizer state.

Fills:  frozen                   State:  none
Law:    equals the step on the other parameters alone, with the frozen ones as constants
Cost:   less: backward computes no gradient for them
Source: requires_grad_(False), as a value

`quantize_frozen`: hold frozen matrices as codes of 8 or 4 bits with a scale for each group of numbers of a row.

Fills:  view                     State:  none: parameters are held as uint8
Law:    the step whose frozen matrices are the codes times their scales, bit for bit
Cost:   1.02 bytes a number instead of 4, or 0.53, held and gathered; each use multiplies codes by scales
Source: blocks as in Dettmers et al. 2022, arXiv:2110.02861, section 2.1; Dettmers et al. 2023, arXiv:2305.14314
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from fds import kernels
from fds.compression import nf4
from fds.errors import ComposeError, Rule, StateError, is_a
from fds.layout import Leaf
from fds.step import AllBut, Call, Step, fill, transform


@transform
def freeze(*patterns: str, all_but: Sequence[str] = ()):
    """Freeze the parameters whose names match any pattern (`"embedding.*"`; `*` crosses dots), or all but some.

    Raises `ComposeError` without patterns, or with both kinds; `StateError` at init for a pattern that matches nothing.
    """
    both = [*patterns, *all_but]
    if not both or not all(is_a(p, str) for p in both) or (patterns and all_but) or isinstance(all_but, str):
        raise ComposeError(
            "freeze takes patterns of parameter names",
            got=f"{patterns!r}, all_but={all_but!r}" if all_but else repr(patterns),
            want='say, freeze("embedding.*"), or freeze(all_but=("head.*",))',
        )

    def apply(step: Step) -> Step:
        for pattern in [AllBut(tuple(all_but))] if all_but else patterns:
            step = fill(step, frozen=pattern)
        return step

    return apply


GROUP = 256  # consecutive numbers of a row that share a scale: of all states, for a save's shapes cannot always tell
_LEAST = 16  # numbers in a row: of fewer, scales are a good part of the bytes
_NARROW = (torch.float32, torch.float16, torch.bfloat16)  # the largest float64 has no scale in float32


def _has_codes(x: Tensor, leaf: Leaf) -> bool:
    """Say whether a parameter becomes codes. Raises `StateError` for what would be taken for some."""
    if x.dtype is torch.uint8 and x.ndim > 1:
        raise StateError(
            "a parameter of this dtype is taken for codes",
            where=leaf.name,
            got=f"{tuple(x.shape)} {x.dtype}",
            want="int16, or a buffer of a module",
        )
    return not (leaf.trained or x.dtype not in _NARROW or x.ndim < 2 or x.shape[-1] < _LEAST)


def _held(parts: tuple[int, ...], size: int, group: int, scale: int, codes: int) -> tuple[int, ...]:
    """Return the lengths of parts of scales, then of codes, given the bytes of each for a group."""
    if any(n % (group * size) for n in parts):
        return ()
    return tuple(n // group * num_bytes for num_bytes in (scale, codes) for n in parts)


@attrs.frozen
class Normal4:
    """A row of c numbers, c even, as the bytes of `fds.compression.nf4`."""

    dtype: torch.dtype  # of the numbers that come back
    draws = False
    by_row = True

    def encode(self, x: Tensor, leaf: Leaf) -> Tensor:
        """Return the rows of a frozen matrix, (..., nf4.width(c)) uint8; any other parameter as it is."""
        if not _has_codes(x, leaf) or x.shape[-1] % 2:
            return x
        return nf4.pack(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    def parts(self, parts: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Return the lengths of parts of rows as bytes; none where ranks' parts are not whole blocks."""
        return _held(parts, size, nf4.BLOCK, nf4.SCALE_BYTES, nf4.BLOCK // 2)

    def __call__(self, x: Tensor, leaf: Leaf, call: Call) -> Tensor:
        """Return codes times scales, (..., c); what is not held as rows as it is."""
        return nf4.numbers(x, self.dtype) if x.dtype is torch.uint8 and x.ndim > 1 else x


@attrs.frozen
class Int8:
    """A row of c numbers as its g = ceil(c / 256) scales, float32, and c codes, int8: 4 g + c bytes of uint8."""

    dtype: torch.dtype  # of the numbers that come back
    draws = False
    by_row = True

    def encode(self, x: Tensor, leaf: Leaf) -> Tensor:
        """Return the rows of a frozen matrix, (..., 4 g + c) uint8; any other parameter as it is."""
        if not _has_codes(x, leaf):
            return x
        *lead, c = x.shape
        width, group = c + 4 * -(-c // GROUP), min(GROUP, -(-c // 8) * 8)
        if x.is_meta:
            return x.new_empty((*lead, width), dtype=torch.uint8)
        rows = x.reshape(-1, c)
        messages = rows.new_empty((len(rows), -(-c // group) * (4 + group)), dtype=torch.uint8)
        kernels.quantize(rows, messages, bits=8, group=group)
        return messages[:, :width].reshape(*lead, width)  # without the room for codes of a last group that is not full

    def parts(self, parts: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Return the lengths of parts of rows as bytes; none where ranks' parts are not whole groups."""
        return _held(parts, size, GROUP, 4, GROUP)

    def __call__(self, x: Tensor, leaf: Leaf, call: Call) -> Tensor:
        """Return codes times scales, (..., c); what is not held as rows as it is."""
        if x.dtype is not torch.uint8 or x.ndim < 2:
            return x
        count = -(-x.shape[-1] // (4 + GROUP))
        scales = x[..., : 4 * count].clone(memory_format=torch.contiguous_format).view(torch.float32)
        numbers = x[..., 4 * count :].view(torch.int8).to(torch.float32)
        full = numbers.shape[-1] // GROUP
        whole = numbers[..., : full * GROUP].view(*x.shape[:-1], full, GROUP)
        whole.mul_(scales[..., :full, None])
        numbers[..., full * GROUP :].mul_(scales[..., full:])
        return numbers.to(self.dtype)


@transform(bits=Rule((8, 4).__contains__, ": {name} are those of a code", "8 or 4"))
def quantize_frozen(*, bits: int = 8, dtype: torch.dtype = torch.float32):
    """Hold what is frozen in 8 or 4 bits: matrices whose rows have 16 numbers or more.

    In 8 bits each number is off by 1/254 at most of the largest of its group, 256 consecutive numbers of a row. In 4
    bits it is one of the 16 numbers of NF4, as in QLoRA, times a scale for each 64 of a row, bfloat16; it is off by
    0.155 of the largest of these at most.

    `fds.freeze` and `fds.lora` say what is frozen; without them nothing changes. Frozen parameters of fewer than two
    dimensions, of shorter rows, of rows with an odd length in 4 bits, and of float64 stay as they are. Numbers are
    rounded once, in `step.init`. Saves and `fds.export_weights` have the codes, (..., 4 g + c) uint8 for rows of c
    numbers in g groups, or (..., c / 2 + 2 ceil(c / 64)); `step.params` and `step.into` give numbers.
    At stage 3 codes are gathered, and numbers made where the loss reads them; at others they are made for each
    microbatch.

    Args:
        bits: of a code: 8 or 4.
        dtype: of the numbers, before `fds.precision` casts them.

    Ranks of a pipeline hold the codes of their stages, those of a tensor axis the codes of their pieces.

    Raises `ComposeError` for anything else; `StateError` at init for a uint8 matrix among the parameters, and for one
    that a tensor axis cuts along its rows elsewhere than between groups: of 256 numbers, of 64 in 4 bits.
    """
    if dtype not in _NARROW:
        raise ComposeError(
            "quantize_frozen: numbers have another dtype",
            got=f"dtype={dtype!r}"[:60],
            want=", ".join(map(str, _NARROW)),
        )

    def apply(step: Step) -> Step:
        return fill(step, view=Int8(dtype) if bits == 8 else Normal4(dtype))

    return apply
