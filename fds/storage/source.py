"""Sources: leaves by key path, wherever they are stored, and how to read their elements."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import StorageError
from fds.layout import Box
from fds.storage.disk.files import OpenFolder, refusal
from fds.storage.disk.reader import Files
from fds.storage.disk.writer import BLOCK
from fds.storage.format import boxes
from fds.storage.format.manifest import Chunk, Manifest, SavedLeaf
from fds.storage.format.tensors import DTYPES, as_bytes

PAGE = 4096  # bytes: what is consecutive in a file is read by itself where that is so much in the mean


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
        read_box: `read_box(name, box, start, out)` does what `read` does for a box of the leaf, flattened by itself;
            None where all is read through `read`.
        run: the id of the run, if it is a save.
        void: why the numbers of some leaves say nothing to a state of this version, by name.
    """

    where: str
    leaves: Mapping[str, SavedLeaf]
    read: Callable[[str, int, Tensor], None]
    extra: dict[str, Any] = attrs.field(factory=dict)
    composition: tuple[str, ...] = ()
    aliases: Mapping[str, str] = attrs.field(factory=dict)
    read_box: Callable[[str, Box, int, Tensor], None] | None = None
    run: str | None = None
    void: Mapping[str, str] = attrs.field(factory=dict)

    def fill(self, name: str, box: Box | None, start: int, out: Tensor) -> None:
        """Fill `out` as `read` does with elements of a flattened leaf, or of a box of it."""
        if box is None:
            self.read(name, start, out)
        elif self.read_box is not None:
            self.read_box(name, box, start, out)
        elif out.numel():
            leaf = self.leaves[name]
            wanted, most = boxes.rectangles(box, start, start + out.numel()), BLOCK // out.element_size()
            runs = list(boxes.runs(leaf.shape, wanted))
            if out.nbytes >= len(runs) * PAGE:
                for first, at, length in runs:
                    self.read(name, first, out[at : at + length])
                return
            low, high = _extent(leaf, wanted)
            for first in range(low, high, most):
                end = min(high, first + most)
                rectangles = boxes.rectangles(boxes.whole(leaf.shape), first, end)
                if boxes.shares(wanted, rectangles):
                    block = blank_like(leaf, end - first)
                    self.read(name, first, block)
                    boxes.copy_common(out, wanted, block, rectangles)


@attrs.frozen
class PlacedChunk:
    """A chunk, the rectangles of those of its elements that no chunk before it has, and their extent in the leaf."""

    chunk: Chunk
    skipped: int  # elements at its beginning that the chunk before it has
    rectangles: list[boxes.Placed]
    low: int
    high: int


def save_source(manifest: Manifest, folders: list[OpenFolder], *, verify: bool = True) -> Source:
    """Return a save as a source, given its manifest and the folders that may hold its files."""
    home = {name: next((f for f in folders if f.has(name)), folders[0]) for name in manifest.files}
    boxed = frozenset(n for n, leaf in manifest.leaves.items() if any(c.box is not None for c in leaf.chunks))
    saved = _Saved(manifest, folders, Files(home, manifest.files, verify), boxed)
    units = {"slots.kept.": "of sums of gradients, whatever a batch weighed", "opt.outer_kept.": "of a share of a mean"}
    old = units if manifest.format < 4 else {}
    return Source(
        str(folders[0].path),
        manifest.leaves,
        saved.read,
        manifest.extra,
        manifest.composition,
        read_box=saved.read_box,
        run=manifest.run,
        void={
            name: f"format {manifest.format}: {unit}"
            for name in manifest.leaves
            for slot, unit in old.items()
            if name.startswith(slot)
        },
    )


