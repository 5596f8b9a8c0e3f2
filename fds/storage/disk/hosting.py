"""Copies of tensors in host memory, from which files are written."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def record_event(tensors: Iterable[Tensor]) -> torch.cuda.Event | None:
    """Record and return an event on the current stream of the tensors' GPU; None if they are on the CPU."""
    device = next((x.device for x in tensors if x.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def on_host(tensors: Iterable[Tensor], after: torch.cuda.Event | None) -> list[Tensor]:
    """Return the tensors as contiguous tensors in host memory, copied where necessary.

    Copies from a GPU are made after the event, on a separate stream, into pinned memory, and are complete on return.
    """
    if after is None:
        return [_plain(x).to("cpu").contiguous() for x in tensors]
    tensors = list(tensors)
    stream = torch.cuda.Stream(next(x.device for x in tensors if x.is_cuda))  # not the current device of this thread
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        found = [_pinned(_plain(x)) if x.is_cuda else _plain(x).contiguous() for x in tensors]
    stream.synchronize()
    return found


def _plain(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg()


def _pinned(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
