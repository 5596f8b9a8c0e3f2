"""The zig-zag order of a sequence over ranks, in which causal attention is as much work on each of them.

A sequence of S tokens is 2N chunks of S / 2N. Rank r of N holds chunk r, and after it chunk 2N - 1 - r::

    N = 2:   rank 0   0 3        N = 4:   rank 0   0 7     rank 2   2 5
             rank 1   1 2                 rank 1   1 6     rank 3   3 4

Of the pairs (query, key <= query) a rank has S^2 / 2N whatever r; in contiguous parts the last has 2N - 1 times the
first's.
Source: Brandon et al. 2023, arXiv:2311.09431 (striped attention), with chunks in place of stripes.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fds.collectives import Axis
from fds.errors import FdsError, is_a, is_int
from fds.nn.parallel import checking

Layout = Literal["contiguous", "zigzag"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag")


def zigzag(x: Tensor, axis: Axis | None, dim: int = 1) -> Tensor:
    """Return this rank's part of a whole sequence along `dim`, its two chunks one after the other.

    Args:
        x: (..., S, ...), the same on all ranks of the axis; inputs, targets and masks alike.
        axis: of `fds.mesh`, over which the sequence is split; None, or of size 1: all of it.
        dim: that of the sequence.

    Raises `FdsError` where S is not a multiple of twice the number of ranks, and for other arguments.
    """
    _check(x, axis, dim)
    if axis is None or axis.size == 1:
        return x
    chunk = _chunk(x.shape[dim], axis)
    return torch.cat([x.narrow(dim, i * chunk, chunk) for i in chunks_of(axis.index, axis.size)], dim)


def zigzag_positions(length: int, axis: Axis | None, device: torch.device | str | None = None) -> Tensor:
    """Return the positions of this rank's tokens in a whole sequence of `length` tokens, (length / ranks,) int64.

    Positional embeddings, such as `fds.kernels.rotary`, take them. Raises `FdsError` as `zigzag` does.
    """
    if not is_int(length, 0):
        raise FdsError(
            "zigzag_positions takes the length of a sequence", where="length", got=repr(length)[:80], want="an int >= 0"
        )
    return zigzag(torch.arange(length, device=device), axis, 0)


def in_order(x: Tensor, size: int, dim: int) -> Tensor:
    """Return the whole sequence, in order, from the zig-zag parts of `size` ranks one after another along `dim`."""
    return _permute(x, size, dim, inverse=True)


def in_zigzag(x: Tensor, size: int, dim: int) -> Tensor:
    """Return the zig-zag parts of `size` ranks one after another along `dim`, from a whole sequence."""
    return _permute(x, size, dim, inverse=False)


def _permute(x: Tensor, size: int, dim: int, *, inverse: bool) -> Tensor:
    order = torch.tensor([i for rank in range(size) for i in chunks_of(rank, size)], device=x.device)
    chunks = x.unflatten(dim, (2 * size, -1))
    return chunks.index_select(dim, order.argsort() if inverse else order).flatten(dim, dim + 1)


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Return which two of the chunks of a sequence a rank has."""
    return rank, 2 * size - 1 - rank


def _check(x: Tensor, axis: Axis | None, dim: int) -> None:
    if axis is not None:
        checking.axis("zigzag", axis, FdsError)
    if not is_a(x, Tensor):
        raise FdsError("zigzag takes a tensor", where="x", got=repr(x)[:80], want="(..., S, ...)")
    if not (is_int(dim) and -x.dim() <= dim < x.dim()):
        raise FdsError("x has no such dim", where="dim", got=repr(dim)[:80], want=f"one of {tuple(x.shape)}")


def _chunk(length: int, axis: Axis) -> int:
    if length % (2 * axis.size):
        raise FdsError(
            "a sequence cannot be cut into equal chunks, two a rank",
            where=f"axis {axis.name!r}, {axis.size} ranks",
            got=f"{length} tokens",
            want=f"a multiple of {2 * axis.size}",
            hint="pad it: targets of padding weigh 0 in fds.Mean, and key_padding masks its keys",
        )
    return length // (2 * axis.size)
