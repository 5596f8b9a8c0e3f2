"""Statistics of a tensor of which some elements are not finite, and whether there are any."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeGuard, cast

import attrs
import torch
from torch import Tensor

from fds import tree

_STEP = 2**22  # elements that are looked at together: a leaf may lie on a disk, and be larger than memory
_KINDS: tuple[type, ...] = (Tensor, torch.nn.Parameter)


@attrs.frozen
class Statistics:
    """What is in a tensor.

    Attributes:
        name: what it is: "output", "input 1", "params.1.weight".
        dtype: such as "float16".
        shape: of the tensor.
        num_nan: how many elements are NaN.
        num_inf: how many are infinite, of either sign.
        least: the smallest finite element; None where there is none, as in the next two.
        most: the largest finite element.
        mean: of the finite elements.
        first: index of the first element that is not finite; None where all are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_nan: int
    num_inf: int
    least: float | None
    most: float | None
    mean: float | None
    first: tuple[int, ...] | None

    @classmethod
    def of(cls, name: str, x: Tensor) -> Statistics:
        """Look at every element."""
        nan = inf = finite = at = 0
        least, most, total, first = math.inf, -math.inf, 0.0, None
        for part in _pieces(x):
            bad, is_nan = ~part.isfinite(), int(part.isnan().sum())
            if first is None and bool(bad.any()):
                first = at + int(bad.nonzero()[0])
            good, at = part[~bad].double(), at + len(part)
            nan, inf, finite = nan + is_nan, inf + int(bad.sum()) - is_nan, finite + len(good)
            if len(good):
                least, most = min(least, float(good.min())), max(most, float(good.max()))
                total += float(good.sum())
        known = (least, most, total / finite) if finite else (None, None, None)
        index = None if first is None else unraveled(first // (1 + x.is_complex()), tuple(x.shape))
        return cls(name, str(x.dtype).removeprefix("torch."), tuple(x.shape), nan, inf, *known, index)

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Statistics:
        """Return what another rank sent as JSON."""
        first = fields["first"]
        return cls(**fields | {"shape": tuple(fields["shape"]), "first": None if first is None else tuple(first)})

    def __str__(self) -> str:
        counts = f"{self.num_nan:,} NaN, {self.num_inf:,} inf of {math.prod(self.shape):,}"
        finite = "" if self.mean is None else f"; finite {self.least:.4g} to {self.most:.4g}, mean {self.mean:.4g}"
        at = "" if self.first is None else f"; first at {list(self.first)}"
        return f"{self.name}: {self.dtype} {self.shape}: {counts}{finite}{at}"


def is_read(x: object) -> TypeGuard[Tensor]:
    """Return whether something holds numbers that are read here without asking other ranks for them.

    That are plain dense tensors of floating-point or complex numbers: parameters of stage 3 would be gathered.
    """
    return type(x) in _KINDS and _is_dense(cast(Tensor, x))


def is_finite(x: object) -> bool:
    """Return whether every element is finite; True for what is not read."""
    return not is_read(x) or all(bool(part.isfinite().all()) for part in _pieces(x))


def not_finite(values: Any, above: str) -> list[Statistics]:
    """Return the leaves of a tree that are not all finite, by their key paths behind `above`."""
    named = tree.paths(values)
    return [Statistics.of(f"{above}.{path}".rstrip("."), x) for path, x in named.items() if not is_finite(x)]


def unraveled(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the element with this index in the flattened tensor.

    >>> unraveled(5, (2, 3))
    (1, 2)
    """
    found: list[int] = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        found.append(at)
    return tuple(reversed(found))


def _is_dense(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_meta and (x.is_floating_point() or x.is_complex())


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """Yield all elements, flat, of a dtype that can be looked at; of complex numbers the real and imaginary parts."""
    flat = x.detach().reshape(-1)
    for i in range(0, len(flat), _STEP):
        part = flat[i : i + _STEP]
        part = torch.view_as_real(part.resolve_conj()).reshape(-1) if part.is_complex() else part
        yield part.float() if part.itemsize == 1 else part  # numbers of 8 bits know no isfinite
