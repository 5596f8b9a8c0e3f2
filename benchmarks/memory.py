"""Peak bytes of allocated tensors, by running sum over every allocation and release: exact, and apart from timing.

On the CPU the allocator reports each one to torch.profiler (`profile_memory=True`); what worker threads inside an
operator take for themselves is not seen. On CUDA the caching allocator keeps the peak itself.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch.profiler import ProfilerActivity, profile


@attrs.frozen
class Memory:
    """What one contender allocated from its making to its last call; what was there before does not count."""

    peak_bytes: int
    call_bytes: int  # the peak of one call more
    held_bytes: int  # after the last call, while it could be called again
    at_peak: tuple[tuple[str, int], ...] = ()  # who had allocated what was live at the peak, largest first; CPU only


def measure(make: Callable[[], Callable[[], Any]], *, calls: int, device: torch.device) -> Memory:
    """Make a contender, call it, and return its memory. The garbage collector is off: a cycle counts as a leak.

    One is made and called before that: what it leaves behind for all, such as cached tables, belongs to nobody.
    """
    make()()
    gc.collect()
    gc.disable()
    try:
        return _on_cuda(make, calls, device) if device.type == "cuda" else _on_cpu(make, calls)
    finally:
        gc.enable()
        gc.collect()


def _on_cuda(make: Callable[[], Callable[[], Any]], calls: int, device: torch.device) -> Memory:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call = make()
    for _ in range(calls):
        call()
    torch.cuda.synchronize(device)
    peak, held = torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return Memory(peak, torch.cuda.max_memory_allocated(device) - before, held)


def _on_cpu(make: Callable[[], Callable[[], Any]], calls: int) -> Memory:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints a line at every start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call = make()
        for _ in range(calls):
            call()
    # read before `call` goes: nothing that it holds has been released
    events = list(_allocations(record))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    totals = _totals([*events, *_allocations(record)])
    before = totals[: len(events) + 1]
    peak = max(before)
    return Memory(peak, max(totals[len(events) :]), before[-1], _live(events[: before.index(peak)]))


def _totals(events: list[tuple[int, int, str]]) -> list[int]:
    """Return how many bytes are live before the first event, and after each."""
    total, totals = 0, [0]
    live: dict[int, int] = {}
    for place, size, _ in events:
        if size > 0:
            live[place] = size
            total += size
        else:  # of what was allocated before, nothing is known
            total -= live.pop(place, 0)
        totals.append(total)
    return totals


def _live(events: list[tuple[int, int, str]]) -> tuple[tuple[str, int], ...]:
    live: dict[int, tuple[int, str]] = {}
    for place, size, who in events:
        if size > 0:
            live[place] = (size, who)
        else:
            live.pop(place, None)
    by_who: Counter[str] = Counter()
    for size, who in live.values():
        by_who[who] += size
    return tuple(by_who.most_common())


def _allocations(record: profile) -> Iterator[tuple[int, int, str]]:
    """Yield (address, bytes, who) in order of time; bytes below zero are a release."""
    assert record.profiler is not None and record.profiler.kineto_results is not None
    found = []

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if node.tag.name == "Allocation":
            fields = node.extra_fields
            who = " in ".join(dict.fromkeys((path[-1], path[0]))) if path else "outside operators"
            found.append((node.start_time_ns, fields.ptr, fields.alloc_size, who))
            return
        name = node.name.removeprefix("autograd::engine::evaluate_function: ")
        for child in node.children:
            walk(child, path if path[-1:] == (name,) else (*path, name))

    for root in record.profiler.kineto_results.experimental_event_tree():
        walk(root, ())
    for _, place, size, who in sorted(found, key=lambda one: one[0]):
        yield place, size, who
