"""How one flat bucket travels between ranks: the legs of the stations `gather` and `reduce`."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal

import attrs
import torch
from torch import Tensor

from fds import random, tree
from fds.collectives import Axis, Work
from fds.collectives.traffic import Expected
from fds.layout import Bucket

Leg = Literal["reduce", "spread", "combine", "gather"]


class Transport:
    """How one flat bucket travels between the ranks of an axis. This one loses nothing, and others override its legs.

    A leg begins to send, and returns a `Work` whose `wait` returns when the result has arrived: a collective's, or a
    `Pending`; where a second message is made of what the first one brought, a `Relay`. All ranks pass the same legs in
    the same order, and wait for them at times of their own. Tensors are 1-D and
    contiguous; a bucket `whole` is (size * n,) and a rank's slice of it (n,), `whole[index * n : (index + 1) * n]`,
    padding included. A leg may write over `whole` and allocate memory. It does not wait for the device, and
    draws no random numbers but those that follow from a key (`draws`).

    Attributes:
        keeps: whether the legs of gradients keep the errors of their messages (error feedback): they are then given
            `kept`, what this rank kept of the bucket before, and write the new error there: what was sent plus `kept`
            is what was given, the float32 sum of the numbers and the old `kept`. It lies in the state, in the slot
            `kept`, by parameter, in units of the mean gradient.
        bound: the largest error of an element of a message, relative to the largest absolute value in the bucket that
            it was made of; 0 where nothing is lost.
        draws: whether gradients are sent with random numbers: then every call sends by what `seeded` returns for it.
    """

    keeps: bool = False
    bound: float = 0.0
    draws: bool = False

    def seeded(self, key: Tensor) -> Transport:
        """Return the transport that draws from a key, (2,) int64, that of a call, alike on all ranks.

        What ranks send alike they must round alike: let draws follow from what is sent.
        """
        return self

    def on(self, axis: Axis) -> Transport:
        """Return the transport among the ranks of an axis, that of `shard_optimizer`, which calls this once.

        Raises `ComposeError` for an axis along which it cannot send.
        """
        return self

    def check(self, names: Sequence[str]) -> None:
        """Raise `StateError` for what cannot be sent of the gradients of parameters with these names."""

    def grouping(self, name: str, shape: tuple[int, ...]) -> tuple[Hashable, int]:
        """Return the kind of a parameter's gradient, and of how many numbers slices of its bucket hold a multiple.

        Gradients of different kinds travel in different buckets.
        """
        return None, 1

    def of(self, bucket: Bucket, data: Axis) -> Transport:
        """Return the transport of the gradients of one bucket, which are summed over all ranks of `data`."""
        return self

    def reduce(self, axis: Axis, whole: Tensor, out: Tensor, kept: Tensor | None) -> Work:
        """Sum this rank's slice of every rank's `whole` into `out` (n,) of its dtype, which may be that slice.

        `kept` (size * n,) float32 is written over before this returns; it is None where nothing is kept.
        """
        return axis.start_reduce_scatter(out, whole)

    def combine(self, axis: Axis, own: Tensor, kept: Tensor | None) -> Work:
        """Sum `own` (n,), a slice of sums, over its replicas, in place: all get the same bits.

        What is lost is added to `kept` (n,) float32, what `reduce` kept of this slice, before `wait` returns.
        """
        return axis.start_all_reduce(own)

    def spread(self, axis: Axis, own: Tensor, whole: Tensor, kept: Tensor | None) -> Work:
        """Send the sums `own` (n,), which may be this rank's slice of `whole`, to all: at stage 0.

        All ranks get the same bits, the one that sends a slice too. What is lost is added to `kept` (n,) float32, what
        the legs before kept of this slice, before `wait` returns; of replicas, which send the same, the first has one.
        """
        return axis.start_all_gather(whole, own)

    def gather(self, axis: Axis, part: Tensor, whole: Tensor) -> Work:
        """Send parameters `part` (n,), in the dtype of the masters, to all, which get them in the dtype of `whole`.

        All ranks get the same bits, the one that holds a slice too.
        """
        start = axis.index * len(part)
        mine = whole[start : start + len(part)]
        mine.copy_(part)
        return axis.start_all_gather(whole, mine)

    def bytes_sent(self, leg: Leg, numel: int, dtype: torch.dtype, size: int) -> float:
        """Return the bytes that a rank sends in a leg over `size` ranks.

        `numel` and `dtype` are those of `whole`, in `combine` of `own`.
        """
        return numel * dtype.itemsize * (size - 1) / size * (2 if leg == "combine" else 1)

    def messages(self, leg: Leg, axis: Axis, numel: int, dtype: torch.dtype) -> list[Expected]:
        """Return the messages of a leg of a slice (numel,), for `describe`; of a leg that is overridden, none.

        `dtype` is that of `whole`, in `combine` of `own`. A transport that overrides a leg may override this.
        """
        if getattr(type(self), leg) is not getattr(Transport, leg):
            return []
        op = {"reduce": "reduce_scatter", "combine": "all_reduce", "spread": "all_gather", "gather": "all_gather"}
        return [Expected.of(axis, op[leg], numel, dtype)]

    def __repr__(self) -> str:
        return "lossless" if type(self) is Transport else type(self).__name__


LOSSLESS = Transport()


@attrs.frozen(eq=False)
class Pending:
    """A collective that was started, and what is to be done when it has arrived."""

    work: Work
    then: Callable[[], object]

    def wait(self) -> None:
        """Wait for the collective, then do the rest."""
        self.work.wait()
        self.then()

    def done(self) -> bool:
        """Return False: there is something left to do."""
        return False


@attrs.define(eq=False)
class Relay:
    """Messages of which the second is made of what the first one brought.

    Ranks wait at times of their own, so that the second begins in `go_on`: before anything else is sent, on all ranks.
    """

    first: Work | None
    then: Callable[[], Work] | None  # begins the second
    second: Work | None = None

    def go_on(self) -> None:
        """Wait for the first message and begin the second, once."""
        if self.first is not None and self.then is not None:
            self.first.wait()
            self.second = self.then()
            self.first = self.then = None

    def wait(self) -> None:
        """Wait for both."""
        self.go_on()
        if self.second is not None:
            self.second.wait()
            self.second = None

    def done(self) -> bool:
        """Return False: there may be something left to send."""
        return False


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
