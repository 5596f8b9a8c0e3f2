"""The station `reduce`: in what dtype gradients are summed over ranks, and what their sums are taken in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.collectives import Axis
from fds.errors import LossError
from fds.step.call import Call
from fds.step.pool import Pool
from fds.step.residency.landing import Landing
from fds.step.seeds import Seeds
from fds.step.sharding.buckets import Bucketed
from fds.step.sharding.kept import SLOT, Kept
from fds.step.sharding.order import Order
from fds.step.sharding.shard import Shard
from fds.step.sharding.transport import LOSSLESS, Transport
from fds.step.structure import Structure
from fds.step.sums import InPlace
from fds.step.totals import Totals


@attrs.frozen
class Reduce:
    """The dtype in which gradients travel, None for that of their sum, and by which transport."""

    dtype: torch.dtype | None = None
    transport: Transport = LOSSLESS

    def drawing(self, call: Call) -> Reduce:
        """Return the same for one call, with what its transport draws in it."""
        return attrs.evolve(self, transport=self.transport.seeded(call.at("reduce").key))

    def sums(
        self,
        structure: Structure,
        shard: Shard | None,
        leaves: list[Tensor],
        dtype: torch.dtype | None,
        pool: Pool,
        order: Order | None,
        kinds: Iterable[torch.dtype | None],
        seeds: Seeds,
        slots: Mapping[str, Any],
        landing: Landing | None = None,
        tight: bool = False,
    ) -> InPlace | Bucketed:
        """Prepare to sum the gradients by the trained leaves, in `dtype` or their own, on every rank of `kinds`.

        They begin at `seeds`, `slots` have what was kept of earlier ones, and each that is final goes to `landing`.
        Where memory is `tight` that of gradients goes back to the system as soon as a bucket has their values.
        """
        if shard is None:
            return InPlace.over(leaves, dtype, landing)
        predivide = shard.divisor([self.dtype or dtype or kind for kind in kinds])
        kept = None
        if self.transport.keeps:
            kept = Kept(slots[SLOT], seeds.scale, predivide, pool)
        return Bucketed(
            structure,
            leaves,
            shard,
            self.transport,
            pool,
            dtype=dtype,
            reduce_dtype=self.dtype,
            predivide=predivide,
            order=order,
            kept=kept,
            landing=landing,
            tight=tight,
        )


def same_metrics(totals: Totals, everyone: Axis | None, what: str, asked: dict[str, list[str]]) -> None:
    """Raise `LossError` where the metrics are not those of every other rank, and of every other call.

    Ranks ask each other in the first call; whoever changes them later learns it before anything is sent.
    """
    if everyone is None:
        return
    kinds = [f"{name}: {'mean' if x.is_floating_point() else 'sum'}" for name, x in sorted(totals.metrics.items())]
    if what not in asked:
        replies = everyone.exchange(kinds, what)
        for rank, theirs in enumerate(replies):
            if theirs != replies[0]:
                raise LossError(
                    "ranks return different metrics",
                    where=f"rank {rank} of {everyone.name}",
                    got=str(theirs),
                    want=f"{replies[0]}, as rank 0",
                )
        asked[what] = kinds
    if asked[what] != kinds:
        raise LossError(
            "the metrics change from call to call, and ranks could not add them up",
            got=str(kinds),
            want=str(asked[what]),
            hint="return them in every call",
        )
