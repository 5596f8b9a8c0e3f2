"""The parameters of one step, as the loss sees them: whole tensors, or handles that gather when they are used."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import attrs
from torch import Tensor

from fds.step.pool import Pool
from fds.step.ranges import in_range
from fds.step.residency.masters import Masters
from fds.step.sharding.gather import Gather
from fds.step.sharding.live import Live
from fds.step.sharding.order import Order
from fds.step.sharding.shard import Shard
from fds.step.structure import Structure


@attrs.frozen(eq=False)
class Parameters:
    """The parameters that a loss sees for the length of a step: whole tensors, or handles that gather when used."""

    trained: list[Tensor]
    tree: Any
    live: Live | None = None  # at stage 3: the buckets that are whole just now

    def close(self) -> None:
        """Let go of what is whole."""
        if self.live is not None:
            self.live.close()


@in_range("gather")
def open_parameters(
    gather: Gather,
    shard: Shard | None,
    structure: Structure,
    masters: Masters,
    pool: Pool,
    *,
    train: bool,
    order: Order | None,
) -> Parameters:
    """Return what the loss sees, read and cast once a step; with `train` the trained leaves require gradients."""
    live = None
    if not structure.sharded:
        whole = masters.seen(structure.casts) if masters.elsewhere or structure.casts else masters.parts
    elif shard is not None and order is not None and _gathers_on_use(gather, shard, structure):
        live = Live(gather, shard, structure, masters, pool, order)
        whole = live.handles(train)
    else:
        assert shard is not None and structure.layout is not None
        whole = gather.all_at_once(structure.layout, masters, shard.legs["gather"], pool)
    if live is None:
        whole = _as_leaves(whole, structure.is_trained, train=train, keep=not structure.sharded)
    trained = whole if all(structure.is_trained) else list(compress(whole, structure.is_trained))
    return Parameters(trained, structure.build_whole(whole), live)


def _gathers_on_use(gather: Gather, shard: Shard, structure: Structure) -> bool:
    """Say whether any parameter is gathered when it is used."""
    return shard.gathers_on_use and structure.layout is not None and bool(gather.passing(structure.layout, shard))


def _as_leaves(whole: list[Tensor], is_trained: Sequence[bool], *, train: bool, keep: bool) -> list[Tensor]:
    """Return the same parameters; with `train` those that are trained as leaves that autograd records.

    Without `keep` all of them are new tensors, so that what the loss does to them is gone with them.
    """
    if train and all(is_trained):
        return list(map(Tensor.requires_grad_, map(Tensor.detach, whole)))
    found = whole if keep else list(map(Tensor.detach, whole))
    if not train:
        return found
    return [x.detach().requires_grad_() if one else x for x, one in zip(found, is_trained, strict=True)]
