"""Products whose rows travel between ranks in pieces: while one piece travels, another one is multiplied.

An activation is (B, R, K): B sequences (what comes before the dim along which ranks hold parts), R rows of each (that
dim and what comes after it), K numbers in a row. A whole one is (B, N, R, K), the rows of N ranks. A weight is (O, K),
as `torch.nn.functional.linear` takes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fds.collectives import Axis, Work
from fds.collectives.links import bounds


def rows_of_whole(x: Tensor, dim: int, size: int) -> Tensor:
    """Return what `size` ranks hold equal parts of along `dim` as (B, N, R, K)."""
    before, after = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 : -1])
    return x.reshape(before, size, x.shape[dim] // size * after, x.shape[-1])


def rows_of_part(x: Tensor, dim: int) -> Tensor:
    """Return one rank's part along `dim` as (B, R, K)."""
    return rows_of_whole(x, dim, 1)[:, 0]


def cuts(num_rows: int, chunks: int) -> list[slice]:
    """Return where rows are cut into at most so many pieces, whose sizes differ by at most one."""
    count = max(1, min(chunks, num_rows))
    return [slice(*bounds(num_rows, count, i)) for i in range(count)]


def start_gather(part: Tensor, axis: Axis) -> tuple[Tensor, Work]:
    """Start to gather (B, R, K) of all ranks, and return what it is written to, (N, B, R, K)."""
    part = part.contiguous()
    parts = part.new_empty((axis.size, *part.shape))
    return parts, axis.start_all_gather(parts.view(-1), part.view(-1))


def gather_products(
    part: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    axis: Axis,
    chunks: int,
    *,
    keeps: bool = False,
) -> tuple[list[Tensor], Tensor | None]:
    """Return linear(x, w, b) for every weight, (B, N, R, O), where x (B, N, R, K) is gathered from (B, R, K).

    In two chunks or more, all are on their way while this rank multiplies its own rows, and each is multiplied as it
    arrives. Return x too where it `keeps` it.
    """
    if chunks == 1:
        parts, work = start_gather(part, axis)
        work.wait()
        x = parts.transpose(0, 1).contiguous()
        return [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], x
    x = part.new_empty((len(part), axis.size, *part.shape[1:])) if keeps else None
    outs = [part.new_empty((len(part), axis.size, part.shape[1], len(w))) for w in weights]

    def multiply(rows: Tensor, rank: int, at: slice) -> None:
        for w, b, out in zip(weights, biases, outs, strict=True):
            _multiply(rows, w, b, out[:, rank, at])

    under_way = [(at, *start_gather(part[:, at], axis)) for at in cuts(part.shape[1], chunks)]
    multiply(part, axis.index, slice(None))
    for at, parts, work in under_way:
        work.wait()
        for rank in range(axis.size):
            if rank != axis.index:
                multiply(parts[rank], rank, at)
        if x is not None:
            x[:, :, at] = parts.transpose(0, 1)
    return outs, x


def start_scattered_products(
    xs: Sequence[Tensor], weights: Sequence[Tensor], axis: Axis, chunks: int
) -> Callable[[], Tensor]:
    """Start the sum over ranks of the sum of linear(x, w), x (B, N, R, K), and return what waits for it.

    That returns this rank's rows, (B, R, O). In two chunks or more, one travels while the next one is multiplied.
    """
    (before, size, num_rows, _), num_out = xs[0].shape, len(weights[0])
    under_way = []
    for at in cuts(num_rows, chunks):
        if chunks == 1:
            whole = xs[0].new_empty((before, size, num_rows, num_out))
            terms = sum_products(xs, weights, whole).transpose(0, 1).contiguous()
        else:
            terms = xs[0].new_empty((size, before, at.stop - at.start, num_out))
            for rank, out in enumerate(terms):
                sum_products([x[:, rank, at] for x in xs], weights, out)
        total = torch.empty_like(terms[0])
        under_way.append((total, axis.start_reduce_scatter(total.view(-1), terms.view(-1))))

    def wait() -> Tensor:
        for _, work in under_way:
            work.wait()
        totals = [total for total, _ in under_way]
        return totals[0] if len(totals) == 1 else torch.cat(totals, 1)

    return wait


def sum_products(xs: Sequence[Tensor], weights: Sequence[Tensor], out: Tensor) -> Tensor:
    """Write the sum of linear(x, w) of (..., K) into `out` (..., O), contiguous, and return it."""
    total = out.view(-1, out.shape[-1])
    for i, (x, w) in enumerate(zip(xs, weights, strict=True)):
        rows, matrix = x.reshape(-1, x.shape[-1]), w.t()
        if i == 0:
            torch.mm(rows, matrix, out=total)
        else:
            total.addmm_(rows, matrix)
    return out


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if not out.is_contiguous():  # of several sequences
        out.copy_(F.linear(x, weight, bias))
    elif bias is None:
        sum_products([x], [weight], out)
    else:
        torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.t(), out=out.view(-1, len(weight)))
