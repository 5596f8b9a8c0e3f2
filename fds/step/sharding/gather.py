"""The station `gather`: what is held to what the loss sees, when and in what dtype."""

from __future__ import annotations

import fnmatch

import attrs
import torch
from torch import Tensor

from fds.collectives import Axis, Work
from fds.errors import StateError
from fds.layout import Bucket, Layout
from fds.step.checks import contracts
from fds.step.pool import Pool
from fds.step.sharding.shard import Shard
from fds.step.sharding.transport import LOSSLESS, Transport
from fds.step.structure import Structure


@attrs.frozen
class Gather:
    """Held parameters to whole ones, in what dtype (None keeps the master's), by which transport."""

    dtype: torch.dtype | None = None
    float32: tuple[str, ...] = ()  # patterns of parameters that stay as they are
    transport: Transport = LOSSLESS

    def all_at_once(self, structure: Structure, shard: Shard, parts: list[Tensor], pool: Pool) -> list[Tensor]:
        """Gather every bucket; the parameters are views of them, which the pool keeps."""
        assert structure.layout is not None
        taken: list[list[Tensor]] = []
        works: list[Work] = []
        for bucket, part in zip(structure.layout.buckets, parts, strict=True):
            dtype = self.dtype_of(bucket.leaves[0].name, part.dtype)
            flat, views, _ = pool.take_bucket(bucket, dtype, part.device)
            taken.append(views)
            works.append(contracts.sent(self.transport.gather(shard.axis, part, flat), self.transport, "gather"))
        for work in works:
            work.wait()
        return structure.layout.collect(taken)

    def start(self, bucket: Bucket, part: Tensor, axis: Axis, pool: Pool) -> tuple[Tensor, Work]:
        """Begin to gather a bucket from the slices of all ranks; return its memory (numel,) and the work."""
        dtype = self.dtype_of(bucket.leaves[0].name, part.dtype)
        flat = pool.take(bucket.numel, dtype, part.device)
        return flat, contracts.sent(self.transport.gather(axis, part, flat), self.transport, "gather")

    def passing(self, layout: Layout, shard: Shard) -> dict[int, int]:
        """Return the buckets that stage 3 does not keep whole for the length of a step, with their bytes if whole.

        There are none where `max_live_bytes` has room for all of them.
        """
        sizes = {
            i: b.numel * self.dtype_of(b.leaves[0].name, b.dtype).itemsize
            for i, b in enumerate(layout.buckets)
            if not shard.persists(b.leaves[0].numel)
        }
        return {} if shard.max_live_bytes is not None and sum(sizes.values()) <= shard.max_live_bytes else sizes

    def room(self, layout: Layout, shard: Shard) -> int:
        """Return the bytes of used buckets that stage 3 may keep whole beside those that are on their way.

        Raises `StateError` where the bound has no room for a single bucket.
        """
        sizes, bound = self.passing(layout, shard), shard.max_live_bytes
        largest = max(sizes.values(), default=0)
        coming = shard.prefetch * largest
        if bound is None:
            return 2 * largest
        if bound < largest + coming:
            bucket = layout.buckets[max(sizes, key=sizes.__getitem__)]
            raise StateError(
                "shard_optimizer: max_live_bytes has no room for the largest bucket",
                where=bucket.leaves[0].name + (f" and {len(bucket.leaves) - 1} more" if bucket.leaves[1:] else ""),
                got=f"{bound:,} bytes",
                want=f"at least {largest + coming:,} bytes: one bucket of {largest:,}, and {shard.prefetch} on the way",
                hint="prefetch=0, or more room" if len(bucket.leaves) == 1 else "smaller bucket_bytes, or prefetch=0",
            )
        return bound - coming

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the loss sees a parameter that is held in `dtype`."""
        return self.dtype if self.dtype is not None and dtype.is_floating_point and self.casts(name) else dtype

    def casts(self, name: str) -> bool:
        """Say whether the parameter of this name is cast."""
        return not any(fnmatch.fnmatchcase(name, p) for p in self.float32)
