"""How long work takes on a GPU: events, cold caches, turns; and what a copy takes in the same minutes."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from benchmarks.harness import Series
from benchmarks.kernel_works import Way, Work, disagreement

COPY, AGAIN = "copy", " again"  # the first way runs a second time, as the A/A
COPIED_BYTES = 2 * 2**30  # of one copy: read and written
AT_LEAST_S, MOST_CALLS = 1e-3, 20  # of one timing
SETS_BYTES = 4  # times the second-level cache: inputs in turn, so that none is found there
CLOCK_HZ = 2e9  # of an H200, about: how long a wait is need not be exact


@attrs.frozen
class Timed:
    """What one piece of work took, round by round; contenders that do not run say why."""

    work: Work
    seconds: dict[str, tuple[float, ...]]
    peak_bytes: dict[str, int]
    failed: dict[str, str]
    host_us: dict[str, float]  # of one call, until it is launched

    def beside(self, name: str) -> Series:
        """Return the first way beside another; beside the copy, the time that a copy of as many bytes takes."""
        mine, other = self.seconds[self.work.ways[0].name], self.seconds[name]
        if name == COPY:
            other = tuple(s * self.work.moved_bytes / COPIED_BYTES for s in other)
        return Series(mine, other)


class Clock:
    """Times calls on one GPU, beside a large copy."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.source = torch.empty(COPIED_BYTES // 2, dtype=torch.uint8, device=device)
        self.target = torch.empty_like(self.source)

    def copy(self) -> Tensor:
        """Copy, from memory to memory."""
        return self.target.copy_(self.source)

    def seconds(self, call: Callable, calls: int, wait_s: float = 0.0) -> float:
        """Return the seconds of one call on the device; with a wait, launches do not count."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        if wait_s:
            torch.cuda._sleep(int(wait_s * CLOCK_HZ))  # launches queue up behind it
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls

    def host_seconds(self, call: Callable, calls: int) -> float:
        """Return the seconds that the host takes for one call, while the device is busy."""
        torch.cuda.synchronize(self.device)
        torch.cuda._sleep(int(0.02 * CLOCK_HZ))
        start = time.perf_counter()
        for _ in range(calls):
            call()
        took = (time.perf_counter() - start) / calls
        torch.cuda.synchronize(self.device)
        return took

    def time(self, work: Work, *, rounds: int) -> Timed:
        """Check every way of some work, then time them and a copy in turns."""
        failed: dict[str, str] = {}
        ready: dict[str, Callable] = {}
        inputs = [work.inputs(torch.Generator(self.device).manual_seed(i)) for i in range(self._sets(work))]
        for way in work.ways:
            try:
                failed[way.name] = disagreement(work, way, self.device, seed=1000)
                if not failed[way.name]:
                    ready[way.name] = self._in_turn(work, way, inputs)
            except Exception as error:  # a peer that does not run here must not end the rest
                failed[way.name] = f"{type(error).__name__}: {error}".split("\n")[0][:160]
            torch.cuda.empty_cache()
        first = work.ways[0]
        if first.name in ready:
            ready[first.name + AGAIN] = self._in_turn(work, first, inputs)
        peaks = {name: self._peak(call) for name, call in ready.items()}
        host = {name: self.host_seconds(call, 3) for name, call in ready.items()}
        calls = {name: self._calls(call) for name, call in ready.items()}
        ready[COPY], calls[COPY], host[COPY] = self.copy, 1, 0.0
        waits = {name: min(0.02, 2 * host[name] * calls[name] + 1e-4) * work.hide_launches for name in ready}
        seconds: dict[str, list[float]] = {name: [] for name in ready}
        for turn in range(rounds):
            for name in list(ready)[:: -1 if turn % 2 else 1]:
                seconds[name].append(self.seconds(ready[name], calls[name], waits[name]))
        host_us = {name: 1e6 * s for name, s in host.items()}
        return Timed(
            work,
            {name: tuple(s) for name, s in seconds.items()},
            peaks,
            {name: text for name, text in failed.items() if text},
            host_us,
        )

    def _sets(self, work: Work) -> int:
        if not work.moved_bytes:
            return 1  # arithmetic takes the time
        return max(1, min(32, math.ceil(SETS_BYTES * self.cache_bytes / work.moved_bytes)))

    def _in_turn(self, work: Work, way: Way, inputs: list[dict[str, Tensor]]) -> Callable:
        p = work.dropout if work.dropout else None
        prepared = itertools.cycle([work.prepare(way, one, p=p) for one in inputs])
        call = lambda: next(prepared)()
        for _ in range(2 * len(inputs) + 3):
            call()  # compiles, and warms up
        return call

    def _calls(self, call: Callable) -> int:
        took = min(self.seconds(call, 1) for _ in range(3))
        return max(1, min(MOST_CALLS, math.ceil(AT_LEAST_S / max(took, 1e-7))))

    def _peak(self, call: Callable) -> int:
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before
