"""Hosting: the bytes of tensors in host memory, where a file can be written from."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def reached(tensors: Iterable[Tensor]) -> torch.cuda.Event | None:
    """Return the event after which tensors on a GPU hold what they hold for the caller; None where none is."""
    device = next((x.device for x in tensors if x.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def on_host(tensors: Iterable[Tensor], after: torch.cuda.Event | None) -> list[Tensor]:
    """Return contiguous tensors in host memory: themselves where they are that already, else copies.

    Copies from a GPU are made after the event, on a stream of their own, into pinned memory, and waited for.
    """
    if after is None:
        return [_plain(x).to("cpu").contiguous() for x in tensors]
    tensors = list(tensors)
    stream = torch.cuda.Stream(next(x.device for x in tensors if x.is_cuda))  # this thread may be at another device
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        found = [_pinned(_plain(x)) if x.is_cuda else _plain(x).contiguous() for x in tensors]
    stream.synchronize()
    return found


def _plain(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg()


def _pinned(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
