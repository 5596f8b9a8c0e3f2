"""What a transport keeps back: the error of this rank's messages, added to the next ones of the same bucket."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.layout import Bucket
from fds.step import foreach
from fds.step.gradients import combined_scale
from fds.step.pool import Pool
from fds.step.totals import Totals

SLOT = "kept"


def nothing_kept(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> dict[str, Tensor]:
    """Return what is kept before the first message, given the shapes of the trained parameters: zeros."""
    return {name: torch.zeros(shape, device=device, dtype=torch.float32) for name, shape in shapes.items()}


@attrs.define(eq=False)
class Kept:
    """What is kept of every bucket in one call: read from the state before its first message, changed by each.

    The state has it by parameter, in units of the mean gradient, so that it means the same where batches weigh more,
    under another loss scale, in other buckets and on other ranks. Sums of a call are the mean times `total`, which of a
    `Mean` is known once all microbatches have run forward: so what was kept before goes with the messages of the last
    one, and those of earlier ones keep what they lose for it.
    """

    before: Mapping[str, Tensor]  # by trained parameter, of its shape, float32
    scale: Tensor | None  # of the loss, () float64; None is 1
    predivide: float  # of what is sent
    pool: Pool
    total: Tensor | None = None  # what sums are larger by than the mean gradient, () float64; None until it is known
    flat: dict[int, tuple[Bucket, Tensor]] = tree.new(dict)  # by index of the bucket
    joined: set[int] = tree.new(set)  # buckets of which that has what was kept before the call

    def weigh(self, weight: Tensor, divisor: Tensor | float = 1) -> None:
        """Take what the batch of all ranks weighs, () each, and what its gradients were divided by in backward."""
        self.total = combined_scale(weight, self.scale, divisor * self.predivide, weight.device)

    def expect(self, global_totals: Totals, mine: Totals, predivide: float) -> None:
        """Take what the batch of all ranks weighs, before its last backward."""
        assert isinstance(global_totals.weight, Tensor)
        self.weigh(global_totals.weight, 1 if global_totals.divisor is None else global_totals.divisor)

    def bucket(self, index: int, bucket: Bucket) -> Tensor:
        """Return what is kept of a bucket, (numel,) float32, which its next message changes."""
        flat = self.flat[index][1] if index in self.flat else None
        if self.total is not None and index not in self.joined:
            self.joined.add(index)
            before = self._read(bucket).mul_(self.total)
            flat = before if flat is None else flat.add_(before)
        if flat is None:
            flat = self.pool.take(bucket.numel, torch.float32, self._device(bucket)).zero_()
        self.flat[index] = bucket, flat
        return flat

    def waiting(self) -> list[int]:
        """Return the buckets of which messages were sent, but nothing of what was kept before the call."""
        return [index for index in self.flat if index not in self.joined]

    def after(self, skip: Tensor | None) -> dict[str, dict[str, Tensor]]:
        """Return the slot after the call: by parameter what is kept; where `skip`, () bool, is true what was before."""
        after = dict(self.before)
        assert not self.waiting()
        for bucket, flat in self.flat.values():
            assert self.total is not None
            flat.div_(self.total)
            if skip is not None:
                torch.where(skip, self._read(bucket), flat, out=flat)
            after.update(zip((leaf.name for leaf in bucket.leaves), bucket.views(flat), strict=True))
        return {SLOT: after}

    def _read(self, bucket: Bucket) -> Tensor:
        """Return what was kept of a bucket before the call, zero in its padding."""
        flat = self.pool.take(bucket.numel, torch.float32, self._device(bucket))
        views, gaps = bucket.cut(flat)
        foreach.copy_(views, [self.before[leaf.name] for leaf in bucket.leaves])
        if gaps:
            foreach.zero_(gaps)
        return flat

    def _device(self, bucket: Bucket) -> torch.device:
        return self.before[bucket.leaves[0].name].device
