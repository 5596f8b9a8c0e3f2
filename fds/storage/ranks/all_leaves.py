"""The leaves of the whole plain state, of which ranks may have different ones, as in a pipeline."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from fds.collectives import fingerprint
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
        own = {name: part.leaf() for name, part in parts.items()}
        if not ranks.apart:
            return cls(own, dict.fromkeys(own, 0))
        with ranks.together() as exchange:
            reports = not any(index for index, _ in ranks.dimensions.copies(None, sliced=False))
            exchange.mine = [ranks.place, [[name, x.dtype, x.shape] for name, x in own.items()] if reports else []]
        by_place = [
            (place, {name: SavedLeaf(dtype, tuple(shape), ()) for name, dtype, shape in leaves})
            for place, leaves in exchange.all
        ]
        ranks.check_equal([{f"leaf {name}": str(x) for name, x in leaves.items()} for _, leaves in by_place])
        union, first = dict[str, SavedLeaf](), dict[str, int]()
        for place, leaves in sorted(by_place, key=lambda one: one[0]):
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
