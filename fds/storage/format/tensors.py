"""Tensors as bytes: where they lie, the dtypes that files can hold, and the header of a safetensors file.

The format is an 8-byte little-endian length, a JSON header of that length, and the bytes of the tensors:
https://huggingface.co/docs/safetensors. Here the header is padded so that the bytes begin at a page.

A leaf on a disk is mapped, and what is read or written through the mapping counts as memory of the process. The file is
opened once more for that, without O_DIRECT: parts of leaves begin and end anywhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fds.errors import StorageError
from fds.media import extent_of
from fds.storage.disk.files import refusal
from fds.storage.disk.writer import ALIGN, OpenFiles, Span

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}  # "float32" -> torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """Return the header of a file of these tensors (name, dtype, shape); its length is a multiple of `ALIGN`."""
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    return len(text).to_bytes(8, "little") + text


def as_bytes(x: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as bytes, (num_bytes,) uint8."""
    flat = x.as_strided((x.numel(),), (1,))  # view(-1) would keep the odd stride that a single element may have
    return flat.view(torch.uint8)


def check_writable(named: Mapping[str, Any]) -> None:
    """Raise `StorageError` for a leaf that a file cannot hold: not a tensor, no data, or another dtype or layout."""
    for name, x in named.items():
        want = f"a tensor of one of {', '.join(DTYPES)}"
        if not isinstance(x, Tensor):
            raise StorageError("a leaf of the state is not a tensor", where=name, got=repr(x)[:60], want=want)
        if type(x) not in (Tensor, torch.nn.Parameter):  # the data of a subclass may be elsewhere
            raise refusal("a leaf of the state is of a subclass of Tensor", name, type(x).__name__, want)
        if x.is_meta:
            hint = "save the result of step.init or of a step, not of step.structure"
            raise refusal("a leaf of the state has no data", name, "a meta tensor", want, hint)
        if x.dtype not in CODES or x.layout != torch.strided:
            got = f"{x.dtype}, {x.layout}"
            raise refusal("a leaf of the state has a dtype or layout that files cannot hold", name, got, want)
        if name.encode(errors="replace").decode() != name:
            raise StorageError("a name cannot be written to a file", where=ascii(name), want="valid Unicode")


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
