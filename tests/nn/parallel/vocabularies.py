"""Vocabularies in parts: how their columns may lie on ranks, and what the ranks make of theirs side by side."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import fds
from fds.collectives import Axis

IGNORED = -100
LAYOUTS = ("split", "told", "padded")  # by torch.tensor_split; the same, but nobody says V; equal parts


def axis(size: int) -> Axis:
    """Return this rank's tensor axis."""
    return fds.mesh(tp=size)["tp"]


def num_classes(layout: str, v: int) -> int | None:
    """Return what the functions are told."""
    return None if layout == "told" else v


def part(x: Tensor, along: Axis, layout: str, dim: int = -1) -> Tensor:
    """Return this rank's own part of x along the vocabulary, a new leaf; padding is NaN, which nobody may see."""
    if layout != "padded":
        return x.detach().tensor_split(along.size, dim)[along.index].clone().requires_grad_()
    each, v = x.shape[dim] // along.size + 1, x.shape[dim]
    more = [each * along.size - v if i == dim % x.dim() else n for i, n in enumerate(x.shape)]
    whole = torch.cat([x.detach(), x.new_full(more, float("nan"))], dim)
    return whole.tensor_split(along.size, dim)[along.index].clone().requires_grad_()


def on_ranks(size: int, job: Callable[[Axis], Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """Return what `job(axis)` returns on each of so many ranks; the first of it, a loss, is the same on all."""
    found = fds.simulate(lambda: job(axis(size)), size)
    assert all(torch.equal(one[0].nan_to_num(9e9), found[0][0].nan_to_num(9e9)) for one in found)
    return found


def joined(parts: Sequence[Tensor], v: int, dim: int = -1) -> Tensor:
    """Return the gradients of parts side by side, those of padding cut off, which are 0."""
    whole = torch.cat(list(parts), dim)
    assert not whole.narrow(dim, v, whole.shape[dim] - v).any()
    return whole.narrow(dim, 0, v)


def weighted(loss: Tensor) -> Tensor:
    """Return a number that depends on every loss differently."""
    return (loss * torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum()
