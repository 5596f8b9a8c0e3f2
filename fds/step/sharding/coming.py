"""Buckets on their way to a rank: its slice is read, where that lives elsewhere, and sent to the others."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

import attrs
from torch import Tensor

from fds import tree
from fds.collectives import Work
from fds.step.sharding.transport import Relay


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

    def add(self, one: Coming) -> None:
        """Add a bucket that was just begun."""
        self.waiting.append(one)
        self.send(keep=int(one.read is not None))

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

    def arrive(self, one: Coming) -> Tensor:
        """Wait for a bucket; return it whole (numel,)."""
        if one in self.waiting:
            self.send(keep=len(self.waiting) - 1 - self.waiting.index(one))
        return one.arrive()

    def give_up(self) -> None:
        """Wait until nobody writes into the memory of what was not sent."""
        while self.waiting:
            self.waiting.popleft().give_up()
