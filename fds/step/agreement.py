"""What the ranks of a step agree on in one call: entries that anybody puts in, added up in one small message."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives import Axis
from fds.collectives.traffic import Expected
from fds.errors import RankError

_MAGNITUDE = 2**63 - 1  # the bits of a float64 but for its sign
_CALLS = 2**20  # of a call's number this many are told apart: then sums of their squares are exact
_FEW = 256  # numbers that have one place a rank in the message; of more, maxima take a message of their own


@attrs.define(eq=False)
class Entry:
    """What this rank puts in; once it is counted, what all ranks make of it."""

    value: Any
    parts: list[Tensor]  # added up over the ranks in float64
    made_of: Callable[[Iterator[Tensor]], Any]  # the value of all ranks, of the sums of its parts, flat


@attrs.define(eq=False)
class Agreement:
    """What ranks along an axis agree on, at the same call of a step; of one rank alone everything is what it is."""

    axis: Axis | None
    calls: Tensor | int  # made of the step, () int64 on the CPU
    entries: list[Entry] = tree.new(list)
    maxima: list[Entry] = tree.new(list)  # too many for a place a rank
    beside: list[tuple[Agreement, str]] = tree.new(list)  # of some of these ranks, about what only they have; and what

    def sum(self, x: Tensor, *, divided_by: int = 1) -> Entry:
        """Put in a tensor that is added up: exactly, if it is of integers, which nothing divides."""
        parts = [x] if x.is_floating_point() else _exactly(x)
        self.entries.append(entry := Entry(x, parts, functools.partial(_rebuilt, x, divided_by)))
        return entry

    def norm(self, x: Tensor) -> Entry:
        """Put in the norm () of what this rank alone has: the joint norm of all."""
        return self.each(x, lambda norms: clamped(combined(norms), x.dtype))

    def each(self, x: Tensor, made_of: Callable[[Tensor], Any]) -> Entry:
        """Put in a number (): what becomes of those of all ranks (N,), float64."""
        return self._put(x, [] if self.axis is None else [placed(x, self.axis)], lambda sums: made_of(next(sums)))

    def largest(self, x: Tensor) -> Entry:
        """Put in a tensor of which every element becomes the largest; exactly, and NaN is larger than any number."""
        if (axis := self.axis) is None:
            return self._put(x, [], next)
        keys = _ordered(x.double()) if x.is_floating_point() else x.long()

        def of_largest(keys: Tensor) -> Tensor:
            return (_unordered(keys) if x.is_floating_point() else keys).view(x.shape).to(x.dtype, copy=True)

        def of_all(sums: Iterator[Tensor]) -> Tensor:
            most = _whole(next(sums), next(sums))
            return of_largest(most.view(axis.size, x.numel()).amax(0))

        if x.numel() * axis.size > _FEW:
            self.maxima.append(entry := Entry(x, [keys.reshape(-1)], lambda keys: of_largest(next(keys))))
            return entry
        return self._put(x, [placed(half.reshape(-1), axis) for half in _exactly(keys)], of_all)

    def among(self, axis: Axis, what: str) -> Agreement:
        """Return where that is put in which only the ranks along an axis have: this, where these are all of them."""
        if axis is self.axis:
            return self
        self.beside.append((Agreement(axis, self.calls), what))
        return self.beside[-1][0]

    def count(self, what: str = "scalars") -> None:
        """Add everything up that was put in, over the ranks.

        Raises `RankError`, on the CPU, where reading a number is free, for ranks at different calls.
        """
        if self.entries and self.axis is not None:
            sums = self._reduced(self.axis, self.entries, "sum", what)
            total, squares = next(sums).unbind()
            if total.device.type == "cpu" and int(squares) * self.axis.size != int(total) ** 2:
                raise RankError(
                    "ranks are at different calls of the step",
                    where=f"axis {self.axis.name!r}",
                    got=f"call {int(self.calls)} on this rank",
                    want="the same call on every rank",
                    hint="a rank that caught an error of a step is behind: end all of them",
                )
            for entry in self.entries:
                entry.value = entry.made_of(sums)
        if self.maxima and self.axis is not None:
            largest = self._reduced(self.axis, self.maxima, "max", what)
            for entry in self.maxima:
                entry.value = entry.made_of(largest)
        for agreement, about in self.beside:
            agreement.count(about)
        self.entries, self.maxima, self.beside = [], [], []

    def messages(self, what: str = "scalars") -> Iterator[Expected]:
        """Yield the messages of `count`."""
        for entries, dtype in ((self.entries, torch.float64), (self.maxima, torch.int64)):
            if entries and self.axis is not None:
                numel = sum(x.numel() for entry in entries for x in entry.parts) + 2 * (dtype is torch.float64)
                yield Expected.of(self.axis, "all_reduce", numel, dtype, what=what)
        for agreement, about in self.beside:
            yield from agreement.messages(about)

    def _reduced(self, axis: Axis, entries: list[Entry], op: str, what: str) -> Iterator[Tensor]:
        """Yield the sums, or maxima, of all parts over the ranks, flat; of sums first those of the calls."""
        parts = [x.reshape(-1) for entry in entries for x in entry.parts]
        if op == "sum":
            calls = int(self.calls) % _CALLS
            moments = torch.full((2,), calls, dtype=torch.float64, device=parts[0].device)
            moments[1] *= calls
            parts = [moments, *map(Tensor.double, parts)]
        vector = torch.cat(parts)
        axis.start_all_reduce(vector, op, what=what).wait()
        return iter(vector.split_with_sizes(list(map(Tensor.numel, parts))))

    def _put(self, x: Tensor, parts: list[Tensor], made_of: Callable[[Iterator[Tensor]], Any]) -> Entry:
        entry = Entry(x, parts, made_of)
        self.entries.append(entry)
        return entry


def placed(x: Tensor, axis: Axis) -> Tensor:
    """Return numbers (N, ...) float64, one place a rank, with this rank's alone: a sum of squares may overflow."""
    places = torch.zeros(axis.size, *x.shape, dtype=torch.float64, device=x.device)
    places[axis.index] = x
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


def _rebuilt(x: Tensor, size: int, sums: Iterator[Tensor]) -> Tensor:
    """Return the sum of the parts of `x`, in its shape and dtype; divided by `size` unless it is an integer."""
    if x.is_complex():
        whole = torch.complex(next(sums), next(sums)) / size
    elif x.is_floating_point():
        whole = next(sums) / size
    else:
        whole = _whole(next(sums), next(sums))
    return whole.view(x.shape).to(x.dtype)


def _whole(high: Tensor, low: Tensor) -> Tensor:
    return (high.long() << 32) + low.long()


def _ordered(x: Tensor) -> Tensor:
    """Return float64 numbers as int64 ones in the same order, NaN the largest."""
    bits = torch.where(x.isnan(), torch.nan, x).view(torch.int64)
    return torch.where(bits < 0, bits ^ _MAGNITUDE, bits)


def _unordered(keys: Tensor) -> Tensor:
    """Return the float64 numbers of which these are the keys.

    >>> x = torch.tensor([-torch.inf, -2.5, -0.0, 0.0, 1.0, torch.inf], dtype=torch.float64)
    >>> bool(_ordered(x).diff().gt(0).all()), _unordered(_ordered(x)).tolist()
    (True, [-inf, -2.5, -0.0, 0.0, 1.0, inf])
    """
    return torch.where(keys < 0, keys ^ _MAGNITUDE, keys).view(torch.float64)
