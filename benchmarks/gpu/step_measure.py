"""What a training step takes: alone in a process its losses, memory and launches; beside another its time and host.

Nothing here knows who trains: a `make` returns a call that makes one step and returns its loss.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import memory
from benchmarks.harness import Call, Series, seconds, wait

STEPS = 6  # whose losses are compared
WARM_UP = 4  # more steps, after which nothing is compiled or captured any more
TIMING_S = 0.1  # of one timing, at least
LAUNCHES = {
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaGraphLaunch",
    "cuGraphLaunch",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuMemsetD32Async",
}


def alone(make: Callable[[], Call], device: torch.device) -> dict[str, Any]:
    """Return the first losses, the peak of memory and what is launched; for a process in which nothing else is."""
    on_gpu = device.type == "cuda"
    began = time.monotonic()
    call = make()
    losses = [float(call()) for _ in range(STEPS)]
    started_s = time.monotonic() - began
    for _ in range(WARM_UP):
        call()
    figures: dict[str, Any] = {"losses": losses, "first steps, s": round(started_s, 1)}
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(3):
            call()
        torch.cuda.synchronize(device)
        figures["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        figures["reserved_bytes"] = torch.cuda.memory_reserved(device)
        figures["held_bytes"] = torch.cuda.memory_allocated(device)
    else:
        del call
        weighed = memory.measure(make, calls=2, device=device)
        figures |= {"peak_bytes": weighed.peak_bytes, "held_bytes": weighed.held_bytes}
        call = make()
        call()
    return figures | launches(call, device)


def launches(call: Call, device: torch.device) -> dict[str, int]:
    """Return how many kernels a step runs, how many launches the host makes for them, and how many operators it calls.

    A graph of a thousand kernels is one launch.
    """
    on_gpu = device.type == "cuda"
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints a line at every start and stop
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as record:
        call()
        wait(device)
    events = [e for e in record.events() or [] if not e.is_user_annotation]  # the optimizer's, inductor's
    on_device = [e.name for e in events if e.device_type == DeviceType.CUDA]
    of_host = [e.name for e in events if e.device_type == DeviceType.CPU]
    return {
        "kernels": sum(not name.startswith(("Memcpy", "Memset")) for name in on_device),
        "copies": sum(name.startswith(("Memcpy", "Memset")) for name in on_device),
        "launches": sum(name in LAUNCHES for name in of_host),
        "operators": sum(name.startswith("aten::") for name in of_host),
    }


def host_us(call: Call, device: torch.device, *, count: int = 11) -> tuple[float, float]:
    """Return the median microseconds until a step returns, the device idle before, and those that the CPU worked.

    The device's queue holds about a thousand launches: a step of more waits for the device, which the first number
    then contains and the second does not.
    """
    walls, works = [], []
    for _ in range(count):
        wait(device)
        wall, work = time.perf_counter(), time.process_time()
        call()
        walls.append(time.perf_counter() - wall)
        works.append(time.process_time() - work)
    wait(device)
    return 1e6 * statistics.median(walls), 1e6 * statistics.median(works)


def pairs(first: Call, other: Call, device: torch.device, *, least: int, most: int, width: float = 0.01) -> Series:
    """Time two that take turns, each some steps at once, until the ratio's interval is narrow or `most` are done."""
    calls = max(steps_of(first, device), steps_of(other, device))
    times: list[tuple[float, float]] = []
    gc.collect()
    gc.disable()
    try:
        while True:
            both = [(0, first), (1, other)][:: -1 if len(times) % 2 else 1]
            took = {i: seconds(call, calls, device) for i, call in both}
            times.append((took[0], took[1]))
            if len(times) >= least:
                series = Series(*zip(*times, strict=True))
                low, high = series.interval()
                if high - low <= width or len(times) >= most:
                    return series
    finally:
        gc.enable()


def steps_of(call: Call, device: torch.device) -> int:
    """Return how many steps make one timing."""
    once = min(seconds(call, 1, device) for _ in range(2))
    return max(1, math.ceil(TIMING_S / max(once, 1e-6))) if device.type == "cuda" else 1


def product_flops(device: torch.device, size: int) -> float:
    """Return the operations in a second of a bfloat16 matrix product of random numbers, the median of twenty."""
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    return 2 * size**3 / statistics.median(seconds(lambda: a @ b, 3, device) for _ in range(20))
