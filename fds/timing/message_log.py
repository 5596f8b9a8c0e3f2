"""Each message of a call as this rank saw it: noted where it starts, is waited for, and has arrived."""

from __future__ import annotations

import sys
import time
from typing import Any

import attrs
import torch

from fds.collectives import Axis
from fds.collectives.links import Collective, Work
from fds.collectives.reductions import bytes_sent
from fds.collectives.traffic import MessageKind, Traffic
from fds.step.ranges import Clock
from fds.timing._timed import milliseconds


@attrs.frozen
class Message:
    """One message, as this rank saw it.

    Attributes:
        kind: what it was for, the operation, the axis and the size.
        group: the ranks of the axis.
        bytes_sent: by this rank.
        caller: the line that asked for it, with `debug`.
        latency_ms: from start to arrival; None where it was captured, or not waited for.
        waited_ms: that this rank stood waiting for it.
    """

    kind: MessageKind
    group: tuple[int, ...]
    bytes_sent: int
    caller: str
    latency_ms: float | None
    waited_ms: float | None

    def __str__(self) -> str:
        kind, size = self.kind, f"{self.kind.num_bytes:,} bytes" if self.kind.num_bytes else "texts"
        times = "no times" if self.waited_ms is None else f"{self.latency_ms:.3f} ms, {self.waited_ms:.3f} waited"
        text = f"{kind.what or 'other'}: {kind.op} of {size} on {kind.axis} ({kind.ranks} ranks): {times}"
        return text + (f", asked for by {self.caller}" if self.caller else "")


@attrs.define(eq=False)
class Running:
    """A message that was started, and the moments of it so far: seconds, or events of a GPU."""

    collective: Collective
    axis: Axis
    caller: str
    started: Any
    waited: Any = None
    ended: Any = None

    def has_come(self) -> bool:
        """Return whether the times can be read without waiting for a GPU."""
        return not isinstance(self.ended, torch.cuda.Event) or self.ended.query()

    def message(self) -> Message:
        """Return what came of it."""
        collective, axis = self.collective, self.axis
        known = self.started is not None and self.ended is not None
        return Message(
            MessageKind.of(collective, axis.size),
            axis.ranks,
            bytes_sent(collective, axis.size, axis.index),
            self.caller,
            milliseconds(self.started, self.ended) if known else None,
            milliseconds(self.waited, self.ended) if known else None,
        )


class Log(Traffic):
    """Note when each message of a call starts, is waited for, and has arrived."""

    def __init__(self, device: torch.device, ops: frozenset[str], *, debug: bool):
        super().__init__()
        self.clock, self.ops, self.debug = Clock(device), ops, debug
        self.messages: list[Running] = []
        self._about: dict[int, Running] = {}  # by the collective, between `add` and `watched`

    def add(self, collective: Collective, axis: Axis) -> None:
        """Note that a collective is about to start."""
        if collective.op in self.ops:
            caller = _caller() if self.debug else ""
            self._about[id(collective)] = Running(collective, axis, caller, self.now(collective))

    def watched(self, collective: Collective, work: Work) -> Work:
        """Return work whose `wait` is noted."""
        running = self._about.pop(id(collective), None)
        if running is None:
            return work
        self.messages.append(running)
        return Noted(work, running, self)

    def now(self, collective: Collective) -> Any:
        """Return this moment, on the device that waits for the collective."""
        return self.clock.now() if collective.on_gpu else time.perf_counter()


@attrs.frozen(eq=False)
class Noted:
    """A collective whose `wait` is noted."""

    work: Work
    running: Running
    log: Log

    def wait(self) -> None:
        """Wait for the result; the first wait counts."""
        running = self.running
        begun = self.log.now(running.collective)
        self.work.wait()
        if running.waited is None:
            running.waited, running.ended = begun, self.log.now(running.collective)

    def done(self) -> bool:
        """Return whether `wait` is known to return at once."""
        return self.work.done()


def _caller() -> str:
    """Return the line outside of collectives and transports that asked for a message, `module:line function`."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_CARRIERS):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_globals.get('__name__', '')}:{frame.f_lineno} {frame.f_code.co_name}"


_CARRIERS = ("fds.collectives", "fds.timing", "fds.step.sharding.transport", "torch.")
