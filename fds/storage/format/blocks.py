"""Read a leaf of a source from beginning to end, in blocks of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from fds.storage.disk.writer import BLOCK
from fds.storage.format.manifest import SavedLeaf
from fds.storage.format.tensors import DTYPES
from fds.storage.source import Source, piece


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
