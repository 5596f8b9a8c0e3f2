"""What a transport keeps back: the error of this rank's messages, added to the next ones of the same bucket."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.layout import Bucket
from fds.step import foreach
from fds.step.pool import Pool

SLOT = "kept"


def nothing_kept(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> dict[str, Tensor]:
    """Return what is kept before the first message, given the shapes of the trained parameters: zeros."""
    return {name: torch.zeros(shape, device=device, dtype=torch.float32) for name, shape in shapes.items()}


@attrs.define(eq=False)
class Kept:
    """What is kept of every bucket in one call: read from the state before its first message, changed by each.

    The state has it by parameter, of the gradient of the loss itself, so that it means the same under another loss
    scale, in other buckets and on other ranks. What is sent is that times `scale` / `divisor` (and, where the gradients
    of a `Mean` are divided by a power of two near its weight, by that: then it is of the mean).
    """

    given: Mapping[str, Tensor]  # by trained parameter, of its shape, float32, before the call
    scale: Tensor | None  # () float64; None is 1
    divisor: float
    pool: Pool
    flat: dict[int, tuple[Bucket, Tensor]] = tree.new(dict)  # by index of the bucket

    def bucket(self, index: int, bucket: Bucket) -> Tensor:
        """Return what is kept of a bucket, (numel,) float32, which its next message changes."""
        if index not in self.flat:
            flat = self._read(bucket)
            if self.scale is not None:
                flat.mul_(self.scale)
            if self.divisor != 1:
                flat.div_(self.divisor)
            self.flat[index] = bucket, flat
        return self.flat[index][1]

    def after(self, skip: Tensor | None) -> dict[str, Tensor]:
        """Return what is kept after the call, by parameter; where `skip`, () bool, is true it is what was before."""
        found = dict(self.given)
        for bucket, flat in self.flat.values():
            if self.divisor != 1:
                flat.mul_(self.divisor)
            if self.scale is not None:
                flat.div_(self.scale)
            if skip is not None:
                torch.where(skip, self._read(bucket), flat, out=flat)
            found.update(zip((leaf.name for leaf in bucket.leaves), bucket.views(flat), strict=True))
        return found

    def _read(self, bucket: Bucket) -> Tensor:
        """Return what was kept of a bucket before the call, zero in its padding."""
        held = [self.given[leaf.name] for leaf in bucket.leaves]
        flat = self.pool.take(bucket.numel, torch.float32, held[0].device)
        views, gaps = bucket.cut(flat)
        foreach.copy_(views, held)
        if gaps:
            foreach.zero_(gaps)
        return flat
