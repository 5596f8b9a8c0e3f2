"""Sums over microbatches besides gradients: loss, weight and metrics, and their means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives import Axis
from fds.errors import LossError, RankError
from fds.loss import Outcome
from fds.step.sums import detached

_ROUNDING = 2.0**-12  # in which losses of ranks may differ: as much as 2**11 roundings of float32


@attrs.define(eq=False)
class Totals:
    """Running sums over microbatches, as device scalars."""

    loss: Tensor | None = None
    weight: Tensor | float = 0
    metrics: dict[str, Tensor] = tree.new(dict)
    count: int = 0  # microbatches added
    weighted: bool = False  # some are `Mean`s, whose weights may be 0
    divisor: Tensor | float | None = None  # of the seeds of their gradients; 0 where another rank knows it, None for 1

    def add(self, outcome: Outcome, where: str) -> None:
        """Add one microbatch. Raises `LossError` where it has other metrics than those before."""
        weight, loss = outcome.weight, outcome.total.detach()
        self.loss = loss if self.loss is None else self.loss + loss
        if self.count and self.metrics.keys() != outcome.metrics.keys():
            raise LossError(
                "microbatches return different metrics",
                where=where,
                got=str(sorted(outcome.metrics)),
                want=str(sorted(self.metrics)),
            )
        for name, value in outcome.metrics.items():
            if isinstance(value, Tensor):
                if value.device.type == "cpu" and loss.device.type != "cpu":  # captured, a copy would read freed memory
                    value = torch.full((), value.item(), dtype=value.dtype, device=loss.device)
                part = value.to(loss.device)  # not asynchronously: on the CPU it could be read too early
            else:
                part = torch.full((), value, device=loss.device)
            part = _times(part, weight) if part.is_floating_point() else part.to(torch.int64, copy=True)
            self.metrics[name] = self.metrics[name] + part if name in self.metrics else part
        self.weight, self.count, self.weighted = self.weight + weight, self.count + 1, self.weighted or outcome.weighted

    def empty(self) -> Tensor | None:
        """Return whether the sum of all weights is 0, () bool; None where it cannot be."""
        assert self.loss is not None
        if not self.weighted:
            return None
        if isinstance(self.weight, Tensor):
            return self.weight == 0
        return None if self.weight else torch.ones((), dtype=torch.bool, device=self.loss.device)

    def filled(self, empty: Tensor) -> Totals:
        """Return the same with weight 1 where it is 0: then the means are the sums, which are finite."""
        return attrs.evolve(self, weight=torch.where(empty, 1, self.weight))

    def silent(self) -> Totals:
        """Return the same as zeros: those of a rank whose totals another rank has too."""
        loss, weight = (torch.zeros_like(x) if isinstance(x, Tensor) else 0 for x in (self.loss, self.weight))
        metrics = {name: torch.zeros_like(x) for name, x in self.metrics.items()}
        return attrs.evolve(self, loss=loss, weight=weight, metrics=metrics)

    def means(self) -> dict[str, Tensor]:
        """Return the weighted mean of the loss and of float metrics, the sum of integer ones."""
        assert self.loss is not None
        sums = {"loss": self.loss, **self.metrics}
        return {k: (v / self.weight).to(v.dtype) if v.is_floating_point() else v for k, v in sums.items()}


def _times(value: Tensor, weight: Tensor | float) -> Tensor:
    """Return value x weight; 0 for weight 0, whatever the value: the mean of nothing is often not a number."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0.0, value * weight)
    return value * weight if weight else torch.zeros_like(value)


class Sums(Protocol):
    """What is added up over the ranks beside the totals."""

    def sums(self) -> list[Tensor]:
        """Return what this rank has of them."""
        ...

    def put_sums(self, sums: Sequence[Tensor]) -> None:
        """Take what all ranks have together."""
        ...


