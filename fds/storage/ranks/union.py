"""Union: the leaves of the whole plain state, of which every rank of a pipeline has those of its stages."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from fds.collectives import fingerprint
from fds.storage.format.manifest import Leaf
from fds.storage.ranks.parts import Part
from fds.storage.ranks.together import Ranks


@attrs.frozen
class Union:
    """All leaves by key path, without chunks, and the first place in the pipeline that has each: its ranks write it."""

    leaves: dict[str, Leaf]
    first: dict[str, int]

    @classmethod
    def of(cls, parts: Mapping[str, Part], ranks: Ranks) -> Union:
        """Return the union of what the ranks have; all of them call this.

        Of those at one place the first one tells; what tied layers share, and step, calls and key, several places
        have. Raises `StorageError`, on every rank, where they have a leaf in different shapes or dtypes.
        """
        own = {name: part.leaf() for name, part in parts.items()}
        if not ranks.pipelined:
            return cls(own, dict.fromkeys(own, 0))
        with ranks.together() as said:
            tells = ranks.data == 0
            said.mine = [ranks.place, [[name, x.dtype, x.shape] for name, x in own.items()] if tells else []]
        told = [(place, {name: Leaf(dtype, tuple(shape), ()) for name, dtype, shape in leaves})
                for place, leaves in said.all]  # fmt: skip
        ranks.refuse_different([{f"leaf {name}": str(x) for name, x in leaves.items()} for _, leaves in told])
        union, first = dict[str, Leaf](), dict[str, int]()
        for place, leaves in sorted(told, key=lambda one: one[0]):
            for name, leaf in leaves.items():
                union.setdefault(name, leaf)
                first.setdefault(name, place)
        return cls(union, first)


def agreement(parts: Mapping[str, Part], ranks: Ranks) -> dict[str, str]:
    """Return the leaves in which the ranks at one place of the pipeline must agree, for `Ranks.refuse_different`."""
    if ranks.everyone is None:
        return {}
    lines = "\n".join(sorted(f"{name} {part.leaf()}" for name, part in parts.items()))
    what = f"leaves of pipeline rank {ranks.place}" if ranks.pipelined else "leaves"
    return {what: f"{len(parts)} leaves, {fingerprint(lines)}"}
