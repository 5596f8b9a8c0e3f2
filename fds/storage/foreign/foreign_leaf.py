"""Leaves in files of other programs, whole or in pieces, and how their elements are read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter

from fds.errors import StorageError
from fds.storage.format.manifest import SavedLeaf
from fds.storage.format.tensors import DTYPES, dtype_name
from fds.storage.source import Source

PIECE = 2**20  # elements that are held in memory at a time


@attrs.frozen(eq=False)
class ForeignLeaf:
    """A leaf, and `read(start, out)`, which fills `out` (length,) with its flattened elements from `start` on.

    Leaves with the same `place` are one tensor under several names.
    """

    leaf: SavedLeaf
    read: Callable[[int, Tensor], None]
    place: Hashable = None


def source_of(where: str, kept: Mapping[str, ForeignLeaf], extra: dict[str, Any], composition: Sequence[str]) -> Source:
    """Return a source of these leaves by key path."""

    def read(name: str, start: int, out: Tensor) -> None:
        leaf = kept[name].leaf
        numel = torch.Size(leaf.shape).numel()
        if out.dtype != DTYPES[leaf.dtype] or start < 0 or start + out.numel() > numel:
            raise StorageError(
                "a leaf has no such elements",
                where=f"{where}: {name}",
                got=f"{start} to {start + out.numel()}, {out.dtype}",
                want=f"0 to {numel}, torch.{leaf.dtype}",
            )
        if out.numel():
            kept[name].read(start, out)

    first: dict[Hashable, str] = {}
    aliases = {name: first.setdefault(one.place, name) for name, one in kept.items() if one.place is not None}
    leaves = {name: one.leaf for name, one in kept.items()}
    return Source(where, leaves, read, extra, tuple(composition), aliases)


def number(value: float, dtype: torch.dtype) -> ForeignLeaf:
    """Return a leaf of shape () with this value."""
    return whole(torch.tensor(value, dtype=dtype, device="cpu"), where="")


def whole(x: Any, where: str) -> ForeignLeaf:
    """Return a tensor as a leaf. Raises `StorageError` for anything but a tensor that a state can hold."""
    checked(x, where)
    place = (x.data_ptr(), x.shape, x.stride()) if x.numel() else None
    leaf = SavedLeaf(dtype_name(x.dtype), tuple(x.shape), ())
    return ForeignLeaf(leaf, lambda start, out: _copy(x, start, out), place)


def joined(shape: Sequence[int], pieces: Sequence[Tensor], where: str) -> ForeignLeaf:
    """Return the concatenation of flat tensors as a leaf; additional elements are padding.

    Raises `StorageError` for pieces that are not tensors, have several dtypes, or too few elements.
    """
    for piece in pieces:
        checked(piece, where)
    numel, ends = torch.Size(shape).numel(), list(accumulate(piece.numel() for piece in pieces))
    if len({piece.dtype for piece in pieces}) != 1 or ends[-1] < numel:
        raise StorageError(
            "the pieces of a tensor do not fit its shape",
            where=where,
            got=", ".join(f"{dtype_name(piece.dtype)} {tuple(piece.shape)}" for piece in pieces)[:200] or "none",
            want=f"{numel} elements of one dtype, for shape {tuple(shape)}",
        )

    def read(start: int, out: Tensor) -> None:
        for piece, end in zip(pieces, ends, strict=True):
            first = end - piece.numel()
            low, high = max(start, first), min(start + out.numel(), end)
            if low < high:
                _copy(piece, low - first, out[low - start : high - start])

    return ForeignLeaf(SavedLeaf(dtype_name(pieces[0].dtype), tuple(shape), ()), read)


def equal(a: ForeignLeaf, b: ForeignLeaf) -> bool:
    """Return whether two leaves have the same elements, read a piece at a time."""
    if str(a.leaf) != str(b.leaf):
        return False
    numel = torch.Size(a.leaf.shape).numel()
    for start in range(0, numel, PIECE):
        x, y = (torch.empty(min(PIECE, numel - start), dtype=DTYPES[a.leaf.dtype], device="cpu") for _ in range(2))
        a.read(start, x)
        b.read(start, y)
        if not torch.equal(x, y):
            return False
    return True


def checked(x: Any, where: str) -> Tensor:
    """Return `x` if it is a dense CPU tensor of a dtype that files can hold. Raises `StorageError`."""
    plain = type(x) in (Tensor, Parameter) and x.layout == torch.strided and x.device.type == "cpu"
    if not plain or x.dtype not in _KNOWN:
        got = f"{type(x).__name__}" + (f" {x.dtype}, {x.layout}, {x.device}" if isinstance(x, Tensor) else "")
        raise StorageError(
            "this is not a tensor that a state can hold",
            where=where,
            got=got,
            want=f"a dense one of {', '.join(DTYPES)}",
        )
    return x


def _copy(x: Tensor, start: int, out: Tensor) -> None:
    """Copy elements of a flattened tensor of any strides, using no more memory than `out`."""
    x = x.detach()
    if x.dim() <= 1 or x.is_contiguous():
        flat = x.view(-1) if x.is_contiguous() else x.reshape(-1)  # with 0 or 1 dimensions also a view
        out.copy_(flat[start : start + out.numel()])
        return
    row, done = x[0].numel(), 0
    while done < out.numel():
        index, offset = divmod(start + done, row)
        if offset == 0 and (rows := (out.numel() - done) // row):
            out[done : done + rows * row].view(rows, *x.shape[1:]).copy_(x[index : index + rows])
            done += rows * row
        else:
            length = min(row - offset, out.numel() - done)
            _copy(x[index], offset, out[done : done + length])
            done += length


_KNOWN = frozenset(DTYPES.values())
