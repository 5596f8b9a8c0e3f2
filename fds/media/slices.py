"""What all ranks of an axis have alike, in slices: each rank holds one of them, and together they gather the whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fds.collectives import Axis
from fds.collectives.dry import dry
from fds.errors import LossError


def slice_of(x: Tensor, axis: Axis, unit: int) -> Tensor:
    """Return this rank's slice of bytes (n,), in memory of its own: ceil(n / unit / N) elements of `unit` bytes.

    What lies behind the end of `x` is zeros.
    """
    n = -(-(len(x) // unit) // axis.size) * unit
    mine = x[axis.index * n : (axis.index + 1) * n]
    out = x.new_zeros(n) if len(mine) < n else x.new_empty(n)
    out[: len(mine)].copy_(mine)
    return out


def start_gather(part: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Begin to gather the slices (n,) of all ranks. Return the function that waits, and returns them (N * n,)."""
    whole = part.new_empty(axis.size * len(part))
    work = axis.start_all_gather(whole, part)

    def wait() -> Tensor:
        work.wait()
        return whole

    return wait


def check_alike(x: Tensor, part: Tensor, axis: Axis, where: str) -> None:
    """Raise `LossError`, on every rank, where `x`, bytes (n,) of which `part` is the slice, differs between ranks."""
    if dry.get() is not None:
        return
    sizes = torch.tensor([len(x), -len(x)], device=x.device)
    axis.start_all_reduce(sizes, "max").wait()
    most, least = sizes[0].item(), -sizes[1].item()
    differs = torch.tensor([int(most != least)], device=x.device)
    if not differs:
        differs[0] = not torch.equal(start_gather(part, axis)()[: len(x)], x)
        axis.start_all_reduce(differs, "max").wait()
    if differs:
        raise LossError(
            "activations that are to be kept in slices differ between the ranks that are to share them",
            where=f"{where}, axis {axis.name!r} of {axis.size} ranks",
            got="other values" if most == least else f"{least:,} to {most:,} bytes",
            want="ranks that pass the same batch and compute the same, as along a tensor axis",
            hint="a batch by the coordinates of the other axes; no `partition` where activations are cut already",
        )
