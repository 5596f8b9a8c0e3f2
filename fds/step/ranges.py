"""Named ranges: where the parts of a step begin and end, for torch.profiler and for a `Clock`."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Generator
from typing import ParamSpec, Protocol, TypeVar

import attrs
import torch

from fds import tree

P = ParamSpec("P")
R = TypeVar("R")

_NOTHING = contextlib.nullcontext()
# private: torch has no public function that says whether a profiler runs
_is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportAttributeAccessIssue]


@attrs.define(eq=False)
class Clock:
    """When ranges begin and end, in the order in which that happens; a GPU says so by events, and is not waited for.

    Attributes:
        device: where the step runs.
        marks: the name of a range that begins, or "" where the innermost ends, and when: seconds, or an event of a GPU.
    """

    device: torch.device
    marks: list[tuple[str, float | torch.cuda.Event]] = tree.new(list)

    def mark(self, name: str) -> None:
        """Note that a range begins, or for "" that one ends. What is captured to be replayed later is not timed."""
        if (now := self.now()) is not None:
            self.marks.append((name, now))

    def now(self) -> float | torch.cuda.Event | None:
        """Return seconds, or an event where the stream of a GPU is; None while work is captured."""
        if self.device.type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextlib.contextmanager
    def range(self, name: str) -> Generator[None]:
        """Note when the block begins and ends."""
        self.mark(name)
        try:
            yield
        finally:
            self.mark("")


class Ranged(Protocol):
    """What is told of ranges: a `Clock`, or several."""

    def range(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Note that a range begins with the block, and ends with it."""
        ...


@attrs.frozen(eq=False)
class Several:
    """Clocks of which each is told."""

    clocks: tuple[Ranged, Ranged]

    @contextlib.contextmanager
    def range(self, name: str) -> Generator[None]:
        """Tell each."""
        outer, inner = self.clocks
        with outer.range(name), inner.range(name):
            yield


class _Now(threading.local):
    clock: Ranged | None = None  # None where nothing is timed


_now = _Now()


@contextlib.contextmanager
def clocked(clock: Ranged) -> Generator[None]:
    """Have the ranges inside be noted, backward's too, which runs in this thread for it on a GPU as on a CPU.

    Clocks that were there go on.
    """
    before = _now.clock
    _now.clock = clock if before is None else Several((before, clock))
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        _now.clock = before


def profiled(
    part: str, *, stage: int | None = None, microbatch: int | None = None
) -> contextlib.AbstractContextManager[object]:
    """Return a range of the profiler named `fds::part`, in a pipeline `fds::part/stage1/microbatch0`.

    Parts are gather, forward, backward (in a pipeline the weights' half is backward_weight), reduce, optimizer and
    offload (waiting for what lives elsewhere).
    Where no profiler and no clock runs it does nothing, in 0.2 us.
    """
    clock, records = _now.clock, _is_profiled()
    if clock is None and not records:
        return _NOTHING
    name = part if stage is None else f"{part}/stage{stage}/microbatch{microbatch}"
    if clock is None:
        return torch.profiler.record_function(f"fds::{name}")
    return _both(clock, name) if records else clock.range(name)


@contextlib.contextmanager
def _both(clock: Ranged, name: str) -> Generator[None]:
    with clock.range(name), torch.profiler.record_function(f"fds::{name}"):
        yield


def in_range(part: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function run in the range of a part."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if _now.clock is None and not _is_profiled():
                return function(*args, **kwargs)
            with profiled(part):
                return function(*args, **kwargs)

        return run

    return wrap
