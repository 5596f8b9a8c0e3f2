"""Numbers as signs, eight to a byte, with a scale for each group, and back.

    scale = mean |x|;  x' = scale where x >= 0, else -scale

Moves:  4 + 1/8 bytes per number of float32, once each way
Source: Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fds.kernels.messages.groups import opened, parts

_TO_TOP = 0x0102040810204080  # times eight bytes of 0 or 1: bit i of the uppermost byte is byte i


def pack_signs(numbers: Tensor, messages: Tensor, *, group: int) -> None:
    """Write each row of numbers to a message: scales, then signs, a bit each, 1 where a number is not negative.

    Args:
        numbers: (k, n), of any floating dtype. The scale of a group that is not full is the mean of what it has.
        messages: (k, m) uint8, m = ceil(n / group) * (4 + group / 8).
        group: numbers that share a scale, a multiple of 8.

    Raises `KernelError` for messages of another shape.
    """
    n = numbers.shape[1]
    scales, codes = opened(messages, n, group=group, bits=1)
    for at, x in parts(numbers, group):
        scales[:, at] = x.abs().sum(-1, dtype=torch.float32).div_(min(group, n - at.start * group))
        codes[:, at] = sign_bits(x)


def unpack_signs(message: Tensor, out: Tensor, *, group: int) -> None:
    """Write the numbers of a message (m,) uint8 to `out` (n,), of any floating dtype: see `pack_signs`.

    Raises `KernelError` for a message of another size.
    """
    (scales,), (codes,) = opened(message[None], len(out), group=group, bits=1)
    out.copy_((signs_of(codes) * scales[:, None]).view(-1)[: len(out)])


def sign_bits(x: Tensor) -> Tensor:
    """Return a bit for each number of x (..., 8 k), 1 where it is not negative: (..., k) uint8, the first in bit 0."""
    return (((x >= 0).view(torch.int64) * _TO_TOP) >> 56).to(torch.uint8)


def signs_of(bits: Tensor) -> Tensor:
    """Return 1 for each bit of (..., k) uint8, -1 where it is 0: (..., 8 k) float32."""
    return _signs(bits.device).index_select(0, bits.reshape(-1).int()).view(*bits.shape[:-1], -1)


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """Return 1 or -1 for every bit of every byte, (256, 8)."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
    return (bits & 1).mul_(2).sub_(1).float()
