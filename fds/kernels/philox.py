"""Dropout masks that are never stored: element (row, column) is a function of (seed, offset, row, column).

The mask of a tensor (..., C), seen as rows (R, C), keeps an element with probability 1 - p::

    keep[r, c] = word[c mod 4] >= p * 2^32        word = philox4x32_10(key=seed, counter=(c div 4, r, offset))

So it does not depend on block sizes, the device or the kernel, and backward computes it again.
Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", SC '11 (Philox4x32, ten rounds).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fds.errors import KernelError, is_int
from fds.kernels.language import jit, tl

_WORD = 0xFFFFFFFF


def reference(seed: Tensor, offset: int, rows: int, columns: int, p: float) -> Tensor:
    """Return which elements are kept, (rows, columns) bool on the seed's device.

    `seed` is () int64. Integers are exact: the kernels compute the same masks bit for bit.
    """
    groups = torch.arange((columns + 3) // 4, device=seed.device)
    return kept(seed, offset, torch.arange(rows, device=seed.device)[:, None], groups, p)[:, :columns]


def kept(seed: Tensor, offset: int, rows: Tensor, groups: Tensor, p: float) -> Tensor:
    """Return which elements are kept of rows and groups of 4 columns, int64 that broadcast; 4 for each group."""
    c1, c0 = torch.broadcast_tensors(rows, groups)
    c2, c3 = (torch.full_like(c0, (offset >> bits) & _WORD) for bits in (0, 32))
    words = torch.stack(philox4x32(seed & _WORD, seed >> 32 & _WORD, c0, c1, c2, c3), dim=-1).flatten(-2)
    return words >= threshold(p)


def philox4x32(k0: Tensor, k1: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, ...]:
    """Return the four words of a key and a counter after ten rounds; all are 32-bit numbers in int64."""
    for _ in range(10):
        b, a = c2 * 0xCD9E8D57, c0 * 0xD2511F53  # wrapping keeps all 64 bits
        c0, c1 = b >> 32 & _WORD ^ c1 ^ k0, b & _WORD
        c2, c3 = a >> 32 & _WORD ^ c3 ^ k1, a & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return c0, c1, c2, c3


@jit
def keep(seed, offset, rows, first_column, threshold, COLUMNS: tl.constexpr):
    """Return which of the elements (rows (R,), first_column + arange(COLUMNS)) are kept, (R, COLUMNS) int1.

    `first_column` is a multiple of 4, COLUMNS a power of two from 4 on, and `threshold` the result of `threshold(p)`.
    """
    column = first_column // 4 + tl.arange(0, COLUMNS // 4)
    c0 = column[None, :].to(tl.uint32) + tl.zeros_like(rows)[:, None].to(tl.uint32)
    c1 = rows[:, None].to(tl.uint32) + tl.zeros_like(c0)
    offset = tl.cast(offset, tl.int64)
    c2, c3 = tl.zeros_like(c0) + offset.to(tl.uint32), tl.zeros_like(c0) + (offset >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return words >= tl.cast(threshold, tl.uint32)


def threshold(p: float) -> int:
    """Return the least 32-bit word whose element is kept."""
    return min(round(p * 2**32), _WORD)


def dropout(x: Tensor, seed: Tensor | None, offset: int, p: float) -> Tensor:
    """Return dropout of x in plain torch; x itself without a seed."""
    if seed is None:
        return x
    keep = reference(seed, offset, x.shape[:-1].numel(), x.shape[-1], p).view(x.shape)
    return torch.where(keep, x * (1 / (1 - p)), 0)


def as_seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """Return a seed as kernels load it: () int64 on the device, without synchronisation.

    Raises `KernelError` for anything but an integer or a () int64 tensor on this device.
    """
    if isinstance(seed, Tensor):
        if seed.dtype == torch.int64 and seed.dim() == 0 and seed.device == device:
            return seed
        got = f"{tuple(seed.shape)} {seed.dtype} on {seed.device}"
    elif is_int(seed) and -(2**63) <= seed < 2**63:
        return torch.full((), seed, dtype=torch.int64, device=device)
    else:
        got = repr(seed)
    raise KernelError(
        "dropout needs a seed", where="seed", got=got, want=f"an int of 64 bits, or a () int64 tensor on {device}",
        hint="torch.randint(2**62, (), device=x.device) draws one from torch's generator",
    )
