"""Copies between the host and a GPU beside what that computes: on streams of their own, one for each direction.

A copy begins when the computing stream is done with what was asked of it so far: only then is the memory on the GPU,
which is that stream's, free to be read or written. So no more of it is taken than if nothing went on at once, and
nobody has to tell torch's allocator of these streams.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fds.media.tensors import leaf_of

Pairs = tuple[list[Tensor], list[Tensor]]  # what is written, and its values


def start(new: Sequence[Tensor], old: Sequence[Tensor]) -> Callable[[], None]:
    """Begin to copy `old` to `new`, on any devices; what does not pass between the host and a GPU is copied at once.

    Return the function after which `new` may be used: the computing stream waits for what goes to a GPU, and the host
    goes on; it waits for what comes from one. Until then nobody may write to `old`, or use `new`; nor may the host
    write later to memory that a GPU copies from before it has waited for the computing stream.
    """
    ways: dict[torch.device | None, tuple[Pairs, Pairs]] = {}  # by GPU: what goes there, what comes from there
    for x, y in zip(new, old, strict=True):
        gpu = (x if x.is_cuda else y).device if x.is_cuda != y.is_cuda else None
        for some, one in zip(ways.setdefault(gpu, (([], []), ([], [])))[y.is_cuda], (x, y), strict=True):
            some.append(one)
    waits: list[Callable[[], None]] = []
    for gpu, (up, down) in ways.items():
        for (some, values), comes in ((up, False), (down, True)):
            if some and gpu is None:
                torch._foreach_copy_(some, values)
            elif some and gpu is not None:
                waits.append(_beside(gpu, some, values, comes=comes))

    def wait() -> None:
        for one in waits:
            one()

    return wait


def _beside(gpu: torch.device, new: list[Tensor], old: list[Tensor], *, comes: bool) -> Callable[[], None]:
    """Begin a copy from the GPU, or to it, on its stream; return what waits, and holds the tensors until then."""
    side, done = _stream(gpu, comes), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(side), torch.no_grad():
        for x, y in zip(new, old, strict=True):
            x.copy_(y, non_blocking=True)
        done.record(side)
    for y in new if comes else old:
        if (leaf := leaf_of(y)) is not None:
            leaf.copied = done, os.getpid()  # that memory is given back after it

    return functools.partial(_await, gpu, done, new, old, comes=comes)


def _await(gpu: torch.device, done: torch.cuda.Event, *held: list[Tensor], comes: bool) -> None:
    if comes:
        done.synchronize()
    else:
        torch.cuda.current_stream(gpu).wait_event(done)


@functools.cache
def _stream(gpu: torch.device, comes: bool) -> torch.cuda.Stream:
    """Return the stream of a direction, of which a GPU has an engine each."""
    return torch.cuda.Stream(gpu)
