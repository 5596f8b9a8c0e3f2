"""The manifest: which leaf is in which file, as frozen records and one JSON text that checks itself."""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from pathlib import Path
from typing import Any

import attrs
import cattrs

from fds.errors import StorageError
from fds.storage.tensors import DTYPES

FORMAT = 1  # raised when a reader of the format before could misread a file
NAME = "manifest.json"


@attrs.frozen
class Chunk:
    """Elements `start` to `start + length` of a flattened leaf, kept in `file` under the leaf's key path."""

    file: str  # a plain name, in the folder of the manifest
    start: int  # elements
    length: int  # elements
    checksum: str  # `fds.storage.tensors.checksum` of the bytes


@attrs.frozen
class Leaf:
    """A tensor of the state: its dtype, its global shape, and chunks that tile it in order."""

    dtype: str  # torch's name, "float32"
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@attrs.frozen
class Manifest:
    """Everything of a save that is not a tensor."""

    format: int
    fds: str  # version that wrote it
    torch: str  # version that wrote it
    tag: str
    calls: int
    composition: tuple[str, ...]  # the transforms as they were written, for people
    leaves: dict[str, Leaf]  # by dotted key path
    extra: dict[str, Any]  # the user's


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder durably. Raises `OSError`."""
    record = _CONVERTER.unstructure(manifest)
    with open(folder / NAME, "x", encoding="utf-8") as file:
        file.write(_text({**record, "checksum": _checksum(record)}))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder; no other file has been touched when it returns.

    Raises `StorageError` for a missing one, for anything but JSON, another format version, fields of wrong types
    (with their JSON path), a changed byte, and file names or chunks that a save never writes.
    """
    path = folder / NAME
    try:
        record = json.loads(path.read_bytes())
        written = record.pop("checksum", None) if isinstance(record, dict) else None
        found = _checksum(record)
    except OSError as error:
        raise StorageError("a save without a readable manifest", where=str(path), got=str(error.strerror)) from error
    except (ValueError, RecursionError) as error:
        raise StorageError("the manifest is no JSON", where=str(path), got=str(error)[:200]) from error
    if not isinstance(record, dict) or type(record.get("format")) is not int:
        raise StorageError("this JSON is no manifest of fds", where=str(path), got=json.dumps(record)[:60],
                           want=f'an object with "format": {FORMAT}')  # fmt: skip
    if record["format"] != FORMAT:
        raise StorageError(
            "the manifest has another format version", where=str(path), got=f"format {record['format']}, written by "
            f"fds {record.get('fds')!s:.40}", want=f"format {FORMAT}", hint="load it with the version that wrote it",
        )  # fmt: skip
    try:
        manifest = _CONVERTER.structure(record, Manifest)
    except cattrs.BaseValidationError as error:
        raise StorageError("the manifest has wrong fields", where=str(path),
                           got="\n".join(cattrs.transform_error(error)[:5])) from None  # fmt: skip
    if written != found:
        raise StorageError("the manifest was changed after it was written", where=str(path), got=found,
                           want=f"the checksum that it was written with, {written!s:.40}")  # fmt: skip
    for name, leaf in manifest.leaves.items():
        refuse_impossible(leaf, where=f"{path}: $.leaves[{name!r}]")
    return manifest


def checked_extra(extra: Any) -> dict[str, Any]:
    """Return `extra` if JSON gives back what it is given. Raises `StorageError` with the path of what it does not."""
    if extra is None:
        return {}
    if not isinstance(extra, dict):
        raise StorageError("extra is no dict", where="extra", got=repr(extra)[:60], want="a dict of JSON values")
    try:
        _refuse_non_json(extra, "extra")
        return json.loads(json.dumps(extra, allow_nan=False))
    except (ValueError, RecursionError) as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError("extra is no JSON", where="extra", got=str(error)) from error


def _refuse_non_json(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise StorageError("extra has a key that JSON would change", where=path, got=repr(key)[:60],
                                   want="text")  # fmt: skip
            _refuse_non_json(part, f"{path}.{key}")
    elif isinstance(value, list):
        for i, part in enumerate(value):
            _refuse_non_json(part, f"{path}.{i}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise StorageError("JSON has no such number", where=path, got=repr(value), want="a finite one, None or text")
    elif not (value is None or isinstance(value, str | int | float)):
        raise StorageError(
            "extra holds what JSON would not give back", where=path, got=repr(value)[:60],
            want="dicts with text keys, lists, text, numbers, True, False, None",
            hint="a tuple as a list, a tensor as x.tolist(); a tensor of the run belongs in the state",
        )  # fmt: skip


def refuse_impossible(leaf: Leaf, where: str) -> None:
    """Raise `StorageError` for a leaf that no save writes: of no dtype, or with chunks that do not tile it."""
    if leaf.dtype not in DTYPES:
        raise StorageError("unknown dtype", where=f"{where}.dtype", got=leaf.dtype[:40], want=", ".join(DTYPES))
    if any(n < 0 for n in leaf.shape):
        raise StorageError("a negative size", where=f"{where}.shape", got=str(leaf.shape))
    end = 0
    for i, chunk in enumerate(leaf.chunks):
        if not re.fullmatch(r"\w[\w-]*\.safetensors", chunk.file):
            raise StorageError("a file name that no save writes", where=f"{where}.chunks[{i}].file",
                               got=repr(chunk.file)[:80], want="a plain name, like rank0.safetensors")  # fmt: skip
        if chunk.start != end or chunk.length < 0:
            raise StorageError("chunks that do not tile their leaf", where=f"{where}.chunks[{i}]", got=str(chunk),
                               want=f"start={end}, length >= 0")  # fmt: skip
        end += chunk.length
    if end != math.prod(leaf.shape):
        raise StorageError("chunks that do not tile their leaf", where=f"{where}.chunks", got=f"{end} elements",
                           want=f"{math.prod(leaf.shape)}, by its shape {leaf.shape}")  # fmt: skip


def _text(record: dict) -> str:
    """Return the JSON with one line for each field, and for each leaf."""
    leaves = ",\n".join(f"  {json.dumps(name)}: {json.dumps(leaf)}" for name, leaf in record["leaves"].items())
    fields = {name: json.dumps(value) for name, value in record.items()} | {"leaves": f"{{\n{leaves}\n }}"}
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {text}" for name, text in fields.items()) + "\n}\n"


def _checksum(record: Any) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"crc32:{zlib.crc32(text.encode()):08x}"


def _exactly(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is not {kind.__name__}")
    return value


_CONVERTER = cattrs.Converter(forbid_extra_keys=True)
_CONVERTER.register_structure_hook(int, _exactly)  # cattrs would turn "3" and 3.7 into 3
_CONVERTER.register_structure_hook(str, _exactly)