@attrs.frozen(eq=False)
class _Saved:
    """How elements are read from the chunks of a save."""

    manifest: Manifest
    folders: list[OpenFolder]
    files: Files
    boxed: frozenset[str]  # leaves whose chunks are of boxes
    placed: dict[str, list[PlacedChunk]] = attrs.field(factory=dict, init=False)  # of leaves of which a box was read

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Read elements of a flattened leaf."""
        leaf = self.manifest.leaves[name]
        if name in self.boxed:
            self.read_box(name, boxes.whole(leaf.shape), start, out)
            return
        done, end = start, start + out.numel()
        first = bisect.bisect_right(leaf.chunks, start, key=lambda chunk: chunk.end)
        for chunk in itertools.islice(leaf.chunks, first, None):
            if chunk.start > done or start < done == end:
                break
            self.files.check_file(chunk.file)  # before memory is allocated for a chunk
            if done == end:
                break
            high = min(end, chunk.end)
            into = out[done - start : high - start]
            whole = into if len(into) == chunk.length else blank_like(leaf, chunk.length)
            self._read(chunk, name, whole)
            if whole is not into:
                into.copy_(whole[done - chunk.start : high - chunk.start])
            done = high
        if done < end:
            raise self._missing(name, f"elements {done} to {end}")

    def read_box(self, name: str, box: Box, start: int, out: Tensor) -> None:
        """Read elements of a flattened box of a leaf. Chunks that have none of them are not read."""
        leaf, length, count = self.manifest.leaves[name], out.numel(), 0
        if name not in self.placed:
            self.placed[name] = placed_chunks(leaf)
        wanted = boxes.rectangles(box, start, start + max(length, 1))
        low, high = _extent(leaf, wanted)
        for placed in self.placed[name]:
            if placed.high <= low or high <= placed.low or not boxes.shares(wanted, placed.rectangles):
                continue
            self.files.check_file(placed.chunk.file)
            if length:
                whole = blank_like(leaf, placed.chunk.length)
                self._read(placed.chunk, name, whole)
                count += boxes.copy_common(out, wanted, whole[placed.skipped :], placed.rectangles)
        if count < length:
            raise self._missing(name, f"elements {start} to {start + length} of {box}")

    def _read(self, chunk: Chunk, name: str, out: Tensor) -> None:
        where = f"{self.files.folders[chunk.file].path / chunk.file}: {name}"
        self.files.read(chunk.file, chunk.offset, as_bytes(out), chunk.checksum, where)

    def _missing(self, name: str, want: str) -> StorageError:
        assert self.manifest.part is not None, "the chunks of a whole save cover its leaves"
        return StorageError(
            "this part of the save belongs to another rank",
            where=f"{self.folders[0].path}: {name}",
            got=f"the part of rank {self.manifest.part[0]} of {self.manifest.part[1]}",
            want=want,
            hint="use the ranks and axes of the save, or bring the folders rank0, rank1, ... together",
        )


def placed_chunks(leaf: SavedLeaf) -> list[PlacedChunk]:
    """Return the chunks of a leaf, and where their elements are."""
    placed, ends = [], dict[Box, int]()
    for chunk in leaf.chunks:
        box = boxes.whole(leaf.shape) if chunk.box is None else chunk.box
        skipped = max(ends.get(box, 0) - chunk.start, 0)
        if skipped < chunk.length:
            ends[box] = chunk.end
            rectangles = boxes.rectangles(box, chunk.start + skipped, chunk.end)
            placed.append(PlacedChunk(chunk, skipped, rectangles, *_extent(leaf, rectangles)))
    return placed


def _extent(leaf: SavedLeaf, placed: list[boxes.Placed]) -> tuple[int, int]:
    """Return the index in the flattened leaf of the first element of rectangles, and of the one after their last."""
    edges = [boxes.extent(leaf.shape, rectangle) for _, rectangle in placed]
    return min(low for low, _ in edges), max(high for _, high in edges)


def piece(source: Source, name: str, start: int, length: int, box: Box | None = None) -> Tensor:
    """Return elements of a flattened leaf, or box of it, (length,) on the CPU.

    The file is checked before memory is allocated.

    Raises `StorageError` for elements that cannot be read.
    """
    source.fill(name, box, start, blank_like(source.leaves[name], 0))
    out = blank_like(source.leaves[name], length)
    source.fill(name, box, start, out)
    return out


def blank_like(leaf: SavedLeaf, length: int) -> Tensor:
    """Return uninitialised CPU memory for `length` elements of a leaf.

    Raises `StorageError` if there is not enough.
    """
    dtype = DTYPES[leaf.dtype]
    try:
        return torch.empty(length, dtype=dtype, device="cpu")
    except RuntimeError as error:
        got = f"{length * dtype.itemsize} bytes at once"
        raise refusal("there is not enough memory to read this", str(leaf)[:80], got) from error


def spans(leaf: SavedLeaf) -> Iterator[tuple[int, int]]:
    """Yield (start, length), in elements, of pieces that cover a leaf: its chunks, so that each is read once.

    Elements without a chunk, and a leaf whose chunks are of boxes, come in pieces of at most `BLOCK` bytes.
    """
    end, most = 0, BLOCK // DTYPES[leaf.dtype].itemsize
    kept = [] if any(c.box is not None for c in leaf.chunks) else leaf.chunks
    for start, length in [*((c.start, c.length) for c in kept), (math.prod(leaf.shape), 0)]:
        yield from ((i, min(most, start - i)) for i in range(end, start, most))
        first, after = max(end, start), start + length  # chunks of several ranks' parts may overlap
        if first < after:
            yield first, after - first
        end = max(end, after)


def blocks(source: Source, name: str) -> Iterator[tuple[int, Tensor]]:
    """Yield index of the first element, and elements (length,) on the CPU, of pieces that cover a leaf, in order.

    Raises `StorageError` for elements that cannot be read.
    """
    for start, length in spans(source.leaves[name]):
        yield start, piece(source, name, start, length)
