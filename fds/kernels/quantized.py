"""Numbers as integers of 8 or 4 bits with a scale for each group.

    scale = max |x| / L, L = 127 or 7;  q = round(x / scale), two of 4 bits in a byte;  kept += x - scale * q
    stochastic: q = floor(x / scale + u), u in [0, 1) a hash of the seed, the bits of x and its place

Division by L and by the scale multiplies by 1 / L and 1 / scale, rounded: the same bits on every device.

Moves:  4 + 1.02 bytes for each number of float32 in 8 bits, 8 more where `kept` takes what is lost
Source: Wang et al. 2023, arXiv:2306.10209, section 3
"""

from __future__ import annotations

import torch
from torch import Tensor

from fds.kernels.choice import runs_triton
from fds.kernels.groups import LEVELS, MOST, blocks, fits, grouped, opened, place, tile
from fds.kernels.language import cdiv, jit, on, tl

_LEAST = 2.0**-120  # a smaller scale has no reciprocal in float32: its group arrives as zeros


def reference(
    numbers: Tensor, messages: Tensor, *, bits: int, group: int, seed: int | None = None, kept: Tensor | None = None
) -> None:
    """Do the same in plain torch."""
    k, n = numbers.shape
    scales, codes = opened(messages, n, group=group, bits=bits)
    for rows, at, columns in blocks(k, n, group):
        x = grouped(numbers[rows, columns], group).float()
        q = x.abs()  # the one buffer of a block
        scale = q.amax(-1).mul_(1 / LEVELS[bits])
        scale.masked_fill_(~torch.isfinite(scale), torch.nan)
        scales[rows, at] = scale
        inverse = torch.where(scale >= _LEAST, 1 / scale, 0)
        torch.mul(x, inverse[..., None], out=q)
        if seed is None:
            q.round_()
        else:
            q.add_(_uniform(x, columns.start, seed)).floor_().clamp_(-LEVELS[bits], LEVELS[bits])
        if bits == 8:
            codes[rows, at].view(torch.int8).copy_(q)
        else:
            low, high = q.to(torch.int8).add_(8).view(torch.uint8).chunk(2, -1)
            torch.bitwise_or(low, high << 4, out=codes[rows, at])
        if kept is not None:
            torch.sub(x, q.mul_(scale[..., None]), out=q)
            kept[rows, columns] += q.flatten(1)[:, : columns.stop - columns.start]


def _uniform(x: Tensor, first: int, seed: int) -> Tensor:
    """Return a number in [0, 1) for each of `x` (k, g, group) float32: the same for the same bits, place and seed.

    The place in a row counts from `first`. Murmur's finalizer: Appleby 2011, github.com/aappleby/smhasher.
    """
    places = torch.arange(first, first + x.shape[1:].numel(), device=x.device).view(x.shape[1:])
    h = x.contiguous().view(torch.int32) ^ (places * 0x9E3779B1 + seed).to(torch.int32)
    for shift, factor in ((16, -0x7A143595), (13, -0x3D4D51CB)):  # 0x85ebca6b and 0xc2b2ae35, signed
        h = (h ^ (h >> shift & (1 << 32 - shift) - 1)) * factor
    return ((h ^ (h >> 16 & 0xFFFF)) >> 8 & 0xFFFFFF).float().mul_(2.0**-24)


@jit
def _hashed(x, at, seed):
    """Return what `_uniform` does, of numbers at these places of their row."""
    h = x.to(tl.uint32, bitcast=True) ^ (at.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32))
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return ((h ^ (h >> 16)) >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@jit(do_not_specialize=["seed"])
def _quantize_kernel(
    numbers_ptr, kept_ptr, words_ptr, n, count, group, row, column, kept_row, kept_column, message, seed,
    STOCHASTIC: tl.constexpr, LEVELS: tl.constexpr, LEAST: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):
    line = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    word, each = tl.arange(0, WORDS)[None, :], group * BITS // 32
    places, shift = place(word, group, BITS)
    at = g[:, None, None] * group + places
    stored = (g[:, None] < count) & (word < each)
    inside = stored[:, :, None] & (at < n)
    x = tl.load(numbers_ptr + line * row + at * column, mask=inside, other=0.0).to(tl.float32)

    size = tl.abs(x)
    size = tl.where(size < float("inf"), size, float("inf"))  # NaN too
    most = tl.max(tl.max(size, 2), 1)
    scale = tl.where(most < float("inf"), most * (1.0 / LEVELS), float("nan"))
    is_large = scale >= LEAST
    inverse = tl.where(is_large, tl.div_rn(1.0, tl.where(is_large, scale, 1.0)), 0.0)
    q = tl.where(is_large[:, None, None], x * inverse[:, None, None], 0.0)
    if STOCHASTIC:
        q = tl.floor(q + _hashed(x, at, seed))
        q = tl.minimum(tl.maximum(q, -1.0 * LEVELS), 1.0 * LEVELS)
    else:
        q = (q + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest integer, of two the even one
    if kept_ptr is not None:
        kept = kept_ptr + line * kept_row + at * kept_column
        tl.store(kept, tl.load(kept, mask=inside) + (x - q * scale[:, None, None]), mask=inside)
    code = (q.to(tl.int32) & 255) if BITS == 8 else (q.to(tl.int32) + 8)
    words_ptr += line * message
    tl.store(words_ptr + g, scale.to(tl.int32, bitcast=True), mask=g < count)
    tl.store(words_ptr + count + g[:, None] * each + word, tl.sum(code << shift, 2), mask=stored)


@torch.no_grad()
def quantize(
    numbers: Tensor, messages: Tensor, *, bits: int, group: int, seed: int | None = None, kept: Tensor | None = None
) -> None:
    """Write each row of numbers to a message: scales, then integers; of a group with inf or NaN the scale is NaN.

    Args:
        numbers: (k, n), of any floating dtype.
        messages: (k, m) uint8, m = ceil(n / group) * (4 + group * bits / 8).
        bits: of an integer, 8 or 4.
        group: numbers that share a scale, a multiple of 8.
        seed: None rounds to the nearest, a number up or down with the probability that keeps the mean.
        kept: (k, n) float32, to which is added what a message loses; or None.

    Raises `KernelError` for messages of another shape.
    """
    k, n = numbers.shape
    if not k or not n:
        return
    if not (runs_triton("quantize", numbers) and fits(group)):
        reference(numbers, messages, bits=bits, group=group, seed=seed, kept=kept)
        return
    opened(messages, n, group=group, bits=bits)
    count, words = cdiv(n, group), messages.view(torch.int32)
    meta = tile(bits, group, MOST)
    low = ((seed or 0) + 2**31) % 2**32 - 2**31  # the bits of a seed that count, as 32 bits with a sign
    with on(numbers):
        _quantize_kernel[(cdiv(count, meta["ROWS"]), k)](
            numbers, kept, words, n, count, group, *numbers.stride(), *((0, 0) if kept is None else kept.stride()),
            words.stride(0), low,
            STOCHASTIC=seed is not None, LEVELS=LEVELS[bits], LEAST=_LEAST, **meta, enable_fp_fusion=False,
        )
