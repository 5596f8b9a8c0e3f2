"""Reading a source's leaves, whole and in parts."""

import torch
from torch import Tensor

from fds.storage.source import Source, blank_like


def read(source: Source, name: str, piece: int | None = None) -> Tensor:
    """Return a leaf in its shape, read `piece` elements at a time."""
    leaf = source.leaves[name]
    flat = blank_like(leaf, torch.Size(leaf.shape).numel())
    piece = piece or max(flat.numel(), 1)
    for start in range(0, flat.numel(), piece):
        source.read(name, start, flat[start : start + piece])
    return flat.view(leaf.shape)


def read_all(source: Source, piece: int | None = None) -> dict[str, Tensor]:
    return {name: read(source, name, piece) for name in source.leaves}
