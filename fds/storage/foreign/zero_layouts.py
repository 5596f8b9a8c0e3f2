"""How ZeRO slices parameters: groups of them (ZeRO 1 and 2), or each parameter by itself (ZeRO 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fds.errors import StorageError
from fds.storage.foreign.deepspeed_files import attributes
from fds.storage.foreign.foreign_leaf import ForeignLeaf, checked, joined

Shapes = Mapping[str, tuple[int, ...]]  # of the parameters of one group, in the group's order


def sliced(shapes: Shapes, ranks: Sequence[Any], where: str) -> dict[str, ForeignLeaf]:
    """Return the parameters of a group, which ZeRO 1 and 2 concatenate and divide into one slice per rank.

    After the last parameter there may be padding, up to a multiple of twice the number of ranks. Raises `StorageError`
    for slices of another length.
    """
    slices, kept, start = _flat(ranks, where), dict[str, ForeignLeaf](), 0
    for name, shape in shapes.items():
        numel, first, pieces = torch.Size(shape).numel(), 0, []
        for x in slices:
            low, high = max(start, first), min(start + numel, first + x.numel())
            if low < high or not pieces:
                pieces.append(x[max(low - first, 0) : max(high - first, 0)])
            first += x.numel()
        kept[name] = joined(shape, pieces, f"{where}: {name}")
        start += numel
    have = sum(x.numel() for x in slices)
    if not start <= have < start + 2 * len(slices):
        raise StorageError(
            "the slices of a group do not fit its parameters",
            where=where,
            got=f"{have} elements",
            want=f"{start}, and less than {2 * len(slices)} of padding",
        )
    return kept


def sharded(shapes: Shapes, ranks: Sequence[Any], where: str) -> dict[str, ForeignLeaf]:
    """Return the parameters of a group of ZeRO 3, each divided into equal slices, of which the last is padded.

    Raises `StorageError` for slices of another length.
    """
    slices, kept, start = _flat(ranks, where), dict[str, ForeignLeaf](), 0
    for name, shape in shapes.items():
        share = -(-torch.Size(shape).numel() // len(slices))
        kept[name] = joined(shape, [x[start : start + share] for x in slices], f"{where}: {name}")
        start += share
    if any(x.numel() != start for x in slices):
        raise StorageError(
            "the slices of a group do not fit its parameters",
            where=where,
            got=", ".join(str(x.numel()) for x in slices)[:80],
            want=f"{start} each",
        )
    return kept


def shapes_by_slice(ranks: Sequence[Any], known: Shapes, where: str) -> list[Shapes]:
    """Return the groups of parameters from the tables of their slices, given all shapes.

    Each rank has a table per group: name -> (start, number of elements) in its slice. Raises `StorageError`.
    """
    groups: list[dict[str, int]] = [{} for _ in ranks[0]]
    for tables in ranks:
        for group, table in zip(groups, tables, strict=True):
            places = {name: attributes(at) for name, at in table.items()}
            for name in sorted(places, key=lambda name: places[name].get("start", 0)):
                group[name] = group.get(name, 0) + places[name].get("numel", 0)
    for group in groups:
        for name, numel in group.items():
            if name not in known or torch.Size(known[name]).numel() != numel:
                raise StorageError(
                    "a parameter of the optimizer is not in the model",
                    where=f"{where}: {name}",
                    got=str(known.get(name)),
                    want=f"a tensor of {numel} elements",
                )
    return [{name: known[name] for name in group} for group in groups]


def _flat(ranks: Sequence[Any], where: str) -> list[Tensor]:
    flats = [checked(x, where).detach() for x in ranks]
    if not flats or any(x.dim() != 1 for x in flats):
        raise StorageError(
            "a slice of a group is not flat", where=where, got=", ".join(str(tuple(x.shape)) for x in flats)
        )
    return flats