def agree(
    totals: Totals,
    norm: Tensor | None,
    buffers: dict[str, Tensor],
    everyone: Axis,
    data: Axis | None,
    *,
    calls: int,
    used: bool = True,
    repeats: tuple[int, int] = (0, 1),
    also: Sums | None = None,
) -> tuple[Totals, Tensor | None, dict[str, Tensor]]:
    """Combine over ranks everything that a step's decisions depend on, in one small message; average the buffers.

    Args:
        totals: of this rank; metrics must be named alike on all ranks.
        norm: () of what only this rank has of the gradients, or None.
        buffers: module statistics; floating ones are averaged, rank 0's values are taken of others.
        everyone: the ranks that share the step.
        data: those of them that hold the same buffers, None for one rank; another message where that is not all.
        calls: what this rank's state has counted.
        used: whether a gradient came on this rank.
        repeats: of the ranks that compute the same totals, which one this is, and how many: the first's count.
        also: what else is added up, of the same shapes and dtypes on all ranks.

    Raises, on the CPU, where reading a number is free: `RankError` where ranks are at different calls, `LossError`
    where no rank uses any parameter, and where ranks that compute the same found other losses.
    """
    computed = totals
    totals = totals if repeats[0] == 0 else totals.silent()
    assert totals.loss is not None
    device, names = totals.loss.device, sorted(totals.metrics)

    def number(x: Tensor | float) -> Tensor:
        return x.to(device) if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float64, device=device)

    sums = [totals.metrics[name] for name in names]
    weight = number(totals.weight)
    parts = [number(calls), number(float(used)), totals.loss, weight, *(x for m in sums for x in _exactly(m))]
    if norm is not None:
        parts.append(placed(norm, everyone))
    if totals.divisor is not None:
        known = isinstance(totals.divisor, Tensor) or totals.divisor > 0
        parts.append(torch.stack([number(totals.divisor), number(float(known))]))
    if repeats[1] > 1:
        assert computed.loss is not None
        parts.append(placed(computed.loss.double() / computed.weight, everyone))
    more = [] if also is None else also.sums()
    parts += [x for m in more for x in _exactly(m)]
    together = data is everyone
    read = _summed(parts + (_of_first(buffers, everyone) if together else []), everyone, "scalars")
    at, uses = next(read), next(read)
    if device.type == "cpu":
        if float(at) != calls * everyone.size:
            raise RankError(
                "ranks are at different calls of the step",
                where=f"axis {everyone.name!r}",
                got=f"call {calls} on this rank",
                want=f"{float(at) / everyone.size:g} on average",
                hint="a rank that caught an error of a step is behind: end all of them",
            )
        if not float(uses):
            raise detached("on any rank", "a graph that leads to none of them")
    loss, weight = next(read).view(()).to(totals.loss.dtype), next(read).view(()).to(weight.dtype)
    metrics = [_rebuilt(m, read) for m in sums]
    shared = None if norm is None else clamped(combined(next(read)), norm.dtype)
    divisor = None
    if totals.divisor is not None:
        found, knows = next(read)
        divisor = found / knows
    if repeats[1] > 1:
        loss = _same_loss(next(read), loss, repeats[1], everyone)
    if also is not None:
        also.put_sums([_rebuilt(m, read) for m in more])
    if buffers and data is not None:
        read = read if together else _summed(_of_first(buffers, data), data, "buffers")
        buffers = {name: _rebuilt(b, read, data.size) for name, b in buffers.items()}
    metrics = dict(zip(names, metrics, strict=True))
    return attrs.evolve(totals, loss=loss, weight=weight, metrics=metrics, divisor=divisor), shared, buffers


