"""NF4: numbers as 4-bit codes, quantiles of a normal distribution times a scale for each block of 64, scales in 8 bits.

A row of c numbers, c even, becomes bytes: for each 256 blocks the least and the greatest scale, bfloat16; for each
block the place of its scale between them, 0 to 255; for each two numbers a byte, the first in the high bits. That is
c / 2 + ceil(c / 64) + 4 ceil(c / 16384): 0.52 bytes a number of long rows, at most 0.57 from 96 numbers on.

Source: Dettmers et al. 2023, arXiv:2305.14314, section 3; the 16 numbers as in bitsandbytes, csrc/kernels.cu.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BLOCK, SPAN = 64, 256  # numbers that share a scale; scales between two ends
CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def width(numbers: int) -> int:
    """Return how many bytes a row of so many numbers is."""
    blocks = -(-numbers // BLOCK)
    return numbers // 2 + blocks + 4 * -(-blocks // SPAN)


@functools.lru_cache(256)
def length(row_bytes: int) -> int:
    """Return how many numbers a row of so many bytes has."""
    low, high = 0, row_bytes  # halves of what is searched
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if width(2 * middle) < row_bytes else (low, middle)
    return 2 * low


def pack(rows: Tensor) -> Tensor:
    """Return rows (n, c), c even, as bytes (n, width(c))."""
    n, c = rows.shape
    if rows.is_meta:
        return rows.new_empty((n, width(c)), dtype=torch.uint8)
    blocks = -(-c // BLOCK)
    x = torch.nn.functional.pad(rows.float(), (0, blocks * BLOCK - c)).view(n, blocks, BLOCK)
    ends, places = _scales(x.abs().amax(2))
    scales = _scales_of(ends, places)
    table = torch.tensor(CODES, device=rows.device)
    x = x / torch.where(scales == 0, 1, scales).unsqueeze(2)
    codes = torch.bucketize(x, (table[1:] + table[:-1]) / 2).to(torch.uint8).view(n, -1)[:, :c]
    return torch.cat([ends.view(n, -1).view(torch.uint8), places, (codes[:, ::2] << 4) | codes[:, 1::2]], 1)


def numbers(row_bytes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what bytes (..., width(c)) stand for, (..., c)."""
    lead, c = row_bytes.shape[:-1], length(row_bytes.shape[-1])
    packed = row_bytes.reshape(-1, row_bytes.shape[-1])
    blocks = -(-c // BLOCK)
    head = 4 * -(-blocks // SPAN)
    ends = packed[:, :head].clone(memory_format=torch.contiguous_format).view(torch.bfloat16).view(len(packed), -1, 2)
    scales = _scales_of(ends, packed[:, head : head + blocks])
    codes = torch.tensor(CODES, device=row_bytes.device)
    pairs = torch.stack([codes.repeat_interleave(16), codes.repeat(16)], 1)
    x = torch.nn.functional.embedding(packed[:, head + blocks :].to(torch.int32), pairs).view(len(packed), c)
    full = c // BLOCK
    x[:, : full * BLOCK].view(len(packed), full, BLOCK).mul_(scales[:, :full, None])
    x[:, full * BLOCK :].mul_(scales[:, full:])
    return x.to(dtype).view(*lead, c)


def _scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales (n, blocks) as their ends, (n, spans, 2) bfloat16, and places between them, (n, blocks) uint8."""
    n, blocks = largest.shape
    spans = -(-blocks // SPAN)
    padded = torch.cat([largest, largest[:, -1:].expand(n, spans * SPAN - blocks)], 1).view(n, spans, SPAN)
    ends = torch.stack([padded.amin(2), padded.amax(2)], 2).to(torch.bfloat16)
    low, high = ends.float().unbind(2)
    step = torch.where(high > low, high - low, 1).unsqueeze(2)
    places = ((padded - low.unsqueeze(2)) / step * 255).round().clamp(0, 255).to(torch.uint8)
    return ends, places.view(n, -1)[:, :blocks]


def _scales_of(ends: Tensor, places: Tensor) -> Tensor:
    """Return the scales (n, blocks) that their ends and places stand for."""
    low, high = (x.repeat_interleave(SPAN, 1)[:, : places.shape[1]] for x in ends.float().unbind(2))
    return low + (high - low) * (places.float() / 255)
