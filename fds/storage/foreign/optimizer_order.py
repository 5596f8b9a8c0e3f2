"""Find the names of the parameters of an optimizer without ZeRO: torch numbers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...] | None  # None: the optimizer has no state of this parameter yet


def match(
    groups: Sequence[Mapping[str, Any]],
    shapes: Sequence[Shape],
    params: Mapping[str, Tensor],
    masters: Sequence[Tensor] | None,
) -> list[str] | None:
    """Return the name of each parameter of the optimizer, or None where that is not certain.

    Args:
        groups: its param_groups; "param_names" decides if all of them have it.
        shapes: of the parameters, group by group.
        params: those of the model by name, in the model's order.
        masters: float32 copies that the optimizer updates, which round to the model's parameters.

    It is certain for one group of all parameters, in the model's order; for groups of which no two have parameters of
    the same shape, and which have all parameters of each shape; and for masters that each round to one parameter.
    """
    if all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
        return names if _fit(names, shapes, params) else None
    names = list(params)
    if len(groups) == 1 and _fit(names, shapes, params):
        return names
    owner = [i for i, group in enumerate(groups) for _ in group["params"]]
    by_shape = {shape: [name for name in names if tuple(params[name].shape) == shape] for shape in shapes}
    places = {shape: [i for i, other in enumerate(shapes) if other == shape] for shape in by_shape}
    pairs = [(places[shape], by_shape[shape]) for shape in places]
    if all(len({owner[i] for i in mine}) == 1 and len(mine) == len(theirs) for mine, theirs in pairs):
        found = {i: name for mine, theirs in pairs for i, name in zip(mine, theirs, strict=True)}
        return [found[i] for i in range(len(shapes))]
    return _equal(masters, params) if masters is not None else None


def _fit(names: Sequence[str], shapes: Sequence[Shape], params: Mapping[str, Tensor]) -> bool:
    known = [tuple(params[name].shape) for name in names if name in params]
    return len(known) == len(shapes) and all(b is None or a == b for a, b in zip(known, shapes, strict=True))


def _equal(masters: Sequence[Tensor], params: Mapping[str, Tensor]) -> list[str] | None:
    """Return the parameter that each master rounds to, or None if any rounds to none or several."""
    found = []
    for master in masters:
        equal = [n for n, p in params.items() if p.shape == master.shape and torch.equal(master.to(p.dtype), p)]
        found += equal if len(equal) == 1 else [None]
    return found if None not in found and len(set(found)) == len(found) else None
