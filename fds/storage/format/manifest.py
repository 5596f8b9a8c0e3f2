"""The manifest: where each leaf is stored, as frozen records and a JSON text with a checksum."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import operator
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import cattrs

from fds.errors import StorageError
from fds.layout import Box
from fds.media.locks import open_regular
from fds.storage.disk.files import OpenFolder, hint, parse_json, read_small, refusal
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
        got, want = f"{len(text)} bytes", f"at most {MAX_BYTES}"
        raise refusal("a manifest that is too large to be read", str(folder / NAME), got, want, "is `extra` large?")
    with open(folder / NAME, "xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path | OpenFolder) -> Manifest:
    """Read the manifest of a folder, without opening other files.

    Raises `StorageError` for a missing one, invalid JSON, another format version, fields of wrong types (with their
    JSON path), a changed byte, and file names or chunks that a save never writes.
    """
    opened = folder if isinstance(folder, OpenFolder) else OpenFolder.of(folder)
    path = str(opened.path / NAME)
    try:
        text = read_small(NAME, MAX_BYTES, folder=opened.fd)
    except OSError as error:
        raise refusal("a save without a readable manifest", path, str(error.strerror), hint=hint(error)) from error
    return parse_manifest(text, path)


def parse_manifest(text: str | bytes, path: str) -> Manifest:
    """Return the manifest in a text, read from `path`. Raises `StorageError` as `read_manifest` does."""
    try:
        record = parse_json(text)
        written = record.pop("checksum", None) if isinstance(record, dict) else None
        checksum = _checksum(record)
    except (ValueError, RecursionError) as error:
        raise refusal("the manifest is not JSON", path, str(error)[:200]) from error
    if not isinstance(record, dict) or type(record.get("format")) is not int:
        want = f'an object with "format": {FORMAT}'
        raise refusal("this JSON is not a manifest of fds", path, json.dumps(record)[:60], want)
    if record["format"] not in READABLE:
        got = f"format {record['format']}, written by fds {record.get('fds')!s:.40}"
        want, how = f"format {' or '.join(map(str, READABLE))}", "load it with the version that wrote it"
        raise refusal("the manifest has another format version", path, got, want, how)
    try:
        manifest = _CONVERTER.structure(record, Manifest)
    except Exception as error:  # any error that a value of a wrong type causes
        faults = _wrong_fields(record) if len(text) < MAX_DETAILED else f"{type(error).__name__}: {error}"[:200]
        raise refusal("the manifest has wrong fields", path, faults) from None
    if written != checksum:
        want = f"the checksum that it was written with, {written!s:.40}"
        raise refusal("the manifest was changed after it was written", path, checksum, want)
    check_manifest(manifest, where=f"{path}: $.")
    return manifest


def saved_at(folder: Path) -> str:
    """Return the time of a save, reading only the beginning of its manifest. Raises `OSError`, `ValueError`."""
    match = re.search(r'^ "saved": "([^"]{1,40})",$', _head(folder), re.MULTILINE)
    if match is None:
        raise ValueError("the manifest does not begin as one that a save writes")
    return match[1]


def run_of(folder: Path) -> str | None:
    """Return the id of a save's run, from the beginning of its manifest if it is there; None if it cannot be read."""
    with contextlib.suppress(OSError, StorageError):
        match = re.search(r'^ "run": "([0-9a-f]{32})",$', _head(folder), re.MULTILINE)
        return read_manifest(folder).run if match is None else match[1]
    return None


def _head(folder: Path) -> str:
    with open(open_regular(folder / NAME, os.O_RDONLY), "rb") as file:
        return file.read(HEAD_BYTES).decode(errors="replace")


def check_extra(extra: Any) -> dict[str, Any]:
    """Return `extra` if it survives JSON unchanged. Raises `StorageError` with the path of a value that does not."""
    if extra is None:
        return {}
    if not isinstance(extra, dict):
        raise refusal("extra is not a dict", "extra", repr(extra)[:60], "a dict of JSON values")
    try:
        _check_json(extra, "extra")
        return json.loads(json.dumps(extra, allow_nan=False))
    except (ValueError, RecursionError) as error:
        if isinstance(error, StorageError):
            raise
        raise refusal("extra is not JSON", "extra", str(error)) from error


