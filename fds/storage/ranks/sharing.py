"""Sharing: who writes what. Every element is written by one rank, and ranks that hold the same share the work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs
from torch import Tensor

from fds.storage.ranks.parts import Part
from fds.storage.ranks.together import Ranks
from fds.storage.ranks.union import Union

CUT = 4096  # bytes: a leaf is cut between ranks at multiples of this many bytes from its beginning


@attrs.frozen
class Piece:
    """Elements of a leaf that one rank writes, from `start` on: a tensor (length,), or of the leaf's shape."""

    name: str
    start: int
    tensor: Tensor


def own(parts: Mapping[str, Part], union: Union, ranks: Ranks) -> list[Piece]:
    """Return what this rank writes where all write one save, larger element sizes first.

    Of leaves that the pipeline has at several places, the ranks at the first one write. Of what is split among them
    each writes its part, copies of a slice in equal shares; so do all, of what each of them has.
    """
    mine = [(name, part) for name, part in sorted(parts.items()) if union.first[name] == ranks.place]
    split = _share([(n, p) for n, p in mine if p.split], ranks.replica, ranks.num_replicas)
    alike = _share([(n, p) for n, p in mine if not p.split], ranks.data, ranks.num_data)
    return aligned([*split, *alike])


def held(parts: Mapping[str, Part]) -> list[Piece]:
    """Return all that this rank holds: what it writes where each rank keeps its own."""
    return aligned(Piece(name, part.start, part.written) for name, part in parts.items() if part.tensor.numel())


def aligned(pieces: Iterable[Piece]) -> list[Piece]:
    """Order pieces so that each starts at a multiple of its element size in a file."""
    return sorted(pieces, key=lambda piece: -piece.tensor.element_size())


def _share(parts: list[tuple[str, Part]], index: int, num_ranks: int) -> Iterator[Piece]:
    """Yield share `index` of `num_ranks` equal ones, of the parts laid one after another."""
    total = sum(_num_bytes(part) for _, part in parts)
    low, high = (total * i // num_ranks for i in (index, index + 1))
    position = 0
    for name, part in parts:
        size, itemsize = _num_bytes(part), part.tensor.element_size()
        first, last = (_cut(border - position, size) // itemsize for border in (low, high))
        if first == 0 and last * itemsize == size:
            if size:
                yield Piece(name, part.start, part.written)
        elif first < last:
            yield Piece(name, part.start + first, part.tensor.reshape(-1)[first:last])
        position += size


def _cut(border: int, size: int) -> int:
    """Return the byte of a leaf of `size` bytes at which ranks divide it, given the border's place in it."""
    return size if border >= size else max(border, 0) // CUT * CUT


def _num_bytes(part: Part) -> int:
    return part.tensor.numel() * part.tensor.element_size()
