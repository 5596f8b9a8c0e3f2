"""Numbers as signs, 32 to a word, with a scale for each group.

    scale = mean |x|;  x' = scale where x >= 0, else -scale;  kept += x - x'

The kernel writes the signs of the reference, and scales within 2^-20 of it: the order of a sum is each one's own.

Moves:  4 + 1/8 bytes for each number of float32, 8 more where `kept` takes what is lost
Source: Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fds.kernels.choice import runs_triton
from fds.kernels.groups import MOST, blocks, fits, grouped, opened, place, tile
from fds.kernels.language import cdiv, jit, on, tl

_TO_TOP = 0x0102040810204080  # times eight bytes of 0 or 1: bit i of the uppermost byte is byte i


def reference(numbers: Tensor, messages: Tensor, *, group: int, kept: Tensor | None = None) -> None:
    """Do the same in plain torch."""
    k, n = numbers.shape
    scales, codes = opened(messages, n, group=group, bits=1)
    for rows, at, columns in blocks(k, n, group):
        x = grouped(numbers[rows, columns], group).float()
        scale = x.abs().sum(-1).mul_(1 / min(group, n - columns.start))
        scales[rows, at] = scale
        codes[rows, at] = sign_bits(x)
        if kept is not None:
            sent = x + 0.0  # -0.0 is sent as 0.0 is
            torch.copysign(scale[..., None], sent, out=sent)
            torch.sub(x, sent, out=sent)
            kept[rows, columns] += sent.flatten(1)[:, : columns.stop - columns.start]


@jit
def _sign_kernel(
    numbers_ptr, kept_ptr, words_ptr, n, count, group, row, column, kept_row, kept_column, message,
    BITS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):
    line = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    word, each = tl.arange(0, WORDS)[None, :], group // 32
    places, shift = place(word, group, BITS)
    at = g[:, None, None] * group + places
    stored = (g[:, None] < count) & (word < each)
    inside = stored[:, :, None] & (at < n)
    x = tl.load(numbers_ptr + line * row + at * column, mask=inside, other=0.0).to(tl.float32)

    size = tl.minimum(n - g * group, group).to(tl.float32)
    scale = tl.sum(tl.sum(tl.abs(x), 2), 1) * tl.div_rn(1.0, tl.where(g < count, size, 1.0))
    is_positive = x >= 0
    if kept_ptr is not None:
        kept = kept_ptr + line * kept_row + at * kept_column
        sent = tl.where(is_positive, scale[:, None, None], -scale[:, None, None])
        tl.store(kept, tl.load(kept, mask=inside) + (x - sent), mask=inside)
    words_ptr += line * message
    tl.store(words_ptr + g, scale.to(tl.int32, bitcast=True), mask=g < count)
    tl.store(words_ptr + count + g[:, None] * each + word, tl.sum(is_positive.to(tl.int32) << shift, 2), mask=stored)


@torch.no_grad()
def pack_signs(numbers: Tensor, messages: Tensor, *, group: int, kept: Tensor | None = None) -> None:
    """Write each row of numbers to a message: scales, then signs, a bit each, 1 where a number is not negative.

    Args:
        numbers: (k, n), of any floating dtype. The scale of a group that is not full is the mean of what it has.
        messages: (k, m) uint8, m = ceil(n / group) * (4 + group / 8).
        group: numbers that share a scale, a multiple of 32.
        kept: (k, n) float32, to which is added what a message loses; or None.

    Raises `KernelError` for messages of another shape.
    """
    k, n = numbers.shape
    if not k or not n:
        return
    if not (runs_triton("pack_signs", numbers) and fits(group)):
        reference(numbers, messages, group=group, kept=kept)
        return
    opened(messages, n, group=group, bits=1)
    count, words = cdiv(n, group), messages.view(torch.int32)
    meta = tile(1, group, MOST)
    with on(numbers):
        _sign_kernel[(cdiv(count, meta["ROWS"]), k)](
            numbers, kept, words, n, count, group, *numbers.stride(), *((0, 0) if kept is None else kept.stride()),
            words.stride(0), **meta, enable_fp_fusion=False,
        )


def sign_bits(x: Tensor) -> Tensor:
    """Return a bit for each number of x (..., 8 k), 1 where it is not negative: (..., k) uint8, the first in bit 0."""
    return (((x >= 0).contiguous().view(torch.int64) * _TO_TOP) >> 56).to(torch.uint8)


def signs_of(bits: Tensor) -> Tensor:
    """Return 1 for each bit of (..., k) uint8, -1 where it is 0: (..., 8 k) float32."""
    return _signs(bits.device).index_select(0, bits.reshape(-1).int()).view(*bits.shape[:-1], -1)


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """Return 1 or -1 for every bit of every byte, (256, 8)."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
    return (bits & 1).mul_(2).sub_(1).float()
