"""What a first call shows of how features lie on ranks: in which order in a piece, and what is computed of how many.

A plan says how a matrix is divided, and the code between a column and its row has to go on as it says: a projection of
several parts is taken apart part by part, what several columns return is one row's by parts, and how many heads there
are is for shapes alone. What goes against that is right on one rank and another number on all of several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fds.errors import LossError
from fds.nn.parallel.region import Region, ranges
from fds.nn.parallel.uses import Edges, metadata_of, nearest, nodes_behind

_CATS = {torch.cat, torch.concat, torch.concatenate, torch.hstack}
_SPLITS = {Tensor.view, Tensor.reshape, Tensor.unflatten, torch.reshape, torch.unflatten}
_ARITHMETIC = {
    "add",
    "sub",
    "mul",
    "div",
    "true_divide",
    "floor_divide",
    "pow",
    "rsub",
    "rdiv",
    "rpow",
    "full",
    "tensor",
}


class Divided(int):
    """An attribute that `heads` divides: this rank's number, which is for shapes and for nothing that is computed."""

    name: str
    region: Region

    def refuse(self, *_: Any) -> NoReturn:
        """Raise `LossError`."""
        raise LossError(
            "a number is computed from an attribute that 'heads' divides, and would be another one than on one rank",
            where=f"tensor_parallel: {self.name}",
            got=f"arithmetic with {int(self)}, this rank's",
            want="for numbers an attribute of its own, that heads does not name",
        )

    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __float__ = refuse  # pyright: ignore[reportAssignmentType]

    def __rfloordiv__(self, other: Any) -> Any:
        """Divide; the width of what entered, which is whole, by this rank's heads is not the width of a head."""
        is_whole = other == self.region.width and other not in self.region.widths and not isinstance(other, Divided)
        return self.refuse() if is_whole else int(other) // int(self)


def check_arithmetic(func: Any, given: Sequence[Any]) -> None:
    """Raise `LossError` for a function of torch that computes with an attribute that is divided."""
    name = getattr(func, "__name__", "").strip("_")
    if name in _ARITHMETIC or name.removeprefix("r") in _ARITHMETIC:
        for x in given:
            if isinstance(x, Divided):
                x.refuse()


def look_at(func: Any, given: Sequence[Any], out: Any, region: Region, edges: Edges) -> None:
    """Note what is put together of features, and look at how they are taken apart. Raises `LossError`."""
    if func in _CATS and isinstance(out, Tensor) and out.grad_fn is not None:
        widths = [x.shape[-1] for x in given[0]]
        if len(widths) > 1 and sum(widths) == out.shape[-1]:
            wholes = [sum(region.pieces_in_graph(x)) for x in given[0]]
            metadata_of(out.grad_fn)["features"] = (out.shape, widths, wholes)
    elif func in _SPLITS and isinstance(given[0], Tensor) and given[0].grad_fn is not None:
        _check_split(given[0], out.shape, region, edges)


def _check_split(x: Tensor, shape: torch.Size, region: Region, edges: Edges) -> None:
    """Raise `LossError` where what a column returned in parts is taken apart head by head."""
    parts, before = metadata_of(x.grad_fn).get("pieces", ()), x.dim() - 1
    if len(parts) < 2 or shape[:before] != x.shape[:before] or math.prod(shape[before:]) != x.shape[-1]:
        return
    count, width = shape[before], math.prod(shape[before + 1 :])
    borders = itertools.accumulate(ranges(part, region.axis)[region.axis.index][1] for part in parts)
    is_by_heads = count in region.counts and count != len(parts)
    if count > 1 and (is_by_heads or any(border % width for border in borders)):
        raise LossError(
            "a projection that is laid out head by head is divided as if it were by parts",
            where=f"tensor_parallel: {nearest(edges, x.grad_fn)}",
            got=f"column(parts={parts}), of which {count} pieces of {width} features are taken apart",
            want=f"fds.nn.column(unit={width}): what stays together on a rank",
        )


def check_row(x: Tensor, cut: tuple[int, ...], name: str, region: Region) -> None:
    """Raise `LossError` for a row of the whole, or of what several columns return where a plan takes that for one's."""
    index, size = region.axis.index, region.axis.size
    own = list(itertools.accumulate(ranges(part, region.axis)[index][1] for part in cut))
    if x.shape[-1] == sum(cut) != own[-1] and not region.pieces_in_graph(x):
        raise LossError(
            "a row is given the whole of its input, and takes this rank's piece of it",
            where=f"tensor_parallel: {name}",
            got=f"{x.shape[-1]} features",
            want=f"{own[-1]} of them, which a 'column' before it returns",
            hint="'column' for the layer that makes its input; of two that are swapped, 'column' is the first",
        )
    for node, _ in nodes_behind(x.grad_fn, stops=lambda node: _mixes(node) or region.passes_between(node)):
        shape, widths, wholes = metadata_of(node).get("features", ((), (), ()))
        if shape == x.shape and not set(own).issuperset(itertools.accumulate(widths)):
            lengths = tuple(whole or n * size for whole, n in zip(wholes, widths, strict=True))
            raise LossError(
                "a row is given what several columns return, side by side, and takes it for what one returns",
                where=f"tensor_parallel: {name}",
                got=f"features {' + '.join(map(str, widths))} of this rank",
                want=f"fds.nn.row(parts={lengths})",
            )


def _mixes(node: Any) -> bool:
    """Say whether a node of the graph is of a product of matrices, or of attention: its features are other ones."""
    return "mm" in (name := node.name().lower()) or "attention" in name
