"""`memory_breakdown`: how much memory is in use in the parts of a call of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from fds.collectives.traffic import counting
from fds.step.ranges import Clock, clocked
from fds.timing.clocks import OTHER, PARTS, InTurn, Waits, check_every, intervals

_PROCESS = Path("/proc/self/statm")
_PAGE = 4096


@attrs.frozen
class PartMemory:
    """Bytes in one part of a call.

    Attributes:
        allocated: in use when it ended last.
        reserved: what the allocator had then, in use or not.
        peak: the most in use inside of it.
    """

    allocated: int
    reserved: int
    peak: int


@attrs.frozen
class MemoryParts:
    """Memory of a call in its parts; `str()` of it is a table.

    Attributes:
        parts: name of a part, as those of `fds.timed` -> its memory, without that of the parts inside it; those alone
            that the call had.
    """

    parts: Mapping[str, PartMemory]

    def __str__(self) -> str:
        rows = [f"{'memory (MB)':<12} {'allocated':>12} {'reserved':>12} {'peak':>12}"]
        rows += [
            f"{name:<12} {x.allocated / 1e6:>12,.1f} {x.reserved / 1e6:>12,.1f} {x.peak / 1e6:>12,.1f}"
            for name, x in self.parts.items()
        ]
        return "\n".join(rows)


class Gauge(Clock):
    """A clock that says what memory is in use, and not when."""

    def now(self) -> PartMemory:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return what is in use now; the peak begins anew. Nothing is waited for."""
        if self.device.type == "cuda":
            allocated, reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return PartMemory(allocated, reserved, peak)
        resident = int(_PROCESS.read_text().split()[1]) * _PAGE if _PROCESS.exists() else 0
        return PartMemory(resident, resident, resident)

    def parts(self) -> MemoryParts:
        """Return the memory of the parts of a call that has ended."""
        parts: dict[str, PartMemory] = {}
        marks: Any = self.marks
        for part, before, after in intervals(marks):
            most = max(before.allocated, after.peak, parts[part].peak if part in parts else 0)
            parts[part] = PartMemory(after.allocated, after.reserved, most)
        return MemoryParts({part: parts[part] for part in PARTS if part in parts})


class MemoryBreakdown(InTurn):
    """What `fds.memory_breakdown` returns: call it around each call of the step, and read `last` or `metrics()`."""

    _usage = "memory_breakdown", "with memory(state):"

    def __init__(self, every: int | None):
        self.every = every
        self.last: MemoryParts | None = None

    @contextlib.contextmanager
    def _watch(self, device: torch.device, number: int) -> Iterator[None]:
        gauge = Gauge(device)
        gauge.now()  # the peak is that of this call
        with counting(Waits()), clocked(gauge), gauge.range(OTHER):
            yield
        self.last = gauge.parts()

    def metrics(self) -> dict[str, float]:
        """Return `memory_bytes_PART_allocated`, `..._reserved` and `..._peak` of the last call; empty before the first.

        Until the next call is measured they are returned again.
        """
        parts = {} if self.last is None else self.last.parts
        return {
            f"memory_bytes_{name}_{what}": float(n) for name, x in parts.items() for what, n in attrs.asdict(x).items()
        }


def memory_breakdown(*, every: int | None = 1) -> MemoryBreakdown:
    """Return a gauge of the memory in use in the parts of a step, which changes no bit of it and waits for no GPU.

        memory = fds.memory_breakdown(every=10)
        for batch in loader:
            with memory(state):
                state, metrics = step(state, batch)
            monitor(state, {**metrics, **memory.metrics()})

    `print(memory.last)` is a table of parts, as those of `fds.timed`. On a GPU the numbers are those of the allocator
    on this rank, whose peak statistics are reset; on a CPU, where Linux tells them, the resident bytes of the process
    when a part begins and ends, so that what comes and goes in between is not seen. `fds.profile_memory` sees that.

    Args:
        every: calls from one that is measured to the next; None measures none.

    Raises `FdsError` for another number of calls.
    """
    check_every(every, "memory_breakdown")
    return MemoryBreakdown(every)