def _check_json(value: Any, path: str, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        got, want = f"more than {MAX_DEPTH} levels", f"at most {MAX_DEPTH}"
        raise refusal("extra is nested too deeply", f"{path[:80]}...", got, want)
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise refusal("extra has a key that JSON would change", path, repr(key)[:60], "text")
            _check_json(part, f"{path}.{key}", depth + 1)
    elif isinstance(value, list):
        for i, part in enumerate(value):
            _check_json(part, f"{path}.{i}", depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise refusal("not a number in JSON", path, repr(value), "a finite one, None or text")
    elif not (value is None or isinstance(value, str | int | float)):
        hint = "use a list for a tuple, x.tolist() for a tensor; tensors of the run belong in the state"
        want = "dicts with text keys, lists, text, numbers, True, False, None"
        raise refusal("extra has a value that JSON would change", path, repr(value)[:60], want, hint)


def check_manifest(manifest: Manifest, where: str = "") -> None:
    """Raise `StorageError` for a run, file names, dtypes or chunks in a manifest that no save writes."""
    if manifest.run is not None and not re.fullmatch("[0-9a-f]{32}", manifest.run):
        got, want = repr(manifest.run)[:80], "null, or 32 digits in hexadecimal"
        raise refusal("not the id of a run", f"{where}run", got, want)
    for name, file in manifest.files.items():
        if not re.fullmatch(r"\w[\w-]{0,99}\.safetensors", name, re.ASCII):
            want = "a plain name, like rank0.safetensors"
            raise refusal("a file name that no save writes", f"{where}files", repr(name)[:80], want)
        if not 8 <= file.bytes <= MAX_INT:
            raise refusal("not a size of a file", f"{where}files[{name!r}].bytes", str(file.bytes))
    for name, leaf in manifest.leaves.items():
        _check_leaf(leaf, manifest, f"{where}leaves[{name!r:.80}]")


def _check_leaf(leaf: SavedLeaf, manifest: Manifest, where: str) -> None:
    shape = leaf.shape
    if leaf.dtype not in DTYPES:
        raise refusal("unknown dtype", f"{where}.dtype", leaf.dtype[:40], ", ".join(DTYPES))
    if any(n < 0 for n in shape):
        raise refusal("a negative size", f"{where}.shape", str(shape)[:80])
    if len(shape) > 64 or is_too_large(shape):
        raise refusal("a shape that is too large for a tensor", f"{where}.shape", str(shape)[:80])
    itemsize, whole = DTYPES[leaf.dtype].itemsize, boxes.whole(shape)
    ends: dict[Box, int] = {}  # by box: how far it is covered
    numel = math.prod(shape)
    for i, chunk in enumerate(leaf.chunks):
        at, file, text = f"{where}.chunks[{i}]", manifest.files.get(chunk.file), f"{chunk!s:.160}"
        if file is None:
            want = f"one of {', '.join(manifest.files)}"[:200]
            raise refusal("a file that the manifest does not list", f"{at}.file", repr(chunk.file)[:80], want)
        box, size = (whole, numel) if chunk.box is None else (chunk.box, boxes.numel(chunk.box))
        if chunk.box is not None and (len(box) != len(shape) or boxes.common(box, whole) != box):
            want = f"[first, number] for each dim of {shape}"[:200]
            raise refusal("a box outside its leaf", f"{at}.box", str(box)[:160], want)
        end = ends.get(box, 0)
        follows = chunk.start >= end if manifest.part else chunk.start == end
        if not follows or chunk.length <= 0 or chunk.end > size:
            want = f"start={end}, length > 0, inside {size} elements"[:200]
            raise refusal("chunks that do not tile their leaf", at, text, want)
        if not 0 <= chunk.offset <= file.bytes - chunk.length * itemsize:
            raise refusal("a chunk outside its file", at, text, f"{itemsize} bytes an element inside {file.bytes}")
        ends[box] = chunk.end
    covered = all(end == boxes.numel(box) for box, end in ends.items()) and sum(ends.values()) == numel
    if not boxes.apart(ends) or not (covered or manifest.part):
        got, want = f"{sum(ends.values())} elements in {len(ends)} boxes", f"{numel}, by its shape {shape}, each once"
        raise refusal("chunks that do not tile their leaf", f"{where}.chunks", got, want[:200])


def is_too_large(shape: Sequence[int]) -> bool:
    """Return whether a shape is too large for a tensor, even if one of its sizes is 0."""
    return any(numel > MAX_INT for numel in itertools.accumulate((max(n, 1) for n in shape), operator.mul))


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
