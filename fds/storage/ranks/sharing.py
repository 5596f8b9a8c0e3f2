"""Which rank writes what of a state: all leaves by key path, and their elements divided among those that have them.

Each element is written once, and copies share the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs
from torch import Tensor

from fds.collectives import fingerprint
from fds.layout import Box
from fds.storage.format.manifest import SavedLeaf
from fds.storage.ranks.exchange import Ranks
from fds.storage.ranks.leaf_parts import LeafPart


@attrs.frozen
class AllLeaves:
    """All leaves by key path, without chunks, and the first place that has each, whose ranks write it.

    A place is a set of leaves: ranks at one place have the same leaves, or parts of the same.
    """

    leaves: dict[str, SavedLeaf]
    first: dict[str, int]

    @classmethod
    def of(cls, parts: Mapping[str, LeafPart], ranks: Ranks) -> AllLeaves:
        """Return the union of the ranks' leaves; all ranks call this.

        For each place one rank reports its leaves. Several places have parameters of tied layers, and step, calls and
        key. Raises `StorageError`, on every rank, for a leaf with several shapes or dtypes.
        """
        mine = {name: part.leaf() for name, part in parts.items()}
        if not ranks.apart:
            return cls(mine, dict.fromkeys(mine, 0))
        with ranks.together() as exchange:
            reports = not any(index for index, _ in ranks.dimensions.copies(None, sliced=False))
            exchange.mine = [ranks.place, [[name, x.dtype, x.shape] for name, x in mine.items()] if reports else []]
        by_place = [
            (place, {name: SavedLeaf(dtype, tuple(shape), ()) for name, dtype, shape in leaves})
            for place, leaves in exchange.all
        ]
        ranks.check_equal([{f"leaf {name}": str(x) for name, x in leaves.items()} for _, leaves in by_place])
        union, first = dict[str, SavedLeaf](), dict[str, int]()
        for place, leaves in sorted(by_place, key=lambda report: report[0]):
            for name, leaf in leaves.items():
                union.setdefault(name, leaf)
                first.setdefault(name, place)
        return cls(union, first)


def agreement(parts: Mapping[str, LeafPart], ranks: Ranks) -> dict[str, str]:
    """Return the leaves that must be equal on all ranks at one place, for `Ranks.check_equal`."""
    if ranks.everyone is None:
        return {}
    lines = "\n".join(sorted(f"{name} {part.leaf()}" for name, part in parts.items()))
    what = f"leaves of the ranks at place {ranks.place}" if ranks.apart else "leaves"
    return {what: f"{len(parts)} leaves, {fingerprint(lines)}"}


CUT = 4096  # bytes: leaves are divided between ranks at multiples of this


@attrs.frozen
class LeafPiece:
    """Elements of a leaf that one rank writes, or of a box of it, from `start` on.

    The tensor is (length,), or has the shape of the leaf, or of the box, where it is all of that; or it is a view of a
    piece of several boxes. Those of one leaf come one after another.
    """

    name: str
    start: int
    tensor: Tensor
    box: Box | None = None


def pieces_of_rank(parts: Mapping[str, LeafPart], union: AllLeaves, ranks: Ranks) -> list[LeafPiece]:
    """Return what this rank writes to a save of all ranks, larger element sizes first.

    A leaf that several places have is written by the first. Of split leaves each rank writes its part; ranks that hold
    the same elements write equal shares of them. Every rank writes its terms of sums.
    """
    ordered = sorted(parts.items())
    terms = all_pieces({name: part for name, part in ordered if part.term is not None and not part.is_copy})
    mine = [(name, part) for name, part in ordered if part.term is None and union.first[name] == ranks.place]
    groups: dict[tuple, list[tuple[str, LeafPart]]] = {}  # by how copies lie: those of one are shared by the same ranks
    indices: dict[tuple, tuple[int, int]] = {}
    for name, part in mine:
        copies = ranks.dimensions.copies(part.parameter, sliced=part.split)
        key = not part.split, tuple(size for _, size in copies)
        index, count = 0, 1
        for i, size in copies:
            index, count = index * size + i, count * size
        indices[key] = index, count
        groups.setdefault(key, []).append((name, part))
    shared = (piece for key in sorted(groups) for piece in _share(groups[key], *indices[key]))
    return align([*shared, *terms])


def all_pieces(parts: Mapping[str, LeafPart]) -> list[LeafPiece]:
    """Return all that this rank holds, which it writes to a save of its own."""
    filled = ((name, part) for name, part in parts.items() if part.tensor.numel())
    return align(piece for name, part in filled for piece in _pieces(name, part, part.written))


def align(pieces: Iterable[LeafPiece]) -> list[LeafPiece]:
    """Order pieces by element size, so that each is aligned in a file."""
    return sorted(pieces, key=lambda piece: -piece.tensor.element_size())


def _share(parts: list[tuple[str, LeafPart]], index: int, num_ranks: int) -> Iterator[LeafPiece]:
    """Yield share `index` of `num_ranks` equal shares of the concatenated parts."""
    total = sum(_num_bytes(part) for _, part in parts)
    low, high = (total * i // num_ranks for i in (index, index + 1))
    position = 0
    for name, part in parts:
        size, itemsize = _num_bytes(part), part.tensor.element_size()
        first, last = (_cut(border - position, size) // itemsize for border in (low, high))
        if first == 0 and last * itemsize == size:
            if size:
                yield from _pieces(name, part, part.written)
        elif first < last:
            shared = attrs.evolve(part, start=part.start + first)
            yield from _pieces(name, shared, part.tensor.reshape(-1)[first:last])
        position += size


def _pieces(name: str, part: LeafPart, x: Tensor) -> Iterator[LeafPiece]:
    return (LeafPiece(name, start, view, box) for box, start, view in part.by_box(x))


def _cut(border: int, size: int) -> int:
    """Return the byte at which a leaf of `size` bytes is divided, given a border of shares relative to its start."""
    return size if border >= size else max(border, 0) // CUT * CUT


def _num_bytes(part: LeafPart) -> int:
    return part.tensor.numel() * part.tensor.element_size()
