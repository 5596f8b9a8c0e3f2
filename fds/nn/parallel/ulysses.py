"""Attention over a sequence axis by exchanging heads for tokens: DeepSpeed-Ulysses.

Each of N ranks has S / N tokens of all heads; one all-to-all gives it all S tokens of H / N heads, attention runs as on
one rank, and another all-to-all gives the result back::

    q, k, v (B, H + 2K, S/N, D) -> (B, (H + 2K)/N, S, D) -> out (B, H/N, S, D) -> (B, H, S/N, D)

K is the number of heads of keys G where N divides it, else the least common multiple of both: heads are repeated for
the ranks that read the same.

Sends: (N - 1) / N of B S/N D (2H + 2K) elements forward, as much backward, in two messages each.
Keeps: q, k, v and out of H / N heads for all tokens: as many elements as of one rank's H heads for S / N tokens.
Source: Jacobs et al. 2023, arXiv:2309.14509, section 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fds.collectives import Axis, all_gather, all_to_all
from fds.errors import KernelError
from fds.kernels import attention
from fds.nn.parallel.zigzag import Layout, in_order, in_zigzag


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, *, causal: bool, key_padding: Tensor | None, scale: float | None,
    layout: Layout,
) -> Tensor:  # fmt: skip
    """Return this rank's part of attention over the whole sequence, (B, H, S/N, D); see `fds.nn.attention`.

    Raises `KernelError` where the ranks do not divide the heads of q.
    """
    n, heads = axis.size, q.shape[1]
    if heads % n:
        raise KernelError(
            "each rank computes as many heads",
            where=f"q, axis {axis.name!r}",
            got=f"{heads} heads on {n} ranks",
            want=f"a multiple of {n} heads",
            hint='method="ring" takes any number of them',
        )
    k, v = (x.repeat_interleave(math.lcm(x.shape[1], n) // x.shape[1], dim=1) for x in (k, v))
    own = heads // n, k.shape[1] // n, v.shape[1] // n  # heads of this rank
    sent = torch.cat([x.unflatten(1, (n, -1)) for x in (q, k, v)], 2).flatten(1, 2)
    whole = all_to_all(sent, axis, split_dim=1, concat_dim=2)
    if key_padding is not None:
        key_padding = all_gather(key_padding.view(torch.uint8), axis, 1).view(torch.bool)
    reorders = layout == "zigzag" and causal  # without a mask of positions any order is right
    if reorders:
        whole = in_order(whole, n, 2)
        key_padding = None if key_padding is None else in_order(key_padding, n, 1)
    out = attention(*whole.split_with_sizes(own, 1), causal=causal, key_padding=key_padding, scale=scale)
    out = in_zigzag(out, n, 2) if reorders else out
    return all_to_all(out, axis, split_dim=2, concat_dim=1)
