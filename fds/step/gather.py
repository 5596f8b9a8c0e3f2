"""The station `gather`: what is held to what the loss sees, when and in what dtype."""

from __future__ import annotations

import fnmatch
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.layout import Bucket
from fds.step.live import Live
from fds.step.order import Order
from fds.step.pool import Pool
from fds.step.shard import Shard
from fds.step.structure import Structure


@attrs.frozen(eq=False)
class Parameters:
    """The parameters that a loss sees for the length of a step: whole tensors, or handles that gather when used."""

    leaves: list[Tensor]  # by the names of the structure; the trained ones are autograd leaves where they are asked for
    trained: list[Tensor]
    tree: Any
    live: Live | None = None  # at stage 3: the buckets that are whole just now

    def close(self) -> None:
        """Join what other ranks still need, and let go of what is whole."""
        if self.live is not None:
            self.live.close()


@attrs.frozen
class Gather:
    """Held parameters to whole ones, in what dtype (None keeps the master's), at which stage."""

    dtype: torch.dtype | None = None
    float32: tuple[str, ...] = ()  # patterns of parameters that stay as they are
    shard: Shard | None = None

    def __call__(
        self, structure: Structure, parts: list[Tensor], pool: Pool, *, train: bool, order: Order | None
    ) -> Parameters:
        """Return what the loss sees, cast once a step; with `train` the trained leaves require gradients."""
        live = None
        if not structure.sharded:
            whole = [self.cast(name, x) for name, x in zip(structure.names, parts, strict=True)]
        elif order is None:
            whole = self.all_at_once(structure, parts, pool)
        else:
            live = Live(self, structure, parts, pool, order)
            whole = live.handles(train)
        trained = set(structure.trained_names)
        if train and live is None:
            pairs = zip(structure.names, whole, strict=True)
            whole = [x.detach().requires_grad_() if name in trained else x for name, x in pairs]
        seen = [x for name, x in zip(structure.names, whole, strict=True) if name in trained]
        return Parameters(whole, seen, structure.build_whole(whole), live)

    def all_at_once(self, structure: Structure, parts: list[Tensor], pool: Pool) -> list[Tensor]:
        """Gather every bucket; the parameters are views of them."""
        assert structure.layout is not None
        started = [self.start(b, x, pool) for b, x in zip(structure.layout.buckets, parts, strict=True)]
        for _, work in started:
            work.wait()
        buckets = zip(structure.layout.buckets, started, strict=True)
        return structure.layout.collect([b.views(flat) for b, (flat, _) in buckets])

    def start(self, bucket: Bucket, part: Tensor, pool: Pool) -> tuple[Tensor, Any]:
        """Begin to gather a bucket from the slices of all ranks; return its memory (numel,) and the work."""
        assert self.shard is not None
        axis = self.shard.axis
        dtype = self.dtype_of(bucket.leaves[0].name, bucket.dtype)
        flat = pool.take(bucket.numel, dtype, part.device)
        own = bucket.slice(axis.index, flat)
        own.copy_(part)
        return flat, axis.start_all_gather(flat, own)

    def cast(self, name: str, x: Tensor) -> Tensor:
        """Return a leaf in the dtype in which the loss sees it."""
        return x.to(self.dtype_of(name, x.dtype))

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the loss sees a parameter that is held in `dtype`."""
        return self.dtype if self.dtype is not None and dtype.is_floating_point and self.casts(name) else dtype

    def casts(self, name: str) -> bool:
        """Say whether the parameter of this name is cast."""
        return not any(fnmatch.fnmatchcase(name, p) for p in self.float32)

    def persists(self, numel: int) -> bool:
        """Say whether a parameter of so many elements stays whole from the start of a step to its end."""
        return self.shard is not None and numel < self.shard.persist_below
