"""The station `reduce`: over which ranks gradients are summed, when and in what dtype."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from fds.collectives import Axis
from fds.step.buckets import Bucketed
from fds.step.gradients import global_norm
from fds.step.order import Order
from fds.step.pool import Pool
from fds.step.shard import Shard
from fds.step.structure import Structure
from fds.step.sums import InPlace
from fds.step.totals import Totals, agree


@attrs.frozen
class Reduce:
    """The dtype in which gradients travel (None: that of their sum), and the ranks; one rank sends nothing."""

    dtype: torch.dtype | None = None
    shard: Shard | None = None

    def sums(
        self, structure: Structure, leaves: list[Tensor], dtype: torch.dtype | None, pool: Pool, order: Order | None
    ) -> InPlace | Bucketed:
        """Prepare to sum the gradients by the trained leaves, in `dtype` or their own."""
        if self.shard is None:
            return InPlace.over(leaves, dtype)
        return Bucketed(structure, leaves, self.shard, pool, dtype=dtype, reduce_dtype=self.dtype, order=order)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes over which what the optimizer gets is split."""
        return () if self.shard is None or self.shard.stage == 0 else (self.shard.axis,)

    @property
    def predivide(self) -> float:
        """What gradients were divided by before they were sent."""
        return 1.0 if self.shard is None else self.shard.predivide

    def agree(
        self, totals: Totals, grads: list[Tensor], buffers: dict[str, Tensor], *, norm: bool
    ) -> tuple[Totals, Tensor | None, dict[str, Tensor]]:
        """Return totals, the global norm of the sums (where asked for) and buffers that all ranks share."""
        own = global_norm(grads) if norm else None
        if self.shard is None:
            return totals, own, buffers
        squares = None if own is None else own.double().square()
        if squares is not None and not self.shard.counts:
            squares = torch.zeros_like(squares)
        totals, squares, buffers = agree(totals, squares, buffers, self.shard.data)
        return totals, None if squares is None or own is None else squares.sqrt().to(own.dtype), buffers
