"""Sources: leaves by key path, wherever they are stored, and how to read their elements."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import StorageError
from fds.storage.disk.open_folder import OpenFolder
from fds.storage.disk.reader import Files
from fds.storage.format.manifest import Chunk, Manifest, SavedLeaf
from fds.storage.format.tensors import DTYPES, as_bytes


@attrs.frozen(eq=False)
class Source:
    """Leaves under the key paths of a plain state; loading, exporting and comparing read from one of these.

    Attributes:
        where: the path, for messages.
        leaves: dtype and shape by key path; chunks if it is a save.
        read: `read(name, start, out)` fills `out`, a contiguous CPU tensor (length,) of the leaf's dtype, with the
            elements of the flattened leaf from `start` on; an empty `out` only checks that their file is unchanged.
            Raises `StorageError`.
        extra: the user's data that was saved with the state.
        composition: the transforms of the step, if known.
        aliases: for each name of a leaf that has several, the first of them.
    """

    where: str
    leaves: Mapping[str, SavedLeaf]
    read: Callable[[str, int, Tensor], None]
    extra: dict[str, Any] = attrs.field(factory=dict)
    composition: tuple[str, ...] = ()
    aliases: Mapping[str, str] = attrs.field(factory=dict)


def save_source(manifest: Manifest, folders: list[OpenFolder], *, verify: bool = True) -> Source:
    """Return a save as a source, given its manifest and the folders that may hold its files."""
    home = {name: next((f for f in folders if f.has(name)), folders[0]) for name in manifest.files}
    files = Files(home, manifest.files, verify)

    def read(name: str, start: int, out: Tensor) -> None:
        done, end = start, start + out.numel()
        chunks = manifest.leaves[name].chunks
        first = bisect.bisect_right(chunks, start, key=lambda chunk: chunk.start + chunk.length)
        for chunk in itertools.islice(chunks, first, None):
            if chunk.start > done or start < done == end:
                break
            files.check_file(chunk.file)  # before memory is allocated for a chunk
            if done == end:
                break
            high = min(end, chunk.start + chunk.length)
            into = out[done - start : high - start]
            whole = into if len(into) == chunk.length else blank_like(manifest.leaves[name], chunk.length)
            _read_chunk(whole, chunk, name)
            if whole is not into:
                into.copy_(whole[done - chunk.start : high - chunk.start])
            done = high
        if done < end:
            raise _missing_elements(name, done, end, manifest, folders)

    def _read_chunk(out: Tensor, chunk: Chunk, name: str) -> None:
        where = f"{home[chunk.file].path / chunk.file}: {name}"
        files.read(chunk.file, chunk.offset, as_bytes(out), chunk.checksum, where)

    return Source(str(folders[0].path), manifest.leaves, read, manifest.extra, manifest.composition)


def piece(source: Source, name: str, start: int, length: int) -> Tensor:
    """Return elements of a flattened leaf, (length,) on the CPU; the file is checked before memory is allocated.

    Raises `StorageError` for elements that cannot be read.
    """
    source.read(name, start, blank_like(source.leaves[name], 0))
    out = blank_like(source.leaves[name], length)
    source.read(name, start, out)
    return out


def blank_like(leaf: SavedLeaf, length: int) -> Tensor:
    """Return uninitialised CPU memory for `length` elements of a leaf.

    Raises `StorageError` if there is not enough.
    """
    dtype = DTYPES[leaf.dtype]
    try:
        return torch.empty(length, dtype=dtype, device="cpu")
    except RuntimeError as error:
        raise StorageError("there is not enough memory to read this", where=str(leaf)[:80],
                           got=f"{length * dtype.itemsize} bytes at once") from error  # fmt: skip


def _missing_elements(name: str, start: int, end: int, manifest: Manifest, folders: list[OpenFolder]) -> StorageError:
    assert manifest.part is not None, "the chunks of a whole save cover its leaves"
    return StorageError(
        "this part of the save belongs to another rank", where=f"{folders[0].path}: {name}",
        got=f"the part of rank {manifest.part[0]} of {manifest.part[1]}", want=f"elements {start} to {end}",
        hint="use the ranks, ZeRO stage and pipeline of the save, or bring the folders rank0, rank1, ... together",
    )  # fmt: skip
