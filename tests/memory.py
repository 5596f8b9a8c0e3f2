"""Peak memory of a call, from the events of the CPU allocator (every one of them, so the peak is exact)."""

from collections.abc import Callable

import torch

from tests.collector import uncollected


def peak_bytes(f: Callable[[], object]) -> int:
    """Return the most bytes that tensors allocated during `f()` held at once; what `f` returns counts until the end."""
    with (
        uncollected(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as prof,
    ):
        kept = f()
    del kept
    held = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
