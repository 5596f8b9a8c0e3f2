"""Peak memory of a call, from the events of the CPU allocator (every one of them, so the peak is exact)."""

import gc
from collections.abc import Callable

import torch


def peak_bytes(f: Callable[[], object]) -> int:
    """Return the most bytes that tensors allocated during `f()` held at once; what `f` returns counts until the end."""
    gc.disable()  # what it would free now is of other tests
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as prof:
            kept = f()
    finally:
        gc.enable()
    del kept
    held = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
