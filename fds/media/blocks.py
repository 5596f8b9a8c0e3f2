"""Blocks of memory that activations wait in: one per place in a microbatch, made once, and used in every step."""

from __future__ import annotations

import weakref

import attrs
import torch
from torch import Tensor

Place = tuple[int, int, torch.device]  # which group keeps it, which of what that keeps it is, and where


@attrs.frozen(eq=False)
class Blocks:
    """Memory that is not given back between microbatches and steps, so that nothing of short life lies beside it.

    A place has as many blocks as microbatches were in flight at once, each as large as the largest tensor that it held.

    Attributes:
        number: of groups that have blocks, from the first on; None for all.
        free: place -> its blocks that nothing is in, (num_bytes,) uint8.
    """

    number: int | None = None
    free: dict[Place, list[Tensor]] = attrs.field(factory=dict, repr=False)

    def has(self, group: int) -> bool:
        """Return whether a group has blocks."""
        return self.number is None or group < self.number

    def copy(self, x: Tensor, place: Place, holder: object) -> Tensor:
        """Return a copy of bytes (n,) in a block, which is taken for as long as `holder` lives."""
        free = self.free.setdefault(place, [])
        try:
            block = free.pop()
        except IndexError:  # all are in use by other microbatches, or there is none yet
            block = None
        if block is None or len(block) < len(x):
            block = torch.empty_like(x)
        weakref.finalize(holder, free.append, block).atexit = False
        return block[: len(x)].copy_(x)
