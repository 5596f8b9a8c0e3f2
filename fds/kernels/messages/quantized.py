"""Numbers as integers of 8 or 4 bits with a scale for each group, and back.

    scale = max |x| / L, L = 127 or 7;  q = round(x / scale), two of 4 bits in a byte;  x' = scale * q
    stochastic: q = floor(x / scale + u), u in [0, 1) a hash of the seed, the bits of x and its place

Moves:  4.02 + 1.02 bytes per number of float32 in 8 bits, once each way
Source: Wang et al. 2023, arXiv:2306.10209, section 3
"""

from __future__ import annotations

import torch
from torch import Tensor

from fds.kernels.messages.groups import opened, parts

LEVELS = {8: 127, 4: 7}
_LEAST = 2.0**-120  # a smaller scale has no reciprocal in float32: its group arrives as zeros


def quantize(numbers: Tensor, messages: Tensor, *, bits: int, group: int, seed: int | None = None) -> None:
    """Write each row of numbers to a message: scales, then integers; of a group with inf or NaN the scale is NaN.

    Args:
        numbers: (k, n), of any floating dtype.
        messages: (k, m) uint8, m = ceil(n / group) * (4 + group * bits / 8).
        bits: of an integer, 8 or 4.
        group: numbers that share a scale, even.
        seed: None rounds to the nearest, a number up or down with the probability that keeps the mean.

    Raises `KernelError` for messages of another shape.
    """
    scales, codes = opened(messages, numbers.shape[1], group=group, bits=bits)
    for at, given in parts(numbers, group):
        x = given.float()
        low, high = torch.aminmax(x, dim=-1)
        scale = torch.maximum(high, -low).div_(LEVELS[bits])
        scale.masked_fill_(~torch.isfinite(scale), torch.nan)
        scales[:, at] = scale
        inverse = torch.where(scale >= _LEAST, 1 / scale, 0)
        q = x * inverse[..., None]
        if seed is None:
            q.round_()
        else:
            q.add_(_uniform(x, at.start * group, seed)).floor_().clamp_(-LEVELS[bits], LEVELS[bits])
        if bits == 8:
            codes[:, at].view(torch.int8).copy_(q)
        else:  # the first half of a group in the low bits
            q = q.add_(8).to(torch.uint8)
            codes[:, at] = q[..., : group // 2] | (q[..., group // 2 :] << 4)


def dequantize(message: Tensor, out: Tensor, *, bits: int, group: int) -> None:
    """Write the numbers of a message (m,) uint8 to `out` (n,), of any floating dtype: see `quantize`.

    Raises `KernelError` for a message of another size.
    """
    (scales,), (codes,) = opened(message[None], len(out), group=group, bits=bits)
    q = codes.view(torch.int8) if bits == 8 else torch.cat([codes & 15, codes >> 4], -1).view(torch.int8) - 8
    out.copy_((q * scales[:, None]).view(-1)[: len(out)])


def _uniform(x: Tensor, first: int, seed: int) -> Tensor:
    """Return a number in [0, 1) for each of `x` (k, g, group) float32: the same for the same bits, place and seed.

    The place in a row counts from `first`. Murmur's finalizer: Appleby 2011, github.com/aappleby/smhasher.
    """
    places = torch.arange(first, first + x.shape[1:].numel(), device=x.device).view(x.shape[1:])
    h = x.contiguous().view(torch.int32) ^ (places * 0x9E3779B1 + seed).to(torch.int32)
    for shift, factor in ((16, -0x7A143595), (13, -0x3D4D51CB)):  # 0x85ebca6b and 0xc2b2ae35, signed
        h = (h ^ (h >> shift & (1 << 32 - shift) - 1)) * factor
    return ((h ^ (h >> 16 & 0xFFFF)) >> 8 & 0xFFFFFF).float().mul_(2.0**-24)
