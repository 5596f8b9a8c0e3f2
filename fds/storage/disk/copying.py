"""Copies of tensors: to host memory, from which files are written, and from and to extents on a disk.

A leaf on a disk is mapped, and what is read or written through the mapping counts as memory of the process. The file is
opened once more for that, without O_DIRECT: parts of leaves begin and end anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor

from fds.media import extent_of
from fds.storage.disk.writer import OpenFiles, Span
from fds.storage.format.tensors import as_bytes


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
        hosted = [_pinned(_plain(x)) if x.is_cuda else _plain(x).contiguous() for x in tensors]
    stream.synchronize()
    return hosted


def _plain(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg()


def _pinned(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


def span_of(x: Tensor) -> Span:
    """Return where the bytes of a contiguous CPU tensor are: in memory, or in a file."""
    extent = extent_of(x)
    num_bytes = x.numel() * x.element_size()
    return (x.data_ptr(), num_bytes) if extent is None else (extent.offset, num_bytes, extent.fd)


def is_on_disk(x: Tensor) -> bool:
    """Return whether a tensor lives on a disk."""
    return extent_of(x) is not None


def in_memory(x: Tensor) -> Tensor:
    """Return a tensor with the values of `x`, in ordinary memory if it is a part of a leaf on a disk.

    Raises `OSError`.
    """
    extent = extent_of(x)
    if extent is None:
        return x
    copy = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    files = OpenFiles()
    try:
        files.read(extent.fd, extent.offset, extent.nbytes, copy.data_ptr())
    finally:
        files.close()
    return copy


def copy_to(x: Tensor, values: Tensor) -> None:
    """Copy values to `x`, wherever it lives. Raises `OSError`."""
    extent = extent_of(x)
    if extent is None:
        x.copy_(values)
        return
    fd = os.open(f"/proc/self/fd/{extent.fd}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        write_at(fd, as_bytes(values.to("cpu", x.dtype).contiguous()), extent.offset)
        os.posix_fadvise(fd, extent.offset, extent.nbytes, os.POSIX_FADV_DONTNEED)  # write it back soon
    finally:
        os.close(fd)


def write_at(fd: int, data: Tensor, offset: int) -> None:
    """Write a contiguous CPU tensor (num_bytes,) uint8 to a file, from `offset` on. Raises `OSError`."""
    left = data.numpy().data
    while len(left):
        count = os.pwrite(fd, left, offset)
        left, offset = left[count:], offset + count
