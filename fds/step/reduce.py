"""The station `reduce`: over which ranks gradients are summed, when and in what dtype."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from fds.collectives import Axis
from fds.errors import LossError
from fds.step.buckets import Bucketed
from fds.step.gradients import global_norm
from fds.step.order import Order
from fds.step.pool import Pool
from fds.step.shard import Shard
from fds.step.structure import Structure
from fds.step.sums import InPlace, detached
from fds.step.totals import Totals, agree


@attrs.frozen
class Reduce:
    """The dtype in which gradients travel (None: that of their sum), and the ranks; one rank sends nothing."""

    dtype: torch.dtype | None = None
    shard: Shard | None = attrs.field(default=None, repr=lambda s: "None" if s is None else f"over {s.data.name}")

    def sums(
        self, structure: Structure, leaves: list[Tensor], dtype: torch.dtype | None, pool: Pool, order: Order | None
    ) -> InPlace | Bucketed:
        """Prepare to sum the gradients by the trained leaves, in `dtype` or their own."""
        if self.shard is None:
            return InPlace.over(leaves, dtype)
        return Bucketed(structure, leaves, self.shard, pool, dtype=dtype, reduce_dtype=self.dtype, order=order)

    def demand_graph(self, total: Tensor, where: str) -> None:
        """Raise `LossError` for a total that depends on nothing, on one rank alone."""
        if self.shard is None and not total.requires_grad:
            raise detached(where, "a value without a graph")

    def demand_use(self, used: Sequence[bool], totals: Totals, where: str, asked: set[str]) -> None:
        """Raise `LossError` where no trained parameter got a gradient, on any rank, or ranks have other metrics.

        Ranks ask each other in a step's first call, which leaves its mark in `asked`.
        """
        some = any(used) or not used
        if self.shard is not None:
            if "use" in asked:
                return
            asked.add("use")
            heard = self.shard.data.exchange([some, sorted(totals.metrics)])
            some = any(one for one, _ in heard)
            for rank, (_, names) in enumerate(heard):
                if names != heard[0][1]:
                    raise LossError("ranks return different metrics", where=f"{where}, rank {rank}", got=str(names),
                                    want=f"{heard[0][1]}, as rank 0")  # fmt: skip
        if not some:
            raise detached(where, "a graph that leads to none of them")

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
