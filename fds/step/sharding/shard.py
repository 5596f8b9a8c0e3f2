"""How ranks share the work of a step: along which axis, at which ZeRO stage, in buckets of what size."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch

from fds.collectives import Axis
from fds.layout import MOST_BYTES, Layout, Leaf, plan
from fds.step.placements import Placement, Replicated
from fds.step.sharding.transport import Leg
from fds.step.topology import Dimensions


@attrs.frozen(repr=False)
class Shard(Placement):
    """What `fds.shard_optimizer` decides: a placement in the station `topology`, where all who need it find it."""

    axis: Axis  # pyright: ignore[reportIncompatibleVariableOverride]  (never None; over it the state is sliced)
    stage: int
    data: Axis  # over which batches differ: `axis`, or the replicas of it too
    replicate: Axis | None = None  # over which the slices are replicated
    bucket_bytes: int | None = None  # follows the model and the axis
    max_live_bytes: int | None = None
    prefetch: int = 1
    persist_below: int = 0
    secondary: Axis | None = None  # inside a node: where stage 3 gathers from again
    predivide: float | None = None  # None: the number of data ranks where float16 is sent, else 1

    @functools.cached_property
    def legs(self) -> dict[Leg, Axis]:
        """The axis of each leg of a transport, used for that leg."""
        both: dict[Leg, Axis | None] = {
            "reduce": self.axis, "spread": self.axis, "gather": self.axis, "combine": self.replicate
        }  # fmt: skip
        return {leg: axis.used_for(leg) for leg, axis in both.items() if axis is not None}

    @functools.cached_property
    def slices_state(self) -> bool:
        """Whether a state holds this rank's slices alone: parameters, optimizer state, averages. From stage 1 on."""
        return self.stage >= 1

    @functools.cached_property
    def reduces_each_microbatch(self) -> bool:
        """Whether gradients are reduced every microbatch, and their sums held as slices. From stage 2 on."""
        return self.stage >= 2

    @functools.cached_property
    def gathers_on_use(self) -> bool:
        """Whether parameters are gathered when the loss uses them, not all at the start of a step. At stage 3."""
        return self.stage == 3

    def persists(self, numel: int) -> bool:
        """Say whether a parameter of so many elements stays whole from the start of a step to its end."""
        return numel < self.persist_below

    def plan(self, leaves: Sequence[Leaf], spec: Any) -> Layout:
        """Return the buckets of these leaves."""
        size = self.bucket_bytes
        if size is None and self.axis.world.shares_cores:
            # Two ranks on the two cores of one node, 20 MB of gradients, stage 0: 32 MiB 1.00 of DDP's time, 8 MiB
            # 1.03, 1 MiB 1.07; over 1 Gbit/s 1.05, 0.87 and 0.72.
            size = MOST_BYTES
        return plan(leaves, spec, num_ranks=self.axis.size, bucket_bytes=size)

    @property
    def split(self) -> tuple[Axis, ...]:
        """The axis of the slices, where the optimizer gets no more than those."""
        return (self.axis,) if self.slices_state else ()

    @property
    def slice(self) -> int | None:
        """Which slice of every bucket this rank holds, where state is sliced."""
        return self.axis.index if self.slices_state else None

    @property
    def differs(self) -> bool:
        """Whether ranks hold anything else than slices of the same parameters: no."""
        return False

    def lies(self, name: str) -> Replicated:
        """Say that parameters are the same on all data ranks; the station `reduce` sums their gradients."""
        return Replicated("sum")

    def copies(self, name: str | None, *, sliced: bool) -> tuple[int, int]:
        """Of the ranks that hold the same slices, or all of a leaf, which one this is, and how many they are."""
        if not sliced:
            return self.data.index, self.data.size
        return (0, 1) if self.replicate is None else (self.replicate.index, self.replicate.size)

    def counts(self, names: Sequence[str | None]) -> list[bool]:
        """Say whether this rank's gradients count in norms: of replicas the first one's do."""
        first = self.copies(None, sliced=self.slices_state)[0] == 0
        return [first] * len(names)

    def divisor(self, sent: Iterable[torch.dtype | None]) -> float:
        """Return what gradients are divided by before they are sent in these dtypes."""
        if self.predivide is not None:
            return self.predivide
        return float(self.data.size) if torch.float16 in sent else 1.0

    def __repr__(self) -> str:
        copies = ""
        if self.replicate is not None:
            copies = f" over {self.axis.name} ({self.axis.size}), replicated over {self.replicate.name}"
            copies += f" ({self.replicate.size})"
        text = f"stage {self.stage}{copies}"
        text += "" if self.bucket_bytes is None else f", buckets of {self.bucket_bytes:,} bytes"
        text += "" if self.secondary is None else f", again over {self.secondary.name} ({self.secondary.size})"
        bound = "" if self.max_live_bytes is None else f", {self.max_live_bytes:,} bytes whole at most"
        return text + (f"{bound}, {self.prefetch} ahead" if self.gathers_on_use else "")


def shard_of(dimensions: Dimensions) -> Shard | None:
    """Return how data ranks share the work of a step, None where nobody shares it."""
    return next(
        (dimension.placement for dimension in dimensions.entries if isinstance(dimension.placement, Shard)), None
    )
