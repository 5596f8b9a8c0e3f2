"""How long work takes on a GPU: events, cold caches, turns; and what a copy takes in the same minutes.

On a CPU the same code runs at tiny sizes by its own clock, which proves that it runs and says nothing else.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from benchmarks import memory
from benchmarks.harness import Series
from benchmarks.kernel_works import Goals, Outputs, Way, Work, disagreement, expected

COPY, AGAIN = "copy", " again"  # the first way runs a second time, as the A/A
COPIED_BYTES = 2 * 2**30  # of one copy: read and written
AT_LEAST_S, MOST_CALLS = 1e-3, 20  # of one timing
SETS_BYTES = 4  # times the second-level cache: inputs in turn, so that none is found there
CLOCK_HZ = 2e9  # of an H200, about: how long a wait is need not be exact
CHECK_SEED = 1000


@attrs.frozen
class Timed:
    """What one piece of work took, round by round; contenders that do not run say why. Plain data, for JSON."""

    name: str
    size: str
    first: str  # the way that goals are claimed of
    seconds: dict[str, tuple[float, ...]]
    peak_bytes: dict[str, int]
    failed: dict[str, str]
    host_us: dict[str, float]  # of one call, until it is launched
    moved_bytes: int = 0
    flops: int = 0
    goals: Goals = Goals()
    copied_bytes: int = COPIED_BYTES

    def beside(self, name: str) -> Series:
        """Return the first way beside another; beside the copy, the time that a copy of as many bytes takes."""
        mine, other = self.seconds[self.first], self.seconds[name]
        if name == COPY:
            other = tuple(s * self.moved_bytes / self.copied_bytes for s in other)
        return Series(tuple(mine), tuple(other))

    def figures(self) -> dict[str, Any]:
        """Return all of it as JSON takes it, times to four digits."""
        rounded = {name: [float(f"{s:.4g}") for s in times] for name, times in self.seconds.items()}
        return {**attrs.asdict(self), "seconds": rounded}

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> Timed:
        """Return what was written as `figures`."""
        return cls(**{**figures, "goals": Goals(**figures["goals"])})


class Clock:
    """Times calls on one device, beside a large copy."""

    def __init__(self, device: torch.device, copied_bytes: int = COPIED_BYTES):
        self.device, self.copied_bytes = device, copied_bytes
        self.on_gpu = device.type == "cuda"
        self.cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size if self.on_gpu else 1024
        self.source = torch.empty(copied_bytes // 2, dtype=torch.uint8, device=device)
        self.target = torch.empty_like(self.source)

    def copy(self) -> Tensor:
        """Copy, from memory to memory."""
        return self.target.copy_(self.source)

    def wait(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give back to the device what nobody holds. Ends the process where the device no longer answers."""
        if not self.on_gpu:
            return
        try:
            self.wait()
            torch.cuda.empty_cache()
        except RuntimeError as error:  # after a fault of a kernel every call fails: only a new process helps
            print(f"the GPU no longer answers this process: {error}", flush=True)
            os._exit(70)

    def seconds(self, call: Callable, calls: int, wait_s: float = 0.0) -> float:
        """Return the seconds of one call on the device; with a wait, launches do not count."""
        if not self.on_gpu:
            began = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - began) / calls
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.wait()
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
        self.wait()
        if self.on_gpu:
            torch.cuda._sleep(int(0.02 * CLOCK_HZ))
        start = time.perf_counter()
        for _ in range(calls):
            call()
        took = (time.perf_counter() - start) / calls
        self.wait()
        return took

    def check(self, work: Work, *, skip: Mapping[str, str], tell: Callable[[str], None]) -> dict[str, str]:
        """Return for every way of some work what is wrong with it, "" where nothing is; `skip` is not called at all."""
        found: dict[str, str] = {}
        oracle: Outputs | None = None
        for way in work.ways:
            if way.name in skip:
                found[way.name] = skip[way.name]
                continue
            tell(way.name)
            try:
                oracle = expected(work, self.device, seed=CHECK_SEED) if oracle is None else oracle
                found[way.name] = disagreement(work, way, self.device, seed=CHECK_SEED, oracle=oracle)
            except Exception as error:  # a peer that does not run here must not end the rest
                found[way.name] = f"{type(error).__name__}: {error}".split("\n")[0][:160]
            self.release()
        return found

    def time(self, work: Work, *, rounds: int, failed: Mapping[str, str]) -> Timed:
        """Time the ways that do not fail, and a copy, in turns."""
        inputs = [work.inputs(torch.Generator(self.device).manual_seed(i)) for i in range(self._sets(work))]
        failed = {name: text for name, text in failed.items() if text}
        ready: dict[str, Callable] = {}
        for way in work.ways:
            if way.name not in failed:
                try:
                    ready[way.name] = self._in_turn(work, way, inputs)
                except Exception as error:  # out of memory, perhaps, with so many inputs
                    failed[way.name] = f"{type(error).__name__}: {error}".split("\n")[0][:160]
                    self.release()
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
        return Timed(
            work.name,
            work.size,
            first.name,
            {name: tuple(s) for name, s in seconds.items()},
            peaks,
            failed,
            {name: round(1e6 * s, 1) for name, s in host.items()},
            work.moved_bytes,
            work.flops,
            work.goals,
            self.copied_bytes,
        )

    def _sets(self, work: Work) -> int:
        """Return how many inputs to take in turn: products of matrices, too, would be fast of inputs in the cache."""
        one = work.moved_bytes or sum(x.nbytes for x in work.inputs(torch.Generator(self.device)).values())
        return max(1, min(32, math.ceil(SETS_BYTES * self.cache_bytes / one)))

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
        """Return the bytes that a call holds beyond what was there, at the most."""
        if not self.on_gpu:
            return memory.measure(lambda: call, calls=1, device=self.device).peak_bytes
        self.wait()  # without the collections of `memory.measure`, which take 0.5 s in a process as large as this
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        self.wait()
        return torch.cuda.max_memory_allocated(self.device) - before
