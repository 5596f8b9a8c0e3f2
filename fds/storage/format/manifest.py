"""The manifest: where each leaf is stored, as frozen records and a JSON text with a checksum."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import attrs
import cattrs

from fds.errors import StorageError
from fds.layout import Box
from fds.media.locks import open_regular
from fds.storage.disk.files import OpenFolder, hint, parse_json, read_small
from fds.storage.disk.writer import checksum
from fds.storage.format import boxes
from fds.storage.format.tensors import DTYPES

FORMAT = 4  # incremented when a reader of the previous format could misread a file
# in format 2 every chunk is of the whole leaf; to 3 `slots.kept` has the errors of sums of gradients, not of their mean
READABLE = (2, 3, 4)
NAME = "manifest.json"
MAX_INT = 2**63 - 1  # of sizes and offsets; Python refuses to print some integers that JSON can hold
MAX_DEPTH = 100  # levels of `extra`, which JSON readers and writers handle at any depth of the call stack
MAX_DETAILED = 2**15  # bytes of a manifest whose wrong fields are all listed, which takes 20 us each
HEAD_BYTES = 4096  # of a manifest, which contain the fields before files and leaves
MAX_BYTES = 2**28  # of a manifest: more than two million chunks, 16 TiB of state


@attrs.frozen
class Chunk:
    """Elements `start` to `start + length` of a flattened leaf, or box of it, stored in `file` under its key path."""

    file: str  # a plain name, in the folder of the manifest
    offset: int  # bytes from the beginning of the file
    start: int  # elements
    length: int  # elements
    checksum: str  # `fds.storage.disk.writer.checksum` of the bytes
    box: Box | None = None  # the piece of the leaf that is flattened, None for all of it

    @property
    def end(self) -> int:
        """The index after its last element."""
        return self.start + self.length

    def order(self) -> tuple[Box, int]:
        """Return what chunks of a leaf are sorted by."""
        return self.box or (), self.start


@attrs.frozen
class SavedLeaf:
    """A tensor of the state: its dtype, its global shape, and chunks that cover it, box by box, in order."""

    dtype: str  # torch's name, "float32"
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@attrs.frozen
class File:
    """A tensor file: its size, and the checksum of its header."""

    bytes: int
    header: str


@attrs.frozen
class Manifest:
    """Everything of a save that is not a tensor."""

    format: int
    fds: str  # version that wrote it
    torch: str  # version that wrote it
    tag: str
    saved: str  # time, ISO 8601 in UTC; the same on all ranks
    run: str | None = attrs.field(default=None, kw_only=True)  # its id; older versions wrote none
    calls: int
    part: tuple[int, int] | None  # rank and number of ranks with `local`; None for a save of all ranks
    composition: tuple[str, ...]  # the transforms as text, for people
    files: dict[str, File]  # by name
    leaves: dict[str, SavedLeaf]  # by dotted key path
    extra: dict[str, Any]  # the user's


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder durably. Raises `OSError`."""
    record = _CONVERTER.unstructure(manifest)
    text = _text({**record, "checksum": _checksum(record)}).encode()
    if len(text) > MAX_BYTES:
        raise StorageError(
            "a manifest that is too large to be read",
            where=str(folder / NAME),
            got=f"{len(text)} bytes",
            want=f"at most {MAX_BYTES}",
            hint="is `extra` large?",
        )
    with open(folder / NAME, "xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path | OpenFolder) -> Manifest:
    """Read the manifest of a folder, without opening other files.

    Raises `StorageError` for a missing one, invalid JSON, another format version, fields of wrong types (with their
    JSON path), a changed byte, and file names or chunks that a save never writes.
    """
    held = folder if isinstance(folder, OpenFolder) else OpenFolder.of(folder)
    path = held.path / NAME
    try:
        text = read_small(NAME, MAX_BYTES, folder=held.fd)
        record = parse_json(text)
        written = record.pop("checksum", None) if isinstance(record, dict) else None
        found = _checksum(record)
    except OSError as error:
        raise StorageError(
            "a save without a readable manifest", where=str(path), got=str(error.strerror), hint=hint(error)
        ) from error
    except (ValueError, RecursionError) as error:
        raise StorageError("the manifest is not JSON", where=str(path), got=str(error)[:200]) from error
    if not isinstance(record, dict) or type(record.get("format")) is not int:
        raise StorageError(
            "this JSON is not a manifest of fds",
            where=str(path),
            got=json.dumps(record)[:60],
            want=f'an object with "format": {FORMAT}',
        )
    if record["format"] not in READABLE:
        raise StorageError(
            "the manifest has another format version",
            where=str(path),
            got=f"format {record['format']}, written by fds {record.get('fds')!s:.40}",
            want=f"format {' or '.join(map(str, READABLE))}",
            hint="load it with the version that wrote it",
        )
    try:
        manifest = _CONVERTER.structure(record, Manifest)
    except Exception as error:  # any error that a value of a wrong type causes
        faults = _wrong_fields(record) if len(text) < MAX_DETAILED else f"{type(error).__name__}: {error}"[:200]
        raise StorageError("the manifest has wrong fields", where=str(path), got=faults) from None
    if written != found:
        raise StorageError(
            "the manifest was changed after it was written",
            where=str(path),
            got=found,
            want=f"the checksum that it was written with, {written!s:.40}",
        )
    check_manifest(manifest, where=f"{path}: $.")
    return manifest


def saved_at(folder: Path) -> str:
    """Return the time of a save, reading only the beginning of its manifest. Raises `OSError`, `ValueError`."""
    found = re.search(r'^ "saved": "([^"]{1,40})",$', _head(folder), re.MULTILINE)
    if found is None:
        raise ValueError("the manifest does not begin as one that a save writes")
    return found[1]


def run_of(folder: Path) -> str | None:
    """Return the id of a save's run, from the beginning of its manifest if it is there; None if it cannot be read."""
    with contextlib.suppress(OSError, StorageError):
        found = re.search(r'^ "run": "([0-9a-f]{32})",$', _head(folder), re.MULTILINE)
        return read_manifest(folder).run if found is None else found[1]
    return None


def _head(folder: Path) -> str:
    with open(open_regular(folder / NAME, os.O_RDONLY), "rb") as file:
        return file.read(HEAD_BYTES).decode(errors="replace")


def checked_extra(extra: Any) -> dict[str, Any]:
    """Return `extra` if it survives JSON unchanged. Raises `StorageError` with the path of a value that does not."""
    if extra is None:
        return {}
    if not isinstance(extra, dict):
        raise StorageError("extra is not a dict", where="extra", got=repr(extra)[:60], want="a dict of JSON values")
    try:
        _check_json(extra, "extra")
        return json.loads(json.dumps(extra, allow_nan=False))
    except (ValueError, RecursionError) as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError("extra is not JSON", where="extra", got=str(error)) from error


def _check_json(value: Any, path: str, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise StorageError(
            "extra is nested too deeply",
            where=f"{path[:80]}...",
            got=f"more than {MAX_DEPTH} levels",
            want=f"at most {MAX_DEPTH}",
        )
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise StorageError(
                    "extra has a key that JSON would change", where=path, got=repr(key)[:60], want="text"
                )
            _check_json(part, f"{path}.{key}", depth + 1)
    elif isinstance(value, list):
        for i, part in enumerate(value):
            _check_json(part, f"{path}.{i}", depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise StorageError("not a number in JSON", where=path, got=repr(value), want="a finite one, None or text")
    elif not (value is None or isinstance(value, str | int | float)):
        raise StorageError(
            "extra has a value that JSON would change",
            where=path,
            got=repr(value)[:60],
            want="dicts with text keys, lists, text, numbers, True, False, None",
            hint="use a list for a tuple, x.tolist() for a tensor; tensors of the run belong in the state",
        )


def check_manifest(manifest: Manifest, where: str = "") -> None:
    """Raise `StorageError` for a run, file names, dtypes or chunks in a manifest that no save writes."""
    if manifest.run is not None and not re.fullmatch("[0-9a-f]{32}", manifest.run):
        raise StorageError(
            "not the id of a run",
            where=f"{where}run",
            got=repr(manifest.run)[:80],
            want="null, or 32 digits in hexadecimal",
        )
    for name, file in manifest.files.items():
        if not re.fullmatch(r"\w[\w-]{0,99}\.safetensors", name, re.ASCII):
            raise StorageError(
                "a file name that no save writes",
                where=f"{where}files",
                got=repr(name)[:80],
                want="a plain name, like rank0.safetensors",
            )
        if not 8 <= file.bytes <= MAX_INT:
            raise StorageError("not a size of a file", where=f"{where}files[{name!r}].bytes", got=str(file.bytes))
    for name, leaf in manifest.leaves.items():
        _check_leaf(leaf, manifest, f"{where}leaves[{name!r:.80}]")


def _check_leaf(leaf: SavedLeaf, manifest: Manifest, where: str) -> None:
    if leaf.dtype not in DTYPES:
        raise StorageError("unknown dtype", where=f"{where}.dtype", got=leaf.dtype[:40], want=", ".join(DTYPES))
    if any(n < 0 for n in leaf.shape):
        raise StorageError("a negative size", where=f"{where}.shape", got=str(leaf.shape)[:80])
    numel = 1
    for n in leaf.shape:
        numel = min(numel, MAX_INT) * max(n, 1)  # also of a shape with a zero in it
    if len(leaf.shape) > 64 or numel > MAX_INT:
        raise StorageError("a shape that is too large for a tensor", where=f"{where}.shape", got=str(leaf.shape)[:80])
    itemsize, whole = DTYPES[leaf.dtype].itemsize, boxes.whole(leaf.shape)
    ends: dict[Box, int] = {}  # by box: how far it is covered
    numel = math.prod(leaf.shape)
    for i, chunk in enumerate(leaf.chunks):
        at, file = f"{where}.chunks[{i}]", manifest.files.get(chunk.file)
        if file is None:
            raise StorageError(
                "a file that the manifest does not list",
                where=f"{at}.file",
                got=repr(chunk.file)[:80],
                want=f"one of {', '.join(manifest.files)}"[:200],
            )
        box, size = (whole, numel) if chunk.box is None else (chunk.box, boxes.numel(chunk.box))
        if chunk.box is not None and (len(box) != len(leaf.shape) or boxes.common(box, whole) != box):
            raise StorageError(
                "a box outside its leaf",
                where=f"{at}.box",
                got=str(box)[:160],
                want=f"[first, number] for each dim of {leaf.shape}"[:200],
            )
        end = ends.get(box, 0)
        follows = chunk.start >= end if manifest.part else chunk.start == end
        if not follows or chunk.length <= 0 or chunk.end > size:
            raise StorageError(
                "chunks that do not tile their leaf",
                where=at,
                got=f"{chunk!s:.160}",
                want=f"start={end}, length > 0, inside {size} elements"[:200],
            )
        if not 0 <= chunk.offset <= file.bytes - chunk.length * itemsize:
            raise StorageError(
                "a chunk outside its file",
                where=at,
                got=f"{chunk!s:.160}",
                want=f"{itemsize} bytes an element inside {file.bytes}",
            )
        ends[box] = chunk.end
    covered = all(end == boxes.numel(box) for box, end in ends.items()) and sum(ends.values()) == numel
    if not boxes.apart(ends) or not (covered or manifest.part):
        raise StorageError(
            "chunks that do not tile their leaf",
            where=f"{where}.chunks",
            got=f"{sum(ends.values())} elements in {len(ends)} boxes",
            want=f"{numel}, by its shape {leaf.shape}, each once"[:200],
        )


def _text(record: dict) -> str:
    """Return JSON with a line for each field, each file and each leaf."""
    fields = {name: json.dumps(value) for name, value in record.items()}
    for field in ("files", "leaves"):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in record[field].items())
        fields[field] = f"{{\n{lines}\n }}"
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {text}" for name, text in fields.items()) + "\n}\n"


def _checksum(record: Any) -> str:
    return checksum(json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode())


def _wrong_fields(record: dict) -> str:
    """Return the first fields of wrong types, with their JSON paths."""
    try:
        _DETAILED.structure(record, Manifest)
    except cattrs.BaseValidationError as error:
        return "\n".join(line[:200] for line in cattrs.transform_error(error)[:5])
    return ""


def _exactly(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is not {kind.__name__}")
    return value


_CONVERTER = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)
_DETAILED = cattrs.Converter(forbid_extra_keys=True)
for _converter in (_CONVERTER, _DETAILED):
    _converter.register_structure_hook(int, _exactly)  # cattrs would turn "3" and 3.7 into 3
    _converter.register_structure_hook(str, _exactly)
