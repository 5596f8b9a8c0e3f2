"""Transports of gradients by the names of parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Hashable, Mapping, Sequence

import attrs
from torch import Tensor

from fds import random, tree
from fds.collectives import Axis
from fds.layout import Bucket
from fds.step.sharding.transport import LOSSLESS, Transport


@attrs.frozen(eq=False, repr=False)
class Named(Transport):
    """Sends each gradient by the transport of the first pattern that its name matches, and without loss if none does.

    Parameters of different patterns travel in different buckets.
    """

    ways: Mapping[str, Transport]  # by shell-style pattern (`*` crosses dots)

    @property
    def keeps(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether one of them keeps errors."""
        return any(way.keeps for way in self.ways.values())

    @property
    def bound(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The largest one."""
        return max((way.bound for way in self.ways.values()), default=0.0)

    @property
    def draws(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether one of them draws."""
        return any(way.draws for way in self.ways.values())

    def seeded(self, key: Tensor) -> Named:
        """Return those that draw from a key, each from its own."""
        return Named({name: way.seeded(random.fold_in(key, name)) for name, way in self.ways.items()})

    def on(self, axis: Axis) -> Named:
        """Return those among the ranks of an axis."""
        return Named({name: way.on(axis) for name, way in self.ways.items()})

    def check(self, names: Sequence[str]) -> None:
        """Raise `StateError` for a pattern that matches no parameter, and let each transport check its own."""
        tree.match(self.ways, names, what="shard_optimizer: gradients")
        for pattern, way in self.ways.items():
            way.check([name for name in names if self._pattern(name) == pattern])

    def grouping(self, name: str, shape: tuple[int, ...]) -> tuple[Hashable, int]:
        """Return the pattern of a name beside what its transport says."""
        kind, unit = self._way(name).grouping(name, shape)
        return (self._pattern(name), kind), unit

    def of(self, bucket: Bucket, data: Axis) -> Transport:
        """Return the transport of a bucket, whose parameters have one pattern."""
        return self._way(bucket.leaves[0].name).of(bucket, data)

    def _pattern(self, name: str) -> str | None:
        return next((pattern for pattern in self.ways if fnmatch.fnmatchcase(name, pattern)), None)

    def _way(self, name: str) -> Transport:
        return self.ways.get(self._pattern(name) or "", LOSSLESS)

    def __repr__(self) -> str:
        return ", ".join(f"{pattern!r}: {way}" for pattern, way in self.ways.items())
