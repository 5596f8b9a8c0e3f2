"""Leaves apart: those of the new state that are written before the step has decided, in memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import attrs
from torch import Tensor

from fds.step.residency.chunks import Piece
from fds.step.residency.lives import Column, Lives
from fds.step.residency.visit import Run, Visit, chunks_of_leaves
from fds.step.structure import Structure

Parts = list[tuple[Any, list[Tensor]]]  # trees, each with some of its leaves


@attrs.frozen(eq=False)
class Apart:
    """Leaves of the new state in memory of their own, which may be written before the step has decided.

    By index among all leaves that an update writes.
    """

    tensors: dict[int, Tensor]
    flat: dict[int, Tensor]
    old: dict[int, Tensor]  # the old values, flat

    def others(self, parts: Parts) -> tuple[list[int], Parts]:
        """Return the indices of all other leaves, and of trees with their leaves those others."""
        index = [i for i in range(sum(len(some) for _, some in parts)) if i not in self.tensors]
        ends = accumulate((len(some) for _, some in parts), initial=0)
        mine = self.tensors.keys()
        return index, [
            (one, [x for i, x in enumerate(some, start) if i not in mine])
            for (one, some), start in zip(parts, ends, strict=False)
        ]

    def among(self, index: Sequence[int], *others: list[Tensor]) -> tuple[list[Tensor], ...]:
        """Return tensors, flat ones and old values of all leaves, given those of the `others`, of these indices."""
        every = (
            mine | dict(zip(index, some, strict=True))
            for mine, some in zip((self.tensors, self.flat, self.old), others, strict=True)
        )
        return tuple([found[i] for i in sorted(found)] for found in every)

    def visit(self, structure: Structure, lives: Lives, chunks: list[list[Piece]], run: Run) -> Visit:
        """Return the visit of the slices that are updated ahead, in the order in which backward completes them."""
        n = len(structure.trained)
        count = n + sum(len(want.names) for want in structure.opt.values())

        def columns(leaves: dict[int, Tensor]) -> list[Column]:
            every: list[Tensor | None] = [leaves.get(i) for i in range(count)]
            return [every[:n], *structure.align(every[n:]).values()]

        ahead = chunks_of_leaves(lives, columns(self.flat), columns(self.old), chunks, ahead=True)
        return Visit(ahead[::-1], run, lambda: None)
