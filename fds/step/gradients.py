"""Summed gradients on their way to the optimizer, and what is measured on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import reading, tree
from fds.collectives import Axis
from fds.layout import Segment
from fds.step import foreach
from fds.step.agreement import clamped, combined, joint_norm, placed
from fds.step.residency.landing import Landing


@attrs.frozen(eq=False)
class Gradients:
    """Summed gradients on their way to the optimizer: the true ones are `leaves / scale`.

    A gradient map (station `condition`) takes and returns one of these; it may write into the leaves. Where the
    parameters are sharded a leaf is this rank's flat slice of many, and `segments` says what lies where in it: a map
    that does the same to every element says so by an attribute `takes_slices = True`, and others are refused.

    Of leaves that live elsewhere a map gets copies, which are written back: of all leaves at once, unless an attribute
    `needs` says that it needs less: "norm" is that of a map that reads the norm alone and changes the scale alone,
    "slices" of one that may be given the leaves one at a time, and then the norm of all.
    """

    leaves: list[Tensor]
    scale: Tensor | None  # () float64; None is 1
    norm: Tensor | None = None  # () global norm of the true gradients, where it was measured
    segments: Sequence[Sequence[Segment]] = ()  # one list per leaf
    axes: tuple[Axis, ...] = ()  # over which the leaves are slices
    norm_of: Callable[..., Tensor] | None = None  # of leaves and their landing, where other ranks have other leaves
    counted: Sequence[bool] = ()  # by leaf: whether it counts in a sum over all ranks, some of which have the same
    landing: Landing | None = None  # where leaves live that do not live where the step runs

    def measured(self) -> Gradients:
        """Return the same with its norm known."""
        if self.norm is not None:
            return self
        norm_of = self.norm_of or functools.partial(global_norm, axes=self.axes)
        norm = norm_of(self.leaves, landing=self.landing)
        return attrs.evolve(self, norm=norm if self.scale is None else (norm / self.scale).to(norm.dtype))

    def settled(self) -> Gradients:
        """Return the same for the optimizer: scale () float32, or divided out where float64 leaves need its digits."""
        if self.scale is None:
            return self
        if torch.float64 in set(map(tree.dtype_of, self.leaves)):
            for leaf in written_over(self.leaves, self.landing):
                leaf.div_(self.scale)
            return attrs.evolve(self, scale=None)
        return attrs.evolve(self, scale=self.scale.to(torch.float32))


@attrs.frozen(repr=False)
class Measure:
    """The station `measure`: what is computed on the gradients of every step."""

    norm: bool = False  # the global norm, and with it the flag that every element is finite
    skips: bool = False  # whether a step of which one is not is skipped

    def __repr__(self) -> str:
        return f"Measure(norm={self.norm}{', skips=True' * self.skips})"


def written_over(leaves: Sequence[Tensor], landing: Landing | None) -> Iterator[Tensor]:
    """Yield every leaf, to be written over: of one that lives elsewhere a copy, which is then written back."""
    for i, leaf in enumerate(leaves):
        x = leaf if landing is None else landing.value(i, leaf)
        yield x
        if landing is not None:
            landing.put(i, x)


def global_norm(tensors: Sequence[Tensor], axes: Sequence[Axis] = (), landing: Landing | None = None) -> Tensor:
    """Return the 2-norm over all elements, () float32 (float64 for float64), finite if and only if all elements are.

    Over `axes` every rank has other elements, and all get the norm of all of them.

    A sum of squares overflows float32 from elements of 1e19 on. On a GPU it is summed in float64 at once; on the CPU,
    where that costs 26 ms against 2.5 per 20M elements, only when the float32 sum came out not finite. (On a GPU,
    float64 elements of 1e154 and more count as not finite; in a graph of a step on a CPU, too, and both sums are made.)

    The norms of leaves that live elsewhere are known from their `landing`; none is read, unless the sum overflows.
    """
    if axes:
        norm = global_norm(tensors, landing=landing)
        for axis in axes:
            norm = clamped(combined(axis.all_reduce(placed(norm, axis), what="norm")), norm.dtype)
        return norm
    live, double = [x for x in tensors if x.numel()], any(x.dtype is torch.float64 for x in tensors)
    if not live:
        dtype = torch.float64 if double else torch.float32
        return torch.zeros((), dtype=dtype, device=tensors[0].device if tensors else None)
    if landing is None:
        norm = _joint(foreach.norm(live, 2, dtype=torch.float64 if double or live[0].is_cuda else torch.float32))
    else:
        norm = _joint([landing.norm(i, x) for i, x in enumerate(tensors) if x.numel()])
    if norm.device.type == "cpu" and not reading.is_free(norm):
        norm = torch.where(norm.isfinite(), norm, _joint(foreach.norm(live, 2, dtype=torch.float64)))
    elif norm.device.type == "cpu" and not bool(norm.isfinite()):
        read = lambda: live if landing is None else landing.values(tensors)
        biggest = norm = torch.stack([x.abs().max().double() for x in read()]).max()
        if bool(biggest.isfinite()):
            norm = _joint([foreach.norm([x / biggest], 2, dtype=torch.float64)[0] for x in read()]) * biggest
    return norm if double else clamped(norm, torch.float32)


def _joint(norms: Sequence[Tensor]) -> Tensor:
    return joint_norm(torch.stack(list(norms)))


def combined_scale(
    weight: Tensor | float, scale: Tensor | None, divisor: Tensor | float, device: torch.device
) -> Tensor | None:
    """Return what the summed gradients are too large by: () float64 on the device, None for 1.

    It is weight x loss scale / what they were divided by already.
    """
    rest = weight if isinstance(divisor, int | float) and divisor == 1 else weight / divisor
    if scale is None and not isinstance(rest, Tensor):
        return None if rest == 1 else torch.full((), float(rest), dtype=torch.float64, device=device)
    total: Any = rest if scale is None else scale * rest
    return total.to(device, torch.float64)