def add_up(sums: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Return the sums of tensors over the ranks, exact where they are integers; in a message of their own."""
    read = _summed([x for s in sums for x in _exactly(s)], axis, "notes")
    return [_rebuilt(s, read) for s in sums]


def _same_loss(computed: Tensor, loss: Tensor, count: int, everyone: Axis) -> Tensor:
    """Return the loss; raise `LossError` where ranks that compute it together have other ones (N,).

    On a GPU, which would have to be waited for, it is NaN then. `count` ranks after each other have the same batch.
    Rounding may differ: a matrix at another address, or more threads, are sums in another order (measured).
    """
    groups = computed.view(-1, count)
    first = groups[:, :1]
    rounding = max(_ROUNDING, 2 * torch.finfo(loss.dtype).eps)  # a loss of 16 bits is one of its few numbers
    bound = rounding * torch.maximum(groups.abs(), first.abs()).clamp(min=_ROUNDING)
    differs = ~((groups == first) | (groups.isnan() & first.isnan()) | ((groups - first).abs() <= bound))
    if loss.device.type != "cpu":
        return torch.where(differs.any(), torch.nan, loss)
    if differs.any():
        other = int(differs.view(-1).nonzero()[0])
        begin = other - other % count
        raise LossError(
            "ranks that compute one loss together found different losses",
            where=f"axis {everyone.name!r}: ranks {begin} and {other}",
            got=f"{float(computed[begin])!r} and {float(computed[other])!r}",
            want="the same loss on all ranks of a tensor axis",
            hint="the loss reads this rank's number, or pieces of features or parameters that nothing puts together",
        )
    return loss


def _summed(parts: list[Tensor], axis: Axis, what: str) -> Iterator[Tensor]:
    """Yield the sums of parts over the ranks, flat, as float64."""
    flat = [x.reshape(-1).double() for x in parts]
    vector = torch.cat(flat)
    axis.start_all_reduce(vector, what=what).wait()
    return iter(vector.split_with_sizes([x.numel() for x in flat]))


def _of_first(buffers: dict[str, Tensor], data: Axis) -> list[Tensor]:
    """Return the parts of buffers that are summed: of floating ones every rank's, of others the first one's."""
    if not buffers:
        return []
    first = data.index == 0
    held = [b if first or b.is_floating_point() or b.is_complex() else torch.zeros_like(b) for b in buffers.values()]
    return [x for b in held for x in _exactly(b)]


def placed(norm: Tensor, axis: Axis) -> Tensor:
    """Return norms (N,) float64, one place a rank, with this rank's alone: squares of finite numbers may overflow."""
    places = torch.zeros(axis.size, dtype=torch.float64, device=norm.device)
    places[axis.index] = norm
    return places


# which torch leaves without a type
joint_norm: Callable[[Tensor], Tensor] = torch.linalg.vector_norm  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def combined(norms: Tensor) -> Tensor:
    """Return the joint norm () of parts with norms (N,), without overflow where all are finite.

    >>> combined(torch.tensor([3e200, 4e200], dtype=torch.float64))
    tensor(5.0000e+200, dtype=torch.float64)
    """
    top = norms.max()
    joint = top * joint_norm(norms / top)
    return torch.where(top == 0, top, torch.where(norms.isfinite().all(), joint, norms.sum()))


def clamped(norm: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a norm in a dtype; a finite one beyond its range becomes the largest number, not infinity."""
    return torch.where(norm.isfinite(), norm.clamp(max=torch.finfo(dtype).max), norm).to(dtype)


def _exactly(x: Tensor) -> list[Tensor]:
    """Return a tensor as parts that float64 represents exactly, and sums of many of them too."""
    if x.is_complex():
        return list(torch.view_as_real(x).unbind(-1))
    return [x] if x.is_floating_point() else [x.long() >> 32, x.long() & 0xFFFFFFFF]


def numel_of(tensors: Iterable[Tensor]) -> int:
    """Return the number of elements that tensors have in a message."""
    return sum(x.numel() * (1 if x.is_floating_point() else 2) for x in tensors)


def _rebuilt(x: Tensor, sums: Iterator[Tensor], size: int = 1) -> Tensor:
    """Return the sum of the parts of `x`, in its shape and dtype; divided by `size` unless it is an integer."""
    if x.is_complex():
        whole = torch.complex(next(sums), next(sums)) / size
    elif x.is_floating_point():
        whole = next(sums) / size
    else:
        whole = (next(sums).long() << 32) + next(sums).long()
    return whole.view(x.shape).to(x.dtype)
