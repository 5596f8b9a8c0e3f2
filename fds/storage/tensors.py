"""Tensors as bytes: one safetensors file written in a single pass, and its parts read back and checked.

The format is an 8-byte little-endian length, a JSON header of that length, the bytes of the tensors one after
another: https://huggingface.co/docs/safetensors. Its own writer wants all tensors in host memory at once, hides the
error number of a failed write and makes files that only their owner may read; its reader is used.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fds.errors import StorageError

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _CODES}  # "float32" -> torch.float32


def dtype_name(x: Tensor) -> str:
    """Return torch's name of a tensor's dtype: "float32"."""
    return str(x.dtype).removeprefix("torch.")


def checksum(x: Tensor) -> str:
    """Return the checksum of the bytes of a contiguous CPU tensor (CRC-32, ISO 3309), its name in front.

    >>> checksum(torch.zeros(2))
    'crc32:6522df69'
    """
    return f"crc32:{zlib.crc32(_bytes(x)):08x}"


def refuse_unwritable(named: Mapping[str, Any]) -> None:
    """Raise `StorageError` for a leaf that a file cannot hold: no tensor, no data, a dtype or layout beyond it."""
    for name, x in named.items():
        want = f"a tensor of one of {', '.join(DTYPES)}"
        if not isinstance(x, Tensor):
            raise StorageError("a leaf of the state is no tensor", where=name, got=repr(x)[:60], want=want)
        if x.is_meta:
            raise StorageError("a leaf of the state has no data", where=name, got="a meta tensor", want=want,
                               hint="save what step.init or a step returned, not step.structure")  # fmt: skip
        if x.dtype not in _CODES or x.layout != torch.strided:
            raise StorageError("a leaf of the state has no place in a file", where=name,
                               got=f"{x.dtype}, {x.layout}", want=want)  # fmt: skip
        if name.encode(errors="replace").decode() != name:
            raise StorageError("a name is no text that a file can hold", where=ascii(name), want="valid Unicode")


def write_tensors(path: Path, named: Mapping[str, Tensor]) -> dict[str, str]:
    """Write tensors to a new safetensors file, durably, and return their checksums by name.

    One tensor at a time is copied to host memory, if it is not there and contiguous already. Raises `OSError`.
    """
    names = sorted(named, key=lambda name: -named[name].element_size())  # so that every tensor starts aligned
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        x = named[name]
        start, end = end, end + x.numel() * x.element_size()
        header[name] = {"dtype": _CODES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksums = {}
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            x = named[name].detach().resolve_conj().resolve_neg().to("cpu").contiguous()
            file.write(_bytes(x))
            checksums[name] = checksum(x)
        file.flush()
        os.fsync(file.fileno())
    return checksums


def open_tensors(path: Path) -> safe_open:
    """Open a safetensors file, memory-mapped. Raises `StorageError` if it is missing, cut off or something else."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise StorageError("a tensor file is missing", where=str(path)) from error
    except (OSError, SafetensorError) as error:
        raise StorageError(
            "a tensor file cannot be read", where=str(path), got=str(error), want="a whole safetensors file",
            hint="it was cut off or changed after it was saved; load another tag",
        ) from error  # fmt: skip


def read_into(out: Tensor, file: safe_open, name: str, want: str, where: str) -> None:
    """Copy the tensor `name` of a file into `out`, `(length,)`, and check the bytes that arrived against `want`.

    Raises `StorageError` if it is missing, of another dtype or length, or if a byte differs.
    """
    try:
        header = file.get_slice(name)
        if math.prod(header.get_shape()) != out.numel() or header.get_dtype() != _CODES[out.dtype]:
            raise StorageError(
                "a tensor file does not hold what its manifest says", where=where,
                got=f"{header.get_dtype()} {tuple(header.get_shape())}", want=f"{_CODES[out.dtype]} of {out.numel()}",
            )  # fmt: skip
        out.copy_(file.get_tensor(name).view(-1))
    except (OSError, SafetensorError) as error:
        raise StorageError("a tensor is missing from its file", where=where, got=str(error)) from error
    if checksum(out) != want:
        raise StorageError(
            "a tensor file was changed after it was written", where=where, got=checksum(out), want=want,
            hint="a byte flipped on the disk or on the way; load another tag",
        )  # fmt: skip


def _bytes(x: Tensor) -> memoryview:
    flat = x.as_strided((x.numel(),), (1,))  # view(-1) would keep the odd stride that a single element may have
    return flat.view(torch.uint8).numpy().data
