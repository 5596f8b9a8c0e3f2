"""NF4: numbers as 4-bit codes, quantiles of a normal distribution times a scale for each block of 64.

A row of c numbers, c even, becomes bytes: for each block its scale, bfloat16; for each two numbers a byte, the first in
the high bits. That is c / 2 + 2 ceil(c / 64): 0.53 bytes a number of long rows, at most 0.57 from 64 on. QLoRA holds
scales in 8 bits, with others for 256 of them: 0.516 bytes, but then blocks depend on each other, and ranks could not
cut a row between them.

Source: Dettmers et al. 2023, arXiv:2305.14314, section 3; the 16 numbers as in bitsandbytes, csrc/kernels.cu.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BLOCK, SCALE_BYTES = 64, 2  # numbers that share a scale
CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def width(numbers: int) -> int:
    """Return how many bytes a row of so many numbers is."""
    return numbers // 2 + SCALE_BYTES * -(-numbers // BLOCK)


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
    rounded = x.abs().amax(2).to(torch.bfloat16)
    scales = rounded.float()
    table = torch.tensor(CODES, device=rows.device)
    x = x / torch.where(scales == 0, 1, scales).unsqueeze(2)
    codes = torch.bucketize(x, (table[1:] + table[:-1]) / 2).to(torch.uint8).view(n, -1)[:, :c]
    return torch.cat([rounded.view(torch.uint8), (codes[:, ::2] << 4) | codes[:, 1::2]], 1)


def numbers(row_bytes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what bytes (..., width(c)) stand for, (..., c)."""
    lead, c = row_bytes.shape[:-1], length(row_bytes.shape[-1])
    packed = row_bytes.reshape(-1, row_bytes.shape[-1])
    blocks = -(-c // BLOCK)
    head = SCALE_BYTES * blocks
    scales = packed[:, :head].clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
    codes = torch.tensor(CODES, device=row_bytes.device)
    pairs = torch.stack([codes.repeat_interleave(16), codes.repeat(16)], 1)
    x = torch.nn.functional.embedding(packed[:, head:].to(torch.int32), pairs).view(len(packed), c)
    full = c // BLOCK
    x[:, : full * BLOCK].view(len(packed), full, BLOCK).mul_(scales[:, :full, None])
    x[:, full * BLOCK :].mul_(scales[:, full:])
    return x.to(dtype).view(*lead, c)
