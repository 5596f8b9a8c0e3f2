"""The station `gather`: what is held to what the loss sees, when and in what dtype; and buckets on their way."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives import Axis, Work
from fds.errors import StateError
from fds.layout import Bucket, Layout
from fds.step.checks import contracts
from fds.step.pool import Pool
from fds.step.residency.lives import Masters
from fds.step.sharding.shard import Shard
from fds.step.sharding.transport import LOSSLESS, Relay, Transport
from fds.step.structure import Casts

Memory = Callable[[Tensor], Tensor]  # a rank's slice of a bucket, as it was read -> memory for the whole bucket


@attrs.frozen
class Gather(Casts):
    """Held parameters to whole ones, in what dtype (None keeps the master's), by which transport."""

    transport: Transport = LOSSLESS
    low: bool = attrs.field(  # whether the loss is computed in 16 bits
        default=attrs.Factory(lambda self: self.dtype in (torch.float16, torch.bfloat16), takes_self=True),
        init=False,
        repr=False,
        eq=False,
    )

    def all_at_once(self, layout: Layout, masters: Masters, axis: Axis, pool: Pool) -> list[Tensor]:
        """Gather every bucket; the parameters are views of them, which the pool keeps."""
        buckets = enumerate(layout.buckets)
        dtypes = [self.dtype_of_bucket(b, x.dtype) for b, x in zip(layout.buckets, masters.parts, strict=True)]
        taken = [pool.take_bucket(b, dtypes[i], masters.device_of(i))[:2] for i, b in buckets]
        self.some(range(len(taken)), layout, masters, axis, lambda i: lambda part: taken[i][0])
        return layout.collect([views for _, views in taken])

    def some(
        self, indices: Iterable[int], layout: Layout, masters: Masters, axis: Axis, memory: Callable[[int], Memory]
    ) -> dict[int, Tensor]:
        """Gather some buckets; return them by index, whole (numel,)."""
        coming, departures = dict[int, Coming](), Departures()
        try:
            for i in indices:
                coming[i] = self.start(layout.buckets[i], i, masters, axis, memory(i))
                departures.add(coming[i])
            return {i: departures.arrive(arriving) for i, arriving in coming.items()}
        finally:
            departures.give_up()

    def in_turn(self, layout: Layout, masters: Masters, axis: Axis, pool: Pool) -> Iterator[Tensor]:
        """Yield the whole buckets (numel,) one after another, while the next one is on its way."""
        coming, departures = deque[Coming](), Departures()
        try:
            for i, bucket in enumerate(layout.buckets):
                coming.append(self.start(bucket, i, masters, axis, self.memory(bucket, masters.device_of(i), pool)))
                departures.add(coming[-1])
                if i:
                    yield departures.arrive(coming.popleft())
            while coming:
                yield departures.arrive(coming.popleft())
        finally:
            departures.give_up()

    def start(self, bucket: Bucket, i: int, masters: Masters, axis: Axis, memory: Memory) -> Coming:
        """Begin to gather bucket `i` of a layout from the slices of all ranks."""

        def begin(part: Tensor) -> tuple[Tensor, Work]:
            flat = memory(part)
            return flat, contracts.sent(self.transport.gather(axis, part, flat), self.transport, "gather")

        if i in masters.elsewhere:
            return Coming(None, masters.read([i]), begin)
        return Coming(masters.parts[i], None, begin)

    def memory(self, bucket: Bucket, device: torch.device, pool: Pool) -> Memory:
        """Return what makes memory (numel,) for a whole bucket."""
        return lambda part: pool.take(bucket.numel, self.dtype_of_bucket(bucket, part.dtype), device)

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

    def room(self, layout: Layout, shard: Shard, passing: dict[int, int]) -> int:
        """Return the bytes of used buckets that stage 3 may keep whole beside those that are on their way.

        `passing` are those that it does not keep for the length of a step. Raises `StateError` where the bound has no
        room for a single bucket.
        """
        bound = shard.max_live_bytes
        largest = max(passing.values(), default=0)
        coming = shard.prefetch * largest
        if bound is None:
            return 2 * largest
        if bound < largest + coming:
            bucket = layout.buckets[max(passing, key=passing.__getitem__)]
            raise StateError(
                "shard_optimizer: max_live_bytes has no room for the largest bucket",
                where=bucket.leaves[0].name + (f" and {len(bucket.leaves) - 1} more" if bucket.leaves[1:] else ""),
                got=f"{bound:,} bytes",
                want=f"at least {largest + coming:,} bytes: one bucket of {largest:,}, and {shard.prefetch} on the way",
                hint="prefetch=0, or more room" if len(bucket.leaves) == 1 else "smaller bucket_bytes, or prefetch=0",
            )
        return bound - coming

    def dtype_of_bucket(self, bucket: Bucket, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the loss sees a bucket that is held in `dtype`: that of averages may be another."""
        return self.dtype_of(bucket.leaves[0].name, dtype)


@attrs.define(eq=False)
class Coming:
    """A bucket that this rank began to gather."""

    part: Tensor | None  # this rank's slice (n,), None until it was read
    read: Callable[[], list[Tensor]] | None  # waits for that, where it lives elsewhere
    begin: Callable[[Tensor], tuple[Tensor, Work]]  # begins to send it; returns the whole bucket and the work
    sent: tuple[Tensor, Work] | None = None

    def send(self) -> Work:
        """Begin to send the slice, once it was read."""
        if self.sent is None:
            (part,) = [self.part] if self.read is None else self.read()
            assert part is not None
            self.sent, self.part, self.read = self.begin(part), None, None
        return self.sent[1]

    def arrive(self) -> Tensor:
        """Wait for the slices of all ranks; return the whole bucket (numel,)."""
        if self.sent is None:
            self.send()
        assert self.sent is not None
        flat, work = self.sent
        work.wait()
        return flat

    def give_up(self) -> None:
        """Wait until nobody writes into its memory any more, whatever comes of it: somebody may handle an error."""
        with contextlib.suppress(Exception):
            if self.sent is not None:
                self.sent[1].wait()
            elif self.read is not None:
                self.read()


@attrs.frozen(eq=False)
class Departures:
    """Buckets in the order in which their slices are sent, which is the order in which they were begun.

    A slice that is read is sent when the next one has begun to be read, or earlier if somebody waits for it or for what
    comes after it. So reading one and sending another go on at once, and no more than two slices are in memory.
    """

    waiting: deque[Coming] = tree.new(deque)
    relays: deque[Relay] = tree.new(deque)  # whose second messages are to begin before anything else is sent

    def add(self, bucket: Coming) -> None:
        """Add a bucket that was just begun."""
        self.waiting.append(bucket)
        self.send(keep=int(bucket.read is not None))

    def send(self, keep: int = 0) -> None:
        """Begin to send the slices that wait, but for the last ones."""
        while len(self.waiting) > keep:
            if self.relays:
                self.go_on()
            work = self.waiting[0].send()
            if work.__class__ is Relay:
                self.relays.append(work)  # pyright: ignore[reportArgumentType]
            self.waiting.popleft()

    def go_on(self) -> None:
        """Begin the second messages of what was sent, before anything else is."""
        while self.relays:
            self.relays.popleft().go_on()

    def arrive(self, bucket: Coming) -> Tensor:
        """Wait for a bucket; return it whole (numel,)."""
        if bucket in self.waiting:
            self.send(keep=len(self.waiting) - 1 - self.waiting.index(bucket))
        return bucket.arrive()

    def give_up(self) -> None:
        """Wait until nobody writes into the memory of what was not sent."""
        while self.waiting:
            self.waiting.popleft().give_up()
