"""Tensors as bytes: the dtypes that files can hold, and the header of a safetensors file.

The format is an 8-byte little-endian length, a JSON header of that length, and the bytes of the tensors:
https://huggingface.co/docs/safetensors. Here the header is padded so that the bytes begin at a page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fds.errors import StorageError
from fds.storage.disk.files import refusal
from fds.storage.disk.writer import ALIGN

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
