"""Samples of a folder that MosaicML's `streaming.MDSWriter` wrote, mapped into memory: a data set of dicts.

A file of samples holds, little-endian: how many there are (u32), where each begins and where the last ends (u32), and
the samples. A sample is the sizes (u32) of those columns that have no fixed one, and then the columns.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fds.data.tokens import row_number
from fds.errors import DataError, nearest
from fds.storage.disk.files import check_path, read_errors

_NUMBERS = [f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)] + ["float16", "float32", "float64"]
_CODES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32"}
_CODES |= {64: "uint64", 65: "int64", 66: "float64"}  # of dtypes that are said in a column

_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "jpeg": bytes,
    "png": bytes,
    "str": bytes.decode,
    "int": lambda data: int(np.frombuffer(data, "<i8")[0]),
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "json": json.loads,
    **{name: lambda data, name=name: np.frombuffer(data, name)[0] for name in _NUMBERS},
}


def _array(data: bytes, dtype: str | None, shape: tuple[int, ...] | None) -> np.ndarray:
    """Return an array, whose dtype and shape the column says, or else the sample."""
    at = 0
    if dtype is None:
        dtype, at = _CODES[data[0]], 1
    if shape is None:  # the number of dims, times four, and the width of a dim in bytes, as a power of two
        dims, width = data[at] >> 2, 1 << (data[at] & 3)
        shape = tuple(int.from_bytes(data[at + 1 + i * width :][:width], "little") for i in range(dims))
        at += 1 + dims * width
    return np.frombuffer(data, dtype, offset=at).reshape(shape)


class MDSFolder:
    """The samples of a folder of MDS: dicts of columns, in the order in which they were written.

    Texts, numbers, JSON and arrays are decoded as `streaming.StreamingDataset` does; columns of JPEG and PNG are the
    bytes of a picture. Its order, processes and shared memory are not used: `DistributedLoader` has its own. Files are
    local and unpacked.

    Args:
        path: of the folder with `index.json`.

    Raises `DataError` for a folder that is none, pickled columns, which may run code, and others that are not decoded;
    for files that are packed, missing or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = check_path(path, "path")
        index = self.path / "index.json"
        with read_errors("index of MDS", index):
            text = index.read_bytes()
        try:
            shards = json.loads(text)["shards"]
            self._shards = [_Shard(self.path, shard) for shard in shards]
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            got = f"{type(error).__name__}: {error}"[:200]
            raise DataError("this is no index of MDS", where=str(index), got=got) from error
        self._firsts = np.cumsum([0, *(shard.samples for shard in self._shards)])

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._firsts[-1])

    def __getitem__(self, i: int) -> dict[str, Any]:
        """Return a sample, column by column."""
        index = row_number(i, len(self))
        number = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return self._shards[number].sample(index - int(self._firsts[number]))

    def __reduce__(self) -> tuple:
        return MDSFolder, (self.path,)


class _Shard:
    """A file of samples, of the record that an index has of it."""

    def __init__(self, folder: Path, record: dict[str, Any]):
        if record["format"] != "mds" or record["version"] != 2:
            got = f"{record['format']!r}, version {record['version']}"
            raise DataError("another format than MDS", where=str(folder), got=got[:80], want="'mds', version 2")
        self.file, self.samples = folder / Path(record["raw_data"]["basename"]).name, int(record["samples"])
        if any(size is not None and int(size) < 0 for size in record["column_sizes"]):
            raise ValueError("a column of fewer than 0 bytes")
        self.columns = [
            (name, size and int(size), _decoder(str(encoding), name))
            for name, encoding, size in zip(
                record["column_names"], record["column_encodings"], record["column_sizes"], strict=True
            )
        ]
        if not self.file.exists():
            packed = record.get("zip_data") is not None
            what = "samples are packed" if packed else "a file of samples is missing"
            hint = "iterate streaming.StreamingDataset(local=...) once: it unpacks them" if packed else ""
            raise DataError(what, where=str(folder), want=self.file.name, hint=hint)
        size, want = self.file.stat().st_size, int(record["raw_data"]["bytes"])
        if size != want or want < 4 * (self.samples + 2) or self.samples < 0:
            got, wanted = f"{size:,} bytes for {self.samples:,} samples", f"{want:,} bytes, as index.json says"
            raise DataError("a file of samples is damaged", where=str(self.file), got=got, want=wanted)

    @functools.cached_property
    def bytes(self) -> mmap.mmap:
        """The file, mapped into memory when it is first read."""
        with self.file.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def sample(self, i: int) -> dict[str, Any]:
        """Return a sample. Raises `DataError` where the file contradicts its index."""
        try:
            begin, end = struct.unpack_from("<II", self.bytes, 4 * (i + 1))
            if not 4 * (self.samples + 2) <= begin <= end <= len(self.bytes):
                raise ValueError(f"bytes {begin} to {end} of {len(self.bytes)}")
            data, at, sizes = self.bytes[begin:end], 0, []
            for _, size, _ in self.columns:
                sizes.append(size or struct.unpack_from("<I", data, at)[0])
                at += 0 if size else 4
            sample = {}
            for (name, _, decode), size in zip(self.columns, sizes, strict=True):
                if at + size > len(data):
                    raise ValueError(f"column {name!r} ends behind its sample")
                sample[name], at = decode(data[at : at + size]), at + size
        except (ValueError, KeyError, IndexError, struct.error) as error:
            got = f"{type(error).__name__}: {error}"[:200]
            raise DataError("a sample cannot be read", where=f"{self.file}, sample {i}", got=got) from error
        return sample


def _decoder(encoding: str, column: str) -> Callable[[bytes], Any]:
    """Return what decodes a column. Raises `DataError` for an encoding that is not decoded."""
    name, *more = encoding.split(":")
    if name == "ndarray":
        dtype = more[0] if more else None
        shape = tuple(map(int, more[1].split(","))) if len(more) > 1 else None
        if len(more) < 3 and dtype in (None, *_NUMBERS) and (shape is None or math.prod(shape) > 0):
            return functools.partial(_array, dtype=dtype, shape=shape)
    elif not more and name in _DECODERS:
        return _DECODERS[name]
    pickled = name == "pkl"
    hint = "it may run code: write it as json or arrays" if pickled else nearest(name, tuple(_DECODERS))
    want = ", ".join((*_DECODERS, "ndarray"))
    raise DataError("a column is not decoded", where=f"column {column!r}", got=encoding[:80], want=want, hint=hint)
