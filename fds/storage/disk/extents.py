"""Leaves on a disk: read from their file and written to it, so that none of it stays in this process's memory.

A leaf on a disk is mapped, and what is read or written through the mapping counts as memory of the process. The file is
opened once more for that, without O_DIRECT: parts of leaves begin and end anywhere.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fds.media import extent_of
from fds.storage.disk.writer import OpenFiles, Span
from fds.storage.format.tensors import as_bytes


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
    found = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    files = OpenFiles()
    try:
        files.read(extent.fd, extent.offset, extent.nbytes, found.data_ptr())
    finally:
        files.close()
    return found


def put(x: Tensor, values: Tensor) -> None:
    """Copy values to `x`, wherever it lives. Raises `OSError`."""
    extent = extent_of(x)
    if extent is None:
        x.copy_(values)
        return
    left, offset = as_bytes(values.to("cpu", x.dtype).contiguous()).numpy().data, extent.offset
    fd = os.open(f"/proc/self/fd/{extent.fd}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        while len(left):
            count = os.pwrite(fd, left, offset)
            left, offset = left[count:], offset + count
        os.posix_fadvise(fd, extent.offset, extent.nbytes, os.POSIX_FADV_DONTNEED)  # write it back soon
    finally:
        os.close(fd)
